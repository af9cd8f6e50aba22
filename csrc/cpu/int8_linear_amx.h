// int8_linear with AMX: products of 16 tokens and 16 weight rows over a group of 64 in one instruction, exact in int32.
// It reads the words that the AVX-512 tiles are packed into, which are AMX's own layout. A group has its own scales, so
// every product is drained: that, 16 vectors of arithmetic, is the bound, not the product, which takes 16 cycles.
#pragma once

#include "int8_linear_avx512.h"

#if QP_AVX512

#ifdef QP_EMULATE_AMX
#include "amx_emulated.h"
#else
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define QP_AMX __attribute__((target(QP_V4_FEATURES ",amx-tile,amx-int8")))

namespace qwen_patch::cpu {

constexpr int64_t AMX_TOKENS = 16;

struct alignas(64) TileConfig {  // as LDTILECFG has it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_a_row[16] = {};
  uint8_t rows[16] = {};
};

// y [16][BLOCK] of 16 of a packed block's rows, from column `half` on, and the 16 tokens from m on. The words are
// unsigned, value + 128: 128 * (sum of x) is taken away again.
QP_AMX inline void tile_amx(const Int8Problem& p, const uint32_t* words, const float* scales, int64_t m, int64_t half,
                            float* y) {
  // Tiles: 0 the sums, 1 the tokens, 2 the weight. The intrinsics want their numbers as they are.
  alignas(64) int32_t sums[AMX_TOKENS][16];
  __m512 total[AMX_TOKENS];
#pragma GCC unroll 16
  for (int t = 0; t < AMX_TOKENS; ++t) total[t] = _mm512_setzero_ps();
  const int8_t* x = static_cast<const int8_t*>(p.x) + m * p.G * GROUP;
  for (int64_t g = 0; g < p.G; ++g) {
    _tile_zero(0);
    _tile_loadd(1, x + g * GROUP, static_cast<int>(p.G * GROUP));
    _tile_loadd(2, words + g * Int8Words::WORDS * BLOCK + half, static_cast<int>(BLOCK * sizeof(uint32_t)));
    _tile_dpbsud(0, 1, 2);
    _tile_stored(0, sums, sizeof(sums[0]));
    __m512 scale = _mm512_load_ps(scales + g * BLOCK + half);
    const float* x_scales = p.x_scales + m * p.G + g;
    const int32_t* x_sums = p.x_sums + m * p.G + g;
#pragma GCC unroll 16
    for (int t = 0; t < AMX_TOKENS; ++t) {
      __m512i sum = _mm512_sub_epi32(_mm512_load_si512(sums[t]), _mm512_set1_epi32(128 * x_sums[t * p.G]));
      __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[t * p.G]));
      total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, total[t]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < AMX_TOKENS; ++t) _mm512_store_ps(y + t * BLOCK + half, total[t]);
}

// As tiles<Int8Words>, which has what is left of the tokens.
QP_AMX inline void tiles_amx(const Int8Problem& p, const uint32_t* words, const float* scales, int64_t m0,
                             int64_t tokens, float* y) {
  TileConfig config;
  for (int i = 0; i < 3; ++i) config.bytes_a_row[i] = 64, config.rows[i] = 16;
  asm volatile("" ::: "memory");  // the intrinsics don't say all that they read
  _tile_loadconfig(&config);
  int64_t t = 0;
  for (; t + AMX_TOKENS <= tokens; t += AMX_TOKENS) {
    for (int64_t half = 0; half < BLOCK; half += 16) tile_amx(p, words, scales, m0 + t, half, y + t * BLOCK);
  }
  _tile_release();  // else every switch of threads saves 8 KB
  if (t < tokens) tiles<Int8Words>(p, words, scales, m0 + t, tokens - t, y + t * BLOCK);
}

// Whether they give VNNI's results, to the bit. Asked at run time, because nobody who has worked on this has seen
// them on a processor, only as amx_emulated.h has them.
inline bool amx_agrees() {
  constexpr int64_t G = 2;
  alignas(64) uint32_t words[G * Int8Words::WORDS * BLOCK];
  alignas(64) float scales[G * BLOCK], x_scales[AMX_TOKENS * G], found[AMX_TOKENS * BLOCK],
      expected[AMX_TOKENS * BLOCK];
  int8_t x[AMX_TOKENS * G * GROUP];
  int32_t x_sums[AMX_TOKENS * G] = {};
  uint32_t next = 1;
  auto number = [&next] { return (next = 1664525 * next + 1013904223) >> 8; };
  for (uint32_t& word : words) word = number() << 8 | (number() & 255);
  for (float& scale : scales) scale = static_cast<float>(number() % 1000);
  for (float& scale : x_scales) scale = static_cast<float>(number() % 1000);
  for (int64_t i = 0; i < AMX_TOKENS * G * GROUP; ++i) {
    x[i] = static_cast<int8_t>(number() % 255 - 127);
    x_sums[i / GROUP] += x[i];
  }
  Int8Problem p{nullptr, nullptr, BLOCK, G * GROUP, G, x, x_scales, x_sums};
  tiles_amx(p, words, scales, 0, AMX_TOKENS, found);
  tiles<Int8Words>(p, words, scales, 0, AMX_TOKENS, expected);
  return std::memcmp(found, expected, sizeof(found)) == 0;
}

// Whether the processor has it, the system lets this process use it, and it is what we think it is.
inline bool has_amx() {
#ifdef QP_EMULATE_AMX
  static const bool found = amx_agrees();
  if (!found) __builtin_trap();
#else
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool found = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                            syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 && amx_agrees();
#endif
  return found;
}

}  // namespace qwen_patch::cpu
#endif
