// What every CUDA op shares: the device guard, the current stream, the launch check, 16-byte packs, dtype dispatch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../common/tensor.h"

// Not in a CPU-only torch's headers; libtorch_cuda has it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace qwen_patch::cuda {

inline void check(const char* op, cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, op, ": CUDA error: ", cudaGetErrorString(error));
}

// Makes the tensor's device current while it lives: tensors on cuda:1 are legal while cuda:0 is current.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& t) {
    int device = t.get_device_index();
    check("device guard", cudaGetDevice(&previous_));
    if (device == previous_) {
      previous_ = -1;
    } else {
      check("device guard", cudaSetDevice(device));
    }
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

struct DeviceTraits {
  int multiprocessors;
  int major;         // of the compute capability
  int block_shared;  // bytes of shared memory that a block may ask for
};

// Of the current device.
inline DeviceTraits device_traits() {
  static DeviceTraits known[64] = {};
  static std::once_flag asked[64];
  int device = 0;
  check("device query", cudaGetDevice(&device));
  DeviceTraits& traits = known[device % 64];
  std::call_once(asked[device % 64], [&] {
    auto ask = [&](int& value, cudaDeviceAttr what) {
      check("device query", cudaDeviceGetAttribute(&value, what, device));
    };
    ask(traits.major, cudaDevAttrComputeCapabilityMajor);
    ask(traits.block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    ask(traits.multiprocessors, cudaDevAttrMultiProcessorCount);
  });
  return traits;
}

// Allows a kernel so many bytes of dynamic shared memory on the current device. Never fewer than before: two threads
// may launch one kernel with different sizes.
inline void allow_shared(const char* op, const void* kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;
  int device = 0;
  check(op, cudaGetDevice(&device));
  std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  check(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  most = bytes;
}

// Programmatic dependent launch (sm_90): a kernel is put on the multiprocessors while the one before it in the stream
// runs out, and waits there. Every kernel launched through launch() must call wait_for_previous() before its first
// access to memory, loads included: what it reads may just be being written, what it writes may just be being read.
// (The one exception: int8_linear's codes, which no kernel launched so writes.) It then lets the next kernel come up in
// the same way. In a CUDA graph this takes most of a microsecond off each kernel. Later cards run sm_80's code, which
// does not wait: no kernel is launched so there.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline cudaLaunchAttribute cluster_of(int blocks) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// `shared`: bytes of dynamic shared memory. `cluster`: blocks that are on the device together, and reach each other's
// shared memory (sm_90); 1: each is by itself.
template <typename... Params, typename... Args>
void launch_clusters(const char* op, void (*kernel)(Params...), int cluster, dim3 grid, int block, int shared,
                     cudaStream_t stream, Args... args) {
  if (shared > 0) allow_shared(op, reinterpret_cast<const void*>(kernel), shared);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1] = cluster_of(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = device_traits().major != 9 ? 0 : cluster == 1 ? 1 : 2;
  check(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

// How many such clusters the device has room for at once, on sm_90. Where a part of the chip has a number of
// multiprocessors that is no multiple of a cluster's, they are fewer than all of its multiprocessors would make.
template <typename... Params>
int clusters_at_once(const char* op, void (*kernel)(Params...), int cluster, int block, int shared) {
  allow_shared(op, reinterpret_cast<const void*>(kernel), shared);
  cudaLaunchAttribute size = cluster_of(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.attrs = &size;
  config.numAttrs = 1;
  int clusters = 0;
  check(op, cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  return clusters;
}

template <typename... Params, typename... Args>
void launch_with_shared(const char* op, void (*kernel)(Params...), dim3 grid, int block, int shared,
                        cudaStream_t stream, Args... args) {
  launch_clusters(op, kernel, 1, grid, block, shared, stream, args...);
}

template <typename... Params, typename... Args>
void launch(const char* op, void (*kernel)(Params...), dim3 grid, int block, cudaStream_t stream, Args... args) {
  launch_with_shared(op, kernel, grid, block, 0, stream, args...);
}

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}
// A bfloat16 is rounded as the lower of a pair, which is one instruction of the arithmetic pipe (F2FP); by itself it
// would go to the pipe of the conversions (F2F).
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __low2bfloat16(__floats2bfloat162_rn(x, 0.f));
  else
    return __float2half_rn(x);
}

// N elements moved as one access: 16 bytes where N * sizeof(T) is 16.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T v[N];
};
template <typename T>
constexpr int PACK = 16 / static_cast<int>(sizeof(T));

template <typename... P>
bool aligned16(const P*... p) {
  return ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

}  // namespace qwen_patch::cuda

#define QP_DISPATCH(DTYPE, ...) QP_DISPATCH_TYPES(DTYPE, __nv_bfloat16, __half, __VA_ARGS__)
