// Row statistics of listed pairs, and the pairs' weights: what a policy makes of the similarities that `dots` found.
// The pairs of a row are handed to the kernels of the pair engine as a tile of one row.
#include "cpu/engine.h"
#include "losses.h"

namespace pydml {
namespace {

// The pairs of one side, row by row, in the order of the list.
template <class R>
struct Listing {
  const Tensor tu, ta;
  const int64_t n;
  const R* u;
  std::vector<int64_t> start;  // [rows + 1]
  std::vector<int64_t> order;  // place in the list; empty: the list is in the order of its rows
  int64_t most = 0;            // pairs of a row
  bool is_nan = false;

  Listing(const Tensor& values, const Tensor& anchors, int64_t rows)
      : tu(values.contiguous()),
        ta(anchors.contiguous()),
        n(tu.numel()),
        u(tu.const_data_ptr<R>()),
        start(checked(rows) + 1, 0) {
    TORCH_CHECK(ta.numel() == n, "anchors: got ", ta.numel(), ", wanted ", n, ", one for each similarity");
    const int64_t* a = ta.const_data_ptr<int64_t>();
    bool sorted = true;
    for (int64_t e = 0; e < n; ++e) {
      TORCH_CHECK_INDEX(a[e] >= 0 && a[e] < rows, "anchors: got ", a[e], ", wanted rows in [0, ", rows, ")");
      sorted = sorted && (e == 0 || a[e - 1] <= a[e]);
      ++start[a[e] + 1];
      is_nan |= u[e] != u[e];
    }
    for (int64_t r = 0; r < rows; ++r) most = std::max(most, start[r + 1]), start[r + 1] += start[r];
    if (sorted) return;
    order.resize(n);
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (int64_t e = 0; e < n; ++e) order[next[a[e]]++] = e;
  }

  int64_t place(int64_t e) const { return order.empty() ? e : order[e]; }

 private:
  static int64_t checked(int64_t rows) {
    TORCH_CHECK(rows >= 0, "rows: got ", rows, ", wanted an int >= 0");
    return rows;
  }
};

// What a thread needs for the longest row.
template <class R>
struct Row {
  std::vector<R> u, scratch;
  int skip;
  explicit Row(int64_t most) : u(most), scratch(2 + 4 * most) {}
};

template <class R>
struct Engine {
  const Kernels<R>& k = kernels<R>();
  const int policy;
  const std::vector<Slot> slots;
  const int K;
  std::vector<R> params, row_field;
  const int64_t rows;
  Listing<R> sides[2];

  Engine(const Tensor& pos, const Tensor& neg, const Tensor& a1, const Tensor& a2, const OptionalTensor& field,
         Text name, at::ArrayRef<double> numbers, int64_t n_rows)
      : policy(policy_id(name)),
        slots(slots_of(policy)),
        K(int(slots.size())),
        params(numbers.begin(), numbers.end()),
        rows(n_rows),
        sides{{pos, a1, n_rows}, {neg, a2, n_rows}} {
    check_params(policy, numbers.size());
    params.resize(8);
    if (!field) return;
    const Tensor given = field->to(type_of<R>()).contiguous();
    TORCH_CHECK(given.numel() >= rows, "row_field: got ", given.numel(), " entries, wanted ", rows);
    row_field.assign(given.const_data_ptr<R>(), given.const_data_ptr<R>() + rows);
  }

  // Call f(row, its tile) for every row that has pairs. The tile's u is the list itself, or a copy in the row's order.
  template <class F>
  void for_rows(int side, const F& f) const {
    const Listing<R>& list = sides[side];
    const int64_t grain = std::max<int64_t>(1, 16384 * rows / std::max<int64_t>(list.n, 1));
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      Row<R> mine(list.most);
      for (int64_t r = begin; r < end; ++r) {
        const int64_t first = list.start[r], n = list.start[r + 1] - first;
        if (!n) continue;
        for (int64_t e = 0; e < n; ++e) mine.u[e] = list.u[list.place(first + e)];
        Tile<R> t{};
        mine.skip = int(n);
        t.u = mine.u.data(), t.ld = n, t.ni = 1, t.nj = int(n), t.skip0 = &mine.skip, t.skip1 = &mine.skip;
        if (!row_field.empty()) t.row_i = row_field.data() + r;
        f(r, t, mine.scratch.data());
      }
    });
  }

  const PairKernels<R>& kernel(int side) const { return k.pair[policy][side][0]; }
};

template <class R>
Tensor forward(const Engine<R>& engine, const Tensor& like) {
  const int K = engine.K;
  const int64_t n = engine.rows;
  constexpr R inf = std::numeric_limits<R>::infinity();
  std::vector<R> top(n * K, -inf);
  std::vector<double> sum(n * K, 0.0);
  for (int side = 0; side < 2; ++side) {
    if (!engine.kernel(side).forward) continue;
    engine.for_rows(side, [&](int64_t r, const Tile<R>& t, R* scratch) {
      Forward<R> f{};
      f.t = t, f.scratch = scratch;
      for (int k = 0; k < K; ++k) f.stat_i[k] = {&top[r * K + k], &sum[r * K + k]};
      engine.kernel(side).forward(engine.params.data(), f);
    });
  }
  Tensor stats = at::empty({n, K}, like.options());
  R* out = stats.data_ptr<R>();
  for (int64_t e = 0; e < n * K; ++e) {
    const bool log = engine.slots[e % K].kind == Kind::log_sum_exp;
    out[e] = !log ? R(sum[e]) : sum[e] > 0 ? R(top[e] + std::log(sum[e])) : -inf;
  }
  if (engine.sides[0].is_nan || engine.sides[1].is_nan) stats.fill_(std::numeric_limits<double>::quiet_NaN());
  return stats;
}

template <class R>
std::tuple<Tensor, Tensor> backward(const Engine<R>& engine, const Tensor& grad, const Tensor& stats, bool want_pos,
                                    bool want_neg) {
  const int K = engine.K;
  constexpr R inf = std::numeric_limits<R>::infinity();
  const Tensor tg = grad.contiguous();
  TORCH_CHECK(tg.numel() == engine.rows * K && stats.numel() == engine.rows * K, "grad: got ", tg.sizes(), ", wanted [",
              engine.rows, ", ", K, "]");
  const Tensor ts = stats.contiguous();
  const R* g = tg.const_data_ptr<R>();
  std::vector<R> s(ts.const_data_ptr<R>(), ts.const_data_ptr<R>() + ts.numel());
  for (R& v : s) v = v == -inf ? inf : v;  // a sum of nothing has no shares
  Tensor out[2];
  for (int side = 0; side < 2; ++side) {
    const Listing<R>& list = engine.sides[side];
    if (!(side ? want_neg : want_pos)) {
      out[side] = at::empty({0}, list.tu.options());
      continue;
    }
    out[side] = at::zeros({list.n}, list.tu.options());
    if (!engine.kernel(side).backward) continue;
    R* w = out[side].data_ptr<R>();
    engine.for_rows(side, [&](int64_t r, const Tile<R>& t, R* scratch) {
      Backward<R> b{};
      b.t = t, b.scratch = scratch;
      for (int k = 0; k < K; ++k) b.grad_i[k] = g + r * K + k, b.stat_i[k] = &s[r * K + k];
      engine.kernel(side).backward(engine.params.data(), b);
      const int64_t first = list.start[r];
      for (int64_t e = 0; e < t.nj; ++e) w[list.place(first + e)] = t.u[e];
    });
  }
  return {out[0], out[1]};
}

#define PYDML_ARGUMENTS                                                                                      \
  const Tensor &pos, const Tensor &neg, const Tensor &a1, const Tensor &a2, const OptionalTensor &row_field, \
      Text policy, at::ArrayRef<double> params, int64_t rows
#define PYDML_ENGINE(R) Engine<R>(pos, neg, a1, a2, row_field, policy, params, rows)

Tensor listed(PYDML_ARGUMENTS) {
  return with_type(pos, [&](auto r) { return forward(PYDML_ENGINE(decltype(r)), pos); });
}

std::tuple<Tensor, Tensor> listed_backward(const Tensor& grad, const Tensor& stats, PYDML_ARGUMENTS, bool want_pos,
                                           bool want_neg) {
  return with_type(pos, [&](auto r) { return backward(PYDML_ENGINE(decltype(r)), grad, stats, want_pos, want_neg); });
}

}  // namespace

TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) {
  m.impl("listed", listed);
  m.impl("listed_backward", listed_backward);
}

}  // namespace pydml
