// One decode step of the whole model as one kernel: a block a multiprocessor, all of them on the device at once.
//
// Bytes: every weight once, the cache once. 5 exchanges a layer (q/k/v, parts of attention, hidden state after
// attention, activation, hidden state after the MLP), one for the choice of the token. 16 warps compute; the others
// fill the ring of weights (ring.cuh). Each block owns the same rows of the hidden state in every layer, and keeps them
// as residual.
#pragma once

#include "attention.cuh"

namespace qwen_patch::cuda::decode {

constexpr int EXCHANGES_A_LAYER = 5;
constexpr int MAX_BATCH = 8;
constexpr int THREADS = 32 * (CONSUMERS + 4);  // a warp fills the ring, three are there to give up their registers

struct Best {
  float value;
  int index;
};
// As torch.argmax: a NaN is the largest, the lower index wins a tie.
__device__ __forceinline__ bool better(Best a, Best b) {
  bool na = isnan(a.value), nb = isnan(b.value);
  if (na != nb) return na;
  if (!na && a.value != b.value) return a.value > b.value;
  return a.index < b.index;
}

// Where things lie in shared memory, in bytes. The host asks for `total`.
template <typename T, int D, int SHIFT>
struct Layout {
  int barriers, scratch, squares, sums, sum_bytes, residual, best, shares, table, x, slots, total;
  __host__ __device__ Layout(const Step<T>& p) {
    int batch = 1 << SHIFT, at = 0;
    auto take = [&](int bytes) {
      int here = at;
      at += (bytes + 127) / 128 * 128;
      return here;
    };
    barriers = take(2 * 8 * p.slots);
    scratch = take(static_cast<int>(sizeof(AttentionScratch<D>)));
    squares = take(MAX_BATCH * CONSUMERS * 4);
    sum_bytes = p.tile_group * 16 * batch * SUM_PITCH * 4;
    if (sum_bytes < 8192) sum_bytes = 8192;  // attention uses both: 16 warps x 2 heads x 128
    sums = take(2 * sum_bytes);
    residual = take(MAX_TILES * 16 * batch * 4);
    best = take(CONSUMERS * MAX_BATCH * 8);
    shares = take(static_cast<int>(sizeof(Shares)));
    table = take(p.layer_count * static_cast<int>(sizeof(LayerWeights<T>)));
    x = take(p.x_chunks * batch * 128 * CONSUMERS);
    slots = take(p.slots * SLOT_BYTES);
    total = at;
  }
};

template <typename T, int D>
__device__ void produce(const Step<T>& p, const Shares& mine, Producer& to) {
  // In the order of Consumer::tiles (all chunks of a tile) and of Consumer::phases (those of a phase, tile after tile).
  auto all = [&](const Rows<T>& rows, int K, int phase) {
    int chunks = (K + CHUNK - 1) / CHUNK;
#pragma unroll 1
    for (int first = 0; first < chunks; first += phase)
#pragma unroll 1
      for (int tile = 0; 2 * tile < rows.octets; ++tile)
#pragma unroll 1
        for (int chunk = first; chunk < min(first + phase, chunks); ++chunk)
#pragma unroll 1
          for (int octet = 2 * tile; octet < min(2 * tile + 2, rows.octets); ++octet) {
            int matrix, row, n;
            rows.at(octet, matrix, row, n);
            to.octet(rows.weight(matrix) + static_cast<int64_t>(row) * K, n, K, chunk * CHUNK);
          }
  };
  constexpr int WHOLE = 1 << 20;
#pragma unroll 1
  for (int layer = 0; layer < p.layer_count; ++layer) {
    LayerWeights<T> w = p.layers[layer];
    all(Rows<T>::three(w.q, mine.q, w.k, w.v, mine.kv), p.H, WHOLE);
    all(Rows<T>::one(w.o, mine.hidden), p.heads * D, p.x_chunks);
    all(Rows<T>::pair(w.gate, w.up, mine.inner), p.H, WHOLE);
    all(Rows<T>::one(w.down, mine.hidden), p.I, p.x_chunks);
  }
  all(Rows<T>::one(p.lm_head, mine.vocabulary), p.H, WHOLE);
}

template <typename T, int D, int SHIFT>
__device__ __forceinline__ void consume(const Step<T>& p, Consumer<T, SHIFT>& me, AttentionScratch<D>& scratch,
                                        float* residual, Best* block_best, const Shares& mine,
                                        const LayerWeights<T>* table, unsigned round) {
  const int exchanges = EXCHANGES_A_LAYER * p.layer_count + 1;
  const Epochs epoch(round, exchanges);
  const int q_size = p.heads * D, kv_size = p.kv_heads * D, qkv_size = q_size + 2 * kv_size;
  const Span &hidden = mine.hidden, &inner = mine.inner, &vocabulary = mine.vocabulary;

  // A linear whose output is added to the residual and handed on as the hidden state.
  auto into_residual = [&](unsigned out_epoch) {
    return [&, out_epoch](int tile, int in_group, int row, int b) {
      int local = tile * 16 + row;
      if (local >= hidden.count) return;
      float& kept = residual[(local << SHIFT) + b];
      T sum = from_float<T>(kept + rounded<T>(me.sum(in_group, row, b)));
      kept = to_float(sum);
      put(p.hidden + b * p.H + hidden.first + local, sum, out_epoch);
    };
  };
#pragma unroll 1
  for (int i = me.warp * 32 + me.lane; i < hidden.count << SHIFT; i += CONSUMER_THREADS) {
    int b = i & (me.ROOM - 1), row = i >> SHIFT;
    if (b < p.B) residual[i] = to_float(p.embedding[p.tokens[b] * p.H + hidden.first + row]);
  }
  consumers_sync();

#pragma unroll 1
  for (int layer = 0; layer < p.layer_count; ++layer) {
    const LayerWeights<T>& w = table[layer];
    int exchange = EXCHANGES_A_LAYER * layer;
    if (layer == 0)
      me.take_normed(FromEmbedding<T>{p.embedding, p.tokens, p.H}, w.input_norm, p.H);
    else
      me.take_normed(FromWords<T>{p.hidden, p.H, epoch(exchange - 1)}, w.input_norm, p.H);
    Rows<T> rows = Rows<T>::three(w.q, mine.q, w.k, w.v, mine.kv);
    me.tiles(rows.octets, p.H, [&](int tile, int in_group, int row, int b) {
      int octet = 2 * tile + (row >> 3), matrix, first, n;
      if (octet >= rows.octets) return;
      rows.at(octet, matrix, first, n);
      if ((row & 7) >= n) return;
      int at = first + (row & 7);
      const T* bias = matrix == 0 ? w.q_bias : matrix == 1 ? w.k_bias : w.v_bias;
      float y = me.sum(in_group, row, b);
      if (bias) y += to_float(bias[at]);
      at += matrix == 0 ? 0 : matrix == 1 ? q_size : q_size + kv_size;
      put(p.qkv + b * qkv_size + at, from_float<T>(y), epoch(exchange));
    });

    attention<T, D, SHIFT>(p, w, me, scratch, mine, layer, epoch(exchange), epoch(exchange + 1));

    me.phases(FromParts<T, D>{p.parts, p.part_scales, p.B, q_size, mine.splits, epoch(exchange + 1)},
              (hidden.count + 7) / 8, q_size, into_residual(epoch(exchange + 2)));

    me.take_normed(FromWords<T>{p.hidden, p.H, epoch(exchange + 2)}, w.post_norm, p.H);
    me.tiles(2 * ((inner.count + 7) / 8), p.H, [&](int tile, int in_group, int row, int b) {
      int local = tile * 8 + row;
      if (row >= 8 || local >= inner.count) return;
      T gate = from_float<T>(me.sum(in_group, row, b)), up = from_float<T>(me.sum(in_group, row + 8, b));
      put(p.activation + b * p.I + inner.first + local, silu_mul_one(gate, up), epoch(exchange + 3));
    });

    me.phases(FromWords<T>{p.activation, p.I, epoch(exchange + 3)}, (hidden.count + 7) / 8, p.I,
              into_residual(epoch(exchange + 4)));
  }

  me.take_normed(FromWords<T>{p.hidden, p.H, epoch(exchanges - 2)}, p.final_norm, p.H);
  Best best = {-INFINITY, 0x7fffffff};
  me.tiles((vocabulary.count + 7) / 8, p.H, [&](int tile, int in_group, int row, int b) {
    int local = tile * 16 + row;
    if (local >= vocabulary.count) return;
    Best logit = {rounded<T>(me.sum(in_group, row, b)), vocabulary.first + local};
    p.logits[static_cast<int64_t>(b) * p.V + logit.index] = from_float<T>(logit.value);
    for (int i = 0; i < mine.banned_count; ++i)
      if (mine.banned[i] == logit.index) logit.value = -INFINITY;
    if (better(logit, best)) best = logit;
  });

  // A thread has met one row of the batch only: 512 threads are a multiple of it.
#pragma unroll
  for (int o = 16; o; o >>= 1)
    if (o >= me.ROOM) {
      Best other = {__shfl_xor_sync(~0u, best.value, o), __shfl_xor_sync(~0u, best.index, o)};
      if (better(other, best)) best = other;
    }
  if (me.lane < p.B) block_best[me.warp * MAX_BATCH + me.lane] = best;
  consumers_sync();
  unsigned last = epoch(exchanges - 1);
  if (me.warp == 0 && me.lane < p.B) {
#pragma unroll 1
    for (int i = 1; i < CONSUMERS; ++i)
      if (better(block_best[i * MAX_BATCH + me.lane], best)) best = block_best[i * MAX_BATCH + me.lane];
    put_pair(p.best + blockIdx.x * MAX_BATCH + me.lane, __float_as_uint(best.value), best.index, last);
  }
  if (blockIdx.x != 0) return;

  // Block 0 chooses, and moves the session on: every block has read its state by now, since all have sent their best.
  if (me.warp < p.B) {
    int b = me.warp;
    best = {-INFINITY, 0x7fffffff};
#pragma unroll 1
    for (int i = me.lane; i < static_cast<int>(gridDim.x); i += 32) {
      uint4 v;
      do v = look_pair(p.best + i * MAX_BATCH + b);
      while (v.z != last);
      Best other = {__uint_as_float(v.x), static_cast<int>(v.y)};
      if (better(other, best)) best = other;
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      Best other = {__shfl_xor_sync(~0u, best.value, o), __shfl_xor_sync(~0u, best.index, o)};
      if (better(other, best)) best = other;
    }
    if (me.lane == 0 && p.greedy) {
      p.tokens[b] = best.index;
      p.history[static_cast<int64_t>(b) * p.history_stride + p.state[1]] = best.index;
    }
  }
  consumers_sync();
  if (me.warp == 0 && me.lane == 0) {
    p.state[0] = static_cast<int>(round + 1);
    p.state[1] += 1;
#pragma unroll 1
    for (int b = 0; b < p.B; ++b) p.state[2 + b] += 1;
  }
}

template <typename T, int D, int SHIFT>
__global__ void __launch_bounds__(THREADS, 1) decode_step_kernel(const __grid_constant__ Step<T> p) {
  extern __shared__ __align__(128) char shared[];
  const Layout<T, D, SHIFT> at(p);
  int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  Ring ring{shared + at.slots, reinterpret_cast<uint64_t*>(shared + at.barriers),
            reinterpret_cast<uint64_t*>(shared + at.barriers) + p.slots, p.slots};
  Shares& mine = *reinterpret_cast<Shares*>(shared + at.shares);
  if (threadIdx.x == 0) {
    ring.init();
    mine.init(p, D, at.sum_bytes / 2);
  }
  LayerWeights<T>* table = reinterpret_cast<LayerWeights<T>*>(shared + at.table);
  for (int i = static_cast<int>(threadIdx.x); i < p.layer_count * static_cast<int>(sizeof(LayerWeights<T>) / 8);
       i += THREADS)
    reinterpret_cast<int64_t*>(table)[i] = reinterpret_cast<const int64_t*>(p.layers)[i];
  unsigned round = static_cast<unsigned>(*static_cast<volatile int*>(p.state));
  __syncthreads();
  if (warp >= CONSUMERS) {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
    if (warp > CONSUMERS) return;
    Producer producer{ring, p.in_flight};
    produce<T, D>(p, mine, producer);
  } else {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
#endif
    float* sums = reinterpret_cast<float*>(shared + at.sums);
    Consumer<T, SHIFT> me{p,
                          ring,
                          {},
                          shared + at.x + warp * p.x_chunks * (128 << SHIFT),
                          reinterpret_cast<float*>(shared + at.squares),
                          sums,
                          at.sum_bytes / 4,
                          0,
                          warp,
                          lane};
    consume<T, D, SHIFT>(p, me, *reinterpret_cast<AttentionScratch<D>*>(shared + at.scratch),
                         reinterpret_cast<float*>(shared + at.residual), reinterpret_cast<Best*>(shared + at.best),
                         mine, table, round);
  }
}

}  // namespace qwen_patch::cuda::decode
