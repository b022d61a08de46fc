// Oriented similarities of listed pairs, and their gradient: what losses on chosen pairs are computed from. A short
// list is visited pair by pair; a long one is read from, and written to, a matrix that is made tile by tile.
#include <atomic>

#include "cpu/engine.h"

namespace pydml {
namespace {

// A list of at least 1 in so many of the matrix' pairs is long: a product makes 8 similarities in the time of a single
// one, and in fp32 the matrix is then at most twice as large as the list, with its two int64 a pair.
constexpr int64_t kLong = 8;
constexpr int64_t kBetweenLooks = 4096;  // pairs between two looks for a signal

// Rows in the order given: a list has no use for sorted labels.
template <class R>
Matrix<R> unsorted(const Tensor& rows, const OptionalTensor& cols, Text view, bool normalize) {
  const auto places = rows.options().dtype(at::kLong);
  OptionalTensor col_labels;
  if (cols) col_labels = at::arange(cols->size(0), places);
  return Matrix<R>(rows, cols, at::arange(rows.size(0), places), col_labels, {}, view_of(view), normalize);
}

// Are the entries of a list places in [0, below)?
bool within(const int64_t* index, int64_t n, int64_t below) {
  uint64_t wrong = 0;  // the sign of a difference that must not be negative: every CPU has vectors for that
  for (int64_t e = 0; e < n; ++e) wrong |= uint64_t(index[e]) | (uint64_t(below) - 1 - uint64_t(index[e]));
  return !(wrong >> 63);
}

void check_within(const char* name, bool ok, int64_t below) {
  TORCH_CHECK_INDEX(ok, name, ": got entries outside [0, ", below, "), wanted places in the matrix");
}

void check_within(const char* name, const int64_t* index, int64_t n, int64_t below) {
  std::atomic<bool> ok = true;
  at::parallel_for(0, n, 1 << 16, [&](int64_t begin, int64_t end) {
    if (!within(index + begin, end - begin, below)) ok = false;
  });
  check_within(name, ok, below);
}

struct List {
  const Tensor ti, tj;
  const int64_t *i, *j, n;
  List(const Tensor& given_i, const Tensor& given_j, int64_t rows, int64_t cols)
      : ti(given_i.contiguous()),
        tj(given_j.contiguous()),
        i(ti.const_data_ptr<int64_t>()),
        j(tj.const_data_ptr<int64_t>()),
        n(ti.numel()) {
    TORCH_CHECK(tj.numel() == n, "j: got ", tj.numel(), " entries, wanted ", n, ", as many as i");
    check_within("i", i, n, rows);
    check_within("j", j, n, cols);
  }
};

bool is_long(int64_t pairs, int64_t rows, int64_t cols) { return pairs > 0 && pairs >= rows * cols / kLong; }

template <class R>
R similarity(const Matrix<R>& m, int64_t i, int64_t j, std::vector<R>& x, std::vector<R>& y) {
  const R *a = m.row.row(i, x.data()), *b = m.col.row(j, y.data());
  R d2 = 0, s = 0;
  if (m.view != View::dot) m.k.squared_distance(a, b, m.d, &d2);
  if (m.view == View::dot || m.view == View::cosine) m.k.dot(a, b, m.d, &s);
  if (m.view == View::euclidean) return -std::sqrt(d2);
  if (m.view == View::squared) return -d2;
  const bool near = m.view == View::cosine && d2 < kNear<R> * (d2 + 2 * s);  // |x|²+|y|² = D²+2S
  return near ? (m.row.size[i] + m.col.size[j] - d2) / 2 : s;
}

// out_ji = f(out_ji, in_ij, i) in squares that stay in the cache, for rows i and columns j < cols, or only for j > i.
template <class R, class F>
void transposed(const R* in, int64_t in_stride, R* out, int64_t out_stride, int rows, int cols, bool upper, F f) {
  constexpr int side = 16;
  for (int i0 = 0; i0 < rows; i0 += side)
    for (int j0 = upper ? i0 : 0; j0 < cols; j0 += side)
      for (int j = j0; j < std::min(j0 + side, cols); ++j)
        for (int i = i0, end = std::min(i0 + side, upper ? std::min(rows, j) : rows); i < end; ++i)
          out[j * out_stride + i] = f(out[j * out_stride + i], in[i * in_stride + j], i);
}

// All similarities [rows, cols]; of a symmetric matrix half of the tiles are computed.
template <class R>
Tensor all_similarities(const Matrix<R>& m) {
  const int64_t N = m.n_cols;
  Tensor out = at::empty({m.n_rows, N}, m.row.x.options());
  R* const u = out.data_ptr<R>();
  auto work = m.workspaces();
  m.for_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
    Workspace<R>& w = work[worker];
    m.tile(i0, ni, j0, nj, w);
    for (int i = 0; i < ni; ++i) std::copy_n(w.u.data() + int64_t(i) * nj, nj, u + (i0 + i) * N + j0);
    if (!m.symmetric) return;
    transposed(w.u.data(), nj, u + j0 * N + i0, N, ni, nj, i0 == j0, [](R, R s, int) { return s; });
    for (int i = 0; i0 == j0 && i < ni; ++i) u[(i0 + i) * N + i0 + i] = similarity(m, i0 + i, i0 + i, w.x, w.y);
  });
  return out;
}

template <class R>
Tensor forward(const Tensor& rows, const OptionalTensor& cols, const Tensor& i, const Tensor& j, Text view,
               bool normalize) {
  const Matrix<R> m = unsorted<R>(rows, cols, view, normalize);
  const List list(i, j, m.n_rows, m.n_cols);
  Tensor out = at::empty({list.n}, rows.options().dtype(type_of<R>()));
  R* u = out.data_ptr<R>();
  if (is_long(list.n, m.n_rows, m.n_cols)) {
    const Tensor all = all_similarities(m);
    const R* const from = all.const_data_ptr<R>();
    at::parallel_for(0, list.n, 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) u[e] = from[list.i[e] * m.n_cols + list.j[e]];
    });
  } else {
    Watched::run([&](Watched& loop) {
      at::parallel_for(0, list.n, std::max<int64_t>(1, 16384 / m.d), [&](int64_t begin, int64_t end) {
        const Watched::Thread here(loop);
        std::vector<R> x(m.d), y(m.d);
        for (int64_t e = begin; e < end; ++e) {
          if (e % kBetweenLooks == 0) Watched::look();
          u[e] = similarity(m, list.i[e], list.j[e], x, y);
        }
      });
    });
  }
  if (!m.finite) out.fill_(std::numeric_limits<double>::quiet_NaN());
  return out;
}

// The end of the run of entries that are equal to the one at `begin`.
int64_t run_end(const int64_t* row, int64_t begin, int64_t end) {
  constexpr int64_t block = 16;
  const int64_t own = row[begin];
  for (; begin + block <= end; begin += block) {
    int64_t other = 0;
    for (int64_t e = 0; e < block; ++e) other |= row[begin + e] ^ own;
    if (other) break;
  }
  while (begin < end && row[begin] == own) ++begin;
  return begin;
}

// Call f(begin, end, owner) for every run of a list's entries of one row. The runs of a row are one thread's, in the
// order of the list. Entries that are no rows raise. Most lists are in the order of their rows, so that is what is
// first believed, and looked at while they are read: where it was wrong, all is done again. `clear` is called first.
template <class C, class F>
void by_rows(const int64_t* row, int64_t n, int64_t rows, const C& clear, const F& f) {
  const int64_t owners = at::get_num_threads();
  std::vector<int64_t> start(owners + 1, 0);  // entries before those of each thread, if they are in order
  for (int64_t owner = 1; owner <= owners; ++owner) {
    const int64_t* const from = row + start[owner - 1];
    start[owner] = owner == owners ? n : std::lower_bound(from, row + n, rows * owner / owners) - row;
  }
  std::atomic<bool> in_order = true;
  clear();
  parallel(owners, [&](int64_t owner, int64_t) {
    int64_t least = rows * owner / owners;
    const int64_t below = rows * (owner + 1) / owners, end = start[owner + 1];
    for (int64_t begin = start[owner]; begin < end;) {
      if (row[begin] < least || row[begin] >= below) {
        in_order = false;
        return;
      }
      least = row[begin];
      const int64_t next = run_end(row, begin, end);
      f(begin, next, owner);
      begin = next;
    }
  });
  if (in_order) return;
  check_within("i", row, n, rows);
  clear();
  parallel(owners, [&](int64_t owner, int64_t) {
    const int64_t first = rows * owner / owners, last = rows * (owner + 1) / owners;
    for (int64_t begin = 0; begin < n;) {
      const int64_t next = run_end(row, begin, n);
      if (row[begin] >= first && row[begin] < last) f(begin, next, owner);
      begin = next;
    }
  });
}

// dL/du of all pairs [rows, cols].
template <class R>
Tensor all_weights(const List& list, const R* g, int64_t rows, int64_t cols) {
  Tensor out = at::empty({rows, cols}, list.ti.options().dtype(type_of<R>()));
  R* const w = out.data_ptr<R>();
  by_rows(
      list.i, list.n, rows, [&] { out.zero_(); },
      [&](int64_t begin, int64_t end, int64_t) {
        R* const row = w + list.i[begin] * cols;
        for (int64_t e = begin; e < end; ++e) row[list.j[e]] += g[e];
      });
  return out;
}

// Carry dL/du of all pairs to the gradients; with a factor for each row where there is `factors`.
template <class R>
void add_all(Matrix<R>& m, const Tensor& all, const OptionalTensor& factors = {}) {
  const R* const from = all.const_data_ptr<R>();
  const R* const by = factors ? factors->const_data_ptr<R>() : nullptr;
  const int64_t N = m.n_cols;
  const bool distance = m.view == View::euclidean || m.view == View::squared;
  auto work = m.workspaces();
  std::vector<std::vector<R>> folded(work.size(), std::vector<R>(m.T * m.col_block));
  m.for_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
    Workspace<R>& w = work[worker];
    R* const weight = folded[worker].data();
    for (int i = 0; i < ni; ++i) {
      const R* const row = from + (i0 + i) * N + j0;
      const R factor = by ? by[i0 + i] : R(1);
      for (int j = 0; j < nj; ++j) weight[int64_t(i) * nj + j] = row[j] != 0 ? factor * row[j] : R(0);
    }
    if (m.symmetric && i0 != j0) {  // the pair (j, i) counts with (i, j)
      const R* const there = from + j0 * N + i0;
      if (by)
        transposed(there, N, weight, nj, nj, ni, false, [&](R a, R b, int j) {
          return b != 0 ? a + by[j0 + j] * b : a;  // an infinite factor is not one of pairs that are not listed
        });
      else
        transposed(there, N, weight, nj, nj, ni, false, [](R a, R b, int) { return a + b; });
    }
    for (int i = 0; m.symmetric && i0 == j0 && i < ni; ++i) {
      for (int j = 0; j < i; ++j) {
        weight[int64_t(j) * nj + i] += weight[int64_t(i) * nj + j];
        weight[int64_t(i) * nj + j] = 0;
      }
      if (distance) weight[int64_t(i) * nj + i] = 0;  // at D=0 the gradient is 0
    }
    if (std::all_of(weight, weight + int64_t(ni) * nj, [](R v) { return v == 0; })) return;
    w.near.clear();
    if (distance) m.tile(i0, ni, j0, nj, w);
    m.keep(ni, nj, w);
    std::copy_n(weight, int64_t(ni) * nj, w.u.data());
    m.add_weights_sparsely(i0, ni, j0, nj, w);
  });
}

// Every thread goes through the whole list and writes only the rows and columns that it owns, in the list's order.
template <class R>
void add_each(Matrix<R>& m, const List& list, const R* g, bool want_rows, bool want_cols) {
  const int64_t owners = at::get_num_threads();
  const bool distance = m.view == View::euclidean || m.view == View::squared;
  parallel(owners, [&](int64_t owner, int64_t) {
    std::vector<R> x(m.d), y(m.d), away(m.d);
    const int64_t row0 = m.n_rows * owner / owners, row1 = m.n_rows * (owner + 1) / owners;
    const int64_t col0 = m.n_cols * owner / owners, col1 = m.n_cols * (owner + 1) / owners;
    for (int64_t e = 0; e < list.n; ++e) {
      if (e % kBetweenLooks == 0) Watched::look();
      const int64_t i = list.i[e], j = list.j[e];
      const bool own_row = want_rows && i >= row0 && i < row1, own_col = want_cols && j >= col0 && j < col1;
      if ((!own_row && !own_col) || g[e] == 0) continue;
      const R *a = m.row.row(i, x.data()), *b = m.col.row(j, y.data());
      if (!distance) {
        if (own_row) m.row.add_to_gradient(i, g[e], b);
        if (own_col) m.col.add_to_gradient(j, g[e], a);
        continue;
      }
      R d2;
      m.k.squared_distance(a, b, m.d, &d2);
      for (int64_t c = 0; c < m.d; ++c) away[c] = a[c] - b[c];
      const R q = m.view == View::squared ? -2 * g[e] : d2 > 0 ? -g[e] / std::sqrt(d2) : R(0);
      if (own_row) m.row.add_to_gradient(i, q, away.data());
      if (own_col) m.col.add_to_gradient(j, -q, away.data());
    }
  });
}

template <class R>
std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& rows, const OptionalTensor& cols, const Tensor& i,
                                    const Tensor& j, Text view, bool normalize, bool want_rows, bool want_cols) {
  Matrix<R> m = unsorted<R>(rows, cols, view, normalize);
  m.start_gradient(want_rows, want_cols);
  const List list(i, j, m.n_rows, m.n_cols);
  const Tensor g = grad.contiguous();
  check_shape("grad", g, i.sizes());
  if (is_long(list.n, m.n_rows, m.n_cols))
    add_all(m, all_weights(list, g.const_data_ptr<R>(), m.n_rows, m.n_cols));
  else
    add_each(m, list, g.const_data_ptr<R>(), want_rows, m.symmetric ? want_rows : want_cols);
  return m.gradients();
}

// Listed triplets (a, p, n): the pairs (a, p) and (a, n), and what a triplet adds to its anchor's sum.
template <class R>
struct Triplets {
  const Tensor ta, tp, tn;
  const int64_t *a, *p, *n, number;
  const R margin;
  const bool smooth;

  Triplets(const Tensor& given_a, const Tensor& given_p, const Tensor& given_n, double margin, bool smooth)
      : ta(given_a.contiguous()),
        tp(given_p.contiguous()),
        tn(given_n.contiguous()),
        a(ta.const_data_ptr<int64_t>()),
        p(tp.const_data_ptr<int64_t>()),
        n(tn.const_data_ptr<int64_t>()),
        number(ta.numel()),
        margin(R(margin)),
        smooth(smooth) {
    TORCH_CHECK(tp.numel() == number && tn.numel() == number, "a, p, n: got ", number, ", ", tp.numel(), " and ",
                tn.numel(), " entries, wanted as many of each");
  }

  R slope(R v) const { return smooth ? Sigmoid(v) : v > 0 ? R(1) : R(0); }

  // The slopes of all pairs [rows, cols] take no more room than one number a triplet: the forward pass then leaves
  // those behind, and the backward pass need not read the list, which is larger than anything else here.
  bool keeps_slopes(const Matrix<R>& m) const { return number > 0 && number >= m.n_rows * m.n_cols; }

  // Call f(begin, end, owner) for pieces of the list of one anchor. Their places are looked at while they are in the
  // cache for f too.
  template <class C, class F>
  void by_anchors(const Matrix<R>& m, const C& clear, const F& f) const {
    std::atomic<bool> ok_p = true, ok_n = true;
    by_rows(a, number, m.n_rows, clear, [&](int64_t begin, int64_t end, int64_t owner) {
      for (int64_t e = begin; e < end; e += kPiece) {
        const int64_t size = std::min<int64_t>(kPiece, end - e);
        const bool piece_p = within(p + e, size, m.n_cols), piece_n = within(n + e, size, m.n_cols);
        if (!piece_p) ok_p = false;
        if (!piece_n) ok_n = false;
        if (piece_p && piece_n) f(e, e + size, owner);
      }
    });
    check_within("p", ok_p, m.n_cols);
    check_within("n", ok_n, m.n_cols);
  }
};

template <class R>
std::tuple<Tensor, Tensor, Tensor> triplets_forward(const Matrix<R>& m, const Triplets<R>& list) {
  const auto options = m.row.x.options();
  const bool slopes = list.keeps_slopes(m);
  Tensor total = at::empty({m.n_rows}, options), above = at::empty({m.n_rows}, options);
  // Slopes fill its beginning; nobody reads what is behind them.
  Tensor kept = at::empty({list.number}, options);
  R* const keep = kept.data_ptr<R>();
  const Tensor all = is_long(list.number, m.n_rows, m.n_cols) ? all_similarities(m) : Tensor();
  const R* const u = all.defined() ? all.const_data_ptr<R>() : nullptr;
  std::vector<double> sums(m.n_rows), numbers(m.n_rows);
  const auto clear = [&] {
    std::fill(sums.begin(), sums.end(), 0.0);
    std::fill(numbers.begin(), numbers.end(), 0.0);
    if (slopes) kept.narrow(0, 0, m.n_rows * m.n_cols).zero_();
  };
  std::vector<std::vector<R>> x(at::get_num_threads(), std::vector<R>(m.d)), y(x);
  list.by_anchors(m, clear, [&](int64_t begin, int64_t end, int64_t owner) {
    const int64_t a = list.a[begin];
    Piece<R> piece{};
    R violation[kPiece];
    piece.p = list.p + begin, piece.n = list.n + begin, piece.number = int(end - begin);
    piece.margin = list.margin, piece.smooth = list.smooth;
    piece.violation = slopes ? violation : keep + begin;
    if (u) piece.u = u + a * m.n_cols;
    if (slopes) piece.slope = keep + a * m.n_cols;
    for (int64_t e = begin; !u && e < end; ++e)
      piece.violation[e - begin] = similarity(m, a, list.n[e], x[owner], y[owner]) -
                                   similarity(m, a, list.p[e], x[owner], y[owner]) + list.margin;
    m.k.triplets(piece);
    sums[a] += piece.sum, numbers[a] += double(piece.above);
  });
  std::copy(sums.begin(), sums.end(), total.data_ptr<R>());
  std::copy(numbers.begin(), numbers.end(), above.data_ptr<R>());
  if (!m.finite) total.fill_(std::numeric_limits<double>::quiet_NaN());
  return {total, above, kept};
}

template <class R>
std::tuple<Tensor, Tensor> triplets_backward(Matrix<R>& m, const Triplets<R>& list, const Tensor& grad,
                                             const Tensor& kept, bool want_rows, bool want_cols) {
  TORCH_CHECK(grad.numel() == m.n_rows && kept.numel() == list.number, "grad, violation: got ", grad.numel(), " and ",
              kept.numel(), " entries, wanted ", m.n_rows, " and ", list.number);
  m.start_gradient(want_rows, want_cols);
  const Tensor cg = grad.contiguous(), ck = kept.contiguous();
  const R *const g = cg.const_data_ptr<R>(), *const v = ck.const_data_ptr<R>();
  const int64_t *const a = list.a, *const p = list.p, *const n = list.n;
  if (list.keeps_slopes(m)) {
    add_all(m, ck, cg);
  } else if (is_long(list.number, m.n_rows, m.n_cols)) {
    const Tensor all = at::empty({m.n_rows, m.n_cols}, m.row.x.options());
    R* const w = all.data_ptr<R>();
    list.by_anchors(
        m, [&] { all.zero_(); },
        [&](int64_t begin, int64_t end, int64_t) {
          R* const row = w + a[begin] * m.n_cols;
          R same = 0;  // of neighbours with the same positive: most lists have them together
          for (int64_t e = begin; e < end; ++e) {
            const R slope = list.slope(v[e]);
            row[n[e]] += slope;
            same += slope;
            if (e + 1 == end || p[e + 1] != p[e]) row[p[e]] -= same, same = 0;
          }
        });
    add_all(m, all, cg);
  } else {
    const List an(list.ta, list.tn, m.n_rows, m.n_cols), ap(list.ta, list.tp, m.n_rows, m.n_cols);
    std::vector<R> more(list.number), less(list.number);
    for (int64_t e = 0; e < list.number; ++e) more[e] = g[a[e]] * list.slope(v[e]), less[e] = -more[e];
    const bool cols = m.symmetric ? want_rows : want_cols;
    add_each(m, an, more.data(), want_rows, cols);
    add_each(m, ap, less.data(), want_rows, cols);
  }
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

#define PYDML_TRIPLETS                                                                                              \
  const Tensor &rows, const OptionalTensor &cols, const Tensor &a, const Tensor &p, const Tensor &n, double margin, \
      bool smooth, Text view, bool normalize

std::tuple<Tensor, Tensor, Tensor> listed_triplets(PYDML_TRIPLETS) {
  return with_type(rows, [&](auto r) {
    const auto m = unsorted<decltype(r)>(rows, cols, view, normalize);
    return triplets_forward(m, Triplets<decltype(r)>(a, p, n, margin, smooth));
  });
}

std::tuple<Tensor, Tensor> listed_triplets_backward(const Tensor& grad, const Tensor&, const Tensor&,
                                                    const Tensor& violation, PYDML_TRIPLETS, bool want_rows,
                                                    bool want_cols) {
  return with_type(rows, [&](auto r) {
    auto m = unsorted<decltype(r)>(rows, cols, view, normalize);
    const Triplets<decltype(r)> list(a, p, n, margin, smooth);
    return triplets_backward(m, list, grad, violation, want_rows, want_cols);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) {
  m.impl("dots", dots);
  m.impl("dots_backward", dots_backward);
  m.impl("listed_triplets", listed_triplets);
  m.impl("listed_triplets_backward", listed_triplets_backward);
}

}  // namespace pydml
