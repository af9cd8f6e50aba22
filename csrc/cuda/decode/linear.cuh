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

#include "input.cuh"
#include "products.cuh"
#include "program.cuh"

namespace qwen_patch::cuda::decode {

constexpr int MAX_HIDDEN = 8192;
constexpr int MAX_TILES = 4;   // of a stage whose input is too long to be kept (o and down): 64 rows a block
constexpr int SUM_PITCH = 12;  // floats: the sums of 8 warps for one output, padded against bank conflicts

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMER_THREADS) : "memory"); }

// A warp's share of the computing: its place in the ring, its columns of x, the sums. SHIFT: log2 of the rows of the
// batch that there is room for; a constant, because index arithmetic lies on the critical path of every stage.
template <typename T, typename W, int SHIFT>
struct Consumer {
  static constexpr int ROOM = 1 << SHIFT;
  template <typename V>
  using Kept = KeptInput<T, V, ROOM>;
  const Step<T>& p;
  Ring<W> ring;
  unsigned x;             // shared address of this warp's columns of the input: [chunk][row of the batch] x X_PITCH
  float *squares, *sums;  // [row of the batch][warp]; [tile of a group][16 rows][batch] x SUM_PITCH, two in turns
  int sums_size;
  int warp, lane;
  Place at = {};
  int flip = 0;

  // Called where a stage or a tile begins: what follows is computed there, not before the loop and kept.
  __device__ __forceinline__ void begin_stage() { asm volatile("" : "+r"(lane), "+r"(warp), "+r"(x), "+r"(ring.at)); }

  __device__ __forceinline__ unsigned x_at(int chunk, int b) const { return x + ((chunk << SHIFT) + b) * X_PITCH<W>; }

  // Waits for this warp's columns of chunks [first, first + n); keep(chunk of these, row, 4 values, whether they are
  // columns of K at all) takes them, in all lanes.
  template <typename F>
  __device__ __forceinline__ void take(const FromWords& source, int first, int n, int K, F&& keep) {
    if constexpr (ROOM > 1) {
#pragma unroll 1
      for (int c = 0; c < n; ++c) take_some<ROOM>(source, first, c, K, keep);
    } else if (n == 1) {
      take_some<1>(source, first, 0, K, keep);
    } else {
#pragma unroll 1
      for (int c = 0; c < n; c += 4)
        if (n - c <= 2)
          take_some<2>(source, first, c, K, keep);
        else
          take_some<4>(source, first, c, K, keep);
    }
    __syncwarp();
  }

  // A stage's whole input, with RMSNorm at the stock model's rounding: x * rsqrt, ROUND, times weight, ROUND. V: what
  // the stage's weights are.
  template <typename V>
  __device__ __forceinline__ void take_normed(const FromWords& source, const T* weight, int K) {
    begin_stage();
    int chunks = chunks_of(K), k = warp * COLUMNS + lane * 4;
    // Into the L1 cache, while the input is on its way.
    for (int c = lane; c < chunks * 2; c += 32)
      if (int at = (c >> 1) * CHUNK + warp * COLUMNS + (c & 1) * 64; at < K) prefetch_l1(weight + at);
    float s[ROOM] = {};
    take(source, 0, chunks, K, [&](int c, int b, uint2 v, bool there) {
      if (there) store64(x_at(c, b) + lane * 8, v);
      float2 lo = unpack2<T>(v.x), hi = unpack2<T>(v.y);
      float sum = lo.x * lo.x + lo.y * lo.y + hi.x * hi.x + hi.y * hi.y;
      s[b] += there ? sum : 0.f;
    });
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
#pragma unroll 1
    for (int c = 0; c < chunks; ++c, k += CHUNK) {  // all lanes, for the shuffle; who has no columns norms nothing
      uint2 w = *reinterpret_cast<const uint2*>(weight + min(k, K - 4));
      uint2 v[ROOM];
#pragma unroll
      for (int row = 0; row < ROOM; ++row) v[row] = load64(x_at(c, row) + lane * 8);
      if constexpr (ROOM > 1) __syncwarp();  // odd rows go where other lanes have read
#pragma unroll
      for (int row = 0; row < ROOM; ++row) {
        float scale = ROOM == 1 ? r : __shfl_sync(~0u, r, row);
        float2 lo = unpack2<T>(v[row].x), hi = unpack2<T>(v[row].y);
        v[row] = make_uint2(multiply2<T>(pack2<T>(lo.x * scale, lo.y * scale), w.x),
                            multiply2<T>(pack2<T>(hi.x * scale, hi.y * scale), w.y));
        Kept<V>::store(x_at(c, row), row, lane, v[row], k < K);
      }
    }
    __syncwarp();
  }

  // A tile's weights of this warp's columns of chunk i of a phase of `chunks`, from the ring into registers: as early
  // as may be, before the input is there or the products before are done. `both`: whether the tile has its second
  // octet.
  template <typename V>
  __device__ __forceinline__ void fetch(typename Kept<V>::Weights& w, int i, int chunks, bool both) {
    int g8 = lane >> 2, of_slot = i & (SLOT_CHUNKS<V> - 1);
    Place other = at;
    if (both) other.next(ring.count);
    if (of_slot == 0) {
      barrier_wait(ring.full(at.slot), at.parity);
      if (both) barrier_wait(ring.full(other.slot), other.parity);
    }
    unsigned in_slot =
        g8 * ROW_PITCH + warp * (static_cast<int>(sizeof(V)) * COLUMNS) + (lane & 3) * 16 + of_slot * CHUNK;
    unsigned scales = SCALES + g8 * SCALE_PITCH + (warp * COLUMNS + of_slot * CHUNK) * 4 / GROUP - in_slot;
    Kept<V>::load(w, ring.slot(at.slot) + in_slot, ring.slot(other.slot) + in_slot, scales);
    if (of_slot != SLOT_CHUNKS<V> - 1 && i != chunks - 1) return;
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(ring.empty(at.slot));
      if (both) barrier_arrive(ring.empty(other.slot));
    }
    at = other;
    at.next(ring.count);
  }

  __device__ __forceinline__ float* sum_at(int tile, int row, int b) const {
    return sums + flip + (((tile * 16 + row) << SHIFT) + b) * SUM_PITCH;
  }
  template <typename V>
  __device__ __forceinline__ void keep(int tile, const float (&c)[2][4], bool add) const {
    int g8 = lane >> 2, b = 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & 1) >= ROOM) continue;
      float result = Kept<V>::result(c, i);
      if (b + (i & 1) >= ROOM) continue;
      float* at = sum_at(tile, g8 + 8 * (i >> 1), b + (i & 1)) + warp;
      *at = result + (add ? *at : 0.f);
    }
  }
  __device__ __forceinline__ float sum(int tile, int row, int b) const {
    const float4* s = reinterpret_cast<const float4*>(sum_at(tile, row, b));
    float4 v = s[0], w = s[1];
    return ((v.x + v.y) + (v.z + v.w)) + ((w.x + w.y) + (w.z + w.w));
  }

  // The products of tiles [t0, t0 + n) over the `chunks` chunks from `first` on, whose input is kept. w: the first of
  // their weights.
  template <typename V>
  __device__ __forceinline__ void products(typename Kept<V>::Weights& w, int t0, int n, int octets, int first,
                                           int chunks, int K, bool add) {
    constexpr int UNIT = sizeof(V) == 1 ? GROUP : 32;
    typename Kept<V>::OfInput kept = {};
#pragma unroll 1
    for (int t = 0; t < n; ++t) {
      begin_stage();
      float c[2][4] = {};
      int columns = K - first * CHUNK - warp * COLUMNS;
#pragma unroll 1
      for (int i = 0; i < chunks; ++i, columns -= CHUNK) {
        auto x = Kept<V>::input(x_at(i, (lane >> 2) & (ROOM - 1)), lane);
        typename Kept<V>::Weights now = w;
        bool last = i == chunks - 1;
        int tile = t0 + t, next = tile + last;
        if (next < t0 + n) fetch<V>(w, last ? 0 : i + 1, chunks, 2 * next + 1 < octets);
        Kept<V>::products(c, now, x, columns / UNIT, 2 * tile + 1 < octets, kept, t == 0 || chunks > 1);
      }
      keep<V>(t, c, add);
    }
  }

  // A stage whose input is normed, and so is all there: group of tiles after group of tiles. finish(tile of the stage,
  // tile of the group, row 0..15, b) is called once for every output, by one thread.
  template <typename V, typename F>
  __device__ __forceinline__ void normed(const FromWords& source, const T* norm, int octets, int K, F&& finish) {
    begin_stage();
    int count = (octets + 1) / 2, chunks = chunks_of(K);
    typename Kept<V>::Weights w;
    fetch<V>(w, 0, chunks, octets > 1);
    take_normed<V>(source, norm, K);
#pragma unroll 1
    for (int t0 = 0; t0 < count; t0 += p.tile_group) {
      int n = min(p.tile_group, count - t0);
      if (t0 > 0) fetch<V>(w, 0, chunks, 2 * t0 + 1 < octets);
      flip = sums_size - flip;
      products<V>(w, t0, n, octets, 0, chunks, K, false);
      consumers_sync();
      finish_group(t0, n, finish);
    }
  }

  // A stage that takes its input as it comes, x_chunks chunks at a time: its tiles, at most MAX_TILES, are one group.
  template <typename F>
  __device__ __forceinline__ void phases(const FromWords& source, int octets, int K, F&& finish) {
    begin_stage();
    int count = (octets + 1) / 2, total = chunks_of(K);
    flip = sums_size - flip;
#pragma unroll 1
    for (int first = 0; first < total; first += p.x_chunks) {
      int n = min(p.x_chunks, total - first);
      typename Kept<W>::Weights w;
      fetch<W>(w, 0, n, octets > 1);
      take(source, first, n, K,
           [&](int c, int b, uint2 v, bool there) { Kept<W>::store(x_at(c, b), b, lane, v, there); });
      products<W>(w, 0, count, octets, first, n, K, first > 0);
    }
    consumers_sync();
    finish_group(0, count, finish);
  }

 private:
  // Waits for N pieces: of the next N chunks if there is one row, of the N rows of chunk c if there are more.
  template <int N, typename F>
  __device__ __forceinline__ void take_some(const FromWords& source, int first, int c, int K, F&& keep) {
    int k0 = (first + c) * CHUNK + warp * COLUMNS + lane * 4, at[N];
    bool there[N], needed[N];
    uint2 v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      at[i] = k0 + i * (ROOM == 1 ? CHUNK : K);
      there[i] = k0 + (ROOM == 1 ? i * CHUNK : 0) < K;
      needed[i] = there[i] && (ROOM == 1 || i < p.B);
    }
    source.fetch(v, at, needed);
#pragma unroll
    for (int i = 0; i < N; ++i) keep(ROOM == 1 ? c + i : c, ROOM == 1 ? 0 : i, v[i], there[i]);
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
