// The rank engine: how many negatives lie above each positive of a query. Recall@K, MAP@R and R-precision follow from
// the counts alone: no neighbour lists, no top-K.
#include "cpu/engine.h"

namespace pydml {
namespace {

// How many negatives lie above each threshold, and at or above it: [most, n] with the row running fastest.
template <class R>
struct Counts {
  std::vector<int> over, reach;
  Counts(const Matrix<R>& m, std::vector<Workspace<R>>& work, const Positives<R>& positives)
      : over(size_t(positives.most) * m.n_rows, 0), reach(over) {
    if (!positives.most) return;
    m.for_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
      Workspace<R>& w = work[worker];
      m.tile(i0, ni, j0, nj, w);
      m.negatives(i0, ni, j0, nj, w);
      Thresholds<R> h{};
      h.t = bare_tile(m, ni, nj, w);
      h.stride = m.n_rows, h.most_j = positives.most;
      h.n_i = positives.count.data() + i0;
      h.value_i = positives.u.data() + i0, h.over_i = over.data() + i0, h.reach_i = reach.data() + i0;
      R least = std::numeric_limits<R>::infinity();
      for (int i = 0; i < ni; ++i) least = std::min(least, h.value_i[i]);
      if (m.symmetric) {
        h.value_j = positives.u.data() + j0, h.over_j = over.data() + j0, h.reach_j = reach.data() + j0;
        for (int j = 0; j < nj; ++j) least = std::min(least, h.value_j[j]);
      }
      if (m.k.tile_max(h.t) >= least) m.k.rank_forward(h);  // else nothing here is above any threshold
    });
  }
};

template <class R>
std::tuple<Tensor, Tensor, Tensor, Tensor> run(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                               const OptionalTensor& col_labels, bool normalize) {
  const Matrix<R> m(rows, cols, row_labels, col_labels, {}, View::dot, normalize, Ties::exact);
  auto work = m.workspaces();
  const Positives<R> positives(m, work);
  const int64_t n = m.n_rows;
  const Counts<R> found(m, work, positives);
  const auto counts = row_labels.options();
  Tensor number = at::zeros({n}, counts), above = at::zeros({n, 2}, counts), hits = at::zeros({n, 2}, counts);
  Tensor precision = at::zeros({n, 2}, counts.dtype(at::kDouble));
  int64_t *out = number.data_ptr<int64_t>(), *out_above = above.data_ptr<int64_t>(),
          *out_hits = hits.data_ptr<int64_t>();
  double* out_precision = precision.data_ptr<double>();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t r = m.row.place(i), M = positives.count[i];
    out[r] = M;
    for (int tie = 0; tie < 2; ++tie) {
      const std::vector<int>& before = tie ? found.reach : found.over;
      double total = 0;
      for (int64_t p = 0; p < M; ++p) {
        const int64_t order = M - p, place = order + before[p * n + i];  // order 1 is the most similar positive
        if (place > M) continue;
        ++out_hits[2 * r + tie];
        total += double(order) / double(place);
      }
      if (M) out_precision[2 * r + tie] = total / double(M), out_above[2 * r + tie] = before[(M - 1) * n + i];
    }
  }
  return {number, above, hits, precision};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rank(const Tensor& rows, const OptionalTensor& cols,
                                                const Tensor& row_labels, const OptionalTensor& col_labels,
                                                bool normalize) {
  return with_type(rows, [&](auto r) { return run<decltype(r)>(rows, cols, row_labels, col_labels, normalize); });
}

// u of each row's positives [R, most], +inf behind them.
Tensor positives(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                 const OptionalTensor& col_labels, int64_t most, bool normalize, const OptionalTensor& selves) {
  TORCH_CHECK(most >= 0, "most: got ", most, ", wanted at least 0");
  return with_type(rows, [&](auto r) {
    using R = decltype(r);
    const Matrix<R> m(rows, cols, row_labels, col_labels, selves, View::dot, normalize, Ties::exact);
    auto work = m.workspaces();
    Tensor u = at::full({m.n_rows, most}, std::numeric_limits<double>::infinity(), rows.options().dtype(type_of<R>()));
    std::vector<int64_t> used(m.n_rows, 0);
    R* const out = u.template data_ptr<R>();
    m.for_positives(work, [&](int64_t i, int64_t, R value) {
      if (used[i] < most) out[m.row.place(i) * most + used[i]++] = value;
    });
    for (int64_t i = 0; i < m.n_rows; ++i) {
      R* const row = out + m.row.place(i) * most;
      std::sort(row, row + used[i]);
    }
    return u;
  });
}

// Negatives above each bound, and at or above it: [2, R, M].
Tensor above(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels, const OptionalTensor& col_labels,
             const Tensor& bounds, bool normalize) {
  return with_type(rows, [&](auto r) {
    using R = decltype(r);
    const Matrix<R> m(rows, cols, row_labels, col_labels, {}, View::dot, normalize, Ties::exact);
    auto work = m.workspaces();
    const Positives<R> positives(m, "bounds", bounds);
    const Counts<R> found(m, work, positives);
    Tensor number = at::zeros({2, m.n_rows, positives.most}, row_labels.options());
    for (int tie = 0; tie < 2; ++tie) {
      const std::vector<int>& counts = tie ? found.reach : found.over;
      positives.unsort(m, std::vector<int64_t>(counts.begin(), counts.end()),
                       number.template data_ptr<int64_t>() + tie * m.n_rows * positives.most);
    }
    return number;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) {
  m.impl("rank", rank);
  m.impl("positives", positives);
  m.impl("above", above);
}

}  // namespace pydml
