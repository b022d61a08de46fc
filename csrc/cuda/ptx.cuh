// Instructions that CUDA C++ has no function for, by their PTX names; tests/cuda/emulator.h has the same functions by
// the documented lane layouts. All of them exist from sm_80 on.
#pragma once
#include "launch.cuh"

namespace pydml {

// Names the 19-bit format of fp32 tensor-core products; its values travel as the bits of an fp32.
struct Tf32 {};

#if defined(__CUDACC__)

#define PYDML_MMA(shape, type)                                                        \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// d += a·b by one warp: a is 16×16 (Tf32: 16×8) by rows, b 16×8 (Tf32: 8×8) by columns, d 16×8 in fp32.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  PYDML_MMA("m16n8k16", "bf16");
}
template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  PYDML_MMA("m16n8k16", "f16");
}
template <>
__device__ __forceinline__ void mma<Tf32>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  PYDML_MMA("m16n8k8", "tf32");
}
#undef PYDML_MMA

__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// Four 8×8 matrices of 16-bit numbers: lane 8m+r names row r of matrix m, 16-byte aligned, in shared memory; r[m] gets
// two neighbours of row lane/4 of matrix m.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Copy 16 bytes from global to shared memory without waiting; from `bytes` on they are zeros.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
// Close a group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most the latest `pending` groups of this thread are under way. Other threads need a barrier after it.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// The bits of x rounded to TF32, ties away from zero.
__device__ __forceinline__ unsigned to_tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
// 2^x with two wrong bits at most; subnormal results are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#else

using emulator::cp_async16;
using emulator::cp_async_commit;
using emulator::cp_async_wait;
using emulator::exp2_approx;
using emulator::ldmatrix_x4;
using emulator::ldmatrix_x4_trans;
using emulator::to_tf32;

template <class T>
inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line = __builtin_LINE()) {
  constexpr auto format = std::is_same_v<T, Tf32>     ? emulator::Format::tf32
                          : std::is_same_v<T, __half> ? emulator::Format::fp16
                                                      : emulator::Format::bf16;
  emulator::mma(format, d, a, b0, b1, line);
}

#endif

}  // namespace pydml
