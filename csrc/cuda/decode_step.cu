// decode_step on CUDA: checks and registration. The kernel is in decode/step.cuh, its launch in decode/launch.cuh.
#include <algorithm>
#include <optional>

#include "decode/launch.cuh"

namespace qwen_patch::cuda {
namespace {

using namespace decode;

constexpr int64_t AS_EMBEDDING = 0, W8A16 = 1;  // as in ops/decode_step.py
// The hidden size from which on one row meets int8 weights in digits. Qwen3-8B (4,096): 2,458 us so, 2,537 else;
// Qwen3-0.6B (1,024): 577 and 556.
constexpr int64_t DIGITS_FROM = 2048;

// Sizes of what blocks exchange, in 4-byte words from the start of the `exchange` tensor; every part a multiple of 16
// bytes.
struct Exchange {
  int64_t qkv, parts, weights, attended, hidden, activation, best, total;
  Exchange(int64_t B, int64_t H, int64_t I, int64_t q, int64_t kv, int64_t heads, int64_t splits, int64_t blocks) {
    qkv = 0;
    parts = qkv + B * (q + 2 * kv);
    weights = parts + splits * B * q;
    attended = weights + (splits * B * heads * 2 + 3) / 4 * 4;
    hidden = attended + B * q;
    activation = hidden + B * H;
    best = activation + B * I;
    total = best + blocks * MAX_BATCH * 2;
  }
};

// The sizes of a step of B rows, as every multiprocessor has them.
template <typename T>
Step<T> sized(int64_t L, int64_t H, int64_t I, int64_t V, int64_t heads, int64_t kv_heads, int64_t D, int64_t B) {
  int blocks = device_traits().multiprocessors;
  auto of_block = [&](int64_t n, int64_t rows) { return static_cast<int>((n + blocks * rows - 1) / (blocks * rows)); };
  Step<T> p = {};
  p.layer_count = static_cast<int>(L);
  p.H = static_cast<int>(H);
  p.I = static_cast<int>(I);
  p.V = static_cast<int>(V);
  p.heads = static_cast<int>(heads);
  p.kv_heads = static_cast<int>(kv_heads);
  p.B = static_cast<int>(B);
  p.inverse_H = 1.f / static_cast<float>(H);
  // With one row the whole input of the longest stage is kept, or a multiple of the 4 chunks that are asked for at
  // once; with more, a normed input.
  p.x_chunks = B == 1 ? 8 : chunks_of(p.H);
  // A stage of whole phases is one group: it needs room for all its tiles.
  p.tile_group = B == 1 ? MAX_TILES : std::max(2, of_block(H, 16));
  p.route_count = (of_block(heads * D, 8) + 2 * of_block(kv_heads * D, 8) + 1) / 2 * 16;
  return p;
}

// What the kernel would have of its ring of weights; below MIN_SLOTS it can't run. Both dtypes are 16 bits, and int8
// takes the most room.
int64_t decode_step_slots(Tensor embedding, int64_t layers, int64_t heads, int64_t kv_heads, int64_t head_dim,
                          int64_t intermediate, int64_t rows) {
  DeviceGuard guard(embedding);
  using T = __nv_bfloat16;
  int slots = 0;
  auto p = sized<T>(layers, embedding.size(1), intermediate, embedding.size(0), heads, kv_heads, head_dim, rows);
  with_constants<T>(head_dim, rows, [&](auto d, auto shift) {
    using W = std::conditional_t<shift.value == 0, Code, int8_t>;
    slots = slots_that_fit<T, W, d.value, shift.value>(p);
  });
  return slots;
}

int64_t decode_step_exchange(Tensor embedding, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t intermediate,
                             int64_t rows, int64_t max_splits) {
  DeviceGuard guard(embedding);
  return Exchange(rows, embedding.size(1), intermediate, heads * head_dim, kv_heads * head_dim, heads, max_splits,
                  device_traits().multiprocessors)
      .total;
}

void decode_step(Tensor layers, Tensor embedding, Tensor final_norm, Tensor lm_head,
                 std::optional<Tensor> lm_head_scales, Tensor cos, Tensor sin, Tensor tokens, Tensor cache,
                 Tensor exchange, Tensor state, Tensor history, Tensor banned, Tensor logits, int64_t heads,
                 int64_t intermediate, int64_t weights, double eps, double scale, bool greedy, int64_t max_splits,
                 int64_t split_keys, int64_t slots, int64_t in_flight) {
  DeviceGuard guard(embedding);
  bool int8 = weights == W8A16;
  STD_TORCH_CHECK(int8 || weights == AS_EMBEDDING, DECODE_STEP,
                  ": takes 16-bit weights, or int8 ones with 16-bit activations");
  STD_TORCH_CHECK(int8 || !lm_head_scales, DECODE_STEP, ": takes an int8 lm_head with int8 layers only");
  STD_TORCH_CHECK(lm_head.scalar_type() == (lm_head_scales ? ScalarType::Char : embedding.scalar_type()), DECODE_STEP,
                  ": expects lm_head of the embedding's dtype, or int8 with scales, got ", describe(lm_head));
  STD_TORCH_CHECK(banned.numel() == 1 + MAX_BANNED, DECODE_STEP, ": expects banned [", 1 + MAX_BANNED, "], got ",
                  describe(banned));
  int64_t B = tokens.size(0), V = embedding.size(0), H = embedding.size(1), L = layers.size(0);
  STD_TORCH_CHECK(cache.dim() == 6 && cache.size(0) == L && cache.size(1) == 2 && cache.size(2) == B, DECODE_STEP,
                  ": expects cache [L, 2, B, kv_heads, capacity, D], got ", describe(cache));
  int64_t kv = cache.size(3), capacity = cache.size(4), D = cache.size(5);
  int blocks = device_traits().multiprocessors;
  STD_TORCH_CHECK(B >= 1 && B <= MAX_BATCH, DECODE_STEP, ": supports 1 to 8 rows, got ", B);
  int multiple = int8 ? GROUP : 32;
  STD_TORCH_CHECK(H % multiple == 0 && intermediate % multiple == 0 && heads * D % multiple == 0, DECODE_STEP,
                  ": needs sizes that are multiples of ", multiple);
  STD_TORCH_CHECK(heads % kv == 0 && heads / kv <= MAX_GROUP, DECODE_STEP,
                  ": supports up to 8 query heads a key-value head");
  // Each block must have a row of every stage: that no block runs ahead of another's reads rests on it.
  STD_TORCH_CHECK(H >= blocks && intermediate >= blocks && heads * D >= blocks && V >= blocks, DECODE_STEP,
                  ": the model is too small for this device");
  STD_TORCH_CHECK(H <= MAX_HIDDEN && (H + blocks - 1) / blocks <= 16 * MAX_TILES, DECODE_STEP, ": hidden size ", H,
                  " is too large");
  Exchange e(B, H, intermediate, heads * D, kv * D, heads, max_splits, blocks);
  STD_TORCH_CHECK(exchange.numel() >= e.total, DECODE_STEP, ": exchange needs ", e.total, " words, has ",
                  exchange.numel());
  STD_TORCH_CHECK(B * kv * max_splits <= blocks, DECODE_STEP, ": ", B, " rows x ", kv, " key-value heads x ",
                  max_splits, " parts are more than ", blocks, " multiprocessors");
  auto run = [&](auto zero, auto weight) {
    using T = decltype(zero);
    using W = decltype(weight);
    Step<T> p = sized<T>(L, H, intermediate, V, heads, kv, D, B);
    p.layers = in_ptr<LayerWeights<T>>(layers);
    p.embedding = in_ptr<T>(embedding);
    p.final_norm = in_ptr<T>(final_norm);
    p.lm_head = {lm_head.const_data_ptr(), lm_head_scales ? in_ptr<float>(*lm_head_scales) : nullptr};
    p.cos = in_ptr<T>(cos);
    p.sin = in_ptr<T>(sin);
    p.eps = static_cast<float>(eps);
    p.scale = static_cast<float>(scale * 1.4426950408889634);
    p.cache = out_ptr<T>(cache);
    p.capacity = static_cast<int>(capacity);
    p.tokens = out_ptr<int64_t>(tokens);
    p.history = out_ptr<int64_t>(history);
    p.history_stride = static_cast<int>(history.size(1));
    p.state = out_ptr<int>(state);
    p.greedy = greedy;
    p.banned = in_ptr<int>(banned);
    p.logits = out_ptr<T>(logits);
    unsigned* words = out_ptr<unsigned>(exchange);
    p.qkv = words + e.qkv;
    p.parts = reinterpret_cast<uint2*>(words + e.parts);
    p.part_weights = reinterpret_cast<uint2*>(words + e.weights);
    p.attended = words + e.attended;
    p.hidden = words + e.hidden;
    p.activation = words + e.activation;
    p.best = reinterpret_cast<uint2*>(words + e.best);
    p.max_splits = static_cast<int>(max_splits);
    p.split_keys = static_cast<int>(split_keys);
    p.slots = static_cast<int>(slots);
    p.in_flight = static_cast<int>(in_flight);
    auto stream = current_stream(embedding);
    with_constants<W>(D, B, [&](auto d, auto shift) { launch_step<T, W, d.value, shift.value>(p, stream); });
  };
  auto run_with = [&](auto zero) {
    if (!int8)
      run(zero, zero);
    else if (B == 1 && H >= DIGITS_FROM)
      run(zero, Code{});
    else
      run(zero, int8_t{});
  };
  if (embedding.scalar_type() == ScalarType::BFloat16)
    run_with(__nv_bfloat16{});
  else if (embedding.scalar_type() == ScalarType::Half)
    run_with(__half{});
  else
    STD_TORCH_CHECK(false, DECODE_STEP, ": supports bfloat16 and float16, got ", describe(embedding));
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) {
  m.impl("decode_step", TORCH_BOX(&qwen_patch::cuda::decode_step));
  m.impl("decode_step_slots", TORCH_BOX(&qwen_patch::cuda::decode_step_slots));
  m.impl("decode_step_exchange", TORCH_BOX(&qwen_patch::cuda::decode_step_exchange));
}
