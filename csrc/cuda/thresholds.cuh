// Positives as rising thresholds, which engines compare negatives with; and those of 64 rows in shared memory, a chunk
// of 32 columns of a row's class at a time, so that classes may have any size.
#pragma once
#include "cuda/sweep.cuh"

namespace pydml {

constexpr int kChunkPitch = kChunk + 1;

// How many of n rising numbers are below v; with `equal`, how many are not above it.
__device__ __forceinline__ int passed(const float* rising, int n, float v, bool equal) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    (equal ? rising[middle] <= v : rising[middle] < v) ? low = middle + 1 : high = middle;
  }
  return low;
}

struct Thresholds {
  float* value;            // [kTile, kChunkPitch] rising, +inf where there is none
  float* given = nullptr;  // the same in the order of columns, if wanted

  // How many thresholds of a row are below u, or below and equal.
  __device__ __forceinline__ int below(int row, float u) const {
    return passed(value + row * kChunkPitch, kChunk, u, false);
  }
  __device__ __forceinline__ int up_to(int row, float u) const {
    return passed(value + row * kChunkPitch, kChunk, u, true);
  }

  // Fill with chunk number `chunk` of every row's positives, and sort. For the whole block; others may read after it.
  // Returns how many this thread's row has.
  template <class M>
  __device__ __forceinline__ int fill(const Matrix& m, int chunk, char* arena) const {
    const int row = int(threadIdx.x) % kTile, half = int(threadIdx.x) / kTile;
    const int i = int(blockIdx.x) * kTile + row;
    const bool real = i < m.own.n;
    const int first = real ? m.range[2 * int64_t(i)] + chunk * kChunk : 0;
    const int last = real ? min(first + kChunk, m.range[2 * int64_t(i) + 1]) : 0;
    const int self = real ? self_of(m, i) : -1;
    float* const line = value + row * kChunkPitch;
    for (int p = half; p < kChunk; p += kHalves) line[p] = INFINITY;
    // Rows are sorted, so the first of them has the first column of the chunk, and the last the last.
    const int64_t i0 = int64_t(blockIdx.x) * kTile, i1 = min(i0 + kTile, int64_t(m.own.n)) - 1;
    const int low = m.range[2 * i0] + chunk * kChunk;
    const int high = min(m.range[2 * i1] + (chunk + 1) * kChunk, m.range[2 * i1 + 1]);
    for (int t = low / kTile; t * kTile < high; ++t) {
      make_tile<M, kSweepPitch>(m, int(blockIdx.x), t, arena, nullptr);
      const float* const u = reinterpret_cast<const float*>(arena) + row * kSweepPitch;
      for (int col = half * (kTile / kHalves); col < (half + 1) * (kTile / kHalves); ++col) {
        const int j = t * kTile + col;
        if (j >= first && j < last && j != self) line[j - first] = u[col];
      }
      __syncthreads();
    }
    if (given) {
      for (int p = half; p < kChunk; p += kHalves) given[row * kChunkPitch + p] = line[p];
      __syncthreads();
    }
    if (half == 0)
      for (int p = 1; p < kChunk; ++p) {
        const float v = line[p];
        int at = p;
        for (; at > 0 && line[at - 1] > v; --at) line[at] = line[at - 1];
        line[at] = v;
      }
    __syncthreads();
    return max(last - first, 0) - (self >= first && self < last ? 1 : 0);
  }
};

}  // namespace pydml
