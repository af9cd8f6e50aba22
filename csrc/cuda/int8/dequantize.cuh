// scale * code in fp32, for a whole weight. Bytes a code: 1 read, 4 written: bound by memory. 8 codes a thread.
#pragma once

#include "codes.cuh"

namespace qwen_patch::cuda::int8 {

__global__ void __launch_bounds__(256)
    dequantize_rows(const int8_t* values, const float* scales, float* out, int64_t rows, int64_t K) {
  wait_for_previous();
  int64_t k = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * 8, G = (K + GROUP - 1) / GROUP;
  if (k >= K) return;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    Pack<int8_t, 8> codes = *reinterpret_cast<const Pack<int8_t, 8>*>(values + row * K + k);
    float scale = scales[row * G + k / GROUP];
    Pack<float, 4> half[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) half[i / 4].v[i % 4] = scale * static_cast<float>(codes.v[i]);
    reinterpret_cast<Pack<float, 4>*>(out + row * K + k)[0] = half[0];
    reinterpret_cast<Pack<float, 4>*>(out + row * K + k)[1] = half[1];
  }
}

inline void launch_dequantize(const int8_t* values, const float* scales, float* out, int64_t rows, int64_t K,
                              cudaStream_t stream) {
  dim3 grid(static_cast<unsigned>(rows < INT32_MAX ? rows : INT32_MAX), static_cast<unsigned>((K + 2047) / 2048));
  launch(OP, dequantize_rows, grid, 256, stream, values, scales, out, rows, K);
}

}  // namespace qwen_patch::cuda::int8
