// A ring of slots in shared memory that one side fills and another empties, across whatever borders they like: two
// mbarriers a slot, and where each side is.
#pragma once

#include "ptx.cuh"

namespace qwen_patch::cuda {

struct Slots {
  unsigned barriers;  // shared address: of those that are full, then of those that are empty
  int count;

  __device__ __forceinline__ unsigned full(int i) const { return barriers + 8 * i; }
  __device__ __forceinline__ unsigned empty(int i) const { return barriers + 8 * (count + i); }

  // By one thread, before the block's first barrier. How many arrivals make a slot full, and empty.
  __device__ __forceinline__ void init(int filling, int emptying) const {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      barrier_init(full(i), filling);
      barrier_init(empty(i), emptying);
    }
    barriers_made();
  }
};

// The slot, and the parity of the round that it is in. A new barrier counts as past its odd phase: who fills waits for
// an empty slot by the other parity.
struct Place {
  int slot = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int count) {
    if (++slot == count) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace qwen_patch::cuda
