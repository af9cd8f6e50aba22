// How multiprocessors hand activations to each other inside one kernel: words that carry their own flag.
//
// A word is {16-bit value, 16-bit epoch}. Every exchange of every step has an epoch of its own, so a reader spins on
// the data itself until the epoch is the one it waits for: one write and one read through L2 (0.8 us on an H200), where
// a grid barrier costs 1.3 us before the first datum is read. Nothing is reset and nothing needs a fence. A word is
// rewritten once a layer, so a stale one can't carry the awaited epoch by chance within 65,535 exchanges.
#pragma once

#include "../common.cuh"

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
__device__ __forceinline__ unsigned bits_of(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat16_as_ushort(x);
  else
    return __half_as_ushort(x);
}
template <typename T>
__device__ __forceinline__ T value_of(unsigned bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
  else
    return __ushort_as_half(static_cast<unsigned short>(bits));
}

template <typename T>
__device__ __forceinline__ void put(unsigned* word, T value, unsigned epoch) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(bits_of(value) | (epoch << 16)) : "memory");
}
__device__ __forceinline__ unsigned look(const unsigned* word) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}
// Four words, each with its own flag: it does not matter whether they arrive together.
__device__ __forceinline__ uint4 look4(const unsigned* words) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(words)
               : "memory");
  return v;
}
__device__ __forceinline__ bool arrived(unsigned v, unsigned epoch) { return (v >> 16) == epoch; }
__device__ __forceinline__ bool arrived(const uint4& v, unsigned epoch) {
  return arrived(v.x, epoch) && arrived(v.y, epoch) && arrived(v.z, epoch) && arrived(v.w, epoch);
}
// The four values of four words.
__device__ __forceinline__ uint2 values(const uint4& v) {
  return make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410));
}

// Two 32-bit values under one flag, in 16 bytes that are written and read as one access (PTX: .b128 is single-copy
// atomic on sm_70 and later).
__device__ __forceinline__ void put_pair(uint4* word, unsigned a, unsigned b, unsigned epoch) {
  asm volatile(
      "{\n.reg .b64 lo, hi;\n.reg .b128 v;\nmov.b64 lo, {%1, %2};\nmov.b64 hi, {%3, %3};\nmov.b128 v, {lo, hi};\n"
      "st.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(word),
      "r"(a), "r"(b), "r"(epoch)
      : "memory");
}
__device__ __forceinline__ uint4 look_pair(const uint4* word) {
  uint4 v;
  asm volatile(
      "{\n.reg .b64 lo, hi;\n.reg .b128 v;\nld.relaxed.gpu.global.b128 v, [%4];\nmov.b128 {lo, hi}, v;\n"
      "mov.b64 {%0, %1}, lo;\nmov.b64 {%2, %3}, hi;\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(word)
      : "memory");
  return v;
}

}  // namespace qwen_patch::cuda::decode
