// The histogram engine: soft counts of u per row, for positives and for negatives, and their gradient.
#include "cpu/engine.h"

namespace pydml {
namespace {

// Visit every pair of the matrix with f(tile, side): positives inside classes, negatives everywhere else, but for tiles
// of which skip(i0, ni, j0, nj, tile number) says that nothing is to be done.
template <class R, class F, class G>
void for_pairs(const Matrix<R>& m, std::vector<Workspace<R>>& work, const F& f, const G& skip) {
  m.for_tiles(
      [&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker, int64_t number, int64_t) {
        if (skip(i0, ni, j0, nj, number)) return;
        Workspace<R>& w = work[worker];
        m.tile(i0, ni, j0, nj, w);
        m.negatives(i0, ni, j0, nj, w);
        f(i0, ni, j0, nj, Side::negatives, w, number);
      },
      [](int64_t, int64_t, int64_t) {});
  m.for_class_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
    Workspace<R>& w = work[worker];
    m.tile(i0, ni, j0, nj, w);
    m.positives(i0, ni, j0, nj, w);
    f(i0, ni, j0, nj, Side::positives, w, -1);
  });
}

template <class R>
Histogram<R> describe(const Matrix<R>& m, int ni, int nj, int64_t nodes, double low, double high, Workspace<R>& w) {
  Histogram<R> h{};
  h.t = bare_tile(m, ni, nj, w);
  h.nodes = int(nodes), h.low = R(low), h.inverse = R(double(nodes - 1) / (high - low));
  w.left.resize(m.col_block);
  h.left = w.left.data(), h.share = w.scratch.data();
  return h;
}

constexpr int64_t kMostNodes = 1 << 20;

void check_nodes(int64_t nodes, double low, double high) {
  TORCH_CHECK(nodes >= 2 && nodes <= kMostNodes, "nodes: got ", nodes, ", wanted 2 to ", kMostNodes);
  TORCH_CHECK(std::isfinite(low) && std::isfinite(high) && low < high, "high: got ", high, " beside low=", low,
              ", wanted finite numbers, high the larger one");
}

template <class R>
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                           const OptionalTensor& col_labels, int64_t nodes, double low, double high,
                                           Text view, bool normalize, const OptionalTensor& selves) {
  check_nodes(nodes, low, high);
  const Matrix<R> m(rows, cols, row_labels, col_labels, selves, view_of(view), normalize);
  auto work = m.workspaces();
  const Tensor ranges = at::zeros({m.n_tiles(), 2}, rows.options().dtype(type_of<R>()));
  R* range = ranges.template data_ptr<R>();
  std::vector<R> counts[2] = {std::vector<R>(m.n_rows * nodes), std::vector<R>(m.n_rows * nodes)};
  for_pairs(
      m, work,
      [&](int64_t i0, int ni, int64_t j0, int nj, Side side, Workspace<R>& w, int64_t number) {
        Histogram<R> h = describe(m, ni, nj, nodes, low, high, w);
        std::vector<R>& c = counts[side == Side::negatives];
        h.counts_i = c.data() + i0 * nodes;
        if (m.symmetric) h.counts_j = c.data() + j0 * nodes;
        m.k.histogram_forward(h);
        if (number >= 0) {  // of all pairs of the tile, the skipped ones too: a range that is too wide does no harm
          const auto [least, most] = std::minmax_element(w.u.begin(), w.u.begin() + int64_t(ni) * nj);
          range[2 * number] = *least, range[2 * number + 1] = *most;
        }
      },
      [](int64_t, int, int64_t, int, int64_t) { return false; });
  Tensor out[2];
  for (int side = 0; side < 2; ++side) {
    out[side] = at::empty({m.n_rows, nodes}, rows.options().dtype(type_of<R>()));
    R* to = out[side].template data_ptr<R>();
    for (int64_t i = 0; i < m.n_rows; ++i)
      std::copy_n(counts[side].data() + i * nodes, nodes, to + m.row.place(i) * nodes);
    if (!m.finite) out[side].fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return {out[0], out[1], ranges};
}

template <class R>
std::tuple<Tensor, Tensor> backward(const Tensor& grad_positives, const Tensor& grad_negatives, const Tensor& ranges,
                                    const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                    const OptionalTensor& col_labels, int64_t nodes, double low, double high, Text view,
                                    bool normalize, bool want_rows, bool want_cols, const OptionalTensor& selves) {
  check_nodes(nodes, low, high);
  Matrix<R> m(rows, cols, row_labels, col_labels, selves, view_of(view), normalize);
  check_shape("grad_positives", grad_positives, {m.n_rows, nodes});
  check_shape("grad_negatives", grad_negatives, {m.n_rows, nodes});
  check_shape("ranges", ranges, {m.n_tiles(), 2});
  check_kept("ranges", ranges, type_of<R>(), sizeof(R));
  m.start_gradient(want_rows, want_cols);
  auto work = m.workspaces();
  std::vector<R> slopes[2];
  bool some[2] = {false, false};
  const Tensor grads[2] = {grad_positives.contiguous(), grad_negatives.contiguous()};
  for (int side = 0; side < 2; ++side) {
    slopes[side].resize(m.n_rows * (nodes - 1));
    const R* g = grads[side].template const_data_ptr<R>();
    for (int64_t i = 0; i < m.n_rows; ++i)
      for (int64_t l = 0; l + 1 < nodes; ++l) {
        const R* at = g + m.row.place(i) * nodes + l;
        const R slope = (at[1] - at[0]) * R(double(nodes - 1) / (high - low));
        slopes[side][i * (nodes - 1) + l] = slope;
        some[side] |= slope != 0;
      }
  }
  // How many slopes of a row's negatives up to each node are not 0. FastAP's table is flat beyond the last positive,
  // and the histogram loss' where no positive is: tiles that lie there entirely are not computed again.
  std::vector<int> steep(m.n_rows * nodes, 0);
  for (int64_t i = 0; i < m.n_rows; ++i)
    for (int64_t l = 0; l + 1 < nodes; ++l)
      steep[i * nodes + l + 1] = steep[i * nodes + l] + (slopes[1][i * (nodes - 1) + l] != 0);
  const R* range = ranges.template const_data_ptr<R>();
  auto node_of = [&](R u) {
    const R at = (u - R(low)) * R(double(nodes - 1) / (high - low));
    return at > 0 ? int64_t(std::min(at, R(nodes - 2))) : int64_t(0);  // NaN has no node, and the first will do
  };
  auto flat = [&](int64_t i0, int ni, int64_t j0, int nj, int64_t number) {
    const int64_t first = node_of(range[2 * number]), last = node_of(range[2 * number + 1]) + 1;
    auto rows_flat = [&](int64_t begin, int n) {
      for (int64_t i = begin; i < begin + n; ++i)
        if (steep[i * nodes + last] != steep[i * nodes + first]) return false;
      return true;
    };
    return rows_flat(i0, ni) && (!m.symmetric || rows_flat(j0, nj));
  };
  for_pairs(
      m, work,
      [&](int64_t i0, int ni, int64_t j0, int nj, Side side, Workspace<R>& w, int64_t) {
        const int s = side == Side::negatives;
        if (!some[s]) return;
        m.keep(ni, nj, w);
        Histogram<R> h = describe(m, ni, nj, nodes, low, high, w);
        h.slopes_i = slopes[s].data() + i0 * (nodes - 1);
        if (m.symmetric) h.slopes_j = slopes[s].data() + j0 * (nodes - 1);
        m.k.histogram_backward(h);
        m.add_weights_sparsely(i0, ni, j0, nj, w);
      },
      flat);
  return m.gradients();
}

std::tuple<Tensor, Tensor, Tensor> histogram(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                             const OptionalTensor& col_labels, int64_t nodes, double low, double high,
                                             Text view, bool normalize, const OptionalTensor& selves) {
  return with_type(rows, [&](auto r) {
    return forward<decltype(r)>(rows, cols, row_labels, col_labels, nodes, low, high, view, normalize, selves);
  });
}

std::tuple<Tensor, Tensor> histogram_backward(const Tensor& grad_positives, const Tensor& grad_negatives, const Tensor&,
                                              const Tensor&, const Tensor& ranges, const Tensor& rows,
                                              const OptionalTensor& cols, const Tensor& row_labels,
                                              const OptionalTensor& col_labels, int64_t nodes, double low, double high,
                                              Text view, bool normalize, const OptionalTensor& selves, bool want_rows,
                                              bool want_cols) {
  return with_type(rows, [&](auto r) {
    return backward<decltype(r)>(grad_positives, grad_negatives, ranges, rows, cols, row_labels, col_labels, nodes, low,
                                 high, view, normalize, want_rows, want_cols, selves);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) {
  m.impl("histogram", histogram);
  m.impl("histogram_backward", histogram_backward);
}

}  // namespace pydml
