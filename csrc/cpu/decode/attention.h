// Attention of one new token over its cache. A unit is (row of the batch, key-value head, part of the context); it
// takes all the query heads of that key-value head, so that keys and values are read once.
//
// Bytes a layer: 2 * kv_heads * D an element of the cache; bound by those at long contexts. 8 keys at a time are made
// floats, in L1, for all query heads; softmax in float32 over KEYS at a time, with the flash-attention recurrence
// between them (Dao et al. 2022, algorithm 1). `combine` puts the parts together.
#pragma once

#include <cmath>

#include "../linear.h"
#include "../rms_norm_rows.h"

namespace qwen_patch::cpu::decode {

constexpr int64_t KEYS = 64;       // whose scores are kept
constexpr int64_t MAX_PARTS = 64;  // of a context

constexpr int64_t padded(int64_t D) { return (D + LANES - 1) / LANES * LANES; }

template <typename T>
struct Unit {
  const T *q, *k, *v;            // of the new token, as the projections gave them: [group, D], [D], [D]
  const T *q_norm, *k_norm;      // [D], null where the family has none
  const T *cos, *sin;            // [D], of its position
  T *keys, *values;              // [capacity, D]
  int64_t group, D;              // query heads
  int64_t begin, end, position;  // of the part's keys; of the new token
  float eps, scale;
  float *out, *top, *weight;  // [group, padded(D)], [group], [group]: sum of e^(score - top) * value, and without value
  float* scratch;             // scratch_of(group, D)
};
constexpr int64_t scratch_of(int64_t group, int64_t D) { return (group + LANES + 2) * padded(D) + group * KEYS; }

// Lane i is the sum of a[i].
QP_INLINE F32x8 sums_of(const F32x8* a) {
  F32x8 b[4], c[2];
  for (int i = 0; i < 4; ++i) {
    F32x8 x = a[2 * i], y = a[2 * i + 1];
    b[i] = __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 2; ++i) {
    F32x8 x = b[2 * i], y = b[2 * i + 1];
    c[i] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// Norm, where there is one, and rotary embedding of one head, at the stock model's roundings; x and out may be one.
template <typename T>
QP_INLINE void rotate(const T* x, const T* norm, const T* cos, const T* sin, int64_t D, float eps, T* normed, T* out) {
  if (norm) {
    rms_norm_rows<T, false>(x, nullptr, norm, normed, nullptr, 1, D, eps);
    x = normed;
  }
  int64_t half = D / 2;
  for_vectors(half, [&](int64_t i, int64_t n, int) QP_LAMBDA {
    F32x8 low = load(x + i, n), high = load(x + half + i, n);
    F32x8 a = round_to<T>(low * load(cos + i, n)) + round_to<T>(-high * load(sin + i, n));
    F32x8 b = round_to<T>(high * load(cos + half + i, n)) + round_to<T>(low * load(sin + half + i, n));
    store(out + i, a, n);
    store(out + half + i, b, n);
  });
}

template <typename T>
QP_INLINE void attend_unit(const Unit<T>& u) {
  int64_t D = u.D, row = padded(D);
  float *queries = u.scratch, *block = queries + u.group * row, *scores = block + LANES * row;
  T* heads = reinterpret_cast<T*>(scores + u.group * KEYS);  // two
  for (int64_t g = 0; g < u.group; ++g) {
    rotate(u.q + g * D, u.q_norm, u.cos, u.sin, D, u.eps, heads, heads + D);
    expand_rows(heads + D, queries + g * row, 1, D, row);
    u.top[g] = -INFINITY;
    u.weight[g] = 0.f;
  }
  std::fill(u.out, u.out + u.group * row, 0.f);
  if (u.begin <= u.position && u.position < u.end) {
    rotate(u.k, u.k_norm, u.cos, u.sin, D, u.eps, heads, u.keys + u.position * D);
    std::memcpy(u.values + u.position * D, u.v, static_cast<size_t>(D) * sizeof(T));
  }
  for (int64_t first = u.begin; first < u.end; first += KEYS) {
    int64_t count = std::min(KEYS, u.end - first);
    for (int64_t k = 0; k < count; k += LANES) {
      int64_t n = std::min(LANES, count - k);
      expand_rows(u.keys + (first + k) * D, block, n, D, row);
      std::fill(block + n * row, block + LANES * row, 0.f);
      for (int64_t g = 0; g < u.group; ++g) {
        F32x8 dots[LANES] = {};
        for (int64_t d = 0; d < row; d += LANES) {
          F32x8 q = load(queries + g * row + d, LANES);
          for (int64_t j = 0; j < LANES; ++j) dots[j] += q * load(block + j * row + d, LANES);
        }
        F32x8 score = sums_of(dots) * u.scale;
        for (int64_t j = n; j < LANES; ++j) score[j] = -INFINITY;
        store(scores + g * KEYS + k, score, LANES);
      }
    }
    for (int64_t g = 0; g < u.group; ++g) {
      float *score = scores + g * KEYS, top = u.top[g];
      for (int64_t k = 0; k < count; ++k) top = score[k] > top ? score[k] : top;
      F32x8 sum = {};
      for (int64_t k = 0; k < count; k += LANES) {
        F32x8 p = exponential(load(score + k, LANES) - top);
        sum += store(score + k, p, LANES);
      }
      float keep = exponential(F32x8{} + (u.top[g] - top))[0];
      u.top[g] = top;
      u.weight[g] = u.weight[g] * keep + horizontal_sum(sum);
      for (int64_t d = 0; d < row; d += LANES)
        store(u.out + g * row + d, load(u.out + g * row + d, LANES) * keep, LANES);
    }
    for (int64_t k = 0; k < count; k += LANES) {
      int64_t n = std::min(LANES, count - k);
      expand_rows(u.values + (first + k) * D, block, n, D, row);
      std::fill(block + n * row, block + LANES * row, 0.f);  // whose p is next to nothing
      for (int64_t g = 0; g < u.group; ++g) {
        const float* p = scores + g * KEYS + k;
        for (int64_t d = 0; d < row; d += LANES) {
          F32x8 sum = load(u.out + g * row + d, LANES);
          for (int64_t j = 0; j < LANES; ++j) sum += p[j] * load(block + j * row + d, LANES);
          store(u.out + g * row + d, sum, LANES);
        }
      }
    }
  }
}

// The parts of one head, `apart` floats (and `heads_apart` heads) from each other, as T: x [D].
template <typename T>
QP_INLINE void combine_parts(const float* out, const float* top, const float* weight, int64_t parts, int64_t apart,
                             int64_t heads_apart, int64_t D, T* x) {
  float highest = -INFINITY, total = 0.f, share[MAX_PARTS];
  for (int64_t i = 0; i < parts; ++i) highest = std::max(highest, top[i * heads_apart]);
  for (int64_t i = 0; i < parts; ++i) {
    share[i] = exponential(F32x8{} + (top[i * heads_apart] - highest))[0];
    total += share[i] * weight[i * heads_apart];
  }
  for_vectors(D, [&](int64_t d, int64_t n, int) QP_LAMBDA {
    F32x8 sum = {};
    for (int64_t i = 0; i < parts; ++i) sum += share[i] * load(out + i * apart + d, n);
    store(x + d, sum / total, n);
  });
}

}  // namespace qwen_patch::cpu::decode
