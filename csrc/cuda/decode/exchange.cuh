// How multiprocessors hand activations to each other inside one kernel: words that carry their own flag.
//
// A word is {16-bit value, 16-bit epoch}. Every exchange of every step has an epoch of its own, so a reader spins on
// the data itself until the epoch is the one it waits for: one write and one read through L2 (0.8 us on an H200), where
// a grid barrier costs 1.3 us before the first datum is read. Nothing needs a fence. A word that is waited for
// is rewritten once a layer, so a stale one can't carry the awaited epoch by chance. The parts of attention that a
// short context leaves out are not: so the words are cleared where a new sequence starts (Session.start).
#pragma once

#include "../numbers.cuh"

namespace qwen_patch::cuda::decode {

// The epochs of one step: 1 to 65,535, counting on from step to step.
struct Epochs {
  unsigned start;
  __device__ Epochs(unsigned round, int exchanges) : start(round * static_cast<unsigned>(exchanges) % 65535u) {}
  __device__ __forceinline__ unsigned operator()(int exchange) const {
    unsigned e = start + static_cast<unsigned>(exchange);
    return e < 65535u ? e + 1u : e - 65534u;
  }
};

template <typename T>
__device__ __forceinline__ void put(unsigned* word, T value, unsigned epoch) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(bits_of(value) | (epoch << 16)) : "memory");
}
__device__ __forceinline__ unsigned look(const unsigned* word) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}
// Four words, each with its own flag: it does not matter whether they arrive together. Who does not need any gets four
// zeros that have arrived, and asks for nothing: words that many ask for without need are a queue before a slice of L2.
__device__ __forceinline__ uint4 look4(const unsigned* words, bool needed, unsigned epoch) {
  unsigned zero = epoch << 16;
  uint4 v = {zero, zero, zero, zero};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
      "@p ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(words), "r"(static_cast<int>(needed))
      : "memory");
  return v;
}
__device__ __forceinline__ bool arrived(unsigned v, unsigned epoch) { return (v >> 16) == epoch; }
// The four values of four words.
__device__ __forceinline__ uint2 values(const uint4& v) {
  return make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410));
}

// Words of 64 bits hold more under one flag.
__device__ __forceinline__ void put64(uint2* word, uint2 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(static_cast<uint64_t>(v.y) << 32 | v.x)
               : "memory");
}
// Two words, the first of which is a multiple of 8 bytes.
template <typename T>
__device__ __forceinline__ void put_two(unsigned* words, T first, T second, unsigned epoch) {
  put64(reinterpret_cast<uint2*>(words), make_uint2(bits_of(first) | (epoch << 16), bits_of(second) | (epoch << 16)));
}
__device__ __forceinline__ uint2 look64(const uint2* word) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return make_uint2(static_cast<unsigned>(v), static_cast<unsigned>(v >> 32));
}

// Two floats of 24 bits (15 of mantissa: 2^-16, far below what the values are rounded to later) and an epoch of 16.
__device__ __forceinline__ unsigned rounded24(float x) {
  unsigned bits = __float_as_uint(x), magnitude = min((bits & 0x7fffffffu) + 0x80u, 0x7fffff80u);  // a NaN stays one
  return (magnitude >> 8) | ((bits >> 8) & 0x800000u);
}
__device__ __forceinline__ uint2 word_of(float a, float b, unsigned epoch) {
  unsigned a24 = rounded24(a), b24 = rounded24(b);
  return make_uint2(a24 | (b24 << 24), (b24 >> 8) | (epoch << 16));
}
__device__ __forceinline__ float2 floats_of(unsigned lo, unsigned hi) {
  return make_float2(__uint_as_float(lo << 8), __uint_as_float((hi << 16) | ((lo >> 24) << 8)));
}

}  // namespace qwen_patch::cuda::decode
