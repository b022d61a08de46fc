// Distance-weighted sampling, Wu et al. 2017, section 4: for each anchor a negative drawn with weight 1/q(D).
//   log w = (2-d)·log D - (d-3)/2·log(1-D²/4), D clamped below, only D < nonzero_loss_cutoff
// Gumbel-max: the argmax of log w_j - log(-log U_j). U comes from a counter, so a draw hangs on nothing but the seed
// and its place, whatever the threads do. Only logarithms are compared: weights of wide rows span thousands of decades.
#include <cmath>

#include "cpu/engine.h"

namespace pydml {
namespace {

// Uniform in (0, 1): splitmix64's finaliser on a counter.
inline double uniform(uint64_t seed, uint64_t counter) {
  uint64_t v = (counter + 1) * 0x9E3779B97F4A7C15ull + seed;
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  v ^= v >> 31;
  return (double(v >> 11) + 0.5) * 0x1p-53;
}

template <class R>
Tensor run(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels, const OptionalTensor& col_labels,
           const Tensor& anchors, const Tensor& seed, double cutoff, double nonzero_loss_cutoff) {
  const Matrix<R> m(rows, cols, row_labels, col_labels, {}, View::euclidean, true);
  auto work = m.workspaces();
  const Tensor given = check_places("anchors", anchors, 0, m.n_rows);
  TORCH_CHECK(seed.numel() == 1, "seed: got shape ", seed.sizes(), ", wanted one number");
  const int64_t* anchor = given.const_data_ptr<int64_t>();
  const int64_t draws = anchors.size(0), dim = m.d;
  const uint64_t key = uint64_t(seed.item<int64_t>());
  std::vector<int64_t> place(m.n_rows);
  for (int64_t i = 0; i < m.n_rows; ++i) place[m.row.place(i)] = i;
  std::vector<std::vector<int64_t>> of(m.n_rows);  // the draws of every row
  for (int64_t t = 0; t < draws; ++t) of[place[anchor[t]]].push_back(t);

  constexpr double inf = std::numeric_limits<double>::infinity();
  std::vector<double> best(draws, -inf);
  Tensor drawn = at::full({draws}, -1, anchors.options());
  int64_t* out = drawn.data_ptr<int64_t>();
  parallel(m.row_blocks(), [&](int64_t block, int64_t worker) {
    Workspace<R>& w = work[worker];
    std::vector<double> log_w(m.T), weight(m.T);
    const int64_t i0 = block * m.T;
    const int ni = int(std::min(m.T, m.n_rows - i0));
    for (int64_t j0 = 0; j0 < m.n_cols; j0 += m.T) {
      const int nj = int(std::min(m.T, m.n_cols - j0));
      m.tile(i0, ni, j0, nj, w);
      for (int i = 0; i < ni; ++i) {
        if (of[i0 + i].empty()) continue;
        double top = -inf;  // of the row in this tile
        for (int j = 0; j < nj; ++j) {
          const bool same = j0 + j >= m.same0[i0 + i] && j0 + j < m.same1[i0 + i];
          const double d = std::max(-double(w.u[int64_t(i) * nj + j]), cutoff);
          const double value = (2.0 - double(dim)) * std::log(d) - (double(dim) - 3) / 2 * std::log1p(-0.25 * d * d);
          const bool counts = !same && d < nonzero_loss_cutoff && std::isfinite(value);
          log_w[j] = counts ? value : -inf;
          top = std::max(top, log_w[j]);
        }
        if (top == -inf) continue;
        for (int j = 0; j < nj; ++j) weight[j] = std::exp(log_w[j] - top);
        for (const int64_t t : of[i0 + i]) {
          double reach = std::exp(top - best[t]);
          for (int j = 0; j < nj; ++j) {
            if (log_w[j] == -inf) continue;
            const int64_t column = m.col.place(j0 + j);
            const double u = uniform(key, uint64_t(t) * uint64_t(m.n_cols) + uint64_t(column));
            // -log u >= 1-u: cannot win, nor can what rounding might make of it
            if ((1 - u) > reach * weight[j] * (1 + 1e-9)) continue;
            const double score = log_w[j] - std::log(-std::log(u));
            if (score < best[t] || (score == best[t] && column > out[t])) continue;
            best[t] = score, out[t] = column, reach = std::exp(top - score);
          }
        }
      }
    }
  });
  return drawn;
}

Tensor sample(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
              const OptionalTensor& col_labels, const Tensor& anchors, const Tensor& seed, double cutoff,
              double nonzero_loss_cutoff) {
  return with_type(rows, [&](auto r) {
    return run<decltype(r)>(rows, cols, row_labels, col_labels, anchors, seed, cutoff, nonzero_loss_cutoff);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) { m.impl("sample", sample); }

}  // namespace pydml
