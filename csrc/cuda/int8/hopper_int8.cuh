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

#include "hopper_memory.cuh"

namespace qwen_patch::cuda::int8 {

template <int WARPGROUPS_, int HALVES_, int STAGES_>
struct Int8Shape {
  static constexpr int WARPGROUPS = WARPGROUPS_, HALVES = HALVES_, STAGES = STAGES_;
  static constexpr int ROWS = WARPGROUPS * HALVES * 64, THREADS = 128 * (WARPGROUPS + 1);
  static constexpr int W_BYTES = ROWS * 2 * GROUP, X_BYTES = HOPPER_TOKENS * 2 * GROUP;
  static constexpr int SCALE_BYTES = HOPPER_TOKENS * 4;  // of a group
  // Shared memory, from an address on 1,024 bytes.
  static constexpr int X_AT = STAGES * W_BYTES, SCALES_AT = X_AT + STAGES * X_BYTES;
  static constexpr int OUT_AT = SCALES_AT + STAGES * 2 * SCALE_BYTES;
  static constexpr int BARRIERS_AT = OUT_AT + WARPGROUPS * HOPPER_TOKENS * OUT_PITCH;
  static constexpr int SHARED = 1024 + BARRIERS_AT + 16 * STAGES;
  static constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
  static_assert(SHARED <= 227 << 10);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// y += the products of a group, 64 weight rows from `w` on by 128 tokens from `x` on, times the scales of this thread's
// two rows, a and b, and of its tokens. `meanwhile` runs while the products do.
template <typename F>
__device__ __forceinline__ void add_products(float (&y)[64], unsigned w, unsigned x, unsigned of_tokens, float a,
                                             float b, F&& meanwhile) {
  int sums[64];
  uint64_t w_rows = rows_of_128(w), x_rows = rows_of_128(x);
  products_begin();
  multiply_64x128(sums, w_rows, x_rows, false);
  multiply_64x128(sums, w_rows + (32 >> 4), x_rows + (32 >> 4), true);
  products_commit();
  meanwhile();
  products_wait();
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

#endif

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    hopper_int8(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, Problem<int8_t> p,
                T* out, HopperTiles tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  unsigned shared = (shared_address(unaligned) + 1023) & ~1023u;
  Slots stages{shared + Shape::BARRIERS_AT, Shape::STAGES};
  // By a shuffle, so that the compiler knows it to be one number a warp, and keeps what follows from it in uniform
  // registers, where the products want their addresses.
  int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), count = tiles.m_tiles * tiles.n_tiles;
  if (threadIdx.x == 0) {
    stages.init(1, 4 * Shape::WARPGROUPS);
    prefetch_map(&w_map);
    prefetch_map(&x_map);
  }
  __syncthreads();
  wait_for_previous();
  Place at;

  if (warpgroup == Shape::WARPGROUPS) {
    registers_give<Shape::PRODUCER_REGISTERS>();
    if (threadIdx.x != 128 * Shape::WARPGROUPS) return;
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
      int m, n;
      tiles.at(tile, m, n);
      const float* scales = p.x_scales + static_cast<int64_t>(m) * p.G * HOPPER_TOKENS;
      for (int g = 0; g < p.G; g += 2) {
        int scale_bytes = min(2, p.G - g) * Shape::SCALE_BYTES;
        unsigned ready = stages.full(at.slot);
        barrier_wait(stages.empty(at.slot), at.parity ^ 1);
        barrier_expect(ready, Shape::W_BYTES + Shape::X_BYTES + scale_bytes);
        load_box(shared + at.slot * Shape::W_BYTES, &w_map, g * GROUP, n * Shape::ROWS, ready);
        load_box(shared + Shape::X_AT + at.slot * Shape::X_BYTES, &x_map, g * GROUP, m * HOPPER_TOKENS, ready);
        load_bulk(shared + Shape::SCALES_AT + at.slot * 2 * Shape::SCALE_BYTES,
                  scales + static_cast<int64_t>(g) * HOPPER_TOKENS, scale_bytes, ready);
        at.next(stages.count);
      }
    }
    return;
  }

  registers_take<Shape::CONSUMER_REGISTERS>();
  int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  unsigned w_at = shared + warpgroup * (Shape::HALVES * 64 * 2 * GROUP), x_at = shared + Shape::X_AT;
  unsigned scales_at = shared + Shape::SCALES_AT + (lane & 3) * 16;
  unsigned my_out = shared + Shape::OUT_AT + warpgroup * HOPPER_TOKENS * OUT_PITCH;
  asm volatile("" : "+r"(scales_at), "+r"(stages.barriers));  // kept, not computed anew for each group
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
      barrier_wait(stages.full(at.slot), at.parity);
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
          unsigned w = w_at + at.slot * Shape::W_BYTES + h * (64 * 2 * GROUP), x = x_at + at.slot * Shape::X_BYTES;
          float a = now[h][0][i], b = now[h][1][i];
          auto meanwhile = [&] {
            if (i == 0 && h == 0) read_scales(g + 2);
          };
          add_products(y[h], w + i * GROUP, x + i * GROUP, scales_at + (2 * at.slot + i) * Shape::SCALE_BYTES, a, b,
                       meanwhile);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(stages.empty(at.slot));
      at.next(stages.count);
    }
#pragma unroll
    for (int h = 0; h < Shape::HALVES; ++h) finish(y[h], p, out, m, n + h * 64, my_out, warpgroup, thread);
  }
#endif
}

template <typename Shape, typename T>
void launch_int8_shape(const Problem<int8_t>& p, T* out, cudaStream_t stream) {
  HopperTiles tiles{(p.M + HOPPER_TOKENS - 1) / HOPPER_TOKENS, (p.N + Shape::ROWS - 1) / Shape::ROWS};
  int blocks = device_traits().multiprocessors, count = tiles.m_tiles * tiles.n_tiles;
  launch_with_shared(OP, hopper_int8<T, Shape>, dim3(static_cast<unsigned>(count < blocks ? count : blocks)),
                     Shape::THREADS, Shape::SHARED, stream, map_of_rows(p.values, p.N, p.K, p.K, Shape::ROWS),
                     map_of_rows(p.x, p.M, p.pitch, p.pitch, HOPPER_TOKENS), p, out, tiles);
}

// For results in 16 bits the shape whose tiles fill the multiprocessors' last round best.
template <typename T>
void launch_hopper_int8(const Problem<int8_t>& p, T* out, cudaStream_t stream) {
  int sms = device_traits().multiprocessors;
  auto share = [&](int rows) {
    int64_t tiles = static_cast<int64_t>((p.M + HOPPER_TOKENS - 1) / HOPPER_TOKENS) * ((p.N + rows - 1) / rows);
    return static_cast<double>(p.M) * p.N / static_cast<double>((tiles + sms - 1) / sms * sms * rows * HOPPER_TOKENS);
  };
  if constexpr (sizeof(T) == 2)
    if (share(256) >= share(128)) return launch_int8_shape<Int8Shape<2, 2, 3>>(p, out, stream);
  launch_int8_shape<Int8Shape<2, 1, 5>>(p, out, stream);
}

}  // namespace qwen_patch::cuda::int8
