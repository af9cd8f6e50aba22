// draw_token on CUDA: checks, launch, registration. See draw_token_kernel.cuh for the kernel.
#include "draw_token_kernel.cuh"

namespace qwen_patch::cuda {
namespace {

constexpr const char* DRAW_OP = "draw_token";

void draw_token(Tensor scores, Tensor uniform, Tensor banned, Tensor state, Tensor tokens, Tensor history,
                double temperature, int64_t top_k, double top_p, double min_p, int64_t keep) {
  check_dtype(DRAW_OP, scores);
  STD_TORCH_CHECK(scores.dim() == 2 && scores.is_contiguous() && scores.size(1) > 0 && scores.size(1) < 1ll << 30,
                  DRAW_OP, ": expects contiguous scores [B, V], got ", describe(scores));
  int64_t rows = scores.size(0), V = scores.size(1);
  STD_TORCH_CHECK(top_k >= 1 && top_k <= DRAW_LARGEST_K && top_k <= V, DRAW_OP, ": supports top_k of 1 to ",
                  V < DRAW_LARGEST_K ? V : DRAW_LARGEST_K, ", got ", top_k);
  STD_TORCH_CHECK(static_cast<float>(temperature) > 0, DRAW_OP, ": expects a temperature over 0, got ", temperature);
  auto check = [&](const char* name, const Tensor& t, ScalarType dtype, bool shaped) {
    STD_TORCH_CHECK(shaped && t.scalar_type() == dtype && t.is_contiguous() && t.device() == scores.device(), DRAW_OP,
                    ": can't use ", name, " ", describe(t), " with scores ", describe(scores));
  };
  check("uniform", uniform, ScalarType::Float, uniform.numel() == rows);
  check("tokens", tokens, ScalarType::Long, tokens.numel() == rows);
  check("history", history, ScalarType::Long, history.dim() == 2 && history.size(0) == rows);
  check("banned", banned, ScalarType::Int, banned.numel() == 1 + DRAW_BANNED);
  check("state", state, ScalarType::Int, state.numel() >= 2);
  if (rows == 0) return;
  DeviceGuard guard(scores);
  QP_DISPATCH(scores.scalar_type(), {
    Draw<T> p = {};
    p.scores = in_ptr<T>(scores);
    p.uniform = in_ptr<float>(uniform);
    p.banned = in_ptr<int>(banned);
    p.state = in_ptr<int>(state);
    p.tokens = out_ptr<int64_t>(tokens);
    p.history = out_ptr<int64_t>(history);
    p.V = static_cast<int>(V), p.columns = static_cast<int>(history.size(1));
    p.k = static_cast<int>(top_k), p.keep = static_cast<int>(keep);
    p.temperature = static_cast<float>(temperature);
    p.top_p = static_cast<float>(top_p), p.min_p = static_cast<float>(min_p);
    launch_draw_token(DRAW_OP, p, rows, current_stream(scores));
  });
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) { m.impl("draw_token", TORCH_BOX(&qwen_patch::cuda::draw_token)); }
