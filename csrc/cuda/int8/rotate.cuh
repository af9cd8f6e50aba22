// Weight rows and tokens, rotated and quantized row by row, to the bit by the rules of quantization/rotation.py.
// Bytes: 1 read and 1 written for each weight, s read and 1 written for each element of x of size s: bound by memory,
// as long as an element takes fewer than some 15 instructions. So tensor cores multiply the weights' codes by the
// Hadamard matrix, exactly; tokens, which are fewer, take six additions.
// Mapping: a block has one row, a warp CHUNKS times 8 groups of it, in registers from the first read to the codes: by
// then the block knows the row's largest |value|. More chunks, fewer instructions for what each warp does once.
// Limits: K up to ROTATE_LARGEST_K.
#pragma once

#include "codes.cuh"

namespace qwen_patch::cuda::int8 {

constexpr int ROTATE_THREADS = 512, ROTATE_CHUNKS = 4;  // of a block, and of 16 elements that a lane holds: at most
constexpr int ROTATE_LARGEST_K = ROTATE_THREADS * 16 * ROTATE_CHUNKS;

constexpr int ROTATE_WEIGHTS = 4;  // that a call may have side by side

// Both sides of y = x W^T in one matrix of codes: N rows of the weights, one after the other, then M tokens.
template <typename T>
struct RotatedRows {
  struct Weight {
    const int8_t* values;  // [rows, K]
    const float* scales;   // [rows, G]
    const void* bias;      // [rows], or null
    bool bias_is_float;    // else of T
    int first;             // of its rows
  } weights[ROTATE_WEIGHTS];
  int count;
  const T* x;         // [M, K]
  int8_t* codes;      // [N + M, G * 64]
  float* row_scales;  // [N + M]
  float* biases;      // [N], or null: of all weights
  int M, N, K, G;
};

// A weight row: 8 groups from group g on, and 8 more for each chunk, rotated. Lane 4L + t reads numbers 16t to 16t + 15
// of group L, and gets numbers 8L to 8L + 7 of groups 2t (the first 8 of v) and 2t + 1.
// The matrix has (-1)^(ones of r & c) at row r, column c. A fragment's four bytes are columns 16t + 8s + 4h + j, j
// their place; its rows are put in such an order that number q of a lane's 8 is row 8L + q.
template <int CHUNKS>
__device__ __forceinline__ void rotated_codes(const int8_t* row, int g, int K, float (&v)[CHUNKS][16]) {
  int lane = threadIdx.x & 31, L = lane >> 2, t = lane & 3, k = g * GROUP + 16 * lane;
  uint4 codes[CHUNKS];  // as two times 8: K is a multiple of 8
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const uint2* from = reinterpret_cast<const uint2*>(row + k + c * 8 * GROUP);
    int left = K - k - c * 8 * GROUP;
    uint2 low = left > 0 ? from[0] : uint2{}, high = left > 8 ? from[1] : uint2{};
    codes[c] = make_uint4(low.x, low.y, high.x, high.y);
  }
  // -1 where the lane's share of r & c has an odd number of ones: 1 and -1 differ in all bits but the lowest.
  constexpr unsigned FLIP = 0xfefefefe;
  unsigned odd = __popc(L >> 1 & t) & 1, sign[2] = {odd ? FLIP : 0, odd ^ (L & 1) ? FLIP : 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // rows 8L + 2i and 8L + 2i + 1
    unsigned a[2][4];
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        int q = 2 * i + part % 2, h = part / 2;
        unsigned ones = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int both = q & (4 * h + j);
          ones |= ((both ^ both >> 1 ^ both >> 2) & 1 ? 0xffu : 1u) << 8 * j;
        }
        a[s][part] = ones ^ sign[s];
      }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      int d[4];
      mma_int8(d, a[0][0], a[0][1], a[0][2], a[0][3], codes[c].x, codes[c].y, MAGIC_BITS);
      mma_int8(d, a[1][0], a[1][1], a[1][2], a[1][3], codes[c].z, codes[c].w);
      v[c][2 * i] = __int_as_float(d[0]) - MAGIC;
      v[c][2 * i + 8] = __int_as_float(d[1]) - MAGIC;
      v[c][2 * i + 1] = __int_as_float(d[2]) - MAGIC;
      v[c][2 * i + 9] = __int_as_float(d[3]) - MAGIC;
    }
  }
}

// A token: 16 neighbours of it from k on, and 16 more for each chunk, rotated with those of the other 3 lanes of a
// group.
template <typename T, int CHUNKS>
__device__ __forceinline__ void rotated_states(const T* x, int k, int K, float (&v)[CHUNKS][16]) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < 16; i += PACK<T>) {
      int at = k + c * 8 * GROUP + i;
      Pack<T, PACK<T>> raw = {};
      if (at < K) raw = *reinterpret_cast<const Pack<T, PACK<T>>*>(x + at);
#pragma unroll
      for (int j = 0; j < PACK<T>; ++j) v[c][i + j] = to_float(raw.v[j]);
    }
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
    for (int apart = 1; apart < 16; apart *= 2)
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (!(i & apart)) {
          float a = v[c][i], b = v[c][i + apart];
          v[c][i] = a + b;
          v[c][i + apart] = a - b;
        }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < 16; ++i) v[c][i] = fmaf(v[c][i], sign, __shfl_xor_sync(~0u, v[c][i], lanes));
    }
  }
}

// The largest |v|; NaN if one of them is.
template <int COUNT>
__device__ __forceinline__ float largest_of(const float* v) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(v[i])));
  return most;
}

// Bits of a number >= 0 or of a NaN, the largest of a block's: NaN is beyond infinity.
__device__ __forceinline__ unsigned largest_of_block(unsigned mine) {
  __shared__ unsigned of_warps[32];
  mine = __reduce_max_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  unsigned lane = threadIdx.x % 32;
  return __reduce_max_sync(~0u, lane < blockDim.x / 32 ? of_warps[lane] : 0u);
}

// 8 codes: v * factor, rounded once.
__device__ __forceinline__ uint2 codes_of_8(const float* v, float factor) {
  auto code = [&](int i) { return __float_as_uint(fmaf(v[i], factor, MAGIC)); };  // the low byte
  auto four = [&](int i) {
    return __byte_perm(__byte_perm(code(i), code(i + 1), 0x0040), __byte_perm(code(i + 2), code(i + 3), 0x0040),
                       0x5410);
  };
  return make_uint2(four(0), four(4));
}

template <typename T, int CHUNKS>
__global__ void __launch_bounds__(ROTATE_THREADS) rotate_rows(RotatedRows<T> p) {
  wait_for_previous();
  int row = blockIdx.x, m = row - p.N, lane = threadIdx.x & 31, g = threadIdx.x / 32 * 8 * CHUNKS;
  // Where a lane's first 8 results lie, and how far the next 8 are: a token's are neighbours.
  int first = g * GROUP + lane * 16, apart = 8;
  float v[CHUNKS][16], scales[CHUNKS][2];
  unsigned largest = 0;
  // The weights' scales, before the branch: inside it the compiler asks for them when the codes have come.
  int which = 0;
  for (int i = 1; i < p.count; ++i) which += row >= p.weights[i].first;
  const auto& weight = p.weights[which];
  int own = row - weight.first;
  int of = g + lane % 4 * 2, groups = m < 0 ? p.G - of : 0;
  const float* row_scales = weight.scales + static_cast<int64_t>(own) * p.G + of;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i) scales[c][i] = 8 * c + i < groups ? row_scales[8 * c + i] : 1.f;
  if (m < 0) {
    rotated_codes(weight.values + static_cast<int64_t>(own) * p.K, g, p.K, v);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        largest = max(largest, __float_as_uint(largest_of<8>(v[c] + 8 * i) * scales[c][i]) & 0x7fffffff);
    first = of * GROUP + lane / 4 * 8;
    apart = GROUP;
  } else {
    rotated_states(p.x + static_cast<int64_t>(m) * p.K, first, p.K, v);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) largest = max(largest, __float_as_uint(largest_of<16>(v[c])) & 0x7fffffff);
  }
  largest = largest_of_block(largest);
  bool finite = largest < 0x7f800000, counts = finite && __uint_as_float(largest) >= 0x1p-100f;
  // Where the scale is NaN the codes do not count.
  float inverse = counts ? __fdiv_rn(127.f, __uint_as_float(largest)) : 0.f;
  int8_t* to = p.codes + static_cast<int64_t>(row) * p.G * GROUP + first;
  int left = p.G * GROUP - first;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint2 codes = codes_of_8(v[c] + 8 * i, scales[c][i] * inverse);
      if (c * 8 * GROUP + i * apart < left) *reinterpret_cast<uint2*>(to + c * 8 * GROUP + i * apart) = codes;
    }
  if (threadIdx.x == 0) {
    float scale = finite ? 0.f : __uint_as_float(0x7fffffff);
    p.row_scales[row] = counts ? __fdiv_rn(__uint_as_float(largest), 127.f * 8) : scale;
    if (m < 0 && p.biases != nullptr) p.biases[row] = bias_at<T>(weight, own);
  }
}

template <typename T>
void launch_rotate(const RotatedRows<T>& p, cudaStream_t stream) {
  int warps = (p.G + 7) / 8, chunks = warps >= 4 ? 4 : warps >= 2 ? 2 : 1;
  int threads = (warps + chunks - 1) / chunks * 32;
  auto kernel = chunks == 4 ? rotate_rows<T, 4> : chunks == 2 ? rotate_rows<T, 2> : rotate_rows<T, 1>;
  launch(ROTATED_OP, kernel, dim3(static_cast<unsigned>(p.N + p.M)), threads, stream, p);
}

}  // namespace qwen_patch::cuda::int8
