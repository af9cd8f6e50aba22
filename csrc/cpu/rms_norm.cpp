// rms_norm on the CPU: checks, threads over rows, registration. See rms_norm_rows.h for the loop.
#include "../common/tensor.h"
#include "rms_norm_rows.h"

namespace qwen_patch::cpu {
namespace {

#define QP_DEFINE(T, TARGETS)                                                               \
  TARGETS void rows(const T* x, const T* weight, T* out, int64_t n, int64_t H, float eps) { \
    rms_norm_rows<T, false>(x, nullptr, weight, out, nullptr, n, H, eps);                   \
  }
QP_FOR_EACH_TYPE(QP_DEFINE)
#undef QP_DEFINE

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  check_norm("rms_norm", x, weight);
  x = as_contiguous(x);
  weight = as_contiguous(weight);
  Tensor out = new_like(x);
  int64_t H = x.size(-1), T_rows = x.numel() / H;
  QP_DISPATCH(x.scalar_type(), {
    torch::stable::parallel_for(0, T_rows, THREAD_GRAIN / H + 1, [&](int64_t begin, int64_t end) {
      rows(in_ptr<T>(x) + begin * H, in_ptr<T>(weight), out_ptr<T>(out) + begin * H, end - begin, H,
           static_cast<float>(eps));
    });
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cpu

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&qwen_patch::cpu::rms_norm));
  m.impl("rms_norm.no_grad", TORCH_BOX(&qwen_patch::cpu::rms_norm));
}
