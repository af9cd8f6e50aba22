// int8_linear on the CPU: checks, the tokens' form, the choice of a kernel, threads over blocks of weight rows,
// registration. The loops: int8_linear_rows.h for every processor, int8_linear_avx512.h for AVX-512.
#include <optional>

#include "int8_linear_avx512.h"
#include "int8_linear_rows.h"

namespace qwen_patch::cpu {
namespace {

#define QP_DEFINE(T, TARGETS)                                                                               \
  TARGETS void quantize(const T* x, int8_t* out, float* scales, int32_t* sums, int64_t rows, int64_t K) {   \
    quantize_rows(x, out, scales, sums, rows, K);                                                           \
  }                                                                                                         \
  TARGETS void expand(const T* x, float* out, int64_t rows, int64_t K, int64_t stride) {                    \
    expand_rows(x, out, rows, K, stride);                                                                   \
  }                                                                                                         \
  TARGETS void finish(const float* y, const float* bias, T* out, int64_t tokens, int64_t rows, int64_t N) { \
    finish_block(y, bias, out, tokens, rows, N);                                                            \
  }
QP_FOR_EACH_TYPE(QP_DEFINE)
#undef QP_DEFINE

QP_MULTIVERSION void rows_int8(const Int8Problem& p, int64_t n0, int64_t rows, int64_t m0, int64_t tokens, float* y) {
  dot_int8(p, n0, rows, m0, tokens, y);
}
void rows_float(const Int8Problem& p, int64_t n0, int64_t rows, int64_t m0, int64_t tokens, float* y) {
  dot_float<false>(p, n0, rows, m0, tokens, y);
}
#if QP_X86
__attribute__((target("arch=x86-64-v3"))) void rows_float_avx2(const Int8Problem& p, int64_t n0, int64_t rows,
                                                               int64_t m0, int64_t tokens, float* y) {
  dot_float<true>(p, n0, rows, m0, tokens, y);
}
#endif

enum class Form { INT8, BF16, FLOAT };  // of the tokens, as a kernel reads them

struct Kernel {
  Form form;
  void (*rows)(const Int8Problem&, int64_t n0, int64_t rows, int64_t m0, int64_t tokens, float* y);
  // Where a block is packed first: into so many words a group.
  int words = 0;
  void (*pack)(const Int8Problem&, int64_t n0, int64_t rows, uint32_t* words, float* scales) = nullptr;
  void (*tiles)(const Int8Problem&, const uint32_t* words, const float* scales, int64_t m0, int64_t tokens,
                float* y) = nullptr;
};

#if QP_AVX512
template <typename Kind>
Kernel packed(Form form) {
  return {form, nullptr, Kind::WORDS, pack<Kind>, tiles<Kind>};
}
#endif

// From how many tokens on packing pays for itself, as measured on a Zen 4.
constexpr int64_t PACK_INT8 = 3, PACK_BF16 = 4, PACK_FLOAT = 8;

Kernel choose(int64_t M, ScalarType dtype, bool quantize_activations) {
#if QP_AVX512
  if (__builtin_cpu_supports("x86-64-v4")) {
    if (quantize_activations && __builtin_cpu_supports("avx512vnni")) {
      return M < PACK_INT8 ? Kernel{Form::INT8, dot_vnni} : packed<Int8Words>(Form::INT8);
    }
    bool bf16 = dtype == ScalarType::BFloat16 && __builtin_cpu_supports("avx512bf16");
    if (!quantize_activations && M >= (bf16 ? PACK_BF16 : PACK_FLOAT)) {
      return bf16 ? packed<Bf16Words>(Form::BF16) : packed<FloatWords>(Form::FLOAT);
    }
  }
#endif
  (void)M, (void)dtype;
  if (quantize_activations) return {Form::INT8, rows_int8};
#if QP_X86
  if (__builtin_cpu_supports("x86-64-v3")) return {Form::FLOAT, rows_float_avx2};
#endif
  return {Form::FLOAT, rows_float};
}

Tensor int8_linear(Tensor x, Tensor values, Tensor scales, std::optional<Tensor> bias, bool quantize_activations) {
  check_int8_linear(x, values, scales, bias);
  x = as_contiguous(x);
  values = as_contiguous(values);
  scales = as_contiguous(scales);
  int64_t K = values.size(1), N = values.size(0), M = x.numel() / K, G = (K + GROUP - 1) / GROUP, stride = G * GROUP;
  Tensor out = new_rows(x, N);
  if (M == 0 || N == 0) return out;
  Kernel kernel = choose(M, x.scalar_type(), quantize_activations);

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
      Scratch<float> y(TOKENS * BLOCK), block_scales(kernel.pack ? G * BLOCK : 0);
      Scratch<uint32_t> words(G * kernel.words * BLOCK);
      for (int64_t n0 = begin * BLOCK; n0 < std::min(N, end * BLOCK); n0 += BLOCK) {
        int64_t rows = std::min(BLOCK, N - n0);
        if (kernel.pack) kernel.pack(problem, n0, rows, words.get(), block_scales.get());
        for (int64_t m0 = 0; m0 < M; m0 += TOKENS) {
          int64_t count = std::min(TOKENS, M - m0);
          if (kernel.pack) {
            kernel.tiles(problem, words.get(), block_scales.get(), m0, count, y.get());
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
