// rope_kv_write on CUDA: checks, launch, registration. See rope_kv_write_kernel.cuh for the kernel.
#include <optional>

#include "rope_kv_write_kernel.cuh"

namespace qwen_patch::cuda {
namespace {

constexpr const char* ROPE_OP = "rope_kv_write";

struct RopeInputs {
  Tensor q, k, v, cos, sin, first, keys, values;
};

void check_rope(const RopeInputs& x) {
  check_dtype(ROPE_OP, x.q);
  const Tensor* others[] = {&x.k, &x.v, &x.cos, &x.sin, &x.keys, &x.values};
  for (const Tensor* t : others) check_same_dtype_and_device(ROPE_OP, x.q, *t);
  STD_TORCH_CHECK(x.keys.dim() == 4 && x.values.dim() == 4, ROPE_OP,
                  ": expects keys and values [B, kv_heads, capacity, D], got ", describe(x.keys), " and ",
                  describe(x.values));
  check_same_shape(ROPE_OP, x.keys, x.values);
  int64_t B = x.keys.size(0), kv = x.keys.size(1), D = x.keys.size(3);
  STD_TORCH_CHECK(D > 0 && D % 2 == 0 && D <= 256, ROPE_OP, ": expects an even head size up to 256, got keys ",
                  describe(x.keys));
  STD_TORCH_CHECK(x.keys.stride(3) == 1 && x.values.stride(3) == 1, ROPE_OP,
                  ": the last dimension of keys and values must have no gaps");
  STD_TORCH_CHECK(x.q.dim() == 3 && x.q.size(0) == B && x.q.size(2) > 0 && x.q.size(2) % D == 0, ROPE_OP,
                  ": expects q [B, T, heads * D] for keys ", describe(x.keys), ", got ", describe(x.q));
  check_same_shape(ROPE_OP, x.k, x.v);
  STD_TORCH_CHECK(x.k.dim() == 3 && x.k.size(0) == B && x.k.size(1) == x.q.size(1) && x.k.size(2) == kv * D, ROPE_OP,
                  ": expects k and v [B, T, kv_heads * D] for q ", describe(x.q), " and keys ", describe(x.keys),
                  ", got ", describe(x.k));
  check_same_shape(ROPE_OP, x.cos, x.sin);
  STD_TORCH_CHECK(x.cos.dim() == 2 && x.cos.size(1) == D, ROPE_OP, ": expects cos and sin [positions, ", D, "], got ",
                  describe(x.cos));
  STD_TORCH_CHECK(x.first.dim() == 1 && x.first.size(0) == B && x.first.scalar_type() == ScalarType::Long &&
                      x.first.device() == x.q.device(),
                  ROPE_OP, ": expects first [", B, "] int64 on the same device, got ", describe(x.first));
}

// The weight [D] of a norm over each head, contiguous.
std::optional<Tensor> head_norm(const std::optional<Tensor>& weight, const RopeInputs& x) {
  if (!weight) return weight;
  check_same_dtype_and_device(ROPE_OP, x.q, *weight);
  STD_TORCH_CHECK(weight->dim() == 1 && weight->size(0) == x.keys.size(3), ROPE_OP, ": expects norms [", x.keys.size(3),
                  "], got ", describe(*weight));
  return as_contiguous(*weight);
}

// [B, T, width] as rows that are all equally far apart, each without gaps: as it is, or a copy.
Tensor in_rows(const Tensor& t) {
  bool rows = t.stride(2) == 1 && (t.size(0) == 1 || t.stride(0) == t.size(1) * t.stride(1));
  return rows ? t : torch::stable::contiguous(t);
}

Tensor rope_kv_write(Tensor q, Tensor k, Tensor v, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm,
                     double eps, Tensor cos, Tensor sin, Tensor first, Tensor keys, Tensor values) {
  RopeInputs x{q, k, v, cos, sin, first, keys, values};
  check_rope(x);
  DeviceGuard guard(q);
  for (Tensor* t : {&x.q, &x.k, &x.v}) *t = in_rows(*t);
  for (Tensor* t : {&x.cos, &x.sin, &x.first}) *t = as_contiguous(*t);
  q_norm = head_norm(q_norm, x);
  k_norm = head_norm(k_norm, x);
  int64_t B = q.size(0), tokens = q.size(1), D = keys.size(3), heads = q.size(2) / D;
  int64_t sizes[] = {B, tokens, heads, D}, strides[] = {tokens * heads * D, heads * D, D, 1};
  Tensor out = new_like(x.q, 4, sizes, strides);
  if (B * tokens == 0) return out;
  QP_DISPATCH(q.scalar_type(), {
    RopeKvWrite<T> p = {};
    p.q = in_ptr<T>(x.q), p.k = in_ptr<T>(x.k), p.v = in_ptr<T>(x.v);
    p.q_pitch = x.q.stride(1), p.k_pitch = x.k.stride(1), p.v_pitch = x.v.stride(1);
    p.q_norm = q_norm ? in_ptr<T>(*q_norm) : nullptr;
    p.k_norm = k_norm ? in_ptr<T>(*k_norm) : nullptr;
    p.cos = in_ptr<T>(x.cos), p.sin = in_ptr<T>(x.sin);
    p.first = in_ptr<int64_t>(x.first);
    p.out = out_ptr<T>(out);
    p.keys = {out_ptr<T>(keys), keys.stride(0), keys.stride(1), keys.stride(2)};
    p.values = {out_ptr<T>(values), values.stride(0), values.stride(1), values.stride(2)};
    p.limit = keys.size(2) < cos.size(0) ? keys.size(2) : cos.size(0);
    p.tokens = tokens, p.heads = static_cast<int>(heads), p.kv_heads = static_cast<int>(keys.size(1));
    p.half = static_cast<int>(D / 2), p.eps = static_cast<float>(eps);
    launch_rope_kv_write<T>(p, B * tokens, current_stream(q));
  });
  return out;
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("rope_kv_write.no_grad", TORCH_BOX(&qwen_patch::cuda::rope_kv_write));
}
