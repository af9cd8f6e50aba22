// What the linears share: threads over blocks of weight rows, and the way in and out of float32.
//
// A thread takes blocks of 32 weight rows, and runs all tokens through one before the next: a weight is read from
// memory once. A block's results stay in float32, [tokens][32], until `finish` adds the bias and rounds.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>

#include "../common/linear.h"
#include "simd.h"

namespace qwen_patch::cpu {

constexpr int64_t BLOCK = 32;              // weight rows a block
constexpr int64_t TOKENS = 64;             // tokens whose results stay in float32 at a time: 8 KB, in L1
constexpr int64_t LINEAR_GRAIN = 1 << 17;  // multiplications below which a second thread costs more than it brings
// For a FEW tokens memory is all: a row after the other, and the lines that come in AHEAD bytes asked for early. Four
// rows side by side, and no asking, read 8 GB/s a core where this reads 20.
constexpr int64_t FEW = 4, AHEAD = 2048;

// The same for the scales of an int8 row, at group g: a line has those of 16 groups.
QP_INLINE void ask_for_scales(const float* scales, int64_t g) {
  if (g % 16 == 0) __builtin_prefetch(scales + g + AHEAD / 64 + 16);
}

// Uninitialised memory on a cache line's border.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T) + 64, std::align_val_t(64)))) {}
  T* get() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<T, Delete> data_;
};

// x [rows, K] as floats [rows, stride], zeros from K on.
template <typename T>
QP_INLINE void expand_rows(const T* x, float* out, int64_t rows, int64_t K, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, x += K, out += stride) {
    for_vectors(K, [&](int64_t i, int64_t n, int) QP_LAMBDA {
      F32x8 v = load(x + i, n);
      std::memcpy(out + i, &v, static_cast<size_t>(n) * sizeof(float));
    });
    std::fill(out + K, out + stride, 0.f);
  }
}

// y [tokens][BLOCK] (+ bias), rounded into out [tokens, N], of which out is the first element of this block. NaN is
// made the plain one: another's bits, which a scale may bring in, could round to a number (see Element<BF16>::round).
template <typename T>
QP_INLINE void finish_block(const float* y, const float* bias, T* out, int64_t tokens, int64_t rows, int64_t N) {
  for (int64_t t = 0; t < tokens; ++t, y += BLOCK, out += N) {
    for (int64_t i = 0; i < rows; i += LANES) {
      int64_t n = std::min(LANES, rows - i);
      F32x8 v = load(y + i, LANES);
      if (bias) v += load(bias + i, n);
      v = v == v ? v : F32x8{} + __builtin_nanf("");
      store(out + i, v, n);
    }
  }
}

inline std::optional<Scratch<float>> floats_of_bias(const std::optional<Tensor>& bias) {
  if (!bias) return std::nullopt;
  Tensor whole = as_contiguous(*bias);
  Scratch<float> floats(whole.numel());
  QP_DISPATCH_ANY(whole.scalar_type(),
                  { expand_rows(in_ptr<T>(whole), floats.get(), 1, whole.numel(), whole.numel()); });
  return floats;
}

// x [rows, K] -> [rows, stride], zeros from K on.
template <typename T>
void pad_rows(const T* x, T* out, int64_t rows, int64_t K, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, x += K, out += stride) {
    std::memcpy(out, x, static_cast<size_t>(K) * sizeof(T));
    std::memset(out + K, 0, static_cast<size_t>(stride - K) * sizeof(T));
  }
}

// body(first, last) for ranges of blocks, on several threads; `work` multiplications in all.
template <typename Body>
void for_blocks(int64_t N, int64_t work, const Body& body) {
  int64_t blocks = (N + BLOCK - 1) / BLOCK;
  int64_t grain = std::max<int64_t>(1, LINEAR_GRAIN / std::max<int64_t>(1, work / std::max<int64_t>(1, blocks)));
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) { body(begin, end); });
}

}  // namespace qwen_patch::cpu
