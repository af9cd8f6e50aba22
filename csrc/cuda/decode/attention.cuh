// Attention of one new token a row over its cache. A unit is (row of the batch, key-value head, part of the context);
// it computes all the query heads of that key-value head, so that keys and values are read once.
//
// Bytes a layer: 2 * kv_heads * D * 2 a token in the cache; bound by those at long contexts, by latency at short ones.
// A warp takes 16 keys at a time: scores and values on tensor cores with the query heads as rows, and the
// flash-attention recurrence in between (Dao et al. 2022, algorithm 1). The first 16 keys and values are asked for
// before the query is there, and the next ones as soon as their registers are free. The new token's key is normed,
// rotated and written to the cache by the unit that has the last part.
//
// Where a context has parts, the units of a head exchange them: each normalised, in words of two 24-bit floats
// (relative error 2^-16; bfloat16's is 2^-9), with the logarithm of its weight, one a head. Each unit combines a share
// of the columns. (When every multiprocessor read all the parts, their polling was more than L2 gives: 5,500 cycles a
// layer.)
#pragma once

#include "linear.cuh"

namespace qwen_patch::cuda::decode {

constexpr int MAX_GROUP = 8;  // query heads a key-value head

// Scratch of a unit in shared memory, beside the warps' results, which lie where the input of the linears does.
template <int D>
struct AttentionScratch {
  alignas(16) unsigned short q[MAX_GROUP][D];
  alignas(16) unsigned short k[D];
  alignas(16) unsigned short v[D];
  alignas(16) float top[MAX_GROUP][CONSUMERS];
  alignas(16) float weight[MAX_GROUP][CONSUMERS];
};

// Norm (where the family has one) and rotary embedding of one head, by one warp, at the stock model's roundings.
template <typename T, int D>
__device__ __forceinline__ void normed_and_rotated(const unsigned* words, unsigned epoch, const T* norm, float eps,
                                                   const T* cos, const T* sin, unsigned short* to, T* cache) {
  constexpr int N = (D / 2 + 31) / 32;  // a lane has elements lane + 32 i of the lower half, and their partners
  int lane = threadIdx.x & 31;
  const unsigned flag = epoch << 16;
  float lo[N], hi[N], c[N][2], s[N][2], w[N][2];
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int d = min(lane + 32 * i, D / 2 - 1) + h * (D / 2);
      c[i][h] = to_float(cos[d]), s[i][h] = to_float(sin[d]);
      w[i][h] = norm ? to_float(norm[d]) : 1.f;
    }
  unsigned got[N][2], differ;
#pragma unroll 1
  do {
    differ = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) got[i][h] = look(words + min(lane + 32 * i, D / 2 - 1) + h * (D / 2));
#pragma unroll
    for (int i = 0; i < N; ++i) differ |= (got[i][0] ^ flag) | (got[i][1] ^ flag);
  } while (differ >> 16);
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    lo[i] = to_float(value_of<T>(got[i][0] & 0xffff)), hi[i] = to_float(value_of<T>(got[i][1] & 0xffff));
    if (lane + 32 * i < D / 2) squares += lo[i] * lo[i] + hi[i] * hi[i];
  }
  if (norm) {
#pragma unroll
    for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
    float r = rsqrtf(squares * (1.f / D) + eps);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      lo[i] = rounded<T>(rounded<T>(lo[i] * r) * w[i][0]);
      hi[i] = rounded<T>(rounded<T>(hi[i] * r) * w[i][1]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    int d = lane + 32 * i;
    if (d < D / 2) {
      T a = from_float<T>(rounded<T>(lo[i] * c[i][0]) + rounded<T>(-hi[i] * s[i][0]));
      T b = from_float<T>(rounded<T>(hi[i] * c[i][1]) + rounded<T>(lo[i] * s[i][1]));
      to[d] = static_cast<unsigned short>(bits_of(a));
      to[d + D / 2] = static_cast<unsigned short>(bits_of(b));
      if (cache) cache[d] = a, cache[d + D / 2] = b;
    }
  }
}

// 16 keys, as the side of a product that has D as its depth: a lane has keys g8 and g8 + 8, every fourth piece of 16
// bytes.
template <typename T, int D>
struct Keys {
  static constexpr int PIECES = D / 32;
  uint4 at[2][PIECES];

  // Rows first to first + 15 of the cache; row `last` in place of those beyond it.
  __device__ __forceinline__ void load(const T* rows, int first, int last) {
    int g8 = (threadIdx.x & 31) >> 2, t4 = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const T* row = rows + min(first + h * 8 + g8, last) * D + t4 * 8;
#pragma unroll
      for (int i = 0; i < PIECES; ++i) at[h][i] = *reinterpret_cast<const uint4*>(row + i * 32);
    }
  }
  // The new token's, from shared memory, in place of those from its position on.
  __device__ __forceinline__ void set(const unsigned short* fresh, int first, int position) {
    int g8 = (threadIdx.x & 31) >> 2, t4 = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (first + h * 8 + g8 >= position)
#pragma unroll
        for (int i = 0; i < PIECES; ++i) at[h][i] = *reinterpret_cast<const uint4*>(fresh + (i * 4 + t4) * 8);
  }
};

// 16 values, as the side of a product that has the keys as its depth: a lane has rows 2 t4, 2 t4 + 1 and those + 8, of
// every 64 columns the 8 from 8 g8 on. Product j has its columns j and j + 4, so d = 64 piece + 8 g8 + j (+ 4).
template <typename T, int D>
struct Values {
  static constexpr int PIECES = (D + 63) / 64;
  uint4 at[4][PIECES];

  __device__ static __forceinline__ int row(int r) { return 2 * (threadIdx.x & 3) + (r & 1) + 8 * (r >> 1); }
  __device__ static __forceinline__ int column(int piece) { return piece * 64 + ((threadIdx.x & 31) >> 2) * 8; }
  __device__ __forceinline__ void load(const T* rows, int first, int last) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const T* at_row = rows + min(first + row(r), last) * D;
#pragma unroll
      for (int i = 0; i < PIECES; ++i) at[r][i] = *reinterpret_cast<const uint4*>(at_row + min(column(i), D - 8));
    }
  }
  __device__ __forceinline__ void set(const unsigned short* fresh, int first, int position) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (first + row(r) >= position)
#pragma unroll
        for (int i = 0; i < PIECES; ++i) at[r][i] = *reinterpret_cast<const uint4*>(fresh + min(column(i), D - 8));
  }
  // Rows 2 t4 and 2 t4 + 1 (+ 8 if `upper`) of column j, as one operand.
  __device__ __forceinline__ unsigned operand(int piece, int j, bool upper) const {
    const uint4 &a = at[upper ? 2 : 0][piece], &b = at[upper ? 3 : 1][piece];
    unsigned x = j < 2 ? a.x : j < 4 ? a.y : j < 6 ? a.z : a.w, y = j < 2 ? b.x : j < 4 ? b.y : j < 6 ? b.z : b.w;
    return __byte_perm(x, y, j & 1 ? 0x7632 : 0x5410);
  }
};

// This unit's share of the columns of its head's queries: the flash-attention recurrence over all parts, with
// logarithms to base 2.
template <typename T, int D>
__device__ __forceinline__ void combine(const Step<T>& p, const Shares& mine, int thread, unsigned epoch_in,
                                        unsigned epoch_out) {
  constexpr int AT_ONCE = 8;
  int group = p.heads / p.kv_heads, pairs = group * (D / 2);
  int first = pairs * mine.part / mine.splits, end = pairs * (mine.part + 1) / mine.splits;
#pragma unroll 1
  for (int i = first + thread; i < end; i += CONSUMER_THREADS) {
    int row = mine.b * p.heads + mine.head * group + i / (D / 2), column = i % (D / 2);
    float top = -INFINITY, weight = 0.f, sum0 = 0.f, sum1 = 0.f;
#pragma unroll 1
    for (int s0 = 0; s0 < mine.splits; s0 += AT_ONCE) {
      uint2 v[AT_ONCE], w[AT_ONCE];
      unsigned differ;
#pragma unroll 1
      do {
        differ = 0;
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
          int at = min(s0 + s, mine.splits - 1) * p.B * p.heads + row;
          v[s] = look64(p.parts + at * (D / 2) + column);
          w[s] = look64(p.part_weights + at);
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) differ |= ((v[s].y >> 16) ^ epoch_in) | (w[s].y ^ epoch_in);
      } while (differ);
      float new_top = top, log_weight[AT_ONCE];
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) {
        log_weight[s] = s0 + s < mine.splits ? __uint_as_float(w[s].x) : -INFINITY;
        new_top = fmaxf(new_top, log_weight[s]);
      }
      float kept = exp2f(top - new_top);  // the first part is never empty: new_top is finite, unless a NaN
      top = new_top;
      weight *= kept, sum0 *= kept, sum1 *= kept;
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) {
        float factor = exp2f(log_weight[s] - new_top);
        float2 two = floats_of(v[s].x, v[s].y);
        weight += factor, sum0 += factor * two.x, sum1 += factor * two.y;
      }
    }
    float r = 1.f / weight;
    put_two(p.attended + row * D + 2 * column, from_float<T>(sum0 * r), from_float<T>(sum1 * r), epoch_out);
  }
}

template <typename T, typename W, int D, int SHIFT>
__device__ __forceinline__ void attention(const Step<T>& p, const LayerWeights<T>& w, Consumer<T, W, SHIFT>& me,
                                          AttentionScratch<D>& s, float* partial, int partial_floats,
                                          const Shares& mine, int layer, unsigned epoch_in, unsigned epoch_of_parts,
                                          unsigned epoch_out) {
  constexpr int VP = Values<T, D>::PIECES, DP = 64 * VP;  // DP: D with the columns that nobody has
  if (mine.part < 0) return;
  int part = mine.part, head = mine.head, b = mine.b, position = mine.position, begin = mine.begin, end = mine.end;
  me.begin_stage();
  int group = p.heads / p.kv_heads, lane = me.lane, warp = me.warp, g8 = lane >> 2, t4 = lane & 3;
  bool has_new = begin <= position && position < end;
  int64_t plane = static_cast<int64_t>(p.capacity) * D;
  T* keys = p.cache + ((static_cast<int64_t>(layer) * 2 * p.B + b) * p.kv_heads + head) * plane;
  T* values = keys + static_cast<int64_t>(p.B) * p.kv_heads * plane;

  // Keys beyond the last are masked, but their values must be numbers: so they are the last's, or the new token's. (An
  // infinity among those is a NaN then.)
  int first = begin + warp * 16, last = max(0, (has_new ? position : end) - 1);
  Keys<T, D> k;
  Values<T, D> v;
  k.load(keys, first, last);
  v.load(values, first, last);

  // The new token: its key, its value, and the queries of this group.
  const T *cos = p.cos + static_cast<int64_t>(position) * D, *sin = p.sin + static_cast<int64_t>(position) * D;
  int q_size = p.heads * D, kv_size = p.kv_heads * D;
  const unsigned* row = p.qkv + b * (q_size + 2 * kv_size);
#pragma unroll 1
  for (int job = warp; job < group + 2; job += CONSUMERS) {
    if (job < group) {
      normed_and_rotated<T, D>(row + (head * group + job) * D, epoch_in, w.q_norm, p.eps, cos, sin, s.q[job],
                               static_cast<T*>(nullptr));
    } else if (!has_new) {
      break;
    } else if (job == group) {
      normed_and_rotated<T, D>(row + q_size + head * D, epoch_in, w.k_norm, p.eps, cos, sin, s.k,
                               keys + static_cast<int64_t>(position) * D);
    } else {
      // Four words a lane, so that all have come at once: a word a lane at a time was D / 32 round trips, one after the
      // other, and every block waits for them.
      int d = min(4 * lane, D - 4);
      int at[1] = {q_size + kv_size + head * D + d};
      uint2 four[1];
      FromWords{row, epoch_in}.fetch(four, at, {true});
      *reinterpret_cast<uint2*>(s.v + d) = four[0];
      *reinterpret_cast<uint2*>(values + static_cast<int64_t>(position) * D + d) = four[0];
    }
  }
  consumers_sync();

  uint4 q[Keys<T, D>::PIECES];
#pragma unroll
  for (int i = 0; i < Keys<T, D>::PIECES; ++i) q[i] = *reinterpret_cast<const uint4*>(&s.q[g8][(i * 4 + t4) * 8]);
  float top = -INFINITY, weight = 0.f, acc[VP * 4][4] = {};
  bool any = first < end;
#pragma unroll 1
  while (first < end) {
    if (has_new && first + 16 > position) {
      k.set(s.k, first, position);
      v.set(s.v, first, position);
    }
    float score[2][2][4] = {};  // [half][sum][]: two sums, for two chains of products
#pragma unroll
    for (int i = 0; i < Keys<T, D>::PIECES; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mma<T>(score[h][0], q[i].x, 0u, q[i].y, 0u, k.at[h][i].x, k.at[h][i].y);
        mma<T>(score[h][1], q[i].z, 0u, q[i].w, 0u, k.at[h][i].z, k.at[h][i].w);
      }
    if (first + 16 * CONSUMERS < end) k.load(keys, first + 16 * CONSUMERS, last);
    float x[2][2], new_top = top;  // of head g8, keys first + 8 h + 2 t4 + e
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x[h][e] = first + h * 8 + 2 * t4 + e < end ? (score[h][0][e] + score[h][1][e]) * p.scale : -INFINITY;
        new_top = fmaxf(new_top, x[h][e]);
      }
    new_top = fmaxf(new_top, __shfl_xor_sync(~0u, new_top, 1));
    new_top = fmaxf(new_top, __shfl_xor_sync(~0u, new_top, 2));
    float keep = exp2f(top - new_top);
    top = new_top;
    weight *= keep;
    unsigned prob[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float a = exp2f(x[h][0] - top), c = exp2f(x[h][1] - top);
      weight += a + c;
      prob[h] = pack2<T>(a, c);
    }
    float keep0 = __shfl_sync(~0u, keep, 8 * t4), keep1 = __shfl_sync(~0u, keep, 8 * t4 + 4);
#pragma unroll
    for (int i = 0; i < VP; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // d as rows, heads 2 t4 and 2 t4 + 1 as columns
        float* a = acc[i * 4 + j];
        a[0] *= keep0, a[1] *= keep1, a[2] *= keep0, a[3] *= keep1;
        mma<T>(a, v.operand(i, j, false), v.operand(i, j + 4, false), v.operand(i, j, true), v.operand(i, j + 4, true),
               prob[0], prob[1]);
      }
    first += 16 * CONSUMERS;
    if (first < end) v.load(values, first, last);
  }
  weight += __shfl_xor_sync(~0u, weight, 1);
  weight += __shfl_xor_sync(~0u, weight, 2);
  if (t4 == 0) {
    s.top[g8][warp] = any ? top : -INFINITY;
    s.weight[g8][warp] = any ? weight : 0.f;
  }

  // The warps' results meet, as many heads at a time as there is room for: [warp][head] x PITCH floats, of which number
  // 64 piece + 32 n + 4 g8 + e has d = 64 piece + 8 g8 + 4 n + e; that and the pitch avoid bank conflicts.
  constexpr int PITCH = DP + 4;
  int warps = mine.warps, at_once = min(group, partial_floats / (CONSUMERS * PITCH));
#pragma unroll 1
  for (int h0 = 0; h0 < group; h0 += at_once) {
    int count = min(at_once, group - h0);
    if (any)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (int h = 2 * t4 + e - h0; h >= 0 && h < count)
#pragma unroll
          for (int i = 0; i < VP; ++i)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const float (*a)[4] = acc + i * 4;
              *reinterpret_cast<float4*>(partial + (warp * at_once + h) * PITCH + i * 64 + n * 32 + g8 * 4) =
                  make_float4(a[0][2 * n + e], a[1][2 * n + e], a[2][2 * n + e], a[3][2 * n + e]);
            }
    consumers_sync();
#pragma unroll 1
    for (int i = warp * 32 + lane; i < count * (DP / 2); i += CONSUMER_THREADS) {
      int h = i / (DP / 2), place = i % (DP / 2) * 2, of_group = h0 + h;
      int d = (place & ~63) + (place >> 2 & 7) * 8 + (place >> 5 & 1) * 4 + (place & 3);
      if (d >= D) continue;
      const float4 *tops = reinterpret_cast<const float4*>(s.top[of_group]),
                   *weights = reinterpret_cast<const float4*>(s.weight[of_group]);
      float4 ta = tops[0], tb = tops[1], wa = weights[0], wb = weights[1];
      float t[8] = {ta.x, ta.y, ta.z, ta.w, tb.x, tb.y, tb.z, tb.w},
            u[8] = {wa.x, wa.y, wa.z, wa.w, wb.x, wb.y, wb.z, wb.w};
      float m = fmaxf(fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3])), fmaxf(fmaxf(t[4], t[5]), fmaxf(t[6], t[7])));
      float total = 0.f, o0 = 0.f, o1 = 0.f;
#pragma unroll
      for (int x = 0; x < CONSUMERS; ++x)
        if (x < warps) {
          float f = exp2f(t[x] - m);
          float2 o = *reinterpret_cast<const float2*>(partial + (x * at_once + h) * PITCH + place);
          total += f * u[x], o0 += f * o.x, o1 += f * o.y;
        }
      float r = warps ? 1.f / total : 0.f;
      int out = (part * p.B + b) * p.heads + head * group + of_group;
      if (mine.splits == 1) {
        put_two(p.attended + out * D + d, from_float<T>(o0 * r), from_float<T>(o1 * r), epoch_out);
        continue;
      }
      put64(p.parts + (out * D + d) / 2, word_of(o0 * r, o1 * r, epoch_of_parts));
      if (d == 0)
        put64(p.part_weights + out, make_uint2(__float_as_uint(warps ? m + log2f(total) : -INFINITY), epoch_of_parts));
    }
    consumers_sync();
  }
  if (mine.splits > 1) combine<T, D>(p, mine, warp * 32 + lane, epoch_of_parts, epoch_out);
}

}  // namespace qwen_patch::cuda::decode
