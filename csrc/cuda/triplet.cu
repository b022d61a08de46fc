// The triplet engine: all triplets, or one semi-hard negative a positive pair, with no triplet list. The positives of a
// row become rising thresholds, a chunk of them at a time, and every negative is held against them. A block goes on
// until no row of its own has positives left, so that nobody has to know how large classes are.
//
// Gradients need the thresholds of both sides of a tile, so they go through tables [anchors, width] of a window of each
// anchor's positives: one round of launches for every window, which ends at once where no class reaches it.
#include "cuda/carry.cuh"
#include "cuda/launchers.h"
#include "cuda/thresholds.cuh"

namespace pydml {
namespace {

constexpr int kNumbers = kTile * kChunkPitch;
constexpr long long kNothing = -0x7fffffffffffffffll - 1;

// u and the column as one number: larger u first, then the smaller column.
__device__ __forceinline__ long long ranked(float u, int64_t column) {
  const unsigned key = sortable(u) ^ 0x80000000u;  // in the order of signed numbers
  return static_cast<long long>(static_cast<unsigned long long>(key) << 32 | (0xffffffffu - unsigned(column)));
}
__device__ __forceinline__ float u_of(long long best) {
  const unsigned key = unsigned(static_cast<unsigned long long>(best) >> 32) ^ 0x80000000u;
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
__device__ __forceinline__ int column_of(long long best) {
  return int(0xffffffffu - unsigned(static_cast<unsigned long long>(best) & 0xffffffffu));
}

// What a block keeps of the negatives of its rows beside their thresholds, by how many of these each passes; one of it.
union Held {
  float* prefix;    // sums of the first thresholds
  int* counts;      // negatives
  float* slopes;    // of each half of a row: Σ of slopes, by threshold
  long long* best;  // the most similar negative

  static PYDML_HD size_t bytes(const TripletArguments& a) {
    if (a.semihard) return kNumbers * sizeof(long long);
    return (a.smooth ? kHalves : 1) * kNumbers * sizeof(float);
  }
};

template <class M>
__global__ void __launch_bounds__(kThreads, 2) hold(const Matrix m, const TripletArguments a) {
  SharedPieces pieces;
  char* const arena = pieces.take<char>(kArena);
  const Thresholds positives = {pieces.take<float>(kNumbers), pieces.take<float>(kNumbers)};
  char* const shared = pieces.take<char>(Held::bytes(a));
  Held held;
  held.best = reinterpret_cast<long long*>(shared);
  const int row = int(threadIdx.x) % kTile, half = int(threadIdx.x) / kTile, at = row * kChunkPitch;
  const int64_t i = int64_t(blockIdx.x) * kTile + row;
  const bool real = i < m.own.n, tables = a.width > 0;
  const int same0 = real ? m.range[2 * i] : 0, same1 = real ? m.range[2 * i + 1] : 0;
  const float* const rising = positives.value + at;
  const Walk walk = walk_of(m, false);
  float total = 0, rest = 0;
  int64_t count = 0;
  for (int window = a.window; !tables || window < a.window + a.width; window += kChunk) {
    if (!__syncthreads_or(same0 + window < same1)) break;
    for (int e = int(threadIdx.x); e < kNumbers; e += kThreads) {
      if (a.semihard) {
        held.best[e] = kNothing;
      } else {
        held.slopes[e] = 0;
        if (a.smooth) held.slopes[kNumbers + e] = 0;
      }
    }
    const int here = positives.fill<M>(m, window / kChunk, arena);
    if (!tables && !a.semihard && !a.smooth && half == 0)
      for (int p = 0; p < here; ++p) held.prefix[at + p + 1] = held.prefix[at + p] + rising[p];
    for (int t = walk.first; t < walk.last; ++t) {
      make_tile<M, kSweepPitch>(m, int(blockIdx.x), t, arena, nullptr);
      const float* const line = reinterpret_cast<const float*>(arena) + row * kSweepPitch;
      for (int col = half * (kTile / kHalves); here && col < (half + 1) * (kTile / kHalves); ++col) {
        const int j = t * kTile + col;
        if (j >= m.other.n || (j >= same0 && j < same1)) continue;
        const float u = line[col], reach = u + a.margin;
        if (a.semihard) {
          atomicMax(&held.best[at + positives.up_to(row, u)], ranked(u, m.other.index[j]));
        } else if (a.smooth && tables) {
          float* const slopes = held.slopes + half * kNumbers + at;
          for (int p = 0; p < here; ++p) slopes[p] += Sigmoid(reach - rising[p]);
        } else if (a.smooth) {
          for (int p = 0; p < here; ++p) {
            const float loss = Softplus(reach - rising[p]);
            add_exactly(total, rest, loss);
            count += loss > 0;
          }
        } else if (const int k = positives.below(row, reach); !k) {
          continue;
        } else if (tables) {
          atomicAdd(&held.counts[at + k], 1);
        } else {
          add_exactly(total, rest, Fma(float(k), reach, -held.prefix[at + k]));
          count += k;
        }
      }
      __syncthreads();
    }
    if (half || !real) continue;
    // What is said of a threshold is said of its equals: they are passed together.
    if (a.semihard)
      for (int p = 1; p < here; ++p) held.best[at + p] = max(held.best[at + p], held.best[at + p - 1]);
    if (!a.semihard && !a.smooth && tables)
      for (int p = kChunk - 1; p > 0; --p) held.counts[at + p] += held.counts[at + p + 1];
    for (int p = 0; !tables && a.semihard && p < here; ++p) {
      if (held.best[at + p] == kNothing) continue;
      const float violation = u_of(held.best[at + p]) - rising[p] + a.margin;
      const float loss = a.smooth ? Softplus(violation) : Relu(violation);
      total += loss, count += loss > 0;
    }
    for (int slot = 0; tables && slot < kChunk; ++slot) {
      const int64_t to = i * a.width + (window - a.window) + slot;
      const float u = positives.given[at + slot];
      a.rising[to] = rising[slot];
      float push = 0;
      int negative = -1;
      if (u < INFINITY) {
        const int p = positives.below(row, u);
        if (a.semihard && held.best[at + p] != kNothing) {
          const float violation = u_of(held.best[at + p]) - u + a.margin;
          push = a.smooth ? Sigmoid(violation) : violation > 0 ? 1.f : 0.f;
          negative = column_of(held.best[at + p]);
        } else if (!a.semihard) {
          push = a.smooth ? held.slopes[at + p] + held.slopes[kNumbers + at + p] : float(held.counts[at + p + 1]);
        }
      }
      a.pushed[to] = push;
      if (a.semihard) a.negative[to] = negative;
    }
  }
  if (!real || tables) return;
  float* const to = a.sums + ((int64_t(blockIdx.y) * kHalves + half) * m.own.n + i) * 2;
  to[0] = total + rest, to[1] = float(count);
}

struct TripletWeights {
  TripletBackwardArguments a;

  // The first window writes, zeros too; others add, if any class reaches them.
  __device__ __forceinline__ bool idle() const { return a.window && *a.longest <= a.window; }
  __device__ __forceinline__ bool adds() const { return a.window > 0; }
  static PYDML_HD bool positives_only() { return false; }

  // dL/du of the pair of anchor i and column j, which is `column` of z.
  __device__ __forceinline__ float weight(int64_t i, int j, int64_t column, bool same, float u) const {
    const int first = a.range[2 * i] + a.window, number = min(a.range[2 * i + 1] - first, a.width);
    if (same) return j >= first && j - first < a.width ? -a.grad[i] * a.pushed[i * a.width + j - first] : 0.f;
    const float reach = u + a.margin;
    float total = 0;
    if (a.semihard) {
      for (int p = 0; p < number; ++p)
        if (a.negative[i * a.width + p] == column) total += a.pushed[i * a.width + p];
    } else if (a.smooth) {
      for (int p = 0; p < number; ++p) total += Sigmoid(reach - a.rising[i * a.width + p]);  // 0 of those at infinity
    } else {
      for (int p = 0; p < number; p += kChunk) total += float(passed(a.rising + i * a.width + p, kChunk, reach, false));
    }
    return a.grad[i] * total;
  }

  __device__ __forceinline__ void weigh(const WeightTile& tile) const {
    const Matrix& m = tile.m;
    tile.each([&](int i, int j, bool same, float u) {
      float w = 0;
      if (a.own_anchors) w += weight(i, j, m.other.index[j], same, u);
      if (a.other_anchors) w += weight(j, i, m.own.index[i], same, u);
      return w;
    });
  }
};

}  // namespace

int launch_triplet(const Matrix& m, const TripletArguments& a, void* stream) {
  const size_t bytes = SharedPieces::bytes<char>(kArena) + 2 * SharedPieces::bytes<float>(kNumbers) +
                       SharedPieces::bytes<char>(Held::bytes(a));
  return with_math(m.math, [&](auto math) {
    return launch(&hold<decltype(math)>, dim3((m.own.n + kTile - 1) / kTile, m.splits), kThreads, bytes, stream, m, a);
  });
}

int launch_triplet_backward(const Matrix& m, const TripletBackwardArguments& a, void* stream) {
  return launch_carry(m, TripletWeights{a}, a.parts, stream);
}

}  // namespace pydml
