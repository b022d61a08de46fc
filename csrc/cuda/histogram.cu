// The histogram engine: soft counts of u on evenly spaced nodes, for each row. Shares are added as whole numbers, in
// steps of 2^-22, because their sum does not hang on the order in which threads come; a few tiles at a time, so that
// 32 bits hold them.
#include "cuda/carry.cuh"
#include "cuda/launchers.h"
#include "cuda/sweep.cuh"

namespace pydml {
namespace {

constexpr int kWindow = 128;     // nodes that a block counts
constexpr int kFlush = 8;        // tiles between two flushes
constexpr float kOne = 1 << 22;  // · kTile · kFlush fits 32 bits

struct Nodes {
  int count;
  float low, density;  // of nodes, in a unit of u

  // The node on the left of u and the share of the one on the right.
  __device__ __forceinline__ int left(float u, float& share) const {
    float at = (u - low) * density;
    at = at > 0 ? min(at, float(count - 1)) : 0.f;  // NaN too
    const int node = min(int(at), count - 2);       // the last node has nothing on its right
    share = at - float(node);
    return node;
  }
};

struct HistogramSweep {
  Nodes nodes;
  bool positives_only;  // count the positives, else the negatives
  float* parts;         // [splits, own.n, nodes]

  struct State {};

  static PYDML_HD bool idle() { return false; }
  PYDML_HD int window() const { return nodes.count < kWindow ? nodes.count : kWindow; }
  PYDML_HD size_t bytes() const { return size_t(kTile) * window() * sizeof(unsigned); }

  __device__ __forceinline__ State start(const Matrix&, char* shared, int, int) const {
    for (int e = int(threadIdx.x); e < kTile * window(); e += kThreads) reinterpret_cast<unsigned*>(shared)[e] = 0;
    return {};
  }

  __device__ __forceinline__ void tile(const Matrix& m, State&, char* shared, int row, int i, const Line& line) const {
    unsigned* const counts = reinterpret_cast<unsigned*>(shared) + row * window();
    const int same0 = m.range[2 * int64_t(i)], same1 = m.range[2 * int64_t(i) + 1], self = self_of(m, i);
    const int node0 = int(blockIdx.z) * kWindow;
    for (int item = line.first; item < line.last; ++item) {
      const int j = line.item0 + item;
      if ((j >= same0 && j < same1) != positives_only || j == self) continue;
      float share;
      const int left = nodes.left(line.at(item), share) - node0;
      const unsigned right = unsigned(Fma(share, kOne, 0.5f));
      if (left >= 0 && left < window()) atomicAdd(&counts[left], unsigned(kOne) - right);
      if (left + 1 >= 0 && left + 1 < window()) atomicAdd(&counts[left + 1], right);
    }
  }

  __device__ __forceinline__ void end_tile(const Matrix& m, char* shared, int t, bool last) const {
    if (!last && (t + 1) % kFlush) return;
    unsigned* const counts = reinterpret_cast<unsigned*>(shared);
    for (int e = int(threadIdx.x); e < kTile * window(); e += kThreads) {
      const int i = int(blockIdx.x) * kTile + e / window(), node = int(blockIdx.z) * kWindow + e % window();
      if (i < m.own.n && node < nodes.count)
        parts[(int64_t(blockIdx.y) * m.own.n + i) * nodes.count + node] += float(counts[e]) / kOne;
      counts[e] = 0;
    }
  }

  __device__ __forceinline__ void finish(const Matrix&, const State&, char*, int, int, int) const {}
};

// A pair's weight is the slope of its anchor's table between two nodes.
struct HistogramWeights {
  Nodes nodes;
  const float *own, *other;  // [2, n, nodes-1] of positives and of negatives, or null where there are no anchors

  static PYDML_HD bool idle() { return false; }
  static PYDML_HD bool adds() { return false; }
  static PYDML_HD bool positives_only() { return false; }
  __device__ __forceinline__ void weigh(const WeightTile& tile) const {
    tile.each([&](int i, int j, bool same, float u) {
      float share, w = 0;
      const int left = nodes.left(u, share), side = same ? 0 : 1;
      if (own) w += own[(int64_t(side) * tile.m.own.n + i) * (nodes.count - 1) + left];
      if (other) w += other[(int64_t(side) * tile.m.other.n + j) * (nodes.count - 1) + left];
      return w;
    });
  }
};

}  // namespace

int launch_histogram(const Matrix& m, const HistogramArguments& a, void* stream) {
  const Nodes nodes = {a.nodes, a.low, a.density};
  const HistogramSweep sweep = {nodes, a.positives, a.parts};
  return launch_sweep(m, sweep, stream, (a.nodes + kWindow - 1) / kWindow);
}

int launch_histogram_backward(const Matrix& m, const HistogramBackwardArguments& a, void* stream) {
  const Nodes nodes = {a.nodes, a.low, a.density};
  return launch_carry(m, HistogramWeights{nodes, a.own, a.other}, a.parts, stream);
}

}  // namespace pydml
