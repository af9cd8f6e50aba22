// The int8 format as the kernels read it: codes in groups of 64 along K, and how four codes become four 16-bit values.
#pragma once

#include "../../common/linear.h"
#include "../numbers.cuh"
#include "../ptx.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int GROUP = INT8_GROUP;

// The bits of this number plus an integer below 2^22 are the bits of their sum: an addition in place of a conversion,
// and a product can start from them.
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23

// Two codes, in the low bytes of each 16 bits, as T: exact. A bfloat16 of 128 to 255 counts in ones, so the code's low
// 7 bits go into 128's mantissa, and 128 or, of a negative code, 256 is taken off. A float16 of 1,024 to 2,047 has room
// for all 8 bits. What lies in the high bytes does not count.
template <typename T>
__device__ __forceinline__ unsigned from_codes(unsigned pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return add2<T>(and_or(pair, 0x007f007f, 0x43004300), and_or(pair, 0x00800080, 0xc300c300));
  else
    return add2<T>(and_xor(pair, 0x00ff00ff, 0x64806480), 0xe480e480);
}
// Of a word's four codes, numbers 0 and 2, and 1 and 3.
template <typename T>
__device__ __forceinline__ unsigned even_codes(unsigned word) {
  return from_codes<T>(word);
}
template <typename T>
__device__ __forceinline__ unsigned odd_codes(unsigned word) {
  return from_codes<T>(word >> 8);
}
// ... and numbers 0 and 1, and 2 and 3.
template <typename T>
__device__ __forceinline__ unsigned low_codes(unsigned word) {
  return from_codes<T>(__byte_perm(word, 0, 0x4140));
}
template <typename T>
__device__ __forceinline__ unsigned high_codes(unsigned word) {
  return from_codes<T>(__byte_perm(word, 0, 0x4342));
}
// The codes of two words plus 128, in order, as values of T in T's smallest step: the bits of 0 to 255 are subnormals,
// and in bfloat16 from 128 on the first numbers beyond them, which are as far apart.
__device__ __forceinline__ uint4 plus_128(uint2 words) {
  unsigned a = words.x ^ 0x80808080, b = words.y ^ 0x80808080;
  return make_uint4(__byte_perm(a, 0, 0x4140), __byte_perm(a, 0, 0x4342), __byte_perm(b, 0, 0x4140),
                    __byte_perm(b, 0, 0x4342));
}
constexpr unsigned MINUS_128 = 0x80808080;  // twice, likewise

}  // namespace qwen_patch::cuda::int8
