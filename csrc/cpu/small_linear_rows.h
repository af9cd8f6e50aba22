// small_linear's loops: rows of the weight times up to 16 tokens, in vectors along K. Bytes: the weight's N * K
// elements once, from memory, which bounds it (for 16 tokens without AVX512_BF16, so does the arithmetic); tokens from
// L1 or L2.
#pragma once

#include "avx512.h"
#include "linear.h"

namespace qwen_patch::cpu {

// y[t * BLOCK + r] of R weight rows [R, K] and T tokens of floats.
template <typename E, int R, int T>
QP_INLINE void small_tile(const E* w, const float* x, int64_t K, float* y) {
  F32x8 sum[R][T] = {};
  auto multiply = [&](int64_t k, int64_t n) QP_LAMBDA {
    F32x8 weight[R];
    for (int r = 0; r < R; ++r) weight[r] = load(w + r * K + k, n);
    for (int t = 0; t < T; ++t) {
      F32x8 states = load(x + t * K + k, n);
      for (int r = 0; r < R; ++r) sum[r][t] += weight[r] * states;
    }
  };
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) multiply(k, LANES);
  if (k < K) multiply(k, K - k);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) y[t * BLOCK + r] = horizontal_sum(sum[r][t]);
}

// One block: weight rows [rows, K], all M tokens, y [M][BLOCK].
template <typename E>
QP_INLINE void small_rows(const E* w, const float* x, int64_t rows, int64_t M, int64_t K, float* y) {
  for (int64_t r = 0; r < rows; r += 4) {
    const E* row = w + r * K;
    int64_t t = 0;
    if (r + 4 <= rows) {
      for (; t + 2 <= M; t += 2) small_tile<E, 4, 2>(row, x + t * K, K, y + t * BLOCK + r);
      if (t < M) small_tile<E, 4, 1>(row, x + t * K, K, y + t * BLOCK + r);
    } else {
      for (; t < M; ++t)
        for (int64_t i = 0; i < rows - r; ++i) small_tile<E, 1, 1>(row + i * K, x + t * K, K, y + t * BLOCK + r + i);
    }
  }
}

#if QP_AVX512
// As small_tile; tokens in bf16 as well. Subnormal numbers count as zero: so the instruction has it.
template <int R, int T>
QP_V4 QP_INLINE void small_bf16_tile(const BF16* w, const BF16* x, int64_t K, float* y) {
  __m512 sum[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sum[r][t] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 32) {
    __mmask32 mask = K - k >= 32 ? ~0u : (1u << (K - k)) - 1;
    __m512i weight[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) weight[r] = _mm512_maskz_loadu_epi16(mask, w + r * K + k);
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
  for (int64_t r = 0; r < rows; r += 4) {
    const BF16* row = w + r * K;
    int64_t t = 0;
    if (r + 4 <= rows) {
      for (; t + 4 <= M; t += 4) small_bf16_tile<4, 4>(row, x + t * K, K, y + t * BLOCK + r);
      for (; t < M; ++t) small_bf16_tile<4, 1>(row, x + t * K, K, y + t * BLOCK + r);
    } else {
      for (; t < M; ++t)
        for (int64_t i = 0; i < rows - r; ++i) small_bf16_tile<1, 1>(row + i * K, x + t * K, K, y + t * BLOCK + r + i);
    }
  }
}
#endif

}  // namespace qwen_patch::cpu
