// y = x W^T for many tokens on sm_90, both int8 in groups of 64 along K: sums exact within a group, fp32 beyond.
// 2 M N K operations. The tensor cores would do a group of a 64 x 128 tile in 128 cycles; scaling its 8,192 sums takes
// three instructions each (to float, the two scales' product, the multiply-add), 192 cycles of a warpgroup's issue
// slots. So what bounds it is instructions, and every one beside those three counts.
// Mapping: a block walks over tiles of ROWS weight rows x 128 tokens. One thread brings stages of two groups by TMA, as
// far ahead as shared memory has room, across tiles. WARPGROUPS warpgroups take HALVES * 64 rows each, and scale one
// group's sums while another's products run. The weights are the 64-row side: a thread then has two rows' scales, from
// memory, and all the tokens' scales lie in shared memory in its order. The results are turned round on the way out.
// Limits: K a multiple of 16.
#pragma once

#include <cudaTypedefs.h>

#include "codes.cuh"
#include "hopper_ptx.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int HOPPER_TOKENS = 128;
constexpr int BAND = 16;  // tiles of tokens that share the weights' way through L2

template <int WARPGROUPS_, int HALVES_, int STAGES_>
struct HopperShape {
  static constexpr int WARPGROUPS = WARPGROUPS_, HALVES = HALVES_, STAGES = STAGES_;
  static constexpr int ROWS = WARPGROUPS * HALVES * 64, THREADS = 128 * (WARPGROUPS + 1);
  static constexpr int W_BYTES = ROWS * 2 * GROUP, X_BYTES = HOPPER_TOKENS * 2 * GROUP;
  static constexpr int SCALE_BYTES = HOPPER_TOKENS * 4;  // of a group
  static constexpr int OUT_PITCH = 64 * 2 + 16;          // a token's 64 results, rows in different banks
  // Shared memory, from an address on 1,024 bytes.
  static constexpr int X_AT = STAGES * W_BYTES, SCALES_AT = X_AT + STAGES * X_BYTES;
  static constexpr int OUT_AT = SCALES_AT + STAGES * 2 * SCALE_BYTES;
  static constexpr int BARRIERS_AT = OUT_AT + WARPGROUPS * HOPPER_TOKENS * OUT_PITCH;
  static constexpr int SHARED = 1024 + BARRIERS_AT + 16 * STAGES;
  static constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 240 : 160, PRODUCER_REGISTERS = WARPGROUPS == 2 ? 24 : 32;
  static_assert(SHARED <= 227 << 10);
};

// Where a tile lies. Tokens go first, within bands: the blocks that run together share weights, and a band's tokens
// stay in L2.
struct HopperTiles {
  int m_tiles, n_tiles;
  __device__ __forceinline__ void at(int tile, int& m, int& n) const {
    int band = tile / (BAND * n_tiles), in_band = min(BAND, m_tiles - band * BAND), rest = tile - band * BAND * n_tiles;
    n = rest / in_band;
    m = band * BAND + rest - n * in_band;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// y += sums of a group, times the scales of this thread's two rows and 32 tokens.
__device__ __forceinline__ void add_scaled(float (&y)[64], const int (&sums)[64], unsigned of_tokens, float a,
                                           float b) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint4 raw = load128(of_tokens + j * 64);
    float s[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int at = 8 * j + (i >> 1) * 4 + (i & 1);
      y[at] += static_cast<float>(sums[at]) * (s[i] * a);
      y[at + 2] += static_cast<float>(sums[at + 2]) * (s[i] * b);
    }
  }
}

// Adds the bias to a warpgroup's 64 rows x 128 tokens, rounds, and writes them.
template <typename T, typename Shape>
__device__ __forceinline__ void finish(float (&y)[64], const Problem<int8_t>& p, T* out, int m, int n, unsigned shared,
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
    unsigned to = shared + ((lane >> 4) * 8 + (lane & 7)) * Shape::OUT_PITCH + warp * 32 + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float* v = y + 8 * j;
      store_transposed(to + j * 16 * Shape::OUT_PITCH, pack2<T>(v[0] + a, v[1] + a), pack2<T>(v[2] + b, v[3] + b),
                       pack2<T>(v[4] + a, v[5] + a), pack2<T>(v[6] + b, v[7] + b));
    }
    named_sync(1 + warpgroup, 128);
    bool whole = p.N % 8 == 0;
    int first = n + (thread & 7) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int token = thread / 8 + 16 * i;
      if (m + token >= p.M || first >= p.N) break;
      uint4 v = load128(shared + token * Shape::OUT_PITCH + (thread & 7) * 16);
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

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    hopper_tokens(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                  Problem<int8_t> p, T* out, HopperTiles tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  unsigned shared = (shared_address(unaligned) + 1023) & ~1023u;
  unsigned full = shared + Shape::BARRIERS_AT, empty = full + 8 * Shape::STAGES;
  // By a shuffle, so that the compiler knows it to be one number a warp, and keeps what follows from it in uniform
  // registers, where the products want their addresses.
  int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), count = tiles.m_tiles * tiles.n_tiles;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::STAGES; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * Shape::WARPGROUPS);
    }
    barriers_made();
    prefetch_map(&w_map);
    prefetch_map(&x_map);
  }
  __syncthreads();
  wait_for_previous();
  int stage = 0;
  unsigned parity = 0;
  auto next = [&] {
    if (++stage == Shape::STAGES) stage = 0, parity ^= 1;
  };

  if (warpgroup == Shape::WARPGROUPS) {
    registers_give<Shape::PRODUCER_REGISTERS>();
    if (threadIdx.x != 128 * Shape::WARPGROUPS) return;
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
      int m, n;
      tiles.at(tile, m, n);
      const float* scales = p.x_scales + static_cast<int64_t>(m) * p.G * HOPPER_TOKENS;
      for (int g = 0; g < p.G; g += 2) {
        int scale_bytes = min(2, p.G - g) * Shape::SCALE_BYTES;
        unsigned ready = full + 8 * stage;
        barrier_wait(empty + 8 * stage, parity ^ 1);  // a new barrier counts as past its odd phase
        barrier_expect(ready, Shape::W_BYTES + Shape::X_BYTES + scale_bytes);
        load_box(shared + stage * Shape::W_BYTES, &w_map, g * GROUP, n * Shape::ROWS, ready);
        load_box(shared + Shape::X_AT + stage * Shape::X_BYTES, &x_map, g * GROUP, m * HOPPER_TOKENS, ready);
        load_bulk(shared + Shape::SCALES_AT + stage * 2 * Shape::SCALE_BYTES,
                  scales + static_cast<int64_t>(g) * HOPPER_TOKENS, scale_bytes, ready);
        next();
      }
    }
    return;
  }

  registers_take<Shape::CONSUMER_REGISTERS>();
  int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  unsigned w_at = shared + warpgroup * (Shape::HALVES * 64 * 2 * GROUP), x_at = shared + Shape::X_AT;
  unsigned scales_at = shared + Shape::SCALES_AT + (lane & 3) * 16;
  unsigned my_out = shared + Shape::OUT_AT + warpgroup * HOPPER_TOKENS * Shape::OUT_PITCH;
  asm volatile("" : "+r"(scales_at), "+r"(full), "+r"(empty));  // kept, not computed anew for each group
  for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
    int m, n;
    tiles.at(tile, m, n);
    m *= HOPPER_TOKENS;
    n = n * Shape::ROWS + warpgroup * (Shape::HALVES * 64);
    float y[Shape::HALVES][64] = {};
    // The rows' scales are read a stage ahead.
    const float* row_scales[Shape::HALVES][2];
    float scales[Shape::HALVES][2][2];
    auto read_scales = [&](int g) {
#pragma unroll
      for (int h = 0; h < Shape::HALVES; ++h)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (g < p.G) scales[h][r][0] = row_scales[h][r][0];
          if (g + 1 < p.G) scales[h][r][1] = row_scales[h][r][1];
          row_scales[h][r] += 2;
        }
    };
#pragma unroll
    for (int h = 0; h < Shape::HALVES; ++h)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int row = min(n + h * 64 + warp * 16 + (lane >> 2) + 8 * r, p.N - 1);
        row_scales[h][r] = p.scales + static_cast<int64_t>(row) * p.G;
        asm volatile("" : "+l"(row_scales[h][r]));
      }
    read_scales(0);
#pragma unroll 1
    for (int g = 0; g < p.G; g += 2) {
      barrier_wait(full + 8 * stage, parity);
      float now[Shape::HALVES][2][2];
#pragma unroll
      for (int h = 0; h < Shape::HALVES; ++h)
#pragma unroll
        for (int r = 0; r < 2; ++r) now[h][r][0] = scales[h][r][0], now[h][r][1] = scales[h][r][1];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (g + i == p.G) break;
#pragma unroll
        for (int h = 0; h < Shape::HALVES; ++h) {
          uint64_t w = rows_of_128(w_at + stage * Shape::W_BYTES + h * (64 * 2 * GROUP)) + i * (GROUP >> 4);
          uint64_t x = rows_of_128(x_at + stage * Shape::X_BYTES) + i * (GROUP >> 4);
          int sums[64];
          products_begin();
          multiply_64x128(sums, w, x, false);
          multiply_64x128(sums, w + (32 >> 4), x + (32 >> 4), true);
          products_commit();
          if (i == 0 && h == 0) read_scales(g + 2);
          products_wait();
          unsigned of_tokens = scales_at + stage * (2 * Shape::SCALE_BYTES) + i * Shape::SCALE_BYTES;
          add_scaled(y[h], sums, of_tokens, now[h][0][i], now[h][1][i]);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * stage);
      next();
    }
#pragma unroll
    for (int h = 0; h < Shape::HALVES; ++h) finish<T, Shape>(y[h], p, out, m, n + h * 64, my_out, warpgroup, thread);
  }
#endif
}

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

// int8 [rows, columns], rows `pitch` bytes apart, in boxes of box_rows x 128.
inline CUtensorMap map_of_rows(const int8_t* at, int64_t rows, int64_t columns, int64_t pitch, int box_rows) {
  CUtensorMap map;
  cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  cuuint64_t strides[1] = {static_cast<cuuint64_t>(pitch)};
  cuuint32_t box[2] = {2 * GROUP, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  CUresult result = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<int8_t*>(at), sizes,
                                         strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, OP, ": no tensor map for ", rows, " x ", columns, ": error ",
                  static_cast<int>(result));
  return map;
}

template <typename Shape, typename T>
void launch_hopper_shape(const Problem<int8_t>& p, T* out, cudaStream_t stream) {
  HopperTiles tiles{(p.M + HOPPER_TOKENS - 1) / HOPPER_TOKENS, (p.N + Shape::ROWS - 1) / Shape::ROWS};
  int blocks = device_traits().multiprocessors, count = tiles.m_tiles * tiles.n_tiles;
  launch_with_shared(OP, hopper_tokens<T, Shape>, dim3(static_cast<unsigned>(count < blocks ? count : blocks)),
                     Shape::THREADS, Shape::SHARED, stream, map_of_rows(p.values, p.N, p.K, p.K, Shape::ROWS),
                     map_of_rows(p.x, p.M, p.pitch, p.pitch, HOPPER_TOKENS), p, out, tiles);
}

using Hopper128 = HopperShape<2, 1, 5>;
using Hopper192 = HopperShape<3, 1, 4>;
using Hopper256 = HopperShape<2, 2, 3>;

// The shape whose tiles fill the multiprocessors' last round best, weighted by its speed where all are full.
template <typename T>
void launch_hopper(const Problem<int8_t>& p, T* out, cudaStream_t stream) {
  int sms = device_traits().multiprocessors;
  auto share = [&](int rows) {
    int64_t tiles = static_cast<int64_t>((p.M + HOPPER_TOKENS - 1) / HOPPER_TOKENS) * ((p.N + rows - 1) / rows);
    return static_cast<double>(p.M) * p.N / static_cast<double>((tiles + sms - 1) / sms * sms * rows * HOPPER_TOKENS);
  };
  if (share(256) >= share(128))
    launch_hopper_shape<Hopper256>(p, out, stream);
  else
    launch_hopper_shape<Hopper128>(p, out, stream);
}

}  // namespace qwen_patch::cuda::int8
