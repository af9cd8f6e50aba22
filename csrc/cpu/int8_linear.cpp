// int8_linear on the CPU: checks, the tokens' form, threads over blocks of weight rows, registration. The loops:
// int8_linear_rows.h for every processor, int8_linear_avx512.h for AVX-512, int8_linear_amx.h for AMX;
// linear_kernels.cpp chooses.
#include <optional>

#include "linear_kernels.h"

namespace qwen_patch::cpu {
namespace {

Tensor int8_linear(Tensor x, Tensor values, Tensor scales, std::optional<Tensor> bias, bool quantize_activations) {
  check_int8_linear("int8_linear", x, values, scales, bias);
  x = as_contiguous(x);
  values = as_contiguous(values);
  scales = as_contiguous(scales);
  int64_t K = values.size(1), N = values.size(0), M = x.numel() / K, G = (K + GROUP - 1) / GROUP, stride = G * GROUP;
  Tensor out = new_rows(x, N);
  if (M == 0 || N == 0) return out;
  Int8Kernel kernel = int8_kernel(M, x.scalar_type(), quantize_activations);

  bool as_it_is = kernel.form == Form::BF16 && stride == K;
  Scratch<char> states(as_it_is ? 0
                                : M * stride *
                                      (kernel.form == Form::FLOAT  ? 4
                                       : kernel.form == Form::BF16 ? 2
                                                                   : 1));
  Scratch<float> x_scales(quantize_activations ? M * G : 0);
  Scratch<int32_t> x_sums(quantize_activations ? M * G : 0);
  Int8Problem problem{in_ptr<int8_t>(values), in_ptr<float>(scales), N, K, G, as_it_is ? x.data_ptr() : states.get(),
                      x_scales.get(),         x_sums.get()};
  std::optional<Scratch<float>> bias_floats = floats_of_bias(bias);
  const float* added = bias_floats ? bias_floats->get() : nullptr;

  QP_DISPATCH(x.scalar_type(), {
    const T* tokens = in_ptr<T>(x);
    if (!as_it_is) {
      torch::stable::parallel_for(0, M, THREAD_GRAIN / K + 1, [&](int64_t begin, int64_t end) {
        const T* from = tokens + begin * K;
        char* to = states.get();
        if (kernel.form == Form::INT8) {
          quantize(from, reinterpret_cast<int8_t*>(to) + begin * stride, x_scales.get() + begin * G,
                   x_sums.get() + begin * G, end - begin, K);
        } else if (kernel.form == Form::FLOAT) {
          expand(from, reinterpret_cast<float*>(to) + begin * stride, end - begin, K, stride);
        } else {
          pad_rows(from, reinterpret_cast<T*>(to) + begin * stride, end - begin, K, stride);
        }
      });
    }
    T* results = out_ptr<T>(out);
    for_blocks(N, M * N * K, [&](int64_t begin, int64_t end) {
      Scratch<float> y(TOKENS * BLOCK);
      PackedBlock packed(kernel, G);
      for (int64_t n0 = begin * BLOCK; n0 < std::min(N, end * BLOCK); n0 += BLOCK) {
        int64_t rows = std::min(BLOCK, N - n0);
        if (kernel.pack) kernel.pack(problem, n0, rows, packed.words.get(), packed.scales.get());
        for (int64_t m0 = 0; m0 < M; m0 += TOKENS) {
          int64_t count = std::min(TOKENS, M - m0);
          if (kernel.pack) {
            kernel.tiles(problem, packed.words.get(), packed.scales.get(), m0, count, y.get());
          } else {
            kernel.rows(problem, n0, rows, m0, count, y.get());
          }
          finish(y.get(), added ? added + n0 : nullptr, results + m0 * N + n0, count, rows, N);
        }
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cpu

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CPU, m) {
  m.impl("int8_linear", TORCH_BOX(&qwen_patch::cpu::int8_linear));
  m.impl("int8_linear.no_grad", TORCH_BOX(&qwen_patch::cpu::int8_linear));
}
