// silu_and_mul on CUDA: silu_mul over the two halves of one packed tensor. See silu_mul_kernel.cuh for the kernel.
#include "silu_mul_kernel.cuh"

namespace qwen_patch::cuda {
namespace {

Tensor silu_and_mul(Tensor gate_up) {
  check_dtype("silu_and_mul", gate_up);
  check_packed("silu_and_mul", gate_up);
  DeviceGuard guard(gate_up);
  gate_up = as_contiguous(gate_up);
  int64_t I = gate_up.size(-1) / 2;
  Tensor out = new_half(gate_up);
  if (out.numel() == 0) return out;
  QP_DISPATCH(gate_up.scalar_type(), {
    launch_silu_mul<T>(in_ptr<T>(gate_up), in_ptr<T>(gate_up) + I, out_ptr<T>(out), out.numel() / I, I, 2 * I,
                       current_stream(gate_up));
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("silu_and_mul", TORCH_BOX(&qwen_patch::cuda::silu_and_mul));
  m.impl("silu_and_mul.no_grad", TORCH_BOX(&qwen_patch::cuda::silu_and_mul));
}
