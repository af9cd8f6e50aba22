// The launch of a decode step: its sizes as constants, its shared memory.
#pragma once

#include "step.cuh"

namespace qwen_patch::cuda::decode {

constexpr const char* DECODE_STEP = "decode_step";
constexpr int MIN_SLOTS = 2;  // a tile of two octets is in use at once

// Slots of the ring that fit beside everything else in shared memory.
template <typename T, typename W, int D, int SHIFT>
int slots_that_fit(Step<T> p) {
  p.slots = 1;
  int left = device_traits().block_shared - Layout<T, W, D, SHIFT>(p).total - 256;
  return left < 0 ? 0 : 1 + left / (SLOT_BYTES<W> + 128);
}

template <typename T, typename W, int D, int SHIFT>
void launch_step(Step<T> p, cudaStream_t stream) {
  int slots = slots_that_fit<T, W, D, SHIFT>(p);
  if (p.slots > 0 && p.slots < slots) slots = p.slots;
  STD_TORCH_CHECK(slots >= MIN_SLOTS, DECODE_STEP, ": the shared memory of a multiprocessor has room for ", slots,
                  " slots of weights, and ", MIN_SLOTS, " are needed");
  p.slots = slots;
  if (p.in_flight <= 0 || p.in_flight > slots) p.in_flight = slots;
  int bytes = Layout<T, W, D, SHIFT>(p).total;
  auto kernel = decode_step_kernel<T, W, D, SHIFT>;
  allow_shared(DECODE_STEP, reinterpret_cast<const void*>(kernel), bytes);
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;  // all blocks are on the device at once, or the launch fails
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(device_traits().multiprocessors));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  check(DECODE_STEP, cudaLaunchKernelEx(&config, kernel, p));
}

// f with D as a constant. Over int8 the kernel is compiled for the two sizes of the published models only: each takes a
// build some 10 s.
template <typename W, typename F>
void with_head_dim(int64_t D, F&& f) {
  if (D == 64) return f(std::integral_constant<int, 64>{});
  if (D == 128) return f(std::integral_constant<int, 128>{});
  if constexpr (sizeof(W) == 2) {
    if (D == 32) return f(std::integral_constant<int, 32>{});
    if (D == 96) return f(std::integral_constant<int, 96>{});
  }
  STD_TORCH_CHECK(false, DECODE_STEP, ": does not support head_dim ", D);
}
// f with D and SHIFT as constants. Code is for one row.
template <typename W, typename F>
void with_constants(int64_t D, int64_t B, F&& f) {
  with_head_dim<W>(D, [&](auto d) {
    if constexpr (std::is_same_v<W, Code>)
      f(d, std::integral_constant<int, 0>{});
    else
      B == 1 ? f(d, std::integral_constant<int, 0>{}) : f(d, std::integral_constant<int, 3>{});
  });
}

}  // namespace qwen_patch::cuda::decode
