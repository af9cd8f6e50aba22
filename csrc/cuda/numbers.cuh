// Values of T, 16 bits, alone and as pairs in a register.
#pragma once

#include "common.cuh"

namespace qwen_patch::cuda {

template <typename T>
__device__ __forceinline__ unsigned bits_of(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat16_as_ushort(x);
  else
    return __half_as_ushort(x);
}
template <typename T>
__device__ __forceinline__ T value_of(unsigned bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
  else
    return __ushort_as_half(static_cast<unsigned short>(bits));
}

template <typename T>
__device__ __forceinline__ unsigned pack2(float lo, float hi) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<unsigned&>(v);
  } else {
    __half2 v = __floats2half2_rn(lo, hi);
    return reinterpret_cast<unsigned&>(v);
  }
}
// Two products, each rounded once, as in fp32 with a rounding after it: a product of two T is exact there.
template <typename T>
__device__ __forceinline__ unsigned multiply2(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
  Pair v = __hmul2(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b));
  return reinterpret_cast<unsigned&>(v);
}
template <typename T>
__device__ __forceinline__ unsigned add2(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
  Pair v = __hadd2(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b));
  return reinterpret_cast<unsigned&>(v);
}
template <typename T>
__device__ __forceinline__ float2 unpack2(unsigned v) {
  return make_float2(to_float(value_of<T>(v & 0xffff)), to_float(value_of<T>(v >> 16)));
}
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

}  // namespace qwen_patch::cuda
