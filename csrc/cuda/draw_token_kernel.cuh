// One token of each row, drawn from its best: temperature, top-k, top-p and min-p as Transformers' processors have
// them. Bytes: the scores twice, 2 x 300 KB in 16 bits for a vocabulary of 150,000. One multiprocessor reads that from
// L2 in some 6 us, a third of the time that it takes; a sort of them all takes ten times as long. Mapping: a block has
// one row. It takes the k-th largest of its threads' largest scores, which at least k scores reach; those that do, a
// few more than k, are candidates. They are sorted, and what is left is sums over them. Limits: top_k up to
// DRAW_LARGEST_K. Of more than DRAW_CANDIDATES that reach the k-th score, those that come last in the vocabulary are
// left out.
#pragma once

#include "common.cuh"

namespace qwen_patch::cuda {

constexpr int DRAW_THREADS = 1024, DRAW_CANDIDATES = DRAW_THREADS, DRAW_LARGEST_K = 256;
constexpr int DRAW_BANNED = 8;

template <typename T>
struct Draw {
  const T* scores;       // [rows, V]
  const float* uniform;  // [rows], in [0, 1)
  const int* banned;     // {column, ids, -1 ...}: not drawn before that column
  const int* state;      // [1]: the column after the one that is written
  int64_t* tokens;       // [rows]
  int64_t* history;      // [rows, columns]
  int V, columns, k, keep;
  float temperature, top_p, min_p;
};

// Floats in their order, as unsigned numbers; from -inf, which is LOWEST, on. Both zeros are the same.
__device__ __forceinline__ unsigned order_of(float x) {
  unsigned bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float at_order(unsigned order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}
constexpr unsigned LOWEST = 0x007fffffu;

// The largest number of BITS bits that `holds`. It must hold for 0, and for whatever is below a number that it holds
// for. All threads of a block ask, and get the same answers.
template <int BITS, typename F>
__device__ __forceinline__ unsigned largest_that(F&& holds) {
  unsigned found = 0;
#pragma unroll 1
  for (int bit = BITS - 1; bit >= 0; --bit)
    if (holds(found | 1u << bit)) found |= 1u << bit;
  return found;
}

__device__ __forceinline__ int sum_of_block(int mine) {
  __shared__ int sum;
  __syncthreads();
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  if (mine != 0) atomicAdd(&sum, mine);
  __syncthreads();
  return sum;
}

// Calls f(id, score) for this thread's scores of a row, N neighbours at a time.
template <typename T, int N>
struct Scores {
  const T* row;
  int V, bans;
  const int* banned;

  template <typename F>
  __device__ __forceinline__ void each(F&& f) const {
    constexpr int AT_ONCE = 4;
    for (int first = threadIdx.x * N; first < V; first += AT_ONCE * DRAW_THREADS * N) {
      Pack<T, N> packs[AT_ONCE];
#pragma unroll
      for (int a = 0; a < AT_ONCE; ++a)
        if (int id = first + a * DRAW_THREADS * N; id < V) packs[a] = *reinterpret_cast<const Pack<T, N>*>(row + id);
#pragma unroll
      for (int a = 0; a < AT_ONCE; ++a)
        if (int id = first + a * DRAW_THREADS * N; id < V) {
          unsigned out = 0;
#pragma unroll 1
          for (int b = 0; b < bans; ++b)
            if (unsigned at = static_cast<unsigned>(banned[b] - id); at < N) out |= 1u << at;
#pragma unroll
          for (int i = 0; i < N; ++i) f(id + i, out >> i & 1 ? -INFINITY : to_float(packs[a].v[i]));
        }
    }
  }
};

// The candidates, best first, and of equal ones the first in the vocabulary: order of the score, then ~id. In `count`
// how many there are; what is behind them, to the next power of two, is 0.
struct Candidates {
  unsigned long long of[DRAW_CANDIDATES];
  int count;

  __device__ __forceinline__ void add(int id, float score) {
    int at = atomicAdd(&count, 1);
    if (at < DRAW_CANDIDATES)
      of[at] = static_cast<unsigned long long>(order_of(score)) << 32 | ~static_cast<unsigned>(id);
  }
  __device__ __forceinline__ unsigned order(int i) const { return static_cast<unsigned>(of[i] >> 32); }
  __device__ __forceinline__ int id(int i) const { return static_cast<int>(~static_cast<unsigned>(of[i])); }

  __device__ __forceinline__ void sort(int size) {
    for (int i = count + threadIdx.x; i < size; i += DRAW_THREADS) of[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int length = 2; length <= size; length *= 2)
#pragma unroll 1
      for (int step = length / 2; step > 0; step /= 2) {
        int i = threadIdx.x, a = 2 * i - (i & (step - 1)), b = a + step;
        if (b < size && (of[a] < of[b]) == ((a & length) == 0)) {
          unsigned long long other = of[a];
          of[a] = of[b];
          of[b] = other;
        }
        __syncthreads();
      }
  }
};

// For more scores that reach the k-th than there is room for, which is rare: counts of them all find the k-th score
// itself, and where in the vocabulary those that tie with it have to end. Not inlined: it is as long as all the rest.
template <typename T, int N>
__device__ __noinline__ void best_that_fit(const Scores<T, N>& scores, int k, Candidates& found) {
  auto how_many = [&](auto&& counts) {
    int mine = 0;
    scores.each([&](int id, float score) { mine += score == score && counts(id, order_of(score)); });
    return sum_of_block(mine);
  };
  unsigned kth =
      largest_that<32>([&](unsigned at) { return how_many([&](int, unsigned order) { return order >= at; }) >= k; });
  int room = DRAW_CANDIDATES - how_many([&](int, unsigned order) { return order > kth; });
  unsigned end = largest_that<31>([&](unsigned at) {
    return how_many([&](int id, unsigned order) { return order == kth && id < static_cast<int>(at); }) <= room;
  });
  if (threadIdx.x == 0) found.count = 0;
  __syncthreads();
  scores.each([&](int id, float score) {
    if (score == score && (order_of(score) > kth || (order_of(score) == kth && id < static_cast<int>(end))))
      found.add(id, score);
  });
  __syncthreads();
}

// Fills `found` with what reaches the k-th score, NaN aside, and little else; with the best that fit, where it is more
// than that.
template <typename T, int N>
__device__ __forceinline__ void find_candidates(const Scores<T, N>& scores, int k, Candidates& found) {
  if (threadIdx.x == 0) found.count = 0;
  float most = -INFINITY;
  scores.each([&](int, float score) { most = fmaxf(most, score); });
  // 16 bits of the order are all that a score in bfloat16 has.
  unsigned high = order_of(most) >> 16;
  unsigned reached = largest_that<16>([&](unsigned at) { return __syncthreads_count(high >= at) >= k; });
  float least = reached > LOWEST >> 16 ? at_order(reached << 16) : -INFINITY;
  if (most >= least)
    scores.each([&](int id, float score) {
      if (score >= least) found.add(id, score);
    });
  __syncthreads();
  if (found.count <= DRAW_CANDIDATES) return;

  best_that_fit(scores, k, found);
}

// sums[i] becomes the sum of all threads' `mine` up to thread i, for i < size; seen by all.
__device__ __forceinline__ void sum_up(float mine, int size, float* sums) {
  int i = threadIdx.x;
  sums[i] = mine;
  __syncthreads();
#pragma unroll 1
  for (int step = 1; step < size; step *= 2) {
    float before = i >= step && i < size ? sums[i - step] : 0.f;
    __syncthreads();
    sums[i] += before;
    __syncthreads();
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(DRAW_THREADS) draw_token_of_row(Draw<T> p) {
  __shared__ Candidates best;
  __shared__ float sums[DRAW_CANDIDATES];
  __shared__ int banned[DRAW_BANNED];
  wait_for_previous();
  int i = threadIdx.x, row = blockIdx.x, column = p.state[1] - 1;
  if (i < DRAW_BANNED) banned[i] = p.banned[1 + i];
  __syncthreads();
  Scores<T, N> scores{p.scores + static_cast<int64_t>(row) * p.V, p.V, column < p.banned[0] ? DRAW_BANNED : 0, banned};
  find_candidates(scores, p.k, best);
  int size = 1;
  while (size < best.count) size *= 2;
  best.sort(size);

  // exp of the distance to the best; where that is -inf too, all are alike.
  float top = at_order(best.order(0)) / p.temperature, mass = 0.f;
  bool kept = i < best.count && best.order(i) >= best.order(min(p.k, best.count) - 1);
  if (kept) {
    float scaled = at_order(best.order(i)) / p.temperature;
    mass = scaled == top ? 1.f : expf(scaled - top);
  }
  sum_up(mass, size, sums);
  float total = sums[size - 1], from_here = total - (sums[i] - mass);
  kept = kept && (i < p.keep || ((p.top_p >= 1.f || from_here > (1.f - p.top_p) * total) && mass >= p.min_p)) &&
         mass > 0.f;
  int left = __syncthreads_count(kept);  // the first ones
  float drawn = p.uniform[row] * sums[max(left, 1) - 1];
  int at = __syncthreads_count(i < left - 1 && sums[i] <= drawn);
  if (i == 0) {
    int64_t token = best.count > 0 ? best.id(at) : 0;
    p.tokens[row] = token;
    p.history[static_cast<int64_t>(row) * p.columns + column] = token;
  }
}

template <typename T>
void launch_draw_token(const char* op, const Draw<T>& p, int64_t rows, cudaStream_t stream) {
  bool packs = p.V % PACK<T> == 0 && aligned16(p.scores);
  auto kernel = packs ? draw_token_of_row<T, PACK<T>> : draw_token_of_row<T, 1>;
  launch(op, kernel, dim3(static_cast<unsigned>(rows)), DRAW_THREADS, stream, p);
}

}  // namespace qwen_patch::cuda
