// The triplet engine: all triplets, or one semi-hard negative a positive pair, with no triplet list. The positives of a
// row become rising thresholds (a first sweep lists them, torch sorts them), and every negative is held against them.
#include "cuda/carry.cuh"
#include "cuda/launchers.h"
#include "cuda/thresholds.cuh"

namespace pydml {
namespace {

enum Stage : int { list_positives, sum_losses, count_passed, sum_slopes, best_below };

// Where column j stands among the positives of row i, before they are sorted.
__device__ __forceinline__ int slot_of(const int* range, bool symmetric, int64_t i, int j) {
  return j - range[2 * i] - (symmetric && j > i ? 1 : 0);
}

constexpr long long kNothing = -0x7fffffffffffffffll - 1;

// u and the column as one number: larger u first, then the smaller column.
__device__ __forceinline__ long long ranked(float u, int64_t column) {
  const unsigned key = sortable(u) ^ 0x80000000u;  // in the order of signed numbers
  return static_cast<long long>(static_cast<unsigned long long>(key) << 32 | (0xffffffffu - unsigned(column)));
}

struct TripletSweep {
  TripletArguments a;
  bool positives_only;

  struct State {
    float total, count;
  };

  PYDML_HD size_t bytes() const {
    switch (a.stage) {
      case count_passed:
        return sizeof(int) * kTile * (a.most + 1);
      case sum_slopes:
        return sizeof(float) * kHalves * kTile * a.most;
      case best_below:
        return sizeof(long long) * kTile * (a.most + 1);
      default:
        return 0;
    }
  }

  __device__ __forceinline__ State start(const Matrix&, char* shared, int, int) const {
    if (a.stage == best_below) {
      for (int e = int(threadIdx.x); e < kTile * (a.most + 1); e += kThreads)
        reinterpret_cast<long long*>(shared)[e] = kNothing;
    } else {
      for (int e = int(threadIdx.x); e < int(bytes() / 4); e += kThreads) reinterpret_cast<int*>(shared)[e] = 0;
    }
    return {0, 0};
  }

  __device__ __forceinline__ void tile(const Matrix& m, State& s, char* shared, int row, int i,
                                       const Line& line) const {
    const int same0 = m.range[2 * int64_t(i)], same1 = m.range[2 * int64_t(i) + 1];
    const float* const value = a.value + int64_t(i) * a.most;
    const int real = same1 - same0 - (m.symmetric ? 1 : 0);
    float* const slopes = reinterpret_cast<float*>(shared) + (int(threadIdx.x) / kTile * kTile + row) * a.most;
    for (int item = line.first; item < line.last; ++item) {
      const int j = line.item0 + item;
      const float u = line.at(item), reach = u + a.margin;
      if (j >= same0 && j < same1) {
        if (a.stage == list_positives && !(m.symmetric && i == j))
          a.list[int64_t(i) * a.most + slot_of(m.range, m.symmetric, i, j)] = u;
        continue;
      }
      if (a.stage == sum_losses && !a.smooth) {
        const int k = passed(value, a.most, reach, false);
        s.total += float(k) * reach - a.prefix[int64_t(i) * (a.most + 1) + k], s.count += float(k);
      } else if (a.stage == sum_losses) {
        for (int p = 0; p < real; ++p) {
          const float loss = Softplus(reach - value[p]);
          s.total += loss, s.count += loss > 0 ? 1.f : 0.f;
        }
      } else if (a.stage == count_passed) {
        atomicAdd(reinterpret_cast<int*>(shared) + row * (a.most + 1) + passed(value, a.most, reach, false), 1);
      } else if (a.stage == sum_slopes) {
        for (int p = 0; p < real; ++p) slopes[p] += Sigmoid(reach - value[p]);
      } else if (a.stage == best_below) {
        atomicMax(reinterpret_cast<long long*>(shared) + row * (a.most + 1) + passed(value, a.most, u, true),
                  ranked(u, m.other.index[j]));
      }
    }
  }

  __device__ __forceinline__ void end_tile(const Matrix& m, char* shared, int, bool last) const {
    if (!last || a.stage < count_passed) return;
    const int width = a.stage == sum_slopes ? a.most : a.most + 1;
    for (int e = int(threadIdx.x); e < kTile * width; e += kThreads) {
      const int64_t i = int64_t(blockIdx.x) * kTile + e / width;
      if (i >= m.own.n) continue;
      const int64_t to = (int64_t(blockIdx.y) * m.own.n + i) * width + e % width;
      if (a.stage == count_passed) a.counts[to] = reinterpret_cast<const int*>(shared)[e];
      if (a.stage == best_below) a.best[to] = reinterpret_cast<const long long*>(shared)[e];
      if (a.stage == sum_slopes)
        a.sums[to] =
            reinterpret_cast<const float*>(shared)[e] + reinterpret_cast<const float*>(shared)[kTile * width + e];
    }
  }

  __device__ __forceinline__ void finish(const Matrix& m, const State& s, char*, int, int i, int part) const {
    if (a.stage != sum_losses) return;
    float* const to = a.sums + (int64_t(part) * m.own.n + i) * 2;
    to[0] = s.total, to[1] = s.count;
  }
};

struct TripletWeights {
  TripletBackwardArguments a;

  // dL/du of the pair of anchor i and column j.
  __device__ __forceinline__ float weight(const Matrix& m, int64_t i, int j, bool same, float u) const {
    if (same) return -a.grad[i] * a.pushed[i * a.most + slot_of(a.range, m.symmetric, i, j)];
    const float* const value = a.value + i * a.most;
    const float reach = u + a.margin;
    if (!a.smooth) return a.grad[i] * float(passed(value, a.most, reach, false));
    float total = 0;
    for (int p = 0; p < a.most && value[p] < INFINITY; ++p) total += Sigmoid(reach - value[p]);
    return a.grad[i] * total;
  }

  __device__ __forceinline__ void weigh(const WeightTile& tile) const {
    tile.each([&](int i, int j, bool same, float u) {
      float w = 0;
      if (a.own_anchors) w += weight(tile.m, i, j, same, u);
      if (a.other_anchors) w += weight(tile.m, j, i, same, u);
      return w;
    });
  }
};

}  // namespace

int launch_triplet(const Matrix& m, const TripletArguments& a, void* stream) {
  return launch_sweep(m, TripletSweep{a, a.stage == list_positives}, stream);
}

int launch_triplet_backward(const Matrix& m, const TripletBackwardArguments& a, void* stream) {
  return launch_carry(m, TripletWeights{a}, a.parts, stream);
}

}  // namespace pydml
