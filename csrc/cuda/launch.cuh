// How kernels get shared memory and how host code launches them, alike under nvcc and under the emulator of tests/cuda:
// the only header of CUDA's own that kernels need.
#pragma once

#include <stddef.h>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

// A static array in shared memory: PYDML_SHARED(float, tile, [64][68]). A macro, because the emulator gives each array
// its own guarded place.
#define PYDML_SHARED(type, name, dims) __shared__ __align__(128) type name dims
#else
#include "emulator.h"
#endif

namespace pydml {

// Shared memory beyond this must be asked for by name, for each kernel and device.
constexpr size_t kSharedByDefault = 48 * 1024;

// Pieces of the block's dynamic shared memory, which every thread takes in the same order; each is 128-byte aligned.
class SharedPieces {
 public:
  // What a piece costs of the bytes that are launched with.
  template <class T>
  static constexpr __host__ __device__ size_t bytes(size_t n) {
    return (n * sizeof(T) + 127) / 128 * 128;
  }

  template <class T>
  __device__ __forceinline__ T* take(size_t n) {
#if defined(__CUDACC__)
    extern __shared__ __align__(128) unsigned char pydml_dynamic_shared[];
    T* piece = reinterpret_cast<T*>(pydml_dynamic_shared + used_);
#else
    T* piece = static_cast<T*>(emulator::dynamic_piece(used_, n * sizeof(T)));
#endif
    used_ += bytes<T>(n);
    return piece;
  }

 private:
  size_t used_ = 0;
};

// Start a kernel on a stream (null: the default one). Returns 0 or CUDA's error code; never waits.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, void* stream,
           const Arguments&... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "the device gets a copy of the bytes");
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "kernel parameters: at most 4 KiB on every architecture");
  if (shared > kSharedByDefault) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (error != cudaSuccess) {
      cudaGetLastError();  // reported here, so nobody else should find it
      return error;
    }
  }
#if defined(__CUDACC__)
  kernel<<<grid, block, shared, static_cast<cudaStream_t>(stream)>>>(arguments...);
#else
  emulator::launch(kernel, grid, block, shared, stream, static_cast<Parameters>(arguments)...);
#endif
  return cudaGetLastError();
}

}  // namespace pydml
