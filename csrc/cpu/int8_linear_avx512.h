// int8_linear with AVX-512: products of int8 with VNNI, of bf16 with AVX512_BF16, of floats with FMA; all exact, or
// summed in float32.
//
// A token or two: along K, 64 products an instruction, the weight straight from memory, which bounds it.
// More tokens: a block of 32 weight rows is packed once, so that a vector holds one 32-bit word (4 int8, 2 bf16 or a
// float along K) of 16 rows; then tiles of 8 tokens x 32 rows stay in registers over a group of 64, a word of a token
// going to all 16 lanes. Scales are applied once a group, to 16 results at a time: 16 to 64 products come before it.
// Bound by the arithmetic.
#pragma once

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
  for (int64_t g = 0; g < p.G; ++g) {
    int64_t left = std::min(GROUP, p.K - g * GROUP);
    __mmask64 mask = ~0ull >> (GROUP - left);
    for (int64_t half = 0; half < BLOCK; half += 16) {
      __m512i w[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const int8_t* row = p.values + (n0 + half + i) * p.K + g * GROUP;
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
  const uint32_t* x = static_cast<const uint32_t*>(p.x) + m * stride;
  for (int64_t g = 0; g < p.G; ++g, words += Kind::WORDS * BLOCK, scales += BLOCK, x += Kind::WORDS) {
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
        __m512i word = _mm512_set1_epi32(static_cast<int32_t>(x[t * stride + k]));
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

// y[t * BLOCK + r] of R weight rows and T int8 tokens, along K. As in the tile, the weight goes in as value + 128.
template <int R, int T>
QP_V4 QP_INLINE void dot_vnni_tile(const Int8Problem& p, int64_t n, int64_t m, float* y) {
  const int8_t *w = p.values + n * p.K, *x = static_cast<const int8_t*>(p.x) + m * p.G * GROUP;
  const float *ws = p.scales + n * p.G, *xs = p.x_scales + m * p.G;
  __m512i flip = _mm512_set1_epi8(-128);
  __m512 total[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) total[r][t] = _mm512_setzero_ps();
  for (int64_t g = 0; g < p.G; ++g) {
    int64_t left = std::min(GROUP, p.K - g * GROUP);
    __mmask64 mask = ~0ull >> (GROUP - left);
    __m512i states[T], excess[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      states[t] = _mm512_loadu_si512(x + (t * p.G + g) * GROUP);
      excess[t] = dot_int8(_mm512_setzero_si512(), flip, states[t]);
      excess[t] = _mm512_sub_epi32(_mm512_setzero_si512(), excess[t]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __m512i weight = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, w + r * p.K + g * GROUP), flip);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        __m512 sum = _mm512_cvtepi32_ps(dot_int8(excess[t], weight, states[t]));
        total[r][t] = _mm512_fmadd_ps(sum, _mm512_set1_ps(ws[r * p.G + g] * xs[t * p.G + g]), total[r][t]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) y[t * BLOCK + r] = _mm512_reduce_add_ps(total[r][t]);
}

// As dot_int8.
QP_V4 inline void dot_vnni(const Int8Problem& p, int64_t n0, int64_t rows, int64_t m0, int64_t tokens, float* y) {
  for (int64_t t = 0; t < tokens;) {
    bool two = t + 2 <= tokens;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      if (two) {
        dot_vnni_tile<4, 2>(p, n0 + r, m0 + t, y + t * BLOCK + r);
      } else {
        dot_vnni_tile<4, 1>(p, n0 + r, m0 + t, y + t * BLOCK + r);
      }
    }
    for (; r < rows; ++r) {
      dot_vnni_tile<1, 1>(p, n0 + r, m0 + t, y + t * BLOCK + r);
      if (two) dot_vnni_tile<1, 1>(p, n0 + r, m0 + t + 1, y + (t + 1) * BLOCK + r);
    }
    t += two ? 2 : 1;
  }
}

}  // namespace qwen_patch::cpu
#endif
