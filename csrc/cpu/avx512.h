// AVX-512 intrinsics, and the two instructions that not every AVX-512 processor has.
#pragma once

#include "simd.h"

#if QP_AVX512
// GCC 12 takes the "undefined" operands inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#define QP_V4_FEATURES "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2"
#define QP_V4 __attribute__((target(QP_V4_FEATURES)))

namespace qwen_patch::cpu {

// Assembly, not intrinsics: those can't be inlined into functions for processors without them, and so one function
// serves both. sum + a * b in each 32-bit lane: 4 unsigned times 4 signed bytes (VNNI); 2 by 2 bf16 (AVX512_BF16).
QP_V4 QP_INLINE __m512i dot_int8(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
QP_V4 QP_INLINE __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

}  // namespace qwen_patch::cpu
#endif
