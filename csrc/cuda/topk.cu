// The k pairs of largest loss, without sorting all pairs and without the host. A few rows tell roughly how large the
// k-th loss is; one sweep lists the pairs above that. Only if they are too few or too many, which the device finds out,
// the k-th loss is found exactly, digit by digit (its 32 bits as 11, 11 and 10), and listed again. Where pairs equal to
// the threshold are needed, another sweep lists those of the first rows. Counters decide only where in a list a pair
// stands: lists are sorted afterwards.
#include "cuda/launchers.h"
#include "cuda/policies.cuh"
#include "cuda/sweep.cuh"

namespace pydml {
namespace {

enum Stage : int { first_digit, second_digit, last_digit, list_above, list_equal, all_losses };

struct TopkSweep {
  TopkArguments a;
  PolicyChoice policy;
  bool positives_only;

  struct State {
    unsigned long long ties;  // of pairs that are this row's
    unsigned found;
  };

  __device__ __forceinline__ bool idle() const { return *a.run == 0; }
  PYDML_HD size_t bytes() const {
    return a.stage <= last_digit ? kDigits * sizeof(unsigned) : a.stage == list_above ? kTile * sizeof(unsigned) : 0;
  }
  __device__ __forceinline__ State start(const Matrix&, char* shared, int, int) const {
    for (int e = int(threadIdx.x); e < int(bytes() / sizeof(unsigned)); e += kThreads)
      reinterpret_cast<unsigned*>(shared)[e] = 0;
    return {0, unsigned(*a.found)};
  }

  __device__ __forceinline__ void append(int64_t pair, float loss) const {
    const unsigned long long at = atomicAdd(a.listed, 1ull);
    if (at >= static_cast<unsigned long long>(a.room)) return;  // the count tells
    a.pairs[at] = pair, a.losses[at] = loss;
  }

  __device__ __forceinline__ void take(const Matrix& m, State& s, unsigned* shared, int i, int j, float loss) const {
    const unsigned key = sortable(loss), found = s.found;
    if (a.stage == first_digit) {
      atomicAdd(&shared[key >> 21], 1u);
    } else if (a.stage == second_digit) {
      if (key >> 21 == found) atomicAdd(&shared[key >> 10 & 2047], 1u);
    } else if (a.stage == last_digit) {
      if (key >> 10 == found) atomicAdd(&shared[key & 1023], 1u);
    } else if (key >= found) {
      int64_t row = m.own.index[i], col = m.other.index[j];
      const bool turned = m.upper && row > col;  // a pair is the smaller one's
      if (turned) row = m.other.index[j], col = m.own.index[i];
      const int64_t pair = row * m.other.n + col;
      if (a.stage == list_equal) {
        if (key == found && a.before[row] < *a.needed) append(pair, loss);
      } else if (key > found) {
        append(pair, loss);
      } else if (turned) {
        atomicAdd(&shared[j % kTile], 1u);
      } else {
        ++s.ties;
      }
    }
  }

  __device__ __forceinline__ void tile(const Matrix& m, State& s, char* shared, int, int i, const Line& line) const {
    const int self = self_of(m, i);
    with_policy(policy, [&](const auto& p) {
      for (int item = line.first; item < line.last; ++item) {
        const int j = line.item0 + item;
        if (m.upper && j <= i) continue;  // unordered pairs, and no self
        const bool same = same_class(m, i, j), member = same ? a.positives && j != self : a.negatives;
        if (!member && a.stage != all_losses) continue;
        const float u = line.at(item);
        const float loss = same ? p.template term<0>(u, 0.f, 0.f) : p.template term<1>(u, 0.f, 0.f);
        if (a.stage == all_losses) {
          a.losses[int64_t(i) * m.other.n + j] = member ? loss : -INFINITY;
        } else {
          take(m, s, reinterpret_cast<unsigned*>(shared), i, j, loss);
        }
      }
    });
  }

  __device__ __forceinline__ void end_tile(const Matrix& m, char* shared, int t, bool last) const {
    unsigned* const counts = reinterpret_cast<unsigned*>(shared);
    if (a.stage == list_above && m.upper) {
      const int j0 = (walk_of(m, positives_only).first + t) * kTile;
      for (int e = int(threadIdx.x); e < kTile; e += kThreads) {
        if (counts[e]) atomicAdd(&a.ties[m.other.index[j0 + e]], static_cast<unsigned long long>(counts[e]));
        counts[e] = 0;
      }
    }
    if (!last || a.stage > last_digit) return;
    for (int e = int(threadIdx.x); e < kDigits; e += kThreads)
      if (counts[e]) atomicAdd(&a.counts[e], static_cast<unsigned long long>(counts[e]));
  }

  __device__ __forceinline__ void finish(const Matrix& m, const State& s, char*, int, int i, int) const {
    if (s.ties) atomicAdd(&a.ties[m.own.index[i]], s.ties);
  }
};

}  // namespace

int launch_topk(const Matrix& m, const TopkArguments& a, void* stream) {
  TopkSweep sweep = {a, {}, a.stage != all_losses && !a.negatives};
  sweep.policy.number = a.policy;
  for (int k = 0; k < kMostParameters; ++k) sweep.policy.parameters[k] = a.parameters[k];
  Matrix half = m;
  half.upper = m.symmetric;
  return launch_sweep(half, sweep, stream);
}

}  // namespace pydml
