// CUDA on a CPU, as far as rope.cu and norm_rope.cu need it: a grid is a loop, a warp is 32 fibers
// that meet at every shuffle. The compiler's sanitizers see each access of each lane.
#pragma once

#include <math.h>
#include <sanitizer/common_interface_defs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__ inline  // what no launch asks for costs no machine code
#undef __device__
#define __device__
#undef __shared__
#define __shared__ static

using std::max;
using std::min;

struct Dim3 {
  unsigned x, y, z;
};

inline Dim3 threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline unsigned atomicOr(unsigned* word, unsigned bits) {
  const unsigned old = *word;
  *word |= bits;
  return old;
}

inline int __ffs(unsigned x) { return __builtin_ffs(x); }
// Built with -ffp-contract=off, so that each of these rounds once.
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }

namespace host {

constexpr int kLanes = 32;
constexpr size_t kStack = 512 * 1024;

[[noreturn]] inline void fail(const char* text) {
  fprintf(stderr, "host_cuda: %s in block (%u, %u, %u)\n", text, blockIdx.x, blockIdx.y,
          blockIdx.z);
  abort();
}

// A lane. `meetings` counts the shuffles it has been through: all lanes of a warp must agree.
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  Dim3 thread;
  unsigned meetings;
  bool is_done;
  void* fake_stack;
};

inline Fiber lanes[kLanes];
inline ucontext_t outside;
inline const void* outside_stack;
inline size_t outside_size;
inline int current;
inline uint64_t mailbox[2][kLanes];  // of even and odd meetings: a slow lane still reads the last
inline void (*body)();

inline void enter(Fiber& to, void** keep) {
  threadIdx = to.thread;
  __sanitizer_start_switch_fiber(keep, to.stack.data(), to.stack.size());
}

// Let the next lane run until it stands where this one stands.
inline void meet() {
  Fiber& me = lanes[current];
  const int next = (current + 1) % kLanes;
  ++me.meetings;
  if (lanes[next].is_done) fail("a lane left before a shuffle of all lanes");
  current = next;
  enter(lanes[next], &me.fake_stack);
  swapcontext(&me.context, &lanes[next].context);
  __sanitizer_finish_switch_fiber(me.fake_stack, nullptr, nullptr);
  for (const Fiber& other : lanes) {
    if (other.meetings < me.meetings) fail("lanes are at different shuffles");
  }
}

// The first lane to finish starts the next, and so on; the last one returns to the outside.
inline void lane_main() {
  __sanitizer_finish_switch_fiber(nullptr, &outside_stack, &outside_size);
  body();
  Fiber& me = lanes[current];
  me.is_done = true;
  if (current == kLanes - 1) {
    __sanitizer_start_switch_fiber(nullptr, outside_stack, outside_size);
    setcontext(&outside);
  }
  ++current;
  enter(lanes[current], nullptr);
  setcontext(&lanes[current].context);
}

inline void run_warp(unsigned first_thread) {
  for (int i = 0; i < kLanes; ++i) {
    Fiber& lane = lanes[i];
    lane.thread = {first_thread + i, 0, 0};
    lane.meetings = 0;
    lane.is_done = false;
    lane.fake_stack = nullptr;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = lane.stack.size();
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, lane_main, 0);
  }
  current = 0;
  void* fake_stack = nullptr;
  enter(lanes[0], &fake_stack);
  swapcontext(&outside, &lanes[0].context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  for (const Fiber& lane : lanes) {
    if (!lane.is_done || lane.meetings != lanes[0].meetings) fail("a lane missed a shuffle");
  }
}

// A kernel cut where its blocks meet: all warps of a block do one phase before any does the next.
// Within a phase they run one after another, for none waits for another.
inline void launch(std::initializer_list<void (*)()> phases, Dim3 grid, unsigned threads) {
  gridDim = grid;
  blockDim = {threads, 1, 1};
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        for (void (*phase)() : phases) {
          body = phase;
          for (unsigned first = 0; first < threads; first += kLanes) run_warp(first);
        }
      }
    }
  }
}

// kernel<<<grid, threads>>>
inline void launch(void (*kernel)(), Dim3 grid, unsigned threads) {
  launch({kernel}, grid, threads);
}

}  // namespace host

inline float __shfl_sync(unsigned mask, float x, int from) {
  if (mask != 0xffffffffu) host::fail("a shuffle of some lanes");
  const int parity = host::lanes[host::current].meetings % 2;
  memcpy(&host::mailbox[parity][host::current], &x, sizeof x);
  host::meet();
  float found;
  memcpy(&found, &host::mailbox[parity][from % host::kLanes], sizeof found);
  return found;
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  if (mask != 0xffffffffu) host::fail("a ballot of some lanes");
  const int parity = host::lanes[host::current].meetings % 2;
  host::mailbox[parity][host::current] = vote;
  host::meet();
  unsigned votes = 0;
  for (int i = 0; i < host::kLanes; ++i) {
    votes |= static_cast<unsigned>(host::mailbox[parity][i] & 1) << i;
  }
  return votes;
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline void __syncwarp() { host::meet(); }
inline void __syncthreads() { host::fail("a block that meets is launched phase by phase"); }
