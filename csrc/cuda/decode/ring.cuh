// The weights' way into shared memory: a ring of slots that one warp fills, in the order in which the others will use
// them, across the borders of stages and layers. Weights do not depend on activations, so the memory stays busy while a
// stage waits for its input.
//
// A slot is an octet: 8 rows of at most 1,024 columns of 16 bits, or 2,048 of int8 and their scales. A row travels as
// one bulk copy of up to 2 KB (sm_90; below, as cp.async pieces of 16 bytes). Rows lie 64 bytes beyond a multiple of
// 128 apart, so that the 16-byte reads of a tensor core's fragment, 8 lanes over 2 rows at a time, meet no bank
// conflict. At most `in_flight` slots are asked for at a time: more only lengthens the queue at L2, in which the
// activations wait too.
#pragma once

#include "../int8/widen.cuh"
#include "../slots.cuh"

namespace qwen_patch::cuda::decode {

// Warps that compute. Eight with 168 registers each beat sixteen with 112: a stage is a chain of latencies, so what
// counts is how few instructions it has and how many loads are under way, not how many warps take part.
constexpr int CONSUMERS = 8;
constexpr int CONSUMER_THREADS = 32 * CONSUMERS;
constexpr int CHUNK = 1024;                 // columns
constexpr int COLUMNS = CHUNK / CONSUMERS;  // of them, a warp's
using int8::GROUP;
template <typename W>
constexpr int SLOT_CHUNKS = 2 / sizeof(W);
constexpr int ROW_PITCH = 2 * CHUNK + 64;  // bytes
// The scales of a slot's rows lie behind them, with room against bank conflicts.
constexpr int SCALES = 8 * ROW_PITCH, SCALE_PITCH = 4 * SLOT_CHUNKS<int8_t> * CHUNK / GROUP + 16;
// In a kernel whose layers' weights are W; its head may be of 16 bits.
template <typename W>
constexpr int SLOT_BYTES = sizeof(W) == 1 ? SCALES + 8 * SCALE_PITCH : 8 * ROW_PITCH;

__host__ __device__ constexpr int chunks_of(int columns) { return (columns + CHUNK - 1) / CHUNK; }

// A weight [N, K]: 16-bit values; or int8, and its scales [N, K / GROUP].
struct Matrix {
  const void* values;
  const float* scales;
};

template <typename W>
struct Ring : Slots {
  unsigned at;  // shared address of the first slot

  __device__ __forceinline__ unsigned slot(int i) const { return at + i * SLOT_BYTES<W>; }

  // What arrives at a full slot's: bulk copies; with scales each lane's own copies too, below sm_90 only those.
  __device__ __forceinline__ void init() const {
#if __CUDA_ARCH__ >= 900
    Slots::init(sizeof(W) == 1 ? 33 : 1, CONSUMERS);
#else
    Slots::init(32, CONSUMERS);
#endif
  }
};

// The warp that fills the ring.
template <typename W>
struct Producer {
  Ring<W> ring;
  int in_flight;
  int unasked = in_flight;     // slots that may be asked for before one asked for earlier has arrived
  Place at = {}, behind = {};  // `behind` runs in_flight slots behind `at`

  // From here on at least so many.
  __device__ __forceinline__ void let_fly(int slots) {
    int more = max(0, min(slots, ring.count) - in_flight);
    in_flight += more, unasked += more;
  }

  // Rows [row, row + n) of a weight of V, W or 16 bits, of K columns; columns [k0, end) of them, as many as a slot
  // holds.
  template <typename V>
  __device__ void octet(const Matrix& weight, int row, int n, int K, int k0, int end) {
    if (unasked > 0) {
      --unasked;
    } else {
      barrier_wait(ring.full(behind.slot), behind.parity);
      behind.next(ring.count);
    }
    barrier_wait(ring.empty(at.slot), at.parity ^ 1);
    int columns = min(end - k0, SLOT_CHUNKS<V> * CHUNK);
    copy(static_cast<const V*>(weight.values) + static_cast<int64_t>(row) * K + k0, n, K, columns);
    if constexpr (sizeof(V) == 1)
      copy_scales(weight.scales + static_cast<int64_t>(row) * (K / GROUP) + k0 / GROUP, n, K / GROUP, columns / GROUP);
    // By each lane, when its own copies have arrived; on sm_90 those that bulk copies left.
#if __CUDA_ARCH__ >= 900
    if constexpr (sizeof(W) == 1)
#endif
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.full(at.slot)) : "memory");
    at.next(ring.count);
  }

 private:
  template <typename V>
  __device__ void copy(const V* rows, int n, int K, int columns) {
    int bytes = static_cast<int>(sizeof(V)) * columns;
    unsigned to = ring.slot(at.slot);
#if __CUDA_ARCH__ >= 900
    unsigned full = ring.full(at.slot);
    if (elected()) {
      barrier_expect(full, bytes * n);
      auto from = reinterpret_cast<uint64_t>(rows), stride = static_cast<uint64_t>(K) * sizeof(V);
      auto row = [&] {
        load_bulk(to, reinterpret_cast<const void*>(from), bytes, full);
        to += ROW_PITCH;
        from += stride;
        asm volatile("" : "+l"(from));  // else each row's address is multiplied out anew
      };
      if (n == 8) {
#pragma unroll
        for (int r = 0; r < 8; ++r) row();
      } else {
#pragma unroll 1
        for (int r = 0; r < n; ++r) row();
      }
    }
    __syncwarp();
#else
#pragma unroll 1
    for (int r = 0; r < n; ++r)
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x & 31) * 16; i < bytes; i += 512)
        copy_async<16>(to + r * ROW_PITCH + i, reinterpret_cast<const char*>(rows + static_cast<int64_t>(r) * K) + i);
#endif
  }

  // `count` scales of each row, rows `pitch` apart; a lane has eight of one row: in two pieces, where those of every
  // row are so aligned.
  __device__ void copy_scales(const float* scales, int n, int pitch, int count) {
    int lane = threadIdx.x & 31, row = lane >> 2, first = (lane & 3) * 8, mine = min(8, count - first);
    if (row >= n) return;
    unsigned to = ring.slot(at.slot) + SCALES + row * SCALE_PITCH + first * 4;
    const float* from = scales + row * pitch + first;
    if (((pitch | count | static_cast<int>(reinterpret_cast<uintptr_t>(scales) >> 2)) & 3) == 0) {
      if (mine > 0) copy_async<16>(to, from);
      if (mine > 4) copy_async<16>(to + 16, from + 4);
    } else {
#pragma unroll 1
      for (int i = 0; i < mine; ++i) copy_async<4>(to + 4 * i, from + i);
    }
  }
};

}  // namespace qwen_patch::cuda::decode
