// The linears' checks, the same on every device.
#pragma once

#include <optional>

#include "tensor.h"

namespace qwen_patch {

constexpr int64_t INT8_GROUP = 64;  // values along K that share a scale

inline void check_bias(const char* op, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  STD_TORCH_CHECK(bias.dim() == 1 && bias.size(0) == weight.size(0) && bias.device() == x.device() &&
                      (bias.scalar_type() == x.scalar_type() || bias.scalar_type() == ScalarType::Float),
                  op, ": expects bias [N] of x's dtype or float32 on its device, got ", describe(bias), " for x ",
                  describe(x), " and a weight ", describe(weight));
}

inline void check_int8_linear(const char* op, const Tensor& x, const Tensor& values, const Tensor& scales,
                              const std::optional<Tensor>& bias) {
  check_dtype(op, x);
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Char && scales.scalar_type() == ScalarType::Float, op,
                  ": expects values int8 and scales float32, got ", describe(values), " and ", describe(scales));
  STD_TORCH_CHECK(
      x.dim() >= 1 && values.dim() == 2 && x.size(-1) == values.size(1) && x.size(-1) > 0 && x.size(-1) % 8 == 0, op,
      ": expects x [..., K] and values [N, K] with K a multiple of 8, got ", describe(x), " and ", describe(values));
  STD_TORCH_CHECK(scales.dim() == 2 && scales.size(0) == values.size(0) &&
                      scales.size(1) == (values.size(1) + INT8_GROUP - 1) / INT8_GROUP,
                  op, ": expects scales [N, ceil(K / 64)], got ", describe(scales), " for values ", describe(values));
  STD_TORCH_CHECK(x.device() == values.device() && x.device() == scales.device(), op,
                  ": all tensors must be on one device");
  if (bias) check_bias(op, x, values, *bias);
}

}  // namespace qwen_patch
