// y = x W^T for 1 to 16 tokens, W in int8: on tensor cores, the weights as the 16-row side of mma, the tokens as its 8
// columns, so 1 to 8 tokens cost alike.
// Bytes: N * K of codes and N * K / 16 of scales, once; the tokens, from L2, once a block. Bound by memory: what counts
// is how many loads are under way, from the first moment on.
// Mapping: a block walks over tiles of ROWS weight rows. A warp has its own columns: units of 256, every WARPS-th one.
// It asks for DEPTH units ahead, across tiles, and before the kernel ahead in the stream is done: that one does not
// write weights. Codes go from memory to registers, 16 neighbours of a row to a lane, and become T there; k is permuted
// within a group so that a lane's codes are its share of the fragment. The tokens lie in shared memory in that order.
// A group's sum is made by itself and then scaled, in fp32. The warps' sums meet in shared memory, one barrier a tile.
// AS: how the tokens come: in 16 bits, or as int8, with a group's sum one of integers; each block makes them so for
// itself. In int8 they are codes, which rounds them, or three digits each, which does not (digits.cuh).
// Limits: K a multiple of 16; as many tokens as fit into shared memory.
#pragma once

#include <algorithm>

#include "digits.cuh"
#include "quantize.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int FEW_RESIDENT = 16;  // warps of a multiprocessor
constexpr int UNIT = 4;           // groups

// Of a block: its warps and tokens, at most, and how many units, of 4 KB, each warp has under way.
template <int WARPS_, int DEPTH_, int TOKENS_>
struct FewShape {
  static constexpr int WARPS = WARPS_, DEPTH = DEPTH_, TOKENS = TOKENS_, TILES = (TOKENS + 7) / 8;
  static constexpr int PITCH = WARPS + 1;  // of the warps' sums of each output, padded against bank conflicts
  static constexpr int SUMS_BYTES = static_cast<int>(sizeof(float)) * 2 * TILES * 8 * 16 * PITCH;
};
using FewWide = FewShape<16, 2, 16>;
using FewNarrow = FewShape<8, 1, 3>;
constexpr int FEW_TOKENS = FewWide::TOKENS;
constexpr int FEW_NARROW_K = 8192;  // the largest K where narrow blocks are faster

enum class As { IS, CODES, DIGITS };
// Rows of shared memory, and columns of a product, that a token takes.
template <As AS>
constexpr int FEW_ROWS = AS == As::DIGITS ? DIGITS : 1;

// A row in shared memory, in bytes: rows that a warp reads at once start in different banks.
template <As AS>
__host__ __device__ constexpr int few_pitch(int G) {
  return AS == As::IS ? G * GROUP * 2 + 16 : (G | 1) * GROUP;
}
template <As AS>
__host__ __device__ constexpr int few_shared(int tokens, int G) {
  return tokens * FEW_ROWS<AS> * (few_pitch<AS>(G) + (AS == As::IS ? 0 : 4 * G));
}

template <int ROWS>
struct Unit {
  uint4 codes[UNIT][ROWS / 8];
  float scales[ROWS / 8];  // of one of the four groups: each lane of four has another
};

template <typename T, As AS, int TILES, int ROWS, typename Shape>
struct Few {
  static constexpr int HALVES = ROWS / 8;
  using Sum = std::conditional_t<AS == As::IS, float, int>;
  const Problem<T>& p;
  char* tokens;  // shared: rows of few_pitch bytes, then, of int8, their scales [rows, G]
  int rows;      // of all tokens
  int warp, lane, warps;

  __device__ __forceinline__ int row(int tile, int half) const {
    return min(tile * ROWS + half * 8 + (lane >> 2), p.N - 1);
  }
  // What lies beyond K is not there, and any codes do: the tokens are 0 there.
  __device__ __forceinline__ void load_codes(Unit<ROWS>& unit, int tile, int u) const {
    int k = u * (UNIT * GROUP) + (lane & 3) * 16;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int8_t* from = p.values + static_cast<int64_t>(row(tile, h)) * p.K;
#pragma unroll
      for (int j = 0; j < UNIT; ++j) unit.codes[j][h] = stream128(from + min(k + j * GROUP, p.K - 16));
    }
  }
  __device__ __forceinline__ void load_scales(Unit<ROWS>& unit, int tile, int u) const {
    int g = min(u * UNIT + (lane & 3), p.G - 1);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) unit.scales[h] = p.scales[static_cast<int64_t>(row(tile, h)) * p.G + g];
  }

  // The tokens in shared memory, in the order in which fragments are read.
  __device__ __forceinline__ void take_tokens() const {
    int pitch = few_pitch<AS>(p.G), packs = p.G * (GROUP / 8), thread = threadIdx.x, threads = 32 * warps;
    unsigned to = shared_address(tokens);
    if constexpr (AS != As::IS) {
      float* scales = reinterpret_cast<float*>(tokens + rows * pitch);
      for (int base = 0; base < p.M * packs; base += threads) {  // whole warps, for the shuffles
        int i = base + thread, m = i / packs, k = i % packs * 8;
        bool there = m < p.M;
        const T* x = p.x + static_cast<int64_t>(m) * p.K + k;
        uint2 values[FEW_ROWS<AS>];
        float scale, next = 1.f;  // the next row's, of this one's
        if constexpr (AS == As::CODES) {
          scale = quantize_8(x, there && k < p.K, values[0]);
        } else {
          float v[8];
          DigitUnit of(read_8(x, there && k < p.K, v));
          unsigned low[DIGITS], high[DIGITS];
          digits_of(v, of.inverse, low);
          digits_of(v + 4, of.inverse, high);
#pragma unroll
          for (int d = 0; d < DIGITS; ++d) values[d] = make_uint2(low[d], high[d]);
          scale = of.unit * 65536.f, next = 1.f / 256;
        }
        if (!there) continue;
#pragma unroll
        for (int d = 0; d < FEW_ROWS<AS>; ++d, scale *= next) {
          int at = m * FEW_ROWS<AS> + d;
          store64(to + at * pitch + k, values[d]);
          if (k % GROUP == 0) scales[at * p.G + k / GROUP] = scale;
        }
      }
    } else {
      for (int i = thread; i < p.M * packs; i += threads) {
        int m = i / packs, k = i % packs * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (k < p.K) v = *reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(m) * p.K + k);
        store128(to + m * pitch + k * 2, make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                                                    __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632)));
      }
    }
  }

  // The lane's row of a tile of 8; of one that is not there, any: columns of a product do not mix.
  __device__ __forceinline__ unsigned token(int tile) const {
    int m = tile * 8 + (lane >> 2);
    return shared_address(tokens) + (m < rows ? m : 0) * few_pitch<AS>(p.G) + (lane & 3) * (AS == As::IS ? 32 : 16);
  }

  static __device__ __forceinline__ float value(float sum) { return sum; }
  static __device__ __forceinline__ float value(int sum) { return __int_as_float(sum) - MAGIC; }

  // Adds the products of group g, the j-th of its unit, to y.
  __device__ __forceinline__ void multiply(float (&y)[TILES][4], const Unit<ROWS>& unit, int j, int g,
                                           const unsigned (&x)[TILES]) const {
    const uint4 &A = unit.codes[j][0], none = make_uint4(0, 0, 0, 0),
                &B = HALVES == 2 ? unit.codes[j][HALVES - 1] : none;
    Sum sums[TILES][4];
    if constexpr (AS != As::IS) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        uint4 v = load128(x[i] + g * GROUP);
        mma_int8(sums[i], A.x, B.x, A.y, B.y, v.x, v.y, MAGIC_BITS);
        mma_int8(sums[i], A.z, B.z, A.w, B.w, v.z, v.w);
      }
    } else {
      uint4 v[TILES][2];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][c] = 0.f;
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        v[i][0] = load128(x[i] + g * (2 * GROUP));
        v[i][1] = load128(x[i] + g * (2 * GROUP) + 16);
      }
      auto step = [&](unsigned a, unsigned b, int at, bool upper) {
        unsigned a0 = even_codes<T>(a), a2 = odd_codes<T>(a), a1 = 0, a3 = 0;
        if constexpr (HALVES == 2) a1 = even_codes<T>(b), a3 = odd_codes<T>(b);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
          mma<T>(sums[i], a0, a1, a2, a3, upper ? v[i][at].z : v[i][at].x, upper ? v[i][at].w : v[i][at].y);
      };
      step(A.x, B.x, 0, false);
      step(A.y, B.y, 0, true);
      step(A.z, B.z, 1, false);
      step(A.w, B.w, 1, true);
    }
    float scales[2];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) scales[h] = __shfl_sync(~0u, unit.scales[h], (lane & ~3) | j);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float of_token = 1.f;
        if constexpr (AS != As::IS) {
          int m = min(i * 8 + (lane & 3) * 2 + c, rows - 1);
          of_token = reinterpret_cast<const float*>(tokens + rows * few_pitch<AS>(p.G))[m * p.G + g];
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h) y[i][2 * h + c] += value(sums[i][2 * h + c]) * (scales[h] * of_token);
      }
    }
  }

  // A tile's results: the warps' sums meet in `sums`, and y starts anew. All threads of the block come here.
  __device__ __forceinline__ void finish(float (&y)[TILES][4], float* sums, T* out, int tile) const {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int c = 0; c < 2 * HALVES; ++c) {
        int m = t * 8 + (lane & 3) * 2 + (c & 1), n = (lane >> 2) + (c >> 1) * 8;
        if (m < rows) sums[(m * ROWS + n) * Shape::PITCH + warp] = y[t][c];
        y[t][c] = 0.f;
      }
    __syncthreads();
    for (int i = threadIdx.x; i < p.M * ROWS; i += 32 * warps) {
      int m = i / ROWS, n = tile * ROWS + i % ROWS;
      if (n >= p.N) continue;
      float total = 0.f;
#pragma unroll
      for (int d = 0; d < FEW_ROWS<AS>; ++d)
        for (int w = 0; w < warps; ++w) total += sums[((m * FEW_ROWS<AS> + d) * ROWS + i % ROWS) * Shape::PITCH + w];
      out[static_cast<int64_t>(m) * p.N + n] = from_float<T>(total + bias_at<T>(p, n));
    }
  }
};

template <typename T, As AS, int TILES, int ROWS, typename Shape>
__global__ void __launch_bounds__(32 * Shape::WARPS, FEW_RESIDENT / Shape::WARPS) few_tokens(Problem<T> p, T* out) {
  extern __shared__ __align__(16) char shared[];
  __shared__ float sums[2][TILES * 8 * ROWS * Shape::PITCH];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  Few<T, AS, TILES, ROWS, Shape> few{p, shared, p.M * FEW_ROWS<AS>, warp, lane, warps};
  int tiles = (p.N + ROWS - 1) / ROWS, units = (p.G + UNIT - 1) / UNIT, steps = (units + warps - 1) / warps;
  int total = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x * steps;  // units of each warp, some maybe beyond K
  Unit<ROWS> unit[Shape::DEPTH];
  auto each_ahead = [&](int& tile, int& step, auto&& load) {
    int u = step * warps + warp;
    if (tile < tiles && u < units) load(tile, u);
    if (++step == steps) step = 0, tile += gridDim.x;
  };
  int ahead_tile = blockIdx.x, ahead_step = 0;
#pragma unroll
  for (int i = 0; i < Shape::DEPTH; ++i)
    each_ahead(ahead_tile, ahead_step, [&](int tile, int u) { few.load_codes(unit[i], tile, u); });
  wait_for_previous();
  ahead_tile = blockIdx.x, ahead_step = 0;
#pragma unroll
  for (int i = 0; i < Shape::DEPTH; ++i)
    each_ahead(ahead_tile, ahead_step, [&](int tile, int u) { few.load_scales(unit[i], tile, u); });
  few.take_tokens();
  __syncthreads();
  unsigned x[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) x[i] = few.token(i);

  float y[TILES][4] = {};
  int tile = blockIdx.x, step = 0, flip = 0;
#pragma unroll 1
  for (int done = 0; done < total; done += Shape::DEPTH) {
#pragma unroll
    for (int i = 0; i < Shape::DEPTH; ++i) {
      if (done + i >= total) break;
      int g = (step * warps + warp) * UNIT;
#pragma unroll
      for (int j = 0; j < UNIT; ++j)
        if (g + j < p.G) few.multiply(y, unit[i], j, g + j, x);
      each_ahead(ahead_tile, ahead_step, [&](int t, int u) {
        few.load_codes(unit[i], t, u);
        few.load_scales(unit[i], t, u);
      });
      if (++step == steps) {
        few.finish(y, sums[flip], out, tile);
        step = 0;
        flip ^= 1;
        tile += gridDim.x;
      }
    }
  }
}

// How many tokens a launch can take: what fits beside the sums into `shared` bytes.
template <As AS>
int few_tokens_that_fit(int G, int shared) {
  return std::min(FEW_TOKENS, (shared - FewWide::SUMS_BYTES) / few_shared<AS>(1, G));
}

// Warps: as many as it takes to have no more steps than all of the shape's would need. A multiprocessor has room for
// FEW_RESIDENT, in one block or in several. Tiles of 8 rows where those of 16 would give some multiprocessor more rows
// to do.
template <typename Shape, As AS, typename T>
void launch_few_shape(const Problem<T>& p, T* out, int max_shared, cudaStream_t stream) {
  int units = (p.G + UNIT - 1) / UNIT, steps = (units + Shape::WARPS - 1) / Shape::WARPS;
  int warps = (units + steps - 1) / steps;
  int64_t sms = device_traits().multiprocessors;
  auto tiles = [&](int rows) { return (p.N + int64_t{rows} - 1) / rows; };
  auto most_rows = [&](int rows) { return (tiles(rows) + sms - 1) / sms * rows; };
  int rows = p.M * FEW_ROWS<AS>;
  bool halves = rows <= 8 && most_rows(8) < most_rows(16);
  int shared = few_shared<AS>(p.M, p.G);
  int64_t blocks = sms * std::max(1, std::min(FEW_RESIDENT / warps, max_shared / (shared + Shape::SUMS_BYTES)));
  auto kernel = few_tokens<T, AS, 1, 16, Shape>;
  if constexpr (AS != As::DIGITS && Shape::TILES > 1)
    if (rows > 8) kernel = few_tokens<T, AS, 2, 16, Shape>;
  if (halves) kernel = few_tokens<T, AS, 1, 8, Shape>;
  launch_with_shared(OP, kernel, dim3(static_cast<unsigned>(std::min(blocks, tiles(halves ? 8 : 16)))), 32 * warps,
                     shared, stream, p, out);
}

// Narrow blocks come in pairs, so that one's loads cover the other's barriers: 6.81 us instead of 7.49 at M = 1 and
// N = K = 4096 on an H200, but 17.14 instead of 16.74 at K = 12288, and slower with codes at most sizes.
template <typename T, As AS>
void launch_few(const Problem<T>& p, T* out, int max_shared, cudaStream_t stream) {
  if constexpr (AS != As::CODES)
    if (p.M <= FewNarrow::TOKENS && p.K <= FEW_NARROW_K)
      return launch_few_shape<FewNarrow, AS>(p, out, max_shared, stream);
  launch_few_shape<FewWide, AS>(p, out, max_shared, stream);
}

}  // namespace qwen_patch::cuda::int8
