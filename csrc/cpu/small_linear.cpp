// small_linear on the CPU: checks, threads over blocks of weight rows, registration. The loops: small_linear_rows.h;
// linear_kernels.cpp chooses.
#include "linear_kernels.h"

namespace qwen_patch::cpu {
namespace {

constexpr int64_t MAX_TOKENS = 16;

Tensor small_linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  const char* op = "small_linear";
  check_dtype(op, x);
  check_same_dtype_and_device(op, x, weight);
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1) && x.size(-1) > 0, op,
                  ": expects x [..., K] and weight [N, K] with K > 0, got ", describe(x), " and ", describe(weight));
  if (bias) check_bias(op, x, weight, *bias);
  x = as_contiguous(x);
  weight = as_contiguous(weight);
  int64_t N = weight.size(0), K = weight.size(1), M = x.numel() / K;
  STD_TORCH_CHECK(M <= MAX_TOKENS, op, ": is for at most ", MAX_TOKENS, " tokens, got ", describe(x));
  Tensor out = new_rows(x, N);
  if (M == 0 || N == 0) return out;
  std::optional<Scratch<float>> bias_floats = floats_of_bias(bias);
  const float* added = bias_floats ? bias_floats->get() : nullptr;

  QP_DISPATCH(x.scalar_type(), {
    const T *tokens = in_ptr<T>(x), *rows_at = in_ptr<T>(weight);
    T* results = out_ptr<T>(out);
    bool as_it_is = multiplies<T>();
    Scratch<float> states(as_it_is ? 0 : M * K);
    if (!as_it_is) expand(tokens, states.get(), M, K, K);
    for_blocks(N, M * N * K, [&](int64_t begin, int64_t end) {
      float y[MAX_TOKENS * BLOCK];
      for (int64_t n0 = begin * BLOCK; n0 < std::min(N, end * BLOCK); n0 += BLOCK) {
        int64_t rows = std::min(BLOCK, N - n0);
        weight_rows(rows_at + n0 * K, tokens, states.get(), rows, M, K, y);
        finish(y, added ? added + n0 : nullptr, results + n0, M, rows, N);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cpu

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CPU, m) {
  m.impl("small_linear", TORCH_BOX(&qwen_patch::cpu::small_linear));
  m.impl("small_linear.no_grad", TORCH_BOX(&qwen_patch::cpu::small_linear));
}
