// Rotary embedding of queries and keys, after a norm of each head where there is one, and the write into the cache.
//
// Bytes a token of h heads in all (queries, keys, values) of D elements of size s: 2hDs (1 read, 1 write), and cos, sin
// and the norms' weights, which stay in cache. About 3 flops an element, 7 with the norm: bound by memory, and for
// short prompts by latency. Mapping: a warp owns one head of one token, four of a token's heads are a block. A lane
// holds a pack of N elements of the head's first half and the pack at the same place in the second half, which are each
// other's partners in the rotation: no element crosses lanes, and only the norm's sum does. Limits: N a divisor of D /
// 2, pointers and strides aligned to N elements, D <= 64 N. Anything else, up to D = 256, goes one element an access,
// four times.
#pragma once

#include "common.cuh"

namespace qwen_patch::cuda {

template <typename T>
struct CacheSide {  // [B, kv_heads, capacity, D]
  T* at;
  int64_t row, head, slot;  // strides
};

template <typename T>
struct RopeKvWrite {
  const T *q, *k, *v, *q_norm, *k_norm, *cos, *sin;
  int64_t q_pitch, k_pitch, v_pitch;  // from one token to the next
  const int64_t* first;
  T* out;
  CacheSide<T> keys, values;
  int64_t limit;   // positions that the cache and the tables have
  int64_t tokens;  // a row
  int heads, kv_heads, half;
  float eps;
};

// Not left to the compiler, which would make one fused multiply-add of a float32 product and sum: the stock model
// rounds each.
template <typename T>
__device__ __forceinline__ T times(T a, T b) {
  return from_float<T>(__fmul_rn(to_float(a), to_float(b)));
}
template <typename T>
__device__ __forceinline__ T plus(T a, T b) {
  return from_float<T>(__fadd_rn(to_float(a), to_float(b)));
}
template <typename T>
__device__ __forceinline__ T minus(T a, T b) {
  return from_float<T>(__fsub_rn(to_float(a), to_float(b)));
}

constexpr int ROPE_WARPS = 4;

template <typename T, int N, int ROUNDS>
__global__ void __launch_bounds__(32 * ROPE_WARPS) rope_kv_write_packs(RopeKvWrite<T> p) {
  using P = Pack<T, N>;
  wait_for_previous();
  int lane = threadIdx.x & 31, head = blockIdx.y * ROPE_WARPS + (threadIdx.x >> 5), packs = p.half / N;
  int64_t token = blockIdx.x, row = token / p.tokens;
  if (head >= p.heads + 2 * p.kv_heads) return;
  bool is_query = head < p.heads, is_value = head >= p.heads + p.kv_heads;
  int own = is_query ? head : is_value ? head - p.heads - p.kv_heads : head - p.heads;  // its number among its kind
  const T* source = is_query ? p.q + token * p.q_pitch : is_value ? p.v + token * p.v_pitch : p.k + token * p.k_pitch;
  source += own * 2 * p.half;

  P a[ROUNDS], b[ROUNDS];  // of the first and the second half
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    int at = min(lane + 32 * i, packs - 1);
    a[i] = reinterpret_cast<const P*>(source)[at];
    b[i] = reinterpret_cast<const P*>(source + p.half)[at];
  }

  int64_t position = p.first[row] + (token - row * p.tokens);
  bool known = position >= 0 && position < p.limit;
  if (!known && !is_query) return;
  const CacheSide<T>& side = is_value ? p.values : p.keys;
  T* target = is_query ? p.out + (token * p.heads + own) * 2 * p.half
                       : side.at + row * side.row + own * side.head + position * side.slot;

  const T* weight = is_query ? p.q_norm : is_value ? nullptr : p.k_norm;
  if (weight != nullptr) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      float s = 0.f;
#pragma unroll
      for (int j = 0; j < N; ++j)
        s += to_float(a[i].v[j]) * to_float(a[i].v[j]) + to_float(b[i].v[j]) * to_float(b[i].v[j]);
      squares += lane + 32 * i < packs ? s : 0.f;
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    float scale = rsqrtf(squares / static_cast<float>(2 * p.half) + p.eps);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      int at = min(lane + 32 * i, packs - 1);
      P wa = reinterpret_cast<const P*>(weight)[at], wb = reinterpret_cast<const P*>(weight + p.half)[at];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        a[i].v[j] = times(wa.v[j], from_float<T>(to_float(a[i].v[j]) * scale));
        b[i].v[j] = times(wb.v[j], from_float<T>(to_float(b[i].v[j]) * scale));
      }
    }
  }

#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    int at = lane + 32 * i;
    if (at >= packs) break;
    if (!known) {
      a[i] = b[i] = P{};
    } else if (!is_value) {
      const T *cos = p.cos + position * 2 * p.half, *sin = p.sin + position * 2 * p.half;
      P ca = reinterpret_cast<const P*>(cos)[at], cb = reinterpret_cast<const P*>(cos + p.half)[at];
      P sa = reinterpret_cast<const P*>(sin)[at], sb = reinterpret_cast<const P*>(sin + p.half)[at];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        T x = a[i].v[j], y = b[i].v[j];
        a[i].v[j] = minus(times(x, ca.v[j]), times(y, sa.v[j]));
        b[i].v[j] = plus(times(y, cb.v[j]), times(x, sb.v[j]));
      }
    }
    reinterpret_cast<P*>(target)[at] = a[i];
    reinterpret_cast<P*>(target + p.half)[at] = b[i];
  }
}

template <typename T>
void launch_rope_kv_write(const RopeKvWrite<T>& p, int64_t all_tokens, cudaStream_t stream) {
  const T* pointers[] = {p.q, p.k, p.v, p.q_norm, p.k_norm, p.cos, p.sin, p.out, p.keys.at, p.values.at};
  int64_t strides[] = {p.keys.row,    p.keys.head, p.keys.slot, p.values.row, p.values.head,
                       p.values.slot, p.q_pitch,   p.k_pitch,   p.v_pitch};
  auto fits = [&](int n) {
    bool fit = p.half <= 32 * n && p.half % n == 0;
    for (const T* at : pointers) fit = fit && reinterpret_cast<uintptr_t>(at) % (n * sizeof(T)) == 0;
    for (int64_t stride : strides) fit = fit && stride % n == 0;
    return fit;
  };
  auto kernel = fits(1)   ? rope_kv_write_packs<T, 1, 1>
                : fits(2) ? rope_kv_write_packs<T, 2, 1>
                : fits(4) ? rope_kv_write_packs<T, 4, 1>
                          : rope_kv_write_packs<T, 1, 4>;
  int heads = p.heads + 2 * p.kv_heads;
  dim3 grid(static_cast<unsigned>(all_tokens), static_cast<unsigned>((heads + ROPE_WARPS - 1) / ROPE_WARPS));
  launch("rope_kv_write", kernel, grid, 32 * ROPE_WARPS, stream, p);
}

}  // namespace qwen_patch::cuda
