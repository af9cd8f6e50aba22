// rms_norm on CUDA: checks, launch, registration. See rms_norm_kernel.cuh for the kernel.
#include "rms_norm_kernel.cuh"

namespace qwen_patch::cuda {
namespace {

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  check_norm("rms_norm", x, weight);
  DeviceGuard guard(x);
  x = as_contiguous(x);
  weight = as_contiguous(weight);
  Tensor out = new_like(x);
  int64_t H = x.size(-1);
  RmsNormShape shape{x.numel() / H, H, static_cast<float>(eps), 1.f / static_cast<float>(H)};
  if (shape.rows == 0) return out;
  QP_DISPATCH(x.scalar_type(), {
    launch_rms_norm<T, false>(in_ptr<T>(x), nullptr, in_ptr<T>(weight), out_ptr<T>(out), nullptr, shape,
                              current_stream(x));
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&qwen_patch::cuda::rms_norm));
  m.impl("rms_norm.no_grad", TORCH_BOX(&qwen_patch::cuda::rms_norm));
}
