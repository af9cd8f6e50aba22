// silu_mul on CUDA: checks, launch, registration. See silu_mul_kernel.cuh for the kernel.
#include "silu_mul_kernel.cuh"

namespace qwen_patch::cuda {
namespace {

Tensor silu_mul(Tensor gate, Tensor up) {
  check_dtype("silu_mul", gate);
  check_same_dtype_and_device("silu_mul", gate, up);
  check_same_shape("silu_mul", gate, up);
  DeviceGuard guard(gate);
  gate = as_contiguous(gate);
  up = as_contiguous(up);
  Tensor out = new_like(gate);
  int64_t n = gate.numel();
  if (n == 0) return out;
  QP_DISPATCH(gate.scalar_type(),
              { launch_silu_mul<T>(in_ptr<T>(gate), in_ptr<T>(up), out_ptr<T>(out), 1, n, n, current_stream(gate)); });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("silu_mul", TORCH_BOX(&qwen_patch::cuda::silu_mul));
  m.impl("silu_mul.no_grad", TORCH_BOX(&qwen_patch::cuda::silu_mul));
}
