// The linears' loops for the processor at hand: what the ops and the decode step call. Compiled in linear_kernels.cpp.
#pragma once

#include "int8_linear_rows.h"

namespace qwen_patch::cpu {

enum class Form { INT8, BF16, FLOAT };  // of the tokens, as a kernel reads them

struct Int8Kernel {
  Form form;
  // y [tokens][BLOCK] of the weight rows [n0, n0 + rows) and the tokens from m0 on.
  void (*rows)(const Int8Problem&, int64_t n0, int64_t rows, int64_t m0, int64_t tokens, float* y);
  // Where a block is packed first: into so many words a group.
  int words = 0;
  void (*pack)(const Int8Problem&, int64_t n0, int64_t rows, uint32_t* words, float* scales) = nullptr;
  void (*tiles)(const Int8Problem&, const uint32_t* words, const float* scales, int64_t m0, int64_t tokens,
                float* y) = nullptr;
};
Int8Kernel int8_kernel(int64_t M, ScalarType dtype, bool quantize_activations);

// A thread's memory for one packed block of a weight with G groups along K.
struct PackedBlock {
  PackedBlock(const Int8Kernel& kernel, int64_t G)
      : words(G * kernel.words * BLOCK), scales(kernel.pack ? G * BLOCK : 0) {}
  Scratch<uint32_t> words;
  Scratch<float> scales;
};

// Whether weight_rows reads x as it is; else it reads floats.
template <typename T>
bool multiplies() {
#if QP_AVX512
  if constexpr (std::is_same_v<T, BF16>)
    return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16");
#endif
  return false;
}

// quantize, expand, finish: see quantize_rows, expand_rows, finish_block. weight_rows: y [M][BLOCK] of the weight rows
// w [rows, K], at most BLOCK, and M tokens: x, or floats, [M, K].
#define QP_DECLARE(T, TARGETS)                                                                     \
  void quantize(const T* x, int8_t* out, float* scales, int32_t* sums, int64_t rows, int64_t K);   \
  void expand(const T* x, float* out, int64_t rows, int64_t K, int64_t stride);                    \
  void finish(const float* y, const float* bias, T* out, int64_t tokens, int64_t rows, int64_t N); \
  void weight_rows(const T* w, const T* x, const float* floats, int64_t rows, int64_t M, int64_t K, float* y);
QP_FOR_EACH_TYPE(QP_DECLARE)
#undef QP_DECLARE

}  // namespace qwen_patch::cpu
