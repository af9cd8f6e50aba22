// Vectors of 16 floats without intrinsics: the compilers' vector extensions, which one AVX-512 register, two AVX2 or
// four SSE registers hold. QP_MULTIVERSION compiles a function for AVX-512, AVX2 and the baseline, and the loader picks
// one at run time. (Plain loops left to the auto-vectoriser were 1.3-3x slower in bf16 and fp16: it blends too much.)
#pragma once

#include <cstdint>
#include <cstring>

// To test on one machine what others run: -DQP_NO_AVX512 leaves AVX2 and the baseline, -DQP_PORTABLE the baseline
// alone; -DQP_EMULATE_AMX adds AMX to a machine with AVX-512 and VNNI.
#if defined(__x86_64__) && defined(__linux__) && !defined(QP_PORTABLE)
#define QP_X86 1
#ifdef QP_NO_AVX512
#define QP_AVX512 0
#define QP_MULTIVERSION __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define QP_AVX512 1
#define QP_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#else
#define QP_X86 0
#define QP_AVX512 0
#define QP_MULTIVERSION
#endif
// A helper must be inlined into each clone: on its own it would be compiled for the baseline only.
#define QP_INLINE inline __attribute__((always_inline))
#define QP_LAMBDA __attribute__((always_inline))

namespace qwen_patch::cpu {

constexpr int64_t LANES = 8;
constexpr int64_t THREAD_GRAIN = 16384;  // elements below which a second thread costs more than it brings

typedef float F32x8 __attribute__((vector_size(32)));
typedef int32_t I32x8 __attribute__((vector_size(32)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));

struct BF16 {
  uint16_t bits;
};
struct FP16 {
  uint16_t bits;
};
struct FP16Hardware {  // the same bits, on a processor that converts them itself (F16C)
  uint16_t bits;
};

QP_INLINE I32x8 widen(U16x8 x) {  // the one vpmovzxwd that GCC 12 does not find for __builtin_convertvector
  return (I32x8)__builtin_shufflevector(x, U16x8{}, 0, 8, 1, 8, 2, 8, 3, 8, 4, 8, 5, 8, 6, 8, 7, 8);
}
QP_INLINE U16x8 narrow(I32x8 x) { return __builtin_convertvector(x, U16x8); }

// An element type's storage as floats (expand), a float rounded to the type's values (round: to nearest, ties to even;
// NaN stays NaN), and such a rounded float as storage (pack).
template <typename T>
struct Element;

template <>
struct Element<float> {
  using Storage = F32x8;
  static QP_INLINE F32x8 expand(F32x8 x) { return x; }
  static QP_INLINE F32x8 round(F32x8 x) { return x; }
  static QP_INLINE F32x8 pack(F32x8 x) { return x; }
};

template <>
struct Element<BF16> {
  using Storage = U16x8;
  static QP_INLINE F32x8 expand(U16x8 x) { return (F32x8)(widen(x) << 16); }
  // No case for NaN: every NaN here stems from a bf16 input or is the processor's own, so its low 16 bits are zero, and
  // the addition can't carry it over into infinity.
  static QP_INLINE F32x8 round(F32x8 x) {
    I32x8 u = (I32x8)x;
    return (F32x8)((u + 0x7fff + ((u >> 16) & 1)) & static_cast<int32_t>(0xffff0000));
  }
  static QP_INLINE U16x8 pack(F32x8 x) { return narrow((I32x8)x >> 16); }
};

template <>
struct Element<FP16> {
  using Storage = U16x8;
  // The exponent's bias goes from 15 to 127 by a multiplication, which also normalises subnormals; inf and NaN need
  // the exponent set to all ones.
  static QP_INLINE F32x8 expand(U16x8 x) {
    I32x8 u = widen(x), sign = (u & 0x8000) << 16, rest = (u & 0x7fff) << 13;
    I32x8 finite = (I32x8)((F32x8)rest * 0x1p112f);
    return (F32x8)(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite));
  }
  // Adding and taking away 1.5 * 2^(e + 13), e the exponent of x (at least -14, fp16's smallest), leaves x rounded to
  // 2^(e - 10), fp16's unit in the last place. Then what is beyond 65504 becomes infinite, and -0 gets its sign back.
  static QP_INLINE F32x8 round(F32x8 x) {
    I32x8 u = (I32x8)x, exponent = u & 0x7f800000, sign = u & static_cast<int32_t>(0x80000000);
    exponent = exponent < 0x38800000 ? I32x8{} + 0x38800000 : exponent;
    F32x8 magic = (F32x8)(exponent + ((13 << 23) + 0x00400000));
    F32x8 magnitude = (F32x8)((I32x8)((x + magic) - magic) & 0x7fffffff);
    magnitude = magnitude > 65504.f ? (F32x8)(I32x8{} + 0x7f800000) : magnitude;
    return (F32x8)((I32x8)magnitude | sign);
  }
  // Exact, as x is an fp16 value. The mask takes the exponent's top bits off infinity and NaN.
  static QP_INLINE U16x8 pack(F32x8 x) {
    I32x8 u = (I32x8)x, rest = (I32x8)((F32x8)(u & 0x7fffffff) * 0x1p-112f);
    return narrow(((u >> 16) & 0x8000) | ((rest >> 13) & 0x7fff));
  }
};

#if QP_X86
// Assembly, not intrinsics: those can't be inlined into helpers that are also compiled for processors without F16C.
template <>
struct Element<FP16Hardware> {
  using Storage = U16x8;
  static QP_INLINE F32x8 expand(U16x8 x) {
    F32x8 y;
    asm("vcvtph2ps %1, %0" : "=x"(y) : "x"(x));
    return y;
  }
  static QP_INLINE U16x8 pack(F32x8 x) {
    U16x8 y;
    asm("vcvtps2ph $0, %1, %0" : "=x"(y) : "x"(x));
    return y;
  }
  static QP_INLINE F32x8 round(F32x8 x) { return expand(pack(x)); }
};
#endif

template <typename T>
QP_INLINE F32x8 round_to(F32x8 x) {
  return Element<T>::round(x);
}

// The first n <= LANES elements at p as floats, zeros behind them.
template <typename T>
QP_INLINE F32x8 load(const T* p, int64_t n) {
  typename Element<T>::Storage raw = {};
  std::memcpy(&raw, p, static_cast<size_t>(n) * sizeof(T));
  return Element<T>::expand(raw);
}

// Rounds x to T, stores its first n elements, and returns what was rounded: the stock model's rounding points.
template <typename T>
QP_INLINE F32x8 store(T* p, F32x8 x, int64_t n) {
  F32x8 rounded = Element<T>::round(x);
  typename Element<T>::Storage raw = Element<T>::pack(rounded);
  std::memcpy(p, &raw, static_cast<size_t>(n) * sizeof(T));
  return rounded;
}

// body(i, n, k) for the elements [i, i + n) of [0, count): n is the constant LANES but for the last call. Four vectors
// a turn, k = 0..3, so that sums kept in four accumulators need not wait for each other (and round less).
template <typename Body>
QP_INLINE void for_vectors(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES) {
    body(i, LANES, 0);
    body(i + LANES, LANES, 1);
    body(i + 2 * LANES, LANES, 2);
    body(i + 3 * LANES, LANES, 3);
  }
  for (; i + LANES <= count; i += LANES) body(i, LANES, 0);
  if (i < count) body(i, count - i, 1);
}

QP_INLINE float horizontal_sum(F32x8 x) {
  float lanes[LANES];
  std::memcpy(lanes, &x, sizeof(lanes));
  for (int64_t width = LANES / 2; width; width /= 2)
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// e^x within 1 ulp, from -87 on; below, e^-87. Cody-Waite reduction to |s| <= ln2/2 and a degree-6 polynomial, with the
// constants of SLEEF's expf_u10, so that float32 results are the bits of PyTorch's vectorised exp.
QP_INLINE F32x8 exponential(F32x8 x) {
  constexpr float shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x < -87.f ? F32x8{} - 87.f : x;  // NaN passes through both
  x = x > 89.f ? F32x8{} + 89.f : x;   // above, it is inf
  F32x8 shifted = x * 1.442695040888963407f + shift, q = shifted - shift;
  F32x8 s = q * -0.693145751953125f + x;
  s = q * -1.428606765330187045e-06f + s;
  F32x8 u = F32x8{} + 0.000198527617612853646278381f;
  u = u * s + 0.00139304355252534151077271f;
  u = u * s + 0.00833336077630519866943359f;
  u = u * s + 0.0416664853692054748535156f;
  u = u * s + 0.166666671633720397949219f;
  u = u * s + 0.5f;
  u = 1.f + (s * s * u + s);
  // Times 2^q as 2 * 2^(q-1), because q may be 128; q's integer sits in the low bits of `shifted`.
  u = u * (F32x8)(((I32x8)shifted - (0x4b400000 - 126)) << 23);
  return u + u;
}
QP_INLINE F32x8 one_plus_exp(F32x8 x) { return 1.f + exponential(x); }  // for silu

}  // namespace qwen_patch::cpu

// DEFINE(T, TARGETS) defines a function for the element type T, compiled for TARGETS.
#define QP_FOR_EACH_TYPE(DEFINE) \
  DEFINE(float, QP_MULTIVERSION) \
  DEFINE(BF16, QP_MULTIVERSION)  \
  DEFINE(FP16, QP_MULTIVERSION)  \
  QP_FOR_F16C(DEFINE)

#define QP_DISPATCH_ANY(DTYPE, ...) QP_DISPATCH_TYPES(DTYPE, qwen_patch::cpu::BF16, qwen_patch::cpu::FP16, __VA_ARGS__)
#if QP_X86
#define QP_FOR_F16C(DEFINE) DEFINE(FP16Hardware, __attribute__((target("arch=x86-64-v3"))))
#define QP_DISPATCH(DTYPE, ...)                                                              \
  if (DTYPE == torch::headeronly::ScalarType::Half && __builtin_cpu_supports("x86-64-v3")) { \
    using T = qwen_patch::cpu::FP16Hardware;                                                 \
    __VA_ARGS__;                                                                             \
  } else {                                                                                   \
    QP_DISPATCH_ANY(DTYPE, __VA_ARGS__);                                                     \
  }
#else
#define QP_FOR_F16C(DEFINE)
#define QP_DISPATCH QP_DISPATCH_ANY
#endif
