// y = x W^T for many tokens, W in int8, on tensor cores of sm_80 and later; x in T, or int8 from quantize.cuh.
// 2 M N K flops, bound by the tensor cores, and for few tokens by the bytes: N * K of codes once for each tile of BM
// tokens.
// Mapping: a block computes BM tokens x 128 weight rows, 8 warps side by side, a group of 64 columns at a time, which
// cp.async brings STAGES - 1 groups ahead. A lane reads 16 codes of a row in one load: k is permuted within a group,
// for the tokens alike. Codes become T in registers. A group's sum is made by itself and then scaled, in fp32. Limits:
// none; rows whose K is no multiple of 16 travel in pieces of 8 bytes.
#pragma once

#include "codes.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int TILE_N = 128;
constexpr int TILE_STAGES = 3;  // as cards with 99 KB of shared memory can have
constexpr int TILE_THREADS = 256;

template <typename T, typename X, int BM>
struct Tiles {
  static constexpr bool QUANTIZED = sizeof(X) == 1;
  using Sum = std::conditional_t<QUANTIZED, int, float>;
  // Warps: 2 x 4 of 64 tokens x 32 rows, or for a small tile 1 x 8 of 32 x 16.
  static constexpr int WARPS_M = BM == 128 ? 2 : 1, WARPS_N = 8 / WARPS_M;
  static constexpr int MT = BM / WARPS_M / 16, NT = TILE_N / WARPS_N / 8;
  static constexpr int X_PITCH = QUANTIZED ? GROUP : 2 * GROUP + 16;  // reads of 8 lanes meet no bank twice
  static constexpr int STAGE = BM * X_PITCH + TILE_N * GROUP;
  static constexpr int OUT_PITCH = TILE_N + PACK<T>;
  static constexpr int OUT = BM * OUT_PITCH * static_cast<int>(sizeof(T));  // takes the stages' place
  static constexpr int SHARED = TILE_STAGES * STAGE > OUT ? TILE_STAGES * STAGE : OUT;
  static_assert(BM == 128 || BM == 32);

  const Problem<X>& p;
  unsigned shared;
  int m0, n0, thread;

  template <int BYTES>
  __device__ __forceinline__ void fetch_codes(unsigned to, int g) const {
    constexpr int PIECES = GROUP / BYTES;
#pragma unroll
    for (int i = thread; i < TILE_N * PIECES; i += TILE_THREADS) {
      int n = i / PIECES, k = g * GROUP + i % PIECES * BYTES;
      bool there = n0 + n < p.N && k < p.K;
      const int8_t* from = p.values + (there ? static_cast<int64_t>(n0 + n) * p.K + k : 0);
      copy_async<BYTES>(to + n * GROUP + i % PIECES * BYTES, from, there);
    }
  }
  __device__ __forceinline__ void fetch(int g) const {
    if (g < p.G) {
      unsigned to = shared + g % TILE_STAGES * STAGE;
      constexpr int PIECE = 16 / sizeof(X), PIECES = GROUP / PIECE;
#pragma unroll
      for (int i = thread; i < BM * PIECES; i += TILE_THREADS) {
        int m = i / PIECES, k = g * GROUP + i % PIECES * PIECE;
        bool there = m0 + m < p.M && k < p.pitch;
        const X* from = p.x + (there ? (m0 + m) * p.pitch + k : 0);
        copy_async<16>(to + m * X_PITCH + i % PIECES * 16, from, there);
      }
      if (p.K % 16 == 0)
        fetch_codes<16>(to + BM * X_PITCH, g);
      else
        fetch_codes<8>(to + BM * X_PITCH, g);
    }
    copies_commit();
  }
};

template <typename T, typename X, int BM>
__global__ void __launch_bounds__(TILE_THREADS, 1) tile_of_tokens(Problem<X> p, T* out) {
  using Tile = Tiles<T, X, BM>;
  constexpr int MT = Tile::MT, NT = Tile::NT;
  extern __shared__ __align__(16) char shared[];
  wait_for_previous();
  int tiles_m = (p.M + BM - 1) / BM;  // tokens go first: blocks that run together share weights
  Tile tile{p, shared_address(shared), static_cast<int>(blockIdx.x % tiles_m) * BM,
            static_cast<int>(blockIdx.x / tiles_m) * TILE_N, static_cast<int>(threadIdx.x)};
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g8 = lane >> 2, t4 = lane & 3;
  int m_warp = warp % Tile::WARPS_M * (MT * 16), n_warp = warp / Tile::WARPS_M * (NT * 8);
  int m_lane = tile.m0 + m_warp + g8, n_lane = tile.n0 + n_warp + 2 * t4;  // of the lane's first result
  float y[MT][NT][4] = {};
#pragma unroll
  for (int g = 0; g < TILE_STAGES - 1; ++g) tile.fetch(g);
#pragma unroll 1
  for (int g = 0; g < p.G; ++g) {
    float row_scales[NT][2], token_scales[MT][2];
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        row_scales[j][c] = p.scales[static_cast<int64_t>(min(n_lane + 8 * j + c, p.N - 1)) * p.G + g];
    if constexpr (Tile::QUANTIZED) {
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          token_scales[i][h] = p.x_scales[static_cast<int64_t>(g) * p.M + min(m_lane + 16 * i + 8 * h, p.M - 1)];
    }
    copies_wait<TILE_STAGES - 2>();
    __syncthreads();
    tile.fetch(g + TILE_STAGES - 1);
    unsigned x = tile.shared + g % TILE_STAGES * Tile::STAGE;
    unsigned w = x + BM * Tile::X_PITCH + (n_warp + g8) * GROUP + t4 * 16;
    x += (m_warp + g8) * Tile::X_PITCH + t4 * (16 * static_cast<int>(sizeof(X)));
    uint4 codes[NT];
#pragma unroll
    for (int j = 0; j < NT; ++j) codes[j] = load128(w + j * (8 * GROUP));
    typename Tile::Sum sums[MT][NT][4] = {};
    if constexpr (Tile::QUANTIZED) {
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        uint4 a = load128(x + i * (16 * Tile::X_PITCH)), b = load128(x + i * (16 * Tile::X_PITCH) + 8 * Tile::X_PITCH);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          mma_int8(sums[i][j], a.x, b.x, a.y, b.y, codes[j].x, codes[j].y);
          mma_int8(sums[i][j], a.z, b.z, a.w, b.w, codes[j].z, codes[j].w);
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned b[NT][4];
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          unsigned first = half ? codes[j].z : codes[j].x, second = half ? codes[j].w : codes[j].y;
          b[j][0] = low_codes<T>(first), b[j][1] = high_codes<T>(first);
          b[j][2] = low_codes<T>(second), b[j][3] = high_codes<T>(second);
        }
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          unsigned at = x + i * (16 * Tile::X_PITCH) + half * 16;
          uint4 u = load128(at), v = load128(at + 8 * Tile::X_PITCH);
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            mma<T>(sums[i][j], u.x, v.x, u.y, v.y, b[j][0], b[j][1]);
            mma<T>(sums[i][j], u.z, v.z, u.w, v.w, b[j][2], b[j][3]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float scale = row_scales[j][c & 1];
          if constexpr (Tile::QUANTIZED) scale *= token_scales[i][c >> 1];
          y[i][j][c] += static_cast<float>(sums[i][j][c]) * scale;
        }
  }
  copies_wait<0>();
  __syncthreads();
  T* results = reinterpret_cast<T*>(shared);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    int n = n_warp + 8 * j + 2 * t4;
    float bias[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) bias[c] = bias_at<T>(p, min(tile.n0 + n + c, p.N - 1));
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        T* at = results + (m_warp + 16 * i + 8 * h + g8) * Tile::OUT_PITCH + n;
        Pack<T, 2> pair = {from_float<T>(y[i][j][2 * h] + bias[0]), from_float<T>(y[i][j][2 * h + 1] + bias[1])};
        *reinterpret_cast<Pack<T, 2>*>(at) = pair;
      }
  }
  __syncthreads();
  using Out = Pack<T, PACK<T>>;
  constexpr int PACKS = TILE_N / PACK<T>;
#pragma unroll 1
  for (int i = threadIdx.x; i < BM * PACKS; i += TILE_THREADS) {
    int m = tile.m0 + i / PACKS, n = tile.n0 + i % PACKS * PACK<T>;
    if (m >= p.M || n >= p.N) continue;
    T* to = out + static_cast<int64_t>(m) * p.N + n;
    Out v = *reinterpret_cast<const Out*>(results + i / PACKS * Tile::OUT_PITCH + i % PACKS * PACK<T>);
    if (p.N % PACK<T> == 0) {
      *reinterpret_cast<Out*>(to) = v;
    } else {
#pragma unroll
      for (int e = 0; e < PACK<T>; ++e)
        if (n + e < p.N) to[e] = v.v[e];
    }
  }
}

constexpr int SMALL_TILE_UP_TO = 64;  // tokens

template <typename T, typename X>
void launch_tiles(const Problem<X>& p, T* out, cudaStream_t stream) {
  auto run = [&](auto bm) {
    constexpr int BM = decltype(bm)::value;
    int64_t blocks = static_cast<int64_t>((p.M + BM - 1) / BM) * ((p.N + TILE_N - 1) / TILE_N);
    launch_with_shared(OP, tile_of_tokens<T, X, BM>, dim3(static_cast<unsigned>(blocks)), TILE_THREADS,
                       Tiles<T, X, BM>::SHARED, stream, p, out);
  };
  if (p.M <= SMALL_TILE_UP_TO)
    run(std::integral_constant<int, 32>{});
  else
    run(std::integral_constant<int, 128>{});
}

}  // namespace qwen_patch::cuda::int8
