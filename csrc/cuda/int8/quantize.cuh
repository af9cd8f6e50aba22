// Tokens to int8, to the bit by the rule of quantization/format.py: for each 64 values of a token, scale = max|x| / 127
// and code = x / scale rounded to even, both divisions in fp32.
// Bytes an element of x of size s: s read, 1 written, 1/16 of scales: bound by memory.
// Mapping: 8 values a lane, 8 lanes a group, 4 groups a warp; a block has up to 8 warps of one token.
// A group with a NaN or an infinity has scale NaN and codes 0. Codes beyond K, up to whole groups, are 0.
#pragma once

#include "codes.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int QUANTIZE_WARPS = 8;

// a / b rounded to the nearest, 1 / b so rounded being known; for quotients of at most 127 and a b that is not tiny.
// Each step takes away what is left of a: after two of them the last rounding is the only one (Markstein 1990). What is
// left may underflow only where the quotient is far below a half, and then its code is 0 all the same.
__device__ __forceinline__ float divided(float a, float b, float reciprocal) {
  float q = a * reciprocal;
  q = __fmaf_rn(__fmaf_rn(-q, b, a), reciprocal, q);
  return __fmaf_rn(__fmaf_rn(-q, b, a), reciprocal, q);
}

// The calling lane's 8 values, `x` on, of a group that 8 neighbours share; zeros where `there` is false. Gives back the
// group's largest |value| as bits: NaN is beyond infinity, and no comparison passes over it. All 32 lanes of a warp
// call it.
template <typename T>
__device__ __forceinline__ unsigned read_8(const T* x, bool there, float (&v)[8]) {
  constexpr int PACKS = 8 / PACK<T>;
  Pack<T, PACK<T>> raw[PACKS] = {};
  if (there) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) raw[i] = reinterpret_cast<const Pack<T, PACK<T>>*>(x)[i];
  }
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = to_float(raw[i / PACK<T>].v[i % PACK<T>]);
    largest = max(largest, __float_as_uint(v[i]) & 0x7fffffff);
  }
#pragma unroll
  for (int apart = 4; apart; apart /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, apart));
  return largest;
}

// Of the same 8 values the codes; gives back the group's scale.
template <typename T>
__device__ __forceinline__ float quantize_8(const T* x, bool there, uint2& codes) {
  float v[8];
  unsigned largest = read_8(x, there, v);
  float scale = largest < 0x7f800000 ? __fdiv_rn(__uint_as_float(largest), 127.f) : __uint_as_float(0x7fffffff);
  unsigned packed[2] = {};
  if (scale > 0.f) {
    float reciprocal = __frcp_rn(scale);
    auto code = [](float quotient) { return __float_as_uint(quotient + MAGIC); };  // the low byte
    unsigned c[8];
    if (scale > 0x1p-100f) {
#pragma unroll
      for (int i = 0; i < 8; ++i) c[i] = code(divided(v[i], scale, reciprocal));
    } else {
      // The clamp is for groups so small that their scale is subnormal and rounds to much less than max|x| / 127.
#pragma unroll
      for (int i = 0; i < 8; ++i) c[i] = code(fminf(127.f, fmaxf(-127.f, __fdiv_rn(v[i], scale))));
    }
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      packed[i / 4] = __byte_perm(__byte_perm(c[i], c[i + 1], 0x0040), __byte_perm(c[i + 2], c[i + 3], 0x0040), 0x5410);
  }
  codes = make_uint2(packed[0], packed[1]);
  return scale;
}

template <typename T>
__global__ void __launch_bounds__(32 * QUANTIZE_WARPS)
    quantize_tokens(const T* x, int8_t* codes, float* scales, int K, int G) {
  wait_for_previous();
  int m = blockIdx.x, g = (blockIdx.y * blockDim.x + threadIdx.x) / 8, k = g * GROUP + threadIdx.x % 8 * 8;
  uint2 packed;
  float scale = quantize_8(x + static_cast<int64_t>(m) * K + k, k < K, packed);
  if (g >= G) return;
  *reinterpret_cast<uint2*>(codes + static_cast<int64_t>(m) * G * GROUP + k) = packed;
  if (threadIdx.x % 8 == 0) scales[static_cast<int64_t>(g) * gridDim.x + m] = scale;
}

template <typename T>
void launch_quantize(const T* x, int8_t* codes, float* scales, int M, int K, int G, cudaStream_t stream) {
  int warps = (G + 3) / 4, block = warps < QUANTIZE_WARPS ? warps : QUANTIZE_WARPS;
  dim3 grid(static_cast<unsigned>(M), static_cast<unsigned>((warps + block - 1) / block));
  launch(OP, quantize_tokens<T>, grid, 32 * block, stream, x, codes, scales, K, G);
}

}  // namespace qwen_patch::cuda::int8
