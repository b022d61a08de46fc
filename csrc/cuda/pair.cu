// The pair engine: row statistics of a policy, and the gradients that they lead to.
//
// Mining needs the least similar positive of a row before its negatives are looked at, and the most similar negative
// before its positives are. So: a sweep over the tiles that hold positives, one over all tiles (mined negatives, and
// the most similar one), and one over the positives again.
#include "cuda/carry.cuh"
#include "cuda/launchers.h"
#include "cuda/policies.cuh"
#include "cuda/sweep.cuh"

namespace pydml {
namespace {

constexpr int kStep = 4;  // items whose terms a thread has in registers at a time
static_assert(kKept == 2 * kMostSlots + 2, "top and sum of each slot, the lowest positive, the highest negative");

// What a sweep is for: to find the lowest positive, or the statistics of some pairs.
enum Stage : int { of_both, of_positives, of_negatives, lowest_positive };
static_assert(int(Visits::both) == of_both && int(Visits::positives) == of_positives &&
                  int(Visits::negatives) == of_negatives,
              "a call that needs one sweep names it");

// (top, sum) stand for e^top · sum.
__device__ __forceinline__ void merge_exponentials(float& top, float& sum, float other_top, float other_sum) {
  const float most = max(top, other_top);
  if (most == -INFINITY) return;
  sum = Fma(sum, Exp(top - most), other_sum * Exp(other_top - most));
  top = most;
}

struct PairSweep {
  PolicyChoice policy;
  int stage;
  bool positives_only, mines;
  const float *row_field, *col_field;  // [own.n], [other.n] or null
  const float* thresholds;             // [own.n, 2]: positives below the first, negatives above the second
  float* parts;                        // [parts, own.n, kKept]

  struct State {
    float top[kMostSlots], sum[kMostSlots];  // of a log-sum-exp; of a sum: what is left over, and the sum
    float low, high;
  };

  static PYDML_HD bool idle() { return false; }
  static PYDML_HD size_t bytes() { return 0; }
  __device__ void end_tile(const Matrix&, char*, int, bool) const {}

  __device__ __forceinline__ State start(const Matrix&, char*, int, int) const {
    State s;
    for (int k = 0; k < kMostSlots; ++k) s.top[k] = s.sum[k] = 0;
    with_policy(policy, [&](const auto& p) {
      using P = std::decay_t<decltype(p)>;
      for_slots<P>([&](auto k) {
        constexpr Slot slot = P::slots[decltype(k)::value];
        if (slot.kind == Kind::log_sum_exp) s.top[decltype(k)::value] = -INFINITY;
      });
    });
    s.low = INFINITY, s.high = -INFINITY;
    return s;
  }

  template <class P>
  __device__ __forceinline__ void add(const P& p, const Matrix& m, State& s, int i, const Line& line) const {
    const int same0 = m.range[2 * int64_t(i)], same1 = m.range[2 * int64_t(i) + 1], self = self_of(m, i);
    const float row = row_field ? row_field[i] : 0.f;
    const float below = mines ? thresholds[2 * int64_t(i)] : INFINITY;
    const float above = mines ? thresholds[2 * int64_t(i) + 1] : -INFINITY;
    for (int first = line.first; first < line.last; first += kStep) {
      float u[kStep], col[kStep];
      unsigned positives = 0, negatives = 0;
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const bool inside = first + e < line.last;
        const int item = inside ? first + e : first, j = line.item0 + item;
        u[e] = line.at(item);
        col[e] = col_field ? col_field[j] : 0.f;
        const bool same = j >= same0 && j < same1;
        if (inside && same && j != self && stage != of_negatives && (!mines || u[e] < below)) positives |= 1u << e;
        if (inside && !same && stage != of_positives) {
          s.high = max(s.high, u[e]);
          if (!mines || u[e] > above) negatives |= 1u << e;
        }
      }
      for_slots<P>([&](auto k_) {
        constexpr int k = decltype(k_)::value;
        constexpr Slot slot = P::slots[k];
        const unsigned members = slot.side == Side::positives ? positives : negatives;
        if (!members) return;
        float term[kStep];
#pragma unroll
        for (int e = 0; e < kStep; ++e) term[e] = p.template term<k>(u[e], row, col[e]);
        if constexpr (slot.kind == Kind::log_sum_exp) {
          float top = s.top[k];
#pragma unroll
          for (int e = 0; e < kStep; ++e)
            if (members >> e & 1) top = max(top, term[e]);
          if (top == -INFINITY) return;
          float sum = s.sum[k] * Exp(s.top[k] - top);
#pragma unroll
          for (int e = 0; e < kStep; ++e)
            if (members >> e & 1) sum += Exp(term[e] - top);
          s.top[k] = top, s.sum[k] = sum;
        } else {
          float sum = 0;
#pragma unroll
          for (int e = 0; e < kStep; ++e)
            if (members >> e & 1) sum += term[e];
          add_exactly(s.sum[k], s.top[k], sum);
        }
      });
    }
  }

  __device__ __forceinline__ void tile(const Matrix& m, State& s, char*, int, int i, const Line& line) const {
    if (stage == lowest_positive) {
      const int first = max(line.first, m.range[2 * int64_t(i)] - line.item0);
      const int last = min(line.last, m.range[2 * int64_t(i) + 1] - line.item0), self = self_of(m, i);
      for (int item = first; item < last; ++item)
        if (line.item0 + item != self) s.low = min(s.low, line.at(item));
      return;
    }
    with_policy(policy, [&](const auto& p) { add(p, m, s, i, line); });
  }

  __device__ __forceinline__ void finish(const Matrix& m, const State& s, char*, int, int i, int part) const {
    float* const to = parts + (int64_t(part) * m.own.n + i) * kKept;
    for (int k = 0; k < kMostSlots; ++k) to[2 * k] = s.top[k], to[2 * k + 1] = s.sum[k];
    to[2 * kMostSlots] = s.low, to[2 * kMostSlots + 1] = s.high;
  }
};

// The parts of a row become its statistics, or its thresholds, or both; `alone`: also the statistics of pairs that were
// not visited, which are those of nothing.
__global__ void __launch_bounds__(kThreads) merge(const Matrix m, const PairSweep sweep, int parts, bool alone,
                                                  float epsilon, float* thresholds, float* stats) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= m.own.n) return;
  const int64_t r = m.own.index[i];
  const bool whole = *m.trouble == 0;
  auto part = [&](int n) { return sweep.parts + (int64_t(n) * m.own.n + i) * kKept; };
  if (sweep.stage == lowest_positive || (sweep.mines && sweep.stage == of_negatives)) {
    float low = INFINITY, high = -INFINITY;
    for (int n = 0; n < parts; ++n)
      low = min(low, part(n)[2 * kMostSlots]), high = max(high, part(n)[2 * kMostSlots + 1]);
    if (sweep.stage == lowest_positive) thresholds[2 * int64_t(i) + 1] = low - epsilon;
    if (sweep.stage == of_negatives) thresholds[2 * int64_t(i)] = high + epsilon;
  }
  if (sweep.stage == lowest_positive) return;
  with_policy(sweep.policy, [&](const auto& p) {
    using P = std::decay_t<decltype(p)>;
    for_slots<P>([&](auto k_) {
      constexpr int k = decltype(k_)::value;
      constexpr Slot slot = P::slots[k];
      if (!alone && sweep.stage == (slot.side == Side::positives ? of_negatives : of_positives)) return;
      constexpr bool exponential = slot.kind == Kind::log_sum_exp;
      float top = exponential ? -INFINITY : 0.f, sum = 0;
      for (int n = 0; n < parts; ++n) {
        const float t = part(n)[2 * k], s = part(n)[2 * k + 1];
        if (exponential) {
          merge_exponentials(top, sum, t, s);
        } else {
          add_exactly(sum, top, s);
          top += t;
        }
      }
      const float value = exponential ? (top == -INFINITY ? top : top + logf(sum)) : sum + top;
      stats[r * slot_count<P> + k] = whole ? value : NAN;
    });
  });
}

// dL/du of a pair: what it does to the statistics of either of its rows that is an anchor.
struct PairWeights {
  PolicyChoice policy;
  int visits;
  bool own_anchors, other_anchors, mines;
  PairSide own, other;

  static PYDML_HD bool idle() { return false; }
  static PYDML_HD bool adds() { return false; }
  PYDML_HD bool positives_only() const { return visits == of_positives; }

  template <class P>
  __device__ __forceinline__ float weight(const P& p, float u, const PairSide& anchor, int64_t a, float row, float col,
                                          bool same) const {
    if (mines) {
      const float bound = anchor.thresholds[2 * a + (same ? 0 : 1)];
      if (!(same ? u < bound : u > bound)) return 0;
    }
    float w = 0;
    for_slots<P>([&](auto k_) {
      constexpr int k = decltype(k_)::value;
      constexpr Slot slot = P::slots[k];
      if constexpr (slot.kind == Kind::constant) return;
      if (same != (slot.side == Side::positives)) return;
      float share = anchor.grad[a * slot_count<P> + k] * p.template slope<k>(u, row, col);
      if constexpr (slot.kind == Kind::log_sum_exp) {
        const float stat = anchor.stats[a * slot_count<P> + k];
        share = stat == -INFINITY ? 0.f : share * Exp(p.template term<k>(u, row, col) - stat);  // -inf: of nothing
      }
      w += share;
    });
    return w;
  }

  template <class Tile>
  __device__ __forceinline__ void weigh(const Tile& tile) const {
    with_policy(policy, [&](const auto& p) {
      using P = std::decay_t<decltype(p)>;
      auto both = [&](int i, int j, bool same, float u) {
        float w = 0;
        if (visits == (same ? of_negatives : of_positives)) return w;
        if (own_anchors)
          w += weight(p, u, own, i, own.row_field ? own.row_field[i] : 0.f, other.col_field ? other.col_field[j] : 0.f,
                      same);
        if (other_anchors)
          w += weight(p, u, other, j, other.row_field ? other.row_field[j] : 0.f,
                      own.col_field ? own.col_field[i] : 0.f, same);
        return w;
      };
      if constexpr (P::fields && P::mines) {  // the policy of softmax losses, the only ones that pool
        if (tile.pooled()) return tile.each_pool(both);
      }
      tile.each(both);
    });
  }
};

}  // namespace

int launch_pair(const Matrix& m, const PairArguments& a, void* stream) {
  PairSweep sweep = {};
  sweep.policy.number = a.policy;
  for (int k = 0; k < kMostParameters; ++k) sweep.policy.parameters[k] = a.parameters[k];
  sweep.row_field = a.row_field, sweep.col_field = a.col_field;
  sweep.thresholds = a.thresholds, sweep.parts = a.parts, sweep.mines = a.mines;
  const bool finds = a.mines && !a.bounded, both = a.visits == of_both;
  auto pass = [&](int stage, bool alone) {
    sweep.stage = stage, sweep.positives_only = stage == of_positives || stage == lowest_positive;
    if (const int error = launch_sweep(m, sweep, stream)) return error;
    return launch(&merge, dim3((m.own.n + kThreads - 1) / kThreads), dim3(kThreads), 0, stream, m, sweep,
                  m.splits * kHalves, alone, a.epsilon, a.thresholds, a.stats);
  };
  if (finds && a.visits != of_negatives)
    if (const int error = pass(lowest_positive, false)) return error;
  if (!finds || !both) return pass(a.visits, true);
  if (const int error = pass(of_negatives, false)) return error;
  return pass(of_positives, false);
}

int launch_pair_backward(const Matrix& m, const PairBackwardArguments& a, void* stream) {
  PairWeights weights = {};
  weights.policy.number = a.policy;
  for (int k = 0; k < kMostParameters; ++k) weights.policy.parameters[k] = a.parameters[k];
  weights.visits = a.visits, weights.own_anchors = a.own_anchors, weights.other_anchors = a.other_anchors,
  weights.mines = a.mines;
  weights.own = a.own, weights.other = a.other;
  return launch_carry(m, weights, a.parts, stream);
}

}  // namespace pydml
