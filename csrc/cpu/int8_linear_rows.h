// int8_linear's loops for every processor: rows of the weight times tokens, in vectors along K; and the quantizing of
// activations. Bytes: the weight's N * K once, from memory; the tokens again for every row or two, from cache. One
// token is bound by memory where the vectors are wide; many tokens are bound by the arithmetic.
#pragma once

#include "linear.h"

namespace qwen_patch::cpu {

constexpr int64_t GROUP = INT8_GROUP;

// A call's inputs, whatever the dtype of x. Rows of tokens are padded with zeros to whole groups.
struct Int8Problem {
  const int8_t* values;  // [N, K]
  const float* scales;   // [N, G]
  int64_t N, K, G;
  const void* x;          // [M, G * 64]: floats, or bf16, or int8
  const float* x_scales;  // [M, G], where x is int8
  const int32_t* x_sums;  // [M, G]: the groups' sums
};

// x [rows, K] -> int8 [rows, G * 64] with scales and sums [rows, G]: the rule of quantization/format.py, to the bit. A
// group with a NaN or an infinity gets scale NaN and zeros.
template <typename T>
QP_INLINE void quantize_rows(const T* x, int8_t* out, float* scales, int32_t* sums, int64_t rows, int64_t K) {
  constexpr float shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  for (int64_t r = 0; r < rows; ++r, x += K) {
    for (int64_t k = 0; k < K; k += GROUP, out += GROUP) {
      alignas(64) float group[GROUP] = {};
      expand_rows(x + k, group, 1, std::min(GROUP, K - k), std::min(GROUP, K - k));
      int32_t largest = 0;  // as bits: NaN is beyond infinity, and no comparison passes over it
      for (int64_t i = 0; i < GROUP; ++i) {
        int32_t bits;
        std::memcpy(&bits, group + i, sizeof(bits));
        largest = std::max(largest, bits & 0x7fffffff);
      }
      bool finite = largest < 0x7f800000;
      float magnitude;
      std::memcpy(&magnitude, &largest, sizeof(magnitude));
      float scale = finite ? magnitude / 127.f : __builtin_nanf("");
      int32_t sum = 0;
      if (scale > 0.f) {
        for (int64_t i = 0; i < GROUP; ++i) {
          float q = std::min(127.f, std::max(-127.f, group[i] / scale));
          out[i] = static_cast<int8_t>(static_cast<int32_t>((q + shift) - shift));
        }
        for (int64_t i = 0; i < GROUP; ++i) sum += out[i];
      } else {
        std::memset(out, 0, GROUP);
      }
      *scales++ = scale;
      *sums++ = sum;
    }
  }
}

// y [tokens][BLOCK] of the weight rows [n0, n0 + rows) and the tokens from m0 on; int8 tokens.
QP_INLINE void dot_int8(const Int8Problem& p, int64_t n0, int64_t rows, int64_t m0, int64_t tokens, float* y) {
  int64_t whole = p.K / GROUP, stride = p.G * GROUP;
  for (int64_t r = 0; r < rows; ++r) {
    const int8_t* w = p.values + (n0 + r) * p.K;
    const float* ws = p.scales + (n0 + r) * p.G;
    int8_t last[GROUP] = {};
    std::memcpy(last, w + whole * GROUP, static_cast<size_t>(p.K - whole * GROUP));
    for (int64_t t = 0; t < tokens; ++t) {
      const int8_t* x = static_cast<const int8_t*>(p.x) + (m0 + t) * stride;
      const float* xs = p.x_scales + (m0 + t) * p.G;
      float total = 0.f;
      for (int64_t g = 0; g < p.G; ++g) {
        const int8_t *a = g < whole ? w + g * GROUP : last, *b = x + g * GROUP;
        int32_t sum = 0;
        for (int64_t i = 0; i < GROUP; ++i) sum += static_cast<int16_t>(a[i]) * static_cast<int16_t>(b[i]);
        total += static_cast<float>(sum) * (ws[g] * xs[g]);
      }
      y[t * BLOCK + r] = total;
    }
  }
}

// 8 values as floats. AVX2 has the one instruction for it, which GCC 12 does not find: hence assembly, see
// FP16Hardware. Elsewhere each byte goes to the top of its 32 bits, and an arithmetic shift brings it down.
template <bool AVX2>
QP_INLINE F32x8 load_int8(const int8_t* p) {
  typedef uint8_t U8x16 __attribute__((vector_size(16)));
  I32x8 wide;
#if QP_X86
  if constexpr (AVX2) {
    asm("vpmovsxbd %1, %0" : "=x"(wide) : "m"(*reinterpret_cast<const int8_t (*)[8]>(p)));
    return __builtin_convertvector(wide, F32x8);
  }
#endif
  U8x16 raw = {};
  std::memcpy(&raw, p, 8);
  raw = __builtin_shufflevector(raw, raw, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  wide = widen((U16x8)raw) << 16;
  return __builtin_convertvector(wide >> 24, F32x8);
}

// y[t * BLOCK + r] of R weight rows and T tokens of floats, `stride` apart.
template <bool AVX2, int R, int T>
QP_INLINE void dot_float_tile(const Int8Problem& p, const int8_t* w, const float* ws, const float* x, float* y) {
  F32x8 total[R][T] = {};
  int64_t stride = p.G * GROUP;
  auto group = [&](int64_t g, int64_t count) QP_LAMBDA {
    F32x8 sum[R][T] = {};
    if constexpr (R == 1) {
      __builtin_prefetch(w + g * GROUP + AHEAD);
      ask_for_scales(ws, g);
    }
    for (int64_t k = g * GROUP; k < g * GROUP + count; k += LANES) {
      F32x8 v[R];
      for (int r = 0; r < R; ++r) v[r] = load_int8<AVX2>(w + r * p.K + k);
      for (int t = 0; t < T; ++t) {
        F32x8 states = load(x + t * stride + k, LANES);
        for (int r = 0; r < R; ++r) sum[r][t] += v[r] * states;
      }
    }
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) total[r][t] += sum[r][t] * ws[r * p.G + g];
  };
  int64_t whole = p.K / GROUP;
  for (int64_t g = 0; g < whole; ++g) group(g, GROUP);
  if (whole < p.G) group(whole, p.K - whole * GROUP);  // K is a multiple of LANES
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) y[t * BLOCK + r] = horizontal_sum(total[r][t]);
}

// As dot_int8; tokens in floats.
template <bool AVX2>
QP_INLINE void dot_float(const Int8Problem& p, int64_t n0, int64_t rows, int64_t m0, int64_t tokens, float* y) {
  int64_t stride = p.G * GROUP;
  const float* x = static_cast<const float*>(p.x) + m0 * stride;
  auto some = [&](auto R, int64_t r) QP_LAMBDA {
    const int8_t* w = p.values + (n0 + r) * p.K;
    const float* ws = p.scales + (n0 + r) * p.G;
    int64_t t = 0;
    if constexpr (R == 1)
      for (; t + 4 <= tokens; t += 4) dot_float_tile<AVX2, R, 4>(p, w, ws, x + t * stride, y + t * BLOCK + r);
    for (; t + 2 <= tokens; t += 2) dot_float_tile<AVX2, R, 2>(p, w, ws, x + t * stride, y + t * BLOCK + r);
    if (t < tokens) dot_float_tile<AVX2, R, 1>(p, w, ws, x + t * stride, y + t * BLOCK + r);
  };
  int64_t r = 0;
  for (; r + 4 <= rows && tokens > FEW; r += 4) some(std::integral_constant<int, 4>{}, r);
  for (; r < rows; ++r) some(std::integral_constant<int, 1>{}, r);
}

}  // namespace qwen_patch::cpu
