// RMS norm and rotary embedding of [b, h, s, d] tensors in one pass, forward and backward: one job,
// or two in one launch (Q and K). This file follows rope.cu, without its kernels, in one translation
// unit: positions, angles and how a warp shares them out are rope.cu's.
//
// A head row lies in `turn.lanes` lanes, a power of two, each with NORM_TURNS times V pairs of
// channels and NORM_PASSES times V channels that do not turn. So a sum over the row takes a few
// shuffles, and what comes in is read once and written once.
//
// The forward takes rope.cu's grid. The backward has a fixed number of warps, each of which goes on
// from token to token with the same heads: it adds up the gradient of the weight in registers and
// leaves one row of sums behind. norm_sum adds up those rows, always in the same order.
//
// Where all heads of a token are one row of the norm, the backward takes two passes: one warp a token
// leaves the mean that dX needs, and then a warp keeps to as many heads as it holds at once, so that
// each of its lanes adds up the weight of one head.
//
// Specialised at build by ROPE_IN, ROPE_OUT and other macros of rope.cu (the backward reads dY as
// ROPE_IN and writes dX as ROPE_OUT), and by:
//   NORM_BACKWARD                1: the gradients
//   NORM_FIRST                   1: the norm comes before the rotation in the forward
//   NORM_WHOLE                   1: all heads of a token are normalised together
//   NORM_X, NORM_SCALE           element types of what the backward reads as input, of the weight
//   NORM_VEC                     V of norm_vector: 8, 4 or 2; 1 leaves norm_any alone
//   NORM_TURNS, NORM_PASSES      vectors a lane; NORM_ANY_TURNS, NORM_ANY_PASSES those of norm_any
//   NORM_ANGLES                  as ROPE_ANGLES
//   NORM_FLIGHT, NORM_WARPS, NORM_RESIDENT   rows in flight; warps a block; warps an SM at least

namespace {

constexpr bool kFirst = NORM_FIRST;
// What all heads of a token share lies in shared memory: in registers it would take the place of
// loads in flight. In the forward weight and rotation are one where the norm comes first.
constexpr bool kBlends = !NORM_BACKWARD && NORM_FIRST && !NORM_WHOLE;
// Tables with a column for each channel, and weights of more than one head, stay in registers.
constexpr bool kKeeps = kColumns == 1 && (NORM_BACKWARD || !(NORM_FIRST || NORM_WHOLE));
// On the side of the norm, channels lie as they are read, or as they are written.
constexpr bool kNormPairs = (NORM_FIRST != NORM_BACKWARD) ? ROPE_READ_PAIRS : ROPE_WRITE_PAIRS;
constexpr float kLargest = 1e37f;  // a mean of squares past which they are made again, scaled

// The norm of one job.
struct Norm {
  const NORM_X* x;                     // backward: the input of the forward
  const NORM_SCALE* scale;
  float* inverse;                      // inv_variance; the forward writes it unless it is null
  float* sums;                         // backward: a row of d for each warp, or of all heads for
                                       // the warps of all parts; null: not wanted
  NORM_SCALE* dscale;
  float* means;                        // backward over all heads: of g n, of each token
  long long x_b, x_h, x_s, x_d;
  long long scale_h, scale_d, dscale_h, dscale_d;
  long long inverse_b, inverse_h, inverse_s;
  unsigned long long items_magic;      // 2^64 / tiles, rounded up; 0 if tiles is 1
  long long items;                     // backward: batch entries times tiles
  int tiles;
  int warps;                           // backward: that share the items of a part
  float epsilon, small, per, centre;   // small: a mean of squares below which it is made again
};

struct NormParams {
  Norm norm[2];
  Params rope;
};

// The numbers of a lane: pairs (a, c), and channels that do not turn.
template <int V, int T, int P>
struct Row {
  float a[T][V], c[T][V], p[P ? P : 1][V];

  template <typename F>
  __device__ void each(F f) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
#pragma unroll
      for (int t = 0; t < T; ++t) f(a[t][k]), f(c[t][k]);
#pragma unroll
      for (int i = 0; i < P; ++i) f(p[i][k]);
    }
  }

  template <typename F>
  __device__ void with(const Row& other, F f) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
#pragma unroll
      for (int t = 0; t < T; ++t) f(a[t][k], other.a[t][k]), f(c[t][k], other.c[t][k]);
#pragma unroll
      for (int i = 0; i < P; ++i) f(p[i][k], other.p[i][k]);
    }
  }
};

// Where the vectors of a lane start, in channels from the first of the row; -1: there is none.
template <int V, int T, int P>
struct Places {
  int a[T], c[T], p[P ? P : 1];

  __device__ Places(const Job& job, const Seat& seat, bool pairs) {
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const int vec = seat.vec + t * job.turn.lanes;
      channels<V>(job, vec, pairs, a[t], c[t]);
      a[t] = vec < job.pairs / V ? a[t] + job.begin : -1;
      c[t] += job.begin;
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      const int vec = seat.vec + i * job.turn.lanes;
      const bool is_there = vec < (job.dim - 2 * job.pairs) / V;
      p[i] = is_there ? vec * V + (vec < job.begin / V ? 0 : 2 * job.pairs) : -1;
    }
  }
};

// The same as they lie in memory.
template <typename E, int V, int T, int P>
struct Packed {
  Vec<E, V> a[T], c[T], p[P ? P : 1];

  __device__ void clear() {
    const auto zero = [](Vec<E, V>& x) {
#pragma unroll
      for (int k = 0; k < V; k += 2) x.set(k, 0.0f, 0.0f);
    };
#pragma unroll
    for (int t = 0; t < T; ++t) zero(a[t]), zero(c[t]);
#pragma unroll
    for (int i = 0; i < P; ++i) zero(p[i]);
  }

  // What is not there is left as it was.
  __device__ void reload(const E* row, const Places<V, T, P>& at, long long d, bool is_there) {
    if (!is_there) return;
    const auto channel = [&](int nth) { return row + nth * (V == 1 ? d : 1); };
#pragma unroll
    for (int t = 0; t < T; ++t) {
      if (at.a[t] < 0) continue;
      a[t].load(channel(at.a[t]));
      c[t].load(channel(at.c[t]));
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (at.p[i] >= 0) p[i].load(channel(at.p[i]));
    }
  }

  // What is not there is zero.
  __device__ void load(const E* row, const Places<V, T, P>& at, long long d, bool is_there) {
    clear();
    reload(row, at, d, is_there);
  }

  __device__ void store(E* row, const Places<V, T, P>& at, long long d) const {
    const auto channel = [&](int nth) { return row + nth * (V == 1 ? d : 1); };
#pragma unroll
    for (int t = 0; t < T; ++t) {
      if (at.a[t] < 0) continue;
      a[t].store(channel(at.a[t]));
      c[t].store(channel(at.c[t]));
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (at.p[i] >= 0) p[i].store(channel(at.p[i]));
    }
  }

  template <bool Pairs>
  __device__ Row<V, T, P> wide() const {
    Row<V, T, P> row;
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const auto in = [&](int i) { return i < V ? a[t].get(i) : c[t].get(i - V); };
#pragma unroll
      for (int k = 0; k < V; ++k) {
        row.a[t][k] = in(Pairs ? 2 * k : k);
        row.c[t][k] = in(Pairs ? 2 * k + 1 : V + k);
      }
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
#pragma unroll
      for (int k = 0; k < V; ++k) row.p[i][k] = p[i].get(k);
    }
    return row;
  }

  template <bool Pairs>
  __device__ void round(const Row<V, T, P>& row) {
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int k = 0; k < V; k += 2) {
        if constexpr (Pairs && V > 1) {
          a[t].set(k, row.a[t][k / 2], row.c[t][k / 2]);
          c[t].set(k, row.a[t][(V + k) / 2], row.c[t][(V + k) / 2]);
        } else {
          a[t].set(k, row.a[t][k], row.a[t][(k + 1) % V]);
          c[t].set(k, row.c[t][k], row.c[t][(k + 1) % V]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
#pragma unroll
      for (int k = 0; k < V; k += 2) p[i].set(k, row.p[i][k], row.p[i][(k + 1) % V]);
    }
  }
};

// Arithmetic is rope.cu's, which keeps subnormal numbers: inv_variance of huge rows is one.

// The sum over the lanes whose numbers differ in the bits from `step` up to `end`.
__device__ inline float lane_sum(float x, int lane, int step, int end) {
  for (; step < end; step *= 2) {
    x = plus(x, __shfl_sync(kAll, x, lane ^ step));
  }
  return x;
}

__device__ inline float lane_max(float x, int lane, int end) {
  for (int step = 1; step < end; step *= 2) x = fmaxf(x, __shfl_sync(kAll, x, lane ^ step));
  return x;
}

// 2^-e, to multiply a row by whose largest number lies between 2^e and 2^(e + 1). No more than 1
// where epsilon hides the smallest numbers, and no more than leaves epsilon finite.
__device__ inline float shrink_of(const Norm& norm, float largest) {
  const int e = static_cast<int>(__float_as_uint(largest) >> 23 & 255u);
  if (e == 255) return 1.0f;
  const int low = norm.small > 0.0f ? 67 : 127;
  return __uint_as_float(static_cast<unsigned>(max(254 - max(e, low), 1)) << 23);
}

__device__ inline bool is_off(const Norm& norm, float mean) {
  return !(mean <= kLargest) || mean < norm.small;
}

// The sum of products, in four chains: each addition waits for the one before it.
template <int V, int T, int P>
__device__ inline float dot(const Row<V, T, P>& x, const Row<V, T, P>& y) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < V; ++k) {
    float &even = sum[k % 2], &odd = sum[2 + k % 2];
#pragma unroll
    for (int t = 0; t < T; ++t) {
      even = fused(x.a[t][k], y.a[t][k], even);
      odd = fused(x.c[t][k], y.c[t][k], odd);
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float& either = i % 2 ? odd : even;
      either = fused(x.p[i][k], y.p[i][k], either);
    }
  }
  return plus(plus(sum[0], sum[1]), plus(sum[2], sum[3]));
}

template <int V, int T, int P>
__device__ inline float squares(const Row<V, T, P>& row) {
  return dot(row, row);
}

template <int V, int T, int P>
__device__ inline float largest_of(Row<V, T, P>& row) {
  float found = 0.0f;
  row.each([&](float x) { found = fmaxf(found, fabsf(x)); });
  return found;
}

// Rotate, and scale what does not turn.
template <int V, int T, int P>
__device__ inline void turn_row(const Turn<V> (&turn)[T], float factor, float scale,
                                Row<V, T, P>& row) {
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float x1 = row.a[t][k], x2 = row.c[t][k];
      rotate_pair(factor, x1, x2, turn[t].cos[0][k], turn[t].sin[0][k],
                  turn[t].cos[kColumns - 1][k], turn[t].sin[kColumns - 1][k], row.a[t][k],
                  row.c[t][k]);
    }
  }
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int k = 0; k < V; ++k) row.p[i][k] = times(row.p[i][k], scale);
  }
}

// What a pair is multiplied by, weight, rotation and factor in one: y1 = x1 a1 + x2 c1.
struct alignas(16) Blend {
  float a1, c1, a2, c2;
};

// The weight goes into the rotation that follows it, and into the scale of what does not turn:
// once a token, where it would be once a row.
template <int V, int T, int P>
__device__ inline void blend(const Turn<V> (&turn)[T], float factor, float scale,
                             Row<V, T, P>& weight, Blend (*blends)[kLanes], int lane) {
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float a = times(weight.a[t][k], factor), c = times(weight.c[t][k], factor);
      blends[t * V + k][lane] = {
          times(a, turn[t].cos[0][k]), minus(times(c, turn[t].sin[0][k])),
          times(a, turn[t].sin[kColumns - 1][k]), times(c, turn[t].cos[kColumns - 1][k])};
    }
  }
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int k = 0; k < V; ++k) weight.p[i][k] = times(weight.p[i][k], scale);
  }
}

template <int V, int T, int P>
__device__ inline void turn_row(const Blend (*blends)[kLanes], int lane,
                                const Row<V, T, P>& weight, Row<V, T, P>& row) {
  asm volatile("" ::: "memory");  // or the compiler keeps them all in registers after all
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const Blend by = blends[t * V + k][lane];
      const float x1 = row.a[t][k], x2 = row.c[t][k];
      row.a[t][k] = fused(x1, by.a1, times(x2, by.c1));
      row.c[t][k] = fused(x2, by.c2, times(x1, by.a2));
    }
  }
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int k = 0; k < V; ++k) row.p[i][k] = times(row.p[i][k], weight.p[i][k]);
  }
}

// Of a pair: its angle, and the weights of its channels, in shared memory as Blend is.
struct alignas(16) Kept {
  float cos, sin, a, c;
};

template <int V, int T, int P>
__device__ inline void keep_weight(const Row<V, T, P>& weight, Kept (*kept)[kLanes], int lane) {
#pragma unroll
  for (int i = 0; i < T * V; ++i) {
    kept[i][lane].a = weight.a[i / V][i % V];
    kept[i][lane].c = weight.c[i / V][i % V];
  }
}

template <int V, int T>
__device__ inline void keep_turn(const Turn<V> (&turn)[T], Kept (*kept)[kLanes], int lane) {
#pragma unroll
  for (int i = 0; i < T * V; ++i) {
    kept[i][lane].cos = turn[i / V].cos[0][i % V];
    kept[i][lane].sin = turn[i / V].sin[0][i % V];
  }
}

// forth: against the angle.
template <int V, int T, int P>
__device__ inline void turn_row(const Kept (*kept)[kLanes], int lane, bool forth, float factor,
                                float scale, Row<V, T, P>& row) {
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float cos = kept[t * V + k][lane].cos, sin = kept[t * V + k][lane].sin;
      float &x1 = forth ? row.c[t][k] : row.a[t][k], &x2 = forth ? row.a[t][k] : row.c[t][k];
      rotate_pair(factor, x1, x2, cos, sin, cos, sin, x1, x2);
    }
  }
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int k = 0; k < V; ++k) row.p[i][k] = times(row.p[i][k], scale);
  }
}

// f(value, weight) of each channel. weight: holds those of channels that do not turn.
template <int V, int T, int P, typename F>
__device__ inline void with_weight(const Kept (*kept)[kLanes], int lane,
                                   const Row<V, T, P>& weight, Row<V, T, P>& row, F f) {
#pragma unroll
  for (int i = 0; i < T * V; ++i) {
    f(row.a[i / V][i % V], kept[i][lane].a);
    f(row.c[i / V][i % V], kept[i][lane].c);
  }
#pragma unroll
  for (int i = 0; i < P * V; ++i) f(row.p[i / V][i % V], weight.p[i / V][i % V]);
}

// The other way round: of an adjoint, what it is the adjoint of.
template <int V>
__device__ inline void reverse(const Turn<V>& turn, Turn<V>& back) {
#pragma unroll
  for (int k = 0; k < V; ++k) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      back.cos[column][k] = turn.cos[column][k];
      back.sin[column][k] = minus(turn.sin[kColumns - 1 - column][k]);
    }
  }
}

template <int V, int T, int P>
__device__ inline Row<V, T, P> weight_of(const Norm& norm, const Places<V, T, P>& at, int head,
                                         bool is_there) {
  Packed<NORM_SCALE, V, T, P> held;
  held.load(norm.scale + head * norm.scale_h, at, norm.scale_d, is_there);
  Row<V, T, P> row = held.template wide<kNormPairs>();
  row.each([&](float& x) { x += norm.centre; });
  return row;
}

// The angles of a token. All lanes must come here.
template <int V, int T, int A>
__device__ inline void turn_of(const Job& job, const Token& token, const Seat& seat, int lane,
                               Turn<V> (&turn)[T]) {
#pragma unroll
  for (int t = 0; t < T; ++t) {
    Held<V, A> held{};
    if (token.fate == Fate::kTurn) held.fetch(job, token, job.turn, t * job.turn.lanes, lane);
    turn[t] = held.spread(job, job.turn, seat);
  }
}

// What channels that do not turn are scaled by: NaN where the position is wrong.
__device__ inline float pass_scale(const Job& job, const Token& token, const Seat& seat) {
  if constexpr (kIsChecked) {
    const bool is_there = token.fate == Fate::kTurn && token.s + seat.token < job.rows;
    if (is_there && is_outside(job, position_of(job, token, seat.token))) return nanf("");
  }
  return job.scale;
}

#if !NORM_BACKWARD

// ---- forward ------------------------------------------------------------------------------------

// Heads [from, to) of the tokens from `token` on, of which the first is row s of batch entry b.
template <int V, int T, int P, int A>
__device__ inline void norm_heads(const Job& job, const Norm& norm, const Token& token, int b, int s,
                                  int from, int to, int lane) {
  constexpr int F = NORM_FLIGHT;
  const Split& split = job.turn;
  const Seat seat(split, lane);
  const Places<V, T, P> in(job, seat, ROPE_READ_PAIRS), out(job, seat, ROPE_WRITE_PAIRS);
  const Places<V, T, P>& weighed = kFirst ? in : out;
  const bool is_token = s + seat.token < job.tokens;
  const bool is_dead = token.fate == Fate::kFill;
  const ROPE_IN* x = job.x + token.x + seat.token * job.x_s;
  ROPE_OUT* y = job.y + token.y + seat.token * job.y_s;
  const int sum_lanes = NORM_WHOLE ? kLanes : split.lanes;

  Packed<ROPE_IN, V, T, P> held[F];
  int wanted = from + seat.head;
  const ROPE_IN* next = x + wanted * job.x_h;
  const long long x_step = split.heads * job.x_h, y_step = split.heads * job.y_h;
  // Heads past the last one are worked on like one before, and not written.
  const auto load = [&](int f) {
    held[f].reload(next, in, job.x_d, is_token && wanted < to);
    wanted += split.heads;
    next += x_step;
  };
#pragma unroll
  for (int f = 0; f < F; ++f) held[f].clear(), load(f);

  Row<V, T, P> weight;
  if constexpr (!NORM_WHOLE) weight = weight_of(norm, weighed, 0, true);
  Turn<V> turn[T];
  turn_of<V, T, A>(job, token, seat, lane, turn);
  const float scale = pass_scale(job, token, seat);
  __shared__ Blend blends[kBlends ? NORM_WARPS : 1][kBlends ? T * V : 1][kLanes];
  Blend(*const own)[kLanes] = blends[kBlends ? threadIdx.x / kLanes : 0];
  if constexpr (kBlends) blend(turn, job.factor, scale, weight, own, lane);
  __shared__ Kept block_kept[kKeeps ? NORM_WARPS : 1][kKeeps ? T * V : 1][kLanes];
  Kept(*const kept)[kLanes] = block_kept[kKeeps ? threadIdx.x / kLanes : 0];
  if constexpr (kKeeps) keep_weight(weight, kept, lane), keep_turn(turn, kept, lane);

  // What is squared.
  const auto normed = [&](const Packed<ROPE_IN, V, T, P>& packed) {
    Row<V, T, P> row = packed.template wide<ROPE_READ_PAIRS>();
    if constexpr (!kFirst) {
      if constexpr (kKeeps) {
        asm volatile("" ::: "memory");  // as for Blend
        turn_row(kept, lane, false, job.factor, scale, row);
      } else {
        turn_row(turn, job.factor, scale, row);
      }
      if (is_dead) row.each([&](float& value) { value = token.value; });
    }
    return row;
  };
  long long inverse_at = b * norm.inverse_b + (s + seat.token) * norm.inverse_s;
  const bool has_inverse = norm.inverse && is_token;

  float inverse = 1.0f, shrink = 1.0f;
  if constexpr (NORM_WHOLE) {
    // All heads once more, and once before: by then they lie in a cache.
    const auto sweep = [&](bool is_sum) {
      float found = 0.0f;
#pragma unroll 4
      for (int unit = from; unit < to; unit += split.heads) {
        const int head = unit + seat.head;
        const bool is_there = is_token && head < to;
        Packed<ROPE_IN, V, T, P> one;
        one.load(x + (is_there ? head * job.x_h : 0), in, job.x_d, is_there);
        Row<V, T, P> row = normed(one);
        row.each([&](float& value) { value = times(value, shrink); });
        const float own = is_sum ? squares(row) : largest_of(row);
        // Of a dead token every channel has a value, there or not.
        if (is_there) found = is_sum ? found + own : fmaxf(found, own);
      }
      return found;
    };
    float mean = lane_sum(sweep(true), lane, 1, kLanes) * norm.per;
    if (is_off(norm, mean)) {  // of the whole warp
      shrink = shrink_of(norm, lane_max(sweep(false), lane, kLanes));
      mean = lane_sum(sweep(true), lane, 1, kLanes) * norm.per;
    }
    inverse = rsqrtf(mean + norm.epsilon * shrink * shrink);
    if (has_inverse && lane == 0) norm.inverse[inverse_at] = times(inverse, shrink);
  }

  int head = from + seat.head;
  y += head * job.y_h;
  inverse_at += head * norm.inverse_h;
  const long long inverse_step = split.heads * norm.inverse_h;
  for (int unit = from; unit < to; unit += F * split.heads) {
#pragma unroll
    for (int f = 0; f < F; ++f) {
      const bool is_there = is_token && head < to;
      Row<V, T, P> row = normed(held[f]);
      load(f);
      if constexpr (NORM_WHOLE) {
        weight = weight_of(norm, weighed, is_there ? head : 0, is_there);
        row.each([&](float& value) { value = times(value, shrink); });
      } else {
        float mean = lane_sum(squares(row), lane, 1, sum_lanes) * norm.per;
        float written = inverse = rsqrtf(mean + norm.epsilon);
        if (__ballot_sync(kAll, is_off(norm, mean))) {
          shrink = shrink_of(norm, lane_max(largest_of(row), lane, sum_lanes));
          row.each([&](float& value) { value = times(value, shrink); });
          mean = lane_sum(squares(row), lane, 1, sum_lanes) * norm.per;
          inverse = rsqrtf(mean + norm.epsilon * shrink * shrink);
          written = times(inverse, shrink);
        }
        if (has_inverse && head < to && seat.vec == 0) norm.inverse[inverse_at] = written;
      }
      if constexpr (kBlends) {
        row.each([&](float& value) { value = times(value, inverse); });
        turn_row(own, lane, weight, row);
      } else {
        const auto weigh = [&](float& value, float w) { value = times(value, times(inverse, w)); };
        if constexpr (kKeeps) with_weight(kept, lane, weight, row, weigh);
        else row.with(weight, weigh);
        if constexpr (kFirst) turn_row(turn, job.factor, scale, row);
      }
      if constexpr (kFirst) {
        if (is_dead) row.each([&](float& value) { value = token.value; });
      }
      if (is_there) {
        Packed<ROPE_OUT, V, T, P> written;
        written.template round<ROPE_WRITE_PAIRS>(row);
        written.store(y, out, job.y_d);
      }
      head += split.heads;
      y += y_step;
      inverse_at += inverse_step;
    }
  }
}

template <int V, int T, int P, int A>
__device__ inline void norm_walk(const NormParams& p) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const unsigned share = blockIdx.x >> p.rope.log_group;
  const unsigned group = quotient(share, p.rope.parts_magic);
  const int tile = (group << p.rope.log_group) + (blockIdx.x - (share << p.rope.log_group));
  int part = share - group * p.rope.parts;
  const bool is_second = part >= p.rope.first_parts;
  const Job& job = p.rope.job[is_second];
  if (is_second) part -= p.rope.first_parts;
  const int s = ((tile << p.rope.warps_s) + (warp & ((1 << p.rope.warps_s) - 1)))
                << job.turn.log_tokens;
  const int b = (blockIdx.z * gridDim.y + blockIdx.y) * (NORM_WARPS >> p.rope.warps_s) +
                (warp >> p.rope.warps_s);
#if ROPE_SEQUENCES
  if (b > 0) return;
  if (part == 0) {
    const long long warps = static_cast<long long>(gridDim.x / p.rope.parts) << p.rope.warps_s;
    check_offsets(job, s, warps, lane);
  }
#else
  if (b >= job.batch) return;
#endif
  if (s >= job.tokens) return;
  const int from = part * job.part_heads, to = min(from + job.part_heads, job.heads);
  const Token token = token_of(job, b, s, lane);
  norm_heads<V, T, P, A>(job, p.norm[is_second], token, b, s, from, to, lane);
}

#else

// ---- backward -----------------------------------------------------------------------------------

// True where the row that the lane holds a part of is zero. All lanes must come here.
template <int V, int T, int P>
__device__ inline bool is_zero(Row<V, T, P>& row, const Split& split, int lane) {
  bool is_any = false;
  row.each([&](float& value) { is_any |= value != 0.0f; });
  const unsigned lanes = split.lanes < kLanes ? (1u << split.lanes) - 1 : kAll;
  return !(__ballot_sync(kAll, is_any) & lanes << rows_before(split, lane) * split.lanes);
}

// Positive and finite, subnormal numbers among them. The forward leaves something else of rows of
// Inf or NaN, and of zeros without an epsilon.
__device__ inline bool is_usual(float inverse) {
  return __float_as_uint(inverse) - 1u < 0x7f7fffffu;
}

#if NORM_WHOLE

// The mean over all heads that the gradient of a token needs; 0 where nothing comes back for it.
template <int V, int T, int P, int A>
__device__ inline void norm_mean(const Job& job, const Norm& norm, unsigned item, int lane) {
  const Split& split = job.turn;
  const Seat seat(split, lane);
  const Places<V, T, P> in(job, seat, ROPE_READ_PAIRS), out(job, seat, ROPE_WRITE_PAIRS);
  const Places<V, T, P>& weighed = kFirst ? out : in;
  const int b = quotient(item, norm.items_magic);
  const int s = static_cast<int>(item - static_cast<long long>(b) * norm.tiles);
  const Token token = token_of(job, b, s, lane);
  if (token.fate == Fate::kFill) {
    if (lane == 0) norm.means[item] = 0.0f;
    return;
  }
  const ROPE_IN* dy = job.x + token.x;
  const NORM_X* x = norm.x + b * norm.x_b + s * norm.x_s;
  const float inverse = norm.inverse[b * norm.inverse_b + s * norm.inverse_s];

  Packed<ROPE_IN, V, T, P> held_dy;
  Packed<NORM_X, V, T, P> held_x;
  int wanted = seat.head;
  const auto load = [&] {
    const bool is_there = wanted < job.heads;
    const int head = is_there ? wanted : 0;
    held_dy.load(dy + head * job.x_h, in, job.x_d, is_there);
    held_x.load(x + head * norm.x_h, out, norm.x_d, is_there);
    wanted += split.heads;
  };
  load();
  Turn<V> turn[T];
  turn_of<V, T, A>(job, token, seat, lane, turn);
  if constexpr (!kFirst) {
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const Turn<V> back = turn[t];
      reverse(back, turn[t]);
    }
  }
  const float scale = pass_scale(job, token, seat);

  float sum = 0.0f;
  bool is_any = false;
  for (int unit = 0; unit < job.heads; unit += split.heads) {
    const int head = unit + seat.head;
    const bool is_there = head < job.heads;
    Row<V, T, P> grad = held_dy.template wide<ROPE_READ_PAIRS>();
    Row<V, T, P> n = held_x.template wide<ROPE_WRITE_PAIRS>();
    load();
    turn_row(turn, job.factor, scale, kFirst ? grad : n);
    grad.each([&](float& value) { is_any |= value != 0.0f; });
    n.each([&](float& value) { value = times(value, is_there ? inverse : 0.0f); });
    const Row<V, T, P> weight = weight_of(norm, weighed, is_there ? head : 0, is_there);
    grad.with(weight, [](float& value, float w) { value = times(value, w); });
    sum = plus(sum, dot(grad, n));
  }
  sum = lane_sum(sum, lane, 1, kLanes) * norm.per;
  const bool is_silent = !__ballot_sync(kAll, is_any);
  if (lane == 0) norm.means[item] = is_silent ? 0.0f : sum;
}

// grid.x: blocks of warps, each with a token of one job after the other.
template <int V, int T, int P, int A>
__device__ inline void mean_walk(const NormParams& p) {
  const int lane = threadIdx.x % kLanes;
  long long item = static_cast<long long>(blockIdx.x) * NORM_WARPS + threadIdx.x / kLanes;
  const bool is_second = item >= p.norm[0].items;
  if (is_second) item -= p.norm[0].items;
  const Norm& norm = p.norm[is_second];
  if (item >= norm.items) return;
  norm_mean<V, T, P, A>(p.rope.job[is_second], norm, static_cast<unsigned>(item), lane);
}

#endif

// A part of the heads of every token that this warp comes to; `warp` of norm.warps. Over all heads a
// part is what a warp holds at once: weight and sums of a lane are those of one head.
template <int V, int T, int P, int A>
__device__ inline void norm_items(const Job& job, const Norm& norm, int part, int warp, int lane) {
  const Split& split = job.turn;
  const Seat seat(split, lane);
  const Places<V, T, P> in(job, seat, ROPE_READ_PAIRS), out(job, seat, ROPE_WRITE_PAIRS);
  const Places<V, T, P>& weighed = kFirst ? out : in;
  const int from = part * job.part_heads, to = min(from + job.part_heads, job.heads);
  const int only = NORM_WHOLE ? from + seat.head : 0;  // the head of the weight
  const Row<V, T, P> weight =
      NORM_WHOLE ? weight_of(norm, weighed, only < to ? only : 0, only < to)
                 : weight_of(norm, weighed, 0, true);
  __shared__ Kept block_kept[kKeeps ? NORM_WARPS : 1][kKeeps ? T * V : 1][kLanes];
  Kept(*const kept)[kLanes] = block_kept[kKeeps ? threadIdx.x / kLanes : 0];
  if constexpr (kKeeps) keep_weight(weight, kept, lane);
  Row<V, T, P> sums;
  sums.each([](float& x) { x = 0.0f; });

  for (long long item = warp; item < norm.items; item += norm.warps) {
    const int b = quotient(static_cast<unsigned>(item), norm.items_magic);
    const int s = static_cast<int>(item - static_cast<long long>(b) * norm.tiles)
                  << split.log_tokens;
    const Token token = token_of(job, b, s, lane);
    const bool is_token = s + seat.token < job.tokens;
    const bool is_dead = token.fate == Fate::kFill;
    const ROPE_IN* dy = job.x + token.x + seat.token * job.x_s;
    ROPE_OUT* dx = job.y + token.y + seat.token * job.y_s;
    const NORM_X* x = norm.x + b * norm.x_b + (s + seat.token) * norm.x_s;
    const float* inverses = norm.inverse + b * norm.inverse_b + (s + seat.token) * norm.inverse_s;

    Packed<ROPE_IN, V, T, P> held_dy;
    Packed<NORM_X, V, T, P> held_x;
    float inverse = 0.0f;
    int wanted = from + seat.head;
    const auto load = [&] {
      const bool is_there = is_token && wanted < to;
      const int head = is_there ? wanted : 0;
      held_dy.load(dy + head * job.x_h, in, job.x_d, is_there);
      held_x.load(x + head * norm.x_h, out, norm.x_d, is_there);
      inverse = is_there ? inverses[head * norm.inverse_h] : 0.0f;
      wanted += split.heads;
    };
    load();
    const float whole_mean = NORM_WHOLE ? norm.means[item] : 0.0f;
    Turn<V> turn[T], forth[T];
    turn_of<V, T, A>(job, token, seat, lane, turn);
    if constexpr (kKeeps) {
      keep_turn(turn, kept, lane);
    } else if constexpr (!kFirst) {
#pragma unroll
      for (int t = 0; t < T; ++t) reverse(turn[t], forth[t]);
    }
    const float scale = pass_scale(job, token, seat);
    const auto turn_back = [&](Row<V, T, P>& row) {
      if constexpr (kKeeps) turn_row(kept, lane, false, job.factor, scale, row);
      else turn_row(turn, job.factor, scale, row);
    };
    const auto turn_forth = [&](Row<V, T, P>& row) {
      if constexpr (kKeeps) turn_row(kept, lane, true, job.factor, scale, row);
      else turn_row(forth, job.factor, scale, row);
    };

    for (int unit = from; unit < to; unit += split.heads) {
      const int head = unit + seat.head;
      const bool is_there = is_token && head < to;
      Row<V, T, P> grad = held_dy.template wide<ROPE_READ_PAIRS>();
      Row<V, T, P> n = held_x.template wide<ROPE_WRITE_PAIRS>();
      float own = inverse;
      if constexpr (!NORM_WHOLE) load();
      asm volatile("" ::: "memory");  // what is kept must not go back into registers
      if constexpr (kFirst) turn_back(grad);
      else turn_forth(n);
      // A token of no sequence: nothing comes from it, and nothing of the weight.
      if (is_dead) grad.each([](float& value) { value = 0.0f; });
      n.each([&](float& value) { value = times(value, own); });
      // Where nothing comes back for a row nothing is asked of x: padding may hold NaN, and has no
      // number for its inverse then.
#if NORM_WHOLE
      // The row is the whole token. Its mean is NaN then, unless nothing comes back or n is 0 anyway.
      if (is_dead || (!is_usual(own) && whole_mean == 0.0f)) {
        n.each([](float& value) { value = 0.0f; });
        own = 0.0f;
      }
#else
      if (__ballot_sync(kAll, is_there && (is_dead || !is_usual(own)))) {  // of the whole warp
        const bool is_silent = is_zero(grad, split, lane);
        n.each([&](float& value) { value = is_silent ? 0.0f : value; });
        own = is_silent ? 0.0f : own;
      }
#endif
#pragma unroll
      for (int k = 0; k < V; ++k) {
#pragma unroll
        for (int t = 0; t < T; ++t) {
          sums.a[t][k] = fused(grad.a[t][k], n.a[t][k], sums.a[t][k]);
          sums.c[t][k] = fused(grad.c[t][k], n.c[t][k], sums.c[t][k]);
        }
#pragma unroll
        for (int i = 0; i < P; ++i) {
          sums.p[i][k] = fused(grad.p[i][k], n.p[i][k], sums.p[i][k]);
        }
      }
      const auto weigh = [](float& value, float w) { value = times(value, w); };
      if constexpr (kKeeps) with_weight(kept, lane, weight, grad, weigh);
      else grad.with(weight, weigh);
      const float mean =
          NORM_WHOLE ? whole_mean : lane_sum(dot(grad, n), lane, 1, split.lanes) * norm.per;
      grad.with(n, [&](float& g, float value) { g = times(own, fused(minus(value), mean, g)); });
      if constexpr (!kFirst) turn_back(grad);
      if (is_dead) grad.each([&](float& value) { value = token.value; });
      if (job.y && is_there) {
        Packed<ROPE_OUT, V, T, P> written;
        written.template round<ROPE_WRITE_PAIRS>(grad);
        written.store(dx + head * job.y_h, out, job.y_d);
      }
    }
  }
  if (!norm.sums) return;
#if NORM_WHOLE
  if (only >= to) return;
  float* row = norm.sums + (static_cast<long long>(warp) * job.heads + only) * job.dim;
#else
  // Lanes that hold the same channels of other heads and tokens.
  sums.each([&](float& value) { value = lane_sum(value, lane, split.lanes, kLanes); });
  if (lane >= split.lanes) return;
  float* row = norm.sums + (static_cast<long long>(part) * norm.warps + warp) * job.dim;
#endif
#pragma unroll
  for (int k = 0; k < V; ++k) {
    // The channel of the k-th number of vector pairs (a, c), as wide() takes them.
    const auto store = [&](int nth, int a, int c, float value) {
      row[nth < V ? a + nth : c + nth - V] = value;
    };
#pragma unroll
    for (int t = 0; t < T; ++t) {
      if (weighed.a[t] < 0) continue;
      store(kNormPairs ? 2 * k : k, weighed.a[t], weighed.c[t], sums.a[t][k]);
      store(kNormPairs ? 2 * k + 1 : V + k, weighed.a[t], weighed.c[t], sums.c[t][k]);
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (weighed.p[i] >= 0) row[weighed.p[i] + k] = sums.p[i][k];
    }
  }
}

// grid.x: blocks of warps, of one part of one job after the other.
template <int V, int T, int P, int A>
__device__ inline void norm_walk(const NormParams& p) {
  const int lane = threadIdx.x % kLanes;
  const int nth = blockIdx.x * NORM_WARPS + threadIdx.x / kLanes;
  const int first = p.rope.first_parts * p.norm[0].warps;
  const bool is_second = nth >= first;
  const Job& job = p.rope.job[is_second];
  const Norm& norm = p.norm[is_second];
  const int own = is_second ? nth - first : nth;
  if (is_second && own >= (p.rope.parts - p.rope.first_parts) * norm.warps) return;
  const int part = own / norm.warps, warp = own - part * norm.warps;
#if ROPE_SEQUENCES
  if (part == 0) check_offsets(job, warp, norm.warps, lane);
#endif
  norm_items<V, T, P, A>(job, norm, part, warp, lane);
}

constexpr int kSumWarps = 32, kSumColumns = 8;

struct Sums {
  float of[kSumWarps][kSumColumns];
};

// Channels of a row of sums.
__device__ inline int sum_width(const Job& job) {
  return NORM_WHOLE ? job.heads * job.dim : job.dim;
}

// A block adds up kSumColumns columns: grid.x those of one job after those of the other.
__device__ inline const Norm* summed(const NormParams& p, int lane, int& column, int& rows,
                                     int& width, int& dim) {
  const int first = sum_width(p.rope.job[0]);
  const int before = p.norm[0].sums ? (first + kSumColumns - 1) / kSumColumns : 0;
  const bool is_second = static_cast<int>(blockIdx.x) >= before;
  column = (blockIdx.x - (is_second ? before : 0)) * kSumColumns + lane % kSumColumns;
  const int parts = is_second ? p.rope.parts - p.rope.first_parts : p.rope.first_parts;
  rows = (NORM_WHOLE ? 1 : parts) * p.norm[is_second].warps;
  width = sum_width(p.rope.job[is_second]);
  dim = p.rope.job[is_second].dim;
  return &p.norm[is_second];
}

// Four rows a warp at a time, each warp every kSumWarps-th four.
__device__ inline void sum_rows(const NormParams& p, Sums& held) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  int column, rows, width, dim;
  const Norm* norm = summed(p, lane, column, rows, width, dim);
  constexpr int four = kLanes / kSumColumns, step = four * kSumWarps;
  float sum = 0.0f;
  if (column < width) {
    const float* from = norm->sums + column;
#pragma unroll 8
    for (int row = warp * four + lane / kSumColumns; row < rows; row += step) {
      sum = plus(sum, from[static_cast<long long>(row) * width]);
    }
  }
  sum = lane_sum(sum, lane, kSumColumns, kLanes);
  if (lane < kSumColumns) held.of[warp][lane] = sum;
}

__device__ inline void sum_warps(const NormParams& p, const Sums& held) {
  const int lane = threadIdx.x % kLanes;
  if (threadIdx.x >= kLanes) return;
  int column, rows, width, dim;
  const Norm* norm = summed(p, lane, column, rows, width, dim);
  float sum = 0.0f;
#pragma unroll
  for (int warp = lane / kSumColumns; warp < kSumWarps; warp += kLanes / kSumColumns) {
    sum = plus(sum, held.of[warp][lane % kSumColumns]);
  }
  sum = lane_sum(sum, lane, kSumColumns, kLanes);
  if (lane < kSumColumns && column < width) {
    const int head = NORM_WHOLE ? column / dim : 0;
    Vec<NORM_SCALE, 1> rounded;
    rounded.set(0, sum, sum);
    rounded.store(norm->dscale + head * norm->dscale_h + (column - head * dim) * norm->dscale_d);
  }
}

#endif

}  // namespace

#if NORM_VEC > 1
extern "C" __global__ void __launch_bounds__(NORM_WARPS * 32, NORM_RESIDENT / NORM_WARPS)
    norm_vector(const __grid_constant__ NormParams p) {
  norm_walk<NORM_VEC, NORM_TURNS, NORM_PASSES, NORM_ANGLES>(p);
}
#endif

extern "C" __global__ void __launch_bounds__(NORM_WARPS * 32, 8 / NORM_WARPS)
    norm_any(const __grid_constant__ NormParams p) {
  norm_walk<1, NORM_ANY_TURNS, NORM_ANY_PASSES, 1>(p);
}

#if NORM_BACKWARD && NORM_WHOLE
#if NORM_VEC > 1
extern "C" __global__ void __launch_bounds__(NORM_WARPS * 32, NORM_RESIDENT / NORM_WARPS)
    mean_vector(const __grid_constant__ NormParams p) {
  mean_walk<NORM_VEC, NORM_TURNS, NORM_PASSES, NORM_ANGLES>(p);
}
#endif

extern "C" __global__ void __launch_bounds__(NORM_WARPS * 32, 8 / NORM_WARPS)
    mean_any(const __grid_constant__ NormParams p) {
  mean_walk<1, NORM_ANY_TURNS, NORM_ANY_PASSES, 1>(p);
}
#endif

#if NORM_BACKWARD
extern "C" __global__ void __launch_bounds__(1024)
    norm_sum(const __grid_constant__ NormParams p) {
  __shared__ Sums held;
  sum_rows(p, held);
  __syncthreads();
  sum_warps(p, held);
}
#endif
