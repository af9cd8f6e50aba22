// What both kernels for many tokens on sm_90 share: the order of their tiles, tensor maps for what their blocks read,
// and the results, which leave turned round.
#pragma once

#include <cudaTypedefs.h>

#include "../slots.cuh"
#include "codes.cuh"
#include "hopper_ptx.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int HOPPER_TOKENS = 128;  // of a tile

// Where a tile lies. Tokens go first, within bands: the blocks that run together share weights, and a band's tokens
// stay in L2.
struct HopperTiles {
  int m_tiles, n_tiles;
  int band = 16;  // tiles of tokens that share the weights' way through L2
  __host__ __device__ __forceinline__ int count() const { return m_tiles * n_tiles; }
  __device__ __forceinline__ void at(int tile, int& m, int& n) const {
    int first = tile / (band * n_tiles) * band, in_band = min(band, m_tiles - first), rest = tile - first * n_tiles;
    n = rest / in_band;
    m = first + rest - n * in_band;
  }
};

// The driver's function that makes a tensor map; asked for by name, so that nothing links against the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static PFN_cuTensorMapEncodeTiled_v12000 found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    check(OP, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
#else
    check(OP, cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result));
#endif
    STD_TORCH_CHECK(result == cudaDriverEntryPointSuccess, OP, ": the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

// [rows, columns] bytes, rows `pitch` bytes apart, in boxes of box_rows x 128.
inline CUtensorMap map_of_rows(const void* at, int64_t rows, int64_t columns, int64_t pitch, int box_rows) {
  CUtensorMap map;
  cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  cuuint64_t strides[1] = {static_cast<cuuint64_t>(pitch)};
  cuuint32_t box[2] = {2 * GROUP, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  CUresult result = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(at), sizes, strides,
                                         box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, OP, ": no tensor map for ", rows, " x ", columns, ": error ",
                  static_cast<int>(result));
  return map;
}

constexpr int OUT_PITCH = 64 * 2 + 16;  // bytes of a token's 64 results in shared memory, rows in different banks

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Adds the bias to a warpgroup's 64 rows x 128 tokens, rounds, and writes them.
template <typename T, typename X>
__device__ __forceinline__ void finish(float (&y)[64], const Problem<X>& p, T* out, int m, int n, unsigned shared,
                                       int warpgroup, int thread) {
  int warp = thread >> 5, lane = thread & 31, row = n + warp * 16 + (lane >> 2);
  float a = row < p.N ? bias_at<T>(p, row) : 0.f, b = row + 8 < p.N ? bias_at<T>(p, row + 8) : 0.f;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      int token = m + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), r = row + (i & 2) * 4;
      if (token < p.M && r < p.N) out[static_cast<int64_t>(token) * p.N + r] = y[i] + (i & 2 ? b : a);
    }
  } else {
    named_sync(1 + warpgroup, 128);  // the results before these have been read
    unsigned to = shared + ((lane >> 4) * 8 + (lane & 7)) * OUT_PITCH + warp * 32 + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float* v = y + 8 * j;
      store_transposed(to + j * 16 * OUT_PITCH, pack2<T>(v[0] + a, v[1] + a), pack2<T>(v[2] + b, v[3] + b),
                       pack2<T>(v[4] + a, v[5] + a), pack2<T>(v[6] + b, v[7] + b));
    }
    named_sync(1 + warpgroup, 128);
    bool whole = p.N % 8 == 0;
    int first = n + (thread & 7) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int token = thread / 8 + 16 * i;
      if (m + token >= p.M || first >= p.N) break;
      uint4 v = load128(shared + token * OUT_PITCH + (thread & 7) * 16);
      T* to_row = out + static_cast<int64_t>(m + token) * p.N + first;
      if (whole) {
        *reinterpret_cast<uint4*>(to_row) = v;
      } else {
        unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (first + e < p.N) to_row[e] = value_of<T>(words[e / 2] >> (e % 2 * 16) & 0xffff);
      }
    }
  }
}
#endif

}  // namespace qwen_patch::cuda::int8
