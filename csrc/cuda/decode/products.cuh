// A warp's products: 16 rows of weights with its columns of one chunk of the input, and how the input lies in shared
// memory for that. Three ways, by what the weights are taken as.
//
// A lane's operands are 16 bytes in a row, weights as well as input: within 32 or 64 columns k is permuted, on both
// sides alike.
#pragma once

#include "../int8/digits.cuh"
#include "ring.cuh"

namespace qwen_patch::cuda::decode {

// int8 weights that meet an input in digits, below.
enum class Code : int8_t {};

// V: the weights' type. ROOM: rows of the batch that there is room for.
// store(): a lane's 4 values of row b of the batch, called by a whole warp; `there`: whether the lane has any.
// Weights, load(): what a lane has of a tile, whose rows of the two octets are at row and row2, and their scales
// `scales` beyond them. Input, input(): the same of its row of the batch. products(): of both, added to c, in two sums;
// both: whether the tile has its second octet. OfInput: what depends on the input alone, kept from one tile to the
// next; `anew`: it is another input than in the last call. result(): sum number i, by a whole warp.
template <typename T, typename V, int ROOM>
struct KeptInput {
  static_assert(std::is_same_v<V, T>);
  struct OfInput {};

  // Odd rows of the batch keep their halves of 128 bytes swapped: a fragment's read covers two rows.
  static __device__ __forceinline__ void store(unsigned at, int b, int lane, uint2 v, bool there) {
    if (there) store64(at + ((lane * 8) ^ ((b & 1) << 6)), v);
  }

  struct Weights {
    uint4 A[4], A2[4];
  };
  struct Input {
    uint4 X[4];
  };
  static __device__ __forceinline__ void load(Weights& w, unsigned row, unsigned row2, unsigned) {
#pragma unroll
    for (int j = 0; j < 4; ++j) w.A[j] = load128(row + j * 64), w.A2[j] = load128(row2 + j * 64);
  }
  static __device__ __forceinline__ Input input(unsigned x, int lane) {
    int swapped = ((lane >> 2) & (ROOM - 1) & 1) << 6;
    unsigned even = x + (lane & 3) * 16 + swapped, odd = x + (lane & 3) * 16 - swapped;
    return {{load128(even), load128(odd + 64), load128(even + 128), load128(odd + 192)}};
  }
  // Over `groups` of 32 columns, at most four.
  static __device__ __forceinline__ void products(float (&c)[2][4], const Weights& w, const Input& x, int groups, bool,
                                                  OfInput&, bool) {
    if (groups >= 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply(c, w.A[j], w.A2[j], x.X[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 3; ++j)
        if (j < groups) multiply(c, w.A[j], w.A2[j], x.X[j]);
    }
  }

  static __device__ __forceinline__ float result(const float (&c)[2][4], int i) { return c[0][i] + c[1][i]; }

  // 16 rows times 32 columns: A and A2 are 8 values of this lane's rows of the two octets, X of its row of the batch.
  static __device__ __forceinline__ void multiply(float (&c)[2][4], const uint4& A, const uint4& A2, const uint4& X) {
    mma<T>(c[0], A.x, A2.x, A.y, A2.y, X.x, X.y);
    mma<T>(c[1], A.z, A2.z, A.w, A2.w, X.z, X.w);
  }
};

// What a lane has of a tile of int8 weights: of its rows of the two octets 16 codes of each group of 64 columns, and
// the groups' scales.
struct CodesOfTile {
  uint4 A, A2, B, B2;
  uint2 s, s2;
  __device__ __forceinline__ void load(unsigned row, unsigned row2, unsigned scales) {
    A = load128(row), A2 = load128(row2), B = load128(row + GROUP), B2 = load128(row2 + GROUP);
    s = load64(row + scales), s2 = load64(row2 + scales);
  }
};

// A code plus 128 is its own 16 bits: as T it counts in T's smallest step, and nothing has to be converted. Products of
// the same x with a constant take the 128 off again. That tensor cores take subnormal operands as they are was seen on
// sm_90. In bfloat16 x is kept 2^64 times as large, which is exact below 2^63: a product with the smallest step,
// 2^-133, would be below what fp32 has all its bits for.
template <typename T, int ROOM>
struct KeptInput<T, int8_t, ROOM> {
  using In16Bits = KeptInput<T, T, ROOM>;
  static constexpr bool ENLARGED = std::is_same_v<T, __nv_bfloat16>;
  static constexpr float UNIT = ENLARGED ? 0x1p69f : 0x1p24f;

  // Odd rows keep each two pieces of 16 bytes swapped.
  static __device__ __forceinline__ void store(unsigned at, int b, int lane, uint2 v, bool there) {
    constexpr unsigned TWO_TO_64 = 0x5f805f80;
    if constexpr (ENLARGED) v = make_uint2(multiply2<T>(v.x, TWO_TO_64), multiply2<T>(v.y, TWO_TO_64));
    if (there) store64(at + ((lane * 8) ^ ((b & 1) << 4)), v);
  }

  // 128 of each group's x, to be taken off; of this lane's two columns of the product.
  struct OfInput {
    float off[2][2];
  };

  using Weights = CodesOfTile;
  struct Input {
    uint4 X, X2, Y, Y2;
  };
  static __device__ __forceinline__ void load(Weights& w, unsigned row, unsigned row2, unsigned scales) {
    w.load(row, row2, scales);
  }
  static __device__ __forceinline__ Input input(unsigned x, int lane) {
    int swapped = ((lane >> 2) & (ROOM - 1) & 1) << 4;
    unsigned first = x + (lane & 3) * 32 + swapped, second = x + (lane & 3) * 32 + 16 - swapped;
    return {load128(first), load128(second), load128(first + 128), load128(second + 128)};
  }
  // Over `groups` of 64 columns, at most two.
  static __device__ __forceinline__ void products(float (&c)[2][4], const Weights& w, const Input& x, int groups,
                                                  bool both, OfInput& kept, bool anew) {
    constexpr unsigned O = int8::MINUS_128;
    constexpr uint4 OFF = {O, O, O, O};
    auto take_off = [&](int group, const uint4& X, const uint4& X2) {
      float sums[2][4] = {};
      In16Bits::multiply(sums, OFF, OFF, X);
      In16Bits::multiply(sums, OFF, OFF, X2);
#pragma unroll
      for (int i = 0; i < 2; ++i) kept.off[group][i] = sums[0][i] + sums[1][i];
    };
    auto add = [&](int group, const uint4& A, const uint4& A2, const uint4& X, const uint4& X2, unsigned scale,
                   unsigned scale2) {
      const float (&off)[2] = kept.off[group];
      float sums[2][4] = {{off[0], off[1], off[0], off[1]}};
      In16Bits::multiply(sums, int8::plus_128({A.x, A.y}), int8::plus_128({A2.x, A2.y}), X);
      In16Bits::multiply(sums, int8::plus_128({A.z, A.w}), int8::plus_128({A2.z, A2.w}), X2);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[group][i] += __uint_as_float(i < 2 ? scale : scale2) * (sums[0][i] + sums[1][i]);
    };
    // Without a second octet its rows of the product take the 128 off.
    auto add_one = [&](int group, const uint4& A, const uint4& X, const uint4& X2, unsigned scale) {
      float sums[2][4] = {};
      In16Bits::multiply(sums, int8::plus_128({A.x, A.y}), OFF, X);
      In16Bits::multiply(sums, int8::plus_128({A.z, A.w}), OFF, X2);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        c[group][i] += __uint_as_float(scale) * ((sums[0][i] + sums[0][i + 2]) + (sums[1][i] + sums[1][i + 2]));
    };
    if (both && anew) take_off(0, x.X, x.X2), take_off(1, x.Y, x.Y2);
    if (groups >= 2) {  // as one block, so that the two groups' products are under way together
      if (both) {
        add(0, w.A, w.A2, x.X, x.X2, w.s.x, w.s2.x);
        add(1, w.B, w.B2, x.Y, x.Y2, w.s.y, w.s2.y);
      } else {
        add_one(0, w.A, x.X, x.X2, w.s.x);
        add_one(1, w.B, x.Y, x.Y2, w.s.y);
      }
    } else if (groups == 1) {
      if (both)
        add(0, w.A, w.A2, x.X, x.X2, w.s.x, w.s2.x);
      else
        add_one(0, w.A, x.X, x.X2, w.s.x);
    }
  }

  static __device__ __forceinline__ float result(const float (&c)[2][4], int i) {
    return In16Bits::result(c, i) * UNIT;
  }
};

// One row, in digits (int8/digits.cuh): half the instructions of those above, but more work on an input before its
// first product, so for long inputs. A warp's columns of a chunk have one unit. In shared memory: for each of the two
// groups of 64 columns three digits of 64 bytes, the highest first; the unit.
template <typename T>
struct KeptInput<T, Code, 1> {
  static constexpr int UNIT_AT = 2 * int8::DIGITS * GROUP;
  struct OfInput {};

  static __device__ __forceinline__ void store(unsigned at, int, int lane, uint2 v, bool there) {
    float2 lo = unpack2<T>(v.x), hi = unpack2<T>(v.y);
    float values[4] = {lo.x, lo.y, hi.x, hi.y};
    unsigned largest = 0, words[int8::DIGITS];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!there) values[i] = 0.f;
      largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
    }
    int8::DigitUnit of(__reduce_max_sync(~0u, largest));
    int8::digits_of(values, of.inverse, words);
#pragma unroll
    for (int i = 0; i < int8::DIGITS; ++i)
      store32(at + (lane >> 4) * (int8::DIGITS * GROUP) + i * GROUP + (lane & 15) * 4, words[i]);
    if (lane == 0) store32(at + UNIT_AT, __float_as_uint(of.unit));
  }

  using Weights = CodesOfTile;
  struct Input {
    uint4 X, Y;
    float unit;
  };
  static __device__ __forceinline__ void load(Weights& w, unsigned row, unsigned row2, unsigned scales) {
    w.load(row, row2, scales);
  }
  static __device__ __forceinline__ Input input(unsigned x, int lane) {
    unsigned digit = x + min(lane >> 2, int8::DIGITS - 1) * GROUP + (lane & 3) * 16;
    return {load128(digit), load128(digit + int8::DIGITS * GROUP), __uint_as_float(load32(x + UNIT_AT))};
  }
  static __device__ __forceinline__ void products(float (&c)[2][4], const Weights& w, const Input& x, int groups, bool,
                                                  OfInput&, bool) {
    auto add = [&](int j, const uint4& A, const uint4& A2, const uint4& X, float scale, float scale2) {
      int sums[4];
      mma_int8(sums, A.x, A2.x, A.y, A2.y, X.x, X.y, int8::MAGIC_BITS);
      mma_int8(sums, A.z, A2.z, A.w, A2.w, X.z, X.w);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[j][i] += (i < 2 ? scale : scale2) * (__int_as_float(sums[i]) - int8::MAGIC);
    };
    auto scale = [&](unsigned bits) { return __uint_as_float(bits) * x.unit; };
    if (groups >= 2) {
      add(0, w.A, w.A2, x.X, scale(w.s.x), scale(w.s2.x));
      add(1, w.B, w.B2, x.Y, scale(w.s.y), scale(w.s2.y));
    } else if (groups == 1) {
      add(0, w.A, w.A2, x.X, scale(w.s.x), scale(w.s2.x));
    }
  }

  // Of lanes with columns 0 and 1, the highest two digits; the lowest is their neighbour's.
  static __device__ __forceinline__ float result(const float (&c)[2][4], int i) {
    float high = c[0][i] + c[1][i], middle = c[0][i + 1] + c[1][i + 1], low = __shfl_xor_sync(~0u, high, 1);
    return high * 65536.f + middle * 256.f + low;
  }
};

// Bytes of a warp's columns of a chunk, of one row of the batch, where the layers' weights are W.
template <typename W>
constexpr int X_PITCH = std::is_same_v<W, Code> ? 2 * int8::DIGITS * GROUP + 16 : 2 * COLUMNS;

}  // namespace qwen_patch::cuda::decode
