// Rotary embedding of [b, h, s, d] tensors: one job, or two in one launch (Q and K); in decoding
// three, where K turns on its way into a cache and V goes into its own as it is. Where K turned with
// its norm, K and V go as they are.
//
// A warp owns a share of the heads of a token, or of a few tokens. A token has one position. The
// warp's lanes take the sines and cosines of these positions once, a few a lane, and hand them
// round by shuffles. Then the warp walks over its heads, ROPE_FLIGHT units in flight. A unit
// is what fits into 32 lanes where each lane holds V pairs of channels (two loads of 16 bytes in
// the fast kernel): several heads of a token, or one of several tokens, whichever lie side by side.
//
// Specialised at build by macros:
//   ROPE_IN, ROPE_OUT      element types of what is read and written
//   ROPE_READ_PAIRS        1: pairs (2i, 2i + 1) are read, 0: (i, i + r/2)
//   ROPE_WRITE_PAIRS       the same for what is written
//   ROPE_FULL              1: each written channel has its own column of the table
//   ROPE_PASS              1: some channels lie outside the rotation
//   ROPE_GROUPS            1: heads lie in two levels, in what is read or what is written
//   ROPE_SOURCE            0: a table of angles, 1: tables of cosines and of sines, 2: radians a
//                          position, their product with it rounded to fp32, 3: the same, exact
//   ROPE_TABLE             element type of these tables
//   ROPE_POSITION          the position is 0: the row, 1: read for each token, 2: start + chunk
//   ROPE_ID                type of positions and starts
//   ROPE_SEQUENCES         1: they lie at offsets read here, 2: they are packed along s, their
//                          bounds are read here; positions restart in each; 0: one a batch entry
//   ROPE_INDEX             type of these offsets or bounds
//   ROPE_CACHE             1: some job writes into a cache, at rows that are read here
//   ROPE_ROW               type of these rows
//   ROPE_NUMERICS          0: fp32, rounded once, 1: the same in NeMo's order, 2: every product
//                          and sum rounded to the type read, as Hugging Face's eager formula
//   ROPE_VEC               V of rope_vector: 8, 4 or 2; 1 leaves rope_any alone
//   ROPE_ANGLES            angles a lane takes there: those of a warp's tokens / 32, up to 2^n
//   ROPE_FLIGHT, ROPE_WARPS, ROPE_RESIDENT   units in flight; warps a block; warps an SM at least
//
// rope_any takes every base, stride and width. rope_vector takes what the host found to be aligned.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// How elements are moved: a tuning matter, it changes no value.
#ifndef ROPE_LOAD
#define ROPE_LOAD(from) (*(from))
#endif
#ifndef ROPE_STORE
#define ROPE_STORE(to, word) (*(to) = (word))
#endif

namespace {

constexpr int kLanes = 32;
constexpr unsigned kAll = 0xffffffffu;
constexpr int kColumns = ROPE_FULL ? 2 : 1;
constexpr int kJobs = ROPE_CACHE ? 3 : 2;
constexpr bool kMixed = ROPE_READ_PAIRS != ROPE_WRITE_PAIRS;
constexpr bool kIsTable = ROPE_SOURCE == 1, kIsExact = ROPE_SOURCE == 3;
// A position that no row of the table belongs to can only be noticed here.
constexpr bool kIsChecked = ROPE_SOURCE < 2 && (ROPE_POSITION || ROPE_SEQUENCES == 2);

// Units of V pairs in flight: as many bytes, up to 8 units, where vectors are narrow.
template <int V>
constexpr int kFlight = V * sizeof(ROPE_IN) >= 16  ? ROPE_FLIGHT
                        : V * sizeof(ROPE_IN) >= 8 ? 2 * ROPE_FLIGHT
                                                   : 4 * ROPE_FLIGHT;

// How the lanes of a warp are dealt out: `lanes` to a head row, 2^log_tokens tokens of `heads`
// heads at a time.
struct Split {
  int lanes, log_tokens, heads;
  int magic;  // 1024 / lanes, rounded up
};

// A table. Steps to the next batch entry's, to the next row, to the next pair's column, and from
// a pair's first column to its second. Where it has no rows, the steps to them are 0.
struct Table {
  const ROPE_TABLE* at;
  long long b, s, pair, second;
};

// One rotation. Strides and offsets count elements and are 64 bits wide: a large outer stride takes
// an offset past 2^31 in a small tensor.
struct Job {
  const ROPE_IN* x;
  ROPE_OUT* y;
  Table angles, sines;                 // the angles' is that of the cosines, if there are sines
  long long sine_offset;               // where the sines start in their tensor
  long long table_rows;
  const ROPE_ID* ids;                  // positions of tokens, or starts; null: all start at 0
  long long id_b, id_s;
  const ROPE_INDEX* offsets;           // ragged: [batch + 1], times multiplier; packed: in tokens
  long long multiplier, offset_limit;  // no offset above this one lies in a buffer
  long long x_room, y_room;            // ragged: elements of the buffers
  unsigned long long token_magic;      // 2^64 / what a token adds to an offset, up; 0 if that is 1
  unsigned* flag;
  long long x_b, x_h, x_s, x_d;
  long long y_b, y_h, y_s, y_d;
  long long x_g, y_g;                  // what each group of heads before it adds to a head's place
  unsigned long long group_magic;      // 2^64 / heads of a group, up; 0 if that is 1
  const ROPE_ROW* cache_at;            // the row of y where each batch entry's first one goes; null:
  long long cache_b, cache_last;       // row 0.  The last row where it may go
  int cp_size, cp_rank;
  int batch, heads, rows, dim;         // sequences (b if each is a batch entry), h, s, d
  int tokens;                          // tokens a batch entry; ragged: of the whole buffer
  int begin, pairs;                    // the rotated channels are [begin, begin + 2 pairs), none
                                       // for what only goes into a cache
  int part_heads;                      // heads that one warp takes
  Split turn, pass;                    // for the rotated channels, for the others
  int adjoint;                         // 1: sines come from the partner's column
  float sign;                          // of the sines: the direction
  float factor, scale;                 // of the rotated channels (ROPE_NUMERICS 2: of cosines and
                                       // sines); of the others
};

// grid.x: tiles of tokens times parts; a part is a warp's share of the heads of a token.
// grid.y and grid.z together: batch entries, 1 if sequences lie in one buffer.
struct Params {
  unsigned long long parts_magic;  // 2^64 / parts, rounded up; 0 if parts is 1
  int parts;        // of all jobs together
  int first_parts;  // of job 0
  int both_parts;   // of jobs 0 and 1
  int warps_s;      // log2 of the warps of a block that lie along s; the rest lies along b
  int log_group;    // 2^log_group tiles run over one part before they run over the next
  int unused;
  Job job[kJobs];
};

// x / divisor, without the long way of a division. magic is 2^64 / divisor, rounded up; 0 for 1.
__device__ inline unsigned quotient(unsigned x, unsigned long long magic) {
  return magic ? static_cast<unsigned>(__umul64hi(x, magic)) : x;
}

// x / split.lanes, for x < 32.
__device__ inline int rows_before(const Split& split, int x) { return x * split.magic >> 10; }

// What a lane is dealt: head and token, counted from the first of the warp, vector of the head row;
// and its place among all vectors of these tokens.
struct Seat {
  int head, token, vec, place;

  __device__ Seat(const Split& split, int lane) {
    const int row = rows_before(split, lane);
    vec = lane - row * split.lanes;
    token = row & ((1 << split.log_tokens) - 1);
    head = row >> split.log_tokens;
    place = token * split.lanes + vec;
  }
};

// ---- arithmetic ---------------------------------------------------------------------------------

// fp32, rounded to nearest even. CuPy compiles with -ftz=true whatever its callers ask for; what is
// written in PTX keeps subnormal numbers all the same.
#ifdef __CUDA_ARCH__
#define ROPE_PTX(op, ...) \
  float z; \
  asm(op : "=f"(z) : __VA_ARGS__); \
  return z;
__device__ inline float times(float x, float y) {
  ROPE_PTX("mul.rn.f32 %0, %1, %2;", "f"(x), "f"(y))
}
__device__ inline float plus(float x, float y) {
  ROPE_PTX("add.rn.f32 %0, %1, %2;", "f"(x), "f"(y))
}
__device__ inline float fused(float x, float y, float more) {
  ROPE_PTX("fma.rn.f32 %0, %1, %2, %3;", "f"(x), "f"(y), "f"(more))
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

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widened(__half x) { return __half2float(x); }

// Rounded to T, and wide again.
template <typename T>
__device__ inline float rounded(float x) {
  if constexpr (kIsSame<T, __nv_bfloat16>) return __bfloat162float(__float2bfloat16_rn(x));
  else if constexpr (kIsSame<T, __half>) return __half2float(__float2half_rn(x));
  else return x;
}

// What moves in one instruction, by size.
template <int Bytes>
struct Word;
template <>
struct Word<2> { using Type = unsigned short; };
template <>
struct Word<4> { using Type = unsigned; };
template <>
struct Word<8> { using Type = uint2; };
template <>
struct Word<16> { using Type = uint4; };

__device__ inline unsigned join(unsigned short low, unsigned short high) {
  return low | static_cast<unsigned>(high) << 16;
}

// V elements in registers. They stay packed in 32 bits until they are used: as separate halves
// they would take twice the registers.
template <typename T, int V>
struct Vec {
  static constexpr int kBytes = V * int(sizeof(T));
  static constexpr int kWordBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = kBytes / kWordBytes;
  using W = typename Word<kWordBytes>::Type;
  union {
    W word[kWords];
    unsigned bits[kBytes < 4 ? 1 : kBytes / 4];
  };

  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = ROPE_LOAD(reinterpret_cast<const W*>(from) + i);
  }

  __device__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) ROPE_STORE(reinterpret_cast<W*>(to) + i, word[i]);
  }

  __device__ float get(int i) const {
    if constexpr (kIsSame<T, float>) {
      return __uint_as_float(bits[i]);
    } else if constexpr (kIsSame<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? bits[i / 2] & 0xffff0000u : bits[i / 2] << 16);
    } else {
      const unsigned short half = i % 2 ? bits[i / 2] >> 16 : bits[i / 2] & 0xffffu;
      return __half2float(__ushort_as_half(half));
    }
  }

  // Elements i and i + 1 (i alone where V is 1): one instruction rounds two of them.
  __device__ void set(int i, float x, float y) {
    if constexpr (kIsSame<T, float>) {
      bits[i] = __float_as_uint(x);
      if constexpr (V > 1) bits[i + 1] = __float_as_uint(y);
    } else if constexpr (kIsSame<T, __nv_bfloat16>) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
      bits[i / 2] = join(__bfloat16_as_ushort(both.x), __bfloat16_as_ushort(both.y));
    } else {
      const __half2 both = __floats2half2_rn(x, y);
      bits[i / 2] = join(__half_as_ushort(both.x), __half_as_ushort(both.y));
    }
  }
};

// ---- which token --------------------------------------------------------------------------------

enum class Fate { kSkip, kTurn, kFill };

// The first token of a warp: its sequence and its place there, and where its channels start.
struct Token {
  Fate fate;
  int b, s;
  int rows;  // of its sequence
  long long x, y;
  float value;  // that fills it
  bool is_lost;  // its row would lie outside of the cache
};

// Bits of Job::flag.
constexpr unsigned kBadOrder = 1;     // an offset is negative, or less than the one before
constexpr unsigned kBadReach = 2;     // a sequence ends past its buffer
constexpr unsigned kBadPosition = 4;  // a position lies outside the table
constexpr unsigned kBadChunks = 8;    // a sequence cannot be cut into 2 cp_size chunks
constexpr unsigned kBadCache = 16;    // rows would lie outside of the cache

#if ROPE_SEQUENCES

// How many times `divisor` goes into x >= 0. magic as for quotient().
__device__ inline long long whole(long long x, long long divisor, unsigned long long magic) {
  if (!magic) return x;
  const long long count = __umul64hi(x, magic);
  return count - (count * divisor > x);
}

// Rows are those that are rotated.
struct Sequence {
  long long start, stop;
  long long rows;
  unsigned fault;
};

// The first sequence whose end passes the test; job.batch if none does. All lanes must come here.
template <typename Test>
__device__ inline int first_ending(const Job& job, int lane, Test is_past) {
  int begin = 0, end = job.batch;
  while (begin < end) {
    const int step = (end - begin + kLanes - 1) / kLanes;
    const int probe = min(begin + (lane + 1) * step, end) - 1;
    const unsigned past = __ballot_sync(kAll, is_past(job.offsets[probe + 1]));
    if (!past) break;
    const int first = __ffs(past) - 1;
    end = min(begin + (first + 1) * step, end);
    begin += first * step;
    if (step == 1) return begin;
  }
  return end;
}

// Start and stop of sequence i as they are read. With a fault they say nothing.
__device__ inline Sequence bounds_of(const Job& job, int i) {
  Sequence own{};
  const long long before = i > 0 ? job.offsets[i - 1] : 0;
  own.start = job.offsets[i];
  own.stop = job.offsets[i + 1];
  if (before < 0 || own.start < before || own.stop < own.start) own.fault = kBadOrder;
  // Before any product, which could overflow.
  else if (own.stop > job.offset_limit) own.fault = kBadReach;
  return own;
}

__device__ inline Sequence sequence_of(const Job& job, int i);

// Raise the flag for sequences that warp `nth` of `count` looks at.
__device__ inline void check_offsets(const Job& job, long long nth, long long count, int lane) {
  for (long long i = nth * kLanes + lane; i < job.batch; i += count * kLanes) {
    const unsigned fault = sequence_of(job, static_cast<int>(i)).fault;
    if (fault) atomicOr(job.flag, fault);
  }
}

#endif

#if ROPE_SEQUENCES == 1

// Elements from the first to the last one of a token, inclusive.
__device__ inline long long x_extent(const Job& job) {
  return (job.heads - 1) * job.x_h + (job.dim - 1) * job.x_d + 1;
}
__device__ inline long long y_extent(const Job& job) {
  return (job.heads - 1) * job.y_h + (job.dim - 1) * job.y_d + 1;
}

// Whole tokens in so many elements, which are not negative.
__device__ inline long long tokens_in(const Job& job, long long elements) {
  return whole(elements, job.x_s, job.token_magic);
}

// Sequence i, in elements.
__device__ inline Sequence sequence_of(const Job& job, int i) {
  Sequence own = bounds_of(job, i);
  if (own.fault) return own;
  own.start *= job.multiplier;
  own.stop *= job.multiplier;
  own.rows = min(tokens_in(job, own.stop - own.start), static_cast<long long>(job.rows));
  const long long last = own.start + (own.rows - 1) * job.x_s;
  if (own.rows > 0 &&
      (last + x_extent(job) > job.x_room || last + y_extent(job) > job.y_room)) {
    own.fault = kBadReach;
  } else if (ROPE_POSITION == 2 && job.cp_size > 1 && own.rows % 2) {
    own.fault = kBadChunks;
  }
  return own;
}

// The token whose channels start in elements [k x_s, (k + 1) x_s) of the buffers. Both buffers have
// the same offsets and stride along s. Memory of no sequence becomes zero; what a wrong offset
// touches becomes NaN.
__device__ inline Token token_of(const Job& job, int, int k, int lane) {
  Token token{};
  const long long low = k * job.x_s, high = low + job.x_s;
  int i = first_ending(job, lane, [&](long long stop) {
    return stop > job.offset_limit || (stop > 0 && stop * job.multiplier > low);
  });
  token.x = token.y = low;
  token.fate = low + y_extent(job) <= job.y_room ? Fate::kFill : Fate::kSkip;
  for (; i < job.batch; ++i) {
    const Sequence own = sequence_of(job, i);
    if (own.fault) {
      token.value = nanf("");
      return token;
    }
    if (own.start >= high) return token;
    // The slot is not free; is it here that one of the sequence's tokens starts?
    token.fate = Fate::kSkip;
    const long long s = tokens_in(job, max(low - own.start, 0LL) + job.x_s - 1);
    const long long start = own.start + s * job.x_s;
    if (start >= min(high, own.stop)) continue;
    token.b = i;
    token.s = static_cast<int>(min(s, own.rows));
    token.rows = static_cast<int>(own.rows);
    token.x = token.y = start;
    if (s < own.rows) token.fate = Fate::kTurn;
    else if (start + y_extent(job) <= min(own.stop, job.y_room)) token.fate = Fate::kFill;
    return token;
  }
  return token;
}

#elif ROPE_SEQUENCES == 2

// Sequence i, in tokens that this rank holds: 1 / cp_size of all.
__device__ inline Sequence sequence_of(const Job& job, int i) {
  Sequence own = bounds_of(job, i);
  if (own.fault) return own;
  const long long length = own.stop - own.start;
  own.start = whole(own.start, job.cp_size, job.token_magic);
  own.stop = whole(own.stop, job.cp_size, job.token_magic);
  own.rows = own.stop - own.start;
  if (job.cp_size > 1 && (own.rows % 2 || own.rows * job.cp_size != length)) {
    own.fault = kBadChunks;
  }
  return own;
}

// Token t of the buffers. One of no sequence becomes zero, one of a wrong sequence NaN.
__device__ inline Token token_of(const Job& job, int, int t, int lane) {
  Token token{};
  token.x = t * job.x_s;
  token.y = t * job.y_s;
  token.fate = Fate::kFill;
  const long long reach = (t + 1LL) * job.cp_size;
  const int i = first_ending(job, lane, [&](long long stop) { return stop >= reach; });
  if (i == job.batch) return token;
  const Sequence own = sequence_of(job, i);
  if (own.fault) {
    token.value = nanf("");
  } else if (t >= own.start) {
    token.fate = Fate::kTurn;
    token.b = i;
    // Positions that are read for each token have no sequences.
    token.s = ROPE_POSITION == 1 ? t : t - static_cast<int>(own.start);
    token.rows = static_cast<int>(own.rows);
  }
  return token;
}

#else

__device__ inline Token token_of(const Job& job, int b, int s, int) {
  Token token{Fate::kTurn, b, s, job.rows, b * job.x_b + s * job.x_s, b * job.y_b + s * job.y_s};
  if constexpr (ROPE_CACHE) {
    // Not waited for before the first store: what is read meanwhile does not depend on it.
    const long long row = job.cache_at ? job.cache_at[b * job.cache_b] : 0;
    token.is_lost = row < 0 || row > job.cache_last;
    token.y += (token.is_lost ? 0 : row) * job.y_s;
  }
  return token;
}

#endif

// ---- positions ----------------------------------------------------------------------------------

#if ROPE_POSITION == 0

__device__ inline int position_of(const Job&, const Token& first, int nth) {
  return first.s + nth;
}

#elif ROPE_POSITION == 1

// Of the nth token from `first` on, which must be there.
__device__ inline long long position_of(const Job& job, const Token& first, int nth) {
  return job.ids[first.b * job.id_b + (first.s + nth) * job.id_s];
}

#else

// The same. A rank of C holds chunks `cp_rank` and 2 C - 1 - cp_rank of the 2 C of a sequence.
__device__ inline long long position_of(const Job& job, const Token& first, int nth) {
  const int s = first.s + nth, half = first.rows / 2;
  const int chunks = s < half ? job.cp_rank : 2 * job.cp_size - 2 - job.cp_rank;
  const long long start = job.ids ? job.ids[first.b * job.id_b] : 0;
  const long long place = s + static_cast<long long>(half) * chunks;
  // At most 2^63 - 1, which in fp64 is the same position.
  constexpr long long most = 0x7fffffffffffffffLL;
  return place > most - max(start, 0LL) ? most : start + place;
}

#endif

// Only where kIsChecked.
__device__ inline bool is_outside(const Job& job, long long position) {
  return position < 0 || position >= job.table_rows;
}

// ---- angles -------------------------------------------------------------------------------------

// Which pair is the k-th of a lane that holds vector `vec` of the segment. Where pairs are both
// read and written, a lane holds vectors vec and vec + pairs / V, so that neighbours touch
// neighbouring memory; else it holds the V pairs from vec * V on.
template <int V>
__device__ inline int pair_of(const Job& job, int vec, int k) {
  if constexpr (V > 1 && ROPE_READ_PAIRS && ROPE_WRITE_PAIRS) {
    constexpr int half = V / 2;
    return vec * half + (k < half ? k : job.pairs / 2 + k - half);
  } else {
    return vec * V + k;
  }
}

// Cosines and sines that a lane applies to its V pairs:
//   y1 = x1 cos[0] - x2 sin[0],  y2 = x2 cos[last] + x1 sin[last].
template <int V>
struct Turn {
  float cos[kColumns][V], sin[kColumns][V];
};

// Sine and cosine of x + x_low, each within one unit of the last place in fp32. The reduction is in
// fp64, where a position below 2^29 times an fp32 number is exact, the polynomials are in fp32.
__device__ inline void exact_sincos(double x, double x_low, float* sine, float* cosine) {
  constexpr double kInverse = 0.63661977236758134308;                              // 2 / pi
  constexpr double kHigh = 1.57079632679489655800, kLow = 6.12323399573676603587e-17;  // pi / 2
  double quarter = rint(x * kInverse);
  double r = fma(-quarter, kLow, fma(-quarter, kHigh, x));
  if (x_low != 0.0 || fabs(x) > 1073741824.0) {
    // The quotient was rounded as well: what is left may still be many quarters.
    const double more = rint((r + x_low) * kInverse);
    r = fma(-more, kLow, fma(-more, kHigh, r + x_low));
    quarter = fma(-4.0, rint(0.25 * quarter), quarter);
    quarter += fma(-4.0, rint(0.25 * more), more);
  }
  const int quadrant = static_cast<int>(quarter);
  const float a = static_cast<float>(r), low = static_cast<float>(r - a), z = a * a;
  float p = fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f);
  p = fmaf(p, z, -1.6666654611e-1f);
  const float s = a + fmaf(a * z, p, fmaf(-0.5f * z, low, low));
  float q = fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f);
  q = fmaf(q, z, 4.166664568298827e-2f);
  const float rest = 1.0f - 0.5f * z;
  const float c = rest + (((1.0f - rest) - 0.5f * z) + fmaf(z * z, q, -a * low));
  const bool is_swapped = quadrant & 1;
  const float sin = is_swapped ? c : s, cos = is_swapped ? s : c;
  *sine = quadrant & 2 ? -sin : sin;
  *cosine = quadrant + 1 & 2 ? -cos : cos;
}

// What the lanes of a warp hold together: the angles of up to 32 vectors, of one position after
// the other. Lane l holds in slot a the angle of pair a * J + l % J of vector l / J, with J = V / A
// angles of a vector a slot: so a reader knows the slot at compile time and asks one lane for it.
template <int V, int A>
struct Held {
  static constexpr int J = V / A;
  float angle[A][kColumns];  // or cosines; or, where they are exact, radians a position
  float sine[A][kColumns];
  double position;

  __device__ void fetch(const Job& job, const Token& first, const Split& split, int block,
                        int lane) {
    const int place = lane / J, token = rows_before(split, place);
    const int vec = block + place - token * split.lanes;
    const bool is_there = token < 1 << split.log_tokens && first.s + token < job.rows &&
                          vec < job.pairs / V;
    // Not read from memory for a token that is not there.
    const auto own = ROPE_POSITION && !is_there ? 0 : position_of(job, first, token);
    const bool is_bad = kIsChecked && is_there && is_outside(job, own);
    if (is_bad) atomicOr(job.flag, kBadPosition);
    const bool is_read = is_there && !is_bad;
    const float none = is_bad ? nanf("") : 0.0f;
    const auto nth = is_bad ? 0 : own;
    const ROPE_TABLE* row = job.angles.at + first.b * job.angles.b + nth * job.angles.s;
    const ROPE_TABLE* sines =
        kIsTable ? job.sines.at + job.sine_offset + first.b * job.sines.b + nth * job.sines.s : row;
    position = own;
#pragma unroll
    for (int a = 0; a < A; ++a) {
      const int pair = pair_of<V>(job, vec, a * J + lane % J);
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        angle[a][column] =
            is_read ? widened(row[pair * job.angles.pair + column * job.angles.second]) : none;
        if constexpr (kIsTable) {
          sine[a][column] =
              is_read ? widened(sines[pair * job.sines.pair + column * job.sines.second]) : none;
        }
        if constexpr (ROPE_SOURCE == 2) {
          angle[a][column] = times(static_cast<float>(own), angle[a][column]);
        }
      }
    }
  }

  __device__ void take(const Job& job, float angle, float sine, float& sin, float& cos) const {
    if constexpr (kIsExact) {
      const double x = position * angle;
      exact_sincos(x, fma(position, static_cast<double>(angle), -x), &sin, &cos);
    } else if constexpr (kIsTable) {
      cos = angle;
      sin = sine;
      if constexpr (ROPE_NUMERICS == 2) {
        cos = rounded<ROPE_IN>(times(cos, job.factor));
        sin = rounded<ROPE_IN>(times(sin, job.factor));
      }
    } else {
      sincosf(angle, &sin, &cos);
    }
  }

  // The share of the lane in this seat. All lanes must come here.
  __device__ Turn<V> spread(const Job& job, const Split& split, const Seat& seat) const {
    // Where a lane holds whole vectors and nobody else needs them, each has its own already.
    const bool is_own = A == V && V > 1 && split.heads == 1;
    Turn<V> turn;
#pragma unroll
    for (int a = 0; a < A; ++a) {
      float cos[kColumns], sin[kColumns];
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        take(job, angle[a][column], sine[a][column], sin[column], cos[column]);
        sin[column] = times(sin[column], job.sign);
      }
      if constexpr (kColumns == 2) {
        const float sine = sin[0];
        sin[0] = job.adjoint ? sin[1] : sine;
        sin[1] = job.adjoint ? sine : sin[1];
      }
#pragma unroll
      for (int k = 0; k < J; ++k) {
        const int owner = seat.place * J + k;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          float& own_cos = turn.cos[column][a * J + k];
          float& own_sin = turn.sin[column][a * J + k];
          own_cos = is_own ? cos[column] : __shfl_sync(kAll, cos[column], owner);
          own_sin = is_own ? sin[column] : __shfl_sync(kAll, sin[column], owner);
        }
      }
    }
    return turn;
  }
};

// ---- the heads of a token -----------------------------------------------------------------------

// Where a head starts, in elements from where its token does.
__device__ inline long long place_of(const Job& job, int head, long long step, long long group) {
  long long place = head * step;
  if constexpr (ROPE_GROUPS) place += quotient(head, job.group_magic) * group;
  return place;
}

// The two channels of a pair: y1 of cos1 and sin1, y2 of cos2 and sin2.
__device__ inline void rotate_pair(float factor, float x1, float x2, float cos1, float sin1,
                                   float cos2, float sin2, float& y1, float& y2) {
  if constexpr (ROPE_NUMERICS == 1) {
    y1 = fused(x1, cos1, minus(times(x2, sin1)));
    y2 = fused(x1, sin2, times(x2, cos2));
  } else if constexpr (ROPE_NUMERICS == 2) {
    const auto product = [](float a, float b) { return rounded<ROPE_IN>(times(a, b)); };
    y1 = plus(product(x1, cos1), minus(product(x2, sin1)));
    y2 = plus(product(x2, cos2), product(x1, sin2));
    if constexpr (!kIsSame<ROPE_IN, ROPE_OUT>) {
      y1 = rounded<ROPE_IN>(y1);
      y2 = rounded<ROPE_IN>(y2);
    }
  } else {
    // Spelled out, so that every variant and every GPU rounds alike.
    y1 = times(factor, fused(x1, cos1, minus(times(x2, sin1))));
    y2 = times(factor, fused(x2, cos2, times(x1, sin2)));
  }
}

template <int V>
__device__ inline void rotate(const Turn<V>& turn, float factor, const Vec<ROPE_IN, V>& a,
                              const Vec<ROPE_IN, V>& c, Vec<ROPE_OUT, V>& to_a,
                              Vec<ROPE_OUT, V>& to_c) {
  const auto in = [&](int i) { return i < V ? a.get(i) : c.get(i - V); };
  float y1[V], y2[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const float x1 = in(ROPE_READ_PAIRS ? 2 * k : k), x2 = in(ROPE_READ_PAIRS ? 2 * k + 1 : V + k);
    rotate_pair(factor, x1, x2, turn.cos[0][k], turn.sin[0][k], turn.cos[kColumns - 1][k],
                turn.sin[kColumns - 1][k], y1[k], y2[k]);
  }
#pragma unroll
  for (int k = 0; k < V; k += 2) {
    if constexpr (ROPE_WRITE_PAIRS && V > 1) {
      to_a.set(k, y1[k / 2], y2[k / 2]);
      to_c.set(k, y1[(V + k) / 2], y2[(V + k) / 2]);
    } else {
      to_a.set(k, y1[k], y1[(k + 1) % V]);
      to_c.set(k, y2[k], y2[(k + 1) % V]);
    }
  }
}

// Where a lane's two vectors start, in channels after the first rotated one.
template <int V>
__device__ inline void channels(const Job& job, int vec, bool pairs, int& first, int& second) {
  const bool adjacent = pairs && (kMixed || V == 1);
  first = vec * V * (adjacent ? 2 : 1);
  second = first + (adjacent ? V : job.pairs);
}

// Rotate heads [from, to) of the tokens from `first` on. All lanes must come here.
template <int V, int A>
__device__ inline void turn_heads(const Job& job, const Token& first, const Split& split, int from,
                                  int to, int lane) {
  const long long x_d = V == 1 ? job.x_d : 1, y_d = V == 1 ? job.y_d : 1;
  const int vecs = job.pairs / V;
  const Seat seat(split, lane);
  // rope_vector is for up to 32 vectors: one round.
  for (int block = 0; block < (V == 1 ? vecs : 1); block += kLanes) {
    Held<V, A> held;
    if constexpr (!ROPE_POSITION) held.fetch(job, first, split, block, lane);

    int x1, x2, y1, y2;
    channels<V>(job, block + seat.vec, ROPE_READ_PAIRS, x1, x2);
    channels<V>(job, block + seat.vec, ROPE_WRITE_PAIRS, y1, y2);
    const long long x_step = split.heads * job.x_h, y_step = split.heads * job.y_h;
    const long long x_next = (x2 - x1) * x_d, y_next = (y2 - y1) * y_d;
    int head = from + seat.head, wanted = head;
    // Of its first head; in two levels, of its token.
    const int own = ROPE_GROUPS ? 0 : head;
    const ROPE_IN* x = job.x + first.x + seat.token * job.x_s + own * job.x_h +
                       (job.begin + x1) * x_d;
    ROPE_OUT* y = job.y + first.y + seat.token * job.y_s + own * job.y_h +
                  (job.begin + y1) * y_d;
    const bool is_there =
        seat.head < split.heads && block + seat.vec < vecs && first.s + seat.token < job.rows;
    const int end = is_there ? to : 0, kept = ROPE_CACHE && first.is_lost ? 0 : end;

    Vec<ROPE_IN, V> a[kFlight<V>], c[kFlight<V>];
    const auto load = [&](int f) {
      if (wanted < end) {
        const ROPE_IN* at = ROPE_GROUPS ? x + place_of(job, wanted, job.x_h, job.x_g) : x;
        a[f].load(at);
        c[f].load(at + x_next);
      }
      wanted += split.heads;
      if constexpr (!ROPE_GROUPS) x += x_step;
    };
#pragma unroll
    for (int f = 0; f < kFlight<V>; ++f) load(f);
    // The first loads are on their way: the time until they arrive pays for the sines, and for the
    // table where a position has to be read first.
    if constexpr (ROPE_POSITION) held.fetch(job, first, split, block, lane);
    const Turn<V> turn = held.spread(job, split, seat);
    for (int unit = from; unit < to; unit += kFlight<V> * split.heads) {
      // In place, what one lane writes may be what another has yet to read.
      if constexpr (kMixed) __syncwarp();
#pragma unroll
      for (int f = 0; f < kFlight<V>; ++f) {
        if (head < kept) {
          Vec<ROPE_OUT, V> to_a, to_c;
          rotate<V>(turn, job.factor, a[f], c[f], to_a, to_c);
          ROPE_OUT* at = ROPE_GROUPS ? y + place_of(job, head, job.y_h, job.y_g) : y;
          to_a.store(at);
          to_c.store(at + y_next);
        }
        head += split.heads;
        if constexpr (!ROPE_GROUPS) y += y_step;
        load(f);
      }
    }
  }
}

// Channels outside the rotation: a copy of the bits, or one product. Never a product with 0 or 1,
// which would turn Inf and NaN into other NaN.
template <int V>
__device__ inline void pass_heads(const Job& job, const Token& first, const Split& split, int from,
                                  int to, int lane) {
  constexpr bool is_same = kIsSame<ROPE_IN, ROPE_OUT>;
  const long long x_d = V == 1 ? job.x_d : 1, y_d = V == 1 ? job.y_d : 1;
  const bool is_in_place =
      is_same && static_cast<const void*>(job.x) == static_cast<const void*>(job.y);
  if (!kIsChecked && is_in_place && job.scale == 1.0f) return;  // they are there already
  const int before = job.begin / V, vecs = (job.dim - 2 * job.pairs) / V;
  const Seat seat(split, lane);
  const long long x_step = split.heads * job.x_h, y_step = split.heads * job.y_h;
  // Fewer tokens at a time than are turned at a time, where these channels need more lanes.
  for (int token = seat.token; token < 1 << job.turn.log_tokens; token += 1 << split.log_tokens) {
    float scale = job.scale;
    if constexpr (kIsChecked) {
      const bool is_placed = (!ROPE_CACHE || job.pairs) && first.s + token < job.rows;
      if (is_placed && is_outside(job, position_of(job, first, token))) {
        scale = nanf("");
      }
    }
    const bool is_copy = scale == 1.0f;
    if (kIsChecked && is_in_place && is_copy) continue;
    for (int block = 0; block < vecs; block += kLanes) {
      const int vec = block + seat.vec;
      const bool is_there = seat.head < split.heads && vec < vecs && first.s + token < job.rows;
      const int end = is_there ? to : 0, kept = ROPE_CACHE && first.is_lost ? 0 : end;
      const int channel = vec * V + (vec < before ? 0 : 2 * job.pairs);
      int head = from + seat.head;
      const int own = ROPE_GROUPS ? 0 : head;
      const ROPE_IN* x = job.x + first.x + token * job.x_s + own * job.x_h + channel * x_d;
      ROPE_OUT* y = job.y + first.y + token * job.y_s + own * job.y_h + channel * y_d;

      for (; head < end; head += kFlight<V> * split.heads) {
        Vec<ROPE_IN, V> a[kFlight<V>];
#pragma unroll
        for (int f = 0; f < kFlight<V>; ++f) {
          const int nth = head + f * split.heads;
          if (nth >= end) continue;
          a[f].load(ROPE_GROUPS ? x + place_of(job, nth, job.x_h, job.x_g) : x + f * x_step);
        }
#pragma unroll
        for (int f = 0; f < kFlight<V>; ++f) {
          const int nth = head + f * split.heads;
          if (nth >= kept) continue;
          Vec<ROPE_OUT, V> to_a;
          if constexpr (is_same) to_a = a[f];
          if (!is_same || !is_copy) {
#pragma unroll
            for (int k = 0; k < V; k += 2) {
              to_a.set(k, times(a[f].get(k), scale), times(a[f].get((k + 1) % V), scale));
            }
          }
          to_a.store(ROPE_GROUPS ? y + place_of(job, nth, job.y_h, job.y_g) : y + f * y_step);
        }
        if constexpr (!ROPE_GROUPS) {
          x += kFlight<V> * x_step;
          y += kFlight<V> * y_step;
        }
      }
    }
  }
}

// Every channel of heads [from, to) becomes token.value.
template <int V>
__device__ inline void fill_heads(const Job& job, const Token& token, int from, int to, int lane) {
  const long long y_d = V == 1 ? job.y_d : 1;
  Vec<ROPE_OUT, V> all;
#pragma unroll
  for (int k = 0; k < V; k += 2) all.set(k, token.value, token.value);
  for (int head = from; head < to; ++head) {
    for (int vec = lane; vec < job.dim / V; vec += kLanes) {
      all.store(job.y + token.y + place_of(job, head, job.y_h, job.y_g) + vec * V * y_d);
    }
  }
}

// ---- the grid -----------------------------------------------------------------------------------

template <int V, int A>
__device__ inline void do_heads(const Job& job, const Token& token, const Split& turn,
                                const Split& pass, int from, int to, int lane) {
  if (token.fate == Fate::kTurn) {
    if (!ROPE_CACHE || job.pairs) turn_heads<V, A>(job, token, turn, from, to, lane);
    if constexpr (ROPE_PASS) pass_heads<V>(job, token, pass, from, to, lane);
  } else if (token.fate == Fate::kFill) {
    fill_heads<V>(job, token, from, to, lane);
  }
}

template <int V, int A>
__device__ inline void walk(const Params& p) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const unsigned share = blockIdx.x >> p.log_group, group = quotient(share, p.parts_magic);
  const int tile = (group << p.log_group) + (blockIdx.x - (share << p.log_group));
  int part = share - group * p.parts;
  const bool is_second = part >= p.first_parts, is_third = ROPE_CACHE && part >= p.both_parts;
  const Job& job = p.job[is_second + is_third];
  if (is_second) part -= is_third ? p.both_parts : p.first_parts;
  const int s = ((tile << p.warps_s) + (warp & ((1 << p.warps_s) - 1))) << job.turn.log_tokens;
  const int b = (blockIdx.z * gridDim.y + blockIdx.y) * (ROPE_WARPS >> p.warps_s) +
                (warp >> p.warps_s);
#if ROPE_SEQUENCES
  if (b > 0) return;
  if (part == 0) {
    const long long warps = static_cast<long long>(gridDim.x / p.parts) << p.warps_s;
    check_offsets(job, s, warps, lane);
  }
#else
  if (b >= job.batch) return;
#endif
  if (s >= job.tokens) return;

  const int from = part * job.part_heads, to = min(from + job.part_heads, job.heads);
  const Token token = token_of(job, b, s, lane);
  if constexpr (ROPE_SEQUENCES == 1 && V > 1) {
    // The host cannot know where a sequence starts.
    if (token.x * sizeof(ROPE_IN) % Vec<ROPE_IN, V>::kWordBytes ||
        token.y * sizeof(ROPE_OUT) % Vec<ROPE_OUT, V>::kWordBytes) {
      const Split single{kLanes, 0, 1, 1024 / kLanes};
      do_heads<1, 1>(job, token, single, single, from, to, lane);
      return;
    }
  }
  do_heads<V, A>(job, token, job.turn, job.pass, from, to, lane);
  if (ROPE_CACHE && token.is_lost && lane == 0) atomicOr(job.flag, kBadCache);
}

}  // namespace

#if ROPE_VEC > 1
extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32, ROPE_RESIDENT / ROPE_WARPS)
    rope_vector(const __grid_constant__ Params p) {
  walk<ROPE_VEC, ROPE_ANGLES>(p);
}
#endif

extern "C" __global__ void __launch_bounds__(ROPE_WARPS * 32, 16 / ROPE_WARPS)
    rope_any(const __grid_constant__ Params p) {
  walk<1, 1>(p);
}
