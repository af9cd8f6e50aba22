// The linears of a decode step, on tensor cores: y[n, b] = W[n, k] x[b, k], the weights as the 16-row side of
// mma.m16n8k16, the batch as its 8 columns, fp32 sums. 1 to 8 rows of a batch cost alike.
//
// All warps work on one tile of 16 rows, each on its 128 of every 1,024 columns. So a warp needs only its own columns
// of x: it waits for those, and no barrier lies between their arrival and the product. Partial sums meet in shared
// memory, one barrier a group of tiles. Within 32 columns k is permuted, so that a lane's operands are 16 bytes in a
// row.
//
// What a lane reads for rows of the batch or of the weights that are not there is whatever lies in shared memory: rows
// and columns of a product do not mix, and nobody reads those results.
#pragma once

#include "../silu_mul_kernel.cuh"
#include "exchange.cuh"
#include "program.cuh"

namespace qwen_patch::cuda::decode {

constexpr int MAX_HIDDEN = 8192;
constexpr int MAX_CHUNKS = MAX_HIDDEN / CHUNK;  // of an input that is normed
constexpr int MAX_TILES = 4;   // of a stage whose input is too long to be kept (o and down): 64 rows a block
constexpr int SUM_PITCH = 12;  // floats: the sums of 8 warps for one output, padded against bank conflicts
constexpr int ASKED = 8;       // reads of exchanged words that a lane has under way

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMER_THREADS) : "memory"); }

template <typename T>
__device__ __forceinline__ void mma(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <typename T>
__device__ __forceinline__ unsigned pack2(float lo, float hi) {
  return bits_of(from_float<T>(lo)) | (bits_of(from_float<T>(hi)) << 16);
}
template <typename T>
__device__ __forceinline__ float2 unpack2(unsigned v) {
  return make_float2(to_float(value_of<T>(v & 0xffff)), to_float(value_of<T>(v >> 16)));
}
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// Asks for those of N words whose bit is set in `pending`, again and again for those that have not arrived. The words
// must start as zeros, though nobody reads those: a register that is set on a condition only is kept from one layer to
// the next, and some hundred of them were spilled.
template <int N, typename Ask, typename Arrived>
__device__ __forceinline__ void poll(unsigned pending, Ask&& ask, Arrived&& has_arrived) {
#pragma unroll 1
  while (pending) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (pending >> i & 1) ask(i);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (has_arrived(i)) pending &= ~(1u << i);
  }
}

// Where a stage's input comes from. fetch() waits for ASKED times 4 values: number i is of row i % ROOM, from column
// k + i / ROOM * CHUNK on. Only those whose bit is set in `wanted` are there, and asked for.
struct FromWords {
  const unsigned* words;
  int K;
  unsigned epoch;
  template <int ROOM>
  __device__ __forceinline__ void fetch(uint2 (&x)[ASKED], int k, unsigned wanted) const {
    uint4 v[ASKED] = {};
    poll<ASKED>(
        wanted, [&](int i) { v[i] = look4(words + (i % ROOM) * K + (k + i / ROOM * CHUNK)); },
        [&](int i) { return arrived(v[i], epoch); });
#pragma unroll
    for (int i = 0; i < ASKED; ++i) x[i] = values(v[i]);
  }
};
template <typename T>
struct FromEmbedding {
  const T* table;
  const int64_t* tokens;
  int H;
  template <int ROOM>
  __device__ __forceinline__ void fetch(uint2 (&x)[ASKED], int k, unsigned wanted) const {
#pragma unroll
    for (int i = 0; i < ASKED; ++i) {
      x[i] = make_uint2(0, 0);
      if (wanted >> i & 1)
        x[i] = *reinterpret_cast<const uint2*>(table + tokens[i % ROOM] * H + (k + i / ROOM * CHUNK));
    }
  }
};
// The parts of attention over `splits` pieces of the context (attention.cuh): combined by who reads them.
template <typename T, int D>
struct FromParts {
  const uint2 *parts, *weights;  // [split, B, K] in words of two values; [split, B, heads]
  int B, K, splits;              // K = heads * D
  unsigned epoch;

  // One part is all there is.
  template <int ROOM>
  __device__ __forceinline__ void fetch(uint2 (&x)[ASKED], int k, unsigned wanted) const {
    uint4 v[ASKED] = {};
    poll<ASKED>(
        wanted, [&](int i) { v[i] = look_at(i % ROOM, k + i / ROOM * CHUNK); },
        [&](int i) { return arrived(v[i].y, epoch) && arrived(v[i].w, epoch); });
#pragma unroll
    for (int i = 0; i < ASKED; ++i) {
      float2 lo = floats_of(v[i].x, v[i].y), hi = floats_of(v[i].z, v[i].w);
      x[i] = make_uint2(pack2<T>(lo.x, lo.y), pack2<T>(hi.x, hi.y));
    }
  }

  // 4 values of row b from column k on, AT_ONCE parts of them at a time.
  __device__ __forceinline__ uint2 combined(int b, int k) const {
    constexpr int AT_ONCE = 4;
    float top = -INFINITY, weight = 0.f, sum[4] = {};
#pragma unroll 1
    for (int s0 = 0; s0 < splits; s0 += AT_ONCE) {
      uint4 v[AT_ONCE] = {};
      uint2 w[AT_ONCE] = {};
      unsigned wanted = 0xfu >> max(0, AT_ONCE - (splits - s0));
      poll<AT_ONCE>(
          wanted,
          [&](int i) {
            int row = (s0 + i) * B + b;
            v[i] = look_at(row, k);
            w[i] = look64(weights + row * (K / D) + k / D);
          },
          [&](int i) { return arrived(v[i].y, epoch) && arrived(v[i].w, epoch) && w[i].y == epoch; });
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (wanted >> i & 1) add(__uint_as_float(w[i].x), v[i], top, weight, sum);
    }
    float r = 1.f / weight;
    return make_uint2(pack2<T>(sum[0] * r, sum[1] * r), pack2<T>(sum[2] * r, sum[3] * r));
  }

 private:
  __device__ __forceinline__ uint4 look_at(int row, int k) const {
    return look4(reinterpret_cast<const unsigned*>(parts) + row * K + k);
  }
  // One part more: the flash-attention recurrence, with logarithms to base 2.
  __device__ static __forceinline__ void add(float log_weight, const uint4& v, float& top, float& weight,
                                             float (&sum)[4]) {
    if (log_weight == -INFINITY) return;
    float new_top = fmaxf(top, log_weight), keep = exp2f(top - new_top), mine = exp2f(log_weight - new_top);
    float2 lo = floats_of(v.x, v.y), hi = floats_of(v.z, v.w);
    top = new_top;
    weight = weight * keep + mine;
    sum[0] = sum[0] * keep + mine * lo.x, sum[1] = sum[1] * keep + mine * lo.y;
    sum[2] = sum[2] * keep + mine * hi.x, sum[3] = sum[3] * keep + mine * hi.y;
  }
};

// A warp's share of the computing: its place in the ring, its columns of x, the sums. SHIFT: log2 of the rows of the
// batch that there is room for; a constant, because index arithmetic lies on the critical path of every stage.
template <typename T, int SHIFT>
struct Consumer {
  static constexpr int ROOM = 1 << SHIFT;
  const Step<T>& p;
  Ring ring;
  unsigned x;             // shared address of this warp's columns of the input: [chunk][row of the batch] x 256 bytes
  float *squares, *sums;  // [row of the batch][warp]; [tile of a group][16 rows][batch] x SUM_PITCH, two in turns
  int sums_size;
  int warp, lane;
  Place at = {};
  int flip = 0;

  // Called where a stage begins: what follows is computed there. The compiler would compute every stage's addresses
  // before the loop over the layers, some 400 of them, and keep them in local memory.
  __device__ __forceinline__ void begin_stage() {
    asm volatile("" : "+r"(lane), "+r"(warp), "+r"(x), "+r"(ring.slots));
  }

  // Odd rows of the batch keep their halves of 128 bytes swapped: a fragment's read covers two rows.
  __device__ __forceinline__ unsigned x_at(int chunk, int b) const {
    return x + (((chunk << SHIFT) + b) << 8) + (((lane >> 3) ^ (b & 1)) << 6) + ((lane & 7) << 3);
  }
  // In how many of `n` chunks from column `first` on this lane has its 4 columns.
  __device__ __forceinline__ int chunks_here(int first, int n, int K) const {
    return min(n, (K - (first + warp * COLUMNS + lane * 4) + CHUNK - 1) >> 10);
  }

  // Waits for this warp's columns of chunks [first, first + n) and keeps them; returns the sum of their squares.
  template <typename Source>
  __device__ __forceinline__ void take(const Source& source, int first, int n, int K, float (&square_sums)[ROOM]) {
    constexpr int AT_ONCE = ASKED / ROOM;  // chunks
    int k = first * CHUNK + warp * COLUMNS + lane * 4, here = chunks_here(first * CHUNK, n, K);
#pragma unroll 1
    for (int c = 0; c < n; c += AT_ONCE, k += AT_ONCE * CHUNK) {
      unsigned wanted = 0;
      if constexpr (ROOM == 1)
        wanted = here > c ? 0xffu >> (8 - min(here - c, 8)) : 0u;
      else
        wanted = here > c ? 0xffu >> (8 - p.B) : 0u;
      uint2 v[ASKED];
      source.template fetch<ROOM>(v, k, wanted);
#pragma unroll
      for (int i = 0; i < ASKED; ++i)
        if (wanted >> i & 1) {
          store64(x_at(c + i / ROOM, i % ROOM), v[i]);
          float2 a = unpack2<T>(v[i].x), b = unpack2<T>(v[i].y);
          square_sums[i % ROOM] += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
        }
    }
    __syncwarp();
  }
  template <typename Source>
  __device__ __forceinline__ void take(const Source& source, int first, int n, int K) {
    float unused[ROOM] = {};
    take(source, first, n, K, unused);
  }
  template <int D>
  __device__ __forceinline__ void take(const FromParts<T, D>& source, int first, int n, int K) {
    if (source.splits == 1) {
      float unused[ROOM] = {};
      take(source, first, n, K, unused);
      return;
    }
    int k = first * CHUNK + warp * COLUMNS + lane * 4, here = chunks_here(first * CHUNK, n, K);
#pragma unroll 1
    for (int c = 0; c < here; ++c, k += CHUNK)
#pragma unroll 1
      for (int b = 0; b < p.B; ++b) store64(x_at(c, b), source.combined(b, k));
    __syncwarp();
  }

  // A stage's whole input, with RMSNorm at the stock model's rounding: x * rsqrt, ROUND, times weight, ROUND.
  template <typename Source>
  __device__ __forceinline__ void take_normed(const Source& source, const T* weight, int K) {
    begin_stage();
    int chunks = (K + CHUNK - 1) / CHUNK, here = chunks_here(0, chunks, K);
    uint2 w[MAX_CHUNKS] = {};
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c)
      if (c < here) w[c] = *reinterpret_cast<const uint2*>(weight + c * CHUNK + warp * COLUMNS + lane * 4);
    float s[ROOM] = {};
    take(source, 0, chunks, K, s);
    sum_over_lanes(s);
    if constexpr (ROOM == 1) {
      if (lane == 0) squares[warp] = s[0];
    } else {
      if ((lane & 3) == 0) squares[(lane >> 2) * CONSUMERS + warp] = s[0];
    }
    consumers_sync();
    const float4* of_warps = reinterpret_cast<const float4*>(squares + (lane & (ROOM - 1)) * CONSUMERS);
    float4 a = of_warps[0], b = of_warps[1];
    float r = rsqrtf(((a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w))) * p.inverse_H + p.eps);
#pragma unroll
    for (int row = 0; row < ROOM; ++row) {
      float scale = ROOM == 1 ? r : __shfl_sync(~0u, r, row);
      if (row < p.B)
#pragma unroll
        for (int c = 0; c < MAX_CHUNKS; ++c)
          if (c < here) store64(x_at(c, row), normed(load64(x_at(c, row)), w[c], scale));
    }
    __syncwarp();
  }

  // Adds a tile's products over one chunk to c, in two sums. groups: of 32 columns, that this warp has in the chunk.
  // `second`: whether the tile has its second octet.
  __device__ __forceinline__ void dot(float (&c)[2][4], int chunk_of_x, int groups, bool second) {
    int g8 = lane >> 2, t4 = lane & 3, b = g8 & (ROOM - 1);
    unsigned in_slot = g8 * ROW_PITCH + warp * (2 * COLUMNS) + t4 * 16;
    unsigned row = ring.slot(at.slot) + in_slot, first_empty = ring.empty(at.slot);
    barrier_wait(ring.full(at.slot), at.parity);
    at.next(ring.count);
    unsigned row2 = row, second_empty = first_empty;
    if (second) {
      row2 = ring.slot(at.slot) + in_slot, second_empty = ring.empty(at.slot);
      barrier_wait(ring.full(at.slot), at.parity);
      at.next(ring.count);
    }
    unsigned xb = x + (((chunk_of_x << SHIFT) + b) << 8) + t4 * 16, even = xb + ((b & 1) << 6),
             odd = xb - ((b & 1) << 6);
    uint4 A[4] = {}, A2[4] = {}, X[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < groups) {
        A[j] = load128(row + j * 64);
        A2[j] = load128(row2 + j * 64);
        X[j] = load128((j & 1 ? odd : even) + j * 64);
      }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < groups) {
        mma<T>(c[0], A[j].x, A2[j].x, A[j].y, A2[j].y, X[j].x, X[j].y);
        mma<T>(c[1], A[j].z, A2[j].z, A[j].w, A2[j].w, X[j].z, X[j].w);
      }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(first_empty);
      if (second) barrier_arrive(second_empty);
    }
  }

  __device__ __forceinline__ float* sum_at(int tile, int row, int b) const {
    return sums + flip + (((tile * 16 + row) << SHIFT) + b) * SUM_PITCH;
  }
  __device__ __forceinline__ void keep(int tile, const float (&c)[2][4], bool add) const {
    int g8 = lane >> 2, b = 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (b + (i & 1) < ROOM) {
        float* at = sum_at(tile, g8 + 8 * (i >> 1), b + (i & 1)) + warp;
        *at = c[0][i] + c[1][i] + (add ? *at : 0.f);
      }
  }
  __device__ __forceinline__ float sum(int tile, int row, int b) const {
    const float4* s = reinterpret_cast<const float4*>(sum_at(tile, row, b));
    float4 v = s[0], w = s[1];
    return ((v.x + v.y) + (v.z + v.w)) + ((w.x + w.y) + (w.z + w.w));
  }

  // The products of tiles [t0, t0 + n) over the `chunks` chunks from `first` on, whose input is kept.
  __device__ __forceinline__ void products(int t0, int n, int octets, int first, int chunks, int K, bool add) {
#pragma unroll 1
    for (int t = 0; t < n; ++t) {
      float c[2][4] = {};
      int columns = K - first * CHUNK - warp * COLUMNS;
#pragma unroll 1
      for (int i = 0; i < chunks; ++i, columns -= CHUNK) dot(c, i, columns >> 5, 2 * (t0 + t) + 1 < octets);
      keep(t, c, add);
    }
  }

  // A stage whose input was normed, and so is all there: group of tiles after group of tiles. finish(tile of the stage,
  // tile of the group, row 0..15, b) is called once for every output, by one thread.
  template <typename F>
  __device__ __forceinline__ void tiles(int octets, int K, F&& finish) {
    begin_stage();
    int count = (octets + 1) / 2, chunks = (K + CHUNK - 1) / CHUNK;
#pragma unroll 1
    for (int t0 = 0; t0 < count; t0 += p.tile_group) {
      int n = min(p.tile_group, count - t0);
      flip = sums_size - flip;
      products(t0, n, octets, 0, chunks, K, false);
      consumers_sync();
      finish_group(t0, n, finish);
    }
  }

  // A stage that takes its input as it comes, x_chunks chunks at a time: its tiles, at most MAX_TILES, are one group.
  template <typename Source, typename F>
  __device__ __forceinline__ void phases(const Source& source, int octets, int K, F&& finish) {
    begin_stage();
    int count = (octets + 1) / 2, total = (K + CHUNK - 1) / CHUNK;
    flip = sums_size - flip;
#pragma unroll 1
    for (int first = 0; first < total; first += p.x_chunks) {
      int n = min(p.x_chunks, total - first);
      take(source, first, n, K);
      products(0, count, octets, first, n, K, first > 0);
    }
    consumers_sync();
    finish_group(0, count, finish);
  }

 private:
  __device__ static __forceinline__ uint2 normed(uint2 v, uint2 w, float r) {
    float2 a = unpack2<T>(v.x), c = unpack2<T>(v.y), wa = unpack2<T>(w.x), wc = unpack2<T>(w.y);
    return make_uint2(pack2<T>(rounded<T>(a.x * r) * wa.x, rounded<T>(a.y * r) * wa.y),
                      pack2<T>(rounded<T>(c.x * r) * wc.x, rounded<T>(c.y * r) * wc.y));
  }

  // s[0] becomes the sum over the warp's lanes; of 8 rows, lane l has that of row l / 4.
  __device__ __forceinline__ void sum_over_lanes(float (&s)[ROOM]) const {
    int apart = 16;
#pragma unroll
    for (int n = ROOM / 2; n; n /= 2, apart /= 2)
#pragma unroll
      for (int i = 0; i < n; ++i) {
        bool upper = lane & apart;
        float mine = upper ? s[i + n] : s[i], other = upper ? s[i] : s[i + n];
        s[i] = mine + __shfl_xor_sync(~0u, other, apart);
      }
#pragma unroll
    for (; apart; apart /= 2) s[0] += __shfl_xor_sync(~0u, s[0], apart);
  }

  template <typename F>
  __device__ __forceinline__ void finish_group(int t0, int n, F&& finish) const {
#pragma unroll 1
    for (int i = warp * 32 + lane; i < n << (4 + SHIFT); i += CONSUMER_THREADS) {
      int b = i & (ROOM - 1), row = (i >> SHIFT) & 15, tile = i >> (4 + SHIFT);
      if (b < p.B) finish(t0 + tile, tile, row, b);
    }
  }
};

}  // namespace qwen_patch::cuda::decode
