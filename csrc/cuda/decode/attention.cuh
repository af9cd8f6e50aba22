// Attention of one new token a row over its cache. A unit is (row of the batch, key-value head, part of the context);
// it computes all the query heads of that key-value head, so that keys and values are read once.
//
// Bytes a layer: 2 * kv_heads * D * 2 a token in the cache; bound by those at long contexts, by latency at short ones.
// A warp takes 16 keys at a time: scores on tensor cores with the query heads as rows, values with D as rows, and the
// flash-attention recurrence in between (Dao et al. 2022, algorithm 1). The first 16 keys are asked for before
// the query is there. The new token's key is normed, rotated and written to the cache by the unit that has the last
// part.
//
// A unit hands on its normalised part as float16 words, scaled by a power of two for every 32 elements so that nothing
// overflows or is lost (relative error 2^-12, an eighth of bfloat16's), and the logarithm of its weight. The stage that
// reads them combines them.
#pragma once

#include "linear.cuh"

namespace qwen_patch::cuda::decode {

constexpr int MAX_GROUP = 8;  // query heads a key-value head

// Scratch of a unit in shared memory, beside `partial`, which lies in the sums of the linears.
template <int DP>
struct AttentionScratch {
  alignas(16) unsigned short q[MAX_GROUP][DP];
  alignas(16) unsigned short k[DP];
  alignas(16) unsigned short v[DP];
  float top[CONSUMERS][MAX_GROUP], weight[CONSUMERS][MAX_GROUP];
};

__device__ __forceinline__ unsigned transposed(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Norm (where the family has one) and rotary embedding of one head, by one warp, at the stock model's roundings.
template <typename T, int D>
__device__ __forceinline__ void normed_and_rotated(const unsigned* words, unsigned epoch, const T* norm, float eps,
                                                   const T* cos, const T* sin, unsigned short* to, T* cache) {
  constexpr int N = (D / 2 + 31) / 32;  // a lane has elements lane + 32 i of the lower half, and their partners
  int lane = threadIdx.x & 31;
  float lo[N], hi[N], c[N][2], s[N][2], w[N][2];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    int d = lane + 32 * i;
    if (d < D / 2) {
      c[i][0] = to_float(cos[d]), c[i][1] = to_float(cos[d + D / 2]);
      s[i][0] = to_float(sin[d]), s[i][1] = to_float(sin[d + D / 2]);
      if (norm) w[i][0] = to_float(norm[d]), w[i][1] = to_float(norm[d + D / 2]);
    }
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    int d = lane + 32 * i;
    lo[i] = hi[i] = 0.f;
    if (d < D / 2) {
      unsigned a, b;
      do {
        a = look(words + d);
        b = look(words + d + D / 2);
      } while (!arrived(a, epoch) || !arrived(b, epoch));
      lo[i] = to_float(value_of<T>(a & 0xffff));
      hi[i] = to_float(value_of<T>(b & 0xffff));
      squares += lo[i] * lo[i] + hi[i] * hi[i];
    }
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

// 16 rows of keys or values, as a lane has them: rows g8 and g8 + 8, every fourth piece of 16 bytes.
template <typename T, int D>
struct CacheRows {
  static constexpr int PIECES = D / 32;
  uint4 at[2][PIECES];

  // Rows first to first + 15 of the cache, zero from `end` on; the new token's from shared memory.
  __device__ __forceinline__ void load(const T* rows, int first, int end) {
    int g8 = (threadIdx.x & 31) >> 2, t4 = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int b = 0; b < PIECES; ++b) {
        int row = first + h * 8 + g8;
        at[h][b] = make_uint4(0, 0, 0, 0);
        if (row < end) at[h][b] = *reinterpret_cast<const uint4*>(rows + row * D + (b * 4 + t4) * 8);
      }
  }
  __device__ __forceinline__ void set(const unsigned short* fresh, int first, int position) {
    int g8 = (threadIdx.x & 31) >> 2, t4 = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (first + h * 8 + g8 == position)
#pragma unroll
        for (int b = 0; b < PIECES; ++b) at[h][b] = *reinterpret_cast<const uint4*>(fresh + (b * 4 + t4) * 8);
  }
};

template <typename T, int D, int SHIFT>
__device__ __forceinline__ void attention(const Step<T>& p, const LayerWeights<T>& w, Consumer<T, SHIFT>& me,
                                          AttentionScratch<D>& s, const Shares& mine, int layer, unsigned epoch_in,
                                          unsigned epoch_out) {
  constexpr int PIECES = D / 32;
  int part = mine.part, head = mine.head, b = mine.b, position = mine.position, begin = mine.begin, end = mine.end;
  if (part < 0) return;
  int group = p.heads / p.kv_heads, lane = me.lane, warp = me.warp, g8 = lane >> 2, t4 = lane & 3;
  bool has_new = begin <= position && position < end;
  int64_t plane = static_cast<int64_t>(p.capacity) * D;
  T* keys = p.cache + ((static_cast<int64_t>(layer) * 2 * p.B + b) * p.kv_heads + head) * plane;
  T* values = keys + static_cast<int64_t>(p.B) * p.kv_heads * plane;

  int first = begin + warp * 16, last = has_new ? position : end;
  CacheRows<T, D> k;
  k.load(keys, first, last);
  if (int row = first + lane / (D / 64 > 0 ? D / 64 : 1);
      lane < 16 * (D / 64) && row < last)  // into L2, 128 bytes a lane
    asm volatile("prefetch.global.L2 [%0];" ::"l"(values + row * D + lane % (D / 64 > 0 ? D / 64 : 1) * 64));

  const T *cos = p.cos + static_cast<int64_t>(position) * D, *sin = p.sin + static_cast<int64_t>(position) * D;
  int q_size = p.heads * D, kv_size = p.kv_heads * D;
  const unsigned* row = p.qkv + b * (q_size + 2 * kv_size);
  if (warp < group) {
    normed_and_rotated<T, D>(row + (head * group + warp) * D, epoch_in, w.q_norm, p.eps, cos, sin, s.q[warp],
                             static_cast<T*>(nullptr));
  } else if (warp < MAX_GROUP) {
#pragma unroll 1
    for (int d = lane; d < D; d += 32) s.q[warp][d] = 0;
  } else if (warp == MAX_GROUP && has_new) {
    normed_and_rotated<T, D>(row + q_size + head * D, epoch_in, w.k_norm, p.eps, cos, sin, s.k,
                             keys + static_cast<int64_t>(position) * D);
  } else if (warp == MAX_GROUP + 1 && has_new) {
#pragma unroll 1
    for (int d = lane; d < D; d += 32) {
      unsigned a;
      do a = look(row + q_size + kv_size + head * D + d);
      while (!arrived(a, epoch_in));
      s.v[d] = static_cast<unsigned short>(a & 0xffff);
      values[static_cast<int64_t>(position) * D + d] = value_of<T>(a & 0xffff);
    }
  }
  consumers_sync();

  float top = -INFINITY, weight = 0.f, acc[PIECES][2][4] = {};
  bool any = first < end;
#pragma unroll 1
  while (first < end) {
    if (has_new) k.set(s.k, first, position);
    float score[2][4] = {};
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      uint4 q = *reinterpret_cast<const uint4*>(&s.q[g8][(i * 4 + t4) * 8]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mma<T>(score[h], q.x, 0u, q.y, 0u, k.at[h][i].x, k.at[h][i].y);
        mma<T>(score[h], q.z, 0u, q.w, 0u, k.at[h][i].z, k.at[h][i].w);
      }
    }
    CacheRows<T, D> v;
    v.load(values, first, last);
    float new_top = top;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        score[h][e] = first + h * 8 + 2 * t4 + e < end ? score[h][e] * p.scale : -INFINITY;
        new_top = fmaxf(new_top, score[h][e]);
      }
    new_top = fmaxf(new_top, __shfl_xor_sync(~0u, new_top, 1));
    new_top = fmaxf(new_top, __shfl_xor_sync(~0u, new_top, 2));
    float keep = exp2f(top - new_top);
    top = new_top;
    weight *= keep;
    unsigned prob[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float a = exp2f(score[h][0] - top), c = exp2f(score[h][1] - top);
      weight += a + c;
      prob[h] = pack2<T>(a, c);
    }
    if (has_new) v.set(s.v, first, position);
    float keep0 = __shfl_sync(~0u, keep, 8 * t4), keep1 = __shfl_sync(~0u, keep, 8 * t4 + 4);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const unsigned lo[4] = {v.at[0][i].x, v.at[0][i].y, v.at[0][i].z, v.at[0][i].w};
      const unsigned hi[4] = {v.at[1][i].x, v.at[1][i].y, v.at[1][i].z, v.at[1][i].w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float* a = acc[i][j];
        a[0] *= keep0, a[1] *= keep1, a[2] *= keep0, a[3] *= keep1;
        mma<T>(a, transposed(lo[2 * j]), transposed(lo[2 * j + 1]), transposed(hi[2 * j]), transposed(hi[2 * j + 1]),
               prob[0], prob[1]);
      }
    }
    first += 16 * CONSUMERS;
    if (first < end) k.load(keys, first, last);
  }
  weight += __shfl_xor_sync(~0u, weight, 1);
  weight += __shfl_xor_sync(~0u, weight, 2);
  if (t4 == 0) {
    s.top[warp][g8] = any ? top : -INFINITY;
    s.weight[warp][g8] = any ? weight : 0.f;
  }

  // The warps' results meet, as many heads at a time as the scratch holds: [warp][head][D].
  float* partial = me.sums;
  int warps = mine.warps, at_once = mine.heads_at_once;
#pragma unroll 1
  for (int h0 = 0; h0 < group; h0 += at_once) {
    int count = min(at_once, group - h0);
    if (any) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            int h = 2 * t4 + (e & 1) - h0, d = (4 * i + (g8 >> 1)) * 8 + 2 * (2 * j + (e >> 1)) + (g8 & 1);
            if (h >= 0 && h < count) partial[(warp * at_once + h) * D + d] = acc[i][j][e];
          }
    }
    consumers_sync();
#pragma unroll 1
    for (int i = warp * 32 + lane; i < count * D; i += CONSUMER_THREADS) {
      int h = i / D, d = i - h * D;  // one head a warp
      // lane x weighs warp x
      float top_x = lane < warps ? s.top[lane & 15][h0 + h] : -INFINITY, m = top_x;
#pragma unroll
      for (int x = 8; x; x >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
      m = __shfl_sync(~0u, m, 0);
      float f = lane < warps ? exp2f(top_x - m) : 0.f, total = lane < warps ? f * s.weight[lane & 15][h0 + h] : 0.f;
#pragma unroll
      for (int x = 8; x; x >>= 1) total += __shfl_xor_sync(~0u, total, x);
      total = __shfl_sync(~0u, total, 0);
      float o = 0.f;
#pragma unroll 4
      for (int x = 0; x < warps; ++x) o += __shfl_sync(~0u, f, x) * partial[(x * at_once + h) * D + d];
      bool empty = warps == 0;
      o = empty ? 0.f : __fdividef(o, total);
      float largest = fabsf(o);
#pragma unroll
      for (int x = 16; x; x >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, x));
      // the power of two at or below the largest
      float scale = __uint_as_float(max(__float_as_uint(largest) & 0x7f800000u, 0x00800000u));
      int64_t out = (static_cast<int64_t>(part) * p.B + b) * q_size + (head * group + h0 + h) * D + d;
      unsigned half = __half_as_ushort(__float2half_rn(o * (1.f / scale)));
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p.parts + out), "r"(half | (epoch_out << 16))
                   : "memory");
      if (lane == 0)
        put_pair(p.part_scales + out / 32, __float_as_uint(empty ? -INFINITY : m + log2f(total)),
                 __float_as_uint(scale), epoch_out);
    }
    consumers_sync();
  }
}

}  // namespace qwen_patch::cuda::decode
