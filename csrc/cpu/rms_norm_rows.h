// One row of RMSNorm, with or without the residual add before it. Bytes a row of H: 2H read and written (rms_norm),
// 4H (add_rms_norm), and the weight from cache; the second pass re-reads the row from L1. Bound by memory.
#pragma once

#include <cmath>

#include "simd.h"

namespace qwen_patch::cpu {

// x [rows, H] (+ residual [rows, H]) -> normed [rows, H] (and sum [rows, H]); the stock model's rounding points.
template <typename T, bool ADD>
QP_INLINE void rms_norm_rows(const T* x, const T* residual, const T* weight, T* normed, T* sum, int64_t rows, int64_t H,
                             float eps) {
  for (int64_t r = 0; r < rows; ++r, x += H, residual += ADD ? H : 0, normed += H, sum += ADD ? H : 0) {
    F32x8 squares[4] = {};
    for_vectors(H, [&](int64_t i, int64_t n, int k) QP_LAMBDA {
      F32x8 v = load(x + i, n);
      if constexpr (ADD) v = store(sum + i, load(residual + i, n) + v, n);
      squares[k] += v * v;
    });
    float total = horizontal_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    float scale = 1.f / std::sqrt(total / static_cast<float>(H) + eps);
    const T* row = ADD ? sum : x;
    for_vectors(H, [&](int64_t i, int64_t n, int) QP_LAMBDA {
      store(normed + i, load(weight + i, n) * round_to<T>(load(row + i, n) * scale), n);
    });
  }
}

}  // namespace qwen_patch::cpu
