// rotated_int8_linear on CUDA, sm_90 only: both sides to codes with one scale a row, then one plain product of codes.
#include <optional>

#include "int8/hopper_rows.cuh"
#include "int8/rotate.cuh"

namespace qwen_patch::cuda {
namespace {

Tensor rotated_int8_linear(Tensor x, Tensor values, Tensor scales, std::optional<Tensor> bias) {
  using namespace int8;
  check_int8_linear(ROTATED_OP, x, values, scales, bias);
  DeviceGuard guard(x);
  int64_t N = values.size(0), K = values.size(1), G = scales.size(1), M = x.numel() / K;
  STD_TORCH_CHECK(device_traits().major == 9, ROTATED_OP, ": this kernel needs compute capability 9.0");
  STD_TORCH_CHECK(K <= ROTATE_LARGEST_K, ROTATED_OP, ": supports K up to ", ROTATE_LARGEST_K, ", got x ", describe(x));
  STD_TORCH_CHECK(M + N <= INT32_MAX, ROTATED_OP, ": too large: x ", describe(x), ", values ", describe(values));
  Tensor out = new_rows(x, N);
  if (out.numel() == 0) return out;
  x = packed(x);
  values = packed(values);
  scales = packed(scales);
  if (bias) bias = packed(*bias);
  int64_t pitch = G * GROUP;
  Tensor room = new_bytes(x, (N + M) * (pitch + 4));
  int8_t* codes = out_ptr<int8_t>(room);
  float* row_scales = reinterpret_cast<float*>(codes + (N + M) * pitch);
  int m = static_cast<int>(M), n = static_cast<int>(N);
  cudaStream_t stream = current_stream(x);
  QP_DISPATCH(x.scalar_type(), {
    launch_rotate<T>({in_ptr<int8_t>(values), in_ptr<float>(scales), in_ptr<T>(x), codes, row_scales, m, n,
                      static_cast<int>(K), static_cast<int>(G)},
                     stream);
    Problem<int8_t> p = {codes,
                         row_scales,
                         codes + N * pitch,
                         pitch,
                         row_scales + N,
                         bias ? bias->data_ptr() : nullptr,
                         bias && bias->scalar_type() == ScalarType::Float,
                         m,
                         n,
                         static_cast<int>(pitch),
                         static_cast<int>(G)};
    launch_hopper_rows<T>(p, out_ptr<T>(out), stream);
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("rotated_int8_linear", TORCH_BOX(&qwen_patch::cuda::rotated_int8_linear));
  m.impl("rotated_int8_linear.no_grad", TORCH_BOX(&qwen_patch::cuda::rotated_int8_linear));
}
