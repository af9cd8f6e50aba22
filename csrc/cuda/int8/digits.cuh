// 16-bit numbers beside int8 weights as int8 themselves: a group's values become integers in units of one power of two,
// and these three signed digits of 8 bits, so that tensor cores sum them exactly. Three columns of a product then stand
// for one row of the input: where few rows are there, the columns are free, and nothing has to be widened.
// Against the group's largest value a bfloat16 is exact down to 2^-14 of it; what is smaller is rounded to 2^-22 of it,
// or to 2^-126.
#pragma once

#include "widen.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int DIGITS = 3;

// largest: bits of the largest |value|, which is below 2^22 units; NaN or infinite: the unit is NaN. The exponent is
// taken as no less than what keeps both powers of two normal numbers.
struct DigitUnit {
  float unit, inverse;
  __device__ __forceinline__ explicit DigitUnit(unsigned largest) {
    unsigned exponent = max(largest >> 23, 22u);
    unit = __uint_as_float(largest < 0x7f800000u ? (exponent - 21) << 23 : 0x7fffffffu);
    inverse = __uint_as_float((275 - exponent) << 23);
  }
};

// The digits of four values, the highest first: four int8 in each word.
__device__ __forceinline__ void digits_of(const float* values, float inverse, unsigned (&words)[DIGITS]) {
  unsigned v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = (__float_as_uint(fmaf(values[i], inverse, MAGIC)) - MAGIC_BITS + 0x808080) ^ 0x808080;
  unsigned a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
  words[0] = __byte_perm(__byte_perm(v[0], v[1], 0x62), __byte_perm(v[2], v[3], 0x62), 0x5410);
  words[1] = __byte_perm(a, b, 0x7632);
  words[2] = __byte_perm(a, b, 0x5410);
}

}  // namespace qwen_patch::cuda::int8
