// A sweep: every row of the matrix meets its columns, tile by tile, and keeps a few numbers of its own. What it keeps
// is an engine's business; here is the walk. Two threads share a row, a half of each tile's columns each, and blocks
// may share the walk (`splits`): what they keep are parts, in an order that hangs on nothing but the sizes, so that
// merging them gives the same bits every time, without atomics.
#pragma once
#include "cuda/tile.cuh"

namespace pydml {

struct Walk {
  int first, last;  // tiles of `other`
};

// The tiles that this block walks over: its share of all, or of those that hold positives of its rows; from the
// diagonal on, if only pairs beyond it are looked at. Rows and columns are sorted, so positives of 64 rows are a range.
__device__ __forceinline__ Walk walk_of(const Matrix& m, bool positives) {
  const int per_own = kTile / m.own.pool, per = kTile / m.other.pool;
  int low = 0, high = m.other.n;
  if (positives) {
    const int i0 = int(blockIdx.x) * per_own, i1 = min(i0 + per_own, m.own.n) - 1;
    low = m.range[2 * int64_t(i0)], high = m.range[2 * int64_t(i1) + 1];
  }
  if (m.upper) low = max(low, int(blockIdx.x) * per_own);
  const int start = low / per;
  const int64_t count = low < high ? (high + per - 1) / per - start : 0;
  return {start + int(count * blockIdx.y / gridDim.y), start + int(count * (blockIdx.y + 1) / gridDim.y)};
}

// Softmax pooling of neighbouring columns, U = Σ_k softmax_k(sharpness·u)·u. Forward and backward have U from here, so
// that it has the same bits.
struct Pooled {
  float top, sum, mean;  // the u of the largest share, Σ e^{sharpness(u-top)}, U

  template <class F>
  __device__ __forceinline__ Pooled(const F& u, int pool, float sharpness) : top(u(0)), sum(0), mean(0) {
    for (int k = 1; k < pool; ++k) top = sharpness * u(k) > sharpness * top ? u(k) : top;
    for (int k = 0; k < pool; ++k) {
      const float e = Exp(sharpness * (u(k) - top));
      sum += e, mean = Fma(e, u(k), mean);
    }
    mean /= sum;
  }
};

// Columns of a row that one thread looks at: items first … last-1 of the tile, the first of which is item `item0`.
struct Line {
  const float* u;
  int first, last, item0, pool;
  float sharpness;

  // u of an item: a column's, or softmax-pooled over `pool` columns.
  __device__ __forceinline__ float at(int item) const {
    if (pool == 1) return u[item];
    return Pooled([&](int k) { return u[item * pool + k]; }, pool, sharpness).mean;
  }
};

// Add x to total without losing what the sum cannot hold (Knuth's two-sum).
__device__ __forceinline__ void add_exactly(float& total, float& rest, float x) {
  const float sum = total + x, part = sum - total;
  rest += (total - (sum - part)) + (x - part);
  total = sum;
}

// A number whose order is that of x.
__device__ __forceinline__ unsigned sortable(float x) {
  const unsigned bits = __float_as_uint(x + 0.f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// An engine has: idle(), is there nothing to do; positives_only; bytes() of shared memory beside the arena; a State
// that a thread keeps in registers; start(m, shared, row, i), tile(m, state, shared, row, i, line), end_tile(m, shared,
// t) for the whole block, and finish(m, state, shared, row, i, part).
template <class M, class Engine>
__global__ void __launch_bounds__(kThreads, 3) sweep(const Matrix m, const Engine engine) {
  if (engine.idle()) return;
  SharedPieces pieces;
  char* const arena = pieces.take<char>(kArena);
  char* const shared = pieces.take<char>(engine.bytes());
  const int row = int(threadIdx.x) % kTile, half = int(threadIdx.x) / kTile;
  const int i = int(blockIdx.x) * (kTile / m.own.pool) + row;
  const int per = kTile / m.other.pool, share = (per + kHalves - 1) / kHalves;
  const Walk walk = walk_of(m, engine.positives_only);
  typename Engine::State state = engine.start(m, shared, row, i);
  for (int t = walk.first; t < walk.last; ++t) {
    make_tile<M, kSweepPitch>(m, int(blockIdx.x), t, arena, nullptr);
    const int there = min(per, m.other.n - t * per);
    const Line line = {reinterpret_cast<const float*>(arena) + row * kSweepPitch,
                       half * share,
                       min((half + 1) * share, there),
                       t * per,
                       m.other.pool,
                       m.sharpness};
    if (i < m.own.n) engine.tile(m, state, shared, row, i, line);
    __syncthreads();
    engine.end_tile(m, shared, t - walk.first, t + 1 == walk.last);
  }
  if (i < m.own.n) engine.finish(m, state, shared, row, i, int(blockIdx.y) * kHalves + half);
}

template <class Engine>
int launch_sweep(const Matrix& m, const Engine& engine, void* stream, int depth = 1) {
  const int per_own = kTile / m.own.pool;
  const dim3 grid((m.own.n + per_own - 1) / per_own, m.splits, depth);
  const size_t bytes = SharedPieces::bytes<char>(kArena) + SharedPieces::bytes<char>(engine.bytes());
  return with_math(m.math, [&](auto math) {
    return launch(&sweep<decltype(math), Engine>, grid, kThreads, bytes, stream, m, engine);
  });
}

}  // namespace pydml
