// What a decode step is told: the model's weights, the session's buffers. Filled by decode_step.cu, read by the kernel.
#pragma once

#include "ring.cuh"

namespace qwen_patch::cuda::decode {

// One row of the table of pointers, in the order of ops/decode_step.py's LAYER_WEIGHTS. Biases and the norms of q and k
// are null where a family has none, the scales where the weights are T's.
template <typename T>
struct LayerWeights {
  const T* input_norm;
  const void *q, *k, *v;
  const T *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;
  const void* o;
  const T* post_norm;
  const void *gate, *up, *down;
  const float *q_scales, *k_scales, *v_scales, *o_scales, *gate_scales, *up_scales, *down_scales;
};

template <typename T>
struct Step {
  const LayerWeights<T>* layers;
  const T *embedding, *final_norm, *cos, *sin;
  Matrix lm_head;
  int layer_count, H, I, V, heads, kv_heads;
  float eps, inverse_H, scale;  // of the norms; 1 / H; of q.k, times log2(e)

  int B;     // rows of the batch
  T* cache;  // [layer, 2, B, kv_heads, capacity, D]
  int capacity;
  int64_t* tokens;   // [B]: in, the token to read; out, if greedy, the next one
  int64_t* history;  // [B, history_stride]: where the tokens chosen are kept
  int history_stride;
  int* state;  // {round, column of history, then B lengths: tokens in the cache}
  int greedy;
  const int* banned;  // {column, ids}: tokens that may not be chosen before that column of the history; -1 ends them
  T* logits;          // [B, V]

  unsigned *qkv, *attended, *hidden, *activation;  // exchanged words
  uint2 *parts, *part_weights, *best;
  int max_splits, split_keys;  // at most so many parts a context is cut into; keys a part has at least, where it can

  // shared memory
  int slots, in_flight, x_chunks, tile_group, route_count;
};

constexpr int MAX_BANNED = 8;

struct Span {
  int first, count;
};
// The share of n rows that this block has.
__device__ __forceinline__ Span share_of(int n) {
  int g = static_cast<int>(gridDim.x), b = static_cast<int>(blockIdx.x);
  int first = static_cast<int>(static_cast<int64_t>(n) * b / g),
      end = static_cast<int>(static_cast<int64_t>(n) * (b + 1) / g);
  return {first, end - first};
}

// This block's rows of one stage's weights, as octets of at most 8 rows: one matrix, or q, k and v one after the other,
// or gate and up in turns, so that a tile of two octets has both sides of silu(gate) * up.
struct Rows {
  Matrix a, b, c;
  Span span_a, span_b;  // that of c is b's
  int octets;
  bool paired;

  __device__ static Rows one(Matrix w, Span s) { return {w, w, w, s, {0, 0}, octets_of(s), false}; }
  __device__ static Rows pair(Matrix a, Matrix b, Span s) { return {a, b, b, s, s, 2 * octets_of(s), true}; }
  __device__ static Rows three(Matrix a, Span sa, Matrix b, Matrix c, Span sb) {
    return {a, b, c, sa, sb, octets_of(sa) + 2 * octets_of(sb), false};
  }
  __device__ static int octets_of(Span s) { return (s.count + 7) / 8; }

  __device__ Matrix weight(int matrix) const {
    return {matrix == 0   ? a.values
            : matrix == 1 ? b.values
                          : c.values,
            matrix == 0   ? a.scales
            : matrix == 1 ? b.scales
                          : c.scales};
  }
  // Octet i: which matrix, its first row there, how many rows.
  __device__ __forceinline__ void at(int i, int& matrix, int& row, int& n) const {
    int na = octets_of(span_a), nb = octets_of(span_b);
    if (paired) {
      matrix = i & 1;
      i >>= 1;
    } else {
      matrix = i < na ? 0 : i < na + nb ? 1 : 2;
      i -= matrix == 0 ? 0 : matrix == 1 ? na : na + nb;
    }
    row = (matrix == 0 ? span_a.first : span_b.first) + i * 8;
    n = min(8, (matrix == 0 ? span_a.count : span_b.count) - i * 8);
  }
};

// What this block has of every stage; computed once, because a division takes a stage's time.
struct Shares {
  Span q, kv, hidden, inner, vocabulary;
  int splits;                            // parts of the context
  int b, head, part;                     // this block's unit of attention; part = -1 where it has none
  int position, begin, end;              // of the new token; of the part's keys
  int banned_count, banned[MAX_BANNED];  // of this step
  int warps;                             // that have keys

  // How many parts: those that split_keys asks for, for the longest of the batch.
  template <typename T>
  __device__ void init(const Step<T>& p, int D) {
    q = share_of(p.heads * D), kv = share_of(p.kv_heads * D);
    hidden = share_of(p.H), inner = share_of(p.I), vocabulary = share_of(p.V);
    splits = 1;
#pragma unroll 1
    for (int i = 0; i < p.B; ++i)
      splits = max(splits, min(p.max_splits, (p.state[2 + i] + p.split_keys) / p.split_keys));
    banned_count = 0;
    if (p.state[1] < p.banned[0])
      while (banned_count < MAX_BANNED && p.banned[1 + banned_count] >= 0) {
        banned[banned_count] = p.banned[1 + banned_count];
        ++banned_count;
      }
    int unit = static_cast<int>(blockIdx.x);
    part = -1;
    if (unit >= p.B * p.kv_heads * splits) return;
    part = unit % splits, head = unit / splits % p.kv_heads, b = unit / splits / p.kv_heads;
    position = p.state[2 + b];
    int n = position + 1, each = ((n + splits - 1) / splits + 15) & ~15;
    begin = min(n, part * each), end = min(n, begin + each);
    warps = min(CONSUMERS, (end - begin + 15) / 16);
  }
};

}  // namespace qwen_patch::cuda::decode
