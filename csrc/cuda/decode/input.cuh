// Where the input of a stage of linears comes from: words that other blocks have put, or parts of attention.
#pragma once

#include "exchange.cuh"

namespace qwen_patch::cuda::decode {

// Asks for N vectors of words until all have come: differ(v) has a bit set from 16 on while v has not.
template <int N, typename Look, typename Differ>
__device__ __forceinline__ void wait_for(uint4 (&v)[N], Look&& look, Differ&& differ) {
  unsigned different;
#pragma unroll 1
  do {
    different = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = look(i);
#pragma unroll
    for (int i = 0; i < N; ++i) different |= differ(v[i]);
  } while (different >> 16);
}

// fetch() waits for N times 4 values; number i is of row b[i] from column k[i] on.
// There are no conditions in it: who has nothing to ask for asks for something that others need. A register that is set
// on a condition only is kept from one layer to the next, and code that is jumped over has to be fetched all the same.
struct FromWords {
  const unsigned* words;
  int K;
  unsigned epoch;
  template <int N>
  __device__ __forceinline__ void fetch(uint2 (&x)[N], const int (&b)[N], const int (&k)[N]) const {
    const unsigned flag = epoch << 16;
    uint4 v[N];
    wait_for(
        v, [&](int i) { return look4(words + b[i] * K + k[i]); },
        [&](const uint4& w) { return (w.x ^ flag) | (w.y ^ flag) | (w.z ^ flag) | (w.w ^ flag); });
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = values(v[i]);
  }
};

// The parts of attention over `splits` pieces of the context (attention.cuh): combined by who reads them.
template <typename T, int D>
struct FromParts {
  const uint2 *parts, *weights;  // [split, B, K] in words of two values; [split, B, heads]
  int B, K, splits;              // K = heads * D
  unsigned epoch;

  // One part is all there is.
  template <int N>
  __device__ __forceinline__ void fetch(uint2 (&x)[N], const int (&b)[N], const int (&k)[N]) const {
    const unsigned flag = epoch << 16;
    uint4 v[N];
    wait_for(
        v, [&](int i) { return look_at(b[i], k[i]); }, [&](const uint4& w) { return (w.y ^ flag) | (w.w ^ flag); });
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float2 lo = floats_of(v[i].x, v[i].y), hi = floats_of(v[i].z, v[i].w);
      x[i] = make_uint2(pack2<T>(lo.x, lo.y), pack2<T>(hi.x, hi.y));
    }
  }

  // N times 4 values, P parts of them at a time: the flash-attention recurrence, with logarithms to base 2.
  template <int P, int N>
  __device__ __forceinline__ void combine(uint2 (&x)[N], const int (&b)[N], const int (&k)[N]) const {
    const unsigned flag = epoch << 16;
    float top[N], weight[N] = {}, sum[N][4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) top[i] = -INFINITY;
#pragma unroll 1
    for (int s0 = 0; s0 < splits; s0 += P) {
      uint4 v[N][P];
      uint2 w[N][P];
      unsigned differ;
#pragma unroll 1
      do {
        differ = 0;
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
          for (int s = 0; s < P; ++s) {
            int row = min(s0 + s, splits - 1) * B + b[i];
            v[i][s] = look_at(row, k[i]);
            w[i][s] = look64(weights + row * (K / D) + k[i] / D);
          }
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
          for (int s = 0; s < P; ++s)
            differ |= ((v[i][s].y ^ flag) >> 16) | ((v[i][s].w ^ flag) >> 16) | (w[i][s].y ^ epoch);
      } while (differ);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float new_top = top[i], log_weight[P];
#pragma unroll
        for (int s = 0; s < P; ++s) {
          log_weight[s] = s0 + s < splits ? __uint_as_float(w[i][s].x) : -INFINITY;
          new_top = fmaxf(new_top, log_weight[s]);
        }
        float kept = exp2f(top[i] - new_top);  // the first part is never empty: new_top is finite, unless a NaN
        top[i] = new_top;
        weight[i] *= kept;
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] *= kept;
#pragma unroll
        for (int s = 0; s < P; ++s) {
          float mine = exp2f(log_weight[s] - new_top);
          float2 lo = floats_of(v[i][s].x, v[i][s].y), hi = floats_of(v[i][s].z, v[i][s].w);
          weight[i] += mine;
          sum[i][0] += mine * lo.x, sum[i][1] += mine * lo.y, sum[i][2] += mine * hi.x, sum[i][3] += mine * hi.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float r = 1.f / weight[i];
      x[i] = make_uint2(pack2<T>(sum[i][0] * r, sum[i][1] * r), pack2<T>(sum[i][2] * r, sum[i][3] * r));
    }
  }

 private:
  __device__ __forceinline__ uint4 look_at(int row, int k) const { return look64x2(parts + (row * K + k) / 2); }
};

}  // namespace qwen_patch::cuda::decode
