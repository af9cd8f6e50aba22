// Whether this library can run on a device: asked once by Python before a model there is patched. A card older than the
// oldest architecture built for, or a driver older than the CUDA runtime in here, shows at the first look at a kernel.
#include "silu_mul_kernel.cuh"

// Null where all is well, else CUDA's words for what is wrong.
extern "C" __attribute__((visibility("default"))) const char* qwen_patch_cuda_problem(int device) {
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, qwen_patch::cuda::silu_mul_packs<float, 1>);
    cudaSetDevice(previous);
  }
  cudaGetLastError();  // else a later launch would report it as its own
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
