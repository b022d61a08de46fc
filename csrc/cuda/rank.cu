// The rank engine: how many negatives lie above each positive of a query. Recall@K, MAP@R and R-precision follow from
// the counts alone: no neighbour lists, no top-K. A block takes 64 queries and some of their positives at a time, and
// counts, for each column, which of these it passes.
#include "cuda/launchers.h"
#include "cuda/thresholds.cuh"

namespace pydml {
namespace {

constexpr int kCounts = kTile * kChunkPitch;

template <class M>
__global__ void __launch_bounds__(kThreads, 2) rank(const Matrix m, const RankArguments a) {
  SharedPieces pieces;
  char* const arena = pieces.take<char>(kArena);
  const Thresholds positives = {pieces.take<float>(kCounts)};
  // Columns by the number of thresholds that they pass: negatives, ties for and against the positive, and positives of
  // other chunks.
  int* const over = pieces.take<int>(kCounts);
  int* const reach = pieces.take<int>(kCounts);
  int* const higher = pieces.take<int>(kCounts);
  const int row = int(threadIdx.x) % kTile, half = int(threadIdx.x) / kTile, at = row * kChunkPitch;
  const int i = int(blockIdx.x) * kTile + row;
  const bool real = i < m.own.n;
  const int same0 = real ? m.range[2 * int64_t(i)] : 0, same1 = real ? m.range[2 * int64_t(i) + 1] : 0;
  const int self = real ? self_of(m, i) : -1;
  const int64_t number = same1 - same0 - (self >= 0 ? 1 : 0);
  int64_t above0 = 0, above1 = 0, hits0 = 0, hits1 = 0;
  double precision0 = 0, precision1 = 0;
  for (int chunk = 0; __syncthreads_or(same0 + chunk * kChunk < same1); ++chunk) {
    for (int e = int(threadIdx.x); e < kCounts; e += kThreads) over[e] = reach[e] = higher[e] = 0;
    const int here = positives.fill<M>(m, chunk, arena);
    for (int t = 0; t * kTile < m.other.n; ++t) {
      make_tile<M, kSweepPitch>(m, int(blockIdx.x), t, arena, nullptr);
      const float* const line = reinterpret_cast<const float*>(arena) + row * kSweepPitch;
      for (int col = half * (kTile / kHalves); real && col < (half + 1) * (kTile / kHalves); ++col) {
        const int j = t * kTile + col;
        const float u = line[col];
        if (j >= m.other.n || j == self || u < positives.value[at]) continue;
        if (j < same0 || j >= same1) {
          atomicAdd(&over[at + positives.below(row, u)], 1);
          atomicAdd(&reach[at + positives.up_to(row, u)], 1);
        } else if (const int its = (j - same0) / kChunk; its != chunk) {  // of equals, those of later chunks are higher
          atomicAdd(&higher[at + (its < chunk ? positives.below(row, u) : positives.up_to(row, u))], 1);
        }
      }
      __syncthreads();
    }
    if (half == 0) {
      int64_t passed0 = 0, passed1 = 0, before = 0;
      for (int p = kChunk - 1; p >= 0; --p) {
        passed0 += over[at + p + 1], passed1 += reach[at + p + 1], before += higher[at + p + 1];
        if (p >= here) continue;
        const int64_t order = here - p + before;  // 1 is the most similar positive
        if (order == 1) above0 = passed0, above1 = passed1;
        if (order + passed0 <= number) ++hits0, precision0 += double(order) / double(order + passed0);
        if (order + passed1 <= number) ++hits1, precision1 += double(order) / double(order + passed1);
      }
    }
  }
  if (half || !real) return;
  const int64_t r = m.own.index[i];
  const double divisor = double(max(number, int64_t(1)));
  a.number[r] = number;
  a.above[2 * r] = above0, a.above[2 * r + 1] = above1;
  a.hits[2 * r] = hits0, a.hits[2 * r + 1] = hits1;
  a.precision[2 * r] = precision0 / divisor, a.precision[2 * r + 1] = precision1 / divisor;
}

}  // namespace

int launch_rank(const Matrix& m, const RankArguments& a, void* stream) {
  const size_t bytes = SharedPieces::bytes<char>(kArena) + 4 * SharedPieces::bytes<int>(kCounts);
  return with_math(m.math, [&](auto math) {
    return launch(&rank<decltype(math)>, dim3((m.own.n + kTile - 1) / kTile), kThreads, bytes, stream, m, a);
  });
}

}  // namespace pydml
