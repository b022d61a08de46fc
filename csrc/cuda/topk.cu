// The k pairs of largest loss, without ever sorting pairs and without the host: the k-th largest loss is found digit by
// digit (its 32 bits as 11, 11 and 10), each by one sweep that counts; then pairs above it are listed, and of those
// equal to it as many as are wanted, from the smallest (i, j) on. Counters decide only where in a list a pair stands,
// and lists are sorted afterwards.
#include "cuda/launchers.h"
#include "cuda/policies.cuh"
#include "cuda/sweep.cuh"

namespace pydml {
namespace {

constexpr int kDigits = 2048;

enum Stage : int { first_digit, second_digit, last_digit, count_ties, list_pairs };

struct TopkSweep {
  TopkArguments a;
  PolicyChoice policy;
  static constexpr bool positives_only = false;

  struct State {
    int64_t ties;
  };

  PYDML_HD size_t bytes() const { return a.stage <= last_digit ? kDigits * sizeof(unsigned) : 0; }

  __device__ __forceinline__ State start(const Matrix&, char* shared, int, int) const {
    if (a.stage <= last_digit)
      for (int e = int(threadIdx.x); e < kDigits; e += kThreads) reinterpret_cast<unsigned*>(shared)[e] = 0;
    return {0};
  }

  __device__ __forceinline__ void take(const Matrix& m, State& s, char* shared, int i, int j, float loss) const {
    const unsigned key = sortable(loss), found = unsigned(*a.found);
    unsigned* const counts = reinterpret_cast<unsigned*>(shared);
    if (a.stage == first_digit) {
      atomicAdd(&counts[key >> 21], 1u);
    } else if (a.stage == second_digit) {
      if (key >> 21 == found) atomicAdd(&counts[key >> 10 & 2047], 1u);
    } else if (a.stage == last_digit) {
      if (key >> 10 == found) atomicAdd(&counts[key & 1023], 1u);
    } else if (a.stage == count_ties) {
      s.ties += key == found;
    } else if (key >= found) {
      const int64_t pair = m.own.index[i] * m.other.n + m.other.index[j];
      if (key > found) {
        const unsigned long long at = atomicAdd(&a.listed[0], 1ull);
        a.above[at] = pair, a.losses[at] = loss;
      } else if (a.quota[i] == a.ties[i]) {
        a.equal[atomicAdd(&a.listed[1], 1ull)] = pair;
      } else if (a.quota[i] > 0) {  // of one row only some are wanted
        a.edge[j] = pair;
      }
    }
  }

  __device__ __forceinline__ void tile(const Matrix& m, State& s, char* shared, int, int i, const Line& line) const {
    with_policy(policy, [&](const auto& p) {
      for (int item = line.first; item < line.last; ++item) {
        const int j = line.item0 + item;
        const bool same = same_class(m, i, j);
        if (!(same ? a.positives : a.negatives)) continue;
        if (m.symmetric && m.own.index[i] >= m.other.index[j]) continue;  // unordered pairs, and no self
        const float u = line.at(item);
        take(m, s, shared, i, j, same ? p.template term<0>(u, 0.f, 0.f) : p.template term<1>(u, 0.f, 0.f));
      }
    });
  }

  __device__ __forceinline__ void end_tile(const Matrix&, char* shared, int, bool last) const {
    if (!last || a.stage > last_digit) return;
    const unsigned* const counts = reinterpret_cast<const unsigned*>(shared);
    for (int e = int(threadIdx.x); e < kDigits; e += kThreads)
      if (counts[e]) atomicAdd(&a.counts[e], static_cast<unsigned long long>(counts[e]));
  }

  __device__ __forceinline__ void finish(const Matrix& m, const State& s, char*, int, int i, int part) const {
    if (a.stage == count_ties) a.ties[int64_t(part) * m.own.n + i] = s.ties;
  }
};

}  // namespace

int launch_topk(const Matrix& m, const TopkArguments& a, void* stream) {
  TopkSweep sweep = {a, {}};
  sweep.policy.number = a.policy;
  for (int k = 0; k < kMostParameters; ++k) sweep.policy.parameters[k] = a.parameters[k];
  return launch_sweep(m, sweep, stream);
}

}  // namespace pydml
