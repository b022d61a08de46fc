// The rank engine: how many negatives lie above each positive of a query. Recall@K, MAP@R and R-precision follow from
// the counts alone: no neighbour lists, no top-K.
#include "cpu/engine.h"

namespace pydml {
namespace {

template <class R>
std::tuple<Tensor, Tensor, Tensor, Tensor> run(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                               const OptionalTensor& col_labels, bool normalize) {
  const Matrix<R> m(rows, cols, row_labels, col_labels, {}, View::dot, normalize, Ties::exact);
  auto work = m.workspaces();
  const Positives<R> positives(m, work);
  const int64_t n = m.n_rows;
  const int most = positives.most;
  std::vector<int> over(size_t(most) * n, 0), reach(size_t(most) * n, 0);
  if (most)
    m.for_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
      Workspace<R>& w = work[worker];
      m.tile(i0, ni, j0, nj, w);
      m.negatives(i0, ni, j0, nj, w);
      Thresholds<R> h{};
      h.t = bare_tile(m, ni, nj, w);
      h.stride = n, h.most_j = most;
      h.n_i = positives.count.data() + i0;
      h.value_i = positives.u.data() + i0, h.over_i = over.data() + i0, h.reach_i = reach.data() + i0;
      R least = std::numeric_limits<R>::infinity();
      for (int i = 0; i < ni; ++i) least = std::min(least, h.value_i[i]);
      if (m.symmetric) {
        h.value_j = positives.u.data() + j0, h.over_j = over.data() + j0, h.reach_j = reach.data() + j0;
        for (int j = 0; j < nj; ++j) least = std::min(least, h.value_j[j]);
      }
      if (m.k.tile_max(h.t) >= least) m.k.rank_forward(h);  // else nothing here is above any positive
    });
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
      const std::vector<int>& before = tie ? reach : over;
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(pydml_cpu, m) {
  m.def(
      "rank(Tensor rows, Tensor? cols, Tensor row_labels, Tensor? col_labels, bool normalize) -> (Tensor, Tensor, "
      "Tensor, "
      "Tensor)");
}
TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) { m.impl("rank", rank); }

}  // namespace pydml
