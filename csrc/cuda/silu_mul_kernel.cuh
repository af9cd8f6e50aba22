// silu(gate) * up. Bytes an element of size s: 3s (2 reads, 1 write); about 6 flops, an exponential and a division:
// bound by memory, and at decode by latency.
// Mapping: a thread takes one pack of N elements; the grid's y walks the rows of the packed layout, whose gate and up
// are the two halves of a row. Large inputs use packs of 16 bytes. Small ones use narrower packs, so that the work
// spreads over more threads: a full-precision exponential and division for 8 elements in one thread cost more than the
// launch. Limits: I a multiple of the pack and pointers aligned to it; otherwise the pack narrows, down to one element.
#pragma once

#include "common.cuh"

namespace qwen_patch::cuda {

template <typename T>
__device__ __forceinline__ T silu_mul_one(T gate, T up) {
  float g = to_float(gate);
  // expf and the division are the full-precision ones: the result is bit-equal to the stock model's.
  return from_float<T>(to_float(from_float<T>(g / (1.f + expf(-g)))) * to_float(up));
}

// gate, up: rows of `packs` packs, `stride` packs apart; out: the same rows without gaps.
template <typename T, int N>
__global__ void __launch_bounds__(256)
    silu_mul_packs(const T* gate, const T* up, T* out, int64_t rows, int64_t packs, int64_t stride) {
  using P = Pack<T, N>;
  wait_for_previous();
  int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (p >= packs) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    P g = reinterpret_cast<const P*>(gate)[row * stride + p], u = reinterpret_cast<const P*>(up)[row * stride + p];
#pragma unroll
    for (int j = 0; j < N; ++j) g.v[j] = silu_mul_one(g.v[j], u.v[j]);
    reinterpret_cast<P*>(out)[row * packs + p] = g;
  }
}

struct SiluMulConfig {
  int pack;   // elements a thread
  int block;  // threads a block
};

// Measured on an H200 in a graph, bf16, us for packs of 1 / 2 / 4 / 8 elements, with blocks of 128 threads, and of 256
// for packs of 4: 1 x 4864 0.95 / 1.04 / - / -, 8 x 18944 1.76 / 1.69 / 1.79 / -, 128 x 3072 - / 2.19 / 2.07 / 2.33,
// 128 x 12288 - / 5.20 / 4.23 / 5.07, 512 x 4864 - / - / 5.71 / 5.90, 512 x 12288 - / - / 12.0 / 10.8, 4096 x 12288
// - / - / 82.5 / 71.3.
template <typename T>
SiluMulConfig silu_mul_config(int64_t elements, int sms) {
  if (elements / PACK<T> >= 4000LL * sms) return {PACK<T>, 128};
  int pack = PACK<T> / 2;
  if (elements / pack >= 340LL * sms) return {pack, 256};
  while (pack > 1 && elements / pack < 340LL * sms) pack /= 2;
  return {pack, 128};
}

template <typename T>
void launch_silu_mul(const T* gate, const T* up, T* out, int64_t rows, int64_t I, int64_t stride, SiluMulConfig c,
                     cudaStream_t stream) {
  auto usable = [&](int n) {
    auto fits = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % (n * sizeof(T)) == 0; };
    return I % n == 0 && stride % n == 0 && fits(gate) && fits(up) && fits(out);
  };
  while (c.pack > 1 && !usable(c.pack)) c.pack /= 2;
  int64_t packs = I / c.pack;
  dim3 grid(static_cast<unsigned>((packs + c.block - 1) / c.block), static_cast<unsigned>(rows < 65535 ? rows : 65535));
  auto kernel = silu_mul_packs<T, 1>;
  if (c.pack == 2) kernel = silu_mul_packs<T, 2>;
  if (c.pack == 4) kernel = silu_mul_packs<T, 4>;
  if constexpr (PACK<T> == 8)
    if (c.pack == 8) kernel = silu_mul_packs<T, 8>;
  launch("silu_mul", kernel, grid, c.block, stream, gate, up, out, rows, packs, stride / c.pack);
}

template <typename T>
void launch_silu_mul(const T* gate, const T* up, T* out, int64_t rows, int64_t I, int64_t stride, cudaStream_t stream) {
  launch_silu_mul<T>(gate, up, out, rows, I, stride, silu_mul_config<T>(rows * I, device_traits().multiprocessors),
                     stream);
}

}  // namespace qwen_patch::cuda
