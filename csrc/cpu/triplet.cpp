// The triplet engine: all triplets, or one semi-hard negative a positive pair, with no triplet list. A row's positives
// become thresholds, and every negative is held against them.
#include "cpu/engine.h"

namespace pydml {
namespace {

template <class R>
struct TripletEngine {
  Matrix<R> m;
  std::vector<Workspace<R>> work;
  Positives<R> positives;
  R margin;
  bool smooth;
  std::vector<R> least;               // [n] the row's lowest threshold less the margin
  std::vector<R> best;                // semi-hard: [most, n]
  std::vector<int64_t> where, names;  // semi-hard: [most, n] original column; original row of every place

  TripletEngine(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                const OptionalTensor& col_labels, double gap, bool soft, Text view, bool normalize,
                const OptionalTensor& selves, const Tensor* given = nullptr, const char* name = "positives")
      : m(rows, cols, row_labels, col_labels, selves, view_of(view), normalize, Ties::exact),
        work(m.workspaces()),
        positives(given ? Positives<R>(m, name, *given) : Positives<R>(m, work)),
        margin(R(gap)),
        smooth(soft),
        least(m.n_rows, std::numeric_limits<R>::infinity()) {
    m.finite = m.finite && !positives.has_nan;  // a comparison would drop it silently
    for (int64_t i = 0; positives.most && i < m.n_rows; ++i)
      least[i] = smooth && positives.count[i] ? -std::numeric_limits<R>::infinity() : positives.u[i] - margin;
  }

  Thresholds<R> describe(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) {
    Thresholds<R> h{};
    h.t = bare_tile(m, ni, nj, w);
    h.stride = m.n_rows, h.most_j = positives.most, h.margin = margin, h.smooth = smooth;
    h.n_i = positives.count.data() + i0;
    h.value_i = positives.u.data() + i0;
    if (m.symmetric) h.value_j = positives.u.data() + j0;
    h.scratch = w.scratch.data();
    return h;
  }

  // Can any negative of the tile violate a margin?
  bool active(const Thresholds<R>& h, int64_t i0, int64_t j0) const {
    R low = std::numeric_limits<R>::infinity();
    for (int i = 0; i < h.t.ni; ++i) low = std::min(low, least[i0 + i]);
    for (int j = 0; m.symmetric && j < h.t.nj; ++j) low = std::min(low, least[j0 + j]);
    return m.k.tile_max(h.t) > low;
  }

  template <class F>
  void for_negatives(const F& f) {
    if (!positives.most) return;
    m.for_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
      Workspace<R>& w = work[worker];
      m.tile(i0, ni, j0, nj, w);
      m.negatives(i0, ni, j0, nj, w);
      f(i0, ni, j0, nj, w, describe(i0, ni, j0, nj, w));
    });
  }

  // For every positive pair the most similar negative below it.
  void find_semihard() {
    const int64_t n = m.n_rows;
    best.assign(size_t(positives.most) * n, -std::numeric_limits<R>::infinity());
    where.assign(size_t(positives.most) * n, -1);
    names.resize(std::max(n, m.n_cols));
    for (int64_t j = 0; j < m.n_cols; ++j) names[j] = m.col.place(j);
    for_negatives([&](int64_t i0, int, int64_t j0, int, Workspace<R>&, Thresholds<R> h) {
      h.best_i = best.data() + i0, h.where_i = where.data() + i0, h.name_j = names.data() + j0;
      if (m.symmetric) h.best_j = best.data() + j0, h.where_j = where.data() + j0, h.name_i = names.data() + i0;
      m.k.best_below(h);
    });
  }

  // f(row, threshold, u_an - u_ap + m) for every semi-hard triplet.
  template <class F>
  void for_semihard(const F& f) const {
    for (int64_t i = 0; i < m.n_rows; ++i)
      for (int p = 0; p < positives.count[i]; ++p) {
        const int64_t at = p * m.n_rows + i;
        if (where[at] >= 0) f(i, at, best[at] - positives.u[at] + margin);
      }
  }
};

template <class R>
R loss_of(R violation, bool smooth) {
  if (!smooth) return std::max(violation, R(0));
  return std::max(violation, R(0)) + std::log1p(std::exp(-std::abs(violation)));
}
template <class R>
R slope_of(R violation, bool smooth) {
  return smooth ? 1 / (1 + std::exp(-violation)) : R(violation > 0);
}

template <class R>
std::tuple<Tensor, Tensor> forward(TripletEngine<R>& e, bool semihard, const Tensor& rows) {
  const int64_t n = e.m.n_rows;
  std::vector<double> sum(n, 0.0), count(n, 0.0);
  if (semihard) {
    e.find_semihard();
    e.for_semihard([&](int64_t i, int64_t, R violation) {
      const R loss = loss_of(violation, e.smooth);
      sum[i] += double(loss), count[i] += loss > 0;
    });
  } else {
    e.for_negatives([&](int64_t i0, int, int64_t j0, int, Workspace<R>&, Thresholds<R> h) {
      if (!e.active(h, i0, j0)) return;
      h.sum_i = sum.data() + i0, h.count_i = count.data() + i0;
      if (e.m.symmetric) h.sum_j = sum.data() + j0, h.count_j = count.data() + j0;
      e.m.k.triplet_forward(h);
    });
  }
  const auto options = rows.options().dtype(type_of<R>());
  Tensor total = at::empty({n}, options), above = at::empty({n}, options);
  for (int64_t i = 0; i < n; ++i) {
    total.data_ptr<R>()[e.m.row.place(i)] = R(sum[i]);
    above.data_ptr<R>()[e.m.row.place(i)] = R(count[i]);
  }
  if (!e.m.finite) total.fill_(std::numeric_limits<double>::quiet_NaN()), above.copy_(total);
  return {total, above};
}

// dL/drows and dL/dcols; where the positives were given, their gradient is left in `d_positives` instead.
template <class R>
std::tuple<Tensor, Tensor> backward(TripletEngine<R>& e, const Tensor& grad, bool semihard, bool want_rows,
                                    bool want_cols, Tensor* d_positives = nullptr) {
  Matrix<R>& m = e.m;
  const int64_t n = m.n_rows;
  m.start_gradient(want_rows, want_cols);
  check_shape("grad", grad, {n});
  const Tensor given = grad.contiguous();
  std::vector<R> g(n), slope(size_t(e.positives.most) * n, R(0));
  for (int64_t i = 0; i < n; ++i) g[i] = given.const_data_ptr<R>()[m.row.place(i)];
  if (semihard) {
    e.find_semihard();
    std::vector<int64_t> back(m.n_cols);
    for (int64_t j = 0; j < m.n_cols; ++j) back[m.col.place(j)] = j;
    e.for_semihard([&](int64_t i, int64_t at, R violation) {
      const R weight = g[i] * slope_of(violation, e.smooth);
      if (weight == 0) return;
      m.add_weight(i, back[e.where[at]], weight, e.best[at], e.work[0]);
      m.add_weight(i, e.positives.place[at], -weight, e.positives.u[at], e.work[0]);
    });
    return m.gradients();
  }
  e.for_negatives([&](int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w, Thresholds<R> h) {
    if (!e.active(h, i0, j0)) return;
    m.keep(ni, nj, w);
    h.grad_i = g.data() + i0, h.slope_i = slope.data() + i0;
    if (m.symmetric) h.grad_j = g.data() + j0, h.slope_j = slope.data() + j0;
    m.k.triplet_backward(h);
    m.add_weights_sparsely(i0, ni, j0, nj, w);
  });
  if (d_positives) {
    for (int p = 0; p < e.positives.most; ++p)
      for (int64_t i = 0; i < n; ++i) slope[p * n + i] *= -g[i];
    e.positives.unsort(m, slope, d_positives->data_ptr<R>());
    if (!m.finite) d_positives->fill_(std::numeric_limits<double>::quiet_NaN());
    return m.gradients();
  }
  for (int64_t i = 0; i < n; ++i)
    for (int p = 0; p < e.positives.count[i]; ++p) {
      const int64_t at = p * n + i;
      const R weight = -g[i] * slope[at];
      if (weight != 0) m.add_weight(i, e.positives.place[at], weight, e.positives.u[at], e.work[0]);
    }
  return m.gradients();
}

bool is_semihard(Text mode) {
  TORCH_CHECK(mode == "all" || mode == "semihard", "mode: got '", mode, "', wanted all or semihard");
  return mode == "semihard";
}

std::tuple<Tensor, Tensor> triplet(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                   const OptionalTensor& col_labels, Text mode, double margin, bool, bool smooth,
                                   Text view, bool normalize, const OptionalTensor& selves) {
  return with_type(rows, [&](auto r) {
    TripletEngine<decltype(r)> e(rows, cols, row_labels, col_labels, margin, smooth, view, normalize, selves);
    return forward(e, is_semihard(mode), rows);
  });
}

std::tuple<Tensor, Tensor> triplet_backward(const Tensor& grad, const Tensor& rows, const OptionalTensor& cols,
                                            const Tensor& row_labels, const OptionalTensor& col_labels, Text mode,
                                            double margin, bool, bool smooth, Text view, bool normalize,
                                            const OptionalTensor& selves, bool want_rows, bool want_cols) {
  return with_type(rows, [&](auto r) {
    TripletEngine<decltype(r)> e(rows, cols, row_labels, col_labels, margin, smooth, view, normalize, selves);
    return backward(e, grad, is_semihard(mode), want_rows, want_cols);
  });
}

// Triplets of the negatives among these columns and positives that are known by their u.
std::tuple<Tensor, Tensor> against(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                   const OptionalTensor& col_labels, const Tensor& positives, double margin,
                                   bool smooth, Text view, bool normalize) {
  return with_type(rows, [&](auto r) {
    TripletEngine<decltype(r)> e(rows, cols, row_labels, col_labels, margin, smooth, view, normalize, {}, &positives);
    return forward(e, false, rows);
  });
}

std::tuple<Tensor, Tensor, Tensor> against_backward(const Tensor& grad, const Tensor& rows, const OptionalTensor& cols,
                                                    const Tensor& row_labels, const OptionalTensor& col_labels,
                                                    const Tensor& positives, double margin, bool smooth, Text view,
                                                    bool normalize, bool want_rows, bool want_cols,
                                                    bool want_positives) {
  return with_type(rows, [&](auto r) {
    TripletEngine<decltype(r)> e(rows, cols, row_labels, col_labels, margin, smooth, view, normalize, {}, &positives);
    Tensor d_positives = at::zeros_like(positives, at::MemoryFormat::Contiguous);
    const auto [d_rows, d_cols] = backward(e, grad, false, want_rows, want_cols, &d_positives);
    return std::make_tuple(d_rows, d_cols, want_positives ? d_positives : at::empty({0}, rows.options()));
  });
}

// Column and u of the most similar negative below each bound.
std::tuple<Tensor, Tensor> below(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                 const OptionalTensor& col_labels, const Tensor& bounds, Text view, bool normalize) {
  return with_type(rows, [&](auto r) {
    using R = decltype(r);
    TripletEngine<R> e(rows, cols, row_labels, col_labels, 0, false, view, normalize, {}, &bounds, "bounds");
    e.find_semihard();
    Tensor n = at::full_like(bounds, -1, bounds.options().dtype(at::kLong), at::MemoryFormat::Contiguous);
    Tensor u = at::full_like(bounds, -std::numeric_limits<double>::infinity(), {}, at::MemoryFormat::Contiguous);
    e.positives.unsort(e.m, e.where, n.template data_ptr<int64_t>());
    e.positives.unsort(e.m, e.best, u.template data_ptr<R>());
    return std::make_tuple(n, u);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) {
  m.impl("triplet", triplet);
  m.impl("triplet_backward", triplet_backward);
  m.impl("against", against);
  m.impl("against_backward", against_backward);
  m.impl("below", below);
}

}  // namespace pydml
