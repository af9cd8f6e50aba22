// The linears of a decode step, on tensor cores: y[n, b] = W[n, k] x[b, k], the weights as the 16-row side of
// mma.m16n8k16, the batch as its 8 columns, fp32 sums. 1 to 8 rows of a batch cost alike.
//
// All 16 warps work on one tile of 16 rows, each on 64 of every 1,024 columns. So a warp needs only its own columns of
// x: it waits for those, and no barrier lies between their arrival and the product. Partial sums meet in shared memory,
// one barrier a group of tiles. Within 32 columns k is permuted, so that a lane's operands are 16 bytes in a row.
#pragma once

#include "../silu_mul_kernel.cuh"
#include "exchange.cuh"
#include "program.cuh"
#include "ring.cuh"

namespace qwen_patch::cuda::decode {

constexpr int MAX_HIDDEN = 8192;
constexpr int MAX_TILES = 4;   // of a stage whose input is too long to be kept (o and down): 64 rows a block
constexpr int SUM_PITCH = 20;  // floats: the sums of 16 warps for one output, padded against bank conflicts

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

// Where a stage's input comes from. fetch() asks for 4 values of row b from column k on; it is false while they are not
// all there.
template <typename T>
struct FromWords {
  static constexpr int AT_ONCE = 4;  // requests of a lane under way
  const unsigned* words;
  int K;
  unsigned epoch;
  __device__ __forceinline__ bool fetch(int b, int k, uint2& x) const {
    uint4 v = look4(words + b * K + k);
    x = values(v);
    return arrived(v, epoch);
  }
};
template <typename T>
struct FromEmbedding {
  static constexpr int AT_ONCE = 1;
  const T* table;
  const int64_t* tokens;
  int H;
  __device__ __forceinline__ bool fetch(int b, int k, uint2& x) const {
    x = *reinterpret_cast<const uint2*>(table + tokens[b] * H + k);
    return true;
  }
};
// The parts of attention over `splits` pieces of the context (attention.cuh): combined by who reads them.
template <typename T, int D>
struct FromParts {
  static constexpr int AT_ONCE = 1;
  const unsigned* parts;
  const uint4* scales;
  int B, K, splits;  // K = heads * D
  unsigned epoch;
  __device__ __forceinline__ bool fetch(int b, int k, uint2& x) const {
    float top = -INFINITY, weight = 0.f, sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int s0 = 0; s0 < splits; s0 += 4) {
      uint4 v[4], m[4];
      bool ready = true;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (s0 + i < splits) {
          int row = (s0 + i) * B + b;
          v[i] = look4(parts + row * K + k);
          m[i] = look_pair(scales + (row * K + k) / 32);
          ready = ready && arrived(v[i], epoch) && m[i].z == epoch;
        }
      if (!ready) return false;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (s0 + i < splits) {
          float log_weight = __uint_as_float(m[i].x), scale = __uint_as_float(m[i].y);
          if (log_weight == -INFINITY) continue;
          float new_top = fmaxf(top, log_weight), keep = exp2f(top - new_top), mine = exp2f(log_weight - new_top);
          top = new_top;
          weight = weight * keep + mine;
          unsigned w[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[j] = sum[j] * keep + mine * scale * __half2float(__ushort_as_half(static_cast<unsigned short>(w[j])));
        }
    }
    float r = 1.f / weight;
    x = make_uint2(pack2<T>(sum[0] * r, sum[1] * r), pack2<T>(sum[2] * r, sum[3] * r));
    return true;
  }
};

// A warp's share of the computing: its place in the ring, its columns of x, the sums. SHIFT: log2 of the rows of the
// batch that there is room for; a constant, because index arithmetic lies on the critical path of every stage.
template <typename T, int SHIFT>
struct Consumer {
  static constexpr int ROOM = 1 << SHIFT;
  const Step<T>& p;
  Ring ring;
  Place at;
  char* x;         // this warp's columns of the input: [chunk][row of the batch] x 128 bytes
  float* squares;  // [row of the batch][warp] sums of squares
  float* sums;     // [tile of a group][16 rows][batch] x SUM_PITCH, two of them in turns
  int sums_size, flip;
  int warp, lane;

  // Odd rows of the batch keep their two halves swapped: a fragment's read covers two rows.
  __device__ __forceinline__ uint2* x_at(int chunk, int b, int piece) const {
    return reinterpret_cast<uint2*>(x + (((chunk << SHIFT) + b) << 7) + (((piece >> 3) ^ (b & 1)) << 6) +
                                    ((piece & 7) << 3));
  }

  // Waits for this warp's columns of chunks [first, first + n) and keeps them.
  template <typename Source>
  __device__ __forceinline__ void take(const Source& source, int first, int n, int K) {
    constexpr int N = Source::AT_ONCE;
    int total = n << (4 + SHIFT);
#pragma unroll 1
    for (int u0 = lane; u0 < total; u0 += 32 * N) {
      int b[N], k[N];
      uint2 v[N];
      bool ready;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        int u = u0 + 32 * i;
        b[i] = (u >> 4) & (ROOM - 1);
        k[i] = (first + (u >> (4 + SHIFT))) * CHUNK + warp * 64 + (u & 15) * 4;
        if (u >= total || b[i] >= p.B || k[i] >= K) b[i] = -1;
      }
      do {
        ready = true;
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (b[i] >= 0) ready = source.fetch(b[i], k[i], v[i]) && ready;
      } while (!ready);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        int u = u0 + 32 * i;
        if (b[i] >= 0) *x_at(u >> (4 + SHIFT), b[i], u & 15) = v[i];
      }
    }
    __syncwarp();
  }

  // A stage's whole input, with RMSNorm at the stock model's rounding: x * rsqrt, ROUND, times weight, ROUND. With one
  // row of the batch it stays in registers until it is normed.
  template <typename Source>
  __device__ __forceinline__ void take_normed(const Source& source, const T* weight, int K) {
    if constexpr (SHIFT == 0) {
      constexpr int N = MAX_HIDDEN / CHUNK / 2;
      uint2 w[N], v[N];
      int units = (K + CHUNK - 1) / CHUNK * 16;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        int k = column(lane + 32 * i);
        v[i] = w[i] = make_uint2(0, 0);
        if (lane + 32 * i < units && k < K) w[i] = *reinterpret_cast<const uint2*>(weight + k);
      }
      float squares_here = 0.f;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        int k = column(lane + 32 * i);
        if (lane + 32 * i < units && k < K) {
#pragma unroll 1
          while (!source.fetch(0, k, v[i])) {
          }
          squares_here += square(v[i]);
        }
        if (32 * (i + 1) >= units) break;
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) squares_here += __shfl_xor_sync(~0u, squares_here, o);
      if (lane == 0) squares[warp] = squares_here;
      consumers_sync();
      const float4* all = reinterpret_cast<const float4*>(squares);
      float4 a = all[0], b = all[1], c = all[2], d = all[3];
      float r = rsqrtf((((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)) + ((c.x + c.y) + (c.z + c.w)) +
                        ((d.x + d.y) + (d.z + d.w))) *
                           p.inverse_H +
                       p.eps);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        int u = lane + 32 * i;
        if (u < units) *x_at(u >> 4, 0, u & 15) = normed(v[i], w[i], r);
        if (32 * (i + 1) >= units) break;
      }
      __syncwarp();
    } else {
      take(source, 0, (K + CHUNK - 1) / CHUNK, K);
      norm(weight, K);
    }
  }

  // Adds a tile's products over one chunk to c and d. `second`: whether the tile has its second octet.
  __device__ __forceinline__ void dot(float* c, float* d, int chunk_of_x, int k0, int K, bool second) {
    int g8 = lane >> 2, t4 = lane & 3;
    const char* row = ring.slots + at.slot * SLOT_BYTES + g8 * ROW_PITCH + warp * 128 + t4 * 16;
    uint64_t* first_empty = ring.empty + at.slot;
    barrier_wait(ring.full + at.slot, at.parity);
    at.next(ring.count);
    const char* row2 = row;
    uint64_t* second_empty = first_empty;
    if (second) {
      row2 = ring.slots + at.slot * SLOT_BYTES + g8 * ROW_PITCH + warp * 128 + t4 * 16;
      second_empty = ring.empty + at.slot;
      barrier_wait(ring.full + at.slot, at.parity);
      at.next(ring.count);
    }
    const char* xb = x + (((chunk_of_x << SHIFT) + g8) << 7) + t4 * 16;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (k0 + warp * 64 + j * 32 < K) {
        uint4 A = *reinterpret_cast<const uint4*>(row + j * 64), A2 = make_uint4(0, 0, 0, 0), X = A2;
        if (second) A2 = *reinterpret_cast<const uint4*>(row2 + j * 64);
        if (g8 < p.B) X = *reinterpret_cast<const uint4*>(xb + ((j ^ (g8 & 1)) << 6));
        mma<T>(c, A.x, A2.x, A.y, A2.y, X.x, X.y);
        mma<T>(d, A.z, A2.z, A.w, A2.w, X.z, X.w);
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
  __device__ __forceinline__ void keep(int tile, const float* c, const float* d, bool add) const {
    int g8 = lane >> 2, b = 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (b + (i & 1) < p.B) {
        float* at = sum_at(tile, g8 + 8 * (i >> 1), b + (i & 1)) + warp;
        *at = c[i] + d[i] + (add ? *at : 0.f);
      }
  }
  __device__ __forceinline__ float sum(int tile, int row, int b) const {
    const float4* s = reinterpret_cast<const float4*>(sum_at(tile, row, b));
    float4 v[4] = {s[0], s[1], s[2], s[3]};
    float t = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) t += (v[i].x + v[i].y) + (v[i].z + v[i].w);
    return t;
  }

  // The products of tiles [t0, t0 + n) over the `chunks` chunks from `first` on, whose input is kept.
  __device__ __forceinline__ void products(int t0, int n, int octets, int first, int chunks, int K, bool add) {
#pragma unroll 1
    for (int t = 0; t < n; ++t) {
      float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
      for (int i = 0; i < chunks; ++i) dot(c, d, i, (first + i) * CHUNK, K, 2 * (t0 + t) + 1 < octets);
      keep(t, c, d, add);
    }
  }

  // A stage whose input was normed, and so is all there: group of tiles after group of tiles. finish(tile of the stage,
  // tile of the group, row 0..15, b) is called once for every output, by one thread.
  template <typename F>
  __device__ __forceinline__ void tiles(int octets, int K, F&& finish) {
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
  // The first of the 4 columns that unit u of this warp has.
  __device__ __forceinline__ int column(int u) const { return (u >> 4) * CHUNK + warp * 64 + (u & 15) * 4; }
  __device__ static __forceinline__ float square(uint2 v) {
    float2 a = unpack2<T>(v.x), b = unpack2<T>(v.y);
    return a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
  }
  __device__ static __forceinline__ uint2 normed(uint2 v, uint2 w, float r) {
    float2 a = unpack2<T>(v.x), c = unpack2<T>(v.y), wa = unpack2<T>(w.x), wc = unpack2<T>(w.y);
    return make_uint2(pack2<T>(rounded<T>(a.x * r) * wa.x, rounded<T>(a.y * r) * wa.y),
                      pack2<T>(rounded<T>(c.x * r) * wc.x, rounded<T>(c.y * r) * wc.y));
  }

  // RMSNorm of what take() kept, several rows of a batch.
  __device__ __forceinline__ void norm(const T* weight, int K) {
    int n = (K + CHUNK - 1) / CHUNK, half = lane >> 4, piece = lane & 15;
    // A half warp has one row of the batch at a time.
#pragma unroll 1
    for (int b = half; b < ROOM; b += 2) {
      float s = 0.f;
#pragma unroll 1
      for (int chunk = 0; chunk < n; ++chunk)
        if (b < p.B && chunk * CHUNK + warp * 64 + piece * 4 < K) s += square(*x_at(chunk, b, piece));
#pragma unroll
      for (int o = 8; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
      if (piece == 0) squares[b * CONSUMERS + warp] = s;
    }
    consumers_sync();
    const float4 mine = *reinterpret_cast<const float4*>(squares + lane * 4);  // a quarter of row lane / 4
    float s = (mine.x + mine.y) + (mine.z + mine.w);
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
    float r = rsqrtf(s * p.inverse_H + p.eps);
#pragma unroll 1
    for (int chunk = 0; chunk < n; ++chunk) {
      int k = chunk * CHUNK + warp * 64 + piece * 4;
      uint2 w = k < K ? *reinterpret_cast<const uint2*>(weight + k) : make_uint2(0, 0);
#pragma unroll
      for (int b = 0; b < ROOM; b += 2) {
        float scale = __shfl_sync(~0u, r, (b + half) * 4);
        if (b + half < p.B && k < K) *x_at(chunk, b + half, piece) = normed(*x_at(chunk, b + half, piece), w, scale);
      }
    }
    __syncwarp();
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
