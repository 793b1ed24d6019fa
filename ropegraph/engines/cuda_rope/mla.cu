// Key and value of multi-latent attention from kv [b, h, s, n + v] and k_rope [b, 1, s, r]:
//   key = kv[:n] and, for every head, the r turned channels of k_rope; value = kv[n:].
// Pairs (2i, 2i + 1) are read, halves are written, each written channel has its own table column.
//
// Nearly all of it is copying. A warp takes a token and a few heads: it turns the shared channels
// once, in registers, and stores them for all its heads. The adjoint gives one warp of each token
// the sum over all heads. MXFP8 goes by tiles of 32 tokens and 64 channels, which a warp holds in
// registers: blocks along channels and along tokens both lie in it, and a turned tile, quantized
// once, is stored for several heads.
//
// Specialised at build by macros:
//   MLA_MODE            0: forward, 1: forward to MXFP8, 2: the adjoint
//   MLA_DATA, MLA_TABLE element types of data and tables
//   MLA_VEC             elements a lane moves at once in mla_vector; 1 leaves mla_any alone
//   MLA_FLIGHT          loads in flight a lane
//   MLA_WARPS           warps a block
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
// past 2^31 in a small tensor. base: 0 for a tensor that nobody gave or wants.
struct Place {
  unsigned long long base;
  long long b, h, s, d;
};

// A table [s_max, 1, 1, r].
struct Table {
  const MLA_TABLE* base;
  long long s, d;
};

// The adjoint reads key and value, and writes kv and k_rope. MXFP8 writes key and value by rows.
// A warp takes part_heads heads; parts of them make all heads. tokens_inner: consecutive warps take
// consecutive tokens, else consecutive parts.
struct Params {
  Place kv, k_rope, key, value;
  Place key_scale, key_column, key_column_scale;
  Place value_scale, value_column, value_column_scale;
  Table cos, sin;
  int batch, heads, tokens, nope, v, half;
  int part_heads, parts, tokens_inner, padding;
};

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

// first: a c - x s, else a c + x s, where x s is rounded, and the sum once more: in bf16 if data
// and tables are, else in fp32 and then to the type of the data.
template <typename D, typename T>
__device__ inline D turned(bool first, D a, D x, T c, T s) {
  if constexpr (kIsSame<D, __nv_bfloat16> && kIsSame<T, __nv_bfloat16>) {
    // In fp32 the product of two bf16 numbers is exact.
    const float product = as_float(rounded<__nv_bfloat16>(times(as_float(x), as_float(s))));
    return MLA_FMA_BF16(a, c, rounded<__nv_bfloat16>(first ? minus(product) : product));
  } else {
    const float product = times(as_float(x), as_float(s));
    return rounded<D>(fused(as_float(a), as_float(c), first ? minus(product) : product));
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
    const MLA_DATA x1 = x.get(2 * k), x2 = x.get(2 * k + 1);
    y.set(k, turned(first, first ? x1 : x2, first ? x2 : x1, cos.element()[k], sin.element()[k]));
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

// Which token and heads a warp has. part == parts stands for the sum over all heads.
struct Work {
  int b, token, part;
  bool is_there;

  __device__ Work(const Params& p, int parts) {
    const unsigned index = blockIdx.x * MLA_WARPS + threadIdx.x / kLanes;
    b = blockIdx.z * gridDim.y + blockIdx.y;
    const unsigned inner = p.tokens_inner ? p.tokens : parts;
    const unsigned outer = index / inner;
    token = p.tokens_inner ? index - outer * inner : outer;
    part = p.tokens_inner ? outer : index - outer * inner;
    is_there = b < p.batch && token < p.tokens && part < parts;
  }
};

// Copy heads [from, to) between kv and key and value, and do `meanwhile` while the first loads are
// on their way. to_kv: the direction. A source that is missing counts as zero.
template <int V, bool to_kv, typename Meanwhile>
__device__ inline void copy_heads(const Params& p, int b, int token, int from, int to, int lane,
                                  Meanwhile meanwhile) {
  const int vectors = (p.nope + p.v) / V;
  const Seat seat(vectors, lane);
  bool is_first = true;
  for (int vec = seat.vec; vec < vectors || is_first; vec += seat.lanes) {
    const int channel = vec * V;
    const bool in_key = channel < p.nope;
    const Place& side = in_key ? p.key : p.value;
    const bool is_wanted = vec < vectors && (to_kv ? p.kv.base : side.base) != 0;
    const bool is_given = (to_kv ? side.base : p.kv.base) != 0;
    const int own = in_key ? channel : channel - p.nope;
    const Place& source = to_kv ? side : p.kv;
    const Place& target = to_kv ? p.kv : side;
    int head = from + seat.row;
    const MLA_DATA* x = at<MLA_DATA>(source, b, head, token, to_kv ? own : channel);
    MLA_DATA* y = at<MLA_DATA>(target, b, head, token, to_kv ? channel : own);
    const long long x_step = seat.rows * source.h, y_step = seat.rows * target.h;
    const int end = is_wanted ? to : from;
    do {
      Vec<MLA_DATA, V> data[MLA_FLIGHT];
#pragma unroll
      for (int f = 0; f < MLA_FLIGHT; ++f) {
        data[f].clear();
        if (head + f * seat.rows < end && is_given) data[f].load(x + f * x_step);
      }
      if (is_first) meanwhile();
      is_first = false;
#pragma unroll
      for (int f = 0; f < MLA_FLIGHT; ++f) {
        if (head + f * seat.rows < end) data[f].store(y + f * y_step);
      }
      head += MLA_FLIGHT * seat.rows;
      x += MLA_FLIGHT * x_step;
      y += MLA_FLIGHT * y_step;
    } while (head < end);
  }
}

// The turned channels, made once, for heads [from, to).
template <int V>
__device__ inline void turn_heads(const Params& p, int b, int token, int from, int to, int lane) {
  const int vectors = 2 * p.half / V;
  const Seat seat(vectors, lane);
  if (p.key.base == 0) return;
  for (int vec = seat.vec; vec < vectors; vec += seat.lanes) {
    const Vec<MLA_DATA, V> y = turned<V>(p, b, token, vec * V);
    for (int head = from + seat.row; head < to; head += seat.rows) {
      y.store(at<MLA_DATA>(p.key, b, head, token, p.nope + vec * V));
    }
  }
}

template <int V>
__device__ inline void forward(const Params& p) {
  const int lane = threadIdx.x % kLanes;
  const Work work(p, p.parts);
  if (!work.is_there) return;
  const int from = work.part * p.part_heads, to = min(from + p.part_heads, p.heads);
  copy_heads<V, false>(p, work.b, work.token, from, to, lane,
                       [&] { turn_heads<V>(p, work.b, work.token, from, to, lane); });
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
  const MLA_DATA* x = at<MLA_DATA>(p.key, b, first, token, p.nope + channel);
  const long long step = rows * p.key.h;
  for (int head = first; head < p.heads; head += MLA_FLIGHT * rows) {
    Vec<MLA_DATA, V> data[MLA_FLIGHT];
#pragma unroll
    for (int f = 0; f < MLA_FLIGHT; ++f) {
      data[f].clear();
      if (head + f * rows < p.heads) data[f].load(x + f * step);
    }
#pragma unroll
    for (int f = 0; f < MLA_FLIGHT; ++f) {
#pragma unroll
      for (int k = 0; k < V; ++k) sum[k] = plus(sum[k], data[f].get(k));
    }
    x += MLA_FLIGHT * step;
  }
}

// dK_rope of a token.
template <int V>
__device__ inline void sum_heads(const Params& p, int b, int token, int lane) {
  if (p.k_rope.base == 0) return;
  const bool is_given = p.key.base != 0;
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

template <int V>
__device__ inline void backward(const Params& p) {
  const int lane = threadIdx.x % kLanes;
  const Work work(p, p.parts + 1);
  if (!work.is_there) return;
  if (work.part == p.parts) {
    sum_heads<V>(p, work.b, work.token, lane);
    return;
  }
  const int from = work.part * p.part_heads, to = min(from + p.part_heads, p.heads);
  copy_heads<V, true>(p, work.b, work.token, from, to, lane, [] {});
}

// ---- MXFP8 --------------------------------------------------------------------------------------

#if MLA_MODE == 1

// The E8M0 byte of amax / 448, rounded up; amax are bits of bf16, not negative, no NaN.
__device__ inline unsigned scale_of(unsigned amax) {
  const float limit = times(__uint_as_float(amax << 16), 1.0f / 448.0f);
  const unsigned bits = __float_as_uint(limit), exponent = bits >> 23, rest = bits & 0x7fffffu;
  // Below 2^-126 the mantissa starts at 2^-127, which is byte 0.
  const bool is_more = rest != 0 && (exponent != 0 || rest > 0x400000u);
  return min(exponent + is_more, 254u);
}

// 2^(127 - scale), below the normal numbers for 254.
__device__ inline float inverse(unsigned scale) {
  return __uint_as_float(scale == 254 ? 0x400000u : (254 - scale) << 23);
}

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

// The four outputs of key or of value.
struct Sinks {
  const Place *row, *row_scale, *column, *column_scale;
};

__device__ inline Sinks key_sinks(const Params& p) {
  return {&p.key, &p.key_scale, &p.key_column, &p.key_column_scale};
}
__device__ inline Sinks value_sinks(const Params& p) {
  return {&p.value, &p.value_scale, &p.value_column, &p.value_column_scale};
}

constexpr int kBlock = 32;  // elements that share a scale
constexpr int kWide = 8;    // channels a lane holds
constexpr int kTile = 64;   // channels of a tile
constexpr int kRows = 8;    // tokens a lane holds: lane / 8 + 4 i

// A tile of 32 tokens, quantized both ways.
struct Tile {
  Vec<unsigned char, kWide> row[kRows], column[kRows], column_scale;
  unsigned char row_scale[kRows];

  // data: the lane's channels of its tokens, zero where there are none. All lanes must come here.
  __device__ void quantize(const Vec<__nv_bfloat16, kWide> (&data)[kRows]) {
    constexpr int kPairs = kWide / 2;
    const auto pair = [&](int i, int k) {
      return reinterpret_cast<const unsigned*>(data[i].word)[k];
    };
    unsigned most[kPairs] = {}, rows[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      unsigned own = 0;
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        own = larger(own, size_of(pair(i, k)));
        most[k] = larger(most[k], size_of(pair(i, k)));
      }
      own = max(own & 0xffffu, own >> 16);
      // Two tokens go through the shuffles as one word.
      rows[i / 2] = i % 2 ? rows[i / 2] | own << 16 : own;
    }
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      rows[i] = larger(rows[i], __shfl_xor_sync(kAll, rows[i], 1));
      rows[i] = larger(rows[i], __shfl_xor_sync(kAll, rows[i], 2));
    }
    float by_column[kWide];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      most[k] = larger(most[k], __shfl_xor_sync(kAll, most[k], 8));
      most[k] = larger(most[k], __shfl_xor_sync(kAll, most[k], 16));
      const unsigned low = scale_of(most[k] & 0xffffu), high = scale_of(most[k] >> 16);
      column_scale.set(2 * k, low);
      column_scale.set(2 * k + 1, high);
      by_column[2 * k] = inverse(low);
      by_column[2 * k + 1] = inverse(high);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const unsigned scale = scale_of(i % 2 ? rows[i / 2] >> 16 : rows[i / 2] & 0xffffu);
      const float by_row = inverse(scale);
      row_scale[i] = scale;
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const float x = low_half(pair(i, k)), y = high_half(pair(i, k));
        reinterpret_cast<unsigned short*>(row[i].word)[k] =
            e4m3(times(x, by_row), times(y, by_row));
        reinterpret_cast<unsigned short*>(column[i].word)[k] =
            e4m3(times(x, by_column[2 * k]), times(y, by_column[2 * k + 1]));
      }
    }
  }

  // Store for one head. channel: the lane's first one.
  __device__ void store(const Sinks& to, int b, int head, int block, int channel, int lane) const {
    const int first = block * kBlock + lane / 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = first + 4 * i;
      if (to.row->base) row[i].store(at<unsigned char>(*to.row, b, head, token, channel));
      if (to.column->base) column[i].store(at<unsigned char>(*to.column, b, head, token, channel));
      if (to.row_scale->base && lane % 4 == 0) {
        *at<unsigned char>(*to.row_scale, b, head, token, channel / kBlock) = row_scale[i];
      }
    }
    if (to.column_scale->base && lane < 8) {
      column_scale.store(at<unsigned char>(*to.column_scale, b, head, block, channel));
    }
  }
};

__device__ inline int tiles_of(int channels) { return (channels + kTile - 1) / kTile; }

// A warp takes one tile of one head that is copied, or one turned tile for a part of the heads.
__device__ inline void mxfp8_vector(const Params& p) {
  const int lane = threadIdx.x % kLanes;
  const int keys = tiles_of(p.nope), each = keys + tiles_of(p.v);
  const unsigned inner = p.part_heads * each + tiles_of(2 * p.half);
  unsigned index = blockIdx.x * MLA_WARPS + threadIdx.x / kLanes;
  const int b = blockIdx.z * gridDim.y + blockIdx.y;
  const unsigned share = index / inner;
  index -= share * inner;
  const int block = share / p.parts, from = (share - block * p.parts) * p.part_heads;
  int to = min(from + p.part_heads, p.heads);
  if (b >= p.batch || block * kBlock >= p.tokens) return;

  const bool is_turned = index >= p.part_heads * each;
  const int nth = is_turned ? 0 : index / each;
  int tile = is_turned ? index - p.part_heads * each : index - nth * each;
  const bool in_value = !is_turned && tile >= keys;
  if (in_value) tile -= keys;
  const int head = from + nth;
  if (head >= to) return;
  const int own = tile * kTile + lane % 8 * kWide;  // in its part of the channels
  const bool is_there = own < (is_turned ? 2 * p.half : in_value ? p.v : p.nope);

  Vec<__nv_bfloat16, kWide> data[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int token = block * kBlock + lane / 8 + 4 * i;
    data[i].clear();
    if (!is_there) continue;
    if (is_turned) data[i] = turned<kWide>(p, b, token, own);
    else data[i].load(at<__nv_bfloat16>(p.kv, b, head, token, in_value ? p.nope + own : own));
  }
  Tile made;
  made.quantize(data);
  if (!is_there) return;
  const Sinks sinks = in_value ? value_sinks(p) : key_sinks(p);
  if (!is_turned) to = head + 1;
  for (int h = head; h < to; ++h) {
    made.store(sinks, b, h, block, is_turned ? p.nope + own : own, lane);
  }
}

// A warp takes 32 tokens of 32 channels of one head, a lane one channel.
__device__ inline void mxfp8_any(const Params& p) {
  const int lane = threadIdx.x % kLanes;
  const int keys = (p.nope + 2 * p.half) / kBlock, each = keys + p.v / kBlock;
  const unsigned index = blockIdx.x * MLA_WARPS + threadIdx.x / kLanes;
  const int b = blockIdx.z * gridDim.y + blockIdx.y;
  const unsigned row = index / each;
  int tile = index - row * each;
  const int block = row / p.heads, head = row - block * p.heads;
  if (b >= p.batch || block * kBlock >= p.tokens) return;

  const bool in_value = tile >= keys;
  if (in_value) tile -= keys;
  const Sinks to = in_value ? value_sinks(p) : key_sinks(p);
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
  const unsigned column_scale = scale_of(most);
  for (int i = 0; i < kBlock; ++i) {
    const int token = block * kBlock + i;
    const float x = get(token);
    unsigned own = bits(x);
    for (int step = 1; step < kLanes; step *= 2) own = max(own, __shfl_xor_sync(kAll, own, step));
    const unsigned row_scale = scale_of(own);
    const float by_row = inverse(row_scale), by_column = inverse(column_scale);
    const unsigned both = e4m3(times(x, by_row), times(x, by_column));
    if (to.row->base) *at<unsigned char>(*to.row, b, head, token, channel) = both & 0xffu;
    if (to.column->base) *at<unsigned char>(*to.column, b, head, token, channel) = both >> 8;
    if (to.row_scale->base && lane == 0) {
      *at<unsigned char>(*to.row_scale, b, head, token, tile) = row_scale;
    }
  }
  if (to.column_scale->base) {
    *at<unsigned char>(*to.column_scale, b, head, block, channel) = column_scale;
  }
}

#endif

template <int V>
__device__ inline void run(const Params& p) {
#if MLA_MODE == 0
  forward<V>(p);
#elif MLA_MODE == 1
  if constexpr (V > 1) mxfp8_vector(p);
  else mxfp8_any(p);
#else
  backward<V>(p);
#endif
}

}  // namespace

#if MLA_VEC > 1
extern "C" __global__ void __launch_bounds__(MLA_WARPS * 32)
    mla_vector(const __grid_constant__ Params p) {
  run<MLA_VEC>(p);
}
#endif

extern "C" __global__ void __launch_bounds__(MLA_WARPS * 32)
    mla_any(const __grid_constant__ Params p) {
  run<1>(p);
}
