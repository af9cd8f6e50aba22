// One decode step of the whole model as one kernel: a block a multiprocessor, all of them on the device at once.
//
// W: what the layers' weights are, T, int8_t or Code (products.cuh). Bytes: every weight once, the cache once. 6
// exchanges a layer (q/k/v; parts of attention, among the blocks of a head; attention; hidden state after it;
// activation; hidden state after the MLP), one before them for the embedding, one after them for the choice of the
// token. 8 warps compute, one fills the ring of weights (ring.cuh). Each block owns the same rows of the hidden state
// in every layer, and keeps them as residual.
#pragma once

#include "../silu_mul_kernel.cuh"
#include "attention.cuh"

namespace qwen_patch::cuda::decode {

// The embedding, then a layer's: q/k/v, parts of attention, attention, hidden state, activation, hidden state; then the
// choice.
constexpr int EXCHANGES_A_LAYER = 6;
constexpr int MAX_BATCH = 8;
constexpr int THREADS = CONSUMER_THREADS + 32;
// Bytes of the head that a multiprocessor waits for at least: it is one long read with nothing to exchange in between,
// which what is best for a small model's layers would not keep going.
constexpr int HEAD_IN_FLIGHT = 3 * 8 * 2 * CHUNK;

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
// The best of the lanes that are a multiple of `apart` lanes from this one.
template <int APART>
__device__ __forceinline__ Best best_of_lanes(Best best) {
#pragma unroll
  for (int o = 16; o >= APART; o >>= 1) {
    Best other = {__shfl_xor_sync(~0u, best.value, o), __shfl_xor_sync(~0u, best.index, o)};
    if (better(other, best)) best = other;
  }
  return best;
}

// Where things lie in shared memory, in bytes. The host asks for `total`. What has a fixed size comes first: its place
// is a constant then, where else it takes a register through the whole kernel (over int8 with a head of 128 that was
// more than there are).
template <typename T, typename W, int D, int SHIFT>
struct Layout {
  int scratch, squares, residual, best, shares, sums, sum_bytes, barriers, routes, table, x, x_bytes, slots, total;
  __host__ __device__ Layout(const Step<T>& p) {
    int batch = 1 << SHIFT, at = 0;
    auto take = [&](int bytes) {
      int here = at;
      at += (bytes + 127) / 128 * 128;
      return here;
    };
    scratch = take(static_cast<int>(sizeof(AttentionScratch<D>)));
    squares = take(MAX_BATCH * CONSUMERS * 4);
    residual = take(MAX_TILES * 16 * batch * 4);
    best = take(CONSUMERS * MAX_BATCH * 8);
    shares = take(static_cast<int>(sizeof(Shares)));
    sum_bytes = p.tile_group * 16 * batch * SUM_PITCH * 4;
    sums = take(2 * sum_bytes);
    barriers = take(2 * 8 * p.slots);
    routes = take(p.route_count * 4);
    table = take(p.layer_count * static_cast<int>(sizeof(LayerWeights<T>)));
    x = take(x_bytes = p.x_chunks * batch * CONSUMERS * X_PITCH<W> + 512);  // 512: for the pitch of attention's results
    slots = take(p.slots * SLOT_BYTES<W>);
    total = at;
  }
};

template <typename T>
__device__ __forceinline__ Rows qkv_rows(const LayerWeights<T>& w, const Shares& mine) {
  return Rows::three({w.q, w.q_scales}, mine.q, {w.k, w.k_scales}, {w.v, w.v_scales}, mine.kv);
}

// f of a W where the head is int8 as the layers are, of a T else.
template <typename T, typename W, typename F>
__device__ __forceinline__ void with_type_of_head(const Step<T>& p, F&& f) {
  if constexpr (sizeof(W) == 1)
    if (p.lm_head.scales != nullptr) return f(W{});
  f(T{});
}

// Brings into L2 what the attention of a layer reads first, by the warp that fills the ring, which is ahead of the
// others: the first keys and values of each warp, the norms of q and k.
template <typename T, int D>
__device__ __forceinline__ void attention_soon(const Step<T>& p, const LayerWeights<T>& w, const Shares& mine,
                                               int layer) {
  constexpr int LINE = 128 / static_cast<int>(sizeof(T));
  if (mine.part < 0) return;
  int64_t plane = static_cast<int64_t>(p.capacity) * D;
  const T* keys = p.cache + ((static_cast<int64_t>(layer) * 2 * p.B + mine.b) * p.kv_heads + mine.head) * plane +
                  static_cast<int64_t>(mine.begin) * D;
  int count = min(mine.end - mine.begin, 16 * CONSUMERS) * D, lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll 1
  for (int i = lane * LINE; i < count; i += 32 * LINE) {
    prefetch_l2(keys + i);
    prefetch_l2(keys + static_cast<int64_t>(p.B) * p.kv_heads * plane + i);
  }
  if (w.q_norm && lane * LINE < D) prefetch_l2(w.q_norm + lane * LINE), prefetch_l2(w.k_norm + lane * LINE);
}

template <typename T, typename W, int D>
__device__ void produce(const Step<T>& p, const Shares& mine, Producer<W>& to) {
  // In the order of Consumer::normed (all chunks of a tile) and of Consumer::phases (those of a phase, tile after
  // tile).
  auto all = [&](auto type, const Rows& rows, int K, int phase) {
    int chunks = chunks_of(K);
#pragma unroll 1
    for (int first = 0; first < chunks; first += phase)
#pragma unroll 1
      for (int tile = 0; 2 * tile < rows.octets; ++tile)
#pragma unroll 1
        for (int chunk = first; chunk < min(first + phase, chunks); chunk += SLOT_CHUNKS<decltype(type)>)
#pragma unroll 1
          for (int octet = 2 * tile; octet < min(2 * tile + 2, rows.octets); ++octet) {
            int matrix, row, n;
            rows.at(octet, matrix, row, n);
            to.template octet<decltype(type)>(rows.weight(matrix), row, n, K, chunk * CHUNK,
                                              min(K, (first + phase) * CHUNK));
          }
  };
  constexpr int WHOLE = 1 << 16;
#pragma unroll 1
  for (int layer = 0; layer < p.layer_count; ++layer) {
    LayerWeights<T> w = p.layers[layer];
    if (p.B == 1) attention_soon<T, D>(p, w, mine, layer);  // of more rows it took 2% longer so
#pragma unroll 1
    for (int stage = 0; stage < 4; ++stage) {  // a loop, so that the code of an octet is there once
      Rows rows = qkv_rows(w, mine);
      if (stage == 1) rows = Rows::one({w.o, w.o_scales}, mine.hidden);
      if (stage == 2) rows = Rows::pair({w.gate, w.gate_scales}, {w.up, w.up_scales}, mine.inner);
      if (stage == 3) rows = Rows::one({w.down, w.down_scales}, mine.hidden);
      all(W{}, rows, stage == 1 ? p.heads * D : stage == 3 ? p.I : p.H, stage & 1 ? p.x_chunks : WHOLE);
    }
  }
#if __CUDA_ARCH__ >= 900
  // Bulk copies of a 16-bit head go where the scales of int8 layers have been, which were not bulk copies.
  if constexpr (sizeof(W) == 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  with_type_of_head<T, W>(p, [&](auto type) {
    using V = decltype(type);
    to.let_fly(HEAD_IN_FLIGHT / (8 * static_cast<int>(sizeof(V)) * min(p.H, SLOT_CHUNKS<V> * CHUNK)));
    all(type, Rows::one(p.lm_head, mine.vocabulary), p.H, WHOLE);
  });
}

// What the warps of a block share, in shared memory.
template <typename T, int D>
struct Block {
  Shares* shares;
  LayerWeights<T>* table;
  // Of each row of this block's q, k and v: its place in the exchange, with the matrix above bit 28; or -1.
  int* routes;
  AttentionScratch<D>* scratch;
  float *partial, *residual;  // of attention's warps; [row of hidden][row of the batch]
  int partial_floats;
  Best* best;  // [warp][row of the batch]
};
constexpr int MATRIX = 28;

template <typename T, typename W, int D, int SHIFT>
__device__ __forceinline__ void consume(const Step<T>& p, Consumer<T, W, SHIFT>& me, const Block<T, D>& block,
                                        unsigned round) {
  const Shares& mine = *block.shares;
  float* residual = block.residual;
  const int exchanges = EXCHANGES_A_LAYER * p.layer_count + 2;
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
    if (b >= p.B) continue;
    T x = p.embedding[p.tokens[b] * p.H + hidden.first + row];
    residual[i] = to_float(x);
    put(p.hidden + b * p.H + hidden.first + row, x, epoch(0));
  }
  const int qkv_octets = qkv_rows(block.table[0], mine).octets;
#pragma unroll 1
  for (int i = me.warp * 32 + me.lane; i < p.route_count; i += CONSUMER_THREADS) {
    int matrix = 0, first = 0, n = 0;
    if (i < qkv_octets * 8) qkv_rows(block.table[0], mine).at(i >> 3, matrix, first, n);
    int place = first + (i & 7) + (matrix == 0 ? 0 : matrix == 1 ? q_size : q_size + kv_size);
    block.routes[i] = (i & 7) < n ? place | matrix << MATRIX : -1;
  }
  consumers_sync();

#pragma unroll 1
  for (int layer = 0; layer < p.layer_count; ++layer) {
    const LayerWeights<T>& w = block.table[layer];
    int exchange = EXCHANGES_A_LAYER * layer + 1;
    me.template normed<W>(FromWords{p.hidden, epoch(exchange - 1)}, w.input_norm, qkv_octets, p.H,
                          [&](int tile, int in_group, int row, int b) {
                            int route = block.routes[tile * 16 + row];
                            if (route < 0) return;
                            int at = route & ((1 << MATRIX) - 1), matrix = route >> MATRIX;
                            float y = me.sum(in_group, row, b);
                            if (const T* bias = matrix == 0 ? w.q_bias : matrix == 1 ? w.k_bias : w.v_bias)
                              y += to_float(bias[at - (matrix == 0 ? 0 : matrix == 1 ? q_size : q_size + kv_size)]);
                            put(p.qkv + b * qkv_size + at, from_float<T>(y), epoch(exchange));
                          });

    attention<T, W, D, SHIFT>(p, w, me, *block.scratch, block.partial, block.partial_floats, mine, layer,
                              epoch(exchange), epoch(exchange + 1), epoch(exchange + 2));

    me.phases(FromWords{p.attended, epoch(exchange + 2)}, Rows::octets_of(hidden), q_size,
              into_residual(epoch(exchange + 3)));

    me.template normed<W>(
        FromWords{p.hidden, epoch(exchange + 3)}, w.post_norm, 2 * Rows::octets_of(inner), p.H,
        [&](int tile, int in_group, int row, int b) {
          int local = tile * 8 + row;
          if (row >= 8 || local >= inner.count) return;
          T gate = from_float<T>(me.sum(in_group, row, b)), up = from_float<T>(me.sum(in_group, row + 8, b));
          put(p.activation + b * p.I + inner.first + local, silu_mul_one(gate, up), epoch(exchange + 4));
        });

    me.phases(FromWords{p.activation, epoch(exchange + 4)}, Rows::octets_of(hidden), p.I,
              into_residual(epoch(exchange + 5)));
  }

  Best best = {-INFINITY, 0x7fffffff};
  auto logit_of = [&](int tile, int in_group, int row, int b) {
    int local = tile * 16 + row;
    if (local >= vocabulary.count) return;
    Best logit = {rounded<T>(me.sum(in_group, row, b)), vocabulary.first + local};
    p.logits[static_cast<int64_t>(b) * p.V + logit.index] = from_float<T>(logit.value);
    for (int i = 0; i < mine.banned_count; ++i)
      if (mine.banned[i] == logit.index) logit.value = -INFINITY;
    if (better(logit, best)) best = logit;
  };
  with_type_of_head<T, W>(p, [&](auto type) {
    me.template normed<decltype(type)>(FromWords{p.hidden, epoch(exchanges - 2)}, p.final_norm,
                                       Rows::octets_of(vocabulary), p.H, logit_of);
  });

  // A thread has met one row of the batch only: the threads are a multiple of it.
  best = best_of_lanes<me.ROOM>(best);
  Best* block_best = block.best;
  if (me.lane < p.B) block_best[me.warp * MAX_BATCH + me.lane] = best;
  consumers_sync();
  unsigned last = epoch(exchanges - 1);
  if (me.warp == 0 && me.lane < p.B) {
#pragma unroll 1
    for (int i = 1; i < CONSUMERS; ++i)
      if (better(block_best[i * MAX_BATCH + me.lane], best)) best = block_best[i * MAX_BATCH + me.lane];
    put64(p.best + blockIdx.x * MAX_BATCH + me.lane,
          make_uint2(best.index, bits_of(from_float<T>(best.value)) | last << 16));  // a logit is a T already
  }
  if (blockIdx.x != 0) return;

  // Block 0 chooses, and moves the session on: every block has read its state by now, since all have sent their best.
  if (me.warp < p.B) {
    int b = me.warp;
    best = {-INFINITY, 0x7fffffff};
#pragma unroll 1
    for (int i = me.lane; i < static_cast<int>(gridDim.x); i += 32) {
      uint2 v;
      do v = look64(p.best + i * MAX_BATCH + b);
      while (!arrived(v.y, last));
      Best other = {to_float(value_of<T>(v.y & 0xffff)), static_cast<int>(v.x)};
      if (better(other, best)) best = other;
    }
    best = best_of_lanes<1>(best);
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

template <typename T, typename W, int D, int SHIFT>
__global__ void __launch_bounds__(THREADS, 1) decode_step_kernel(const __grid_constant__ Step<T> p) {
  extern __shared__ __align__(128) char shared[];
  const Layout<T, W, D, SHIFT> at(p);
  int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  Ring<W> ring{{shared_address(shared + at.barriers), p.slots}, shared_address(shared + at.slots)};
  Block<T, D> block{reinterpret_cast<Shares*>(shared + at.shares),
                    reinterpret_cast<LayerWeights<T>*>(shared + at.table),
                    reinterpret_cast<int*>(shared + at.routes),
                    reinterpret_cast<AttentionScratch<D>*>(shared + at.scratch),
                    reinterpret_cast<float*>(shared + at.x),
                    reinterpret_cast<float*>(shared + at.residual),
                    at.x_bytes / 4,
                    reinterpret_cast<Best*>(shared + at.best)};
  if (threadIdx.x == 0) {
    ring.init();
    block.shares->init(p, D);
  }
  for (int i = static_cast<int>(threadIdx.x); i < p.layer_count * static_cast<int>(sizeof(LayerWeights<T>) / 8);
       i += THREADS)
    reinterpret_cast<int64_t*>(block.table)[i] = reinterpret_cast<const int64_t*>(p.layers)[i];
  unsigned round = static_cast<unsigned>(*static_cast<volatile int*>(p.state));
  __syncthreads();
  if (warp == CONSUMERS) {
    Producer<W> producer{ring, p.in_flight};
    produce<T, W, D>(p, *block.shares, producer);
    return;
  }
  Consumer<T, W, SHIFT> me{p,
                           ring,
                           shared_address(shared + at.x) + warp * p.x_chunks * (X_PITCH<W> << SHIFT),
                           reinterpret_cast<float*>(shared + at.squares),
                           reinterpret_cast<float*>(shared + at.sums),
                           at.sum_bytes / 4,
                           warp,
                           lane};
  consume<T, W, D, SHIFT>(p, me, block, round);
}

}  // namespace qwen_patch::cuda::decode
