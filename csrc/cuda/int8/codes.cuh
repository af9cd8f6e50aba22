// int8_linear's arguments as the kernels read them.
#pragma once

#include "widen.cuh"

namespace qwen_patch::cuda::int8 {

constexpr const char *OP = "int8_linear", *ROTATED_OP = "rotated_int8_linear";

// As the kernels need it: contiguous, on 16 bytes.
inline Tensor packed(const Tensor& t) {
  Tensor whole = as_contiguous(t);
  return aligned16(whole.data_ptr()) ? whole : torch::stable::clone(whole);
}

// A call, x in T or quantized. Everything contiguous and on 16 bytes.
template <typename X>
struct Problem {
  const int8_t* values;   // [N, K]
  const float* scales;    // [N, G]; [N] where there is one a row
  const X* x;             // [M, pitch]
  int64_t pitch;          // K, or G * 64 where x is quantized
  const float* x_scales;  // [G, M] where it is; [M] where there is one a token
  const void* bias;       // [N], or null
  bool bias_is_float;     // else of y's dtype
  int M, N, K, G;
};

template <typename T, typename P>
__device__ __forceinline__ float bias_at(const P& p, int n) {
  if (p.bias == nullptr) return 0.f;
  return p.bias_is_float ? static_cast<const float*>(p.bias)[n] : to_float(static_cast<const T*>(p.bias)[n]);
}

}  // namespace qwen_patch::cuda::int8
