// Where the input of a stage of linears comes from: words that other blocks have put.
#pragma once

#include "exchange.cuh"

namespace qwen_patch::cuda::decode {

// Asks for N vectors of words until all have come: differ(v) has a bit set from 16 on while v has not.
template <int N, typename Look, typename Differ>
__device__ __forceinline__ void wait_for(uint4 (&v)[N], Look&& look, Differ&& differ) {
  unsigned different;
#pragma unroll 1
  do {
    different = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = look(i);
#pragma unroll
    for (int i = 0; i < N; ++i) different |= differ(v[i]);
  } while (different >> 16);
}

// fetch() waits for N times 4 values; number i is of row b[i] from column k[i] on.
// There are no conditions in it: who has nothing to ask for asks for something that others need. A register that is set
// on a condition only is kept from one layer to the next, and code that is jumped over has to be fetched all the same.
struct FromWords {
  const unsigned* words;
  int K;
  unsigned epoch;
  template <int N>
  __device__ __forceinline__ void fetch(uint2 (&x)[N], const int (&b)[N], const int (&k)[N]) const {
    const unsigned flag = epoch << 16;
    uint4 v[N];
    wait_for(
        v, [&](int i) { return look4(words + b[i] * K + k[i]); },
        [&](const uint4& w) { return (w.x ^ flag) | (w.y ^ flag) | (w.z ^ flag) | (w.w ^ flag); });
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = values(v[i]);
  }
};

}  // namespace qwen_patch::cuda::decode
