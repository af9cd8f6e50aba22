// What every op needs from PyTorch's stable ABI: input checks, allocation, dtype dispatch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace qwen_patch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    default:
      return "another dtype";
  }
}

// "[2, 3] bfloat16", for error messages.
inline std::string describe(const Tensor& t) {
  std::ostringstream out;
  out << '[';
  auto sizes = t.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "") << sizes[i];
  out << "] " << dtype_name(t.scalar_type());
  return out.str();
}

inline void check_dtype(const char* op, const Tensor& t) {
  ScalarType d = t.scalar_type();
  STD_TORCH_CHECK(d == ScalarType::Float || d == ScalarType::BFloat16 || d == ScalarType::Half, op,
                  ": supports float32, bfloat16 and float16, got ", describe(t));
}

inline void check_same_dtype_and_device(const char* op, const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), op, ": all tensors must have one dtype, got ", describe(a),
                  " and ", describe(b));
  STD_TORCH_CHECK(a.device() == b.device(), op, ": all tensors must be on one device, got ", describe(a),
                  " on device index ", a.get_device_index(), " and ", describe(b), " on device index ",
                  b.get_device_index());
}

inline void check_same_shape(const char* op, const Tensor& a, const Tensor& b) {
  auto x = a.sizes(), y = b.sizes();
  bool same = x.size() == y.size();
  for (size_t i = 0; same && i < x.size(); ++i) same = x[i] == y[i];
  STD_TORCH_CHECK(same, op, ": both tensors must have one shape, got ", describe(a), " and ", describe(b));
}

// The checks that rms_norm and add_rms_norm share: x [..., H], weight [H].
inline void check_norm(const char* op, const Tensor& x, const Tensor& weight) {
  check_dtype(op, x);
  check_same_dtype_and_device(op, x, weight);
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0) && x.size(-1) > 0, op,
                  ": expects x [..., H] and weight [H] with H > 0, got ", describe(x), " and ", describe(weight));
}

// The check of the packed layout: gate_up [..., 2I].
inline void check_packed(const char* op, const Tensor& gate_up) {
  STD_TORCH_CHECK(gate_up.dim() >= 1 && gate_up.size(-1) > 0 && gate_up.size(-1) % 2 == 0, op,
                  ": expects gate_up [..., 2I] with I > 0, got ", describe(gate_up));
}

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// A new tensor of x's shape, dtype and device; x is contiguous, so its strides serve. It calls the allocation shim
// itself: a trip through the dispatcher costs about 2 us a tensor, and decode is bound by such trips.
inline Tensor new_like(const Tensor& x, int64_t dims, const int64_t* sizes, const int64_t* strides) {
  int32_t dtype, device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device_index));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, dtype, device_type, device_index, &handle));
  return Tensor(handle);
}

inline Tensor new_like(const Tensor& x) { return new_like(x, x.dim(), x.sizes().data(), x.strides().data()); }

// A new contiguous tensor [..., N] with all of x's dimensions but the last.
inline Tensor new_rows(const Tensor& x, int64_t N) {
  auto sizes = x.sizes();
  std::vector<int64_t> size(sizes.begin(), sizes.end()), stride(sizes.size());
  size.back() = N;
  int64_t step = 1;
  for (size_t i = size.size(); i-- > 0;) {
    stride[i] = step;
    step *= size[i] > 0 ? size[i] : 1;
  }
  return new_like(x, x.dim(), size.data(), stride.data());
}

// Room for a kernel's own use, on x's device.
inline Tensor new_bytes(const Tensor& x, int64_t count) {
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device_index));
  AtenTensorHandle handle;
  int64_t stride = 1;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &count, &stride, aoti_torch_dtype_uint8(), device_type, device_index, &handle));
  return Tensor(handle);
}

// As new_like, with half of x's last dimension: the result of a packed op.
inline Tensor new_half(const Tensor& x) { return new_rows(x, x.size(-1) / 2); }

template <typename T>
const T* in_ptr(const Tensor& t) {
  return static_cast<const T*>(t.data_ptr());
}
template <typename T>
T* out_ptr(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

}  // namespace qwen_patch

// Runs the last argument with T = the element type of DTYPE, which check_dtype has let through. Each backend names its
// own types for bfloat16 and float16, and wraps this as QP_DISPATCH.
#define QP_DISPATCH_TYPES(DTYPE, BFLOAT16, FLOAT16, ...) \
  switch (DTYPE) {                                       \
    case torch::headeronly::ScalarType::Float: {         \
      using T = float;                                   \
      __VA_ARGS__;                                       \
      break;                                             \
    }                                                    \
    case torch::headeronly::ScalarType::BFloat16: {      \
      using T = BFLOAT16;                                \
      __VA_ARGS__;                                       \
      break;                                             \
    }                                                    \
    default: {                                           \
      using T = FLOAT16;                                 \
      __VA_ARGS__;                                       \
    }                                                    \
  }
