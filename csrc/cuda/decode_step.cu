// decode_step on CUDA: checks, the launch's configuration, registration. The kernel is in decode/step.cuh.
#include "decode/step.cuh"

namespace qwen_patch::cuda {
namespace {

using namespace decode;

constexpr const char* OP = "decode_step";

// Sizes of what blocks exchange, in 4-byte words from the start of the `exchange` tensor; every part a multiple of 16
// bytes. ops/decode_step.py asks for the sum.
struct Exchange {
  int64_t qkv, parts, weights, hidden, activation, best, total;
  Exchange(int64_t B, int64_t H, int64_t I, int64_t q, int64_t kv, int64_t heads, int64_t splits, int64_t blocks) {
    qkv = 0;
    parts = qkv + B * (q + 2 * kv);
    weights = parts + splits * B * q;
    hidden = weights + (splits * B * heads * 2 + 3) / 4 * 4;
    activation = hidden + B * H;
    best = activation + B * I;
    total = best + blocks * MAX_BATCH * 2;
  }
};

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(OP, cudaGetDevice(&device));
  check(OP, cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

template <typename T, int D, int SHIFT>
void launch_step(Step<T> p, int blocks, cudaStream_t stream) {
  int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int wanted = p.slots;
  p.slots = 1;
  int slots = 1 + (limit - Layout<T, D, SHIFT>(p).total - 256) / (SLOT_BYTES + 128);
  if (wanted > 0 && wanted < slots) slots = wanted;
  STD_TORCH_CHECK(slots >= 3, OP, ": needs shared memory for 3 slots, this device has ", limit, " bytes a block");
  p.slots = slots;
  if (p.in_flight <= 0 || p.in_flight > slots) p.in_flight = slots;
  int bytes = Layout<T, D, SHIFT>(p).total;
  auto kernel = decode_step_kernel<T, D, SHIFT>;
  check(OP, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;  // all blocks are on the device at once, or the launch fails
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  check(OP, cudaLaunchKernelEx(&config, kernel, p));
}

template <typename T, int SHIFT>
void launch_for(int64_t D, const Step<T>& p, int blocks, cudaStream_t stream) {
  switch (D) {
    case 32:
      return launch_step<T, 32, SHIFT>(p, blocks, stream);
    case 64:
      return launch_step<T, 64, SHIFT>(p, blocks, stream);
    case 96:
      return launch_step<T, 96, SHIFT>(p, blocks, stream);
    case 128:
      return launch_step<T, 128, SHIFT>(p, blocks, stream);
    default:
      STD_TORCH_CHECK(false, OP, ": supports head_dim 32, 64, 96 and 128, got ", D);
  }
}

void decode_step(Tensor layers, Tensor embedding, Tensor final_norm, Tensor lm_head, Tensor cos, Tensor sin,
                 Tensor tokens, Tensor cache, Tensor exchange, Tensor state, Tensor history, Tensor banned,
                 Tensor logits, int64_t heads, int64_t intermediate, double eps, double scale, bool greedy,
                 int64_t max_splits, int64_t split_keys, int64_t slots, int64_t in_flight) {
  DeviceGuard guard(embedding);
  STD_TORCH_CHECK(banned.numel() == 1 + MAX_BANNED, OP, ": expects banned [9], got ", describe(banned));
  int64_t B = tokens.size(0), V = embedding.size(0), H = embedding.size(1), L = layers.size(0);
  STD_TORCH_CHECK(cache.dim() == 6 && cache.size(0) == L && cache.size(1) == 2 && cache.size(2) == B, OP,
                  ": expects cache [L, 2, B, kv_heads, capacity, D], got ", describe(cache));
  int64_t kv = cache.size(3), capacity = cache.size(4), D = cache.size(5);
  int blocks = device_traits().multiprocessors;
  STD_TORCH_CHECK(B >= 1 && B <= MAX_BATCH, OP, ": supports 1 to 8 rows, got ", B);
  STD_TORCH_CHECK(H % 32 == 0 && intermediate % 32 == 0, OP, ": needs sizes that are multiples of 32");
  STD_TORCH_CHECK(heads % kv == 0 && heads / kv <= MAX_GROUP, OP, ": supports up to 8 query heads a key-value head");
  STD_TORCH_CHECK(H >= blocks && intermediate >= blocks && heads * D >= blocks && V >= blocks, OP,
                  ": the model is too small for this device");
  STD_TORCH_CHECK(H <= MAX_HIDDEN && (H + blocks - 1) / blocks <= 16 * MAX_TILES, OP, ": hidden size ", H,
                  " is too large");
  Exchange e(B, H, intermediate, heads * D, kv * D, heads, max_splits, blocks);
  STD_TORCH_CHECK(exchange.numel() >= e.total, OP, ": exchange needs ", e.total, " words, has ", exchange.numel());
  STD_TORCH_CHECK(B * kv * max_splits <= blocks, OP, ": max_splits is too large");
  auto run = [&](auto zero) {
    using T = decltype(zero);
    Step<T> p = {};
    p.layers = in_ptr<LayerWeights<T>>(layers);
    p.embedding = in_ptr<T>(embedding);
    p.final_norm = in_ptr<T>(final_norm);
    p.lm_head = in_ptr<T>(lm_head);
    p.cos = in_ptr<T>(cos);
    p.sin = in_ptr<T>(sin);
    p.layer_count = static_cast<int>(L);
    p.H = static_cast<int>(H);
    p.I = static_cast<int>(intermediate);
    p.V = static_cast<int>(V);
    p.heads = static_cast<int>(heads);
    p.kv_heads = static_cast<int>(kv);
    p.eps = static_cast<float>(eps);
    p.inverse_H = 1.f / static_cast<float>(H);
    p.scale = static_cast<float>(scale * 1.4426950408889634);
    p.B = static_cast<int>(B);
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
    p.hidden = words + e.hidden;
    p.activation = words + e.activation;
    p.best = reinterpret_cast<uint2*>(words + e.best);
    p.max_splits = static_cast<int>(max_splits);
    p.split_keys = static_cast<int>(split_keys);
    p.slots = static_cast<int>(slots);
    p.in_flight = static_cast<int>(in_flight);
    auto octets = [&](int64_t n) { return static_cast<int>((n + blocks * 8 - 1) / (blocks * 8)); };  // of a block
    p.route_count = (octets(heads * D) + 2 * octets(kv * D) + 1) / 2 * 16;
    int h_chunks = static_cast<int>((H + CHUNK - 1) / CHUNK);
    // With one row the whole input of the longest stage is kept; with more, at least a normed input.
    p.x_chunks = B == 1 && h_chunks < 8 ? 8 : h_chunks;
    // A stage of whole phases is one group: it needs room for all its tiles.
    int hidden_tiles = static_cast<int>((H + blocks * 16 - 1) / (blocks * 16));
    p.tile_group = B == 1 ? MAX_TILES : hidden_tiles < 2 ? 2 : hidden_tiles;
    if (B == 1)
      launch_for<T, 0>(D, p, blocks, current_stream(embedding));
    else
      launch_for<T, 3>(D, p, blocks, current_stream(embedding));
  };
  if (embedding.scalar_type() == ScalarType::BFloat16)
    run(__nv_bfloat16{});
  else if (embedding.scalar_type() == ScalarType::Half)
    run(__half{});
  else
    STD_TORCH_CHECK(false, OP, ": supports bfloat16 and float16, got ", describe(embedding));
}

}  // namespace
}  // namespace qwen_patch::cuda

STABLE_TORCH_LIBRARY_IMPL(qwen_patch, CUDA, m) { m.impl("decode_step", TORCH_BOX(&qwen_patch::cuda::decode_step)); }
