// y = x W^T for many tokens on sm_90, both int8 with one scale a token and one a weight row: the sum over K is exact.
// 2 M N K operations, bound by the tensor cores, as no scale inside the loop over K stops them: 1,415 to 1,554 T/s on
// an H200 where tiles fill it, 1.9 times cuBLAS in bf16. Tiles shared by the blocks of a cluster, which take fewer
// bytes from L2, were never faster.
// Mapping: a block walks over tiles of ROWS weight rows x TOKENS tokens. One thread brings stages of 128 bytes along K
// by TMA, as far ahead as shared memory has room, across tiles. Two warpgroups take HALVES * 64 rows each and leave one
// stage's products under way while they start the next one's. The weights are the 64-row side: a thread then has two
// rows' scales for each half. A tile's last stage brings nothing: it is the room in which the results are turned round,
// while the other stages fill for the next tile. Limits: K and pitch multiples of 16, |sums| < 2^31 (K < 131,072).
#pragma once

#include <algorithm>

#include "hopper_memory.cuh"

namespace qwen_patch::cuda::int8 {

// PERCENT: what a tile was measured to take for its size, against the largest; small ones spend more on their ends.
template <int HALVES_, int TOKENS_, int PERCENT_>
struct RowsShape {
  static constexpr int PERCENT = PERCENT_;
  static constexpr int HALVES = HALVES_, TOKENS = TOKENS_, WARPGROUPS = 2, DEPTH = 128;
  static constexpr int ROWS = WARPGROUPS * HALVES * 64, THREADS = 128 * (WARPGROUPS + 1);
  static constexpr int W_BYTES = ROWS * DEPTH, STAGE_BYTES = W_BYTES + TOKENS * DEPTH;
  // Shared memory, from an address on 1,024 bytes: the stages, each warpgroup's copy of the tokens' scales, barriers.
  static constexpr int BESIDES = 1024 + WARPGROUPS * TOKENS * 4;
  static constexpr int STAGES = ((227 << 10) - BESIDES) / (STAGE_BYTES + 16);
  static constexpr int SCALES_AT = STAGES * STAGE_BYTES, BARRIERS_AT = SCALES_AT + WARPGROUPS * TOKENS * 4;
  static constexpr int SHARED = BESIDES + STAGES * (STAGE_BYTES + 16);
  // Of one warpgroup's results, 64 tokens x 64 rows in 16 bits; it has two such places, to fill one and read another.
  static constexpr int OUT_TOKENS = 64, OUT_BYTES = OUT_TOKENS * 128;
  static constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
  static_assert(WARPGROUPS * 2 * OUT_BYTES <= STAGE_BYTES && TOKENS % OUT_TOKENS == 0);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A half's sums times the scales, plus the bias, rounded and written. scale, bias: of this thread's two rows; `room`
// holds results, and `of_tokens` the tokens' scales, in shared memory. `turn`: of the two places for results.
template <typename Shape, typename T>
__device__ __forceinline__ void finish_rows(const int (&sums)[Shape::TOKENS / 2], const float (&scale)[2],
                                            const float (&bias)[2], const Problem<int8_t>& p, T* out, int m, int n,
                                            unsigned room, unsigned of_tokens, int warpgroup, int thread, int& turn) {
  int warp = thread >> 5, lane = thread & 31;
  of_tokens += (lane & 3) * 8;
  if constexpr (sizeof(T) == 4) {
    int row = n + warp * 16 + (lane >> 2), left = p.M - m - (lane & 3) * 2;
    T* to_row = out + static_cast<int64_t>(m + (lane & 3) * 2) * p.N + row;
#pragma unroll
    for (int t = 0; t < Shape::TOKENS; t += 8) {
      uint2 s = load64(of_tokens + t * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = i >> 1, token = i & 1;
        float sum = static_cast<float>(sums[t / 2 + i]);
        if (t + token < left && row + 8 * r < p.N)
          to_row[token * static_cast<int64_t>(p.N) + 8 * r] =
              fmaf(sum * scale[r], __uint_as_float(token == 0 ? s.x : s.y), bias[r]);
      }
      to_row += static_cast<int64_t>(8) * p.N;
      asm volatile("" : "+l"(to_row));  // one pointer that moves on, not one for each token
    }
  } else {
    // A token's 64 results are 8 pieces of 16 bytes, in another order for each token of 8: no two in one bank.
    unsigned to = ((lane >> 4) * 8 + (lane & 7)) * 128 + ((warp * 2 + (lane >> 3 & 1)) ^ (lane & 7)) * 16;
    unsigned from = thread / 8 * 128 + ((thread & 7) ^ (thread / 8 & 7)) * 16;
    int first = n + (thread & 7) * 8, left = first < p.N ? p.M - m - thread / 8 : 0;  // of this thread's tokens
    T* to_row = out + static_cast<int64_t>(m + thread / 8) * p.N + first;
    bool whole = p.N % 8 == 0;
#pragma unroll
    for (int t = 0; t < Shape::TOKENS; t += Shape::OUT_TOKENS, turn ^= 1) {
      unsigned place = room + turn * Shape::OUT_BYTES;
#pragma unroll
      for (int j = 0; j < Shape::OUT_TOKENS; j += 16) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // 8 tokens each
          uint2 s = load64(of_tokens + (t + j + 8 * i) * 4);
          float sx = __uint_as_float(s.x), sy = __uint_as_float(s.y);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int* v = sums + (t + j + 8 * i) / 2 + 2 * r;
            words[2 * i + r] = pack2<T>(fmaf(static_cast<float>(v[0]) * scale[r], sx, bias[r]),
                                        fmaf(static_cast<float>(v[1]) * scale[r], sy, bias[r]));
          }
        }
        store_transposed(place + to + j * 128, words[0], words[1], words[2], words[3]);
      }
      named_sync(1 + warpgroup, 128);  // who fills this place again has been past the next one
#pragma unroll
      for (int i = 0; i < Shape::OUT_TOKENS; i += 16) {
        if (t + i >= left) break;
        store_results(to_row, load128(place + from + i * 128), p.N - first, whole);
        to_row += static_cast<int64_t>(16) * p.N;
      }
    }
  }
}

// One thread's work: everything that this block reads.
template <typename Shape>
__device__ __forceinline__ void load_tiles(const CUtensorMap& w_map, const CUtensorMap& x_map, int K,
                                           const HopperTiles& tiles, const Slots& stages, unsigned shared) {
  Place at;
  for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    int m, n;
    tiles.at(tile, m, n);
    for (int k = 0; k < K; k += Shape::DEPTH, at.next(stages.count)) {
      unsigned full = stages.full(at.slot), w = shared + at.slot * Shape::STAGE_BYTES;
      barrier_wait(stages.empty(at.slot), at.parity ^ 1);
      barrier_expect(full, Shape::STAGE_BYTES);
      load_box(w, &w_map, k, n * Shape::ROWS, full);
      load_box(w + Shape::W_BYTES, &x_map, k, m * Shape::TOKENS, full);
    }
    barrier_wait(stages.empty(at.slot), at.parity ^ 1);
    barrier_arrive(stages.full(at.slot));
    at.next(stages.count);
  }
}

// A warpgroup's work: its rows of each tile.
template <typename Shape, typename T>
__device__ __forceinline__ void multiply_tiles(const Problem<int8_t>& p, T* out, const HopperTiles& tiles,
                                               const Slots& stages, unsigned shared, int warpgroup) {
  constexpr int HALVES = Shape::HALVES, TOKENS = Shape::TOKENS;
  int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  unsigned of_tokens = shared + Shape::SCALES_AT + warpgroup * TOKENS * 4;
  Place at;
  for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    int m, n;
    tiles.at(tile, m, n);
    m *= TOKENS;
    n = n * Shape::ROWS + warpgroup * HALVES * 64;
    named_sync(1 + warpgroup, 128);  // the scales before these have been read
    for (int t = thread; t < TOKENS; t += 128) copy_async<4>(of_tokens + t * 4, p.x_scales + m + t, m + t < p.M);
    copies_commit();
    int sums[HALVES][TOKENS / 2], before = 0;
#pragma unroll 1
    for (int k = 0; k < p.K; k += Shape::DEPTH) {
      unsigned stage = shared + at.slot * Shape::STAGE_BYTES;
      uint64_t w_rows = rows_of_128(stage + warpgroup * HALVES * 64 * Shape::DEPTH);
      uint64_t x_rows = rows_of_128(stage + Shape::W_BYTES);
      barrier_wait(stages.full(at.slot), at.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < Shape::DEPTH; i += 32)
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
          multiply_64(sums[h], w_rows + ((h * 64 * Shape::DEPTH + i) >> 4), x_rows + (i >> 4), k + i > 0);
      products_commit();
      products_wait<1>();
      if (k > 0 && lane == 0) barrier_arrive(stages.empty(before));
      before = at.slot;
      at.next(stages.count);
    }
    // While the last products run.
    float scale[HALVES][2], bias[HALVES][2];
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int row = n + h * 64 + warp * 16 + (lane >> 2) + 8 * r;
        scale[h][r] = row < p.N ? p.scales[row] : 0.f;
        bias[h][r] = row < p.N ? bias_at<T>(p, row) : 0.f;
      }
    products_wait();
    if (lane == 0) barrier_arrive(stages.empty(before));
    copies_wait<0>();
    barrier_wait(stages.full(at.slot), at.parity);
    named_sync(1 + warpgroup, 128);  // all the scales are there
    unsigned room = shared + at.slot * Shape::STAGE_BYTES + warpgroup * 2 * Shape::OUT_BYTES;
    int turn = 0;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      products_are_in(sums[h]);
      finish_rows<Shape>(sums[h], scale[h], bias[h], p, out, m, n + h * 64, room, of_tokens, warpgroup, thread, turn);
    }
    accesses_before_copies();
    __syncwarp();
    if (lane == 0) barrier_arrive(stages.empty(at.slot));
    at.next(stages.count);
  }
}
#endif

// p: scales [N], x_scales [M] in the tokens' order; G is not read.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    hopper_rows(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, Problem<int8_t> p,
                T* out, HopperTiles tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  unsigned shared = (shared_address(unaligned) + 1023) & ~1023u;
  Slots stages{shared + Shape::BARRIERS_AT, Shape::STAGES};
  // By a shuffle, so that the compiler knows it to be one number a warp, and keeps what follows from it in uniform
  // registers, where the products want their addresses.
  int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), warpgroup = warp / 4;
  begin(stages, 4 * Shape::WARPGROUPS, w_map, x_map);
  if (warpgroup == Shape::WARPGROUPS) {
    registers_give<Shape::PRODUCER_REGISTERS>();
    if (warp == 4 * Shape::WARPGROUPS && elected()) load_tiles<Shape>(w_map, x_map, p.K, tiles, stages, shared);
  } else {
    registers_take<Shape::CONSUMER_REGISTERS>();
    multiply_tiles<Shape>(p, out, tiles, stages, shared, warpgroup);
  }
#endif
}

template <typename Shape>
HopperTiles rows_tiles(int M, int N) {
  return {(M + Shape::TOKENS - 1) / Shape::TOKENS, (N + Shape::ROWS - 1) / Shape::ROWS, 2048 / Shape::TOKENS};
}

// For the results that each multiprocessor makes, rounds begun counted whole.
template <typename Shape>
int64_t rows_work(int M, int N) {
  int blocks = device_traits().multiprocessors;
  return int64_t{Shape::ROWS} * Shape::TOKENS * Shape::PERCENT *
         ((rows_tiles<Shape>(M, N).count() + blocks - 1) / blocks);
}

template <typename Shape, typename T>
void launch_rows(const Problem<int8_t>& p, T* out, cudaStream_t stream) {
  HopperTiles tiles = rows_tiles<Shape>(p.M, p.N);
  int blocks = std::min(device_traits().multiprocessors, tiles.count());
  launch_with_shared(ROTATED_OP, hopper_rows<T, Shape>, dim3(static_cast<unsigned>(blocks)), Shape::THREADS,
                     Shape::SHARED, stream, map_of_rows(ROTATED_OP, p.values, p.N, p.K, p.K, Shape::ROWS),
                     map_of_rows(ROTATED_OP, p.x, p.M, p.K, p.pitch, Shape::TOKENS), p, out, tiles);
}

// In the shape with the least work; of equals the first, which measured faster.
template <typename T, typename... Shapes>
void launch_least_work(const Problem<int8_t>& p, T* out, cudaStream_t stream) {
  struct Choice {
    int64_t work;
    void (*launch)(const Problem<int8_t>&, T*, cudaStream_t);
  };
  Choice choices[] = {{rows_work<Shapes>(p.M, p.N), launch_rows<Shapes, T>}...};
  auto less = [](const Choice& a, const Choice& b) { return a.work < b.work; };
  std::min_element(choices, choices + sizeof...(Shapes), less)->launch(p, out, stream);
}
template <typename T>
void launch_hopper_rows(const Problem<int8_t>& p, T* out, cudaStream_t stream) {
  launch_least_work<T, RowsShape<2, 192, 100>, RowsShape<1, 256, 100>, RowsShape<1, 192, 105>, RowsShape<1, 128, 112>>(
      p, out, stream);
}

}  // namespace qwen_patch::cuda::int8
