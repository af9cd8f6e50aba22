// int8_linear on CUDA: checks, the choice of a kernel, registration. The kernels are in int8/.
#include <algorithm>
#include <array>
#include <optional>

#include "int8/dequantize.cuh"
#include "int8/few.cuh"
#include "int8/hopper.cuh"
#include "int8/tiles.cuh"

namespace qwen_patch::cuda {
namespace {

using namespace int8;

// Both in float32, which the tensor cores of these kernels do not multiply: the reference's own expression.
Tensor in_float32(const Tensor& x, const Tensor& values, const Tensor& scales, const std::optional<Tensor>& bias) {
  const int64_t sizes[2] = {values.size(0), values.size(1)}, strides[2] = {values.size(1), 1};
  Tensor weight = new_like(x, 2, sizes, strides);
  launch_dequantize(in_ptr<int8_t>(values), in_ptr<float>(scales), out_ptr<float>(weight), sizes[0], sizes[1],
                    current_stream(x));
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

template <typename X>
Problem<X> problem(const Tensor& x, const Tensor& values, const Tensor& scales, const std::optional<Tensor>& bias) {
  int64_t K = values.size(1), M = x.numel() / K;
  STD_TORCH_CHECK(M <= INT32_MAX && values.size(0) <= INT32_MAX && K <= INT32_MAX, OP, ": too large: x ", describe(x),
                  ", values ", describe(values));
  return {in_ptr<int8_t>(values),
          in_ptr<float>(scales),
          in_ptr<X>(x),
          K,
          nullptr,
          bias ? bias->data_ptr() : nullptr,
          bias && bias->scalar_type() == ScalarType::Float,
          static_cast<int>(M),
          static_cast<int>(values.size(0)),
          static_cast<int>(K),
          static_cast<int>(scales.size(1))};
}

// In launches of as many tokens as fit into shared memory. False where not even one does.
template <As AS, typename T>
bool run_few(Problem<T> p, T* out, cudaStream_t stream) {
  int shared = device_traits().block_shared, fit = few_tokens_that_fit<AS>(p.G, shared);
  if (p.K % 16 != 0 || fit < 1) return false;
  for (int left = p.M; left > 0; left -= fit, p.x += fit * p.pitch, out += static_cast<int64_t>(fit) * p.N) {
    p.M = std::min(left, fit);
    launch_few<T, AS>(p, out, shared, stream);
  }
  return true;
}
// In digits where those of all tokens are one product's columns, and fit: W8A8, which goes the same way, is faster than
// 16 bits.
template <typename T>
bool run_few_in_16_bits(const Problem<T>& p, T* out, cudaStream_t stream) {
  bool digits = p.M * DIGITS <= 8 && few_tokens_that_fit<As::DIGITS>(p.G, device_traits().block_shared) >= p.M;
  if (digits && run_few<As::DIGITS>(p, out, stream)) return true;
  return run_few<As::IS>(p, out, stream);
}

template <typename X, typename T>
void run_many(const Problem<X>& p, T* out, cudaStream_t stream) {
  bool hopper = device_traits().major == 9 && p.K % 16 == 0;
  if constexpr (sizeof(X) == 2)
    if (hopper) return launch_hopper(p, out, stream);
  launch_tiles<T, X>(p, out, stream);
}

template <typename T>
void run_quantized(const Problem<T>& p, const Tensor& x, T* out, bool few, cudaStream_t stream) {
  if (few && run_few<As::CODES>(p, out, stream)) return;
  int64_t pitch = int64_t{p.G} * GROUP;
  Tensor room = new_bytes(x, p.M * (pitch + int64_t{p.G} * 4));
  int8_t* codes = out_ptr<int8_t>(room);
  float* x_scales = reinterpret_cast<float*>(codes + p.M * pitch);
  launch_quantize<T>(p.x, codes, x_scales, p.M, p.K, p.G, stream);
  Problem<int8_t> q = {p.values, p.scales, codes, pitch, x_scales, p.bias, p.bias_is_float, p.M, p.N, p.K, p.G};
  run_many(q, out, stream);
}

Tensor int8_linear(Tensor x, Tensor values, Tensor scales, std::optional<Tensor> bias, bool quantize_activations) {
  check_int8_linear(OP, x, values, scales, bias);
  DeviceGuard guard(x);
  x = packed(x);
  const void* given = values.data_ptr();
  values = packed(values);
  scales = packed(scales);
  if (bias) bias = packed(*bias);
  Tensor out = new_rows(x, values.size(0));
  if (out.numel() == 0) return out;
  cudaStream_t stream = current_stream(x);
  QP_DISPATCH(x.scalar_type(), {
    Problem<T> p = problem<T>(x, values, scales, bias);
    T* y = out_ptr<T>(out);
    // The kernel for a few tokens asks for codes before the one that has copied them may be through.
    bool few = p.M <= FEW_TOKENS && values.data_ptr() == given;
    if (quantize_activations) {
      run_quantized(p, x, y, few, stream);
    } else if constexpr (std::is_same_v<T, float>) {
      return in_float32(x, values, scales, bias);
    } else if (!few || !run_few_in_16_bits(p, y, stream)) {
      run_many<T, T>(p, y, stream);
    }
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("int8_linear", TORCH_BOX(&qwen_patch::cuda::int8_linear));
  m.impl("int8_linear.no_grad", TORCH_BOX(&qwen_patch::cuda::int8_linear));
}
