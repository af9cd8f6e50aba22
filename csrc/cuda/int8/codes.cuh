// The int8 format as the kernels read it: codes in groups of 64 along K, and how four codes become four 16-bit values.
#pragma once

#include "../../common/linear.h"
#include "../numbers.cuh"
#include "../ptx.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int GROUP = INT8_GROUP;
constexpr const char* OP = "int8_linear";

// A call, x in T or quantized. Everything contiguous and on 16 bytes.
template <typename X>
struct Problem {
  const int8_t* values;   // [N, K]
  const float* scales;    // [N, G]
  const X* x;             // [M, pitch]
  int64_t pitch;          // K, or G * 64 where x is quantized
  const float* x_scales;  // where it is, see scale_at
  const void* bias;       // [N], or null
  bool bias_is_float;     // else of y's dtype
  int M, N, K, G;
};

template <typename T, typename X>
__device__ __forceinline__ float bias_at(const Problem<X>& p, int n) {
  if (p.bias == nullptr) return 0.f;
  return p.bias_is_float ? static_cast<const float*>(p.bias)[n] : to_float(static_cast<const T*>(p.bias)[n]);
}

// The scales of quantized tokens lie as [tile of 128 tokens][G][128]. Within the 128, those that a lane of the tensor
// core's result holds, tokens 8j + 2t and 8j + 2t + 1 in lane t of 4, are four in a row for each two j.
constexpr int SCALE_TILE = 128;
__host__ __device__ __forceinline__ int scale_place(int m) {
  return (m >> 4) * 16 + ((m >> 1) & 3) * 4 + ((m >> 3) & 1) * 2 + (m & 1);
}
__host__ __device__ __forceinline__ int64_t scale_at(int m, int g, int G) {
  return (static_cast<int64_t>(m / SCALE_TILE) * G + g) * SCALE_TILE + scale_place(m % SCALE_TILE);
}

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

}  // namespace qwen_patch::cuda::int8
