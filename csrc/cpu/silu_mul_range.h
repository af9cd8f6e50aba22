// silu(gate) * up over a range of elements: 2 reads and 1 write an element, about 25 flops; bound by memory where
// the vectors are wide, by the exponential where they are not.
#pragma once

#include "simd.h"

namespace qwen_patch::cpu {

template <typename T>
QP_INLINE void silu_mul_range(const T* gate, const T* up, T* out, int64_t n) {
  for_vectors(n, [&](int64_t i, int64_t m, int) QP_LAMBDA {
    F32x8 g = load(gate + i, m);
    store(out + i, round_to<T>(g / one_plus_exp(-g)) * load(up + i, m), m);
  });
}

}  // namespace qwen_patch::cpu
