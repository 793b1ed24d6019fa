// What norm_rope.cu needs of CUDA beyond rope.cu.
#pragma once

#undef __shared__
#define __shared__ static

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline void __syncthreads() { host::fail("a block meets in two halves here, not by itself"); }

namespace host {

// Blocks that meet once: every warp does its first half before any does its second.
inline void launch_halves(void (*first)(), void (*second)(), Dim3 grid, unsigned threads) {
  gridDim = grid;
  blockDim = {threads, 1, 1};
  blockIdx = {0, 0, 0};
  for (; blockIdx.x < grid.x; ++blockIdx.x) {
    for (void (*half)() : {first, second}) {
      body = half;
      for (unsigned thread = 0; thread < threads; thread += kLanes) run_warp(thread);
    }
  }
}

}  // namespace host
