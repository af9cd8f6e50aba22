// add_rms_norm on the CPU: checks, threads over rows, registration. See rms_norm_rows.h for the loop.
#include <tuple>

#include "../common/tensor.h"
#include "rms_norm_rows.h"

namespace qwen_patch::cpu {
namespace {

#define QP_DEFINE(T, TARGETS)                                                                                \
  TARGETS void rows(const T* x, const T* residual, const T* weight, T* normed, T* sum, int64_t n, int64_t H, \
                    float eps) {                                                                             \
    rms_norm_rows<T, true>(x, residual, weight, normed, sum, n, H, eps);                                     \
  }
QP_FOR_EACH_TYPE(QP_DEFINE)
#undef QP_DEFINE

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  check_norm("add_rms_norm", x, weight);
  check_same_dtype_and_device("add_rms_norm", x, residual);
  check_same_shape("add_rms_norm", x, residual);
  x = as_contiguous(x);
  residual = as_contiguous(residual);
  weight = as_contiguous(weight);
  Tensor normed = new_like(x), sum = new_like(x);
  int64_t H = x.size(-1), T_rows = x.numel() / H;
  QP_DISPATCH(x.scalar_type(), {
    torch::stable::parallel_for(0, T_rows, THREAD_GRAIN / H + 1, [&](int64_t begin, int64_t end) {
      rows(in_ptr<T>(x) + begin * H, in_ptr<T>(residual) + begin * H, in_ptr<T>(weight), out_ptr<T>(normed) + begin * H,
           out_ptr<T>(sum) + begin * H, end - begin, H, static_cast<float>(eps));
    });
  });
  return {normed, sum};
}

}  // namespace
}  // namespace qwen_patch::cpu

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CPU, m) {
  m.impl("add_rms_norm", TORCH_BOX(&qwen_patch::cpu::add_rms_norm));
  m.impl("add_rms_norm.no_grad", TORCH_BOX(&qwen_patch::cpu::add_rms_norm));
}
