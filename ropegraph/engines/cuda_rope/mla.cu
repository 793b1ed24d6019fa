// Key and value of multi-latent attention from kv [b, h, s, n + v] and k_rope [b, 1, s, r]:
//   key = kv[:n] and, for every head, the r turned channels of k_rope; value = kv[n:].
// Pairs (2i, 2i + 1) are read, halves are written, each written channel has its own table column.
//
// Nearly all of it is copying. A warp takes a few heads of a token, or of a few tokens: it turns
// the shared channels once, in registers, and stores them for all its heads. The adjoint gives one
// warp of each token the sum over all heads. MXFP8 goes by tiles of 32 tokens and 8 vectors, which
// a warp holds in registers: blocks along channels and along tokens both lie in it. A tile is cut
// out of the channels of several heads as they follow each other, copied and turned ones alike, so
// that rows of heads side by side are written in whole lines.
//
// Specialised at build by macros:
//   MLA_MODE            0: forward, 1: forward to MXFP8, 2: the adjoint
//   MLA_DATA, MLA_TABLE element types of data and tables
//   MLA_VEC             elements a lane moves at once in mla_vector; 1 leaves mla_any alone
//   MLA_FLIGHT          loads in flight a lane: MLA_TOKENS tokens of so many heads
//   MLA_SUM_FLIGHT      the same where heads are summed
//   MLA_TOKENS          tokens a warp of mla_vector takes, 1, 2 or 4
//   MLA_WARPS           warps a block
//   MLA_RESIDENT        warps an SM at least; 0: as the compiler likes
//   MLA_TURN            MXFP8 by vectors: channels that turn
//   MLA_SCALES          MXFP8 by vectors: scales of a token in the heads of a block
//
// mla_any takes every base, stride and width. mla_vector takes what the host found to be aligned.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// One rounding of the exact sum. A CPU has no such instruction.
#ifndef MLA_FMA_BF16
#define MLA_FMA_BF16(x, y, z) __hfma(x, y, z)
#endif

namespace {

constexpr int kLanes = 32;
constexpr unsigned kAll = 0xffffffffu;

// A tensor [b, h, s, d]. Strides count elements, in 64 bits: a large outer stride takes an offset
// past 2^31 in a small tensor. base: null for a tensor that nobody gave or wants; of a pointer the
// compiler knows that it leads to global memory.
struct Place {
  char* base;
  long long b, h, s, d;
};

// A table [s_max, 1, 1, r].
struct Table {
  const MLA_TABLE* base;
  long long s, d;
};

// Key or value. MXFP8 writes the other three as well, and row is quantized by rows.
struct Side {
  Place row, row_scale, column, column_scale;
};

// The adjoint reads sides, key and value, and writes kv and k_rope.
// A warp takes part_heads heads, or a block does, where MXFP8 goes by vectors. Its work is one of
// `shares` of a tile of tokens. They go through the tiles of a group first, then through shares,
// then through the batch_x batch entries that lie along grid.x; grid.y and grid.z have the others.
struct Params {
  Place kv, k_rope;
  Side side[2];
  Table cos, sin;
  // 2^64 / n, rounded up, 0 for 1: n is shares, batch_x; MXFP8: the blocks along the channels of a
  // head, the channels of its key, of its value.
  unsigned long long shares_magic, batch_magic, each_magic, key_magic, value_magic;
  int batch, heads, tokens, nope, v, half;
  int part_heads, shares, batch_x, log_group;
};

// x / divisor, without the long way of a division. magic is 2^64 / divisor, rounded up; 0 for 1.
__device__ inline unsigned quotient(unsigned x, unsigned long long magic) {
  return magic ? static_cast<unsigned>(__umul64hi(x, magic)) : x;
}

template <typename T>
__device__ inline T* at(const Place& place, long long b, long long h, long long s, long long d) {
  const long long element = b * place.b + h * place.h + s * place.s + d * place.d;
  return reinterpret_cast<T*>(place.base + element * static_cast<long long>(sizeof(T)));
}

// ---- arithmetic ---------------------------------------------------------------------------------

// fp32, rounded to nearest even. CuPy compiles with -ftz=true whatever its callers ask for; what is
// written in PTX keeps subnormal numbers all the same.
#ifdef __CUDA_ARCH__
#define MLA_PTX(op, ...) \
  float z; \
  asm(op : "=f"(z) : __VA_ARGS__); \
  return z;
__device__ inline float times(float x, float y) {
  MLA_PTX("mul.rn.f32 %0, %1, %2;", "f"(x), "f"(y))
}
__device__ inline float plus(float x, float y) {
  MLA_PTX("add.rn.f32 %0, %1, %2;", "f"(x), "f"(y))
}
__device__ inline float fused(float x, float y, float more) {
  MLA_PTX("fma.rn.f32 %0, %1, %2, %3;", "f"(x), "f"(y), "f"(more))
}
#else
inline float times(float x, float y) { return __fmul_rn(x, y); }
inline float plus(float x, float y) { return __fadd_rn(x, y); }
inline float fused(float x, float y, float more) { return __fmaf_rn(x, y, more); }
#endif
__device__ inline float minus(float x) {
  return __uint_as_float(__float_as_uint(x) ^ 0x80000000u);
}

// ---- elements -----------------------------------------------------------------------------------

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

// What moves in one instruction, by size.
template <int Bytes>
struct Word;
template <>
struct Word<1> { using Type = unsigned char; };
template <>
struct Word<2> { using Type = unsigned short; };
template <>
struct Word<4> { using Type = unsigned; };
template <>
struct Word<8> { using Type = uint2; };
template <>
struct Word<16> { using Type = uint4; };

template <typename T>
__device__ inline float as_float(T x) {
  if constexpr (kIsSame<T, float>) return x;
  else if constexpr (kIsSame<T, __nv_bfloat16>) return __bfloat162float(x);
  else return __half2float(x);
}

template <typename T>
__device__ inline T rounded(float x) {
  if constexpr (kIsSame<T, float>) return x;
  else if constexpr (kIsSame<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else return __float2half_rn(x);
}

// V elements in registers.
template <typename T, int V>
struct Vec {
  static constexpr int kBytes = V * int(sizeof(T));
  static constexpr int kWordBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = kBytes / kWordBytes;
  using W = typename Word<kWordBytes>::Type;
  W word[kWords];

  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = reinterpret_cast<const W*>(from)[i];
  }

  __device__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<W*>(to)[i] = word[i];
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = W{};
  }

  __device__ T* element() { return reinterpret_cast<T*>(word); }
  __device__ const T* element() const { return reinterpret_cast<const T*>(word); }
  __device__ float get(int i) const { return as_float(element()[i]); }
  __device__ void set(int i, T x) { element()[i] = x; }
};

// V columns of a table row.
template <int V>
__device__ inline Vec<MLA_TABLE, V> columns(const Table& table, int token, int column) {
  Vec<MLA_TABLE, V> found;
  found.load(table.base + token * table.s + column * (V == 1 ? table.d : 1));
  return found;
}

// Consecutive channels of k_rope, [2 i, 2 i + 2 V).
template <int V>
struct Pairs {
  Vec<MLA_DATA, V> low, high;

  __device__ void load(const Params& p, int b, int token, int i) {
    const MLA_DATA* from = at<MLA_DATA>(p.k_rope, b, 0, token, 0);
    const long long d = V == 1 ? p.k_rope.d : 1;
    low.load(from + 2 * i * d);
    high.load(from + (2 * i + V) * d);
  }
  __device__ MLA_DATA get(int k) const {
    return k < V ? low.element()[k] : high.element()[k - V];
  }
};

// ---- the rotation -------------------------------------------------------------------------------

// first: x1 c - x2 s, else x1 s + x2 c. The product with x2 is rounded, and the sum once more: in
// bf16 if data and tables are, else in fp32 and then to the type of the data.
template <typename D, typename T>
__device__ inline D turned(bool first, D x1, D x2, T c, T s) {
  const T one = first ? c : s, two = first ? s : c;
  if constexpr (kIsSame<D, __nv_bfloat16> && kIsSame<T, __nv_bfloat16>) {
    // In fp32 the product of two bf16 numbers is exact.
    const float product = as_float(rounded<__nv_bfloat16>(times(as_float(x2), as_float(two))));
    return MLA_FMA_BF16(x1, one, rounded<__nv_bfloat16>(first ? minus(product) : product));
  } else {
    const float product = times(as_float(x2), as_float(two));
    return rounded<D>(fused(as_float(x1), as_float(one), first ? minus(product) : product));
  }
}

// Turned channels [channel, channel + V) of a token, which lie in one half of them.
template <int V>
__device__ inline Vec<MLA_DATA, V> turned(const Params& p, int b, int token, int channel) {
  const bool first = channel < p.half;
  Pairs<V> x;
  x.load(p, b, token, first ? channel : channel - p.half);
  const Vec<MLA_TABLE, V> cos = columns<V>(p.cos, token, channel);
  const Vec<MLA_TABLE, V> sin = columns<V>(p.sin, token, channel);
  Vec<MLA_DATA, V> y;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    y.set(k, turned(first, x.get(2 * k), x.get(2 * k + 1), cos.element()[k], sin.element()[k]));
  }
  return y;
}

// ---- forward and adjoint: a token and a few heads -----------------------------------------------

// How the lanes are dealt out over rows of `vectors` vectors: lane -> row and vector of it.
struct Seat {
  int lanes, rows, row, vec;

  __device__ Seat(int vectors, int lane) {
    lanes = max(1, min(kLanes, vectors));
    rows = kLanes / lanes;
    row = lane / lanes;
    vec = lane - row * lanes;
    if (row >= rows) vec = vectors;  // nothing for this lane
  }
};

// Which tile of tokens of which batch entry, and which share of it, a warp or a block has.
struct Work {
  int b, tile, share;

  __device__ Work(const Params& p, unsigned index) {
    const unsigned shares = index >> p.log_group, entries = quotient(shares, p.shares_magic);
    const unsigned group = quotient(entries, p.batch_magic);
    share = shares - entries * p.shares;
    tile = (group << p.log_group) + (index - (shares << p.log_group));
    b = p.batch_x > 1 ? entries - group * p.batch_x : blockIdx.z * gridDim.y + blockIdx.y;
  }

  __device__ bool is_there(const Params& p, int tile_tokens) const {
    return b < p.batch && tile * tile_tokens < p.tokens;
  }
};

__device__ inline Work work_of_warp(const Params& p) {
  return Work(p, blockIdx.x * MLA_WARPS + threadIdx.x / kLanes);
}

// Copy heads [from, to) of T tokens between kv and key and value, and do `meanwhile` while the
// first loads are on their way. to_kv: the direction. A source that is missing counts as zero.
template <int V, int T, bool to_kv, typename Meanwhile>
__device__ inline void copy_heads(const Params& p, int b, int token, int from, int to, int lane,
                                  Meanwhile meanwhile) {
  constexpr int kHeads = MLA_FLIGHT / T;
  const int vectors = (p.nope + p.v) / V;
  const Seat seat(vectors, lane);
  bool is_first = true;
  for (int vec = seat.vec; vec < vectors || is_first; vec += seat.lanes) {
    const int channel = vec * V;
    const bool in_value = channel >= p.nope;
    const Place& side = p.side[in_value].row;
    const bool is_wanted = vec < vectors && (to_kv ? p.kv.base : side.base) != nullptr;
    const bool is_given = (to_kv ? side.base : p.kv.base) != nullptr;
    const int own = in_value ? channel - p.nope : channel;
    const Place& source = to_kv ? side : p.kv;
    const Place& target = to_kv ? p.kv : side;
    int head = from + seat.row;
    const MLA_DATA* x = at<MLA_DATA>(source, b, head, token, to_kv ? own : channel);
    MLA_DATA* y = at<MLA_DATA>(target, b, head, token, to_kv ? channel : own);
    const long long x_step = seat.rows * source.h, y_step = seat.rows * target.h;
    const int end = is_wanted ? to : from;
    do {
      Vec<MLA_DATA, V> data[kHeads][T];
#pragma unroll
      for (int f = 0; f < kHeads; ++f) {
#pragma unroll
        for (int t = 0; t < T; ++t) {
          data[f][t].clear();
          if (head + f * seat.rows < end && (T == 1 || token + t < p.tokens) && is_given) {
            data[f][t].load(x + f * x_step + t * source.s);
          }
        }
      }
      if (is_first) meanwhile();
      is_first = false;
#pragma unroll
      for (int f = 0; f < kHeads; ++f) {
#pragma unroll
        for (int t = 0; t < T; ++t) {
          if (head + f * seat.rows < end && (T == 1 || token + t < p.tokens)) {
            data[f][t].store(y + f * y_step + t * target.s);
          }
        }
      }
      head += kHeads * seat.rows;
      x += kHeads * x_step;
      y += kHeads * y_step;
    } while (head < end);
  }
}

// The turned channels of T tokens, made once, for heads [from, to).
template <int V, int T>
__device__ inline void turn_heads(const Params& p, int b, int token, int from, int to, int lane) {
  const Place& key = p.side[0].row;
  const int vectors = 2 * p.half / V;
  const Seat seat(vectors, lane);
  if (key.base == nullptr) return;
  // Rows of lanes take tokens first, then heads.
  const int log = T >= 4 && seat.rows >= 4 ? 2 : T >= 2 && seat.rows >= 2 ? 1 : 0;
  const int first = seat.row >> log, step = seat.rows >> log;
  if (first >= step) return;
  const int last = min(T, p.tokens - token);
  for (int t = seat.row & ((1 << log) - 1); t < last; t += 1 << log) {
    for (int vec = seat.vec; vec < vectors; vec += seat.lanes) {
      const Vec<MLA_DATA, V> y = turned<V>(p, b, token + t, vec * V);
      for (int head = from + first; head < to; head += step) {
        y.store(at<MLA_DATA>(key, b, head, token + t, p.nope + vec * V));
      }
    }
  }
}

template <int V, int T>
__device__ inline void forward(const Params& p) {
  const int lane = threadIdx.x % kLanes;
  const Work work = work_of_warp(p);
  const int token = work.tile * T;
  if (!work.is_there(p, T)) return;
  const int from = work.share * p.part_heads, to = min(from + p.part_heads, p.heads);
  copy_heads<V, T, false>(p, work.b, token, from, to, lane,
                          [&] { turn_heads<V, T>(p, work.b, token, from, to, lane); });
}

// Turn back V pairs from i on, given the sums over the heads of both halves.
template <int V>
__device__ inline void turn_back(const Params& p, int b, int token, int i, const float (&g1)[V],
                                 const float (&g2)[V]) {
  const Vec<MLA_TABLE, V> cos1 = columns<V>(p.cos, token, i);
  const Vec<MLA_TABLE, V> sin1 = columns<V>(p.sin, token, i);
  const Vec<MLA_TABLE, V> cos2 = columns<V>(p.cos, token, p.half + i);
  const Vec<MLA_TABLE, V> sin2 = columns<V>(p.sin, token, p.half + i);
  Vec<MLA_DATA, V> low, high;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const MLA_DATA x1 = rounded<MLA_DATA>(fused(g1[k], cos1.get(k), times(g2[k], sin2.get(k))));
    const MLA_DATA x2 = rounded<MLA_DATA>(fused(g2[k], cos2.get(k), minus(times(g1[k], sin1.get(k)))));
    if (2 * k < V) low.set(2 * k, x1);
    else high.set(2 * k - V, x1);
    if (2 * k + 1 < V) low.set(2 * k + 1, x2);
    else high.set(2 * k + 1 - V, x2);
  }
  low.store(at<MLA_DATA>(p.k_rope, b, 0, token, 2 * i));
  high.store(at<MLA_DATA>(p.k_rope, b, 0, token, 2 * i + V));
}

// The sum over all heads of V turned channels from `channel` on, of every rows-th head.
template <int V>
__device__ inline void add_heads(const Params& p, int b, int token, int channel, int first,
                                 int rows, float (&sum)[V]) {
  const MLA_DATA* x = at<MLA_DATA>(p.side[0].row, b, first, token, p.nope + channel);
  const long long step = rows * p.side[0].row.h;
  for (int head = first; head < p.heads; head += MLA_SUM_FLIGHT * rows) {
    Vec<MLA_DATA, V> data[MLA_SUM_FLIGHT];
#pragma unroll
    for (int f = 0; f < MLA_SUM_FLIGHT; ++f) {
      data[f].clear();
      if (head + f * rows < p.heads) data[f].load(x + f * step);
    }
#pragma unroll
    for (int f = 0; f < MLA_SUM_FLIGHT; ++f) {
#pragma unroll
      for (int k = 0; k < V; ++k) sum[k] = plus(sum[k], data[f].get(k));
    }
    x += MLA_SUM_FLIGHT * step;
  }
}

// dK_rope of a token.
template <int V>
__device__ inline void sum_heads(const Params& p, int b, int token, int lane) {
  if (p.k_rope.base == nullptr) return;
  const bool is_given = p.side[0].row.base != nullptr;
  if constexpr (V == 1) {
    for (int i = lane; i < p.half; i += kLanes) {
      float g1[1] = {0.0f}, g2[1] = {0.0f};
      if (is_given) {
        add_heads<1>(p, b, token, i, 0, 1, g1);
        add_heads<1>(p, b, token, p.half + i, 0, 1, g2);
      }
      turn_back<1>(p, b, token, i, g1, g2);
    }
  } else {
    // All vectors of a head have a lane: the host takes mla_any where there are more.
    const int vectors = 2 * p.half / V;
    const Seat seat(vectors, lane);
    float own[V], g1[V], g2[V];
#pragma unroll
    for (int k = 0; k < V; ++k) own[k] = 0.0f;
    if (is_given && seat.vec < vectors) {
      add_heads<V>(p, b, token, seat.vec * V, seat.row, seat.rows, own);
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      float total = own[k];
      for (int row = 1; row < seat.rows; ++row) {
        total = plus(total, __shfl_sync(kAll, own[k], (lane + row * seat.lanes) % kLanes));
      }
      g1[k] = total;
      g2[k] = __shfl_sync(kAll, total, (lane + vectors / 2) % kLanes);
    }
    if (seat.row == 0 && seat.vec < vectors / 2) {
      turn_back<V>(p, b, token, seat.vec * V, g1, g2);
    }
  }
}

// The sums come first: they take longest.
template <int V, int T>
__device__ inline void backward(const Params& p) {
  const int lane = threadIdx.x % kLanes;
  const Work work = work_of_warp(p);
  int token = work.tile * T;
  if (!work.is_there(p, T)) return;
  if (work.share < T) {
    token += work.share;
    if (token < p.tokens) sum_heads<V>(p, work.b, token, lane);
    return;
  }
  const int from = (work.share - T) * p.part_heads, to = min(from + p.part_heads, p.heads);
  copy_heads<V, T, true>(p, work.b, token, from, to, lane, [] {});
}

// ---- MXFP8 --------------------------------------------------------------------------------------

#if MLA_MODE == 1

// An E4M3 number, rounded to nearest even; 448 for what is larger, 0x7f for every NaN.
__device__ inline unsigned e4m3(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fu;
  if (size >= __float_as_uint(448.0f)) return sign | 0x7eu;
  if (size < __float_as_uint(0.015625f)) {
    // Subnormal numbers are multiples of 2^-9, the last place of 2^14.
    return sign | __float_as_uint(__uint_as_float(size) + 16384.0f) & 0xfu;
  }
  return sign | ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (127 - 7) * 8;
}

// Two of them, the first in the low byte.
__device__ inline unsigned e4m3(float x, float y) {
#if __CUDA_ARCH__ >= 890
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(y), "f"(x));
  return both;
#else
  return e4m3(x) | e4m3(y) << 8;
#endif
}

__device__ inline float low_half(unsigned both) { return __uint_as_float(both << 16); }
__device__ inline float high_half(unsigned both) { return __uint_as_float(both & 0xffff0000u); }

__device__ inline unsigned larger(unsigned x, unsigned y) {
  // Of a number and NaN it is the number.
  const __nv_bfloat162 found = __hmax2(reinterpret_cast<const __nv_bfloat162&>(x),
                                       reinterpret_cast<const __nv_bfloat162&>(y));
  return reinterpret_cast<const unsigned&>(found);
}

__device__ inline unsigned size_of(unsigned both) { return both & 0x7fff7fffu; }

// The same of sizes. Signs of the result mean nothing.
__device__ inline unsigned larger_size(unsigned x, unsigned y) {
#if __CUDA_ARCH__ >= 860
  unsigned found;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(x), "r"(y));
  return found;
#else
  return larger(size_of(x), size_of(y));
#endif
}

// From the largest sizes of two blocks, as bf16, their scales, E8M0 of size / 448 rounded up, as
// 128 (8 + scale). 8 + scale is the exponent, and one more where the mantissa is above that of
// 448 = 1.75 2^8. Inf has scale 254: it gets half a step less, so that inverse_low is right.
__device__ inline unsigned steps_of(unsigned sizes) {
  const unsigned usual = larger(sizes + 0x001f001fu & 0xff80ff80u, 0x04000400u);
  return usual + (sizes + 0x00800080u >> 15 & 0x00010001u) * (0x82c0u - 0x7f80u);
}

__device__ inline unsigned scales_of(unsigned steps) {
  return steps - 0x03c003c0u >> 7 & 0x00ff00ffu;
}

// 2^(127 - scale), below the normal numbers for 254.
__device__ inline float inverse_low(unsigned steps) {
  return __uint_as_float(0x83000000u - (steps << 16));
}
__device__ inline float inverse_high(unsigned steps) {
  return __uint_as_float(0x83000000u - (steps & 0xffff0000u));
}

constexpr int kBlock = 32;  // elements that share a scale
constexpr int kAcross = 8;  // lanes along the channels of a tile, a vector each
constexpr int kRows = 8;    // tokens a lane holds: lane / 8 + 4 i

// What the warps of a block share: the channels that turn, which are those of every head, and the
// scales of rows. Those go out together: to the L2 a store of a few bytes is as much work as one of
// a line.
template <int V>
struct Shared {
  Vec<__nv_bfloat16, V> turned[kBlock][MLA_TURN < V ? 1 : MLA_TURN / V];
  alignas(4) unsigned char scale[kBlock][MLA_SCALES];
};

// Turn the channels of 32 tokens.
template <int V>
__device__ inline void turn_tokens(const Params& p, const Work& work, Shared<V>& shared) {
  constexpr int kHalf = V / 2, kHalves = MLA_TURN / kHalf;
#pragma unroll 1
  for (int i = threadIdx.x; i < kBlock * kHalves; i += MLA_WARPS * kLanes) {
    const int token = i / max(kHalves, 1), nth = i - token * kHalves;
    const Vec<__nv_bfloat16, kHalf> y =
        turned<kHalf>(p, work.b, work.tile * kBlock + token, nth * kHalf);
    y.store(shared.turned[token][0].element() + nth * kHalf);
  }
}

// Quantize a tile both ways and store it, but leave the scales of its rows in `scale`, MLA_SCALES
// bytes from token to token. data: of the tokens of the lane, the vector at `channel` of a head;
// zero where is_there is false. All lanes must come here.
template <int V>
__device__ inline void quantize(const Vec<__nv_bfloat16, V> (&data)[kRows], const Side& side, int b,
                                int head, int block, int channel, bool is_there, int lane,
                                unsigned char* scale) {
  constexpr int kPairs = V / 2, kWords = kRows / 2;
  constexpr int kSharing = kBlock / V;  // lanes whose channels share a scale
  const auto pair = [&](int i, int k) {
    return reinterpret_cast<const unsigned*>(data[i].word)[k];
  };
  unsigned most[kPairs] = {}, steps[kWords];  // of columns; of two tokens each
#pragma unroll
  for (int i = 0; i < kRows; i += 2) {
    unsigned even = 0, odd = 0;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      even = larger_size(even, pair(i, k));
      odd = larger_size(odd, pair(i + 1, k));
      most[k] = larger_size(larger_size(most[k], pair(i, k)), pair(i + 1, k));
    }
    unsigned both = larger_size(even & 0xffffu | odd << 16, even >> 16 | odd & 0xffff0000u);
#pragma unroll
    for (int step = 1; step < kSharing; step *= 2) {
      both = larger_size(both, __shfl_xor_sync(kAll, both, step));
    }
    steps[i / 2] = steps_of(size_of(both));
  }
  unsigned column_steps[kPairs];
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    most[k] = larger_size(most[k], __shfl_xor_sync(kAll, most[k], 8));
    most[k] = larger_size(most[k], __shfl_xor_sync(kAll, most[k], 16));
    column_steps[k] = steps_of(size_of(most[k]));
  }
  if (!is_there) return;

  const int first = lane / kAcross, nth = lane % kSharing;
  // The lanes of a block deal out its tokens, two a word.
#pragma unroll
  for (int j = 0; j < kWords; j += kSharing) {
    unsigned own = steps[j];
#pragma unroll
    for (int k = 1; k < kSharing; ++k) own = nth == k ? steps[j + k] : own;
    const unsigned scales = scales_of(own);
    const int token = first + 8 * (j + nth);
    scale[token * MLA_SCALES] = scales;
    scale[(token + 4) * MLA_SCALES] = scales >> 16;
  }
  if (side.column_scale.base && first == 0) {
    Vec<unsigned char, V> column_scale;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const unsigned scales = scales_of(column_steps[k]);
      reinterpret_cast<unsigned short*>(column_scale.word)[k] = scales | scales >> 8;
    }
    column_scale.store(at<unsigned char>(side.column_scale, b, head, block, channel));
  }
  const int token = block * kBlock + first;
  unsigned char* row_at = at<unsigned char>(side.row, b, head, token, channel);
  unsigned char* column_at = at<unsigned char>(side.column, b, head, token, channel);
  const bool by_rows = side.row.base != nullptr, by_columns = side.column.base != nullptr;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float by_row = i % 2 ? inverse_high(steps[i / 2]) : inverse_low(steps[i / 2]);
    Vec<unsigned char, V> row, column;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const float x = low_half(pair(i, k)), y = high_half(pair(i, k));
      reinterpret_cast<unsigned short*>(row.word)[k] = e4m3(times(x, by_row), times(y, by_row));
      reinterpret_cast<unsigned short*>(column.word)[k] =
          e4m3(times(x, inverse_low(column_steps[k])), times(y, inverse_high(column_steps[k])));
    }
    if (by_rows) row.store(row_at);
    if (by_columns) column.store(column_at);
    row_at += 4 * side.row.s;
    column_at += 4 * side.column.s;
  }
}

// Of the values, or the keys, of the part, each warp takes one tile after another. It does
// `meanwhile` while its first loads are on their way, also if there is no tile for it.
template <int V, bool in_value, typename Meanwhile>
__device__ inline void quantize_side(const Params& p, const Work& work, Shared<V>& shared,
                                     Meanwhile meanwhile) {
  constexpr int kTile = kAcross * V;
  const int lane = threadIdx.x % kLanes, width = p.nope + MLA_TURN, each = in_value ? p.v : width;
  const int from = work.share * p.part_heads, heads = min(p.part_heads, p.heads - from);
  const int tiles = (heads * each + kTile - 1) / kTile;
  bool is_first = true;
#pragma unroll 1
  for (int tile = threadIdx.x / kLanes; tile < tiles || is_first; tile += MLA_WARPS) {
    // Of the channels of all heads of the part, in a row.
    const int nth = tile * kTile + lane % kAcross * V;
    const int head = quotient(nth, in_value ? p.value_magic : p.key_magic);
    const int channel = nth - head * each, turn = channel - p.nope;
    const bool is_there = head < heads, is_turned = !in_value && turn >= 0;

    Vec<__nv_bfloat16, V> data[kRows];
    const __nv_bfloat16* x =
        at<__nv_bfloat16>(p.kv, work.b, from + head, work.tile * kBlock + lane / kAcross,
                          in_value ? p.nope + channel : channel);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      data[i].clear();
      if (is_there && is_turned) data[i] = shared.turned[lane / kAcross + 4 * i][turn / V];
      if (is_there && !is_turned) data[i].load(x);
      x += 4 * p.kv.s;
    }
    if (is_first) meanwhile();
    is_first = false;
    const int scale = (nth + (in_value ? p.part_heads * width : 0)) / kBlock;
    quantize<V>(data, p.side[in_value], work.b, from + head, work.tile, channel, is_there, lane,
                shared.scale[0] + scale);
  }
}

// The scales of the rows of values or keys.
template <int V, bool in_value>
__device__ inline void store_scales(const Params& p, const Work& work, const Shared<V>& shared) {
  const Place& place = p.side[in_value].row_scale;
  if (!place.base) return;
  const int lane = threadIdx.x % kLanes, width = p.nope + MLA_TURN;
  const int from = work.share * p.part_heads, heads = min(p.part_heads, p.heads - from);
  const int each = (in_value ? p.v : width) / kBlock, count = heads * each;
  const int begin = in_value ? p.part_heads * width / kBlock : 0;
  const bool is_run = place.d == 1 && place.h == each;  // heads side by side
  for (int token = threadIdx.x / kLanes; token < kBlock; token += MLA_WARPS) {
    const unsigned char* x = shared.scale[token] + begin;
    unsigned char* y = at<unsigned char>(place, work.b, from, work.tile * kBlock + token, 0);
    const auto aligned = reinterpret_cast<unsigned long long>(x) |
                         reinterpret_cast<unsigned long long>(y);
    const int words = is_run && aligned % 4 == 0 ? count / 4 : 0;
    for (int i = lane; i < words; i += kLanes) {
      reinterpret_cast<unsigned*>(y)[i] = reinterpret_cast<const unsigned*>(x)[i];
    }
    for (int i = 4 * words + lane; i < count; i += kLanes) {
      const int head = i / each;
      y[head * place.h + (i - head * each) * place.d] = x[i];
    }
  }
}

// The three phases of a block, whose warps meet between them: each leaves in shared memory what the
// next one takes. Values wait for nothing that turns.
template <int V>
__device__ inline void values(const Params& p, Shared<V>& shared) {
  const Work work(p, blockIdx.x);
  if (!work.is_there(p, kBlock)) return;
  quantize_side<V, true>(p, work, shared, [&] { turn_tokens<V>(p, work, shared); });
}

template <int V>
__device__ inline void keys(const Params& p, Shared<V>& shared) {
  const Work work(p, blockIdx.x);
  if (!work.is_there(p, kBlock)) return;
  quantize_side<V, false>(p, work, shared, [&] { store_scales<V, true>(p, work, shared); });
}

template <int V>
__device__ inline void key_scales(const Params& p, Shared<V>& shared) {
  const Work work(p, blockIdx.x);
  if (!work.is_there(p, kBlock)) return;
  store_scales<V, false>(p, work, shared);
}

// A warp takes 32 tokens of 32 channels of one head, a lane one channel.
__device__ inline void mxfp8_any(const Params& p) {
  const int lane = threadIdx.x % kLanes;
  const Work work = work_of_warp(p);
  const int b = work.b, block = work.tile;
  if (!work.is_there(p, kBlock)) return;
  const int keys = (p.nope + 2 * p.half) / kBlock, each = keys + p.v / kBlock;
  const int head = quotient(work.share, p.each_magic);
  int tile = work.share - head * each;

  const bool in_value = tile >= keys;
  if (in_value) tile -= keys;
  const Side& to = p.side[in_value];
  const int channel = tile * kBlock + lane;
  const auto get = [&](int token) -> float {
    if (!in_value && channel >= p.nope) {
      return turned<1>(p, b, token, channel - p.nope).get(0);
    }
    const int own = in_value ? p.nope + channel : channel;
    return as_float(*at<__nv_bfloat16>(p.kv, b, head, token, own));
  };
  const auto bits = [](float x) -> unsigned {
    const unsigned size = __float_as_uint(x) >> 16 & 0x7fffu;
    return size > 0x7f80u ? 0 : size;  // NaN does not count
  };
  unsigned most = 0;
  for (int i = 0; i < kBlock; ++i) most = max(most, bits(get(block * kBlock + i)));
  const unsigned columns = steps_of(most);
  for (int i = 0; i < kBlock; ++i) {
    const int token = block * kBlock + i;
    const float x = get(token);
    unsigned own = bits(x);
    for (int step = 1; step < kLanes; step *= 2) own = max(own, __shfl_xor_sync(kAll, own, step));
    const unsigned rows = steps_of(own);
    const unsigned both = e4m3(times(x, inverse_low(rows)), times(x, inverse_low(columns)));
    if (to.row.base) *at<unsigned char>(to.row, b, head, token, channel) = both & 0xffu;
    if (to.column.base) *at<unsigned char>(to.column, b, head, token, channel) = both >> 8;
    if (to.row_scale.base && lane == 0) {
      *at<unsigned char>(to.row_scale, b, head, token, tile) = scales_of(rows);
    }
  }
  if (to.column_scale.base) {
    *at<unsigned char>(to.column_scale, b, head, block, channel) = scales_of(columns);
  }
}

#endif

template <int V, int T>
__device__ inline void run(const Params& p) {
#if MLA_MODE == 0
  forward<V, T>(p);
#elif MLA_MODE == 1
  mxfp8_any(p);
#else
  backward<V, T>(p);
#endif
}

}  // namespace

#if MLA_VEC > 1
extern "C" __global__ void __launch_bounds__(MLA_WARPS * 32, MLA_RESIDENT / MLA_WARPS)
    mla_vector(const __grid_constant__ Params p) {
#if MLA_MODE == 1
  __shared__ Shared<MLA_VEC> shared;
  values(p, shared);
  __syncthreads();
  keys(p, shared);
  __syncthreads();
  key_scales(p, shared);
#else
  run<MLA_VEC, MLA_TOKENS>(p);
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(MLA_WARPS * 32)
    mla_any(const __grid_constant__ Params p) {
  run<1, 1>(p);
}
