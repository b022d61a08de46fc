// Oriented similarities of listed pairs, and their gradient: what losses on chosen pairs are computed from.
#include "cpu/engine.h"

namespace pydml {
namespace {

// Rows in the order given: a list has no use for sorted labels.
template <class R>
Matrix<R> unsorted(const Tensor& rows, const OptionalTensor& cols, Text view, bool normalize) {
  const auto places = rows.options().dtype(at::kLong);
  OptionalTensor col_labels;
  if (cols) col_labels = at::arange(cols->size(0), places);
  return Matrix<R>(rows, cols, at::arange(rows.size(0), places), col_labels, {}, view_of(view), normalize);
}

template <class R>
Tensor forward(const Tensor& rows, const OptionalTensor& cols, const Tensor& i, const Tensor& j, Text view,
               bool normalize) {
  const Matrix<R> m = unsorted<R>(rows, cols, view, normalize);
  const Tensor ci = i.contiguous(), cj = j.contiguous();
  const int64_t *pi = ci.const_data_ptr<int64_t>(), *pj = cj.const_data_ptr<int64_t>(), n = i.size(0);
  Tensor out = at::empty({n}, rows.options().dtype(type_of<R>()));
  R* u = out.data_ptr<R>();
  at::parallel_for(0, n, std::max<int64_t>(1, 16384 / m.d), [&](int64_t begin, int64_t end) {
    std::vector<R> x(m.d), y(m.d);
    for (int64_t e = begin; e < end; ++e) {
      const R *a = m.row.row(pi[e], x.data()), *b = m.col.row(pj[e], y.data());
      R d2 = 0, s = 0;
      if (m.view != View::dot) m.k.squared_distance(a, b, m.d, &d2);
      if (m.view == View::dot || m.view == View::cosine) m.k.dot(a, b, m.d, &s);
      if (m.view == View::euclidean)
        u[e] = -std::sqrt(d2);
      else if (m.view == View::squared)
        u[e] = -d2;
      else if (m.view == View::cosine && d2 < kNear<R> * (d2 + 2 * s))  // |x|²+|y|² = D²+2S
        u[e] = 1 - d2 / 2;
      else
        u[e] = s;
    }
  });
  if (!m.finite) out.fill_(std::numeric_limits<double>::quiet_NaN());
  return out;
}

template <class R>
std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& rows, const OptionalTensor& cols, const Tensor& i,
                                    const Tensor& j, Text view, bool normalize, bool want_rows, bool want_cols) {
  Matrix<R> m = unsorted<R>(rows, cols, view, normalize);
  m.start_gradient(want_rows, want_cols);
  const Tensor ci = i.contiguous(), cj = j.contiguous(), cg = grad.contiguous();
  const int64_t *pi = ci.const_data_ptr<int64_t>(), *pj = cj.const_data_ptr<int64_t>(), n = i.size(0);
  const R* g = cg.const_data_ptr<R>();
  const int64_t owners = at::get_num_threads();
  const bool distance = m.view == View::euclidean || m.view == View::squared;
  // Every thread goes through the whole list and writes only the rows and columns that it owns, in the list's order.
  parallel(owners, [&](int64_t owner, int64_t) {
    std::vector<R> x(m.d), y(m.d), away(m.d);
    for (int64_t e = 0; e < n; ++e) {
      const bool own_row = want_rows && pi[e] % owners == owner;
      const bool own_col = (m.symmetric ? want_rows : want_cols) && pj[e] % owners == owner;
      if ((!own_row && !own_col) || g[e] == 0) continue;
      const R *a = m.row.row(pi[e], x.data()), *b = m.col.row(pj[e], y.data());
      if (!distance) {
        if (own_row) m.row.add_to_gradient(pi[e], g[e], b);
        if (own_col) m.col.add_to_gradient(pj[e], g[e], a);
        continue;
      }
      R d2 = 0;
      for (int64_t c = 0; c < m.d; ++c) away[c] = a[c] - b[c], d2 += away[c] * away[c];
      const R q = m.view == View::squared ? -2 * g[e] : d2 > 0 ? -g[e] / std::sqrt(d2) : R(0);
      if (own_row) m.row.add_to_gradient(pi[e], q, away.data());
      if (own_col) m.col.add_to_gradient(pj[e], -q, away.data());
    }
  });
  return m.gradients();
}

Tensor dots(const Tensor& rows, const OptionalTensor& cols, const Tensor& i, const Tensor& j, Text view,
            bool normalize) {
  return with_type(rows, [&](auto r) { return forward<decltype(r)>(rows, cols, i, j, view, normalize); });
}

std::tuple<Tensor, Tensor> dots_backward(const Tensor& grad, const Tensor& rows, const OptionalTensor& cols,
                                         const Tensor& i, const Tensor& j, Text view, bool normalize, bool want_rows,
                                         bool want_cols) {
  return with_type(rows, [&](auto r) {
    return backward<decltype(r)>(grad, rows, cols, i, j, view, normalize, want_rows, want_cols);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pydml_cpu, m) {
  m.def("dots(Tensor rows, Tensor? cols, Tensor i, Tensor j, str view, bool normalize) -> Tensor");
  m.def(
      "dots_backward(Tensor grad, Tensor rows, Tensor? cols, Tensor i, Tensor j, str view, bool normalize, bool "
      "want_rows, bool want_cols) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) {
  m.impl("dots", dots);
  m.impl("dots_backward", dots_backward);
}

}  // namespace pydml
