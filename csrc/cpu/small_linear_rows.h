// small_linear's loops: rows of the weight times up to 16 tokens, in vectors along K. Bytes: the weight's N * K
// elements once, from memory, which bounds it (for 16 tokens without AVX512_BF16, so does the arithmetic); tokens from
// L1 or L2.
#pragma once

#include "avx512.h"
#include "linear.h"

namespace qwen_patch::cpu {

// y[t * BLOCK + r] of R weight rows [R, K] and T tokens of floats; U vectors of each along K at a time, so that their
// sums need not wait for each other.
template <typename E, int R, int T, int U>
QP_INLINE void small_tile(const E* w, const float* x, int64_t K, float* y) {
  F32x8 sum[U][R][T] = {};
  auto multiply = [&](int64_t k, int64_t n, int u) QP_LAMBDA {
    F32x8 weight[R];
    for (int r = 0; r < R; ++r) weight[r] = load(w + r * K + k, n);
    for (int t = 0; t < T; ++t) {
      F32x8 states = load(x + t * K + k, n);
      for (int r = 0; r < R; ++r) sum[u][r][t] += weight[r] * states;
    }
  };
  int64_t k = 0;
  for (; k + U * LANES <= K; k += U * LANES) {
    if constexpr (R == 1) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + k) + AHEAD);
      if (U * LANES * sizeof(E) > 64) __builtin_prefetch(reinterpret_cast<const char*>(w + k) + AHEAD + 64);
    }
    for (int u = 0; u < U; ++u) multiply(k + u * LANES, LANES, u);
  }
  for (; k + LANES <= K; k += LANES) multiply(k, LANES, 0);
  if (k < K) multiply(k, K - k, 0);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      for (int u = 1; u < U; ++u) sum[0][r][t] += sum[u][r][t];
      y[t * BLOCK + r] = horizontal_sum(sum[0][r][t]);
    }
}

// One block: weight rows [rows, K], all M tokens, y [M][BLOCK].
template <typename E>
QP_INLINE void small_rows(const E* w, const float* x, int64_t rows, int64_t M, int64_t K, float* y) {
  int64_t r = 0;
  for (; r + 4 <= rows && M > FEW; r += 4) {
    int64_t t = 0;
    for (; t + 2 <= M; t += 2) small_tile<E, 4, 2, 1>(w + r * K, x + t * K, K, y + t * BLOCK + r);
    if (t < M) small_tile<E, 4, 1, 1>(w + r * K, x + t * K, K, y + t * BLOCK + r);
  }
  for (; r < rows; ++r) {
    int64_t t = 0;
    for (; t + 4 <= M; t += 4) small_tile<E, 1, 4, 2>(w + r * K, x + t * K, K, y + t * BLOCK + r);
    for (; t + 2 <= M; t += 2) small_tile<E, 1, 2, 4>(w + r * K, x + t * K, K, y + t * BLOCK + r);
    if (t < M) small_tile<E, 1, 1, 4>(w + r * K, x + t * K, K, y + t * BLOCK + r);
  }
}

#if QP_AVX512
// As small_tile; tokens in bf16 as well. Subnormal numbers count as zero: so the instruction has it. `ahead` is what to
// ask memory for: R lines for each R that are read.
template <int R, int T>
QP_V4 QP_INLINE void small_bf16_tile(const BF16* w, const BF16* x, int64_t K, float* y, const char* ahead) {
  __m512 sum[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sum[r][t] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 32) {
    __mmask32 mask = K - k >= 32 ? ~0u : (1u << (K - k)) - 1;
    __m512i weight[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      _mm_prefetch(ahead + 2 * R * k + 64 * r, _MM_HINT_T0);
      weight[r] = _mm512_maskz_loadu_epi16(mask, w + r * K + k);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      __m512i states = _mm512_maskz_loadu_epi16(mask, x + t * K + k);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][t] = dot_bf16(sum[r][t], weight[r], states);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) y[t * BLOCK + r] = _mm512_reduce_add_ps(sum[r][t]);
}

// As small_rows.
QP_V4 inline void small_bf16_rows(const BF16* w, const BF16* x, int64_t rows, int64_t M, int64_t K, float* y) {
  auto ahead = [&](int64_t r) { return reinterpret_cast<const char*>(w + r * K); };
  int64_t r = 0;
  for (; r + 4 <= rows && M > FEW; r += 4) {
    int64_t t = 0;
    const char* next = ahead(r + 4);
    for (; t + 4 <= M; t += 4) small_bf16_tile<4, 4>(w + r * K, x + t * K, K, y + t * BLOCK + r, next);
    for (; t < M; ++t) small_bf16_tile<4, 1>(w + r * K, x + t * K, K, y + t * BLOCK + r, next);
  }
  for (; r < rows; ++r) {
    int64_t t = 0;
    const char* next = ahead(r) + AHEAD;
    for (; t + 4 <= M; t += 4) small_bf16_tile<1, 4>(w + r * K, x + t * K, K, y + t * BLOCK + r, next);
    for (; t + 2 <= M; t += 2) small_bf16_tile<1, 2>(w + r * K, x + t * K, K, y + t * BLOCK + r, next);
    if (t < M) small_bf16_tile<1, 1>(w + r * K, x + t * K, K, y + t * BLOCK + r, next);
  }
}
#endif

}  // namespace qwen_patch::cpu
