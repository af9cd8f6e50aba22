// add_rms_norm on CUDA: checks, launch, registration. See rms_norm_kernel.cuh for the kernel.
#include <tuple>

#include "rms_norm_kernel.cuh"

namespace qwen_patch::cuda {
namespace {

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  check_norm("add_rms_norm", x, weight);
  check_same_dtype_and_device("add_rms_norm", x, residual);
  check_same_shape("add_rms_norm", x, residual);
  DeviceGuard guard(x);
  x = as_contiguous(x);
  residual = as_contiguous(residual);
  weight = as_contiguous(weight);
  Tensor normed = new_like(x), sum = new_like(x);
  int64_t H = x.size(-1);
  RmsNormShape shape{x.numel() / H, H, static_cast<float>(eps), 1.f / static_cast<float>(H)};
  if (shape.rows == 0) return {normed, sum};
  QP_DISPATCH(x.scalar_type(), {
    launch_rms_norm<T, true>(in_ptr<T>(x), in_ptr<T>(residual), in_ptr<T>(weight), out_ptr<T>(normed), out_ptr<T>(sum),
                             shape, current_stream(x));
  });
  return {normed, sum};
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("add_rms_norm", TORCH_BOX(&qwen_patch::cuda::add_rms_norm));
  m.impl("add_rms_norm.no_grad", TORCH_BOX(&qwen_patch::cuda::add_rms_norm));
}
