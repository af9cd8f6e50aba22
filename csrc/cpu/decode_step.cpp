// decode_step on the CPU: checks, the loops of each element type, one parallel region, registration. The stages are in
// decode/step.h.
#include <optional>

#include "decode/step.h"
#include "silu_mul_range.h"

namespace qwen_patch::cpu {
namespace decode {

// finish_block's loads, with the residual, or the other factor, in place of the bias.
template <typename T>
QP_INLINE void add_rows(const float* y, T* residual, int64_t B, int64_t rows, int64_t H) {
  for (int64_t b = 0; b < B; ++b, y += BLOCK, residual += H)
    for (int64_t i = 0; i < rows; i += LANES) {
      int64_t n = std::min(LANES, rows - i);
      F32x8 v = load(y + i, LANES);
      v = v == v ? v : F32x8{} + __builtin_nanf("");
      store(residual + i, round_to<T>(v) + load(residual + i, n), n);
    }
}

template <typename T>
QP_INLINE void silu_rows(const float* gate, const float* up, T* out, int64_t B, int64_t rows, int64_t I) {
  T a[BLOCK], b[BLOCK];
  for (int64_t row = 0; row < B; ++row, gate += BLOCK, up += BLOCK, out += I) {
    finish_block(gate, nullptr, a, 1, rows, BLOCK);
    finish_block(up, nullptr, b, 1, rows, BLOCK);
    silu_mul_range(a, b, out, rows);
  }
}

template <typename T>
QP_INLINE int64_t argmax(const T* x, int64_t count) {
  F32x8 best = F32x8{} - INFINITY;
  I32x8 nan = {};
  for_vectors(count / LANES * LANES, [&](int64_t i, int64_t n, int) QP_LAMBDA {
    F32x8 v = load(x + i, n);
    best = v > best ? v : best;
    nan |= v != v;
  });
  float top = -INFINITY;
  bool any = false;
  for (int64_t i = 0; i < LANES; ++i) {
    top = std::max(top, best[i]);
    any |= nan[i] != 0;
  }
  for (int64_t i = count / LANES * LANES; i < count; ++i) {
    float v = load(x + i, 1)[0];
    top = std::max(top, v);
    any |= v != v;
  }
  for (int64_t i = 0; i < count; ++i) {
    float v = load(x + i, 1)[0];
    if (any ? v != v : v == top) return i;
  }
  return 0;
}

#define QP_DEFINE(T, TARGETS)                                                                                 \
  TARGETS void norm(const T* x, const T* weight, T* out, int64_t H, float eps) {                              \
    rms_norm_rows<T, false>(x, nullptr, weight, out, nullptr, 1, H, eps);                                     \
  }                                                                                                           \
  TARGETS void add_to(const float* y, T* residual, int64_t B, int64_t rows, int64_t H) {                      \
    add_rows(y, residual, B, rows, H);                                                                        \
  }                                                                                                           \
  TARGETS void silu_times(const float* gate, const float* up, T* out, int64_t B, int64_t rows, int64_t I) {   \
    silu_rows(gate, up, out, B, rows, I);                                                                     \
  }                                                                                                           \
  TARGETS void attend(const Unit<T>& unit) { attend_unit(unit); }                                             \
  TARGETS void combine(const float* out, const float* top, const float* weight, int64_t parts, int64_t apart, \
                       int64_t heads_apart, int64_t D, T* x) {                                                \
    combine_parts(out, top, weight, parts, apart, heads_apart, D, x);                                         \
  }                                                                                                           \
  TARGETS int64_t best_of(const T* logits, int64_t V) { return argmax(logits, V); }
QP_FOR_EACH_TYPE(QP_DEFINE)
#undef QP_DEFINE

}  // namespace decode

namespace {

using namespace decode;

constexpr const char* OP = "decode_step";
constexpr int64_t PART = 64;  // keys that a part of a context has at least

template <typename... Sizes>
void check_shape(const char* name, const Tensor& t, ScalarType dtype, Sizes... sizes) {
  int64_t expected[] = {static_cast<int64_t>(sizes)...};
  bool same = t.dim() == static_cast<int64_t>(sizeof...(sizes)) && t.scalar_type() == dtype && t.is_contiguous();
  for (size_t i = 0; same && i < sizeof...(sizes); ++i) same = t.size(static_cast<int64_t>(i)) == expected[i];
  std::ostringstream shape;
  for (int64_t size : expected) shape << (shape.tellp() > 0 ? ", " : "") << size;
  STD_TORCH_CHECK(same, OP, ": expects a contiguous ", name, " [", shape.str(), "], got ", describe(t));
}

void decode_step(Tensor layers, Tensor embedding, Tensor final_norm, Tensor lm_head,
                 std::optional<Tensor> lm_head_scales, Tensor cos, Tensor sin, Tensor tokens, Tensor cache, Tensor,
                 Tensor state, Tensor history, Tensor banned, Tensor logits, int64_t heads, int64_t intermediate,
                 int64_t weights, double eps, double scale, bool greedy, int64_t, int64_t, int64_t, int64_t) {
  check_dtype(OP, embedding);
  ScalarType dtype = embedding.scalar_type();
  STD_TORCH_CHECK(cache.dim() == 6 && embedding.dim() == 2 && layers.dim() == 2 && cos.dim() == 2 && history.dim() == 2,
                  OP, ": expects cache [L, 2, B, kv_heads, capacity, D], embedding [V, H], layers [L, pointers], cos ",
                  "[positions, D] and history [B, N]");
  Sizes s{tokens.numel(), embedding.size(1), intermediate,  lm_head.size(0), heads,
          cache.size(3),  cache.size(5),     cache.size(4), layers.size(0)};
  int64_t positions = cos.size(0), G = (s.H + GROUP - 1) / GROUP;
  STD_TORCH_CHECK(s.B >= 1 && s.B <= TOKENS, OP, ": supports 1 to ", TOKENS, " rows, got ", s.B);
  STD_TORCH_CHECK(s.kv_heads > 0 && heads > 0 && heads % s.kv_heads == 0 && s.D > 0 && s.D % 2 == 0, OP,
                  ": expects heads that key-value heads divide, and an even head_dim");
  STD_TORCH_CHECK(weights >= 0 && weights <= 2, OP, ": weights is ", weights, ", not 0, 1 or 2");
  check_shape("layers", layers, ScalarType::Long, s.layers, sizeof(LayerWeights) / 8);
  check_shape("embedding", embedding, dtype, embedding.size(0), s.H);
  check_shape("final_norm", final_norm, dtype, s.H);
  check_shape("lm_head", lm_head, lm_head_scales ? ScalarType::Char : dtype, s.V, s.H);
  if (lm_head_scales) check_shape("lm_head_scales", *lm_head_scales, ScalarType::Float, s.V, G);
  check_shape("cos", cos, dtype, positions, s.D);
  check_shape("sin", sin, dtype, positions, s.D);
  check_shape("tokens", tokens, ScalarType::Long, s.B);
  check_shape("cache", cache, dtype, s.layers, 2, s.B, s.kv_heads, s.capacity, s.D);
  check_shape("state", state, ScalarType::Int, 2 + s.B);
  check_shape("history", history, ScalarType::Long, s.B, history.size(1));
  check_shape("logits", logits, dtype, s.B, s.V);
  STD_TORCH_CHECK(banned.scalar_type() == ScalarType::Int && banned.numel() > 0 && banned.is_contiguous(), OP,
                  ": expects banned {column, ids}, got ", describe(banned));

  int* now = out_ptr<int>(state);
  int64_t* token = out_ptr<int64_t>(tokens);
  int64_t longest = 0, column = now[1];
  for (int64_t b = 0; b < s.B; ++b) {
    STD_TORCH_CHECK(now[2 + b] >= 0 && now[2 + b] < s.capacity && now[2 + b] < positions, OP, ": row ", b, " has ",
                    now[2 + b], " tokens, and there is room for ", std::min(s.capacity, positions));
    STD_TORCH_CHECK(token[b] >= 0 && token[b] < embedding.size(0), OP, ": token ", token[b], " of row ", b,
                    " is not in the vocabulary of ", embedding.size(0));
    longest = std::max<int64_t>(longest, now[2 + b] + 1);
  }
  STD_TORCH_CHECK(!greedy || (column >= 0 && column < history.size(1)), OP, ": column ", column, " is outside of a ",
                  "history of ", history.size(1));
  std::vector<int> unwanted;
  const int* ban = in_ptr<int>(banned);
  if (column < ban[0])
    for (int64_t i = 1; i < banned.numel() && ban[i] >= 0; ++i)
      if (ban[i] < s.V) unwanted.push_back(ban[i]);
  std::vector<int64_t> next(static_cast<size_t>(s.B));

  int64_t threads = torch::stable::get_num_threads();
  // As many parts as give each thread a few units, of PART keys at least.
  int64_t units = s.B * s.kv_heads, parts = std::min((longest + PART - 1) / PART, (4 * threads + units - 1) / units);
  parts = std::max<int64_t>(1, std::min(parts, MAX_PARTS));
  QP_DISPATCH(dtype, {
    Step<T> step(s, dtype, weights == 2, unwanted, parts);
    step.table = in_ptr<LayerWeights>(layers);
    step.embedding = in_ptr<T>(embedding);
    step.final_norm = in_ptr<T>(final_norm);
    step.cos = in_ptr<T>(cos);
    step.sin = in_ptr<T>(sin);
    step.lm_head = {lm_head.data_ptr(), lm_head_scales ? in_ptr<float>(*lm_head_scales) : nullptr, s.V, s.H};
    step.eps = static_cast<float>(eps);
    step.scale = static_cast<float>(scale);
    step.tokens = token;
    step.lengths = now + 2;
    step.cache = out_ptr<T>(cache);
    step.logits = out_ptr<T>(logits);
    step.next = greedy ? next.data() : nullptr;
    Team team(threads);
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { step.run(team); });
  });
  for (int64_t b = 0; b < s.B; ++b) {
    if (greedy) token[b] = out_ptr<int64_t>(history)[b * history.size(1) + column] = next[static_cast<size_t>(b)];
    now[2 + b] += 1;
  }
  now[0] += 1;
  now[1] += 1;
}

}  // namespace
}  // namespace qwen_patch::cpu

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CPU, m) { m.impl("decode_step", TORCH_BOX(&qwen_patch::cpu::decode_step)); }
