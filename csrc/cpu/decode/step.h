// One decode step of the whole model: what each thread does, stage after stage.
//
// Bytes: every weight once, the cache once; bound by memory. A stage hands its result on through caches: rows of the
// batch where a row must be seen whole (norms, and what makes an input of linears of it), 32 rows of weights elsewhere.
#pragma once

#include <vector>

#include "attention.h"
#include "linears.h"
#include "team.h"

namespace qwen_patch::cpu::decode {

// One row of the table of pointers, in the order of ops/decode_step.py's LAYER_WEIGHTS.
struct LayerWeights {
  const void *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o, *post_norm, *gate, *up, *down;
  const float *q_scales, *k_scales, *v_scales, *o_scales, *gate_scales, *up_scales, *down_scales;
};

struct Sizes {
  int64_t B, H, I, V, heads, kv_heads, D, capacity, layers;
  int64_t q() const { return heads * D; }
  int64_t kv() const { return kv_heads * D; }
  int64_t qkv() const { return q() + 2 * kv(); }
  int64_t group() const { return heads / kv_heads; }
};

// The loops of one element type, compiled in decode_step.cpp.
#define QP_DECLARE(T, TARGETS)                                                                        \
  void norm(const T* x, const T* weight, T* out, int64_t H, float eps);                               \
  void add_to(const float* y, T* residual, int64_t B, int64_t rows, int64_t H);                       \
  void silu_times(const float* gate, const float* up, T* out, int64_t B, int64_t rows, int64_t I);    \
  void attend(const Unit<T>& unit);                                                                   \
  void combine(const float* out, const float* top, const float* weight, int64_t parts, int64_t apart, \
               int64_t heads_apart, int64_t D, T* x);                                                 \
  int64_t best_of(const T* logits, int64_t V);
QP_FOR_EACH_TYPE(QP_DECLARE)
#undef QP_DECLARE

template <typename T>
struct Step : Sizes {
  const LayerWeights* table;
  const T *embedding, *final_norm, *cos, *sin;
  Matrix lm_head;
  float eps, scale;
  const int64_t* tokens;
  const int* lengths;  // of the cache, before the step
  T *cache, *logits;
  int64_t* next;  // [B]: the tokens chosen; null where none is
  const std::vector<int>& banned;

  int64_t parts;
  Linears<T> linears;
  Scratch<T> hidden, x, projected, activation;  // [B, H], [B, max(H, q)], [B, qkv], [B, I]
  Scratch<float> out, top, weight;              // of the parts of attention: [B, kv_heads, parts, group(, padded(D))]

  Step(const Sizes& sizes, ScalarType dtype, bool quantize_activations, const std::vector<int>& banned, int64_t parts)
      : Sizes(sizes),
        banned(banned),
        parts(parts),
        linears(B, std::max({H, I, q()}), dtype, quantize_activations),
        hidden(B * H),
        x(B * std::max(H, q())),
        projected(B * qkv()),
        activation(B * I),
        out(B * heads * parts * padded(D)),
        top(B * heads * parts),
        weight(B * heads * parts) {}

  const T* as(const void* p) const { return static_cast<const T*>(p); }

  // A thread's work.
  void run(Team& team) {
    Team::Member member(team);
    PackedBlock packed = linears.workspace();
    Scratch<float> y(2 * B * BLOCK), scratch(scratch_of(group(), D));
    auto multiply = [&](const Matrix& w, const T* input, int64_t block, float* to) {
      int64_t n0 = block * BLOCK, n = std::min(BLOCK, w.N - n0);
      linears.multiply(w, input, n0, n, packed, to);
      return n;
    };
    auto normed = [&](const T* norm_weight, const Matrix& w) {
      member.stage(B, [&](int64_t b) {
        norm(hidden.get() + b * H, norm_weight, x.get() + b * H, H, eps);
        if (linears.takes(w)) linears.take(w, x.get(), b);
      });
    };
    auto into_hidden = [&](const Matrix& w, const T* input) {
      member.stage(w.blocks(), [&](int64_t block) {
        int64_t n = multiply(w, input, block, y.get());
        add_to(y.get(), hidden.get() + block * BLOCK, B, n, H);
      });
    };

    member.stage(B, [&](int64_t b) {
      std::memcpy(hidden.get() + b * H, embedding + tokens[b] * H, static_cast<size_t>(H) * sizeof(T));
    });
    for (int64_t layer = 0; layer < layers; ++layer) {
      const LayerWeights& w = table[layer];
      Matrix q_proj{w.q, w.q_scales, q(), H}, k_proj{w.k, w.k_scales, kv(), H}, v_proj{w.v, w.v_scales, kv(), H},
          o_proj{w.o, w.o_scales, H, q()}, gate{w.gate, w.gate_scales, I, H}, up{w.up, w.up_scales, I, H},
          down{w.down, w.down_scales, H, I};

      normed(as(w.input_norm), q_proj);
      member.stage(q_proj.blocks() + 2 * k_proj.blocks(), [&](int64_t block) {
        int64_t k_block = block - q_proj.blocks(), v_block = k_block - k_proj.blocks();
        if (k_block < 0) return project(q_proj, w.q_bias, block, 0, packed, y.get());
        if (v_block < 0) return project(k_proj, w.k_bias, k_block, q(), packed, y.get());
        project(v_proj, w.v_bias, v_block, q() + kv(), packed, y.get());
      });
      member.stage(B * kv_heads * parts, [&](int64_t unit) { attend_part(w, layer, unit, scratch.get()); });
      member.stage(B, [&](int64_t b) {
        for (int64_t h = 0; h < heads; ++h) {
          int64_t at = (b * kv_heads + h / group()) * parts * group() + h % group();
          combine(out.get() + at * padded(D), top.get() + at, weight.get() + at, parts, group() * padded(D), group(), D,
                  x.get() + b * q() + h * D);
        }
        if (linears.takes(o_proj)) linears.take(o_proj, x.get(), b);
      });
      into_hidden(o_proj, x.get());

      normed(as(w.post_norm), gate);
      member.stage(gate.blocks(), [&](int64_t block) {
        float* second = y.get() + B * BLOCK;
        int64_t n = multiply(gate, x.get(), block, y.get());
        multiply(up, x.get(), block, second);
        silu_times(y.get(), second, activation.get() + block * BLOCK, B, n, I);
      });
      if (linears.takes(down)) member.stage(B, [&](int64_t b) { linears.take(down, activation.get(), b); });
      into_hidden(down, activation.get());
    }
    normed(final_norm, lm_head);
    member.stage(lm_head.blocks(), [&](int64_t block) {
      int64_t n = multiply(lm_head, x.get(), block, y.get());
      finish(y.get(), nullptr, logits + block * BLOCK, B, n, V);
    });
    if (next) member.stage(B, [&](int64_t b) { next[b] = best_but_banned(logits + b * V); });
  }

  void project(const Matrix& w, const void* bias, int64_t block, int64_t column, PackedBlock& packed, float* y) {
    int64_t n0 = block * BLOCK, n = std::min(BLOCK, w.N - n0);
    float added[BLOCK];
    linears.multiply(w, x.get(), n0, n, packed, y);
    if (bias) expand(as(bias) + n0, added, 1, n, n);
    finish(y, bias ? added : nullptr, projected.get() + column + n0, B, n, qkv());
  }

  void attend_part(const LayerWeights& w, int64_t layer, int64_t unit, float* scratch) {
    int64_t part = unit % parts, head = unit / parts % kv_heads, b = unit / parts / kv_heads;
    int64_t position = lengths[b], keys = position + 1, each = (keys + parts - 1) / parts;
    const T* row = projected.get() + b * qkv();
    T* plane = cache + ((layer * 2 * B + b) * kv_heads + head) * capacity * D;
    Unit<T> u;
    u.q = row + head * group() * D, u.k = row + q() + head * D, u.v = u.k + kv();
    u.q_norm = as(w.q_norm), u.k_norm = as(w.k_norm);
    u.cos = cos + position * D, u.sin = sin + position * D;
    u.keys = plane, u.values = plane + B * kv_heads * capacity * D;
    u.group = group(), u.D = D;
    u.begin = std::min(keys, part * each), u.end = std::min(keys, u.begin + each), u.position = position;
    u.eps = eps, u.scale = scale;
    u.out = out.get() + unit * group() * padded(D), u.top = top.get() + unit * group();
    u.weight = weight.get() + unit * group();
    u.scratch = scratch;
    attend(u);
  }

  // As torch.argmax: a NaN is the largest, the lower index wins a tie. The logits of banned tokens are -inf meanwhile.
  int64_t best_but_banned(T* row) const {
    std::vector<T> kept;
    const float lowest = -INFINITY;
    for (int id : banned) {
      kept.push_back(row[id]);
      finish(&lowest, nullptr, row + id, 1, 1, V);
    }
    int64_t best = best_of(row, V);
    for (size_t i = banned.size(); i-- > 0;) row[banned[i]] = kept[i];
    return best;
  }
};

}  // namespace qwen_patch::cpu::decode
