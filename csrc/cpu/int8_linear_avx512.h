// int8_linear with AVX-512: products of int8 with VNNI, of bf16 with AVX512_BF16, of floats with FMA; all exact, or
// summed in float32.
//
// A token or two: along K, 64 products an instruction, the weight straight from memory, which bounds it.
// More tokens: a block of 32 weight rows is packed once, so that a vector holds one 32-bit word (4 int8, 2 bf16 or a
// float along K) of 16 rows; then tiles of 8 tokens x 32 rows stay in registers over a group of 64, a word of a token
// going to all 16 lanes. Scales are applied once a group, to 16 results at a time: 16 to 64 products come before it.
// Bound by the arithmetic.
#pragma once

#include <cstring>

#include "avx512.h"
#include "int8_linear_rows.h"

#if QP_AVX512

namespace qwen_patch::cpu {

constexpr int64_t TILE = 8;  // tokens

// How a kind packs (WORDS: 32-bit words a group, for 4 int8 of the weight each) and multiplies.
struct Int8Words {
  static constexpr int WORDS = 16;
  using Sum = __m512i;
};
struct Bf16Words {
  static constexpr int WORDS = 32;
  using Sum = __m512;
};
struct FloatWords {
  static constexpr int WORDS = 64;
  using Sum = __m512;
};

// 16 rows of 16 words -> 16 words of 16 rows.
QP_V4 QP_INLINE void transpose(__m512i* a) {
  __m512i b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
}

// The kind's words of 4 int8 of 16 rows. VNNI multiplies unsigned by signed: the weight goes in as value + 128, and the
// tile takes 128 * (sum of x) away again.
QP_V4 QP_INLINE void put(Int8Words, __m512i word, uint32_t* out) {
  _mm512_store_si512(out, _mm512_xor_si512(word, _mm512_set1_epi8(-128)));
}
template <int I>
QP_V4 QP_INLINE __m512i byte_as_float(__m512i word) {
  return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 24 - 8 * I), 24)));
}
QP_V4 QP_INLINE void put(Bf16Words, __m512i word, uint32_t* out) {  // exact: bf16 has 8 bits of precision
  __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  _mm512_store_si512(out, _mm512_or_si512(_mm512_srli_epi32(byte_as_float<0>(word), 16),
                                          _mm512_and_si512(byte_as_float<1>(word), high)));
  _mm512_store_si512(out + BLOCK, _mm512_or_si512(_mm512_srli_epi32(byte_as_float<2>(word), 16),
                                                  _mm512_and_si512(byte_as_float<3>(word), high)));
}
QP_V4 QP_INLINE void put(FloatWords, __m512i word, uint32_t* out) {
  _mm512_store_si512(out, byte_as_float<0>(word));
  _mm512_store_si512(out + BLOCK, byte_as_float<1>(word));
  _mm512_store_si512(out + 2 * BLOCK, byte_as_float<2>(word));
  _mm512_store_si512(out + 3 * BLOCK, byte_as_float<3>(word));
}

// The weight rows [n0, n0 + rows) as words [G * WORDS][BLOCK] and scales [G][BLOCK]; zeros where there is no row or K.
template <typename Kind>
QP_V4 void pack(const Int8Problem& p, int64_t n0, int64_t rows, uint32_t* words, float* scales) {
  // Rows side by side are not memory's order, in which alone it is fast: the next block is asked for in that order,
  // into L2. Without this, 4 tokens take twice as long.
  const int8_t* next = p.values + (n0 + BLOCK) * p.K;
  for (int64_t g = 0; g < p.G; ++g) {
    __mmask64 mask = ~0ull >> (GROUP - std::min(GROUP, p.K - g * GROUP));
    for (int64_t half = 0; half < BLOCK; half += 16) {
      __m512i w[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const int8_t* row = p.values + (n0 + half + i) * p.K + g * GROUP;
        _mm_prefetch(next + (g * BLOCK + half + i) * GROUP, _MM_HINT_T1);
        w[i] = half + i < rows ? _mm512_maskz_loadu_epi8(mask, row) : _mm512_setzero_si512();
      }
      transpose(w);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) put(Kind{}, w[i], words + (g * Kind::WORDS + i * (Kind::WORDS / 16)) * BLOCK + half);
    }
    for (int64_t i = 0; i < BLOCK; ++i) scales[g * BLOCK + i] = i < rows ? p.scales[(n0 + i) * p.G + g] : 0.f;
  }
}

// sum + weight * x, lane by lane.
QP_V4 QP_INLINE __m512i step(Int8Words, __m512i sum, __m512i weight, __m512i x) { return dot_int8(sum, weight, x); }
QP_V4 QP_INLINE __m512 step(Bf16Words, __m512 sum, __m512i weight, __m512i x) { return dot_bf16(sum, weight, x); }
QP_V4 QP_INLINE __m512 step(FloatWords, __m512 sum, __m512i weight, __m512i x) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(weight), _mm512_castsi512_ps(x), sum);
}

// y [T][BLOCK] of one packed block; x the first of T tokens.
template <typename Kind, int T>
QP_V4 QP_INLINE void tile(const Int8Problem& p, const uint32_t* words, const float* scales, int64_t m, float* y) {
  constexpr bool INT8 = Kind::WORDS == 16;
  int64_t stride = p.G * Kind::WORDS;
  const char* x = static_cast<const char*>(p.x) + 4 * m * stride;  // of 16-bit elements: aligned to 2 bytes
  for (int64_t g = 0; g < p.G; ++g, words += Kind::WORDS * BLOCK, scales += BLOCK, x += 4 * Kind::WORDS) {
    typename Kind::Sum sum[T][2];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      if constexpr (INT8) {
        sum[t][0] = sum[t][1] = _mm512_set1_epi32(-128 * p.x_sums[(m + t) * p.G + g]);
      } else {
        sum[t][0] = sum[t][1] = _mm512_setzero_ps();
      }
    }
    for (int k = 0; k < Kind::WORDS; ++k) {
      __m512i low = _mm512_load_si512(words + k * BLOCK), high = _mm512_load_si512(words + k * BLOCK + 16);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        int32_t x_word;
        std::memcpy(&x_word, x + 4 * (t * stride + k), 4);
        __m512i word = _mm512_set1_epi32(x_word);
        sum[t][0] = step(Kind{}, sum[t][0], low, word);
        sum[t][1] = step(Kind{}, sum[t][1], high, word);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        float* at = y + t * BLOCK + half * 16;
        __m512 scale = _mm512_load_ps(scales + half * 16), before = g ? _mm512_load_ps(at) : _mm512_setzero_ps(), found;
        if constexpr (INT8) {
          found = _mm512_cvtepi32_ps(sum[t][half]);
          scale = _mm512_mul_ps(scale, _mm512_set1_ps(p.x_scales[(m + t) * p.G + g]));
        } else {
          found = sum[t][half];
        }
        _mm512_store_ps(at, _mm512_fmadd_ps(found, scale, before));
      }
    }
  }
}

template <typename Kind>
QP_V4 void tiles(const Int8Problem& p, const uint32_t* words, const float* scales, int64_t m0, int64_t tokens,
                 float* y) {
  int64_t t = 0;
  for (; t + TILE <= tokens; t += TILE) tile<Kind, TILE>(p, words, scales, m0 + t, y + t * BLOCK);
  if (t + 4 <= tokens) {
    tile<Kind, 4>(p, words, scales, m0 + t, y + t * BLOCK);
    t += 4;
  }
  for (; t < tokens; ++t) tile<Kind, 1>(p, words, scales, m0 + t, y + t * BLOCK);
}

// y[t * BLOCK] of a weight row and T int8 tokens, along K. As in the tile, the weight goes in as value + 128.
template <int T>
QP_V4 QP_INLINE void dot_vnni_row(const Int8Problem& p, int64_t n, int64_t m, float* y) {
  const int8_t *w = p.values + n * p.K, *x = static_cast<const int8_t*>(p.x) + m * p.G * GROUP;
  const float *ws = p.scales + n * p.G, *xs = p.x_scales + m * p.G;
  __m512i flip = _mm512_set1_epi8(-128), zero = _mm512_setzero_si512();
  __m512 total[T];
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_ps();
  for (int64_t g = 0; g < p.G; ++g) {
    __mmask64 mask = ~0ull >> (GROUP - std::min(GROUP, p.K - g * GROUP));
    _mm_prefetch(w + g * GROUP + AHEAD, _MM_HINT_T0);
    ask_for_scales(ws, g);
    __m512i weight = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, w + g * GROUP), flip);
    for (int t = 0; t < T; ++t) {
      __m512i states = _mm512_loadu_si512(x + (t * p.G + g) * GROUP);
      __m512i sum = _mm512_sub_epi32(dot_int8(zero, weight, states), dot_int8(zero, flip, states));
      total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(ws[g] * xs[t * p.G + g]), total[t]);
    }
  }
  for (int t = 0; t < T; ++t) y[t * BLOCK] = _mm512_reduce_add_ps(total[t]);
}

// As dot_int8.
QP_V4 inline void dot_vnni(const Int8Problem& p, int64_t n0, int64_t rows, int64_t m0, int64_t tokens, float* y) {
  for (int64_t r = 0; r < rows; ++r) {
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2) dot_vnni_row<2>(p, n0 + r, m0 + t, y + t * BLOCK + r);
    if (t < tokens) dot_vnni_row<1>(p, n0 + r, m0 + t, y + t * BLOCK + r);
  }
}

}  // namespace qwen_patch::cpu
#endif
