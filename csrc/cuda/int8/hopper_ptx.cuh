// What only sm_90 has: tensor memory access, warpgroup products, registers handed from warps to warps.
#pragma once

#include "../ptx.cuh"

namespace qwen_patch::cuda::int8 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A box of a map in shared memory, its bytes counted at `barrier`. x, y: of its first element, in elements; what lies
// outside is zeros.
__device__ __forceinline__ void load_box(unsigned to, const void* map, int x, int y, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// By all threads of all blocks of a cluster that have not ended: what they wrote to shared memory before is seen after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// From the shared memory of the cluster's block number `rank`, where `at` is in this one's.
__device__ __forceinline__ float load_of_block(unsigned at, int rank) {
  float v;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
               : "=f"(v)
               : "r"(at), "r"(rank)
               : "memory");
  return v;
}

// Between this thread's own accesses to shared memory and the bulk copies that come after.
__device__ __forceinline__ void accesses_before_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int N>
__device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Rows of 128 bytes, in blocks of 8 rows, swizzled as load_box writes them; `at` on 1,024 bytes, or 32 bytes further
// for each next step along a row.
__device__ __forceinline__ uint64_t rows_of_128(unsigned at) {
  constexpr uint64_t FIXED = 1ull << 16 | 64ull << 32 | 1ull << 62;
  return FIXED | (at >> 4 & 0x3fff);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until only the PENDING last batches of products are under way.
template <int PENDING = 0>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// After a wait: keeps reads of d from moving ahead of it.
template <int COUNT>
__device__ __forceinline__ void products_are_in(int (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define QP_64                                                        \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"            \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31" \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define QP_96                                                        \
  QP_64                                                              \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define QP_128                                                                   \
  QP_96                                                                          \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define QP_4(type, i) type(d[i]), type(d[i + 1]), type(d[i + 2]), type(d[i + 3])
#define QP_16(type, i) QP_4(type, i), QP_4(type, i + 4), QP_4(type, i + 8), QP_4(type, i + 12)
#define QP_32(type, i) QP_16(type, i), QP_16(type, i + 16)
#define QP_ALL_64(type) QP_32(type, 0), QP_32(type, 32)
#define QP_ALL_96(type) QP_ALL_64(type), QP_32(type, 64)
#define QP_ALL_128(type) QP_ALL_96(type), QP_32(type, 96)

// d (+)= A B of a warpgroup: A 64 x 32 and B 32 x TOKENS of int8, both rows along k in shared memory; sums exact. One
// function for each size of d, half as many registers as tokens; A, B and ADD: the operands after those.
#define QP_MULTIPLY(TOKENS, COUNT, A, B, ADD)                                                                      \
  __device__ __forceinline__ void multiply_64(int (&d)[COUNT], uint64_t a, uint64_t b, bool add) {                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD                                                           \
                 ", 0;\n"                                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k32.s32.s8.s8 {" QP_##COUNT "}, " A ", " B ", p;\n}" \
                 : QP_ALL_##COUNT("+r")                                                                            \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                    \
  }
QP_MULTIPLY(128, 64, "%64", "%65", "%66")
QP_MULTIPLY(192, 96, "%96", "%97", "%98")
QP_MULTIPLY(256, 128, "%128", "%129", "%130")
#undef QP_MULTIPLY

// The same of T: A 64 x 16, in registers as a fragment of mma.m16n8k16 in each warp, and B 16 x 128.
template <typename T>
__device__ __forceinline__ void multiply_64x128(float (&d)[64], const unsigned (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" QP_64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
        : QP_ALL_64("+f")
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
  else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" QP_64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
        : QP_ALL_64("+f")
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
// Waits until only the PENDING last batches of products are under way, and keeps reads of d from moving ahead of that.
template <int PENDING>
__device__ __forceinline__ void products_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : QP_ALL_64("+f") : "n"(PENDING) : "memory");
}
#undef QP_64
#undef QP_96
#undef QP_128
#undef QP_4
#undef QP_16
#undef QP_32
#undef QP_ALL_64
#undef QP_ALL_96
#undef QP_ALL_128

// Four 8 x 8 matrices of 16-bit values, as fragments of a product, into shared memory transposed; `at`: where this
// lane's row of 16 bytes goes.
__device__ __forceinline__ void store_transposed(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

#endif

}  // namespace qwen_patch::cuda::int8
