// See linear_kernels.h.
#include "linear_kernels.h"

#include "int8_linear_amx.h"
#include "small_linear_rows.h"

namespace qwen_patch::cpu {

#define QP_DEFINE(T, TARGETS)                                                                               \
  TARGETS void quantize(const T* x, int8_t* out, float* scales, int32_t* sums, int64_t rows, int64_t K) {   \
    quantize_rows(x, out, scales, sums, rows, K);                                                           \
  }                                                                                                         \
  TARGETS void expand(const T* x, float* out, int64_t rows, int64_t K, int64_t stride) {                    \
    expand_rows(x, out, rows, K, stride);                                                                   \
  }                                                                                                         \
  TARGETS void finish(const float* y, const float* bias, T* out, int64_t tokens, int64_t rows, int64_t N) { \
    finish_block(y, bias, out, tokens, rows, N);                                                            \
  }                                                                                                         \
  TARGETS static void rows_of(const T* w, const float* x, int64_t rows, int64_t M, int64_t K, float* y) {   \
    small_rows(w, x, rows, M, K, y);                                                                        \
  }
QP_FOR_EACH_TYPE(QP_DEFINE)
#undef QP_DEFINE

namespace {

template <typename T>
void rows_with(const T* w, const T* x, const float* floats, int64_t rows, int64_t M, int64_t K, float* y) {
#if QP_AVX512
  if constexpr (std::is_same_v<T, BF16>)
    if (multiplies<T>()) return small_bf16_rows(w, x, rows, M, K, y);
#endif
  (void)x;
  rows_of(w, floats, rows, M, K, y);
}

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

#if QP_AVX512
template <typename Kind>
Int8Kernel packed(Form form) {
  return {form, nullptr, Kind::WORDS, pack<Kind>, tiles<Kind>};
}
#endif

// From how many tokens on packing pays for itself, as measured on a Zen 4.
constexpr int64_t PACK_INT8 = 3, PACK_BF16 = 4, PACK_FLOAT = 8;

}  // namespace

#define QP_DEFINE(T, TARGETS)                                                                                   \
  void weight_rows(const T* w, const T* x, const float* floats, int64_t rows, int64_t M, int64_t K, float* y) { \
    rows_with(w, x, floats, rows, M, K, y);                                                                     \
  }
QP_FOR_EACH_TYPE(QP_DEFINE)
#undef QP_DEFINE

Int8Kernel int8_kernel(int64_t M, ScalarType dtype, bool quantize_activations) {
#if QP_AVX512
  if (__builtin_cpu_supports("x86-64-v4")) {
    if (quantize_activations && __builtin_cpu_supports("avx512vnni")) {
      if (M < PACK_INT8) return {Form::INT8, dot_vnni};
      Int8Kernel kernel = packed<Int8Words>(Form::INT8);
      if (M >= AMX_TOKENS && has_amx()) kernel.tiles = tiles_amx;
      return kernel;
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

}  // namespace qwen_patch::cpu
