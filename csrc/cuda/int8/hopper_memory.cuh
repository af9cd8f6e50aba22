// What both kernels for many tokens on sm_90 share: the order of their tiles, tensor maps for what their blocks read,
// and how results are stored.
#pragma once

#include <cudaTypedefs.h>

#include "../slots.cuh"
#include "codes.cuh"
#include "hopper_ptx.cuh"

namespace qwen_patch::cuda::int8 {

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
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder(const char* op) {
  static PFN_cuTensorMapEncodeTiled_v12000 found = [op] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    check(op, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
#else
    check(op, cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result));
#endif
    STD_TORCH_CHECK(result == cudaDriverEntryPointSuccess, op, ": the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

// [rows, columns] bytes, rows `pitch` bytes apart, in boxes of box_rows x 128.
inline CUtensorMap map_of_rows(const char* op, const void* at, int64_t rows, int64_t columns, int64_t pitch,
                               int box_rows) {
  CUtensorMap map;
  cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  cuuint64_t strides[1] = {static_cast<cuuint64_t>(pitch)};
  cuuint32_t box[2] = {2 * GROUP, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  CUresult result =
      tensor_map_encoder(op)(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(at), sizes, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, op, ": no tensor map for ", rows, " x ", columns, ": error ",
                  static_cast<int>(result));
  return map;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What a block begins with: one thread fills its stages, `users` warps empty them.
__device__ __forceinline__ void begin(const Slots& stages, int users, const CUtensorMap& w_map,
                                      const CUtensorMap& x_map) {
  if (threadIdx.x == 0) {
    stages.init(1, users);
    prefetch_map(&w_map);
    prefetch_map(&x_map);
  }
  __syncthreads();
  wait_for_previous();
}

// Eight results of a token; `left`: how many there are before its row ends. `whole`: all eight, on 16 bytes.
template <typename T>
__device__ __forceinline__ void store_results(T* to, uint4 v, int left, bool whole) {
  if (whole) {
    *reinterpret_cast<uint4*>(to) = v;
  } else {
    unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (e < left) to[e] = value_of<T>(words[e / 2] >> (e % 2 * 16) & 0xffff);
  }
}
#endif

}  // namespace qwen_patch::cuda::int8
