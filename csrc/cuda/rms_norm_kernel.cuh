// RMSNorm over rows, with or without the residual add before it.
//
// Bytes a row of H elements of size s: 2Hs (rms_norm: 1 read, 1 write) or 4Hs (add_rms_norm: 2 reads, 2 writes), and
// the weight, which stays in cache. About 4 flops an element: bound by memory, and at decode by latency. Mapping:
// `threads` neighbouring threads (a power of two, 8..1024) own a row; a block holds one or more rows. A thread keeps N
// packs of 16 bytes of its row in registers, so that a row is read once. All loads come before the first use of any of
// them, the weight's too, and they are unconditional (a thread without work reads a valid address again): a branch or a
// use between two loads would make the second wait for the first, which cost 0.4 us at one row and a third of the
// bandwidth at 4096. Limits: H a multiple of the pack, 16-byte aligned pointers, H <= 1024 threads * 4 packs. Anything
// else goes to rms_norm_generic: one block a row, one element an access, a second pass over the row.
#pragma once

#include "common.cuh"

namespace qwen_patch::cuda {

struct RmsNormShape {
  int64_t rows;
  int64_t H;
  float eps;
  float inverse_H;
};

// Sum over the `threads` threads of a row; every one of them gets it. `partial` holds a float a warp of the block. The
// second step reads the warps' sums four at a time, all reads in flight at once: one after the other they cost 0.1 us.
__device__ __forceinline__ float row_sum(float x, int threads, float4* partial) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1)
    if (offset < threads) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (threads <= 32) return x;
  int warp = threadIdx.x >> 5, warps = threads >> 5, first = warp & ~(warps - 1);
  float* sums = reinterpret_cast<float*>(partial);
  if ((threadIdx.x & 31) == 0) sums[warp] = x;
  __syncthreads();
  if (warps == 2) return sums[first] + sums[first + 1];
  x = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (4 * i < warps) {
      float4 s = partial[first / 4 + i];
      x += (s.x + s.y) + (s.z + s.w);
    }
  }
  return x;
}

template <typename T, bool ADD, int N>
__global__ void __launch_bounds__(1024) rms_norm_packed(const T* x, const T* residual, const T* weight, T* normed,
                                                        T* sum, RmsNormShape shape, int threads) {
  using P = Pack<T, PACK<T>>;
  __shared__ float4 partial[8];
  wait_for_previous();
  int lane = threadIdx.x & (threads - 1), packs = static_cast<int>(shape.H / PACK<T>);
  int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / threads;
  bool live = row < shape.rows;
  int64_t base = (live ? row : shape.rows - 1) * packs;

  P v[N], r[N], w[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    int p = min(lane + i * threads, packs - 1);
    v[i] = reinterpret_cast<const P*>(x)[base + p];
    if constexpr (ADD) r[i] = reinterpret_cast<const P*>(residual)[base + p];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = reinterpret_cast<const P*>(weight)[min(lane + i * threads, packs - 1)];

  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    bool mine = live && lane + i * threads < packs;
    if constexpr (ADD) {
#pragma unroll
      for (int j = 0; j < PACK<T>; ++j) v[i].v[j] = from_float<T>(to_float(r[i].v[j]) + to_float(v[i].v[j]));
      if (mine) reinterpret_cast<P*>(sum)[base + lane + i * threads] = v[i];
    }
    float s = 0.f;
#pragma unroll
    for (int j = 0; j < PACK<T>; ++j) s += to_float(v[i].v[j]) * to_float(v[i].v[j]);
    squares += mine ? s : 0.f;
  }
  float scale = rsqrtf(row_sum(squares, threads, partial) * shape.inverse_H + shape.eps);
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < PACK<T>; ++j)
      v[i].v[j] = from_float<T>(to_float(w[i].v[j]) * to_float(from_float<T>(to_float(v[i].v[j]) * scale)));
    if (live && lane + i * threads < packs) reinterpret_cast<P*>(normed)[base + lane + i * threads] = v[i];
  }
}

template <typename T, bool ADD>
__global__ void __launch_bounds__(1024)
    rms_norm_generic(const T* x, const T* residual, const T* weight, T* normed, T* sum, RmsNormShape shape) {
  __shared__ float4 partial[8];
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    int64_t base = row * shape.H;
    float squares = 0.f;
    for (int64_t c = threadIdx.x; c < shape.H; c += blockDim.x) {
      T v = x[base + c];
      if constexpr (ADD) sum[base + c] = v = from_float<T>(to_float(residual[base + c]) + to_float(v));
      squares += to_float(v) * to_float(v);
    }
    float scale = rsqrtf(row_sum(squares, blockDim.x, partial) * shape.inverse_H + shape.eps);
    const T* from = ADD ? sum : x;  // a thread re-reads what it wrote itself
    for (int64_t c = threadIdx.x; c < shape.H; c += blockDim.x)
      normed[base + c] = from_float<T>(to_float(weight[c]) * to_float(from_float<T>(to_float(from[base + c]) * scale)));
    __syncthreads();  // partial is about to be written again
  }
}

// How the threads lie over the rows.
struct RmsNormConfig {
  int threads;  // a row
  int packs;    // a thread
  int block;    // threads a block
};

// Measured on an H200 in a graph, bf16, us for packs a thread = 1 / 2 / 4:
//   1 row:      add_rms_norm H 896 1.24 / 1.29 / 1.77, H 4096 1.65 / 1.57 / 2.00; rms_norm H 4096 1.52 / 1.46 / 1.56
//   512 rows:   add_rms_norm H 4096 6.08 / 5.87 / 6.09; rms_norm 4.13 / 4.24 / 4.20
//   4096 rows:  add_rms_norm H 4096 35.8 / 36.0 / 37.6; rms_norm 25.5 / 19.8 / 20.4
// At 4096 rows add_rms_norm reaches 89% of the copy bandwidth and at 16384 rows 98%: what is missing is about 3 us of
// filling and draining. Streaming cache hints, fewer resident blocks, and persistent blocks that prefetch their next
// row were all tried and within 1% of this, or slower.
inline RmsNormConfig rms_norm_config(int64_t rows, int64_t packs, int sms) {
  int per_thread = rows <= 2 * sms && packs <= 256 ? 1 : 2;
  int threads = 8;
  while (threads < 1024 && threads * per_thread < packs) threads *= 2;
  while (threads * per_thread < packs) per_thread *= 2;
  while (per_thread > 1 && threads * per_thread / 2 >= packs) per_thread /= 2;
  int block = threads < 32 ? 32 : threads;
  // Blocks of 128 threads where a row needs fewer, as long as every multiprocessor still gets one.
  while (block < 128 && rows * threads > static_cast<int64_t>(block) * sms) block *= 2;
  return {threads, per_thread, block};
}

template <typename T, bool ADD>
void launch_rms_norm(const T* x, const T* residual, const T* weight, T* normed, T* sum, RmsNormShape shape,
                     RmsNormConfig c, cudaStream_t stream) {
  int rows_a_block = c.block / c.threads;
  dim3 grid(static_cast<unsigned>((shape.rows + rows_a_block - 1) / rows_a_block));
  auto kernel = c.packs == 1   ? rms_norm_packed<T, ADD, 1>
                : c.packs == 2 ? rms_norm_packed<T, ADD, 2>
                               : rms_norm_packed<T, ADD, 4>;
  launch("rms_norm", kernel, grid, c.block, stream, x, residual, weight, normed, sum, shape, c.threads);
}

template <typename T, bool ADD>
void launch_rms_norm(const T* x, const T* residual, const T* weight, T* normed, T* sum, RmsNormShape shape,
                     cudaStream_t stream) {
  int64_t packs = shape.H / PACK<T>;
  if (shape.H % PACK<T> == 0 && packs <= 4096 && aligned16(x, residual, weight, normed, sum)) {
    RmsNormConfig config = rms_norm_config(shape.rows, packs, device_traits().multiprocessors);
    launch_rms_norm<T, ADD>(x, residual, weight, normed, sum, shape, config, stream);
  } else {
    dim3 grid(static_cast<unsigned>(shape.rows < 65536 ? shape.rows : 65536));
    int block = shape.H >= 4096 ? 1024 : 256;
    launch("rms_norm", rms_norm_generic<T, ADD>, grid, block, stream, x, residual, weight, normed, sum, shape);
  }
}

}  // namespace qwen_patch::cuda
