// silu_and_mul on the CPU: silu_mul over the two halves of one packed tensor. See silu_mul_range.h for the loop.
#include "../common/tensor.h"
#include "silu_mul_range.h"

namespace qwen_patch::cpu {
namespace {

#define QP_DEFINE(T, TARGETS)                                         \
  TARGETS void rows(const T* gate_up, T* out, int64_t n, int64_t I) { \
    for (int64_t r = 0; r < n; ++r, gate_up += 2 * I, out += I) {     \
      silu_mul_range<T>(gate_up, gate_up + I, out, I);                \
    }                                                                 \
  }
QP_FOR_EACH_TYPE(QP_DEFINE)
#undef QP_DEFINE

Tensor silu_and_mul(Tensor gate_up) {
  check_dtype("silu_and_mul", gate_up);
  check_packed("silu_and_mul", gate_up);
  gate_up = as_contiguous(gate_up);
  int64_t I = gate_up.size(-1) / 2, T_rows = gate_up.numel() / (2 * I);
  Tensor out = new_half(gate_up);
  QP_DISPATCH(gate_up.scalar_type(), {
    torch::stable::parallel_for(0, T_rows, THREAD_GRAIN / I + 1, [&](int64_t begin, int64_t end) {
      rows(in_ptr<T>(gate_up) + begin * 2 * I, out_ptr<T>(out) + begin * I, end - begin, I);
    });
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cpu

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CPU, m) {
  m.impl("silu_and_mul", TORCH_BOX(&qwen_patch::cpu::silu_and_mul));
  m.impl("silu_and_mul.no_grad", TORCH_BOX(&qwen_patch::cpu::silu_and_mul));
}
