// int8_linear's arguments as the kernels read them.
#pragma once

#include "widen.cuh"

namespace qwen_patch::cuda::int8 {

constexpr const char* OP = "int8_linear";

// As the kernels need it: contiguous, on 16 bytes.
inline Tensor packed(const Tensor& t) {
  Tensor whole = as_contiguous(t);
  return aligned16(whole.data_ptr()) ? whole : torch::stable::clone(whole);
}

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

}  // namespace qwen_patch::cuda::int8
