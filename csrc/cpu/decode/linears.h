// The linears of a decode step: one input of B rows at a time, in the form that the kernels read, which all threads
// share.
#pragma once

#include "../linear_kernels.h"

namespace qwen_patch::cpu::decode {

// A weight [N, K]: T's, or int8 with scales [N, ceil(K / 64)].
struct Matrix {
  const void* weight;
  const float* scales;
  int64_t N, K;
  int64_t groups() const { return (K + GROUP - 1) / GROUP; }
  int64_t blocks() const { return (N + BLOCK - 1) / BLOCK; }
};

template <typename T>
class Linears {
 public:
  // For inputs [B, at most `widest`].
  Linears(int64_t B, int64_t widest, ScalarType dtype, bool quantize_activations)
      : B_(B),
        widest_((widest + GROUP - 1) / GROUP * GROUP),
        int8_(int8_kernel(B, dtype, quantize_activations)),
        states_(B * widest_ * static_cast<int64_t>(sizeof(float))),
        scales_(B * widest_ / GROUP),
        sums_(B * widest_ / GROUP) {}

  // Whether `take` has anything to do for a matrix like this one.
  bool takes(const Matrix& w) const { return w.scales ? !as_it_is(w) : !multiplies<T>(); }

  // Row b of x [B, w.K], as w's kernel reads it.
  void take(const Matrix& w, const T* x, int64_t b) {
    int64_t G = w.groups(), stride = w.scales ? G * GROUP : w.K;
    x += b * w.K;
    if (w.scales && int8_.form == Form::INT8) {
      quantize(x, reinterpret_cast<int8_t*>(states_.get()) + b * stride, scales_.get() + b * G, sums_.get() + b * G, 1,
               w.K);
    } else if (w.scales && int8_.form == Form::BF16) {
      pad_rows(x, reinterpret_cast<T*>(states_.get()) + b * stride, 1, w.K, stride);
    } else {
      expand(x, reinterpret_cast<float*>(states_.get()) + b * stride, 1, w.K, stride);
    }
  }

  // A thread's own memory.
  PackedBlock workspace() const { return {int8_, widest_ / GROUP}; }

  // y [B][BLOCK] of the rows [n0, n0 + rows) of w; x [B, w.K], which has been taken.
  void multiply(const Matrix& w, const T* x, int64_t n0, int64_t rows, PackedBlock& packed, float* y) const {
    // The kernels ask for what is AHEAD of them: not for the first bytes after a jump to another place.
    const char* start =
        static_cast<const char*>(w.weight) + n0 * w.K * (w.scales ? 1 : static_cast<int64_t>(sizeof(T)));
    for (int64_t i = 0; i < AHEAD; i += 64) __builtin_prefetch(start + i);
    if (!w.scales) {
      const T* weight = static_cast<const T*>(w.weight) + n0 * w.K;
      return weight_rows(weight, x, reinterpret_cast<const float*>(states_.get()), rows, B_, w.K, y);
    }
    Int8Problem problem{static_cast<const int8_t*>(w.weight),
                        w.scales,
                        w.N,
                        w.K,
                        w.groups(),
                        as_it_is(w) ? static_cast<const void*>(x) : states_.get(),
                        scales_.get(),
                        sums_.get()};
    if (!int8_.pack) return int8_.rows(problem, n0, rows, 0, B_, y);
    int8_.pack(problem, n0, rows, packed.words.get(), packed.scales.get());
    int8_.tiles(problem, packed.words.get(), packed.scales.get(), 0, B_, y);
  }

 private:
  bool as_it_is(const Matrix& w) const { return int8_.form == Form::BF16 && w.K % GROUP == 0; }

  int64_t B_, widest_;
  Int8Kernel int8_;
  Scratch<char> states_;
  Scratch<float> scales_;
  Scratch<int32_t> sums_;
};

}  // namespace qwen_patch::cpu::decode
