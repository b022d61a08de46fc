// Small kernels that use everything the emulator knows, for the tests of the emulator itself. They compute the largest
// dot product of each row with any other row.
#include "cuda/ptx.cuh"

namespace pydml {
namespace {

constexpr int kTile = 64, kDepth = 16;

template <class T>
__device__ __forceinline__ T warp_max(T x, int width) {
  for (int step = width / 2; step; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step, width));
  return x;
}

// fp32 on ordinary cores: 256 threads, 4×4 products each.
__global__ void __launch_bounds__(256) nearest_fp32(const float* x, float* best, int n, int d) {
  PYDML_SHARED(float, rows, [kDepth][kTile + 4]);
  PYDML_SHARED(float, cols, [kDepth][kTile + 4]);
  const int tx = int(threadIdx.x) % 16, ty = int(threadIdx.x) / 16, row0 = int(blockIdx.x) * kTile;
  float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  for (int col0 = 0; col0 < n; col0 += kTile) {
    float s[4][4] = {};
    for (int k0 = 0; k0 < d; k0 += kDepth) {
      for (int e = int(threadIdx.x); e < kTile * kDepth; e += 256) {
        const int r = e / kDepth, k = e % kDepth;
        rows[k][r] = row0 + r < n && k0 + k < d ? x[int64_t(row0 + r) * d + k0 + k] : 0.f;
        cols[k][r] = col0 + r < n && k0 + k < d ? x[int64_t(col0 + r) * d + k0 + k] : 0.f;
      }
      __syncthreads();
      for (int k = 0; k < kDepth; ++k)
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < 4; ++j) s[i][j] += rows[k][4 * ty + i] * cols[k][4 * tx + j];
      __syncthreads();
    }
    for (int i = 0; i < 4; ++i) {
      float most = -INFINITY;
      for (int j = 0; j < 4; ++j) {
        const int col = col0 + 4 * tx + j;
        if (col < n && col != row0 + 4 * ty + i) most = fmaxf(most, s[i][j]);
      }
      top[i] = fmaxf(top[i], warp_max(most, 16));
    }
  }
  for (int i = 0; i < 4; ++i)
    if (tx == 0 && row0 + 4 * ty + i < n) best[row0 + 4 * ty + i] = top[i];
}

// 16-bit numbers on tensor cores: 4 warps, a double buffer filled by cp.async, ldmatrix. d is a multiple of 8.
template <class T>
__global__ void __launch_bounds__(128) nearest_mma(const T* x, float* best, int n, int d) {
  constexpr int depth = 64, pitch = depth + 8;
  SharedPieces pieces;
  T* const tile = pieces.take<T>(2 * 2 * kTile * pitch);
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32, row0 = int(blockIdx.x) * kTile;
  const int steps = (d + depth - 1) / depth;
  auto fetch = [&](int step, int col0) {
    T* const stage = tile + step % 2 * 2 * kTile * pitch;
    for (int e = thread; e < 2 * kTile * (depth / 8); e += 128) {
      const int r = e / (depth / 8), k = e % (depth / 8) * 8, from = r < kTile ? row0 + r : col0 + r - kTile;
      const bool inside = from < n && step * depth + k < d;
      cp_async16(stage + r * pitch + k, x + (inside ? int64_t(from) * d + step * depth + k : 0), inside ? 16 : 0);
    }
    cp_async_commit();
  };
  float top[2] = {-INFINITY, -INFINITY};
  for (int col0 = 0; col0 < n; col0 += kTile) {
    float s[8][4] = {};
    fetch(0, col0);
    for (int step = 0; step < steps; ++step) {
      if (step + 1 < steps) {
        fetch(step + 1, col0);
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      __syncthreads();
      const T* const stage = tile + step % 2 * 2 * kTile * pitch;
      for (int k = 0; k < depth; k += 16) {
        unsigned a[4], b[4];
        ldmatrix_x4(a, stage + (16 * warp + lane % 16) * pitch + k + lane / 16 * 8);
        for (int j = 0; j < 8; j += 2) {
          ldmatrix_x4(b, stage + (kTile + 8 * j + lane % 8 + lane / 16 * 8) * pitch + k + lane / 8 % 2 * 8);
          mma<T>(s[j], a, b[0], b[1]);
          mma<T>(s[j + 1], a, b[2], b[3]);
        }
      }
      __syncthreads();
    }
    for (int h = 0; h < 2; ++h) {
      float most = -INFINITY;
      for (int j = 0; j < 8; ++j)
        for (int e = 0; e < 2; ++e) {
          const int col = col0 + 8 * j + 2 * (lane % 4) + e;
          if (col < n && col != row0 + 16 * warp + lane / 4 + 8 * h) most = fmaxf(most, s[j][2 * h + e]);
        }
      top[h] = fmaxf(top[h], warp_max(most, 4));
    }
  }
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + 16 * warp + lane / 4 + 8 * h;
    if (lane % 4 == 0 && row < n) best[row] = top[h];
  }
}

template <class T>
int launch_mma(const void* x, float* best, int n, int d, void* stream) {
  return launch(&nearest_mma<T>, dim3((n + kTile - 1) / kTile), dim3(128),
                SharedPieces::bytes<T>(2 * 2 * kTile * (64 + 8)), stream, static_cast<const T*>(x), best, n, d);
}

}  // namespace
}  // namespace pydml

extern "C" int sample_nearest(int format, const void* x, float* best, int n, int d, void* stream) {
  if (format == 0)
    return pydml::launch(&pydml::nearest_fp32, dim3((n + 63) / 64), dim3(256), 0, stream, static_cast<const float*>(x),
                         best, n, d);
  return format == 1 ? pydml::launch_mma<__nv_bfloat16>(x, best, n, d, stream)
                     : pydml::launch_mma<__half>(x, best, n, d, stream);
}

extern "C" const char* sample_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
