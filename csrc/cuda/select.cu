// The select engines that choose for each row: extreme positives and negatives, mined pairs, a distance-weighted draw.
// Indices are those of z; ties go to the smallest column.
#include "cuda/launchers.h"
#include "cuda/sweep.cuh"

namespace pydml {
namespace {

// Is (value, column) a better choice than what there is?
template <class T>
__device__ __forceinline__ bool better(T value, int64_t column, T best, int64_t chosen) {
  return chosen < 0 || value > best || (value == best && column < chosen);
}

struct ExtremesSweep {
  ExtremesArguments a;
  bool positives_only;

  struct State {
    float best[2];  // of positives, of negatives; of -u where the smallest is wanted
    int64_t column[2];
  };

  static PYDML_HD bool idle() { return false; }
  static PYDML_HD size_t bytes() { return 0; }
  __device__ __forceinline__ void end_tile(const Matrix&, char*, int, bool) const {}
  __device__ __forceinline__ State start(const Matrix&, char*, int, int) const {
    return {{-INFINITY, -INFINITY}, {-1, -1}};
  }

  template <int side>
  __device__ __forceinline__ void consider(State& s, float u, int64_t column) const {
    const float value = u * float(a.sign[side]);
    if (!better(value, column, s.best[side], s.column[side])) return;
    s.best[side] = value, s.column[side] = column;
  }
  __device__ __forceinline__ void tile(const Matrix& m, State& s, char*, int, int i, const Line& line) const {
    const int self = self_of(m, i);
    for (int item = line.first; item < line.last; ++item) {
      const int j = line.item0 + item;
      const float u = line.at(item);
      if (same_class(m, i, j)) {
        if (a.sign[0] && j != self && !(a.above && !(u > a.above[i]))) consider<0>(s, u, m.other.index[j]);
      } else if (a.sign[1] && !(a.below && !(u < a.below[i]))) {
        consider<1>(s, u, m.other.index[j]);
      }
    }
  }
  __device__ __forceinline__ void finish(const Matrix& m, const State& s, char*, int, int i, int part) const {
    for (int side = 0; side < 2; ++side) {
      const int64_t to = (int64_t(part) * m.own.n + i) * 2 + side;
      a.values[to] = side ? s.best[1] : s.best[0], a.columns[to] = side ? s.column[1] : s.column[0];
    }
  }
};

// Parts -> the chosen column (in the order of z) and its u (sorted), for each side that was looked at.
__global__ void __launch_bounds__(kThreads) choose(const Matrix m, const ExtremesArguments a, int parts) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= m.own.n) return;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    if (!a.sign[side]) continue;
    float best = -INFINITY;
    int64_t chosen = -1;
    for (int part = 0; part < parts; ++part) {
      const int64_t from = (int64_t(part) * m.own.n + i) * 2 + side;
      if (a.columns[from] < 0 || !better(a.values[from], a.columns[from], best, chosen)) continue;
      best = a.values[from], chosen = a.columns[from];
    }
    a.chosen[side][m.own.index[i]] = chosen;
    a.u[side][i] = chosen < 0 ? a.missing[side] : best * float(a.sign[side]);
  }
}

// Count the mined pairs of every row, then list them: each thread knows where its own begin.
struct MinedSweep {
  MinedArguments a;
  static constexpr bool positives_only = false;

  struct State {
    int64_t at[2];  // pairs so far, or the place of the next
  };

  static PYDML_HD bool idle() { return false; }
  static PYDML_HD size_t bytes() { return 0; }
  __device__ __forceinline__ void end_tile(const Matrix&, char*, int, bool) const {}
  __device__ __forceinline__ int64_t slot(const Matrix& m, int side, int i, int part) const {
    return (int64_t(side) * m.own.n + i) * (m.splits * kHalves) + part;
  }
  __device__ __forceinline__ State start(const Matrix& m, char*, int, int i) const {
    if (!a.list || i >= m.own.n) return {{0, 0}};
    const int part = int(blockIdx.y) * kHalves + int(threadIdx.x) / kTile;
    return {{a.counts[slot(m, 0, i, part)], a.counts[slot(m, 1, i, part)]}};
  }
  // Counts that do not belong to these pairs lead out of the lists: whoever gave them gets fewer pairs, and no overrun.
  template <int side>
  __device__ __forceinline__ void put(State& s, int64_t pair) const {
    if (a.list && s.at[side] >= 0 && s.at[side] < a.room[side]) a.pairs[side][s.at[side]] = pair;
    ++s.at[side];
  }
  __device__ __forceinline__ void tile(const Matrix& m, State& s, char*, int, int i, const Line& line) const {
    const float below = a.thresholds ? a.thresholds[2 * int64_t(i)] : INFINITY;
    const float above = a.thresholds ? a.thresholds[2 * int64_t(i) + 1] : -INFINITY;
    const bool all = !a.thresholds;
    const int self = self_of(m, i);
    for (int item = line.first; item < line.last; ++item) {
      const int j = line.item0 + item;
      const float u = line.at(item);
      const bool same = same_class(m, i, j);
      if (j == self) continue;
      if (!all && !(same ? u < below : u > above)) continue;
      const int64_t pair = m.own.index[i] * m.other.n + m.other.index[j];
      if (same) {
        put<0>(s, pair);
      } else {
        put<1>(s, pair);
      }
    }
  }
  __device__ __forceinline__ void finish(const Matrix& m, const State& s, char*, int, int i, int part) const {
    if (a.list) return;
    a.counts[slot(m, 0, i, part)] = s.at[0], a.counts[slot(m, 1, i, part)] = s.at[1];
  }
};

// Uniform in (0, 1): splitmix64's finaliser on a counter.
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t counter) {
  uint64_t v = (counter + 1) * 0x9E3779B97F4A7C15ull + seed;
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  v ^= v >> 31;
  return (double(v >> 11) + 0.5) * 0x1p-53;
}

// Distance-weighted sampling, Wu et al. 2017, section 4, by Gumbel-max.
//   log w = (2-d)·log D - (d-3)/2·log(1-D²/4), D clamped below, only D < nonzero_loss_cutoff
struct SampleSweep {
  SampleArguments a;
  static constexpr bool positives_only = false;

  struct State {
    double best;
    int64_t column;
  };

  static PYDML_HD bool idle() { return false; }
  static PYDML_HD size_t bytes() { return 0; }
  __device__ __forceinline__ void end_tile(const Matrix&, char*, int, bool) const {}
  __device__ __forceinline__ State start(const Matrix&, char*, int, int) const { return {-INFINITY, -1}; }
  __device__ __forceinline__ void tile(const Matrix& m, State& s, char*, int, int i, const Line& line) const {
    const double power = (double(m.d) - 3) / 2;
    for (int item = line.first; item < line.last; ++item) {
      const int j = line.item0 + item;
      if (same_class(m, i, j)) continue;
      const double d = max(-double(line.at(item)), a.cutoff);
      if (!(d < a.nonzero_loss_cutoff)) continue;
      const double log_w = (2 - double(m.d)) * log(d) - power * log1p(-0.25 * d * d);
      if (!(log_w - log_w == 0)) continue;
      const int64_t column = m.other.index[j];
      const uint64_t counter = uint64_t(i) * uint64_t(m.other.n) + uint64_t(column);
      const double value = log_w - log(-log(uniform(uint64_t(*a.seed), counter)));
      if (better(value, column, s.best, s.column)) s.best = value, s.column = column;
    }
  }
  __device__ __forceinline__ void finish(const Matrix& m, const State& s, char*, int, int i, int part) const {
    a.values[int64_t(part) * m.own.n + i] = s.best, a.columns[int64_t(part) * m.own.n + i] = s.column;
  }
};

__global__ void __launch_bounds__(kThreads) draw(const Matrix m, const SampleArguments a, int parts) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= m.own.n) return;
  double best = -INFINITY;
  int64_t chosen = -1;
  for (int part = 0; part < parts; ++part) {
    const int64_t from = int64_t(part) * m.own.n + i;
    if (a.columns[from] < 0 || !better(a.values[from], a.columns[from], best, chosen)) continue;
    best = a.values[from], chosen = a.columns[from];
  }
  a.drawn[i] = chosen;
}

dim3 blocks(int n) { return dim3((n + kThreads - 1) / kThreads); }

}  // namespace

int launch_extremes(const Matrix& m, const ExtremesArguments& a, void* stream) {
  if (const int error = launch_sweep(m, ExtremesSweep{a, a.sign[1] == 0}, stream)) return error;
  return launch(&choose, blocks(m.own.n), kThreads, 0, stream, m, a, m.splits * kHalves);
}

int launch_mined(const Matrix& m, const MinedArguments& a, void* stream) {
  return launch_sweep(m, MinedSweep{a}, stream);
}

int launch_sample(const Matrix& m, const SampleArguments& a, void* stream) {
  if (const int error = launch_sweep(m, SampleSweep{a}, stream)) return error;
  return launch(&draw, blocks(m.own.n), kThreads, 0, stream, m, a, m.splits * kHalves);
}

}  // namespace pydml
