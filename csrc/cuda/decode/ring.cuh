// The weights' way into shared memory: a ring of slots that one warp fills, in the order in which the others
// will use them, across the borders of stages and layers. Weights do not depend on activations, so the memory stays
// busy while a stage waits for its input.
//
// A slot is an octet: 8 rows of at most 1,024 columns. A row travels as one bulk copy of up to 2 KB (sm_90; below, as
// cp.async pieces of 16 bytes). Rows lie 64 bytes beyond a multiple of 128 apart, so that the 16-byte reads of a tensor
// core's fragment, 8 lanes over 2 rows at a time, meet no bank conflict. At most `in_flight` slots are asked for at a
// time: more only lengthens the queue at L2, in which the activations wait too.
#pragma once

#include "../ptx.cuh"

namespace qwen_patch::cuda::decode {

// Warps that compute. Eight with 224 registers each beat sixteen with 112: a stage is a chain of latencies, so what
// counts is how few instructions it has and how many loads are under way, not how many warps take part.
constexpr int CONSUMERS = 8;
constexpr int CONSUMER_THREADS = 32 * CONSUMERS;
constexpr int CHUNK = 1024;                 // columns of a slot
constexpr int COLUMNS = CHUNK / CONSUMERS;  // of them, a warp's
constexpr int ROW_PITCH = 2 * CHUNK + 64;   // bytes
constexpr int SLOT_BYTES = 8 * ROW_PITCH;

__host__ __device__ constexpr int chunks_of(int columns) { return (columns + CHUNK - 1) / CHUNK; }

struct Ring {
  unsigned slots, barriers;  // shared addresses
  int count;

  __device__ __forceinline__ unsigned slot(int i) const { return slots + i * SLOT_BYTES; }
  __device__ __forceinline__ unsigned full(int i) const { return barriers + 8 * i; }
  __device__ __forceinline__ unsigned empty(int i) const { return barriers + 8 * (count + i); }

  // By one thread, before the block's first barrier.
  __device__ void init() const {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
#if __CUDA_ARCH__ >= 900
      barrier_init(full(i), 1);
#else
      barrier_init(full(i), 32);
#endif
      barrier_init(empty(i), CONSUMERS);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
};

// A place in the ring: the slot, and the parity of the round that it is in.
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

// The warp that fills the ring.
struct Producer {
  Ring ring;
  int in_flight;
  Place at = {}, behind = {};  // `behind` runs in_flight slots behind `at`
  int issued = 0;

  // rows: `n` rows of K columns; columns [k0, k0 + CHUNK) of them.
  template <typename T>
  __device__ void octet(const T* rows, int n, int K, int k0) {
    if (issued >= in_flight) {
      barrier_wait(ring.full(behind.slot), behind.parity);
      behind.next(ring.count);
    }
    ++issued;
    barrier_wait(ring.empty(at.slot), at.parity ^ 1);  // a new barrier counts as past its odd phase
    copy(rows, n, K, k0);
    at.next(ring.count);
  }

 private:
  template <typename T>
  __device__ void copy(const T* rows, int n, int K, int k0) {
    int lane = threadIdx.x & 31, bytes = 2 * min(K - k0, CHUNK);
    unsigned to = ring.slot(at.slot), full = ring.full(at.slot);
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes * n) : "memory");
    __syncwarp();
    if (lane < n)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       to + lane * ROW_PITCH),
                   "l"(rows + static_cast<int64_t>(lane) * K + k0), "r"(bytes), "r"(full)
                   : "memory");
#else
#pragma unroll 1
    for (int r = 0; r < n; ++r)
#pragma unroll 1
      for (int i = lane * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + r * ROW_PITCH + i),
                     "l"(reinterpret_cast<const char*>(rows + static_cast<int64_t>(r) * K + k0) + i)
                     : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
#endif
  }
};

}  // namespace qwen_patch::cuda::decode
