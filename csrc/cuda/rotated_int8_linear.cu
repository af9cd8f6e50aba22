// rotated_int8_linear on CUDA, sm_90 only: both sides to codes with one scale a row, then one plain product of codes.
#include <optional>
#include <vector>

#include "int8/hopper_rows.cuh"
#include "int8/rotate.cuh"

namespace qwen_patch::cuda {
namespace {

using namespace int8;

// Weights whose results stand side by side, packed: [N_i, K], [N_i, G], and [N_i] or [0].
struct SideBySide {
  std::vector<Tensor> values, scales, biases;
  int64_t N = 0;
  bool any_bias = false;
};

SideBySide checked(const Tensor& x, std::vector<Tensor> values, std::vector<Tensor> scales,
                   std::vector<Tensor> biases) {
  STD_TORCH_CHECK(!values.empty() && values.size() <= ROTATE_WEIGHTS && scales.size() == values.size() &&
                      biases.size() == values.size(),
                  ROTATED_OP, ": expects 1 to ", ROTATE_WEIGHTS, " weights, each with scales and a bias, got ",
                  values.size(), ", ", scales.size(), " and ", biases.size());
  SideBySide all{std::move(values), std::move(scales), std::move(biases)};
  for (size_t i = 0; i < all.values.size(); ++i) {
    bool bias = all.biases[i].numel() > 0;
    check_int8_linear(ROTATED_OP, x, all.values[i], all.scales[i],
                      bias ? std::optional<Tensor>(all.biases[i]) : std::nullopt);
    all.values[i] = packed(all.values[i]);
    all.scales[i] = packed(all.scales[i]);
    if (bias) all.biases[i] = packed(all.biases[i]);
    all.any_bias |= bias;
    all.N += all.values[i].size(0);
  }
  return all;
}

template <typename T>
RotatedRows<T> rows_of(const Tensor& x, const SideBySide& all, int8_t* codes) {
  RotatedRows<T> p = {};
  for (; p.count < static_cast<int>(all.values.size()); ++p.count) {
    const Tensor& bias = all.biases[p.count];
    p.weights[p.count] = {in_ptr<int8_t>(all.values[p.count]), in_ptr<float>(all.scales[p.count]),
                          bias.numel() > 0 ? bias.data_ptr() : nullptr, bias.scalar_type() == ScalarType::Float, p.N};
    p.N += static_cast<int>(all.values[p.count].size(0));
  }
  p.x = in_ptr<T>(x);
  p.K = static_cast<int>(all.values[0].size(1));
  p.G = static_cast<int>(all.scales[0].size(1));
  p.M = static_cast<int>(x.numel() / p.K);
  p.codes = codes;
  p.row_scales = reinterpret_cast<float*>(codes + int64_t{p.N + p.M} * p.G * GROUP);
  p.biases = all.any_bias ? p.row_scales + p.N + p.M : nullptr;
  return p;
}

Tensor rotated_int8_linear(Tensor x, std::vector<Tensor> values, std::vector<Tensor> scales,
                           std::vector<Tensor> biases) {
  DeviceGuard guard(x);
  STD_TORCH_CHECK(device_traits().major == 9, ROTATED_OP, ": this kernel needs compute capability 9.0");
  SideBySide all = checked(x, std::move(values), std::move(scales), std::move(biases));
  int64_t K = all.values[0].size(1), rows = all.N + x.numel() / K, pitch = all.scales[0].size(1) * GROUP;
  STD_TORCH_CHECK(K <= ROTATE_LARGEST_K && rows <= INT32_MAX, ROTATED_OP, ": supports K up to ", ROTATE_LARGEST_K,
                  ", got x ", describe(x));
  Tensor out = new_rows(x, all.N);
  if (out.numel() == 0) return out;
  x = packed(x);
  Tensor room = new_bytes(x, rows * (pitch + 4) + all.N * 4);
  cudaStream_t stream = current_stream(x);
  QP_DISPATCH(x.scalar_type(), {
    RotatedRows<T> p = rows_of<T>(x, all, out_ptr<int8_t>(room));
    launch_rotate<T>(p, stream);
    int depth = static_cast<int>(pitch);
    launch_hopper_rows<T>(
        {p.codes, p.row_scales, p.codes + p.N * pitch, pitch, p.row_scales + p.N, p.biases, true, p.M, p.N, depth, p.G},
        out_ptr<T>(out), stream);
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("rotated_int8_linear", TORCH_BOX(&qwen_patch::cuda::rotated_int8_linear));
  m.impl("rotated_int8_linear.no_grad", TORCH_BOX(&qwen_patch::cuda::rotated_int8_linear));
}
