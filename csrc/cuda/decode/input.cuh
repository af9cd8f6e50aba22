// Where the input of a stage of linears comes from: words that other blocks have put.
#pragma once

#include "exchange.cuh"

namespace qwen_patch::cuda::decode {

struct FromWords {
  const unsigned* words;
  unsigned epoch;

  // Waits for N times 4 values; number i is at[i], where it is needed, and 0 else.
  template <int N>
  __device__ __forceinline__ void fetch(uint2 (&x)[N], const int (&at)[N], const bool (&needed)[N]) const {
    const unsigned flag = epoch << 16;
    uint4 v[N];
    unsigned different;
#pragma unroll 1
    do {
      different = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = look4(words + at[i], needed[i], epoch);
#pragma unroll
      for (int i = 0; i < N; ++i) different |= (v[i].x ^ flag) | (v[i].y ^ flag) | (v[i].z ^ flag) | (v[i].w ^ flag);
    } while (different >> 16);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = values(v[i]);
  }
};

}  // namespace qwen_patch::cuda::decode
