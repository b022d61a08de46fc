// CUDA C++ on the CPU: what a kernel's source sees when g++ compiles it. One fiber for each CUDA thread; emulator.cpp
// switches between them at barriers and warp collectives.
//
// emulator.cpp is never instrumented for races. So every access to memory that is the kernel's own (atomics, rows that
// ldmatrix reads, copies by cp.async) is made here, in a function that is compiled with the kernel.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

#define __global__
#define __device__
#define __host__
#define __restrict__ __restrict
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// Types

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define EMULATOR_VECTOR(type, scalar)                                                                 \
  struct __align__(2 * sizeof(scalar)) type##2 { scalar x, y; };                                      \
  struct __align__(4 * sizeof(scalar) < 16 ? 4 * sizeof(scalar) : 16) type##4 { scalar x, y, z, w; }; \
  inline type##2 make_##type##2(scalar x, scalar y) { return {x, y}; }                                \
  inline type##4 make_##type##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
EMULATOR_VECTOR(float, float)
EMULATOR_VECTOR(int, int)
EMULATOR_VECTOR(uint, unsigned)
EMULATOR_VECTOR(ushort, unsigned short)
EMULATOR_VECTOR(double, double)
EMULATOR_VECTOR(longlong, long long)
#undef EMULATOR_VECTOR

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };

// The runtime functions that launchers may call. Those that wait for the device are left out on purpose: code that
// calls them does not compile here.
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream = nullptr);

namespace emulator {

struct Thread {
  uint3 index;
};
struct Block {
  uint3 index;
  dim3 threads, grid;
};
// Initial-exec, because they are read at every use of threadIdx.
extern thread_local Thread* thread __attribute__((tls_model("initial-exec")));
extern thread_local Block* block __attribute__((tls_model("initial-exec")));

// Run body(data) on every thread of the grid; errors are left for cudaGetLastError.
void launch(const void* kernel, dim3 grid, dim3 threads, size_t shared, void (*body)(void*), void* data);
[[noreturn]] void fail(const char* what, int line);

template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared, void*, Parameters... arguments) {
  auto call = [&] { kernel(arguments...); };
  launch(
      reinterpret_cast<const void*>(kernel), grid, threads, shared,
      [](void* data) { (*static_cast<decltype(call)*>(data))(); }, &call);
}

// Shared memory: filled with ones bits (NaN, -1) before the block starts, and guarded on both sides.
// Called by every thread; the first makes the piece.
void* static_piece(const void* tag, size_t bytes);
void* dynamic_piece(size_t offset, size_t bytes);

// Barriers return what the fiber has to acquire (for the race checker) and the number of true predicates.
struct Passed {
  void* sync;
  int votes, threads;
};
void* barrier_sync();
Passed barrier(bool vote, const char* file, int line);
void* warp_sync(unsigned mask);
void* fence_sync();

inline void acquire([[maybe_unused]] void* sync) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(sync);
#endif
}
inline void release([[maybe_unused]] void* sync) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(sync);
#endif
}

inline Passed synchronise(bool vote, const char* file, int line) {
  release(barrier_sync());
  const Passed passed = barrier(vote, file, line);
  acquire(passed.sync);
  return passed;
}

// The lanes of a mask meet, each with what it brings and takes; the last to arrive does the work of all of them.
void collective(const char* what, unsigned mask, void* mine, int line, void (*run)(void* const* lanes, unsigned mask));

// Warp collectives; none of them orders memory except __syncwarp.
enum class Shuffle { index, exclusive_or, down, up };
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int from, int width, int line);
unsigned ballot(unsigned mask, bool vote, int line);
unsigned match(unsigned mask, uint64_t value, int line);
void meet(unsigned mask, int line);

template <class T>
T shuffle(Shuffle kind, unsigned mask, T value, int from, int width, int line) {
  static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = shuffle(kind, mask, bits, from, width, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T, class Update>
T read_modify_write(T* p, Update update) {
  T before, after;
  __atomic_load(p, &before, __ATOMIC_RELAXED);
  do {
    after = update(before);
  } while (!__atomic_compare_exchange(p, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

// Instructions of csrc/cuda/ptx.cuh

enum class Format { bf16, fp16, tf32 };
void mma(Format format, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line);

struct Row {  // of an 8×8 matrix of 16-bit numbers
  uint16_t entry[8];
};
void ldmatrix(unsigned (&r)[4], const Row& mine, bool transposed, int line);

inline Row read_row(const void* row, int line) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("ldmatrix: the address of a row is not 16-byte aligned", line);
  Row mine;
  for (int k = 0; k < 8; ++k) mine.entry[k] = static_cast<const uint16_t*>(row)[k];
  return mine;
}
inline void ldmatrix_x4(unsigned (&r)[4], const void* row, int line = __builtin_LINE()) {
  ldmatrix(r, read_row(row, line), false, line);
}
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, int line = __builtin_LINE()) {
  ldmatrix(r, read_row(row, line), true, line);
}

// A copy under way leaves ones bits in its destination until the thread that issued it has waited for it.
struct Copy {
  unsigned char* shared;
  const unsigned char* global;
  int bytes;
};
void remember(const Copy& copy);
bool next_landed(Copy& copy, int pending);
void cp_async_commit();

inline void cp_async16(void* shared, const void* global, int bytes = 16, int line = __builtin_LINE()) {
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16)
    fail("cp.async: an address is not 16-byte aligned", line);
  if (bytes < 0 || bytes > 16) fail("cp.async: wanted 0 to 16 bytes", line);
  const Copy copy = {static_cast<unsigned char*>(shared), static_cast<const unsigned char*>(global), bytes};
  for (int k = 0; k < 16; ++k) copy.shared[k] = 0xff;
  remember(copy);
}
template <int pending>
inline void cp_async_wait() {
  for (Copy copy; next_landed(copy, pending);)
    for (int k = 0; k < 16; ++k) copy.shared[k] = k < copy.bytes ? copy.global[k] : 0;
}

inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline unsigned to_tf32(float x) {
  const uint32_t bits = float_bits(x);
  return x - x == 0 ? (bits + 0x1000u) & 0xffffe000u : bits;
}
inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.f : y;
}

}  // namespace emulator

// Names of CUDA C++

#define threadIdx (emulator::thread->index)
#define blockIdx (emulator::block->index)
#define blockDim (emulator::block->threads)
#define gridDim (emulator::block->grid)
constexpr int warpSize = 32;

#define PYDML_SHARED(type, name, dims) \
  using name##_type = type dims;       \
  static const char name##_tag = 0;    \
  name##_type& name = *static_cast<name##_type*>(emulator::static_piece(&name##_tag, sizeof(name##_type)))

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::synchronise(false, file, line);
}
inline int __syncthreads_count(int p, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::synchronise(p, file, line).votes;
}
inline int __syncthreads_or(int p, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::synchronise(p, file, line).votes > 0;
}
inline int __syncthreads_and(int p, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const emulator::Passed passed = emulator::synchronise(p, file, line);
  return passed.votes == passed.threads;
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  void* const sync = emulator::warp_sync(mask);
  emulator::release(sync);
  emulator::meet(mask, line);
  emulator::acquire(sync);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, int line = __builtin_LINE()) {
  return emulator::shuffle(emulator::Shuffle::index, mask, value, lane, width, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
  return emulator::shuffle(emulator::Shuffle::exclusive_or, mask, value, lanes, width, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
  return emulator::shuffle(emulator::Shuffle::down, mask, value, int(by), width, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
  return emulator::shuffle(emulator::Shuffle::up, mask, value, int(by), width, line);
}
inline unsigned __ballot_sync(unsigned mask, int p, int line = __builtin_LINE()) {
  return emulator::ballot(mask, p, line);
}
inline int __any_sync(unsigned mask, int p, int line = __builtin_LINE()) {
  return emulator::ballot(mask, p, line) != 0;
}
inline int __all_sync(unsigned mask, int p, int line = __builtin_LINE()) {
  return emulator::ballot(mask, p, line) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, int line = __builtin_LINE()) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return emulator::match(mask, bits, line);
}

inline void __threadfence() {
  emulator::release(emulator::fence_sync());
  emulator::acquire(emulator::fence_sync());
}
inline void __threadfence_block() { __threadfence(); }

template <class T>
T atomicAdd(T* p, std::common_type_t<T> v) {
  return emulator::read_modify_write(p, [v](T x) { return T(x + v); });
}
template <class T>
T atomicMax(T* p, std::common_type_t<T> v) {
  return emulator::read_modify_write(p, [v](T x) { return x < v ? v : x; });
}
template <class T>
T atomicMin(T* p, std::common_type_t<T> v) {
  return emulator::read_modify_write(p, [v](T x) { return v < x ? v : x; });
}
template <class T>
T atomicOr(T* p, std::common_type_t<T> v) {
  return emulator::read_modify_write(p, [v](T x) { return T(x | v); });
}
template <class T>
T atomicExch(T* p, std::common_type_t<T> v) {
  return emulator::read_modify_write(p, [v](T) { return v; });
}
template <class T>
T atomicCAS(T* p, std::common_type_t<T> compare, std::common_type_t<T> v) {
  return emulator::read_modify_write(p, [compare, v](T x) { return x == compare ? v : x; });
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline int __float_as_int(float x) { return int(emulator::float_bits(x)); }
inline unsigned __float_as_uint(float x) { return emulator::float_bits(x); }
inline float __int_as_float(int bits) { return emulator::bits_float(uint32_t(bits)); }
inline float __uint_as_float(unsigned bits) { return emulator::bits_float(bits); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)(a)*b >> 64);
}

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return emulator::bits_float(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float x) {  // to nearest, ties to even
  const uint32_t bits = emulator::float_bits(x);
  return {uint16_t(x == x ? (bits + 0x7fffu + (bits >> 16 & 1)) >> 16 : 0x7fffu)};
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __float2bfloat16(x); }
inline float __half2float(__half x) {
  _Float16 h;
  memcpy(&h, &x, 2);
  return float(h);
}
inline __half __float2half(float x) {
  const _Float16 h = _Float16(x);
  __half y;
  memcpy(&y, &h, 2);
  return y;
}
inline __half __float2half_rn(float x) { return __float2half(x); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
