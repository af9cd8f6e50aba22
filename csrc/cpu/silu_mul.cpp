// silu_mul on the CPU: checks, threads over elements, registration. See silu_mul_range.h for the loop.
#include "../common/tensor.h"
#include "silu_mul_range.h"

namespace qwen_patch::cpu {
namespace {

#define QP_DEFINE(T, TARGETS) \
  TARGETS void range(const T* gate, const T* up, T* out, int64_t n) { silu_mul_range<T>(gate, up, out, n); }
QP_FOR_EACH_TYPE(QP_DEFINE)
#undef QP_DEFINE

Tensor silu_mul(Tensor gate, Tensor up) {
  check_dtype("silu_mul", gate);
  check_same_dtype_and_device("silu_mul", gate, up);
  check_same_shape("silu_mul", gate, up);
  gate = as_contiguous(gate);
  up = as_contiguous(up);
  Tensor out = new_like(gate);
  QP_DISPATCH(gate.scalar_type(), {
    torch::stable::parallel_for(0, gate.numel(), THREAD_GRAIN, [&](int64_t begin, int64_t end) {
      range(in_ptr<T>(gate) + begin, in_ptr<T>(up) + begin, out_ptr<T>(out) + begin, end - begin);
    });
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cpu

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CPU, m) {
  m.impl("silu_mul", TORCH_BOX(&qwen_patch::cpu::silu_mul));
  m.impl("silu_mul.no_grad", TORCH_BOX(&qwen_patch::cpu::silu_mul));
}
