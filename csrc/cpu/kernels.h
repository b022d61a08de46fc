// The vector kernels: what is done to every element of a tile. Included once for each instruction set, inside its own
// namespace PYDML_ISA and after a target pragma; plain loops that the compiler vectorises, no torch, no std.
#include "cpu/tile.h"
#include "losses.h"

namespace pydml {
namespace PYDML_ISA {

template <class R>
constexpr R kInf = R(__builtin_huge_val());

template <class T>
PYDML_HD T Max(T a, T b) {
  return a > b ? a : b;
}
template <class T>
PYDML_HD T Min(T a, T b) {
  return a < b ? a : b;
}

// The columns of row i that belong to the side: [0, skip0) and [skip1, nj).
template <class R, class F>
PYDML_HD void for_segments(const Tile<R>& t, int i, F f) {
  for (int part = 0; part < 2; ++part) {  // one call, so that it is inlined and its loop vectorised
    const int begin = part ? t.skip1[i] : 0, end = part ? t.nj : t.skip0[i];
    if (begin < end) f(begin, end);
  }
}

template <class P>
constexpr int slot_count() {
  return sizeof(P::slots) / sizeof(Slot);
}

// One pair in both of its roles: its term and slope in row i, and in row j of a symmetric matrix.
template <class P, class R, bool positive, bool mined, bool fields>
struct Pair {
  const P p;
  const Tile<R>& t;
  const R *rows_j, *cols_j, *cuts_j;  // copies of the tile's, which the compiler need not read again in every step
  R row_i, col_i, cut_i;
  PYDML_HD Pair(const P& policy, const Tile<R>& tile)
      : p(policy), t(tile), rows_j(tile.row_j), cols_j(tile.col_j), cuts_j(tile.cut_j) {}
  PYDML_HD void at_row(int i) {
    row_i = fields && t.row_i ? t.row_i[i] : R(0);
    col_i = fields && t.col_i ? t.col_i[i] : R(0);
    cut_i = mined ? t.cut_i[i] : R(0);
  }
  PYDML_HD R row_j(int j) const { return fields && rows_j ? rows_j[j] : R(0); }
  PYDML_HD R col_j(int j) const { return fields && cols_j ? cols_j[j] : R(0); }
  PYDML_HD bool in_row(R u) const { return !mined || (positive ? u < cut_i : u > cut_i); }
  PYDML_HD bool in_col(R u, int j) const { return !mined || (positive ? u < cuts_j[j] : u > cuts_j[j]); }
  template <int k>
  PYDML_HD R term_i(R u, int j) const {
    return p.template term<k>(u, row_i, col_j(j));
  }
  template <int k>
  PYDML_HD R term_j(R u, int j) const {
    return fields ? p.template term<k>(u, row_j(j), col_i) : p.template term<k>(u, R(0), R(0));
  }
  template <int k>
  PYDML_HD R slope_i(R u, int j) const {
    return p.template slope<k>(u, row_i, col_j(j));
  }
  template <int k>
  PYDML_HD R slope_j(R u, int j) const {
    return fields ? p.template slope<k>(u, row_j(j), col_i) : p.template slope<k>(u, R(0), R(0));
  }
};

template <class R>
PYDML_HD void merge_lse(Stat<R> s, int i, R m, R z) {  // (m, z): a new part, max and Σ e^{t-m}
  if (!(z > 0)) return;
  const R old = s.m[i], top = Max(old, m);
  s.z[i] = s.z[i] * double(Exp(old - top)) + double(z) * double(Exp(m - top));
  s.m[i] = top;
}

// Widest gap between maxima at which one e^{t-shift} serves all rows of a tile: the smallest stays a normal number.
template <class R>
constexpr R kOneShift = sizeof(R) == 4 ? R(60) : R(600);

template <class P, class R, int k, bool positive, bool mined, bool fields, bool symmetric>
void forward_lse(const P& policy, Forward<R>& f) {
  const Tile<R>& t = f.t;
  Pair<P, R, positive, mined, fields> pair(policy, t);
  R *row_max = f.scratch, *row_sum = row_max + t.ni, *col_max = row_sum + t.ni, *col_sum = col_max + t.nj;
  for (int j = 0; j < t.nj; ++j) col_max[j] = -kInf<R>, col_sum[j] = 0;
  R highest = -kInf<R>, lowest = kInf<R>;
  for (int i = 0; i < t.ni; ++i) {
    const R* u = t.u + i * t.ld;
    pair.at_row(i);
    R m = -kInf<R>;
    const auto q = pair;
    for_segments(t, i, [&, q](int begin, int end) {
#pragma omp simd reduction(max : m)
      for (int j = begin; j < end; ++j) {
        const R ti = q.template term_i<k>(u[j], j);
        const R row_part = q.in_row(u[j]) ? ti : -kInf<R>;
        m = Max(m, row_part);
        if (symmetric) {
          const R tj = fields ? q.template term_j<k>(u[j], j) : ti;
          const R col_part = q.in_col(u[j], j) ? tj : -kInf<R>;
          col_max[j] = Max(col_max[j], col_part);
        }
      }
    });
    row_max[i] = m;
    row_sum[i] = 0;
    if (m > -kInf<R>) highest = Max(highest, m), lowest = Min(lowest, m);
  }
  if (symmetric) {
    for (int j = 0; j < t.nj; ++j)
      if (col_max[j] > -kInf<R>) highest = Max(highest, col_max[j]), lowest = Min(lowest, col_max[j]);
  }
  if (!(highest > -kInf<R>)) return;
  const bool one_shift = !fields && highest - lowest < kOneShift<R>;
  for (int i = 0; i < t.ni; ++i) {
    if (!symmetric && !(row_max[i] > -kInf<R>)) continue;
    const R* u = t.u + i * t.ld;
    pair.at_row(i);
    const R own = row_max[i] > -kInf<R> ? row_max[i] : highest;
    R z = 0;
    const auto q = pair;
    for_segments(t, i, [&, q](int begin, int end) {
      if (one_shift) {
#pragma omp simd reduction(+ : z)
        for (int j = begin; j < end; ++j) {
          const R e = Exp(q.template term_i<k>(u[j], j) - highest);
          const R row_part = q.in_row(u[j]) ? e : R(0);
          z += row_part;
          if (symmetric) {
            const R col_part = q.in_col(u[j], j) ? e : R(0);
            col_sum[j] += col_part;
          }
        }
      } else {
#pragma omp simd reduction(+ : z)
        for (int j = begin; j < end; ++j) {
          const R e = Exp(pair.template term_i<k>(u[j], j) - own);
          z += pair.in_row(u[j]) ? e : R(0);
          if (symmetric) {
            const R ej = Exp(pair.template term_j<k>(u[j], j) - col_max[j]);
            col_sum[j] += pair.in_col(u[j], j) ? ej : R(0);
          }
        }
      }
    });
    merge_lse(f.stat_i[k], i, one_shift ? highest : own, z);
  }
  if (symmetric)
    for (int j = 0; j < t.nj; ++j) merge_lse(f.stat_j[k], j, one_shift ? highest : col_max[j], col_sum[j]);
}

template <class P, class R, int k, bool positive, bool mined, bool fields, bool symmetric>
void forward_sum(const P& policy, Forward<R>& f) {
  const Tile<R>& t = f.t;
  Pair<P, R, positive, mined, fields> pair(policy, t);
  R* col_sum = f.scratch;
  for (int j = 0; j < t.nj; ++j) col_sum[j] = 0;
  for (int i = 0; i < t.ni; ++i) {
    const R* u = t.u + i * t.ld;
    pair.at_row(i);
    R z = 0;
    for_segments(t, i, [&](int begin, int end) {
#pragma omp simd reduction(+ : z)
      for (int j = begin; j < end; ++j) {
        const R ti = pair.template term_i<k>(u[j], j);
        z += pair.in_row(u[j]) ? ti : R(0);
        if (symmetric) {
          const R tj = fields ? pair.template term_j<k>(u[j], j) : ti;
          col_sum[j] += pair.in_col(u[j], j) ? tj : R(0);
        }
      }
    });
    f.stat_i[k].z[i] += double(z);
  }
  if (symmetric)
    for (int j = 0; j < t.nj; ++j) f.stat_j[k].z[j] += double(col_sum[j]);
}

// Does the pair have a weight? Mined losses: is it mined in either row; sparse policies: is its slope not 0.
template <bool symmetric, class P, class R, bool positive, bool mined, bool fields>
PYDML_HD bool is_live(const Pair<P, R, positive, mined, fields>& pair, R u, int j) {
  int live = pair.in_row(u) ? 1 : 0;
  if (symmetric) live |= pair.in_col(u, j) ? 1 : 0;
  if (P::sparse) {
    constexpr int k = positive ? 0 : 2;
    int sloped = pair.template slope_i<k>(u, j) != 0 ? 1 : 0;
    if (symmetric) sloped |= pair.template slope_j<k>(u, j) != 0 ? 1 : 0;
    live &= sloped;
  }
  return live != 0;
}

// Largest u of rows and columns, and whether any pair is live. Most tiles of a trained network stop here.
template <class P, class R, bool positive, bool mined, bool fields, bool symmetric>
bool scan(const P& policy, Forward<R>& f) {
  const Tile<R>& t = f.t;
  Pair<P, R, positive, mined, fields> pair(policy, t);
  int total = 0;
  for (int i = 0; i < t.ni; ++i) {
    const R* u = t.u + i * t.ld;
    pair.at_row(i);
    R top = -kInf<R>;
    int alive = 0;
    const auto q = pair;
    R* const top_j = f.top_j;
    for_segments(t, i, [&, q, top_j](int begin, int end) {
      if (f.top_i) {
#pragma omp simd reduction(max : top) reduction(+ : alive)
        for (int j = begin; j < end; ++j) {
          top = Max(top, u[j]);
          if (symmetric) top_j[j] = Max(top_j[j], u[j]);
          alive += is_live<symmetric>(q, u[j], j) ? 1 : 0;
        }
      } else {
#pragma omp simd reduction(+ : alive)
        for (int j = begin; j < end; ++j) alive += is_live<symmetric>(q, u[j], j) ? 1 : 0;
      }
    });
    if (f.top_i) f.top_i[i] = Max(f.top_i[i], top);
    if (alive && f.live && f.n_live >= 0) {
      if (f.n_live + alive > f.live_capacity) {
        f.n_live = -1;
      } else {
        for_segments(t, i, [&](int begin, int end) {
          for (int j = begin; j < end; ++j)
            if (is_live<symmetric>(pair, u[j], j)) f.live[f.n_live++] = {uint16_t(i), uint16_t(j), u[j]};
        });
      }
    }
    total += alive;
  }
  return total > 0;
}

template <class P, class R, bool positive, bool mined, bool fields, bool symmetric, int k = 0>
void forward_slots(const P& p, Forward<R>& f) {
  if constexpr (k < slot_count<P>()) {
    if constexpr ((P::slots[k].side == Side::positives) == positive) {
      if constexpr (P::slots[k].kind == Kind::log_sum_exp)
        forward_lse<P, R, k, positive, mined, fields, symmetric>(p, f);
      else
        forward_sum<P, R, k, positive, mined, fields, symmetric>(p, f);
    }
    forward_slots<P, R, positive, mined, fields, symmetric, k + 1>(p, f);
  }
}

template <class P, class R>
PYDML_HD P make(const R* params) {
  P p{};
  if constexpr (!__is_empty(P)) __builtin_memcpy(&p, params, sizeof(P));
  return p;
}

template <class P, class R, bool positive, bool mined, bool fields>
void forward_with(const R* params, Forward<R>& f) {
  const P p = make<P>(params);
  constexpr bool scans = mined || P::sparse;
  if (f.t.symmetric) {
    if (!scans || scan<P, R, positive, mined, fields, true>(p, f))
      forward_slots<P, R, positive, mined, fields, true>(p, f);
  } else {
    if (!scans || scan<P, R, positive, mined, fields, false>(p, f))
      forward_slots<P, R, positive, mined, fields, false>(p, f);
  }
}

template <class P, class R, bool positive, bool mined>
void forward(const R* params, Forward<R>& f) {
  if constexpr (P::fields)
    if (f.t.row_i || f.t.col_j) return forward_with<P, R, positive, mined, true>(params, f);
  forward_with<P, R, positive, mined, false>(params, f);
}

// w of one pair: Σ over slots of dL/dstat · dstat/du, in both roles.
template <class P, class R, bool positive, bool mined, bool fields, bool symmetric, int k = 0>
PYDML_HD R weight(const Pair<P, R, positive, mined, fields>& pair, const Backward<R>& b, R u, int i, int j) {
  if constexpr (k < slot_count<P>()) {
    const R rest = weight<P, R, positive, mined, fields, symmetric, k + 1>(pair, b, u, i, j);
    if constexpr ((P::slots[k].side == Side::positives) == positive && P::slots[k].kind != Kind::constant) {
      constexpr bool lse = P::slots[k].kind == Kind::log_sum_exp;
      const R share_i = lse ? Exp(pair.template term_i<k>(u, j) - b.stat_i[k][i]) : R(1);
      R w = pair.in_row(u) ? b.grad_i[k][i] * share_i * pair.template slope_i<k>(u, j) : R(0);
      if (symmetric) {
        const R share_j = lse ? Exp(pair.template term_j<k>(u, j) - b.stat_j[k][j]) : R(1);
        w += pair.in_col(u, j) ? b.grad_j[k][j] * share_j * pair.template slope_j<k>(u, j) : R(0);
      }
      return rest + w;
    }
    return rest;
  }
  return R(0);
}

// The exponential family without fields: one e^{t-shift} serves both rows. a = dL/dstat·e^{shift-stat}.
template <class P, class R, int k, bool positive, bool mined, bool symmetric>
bool backward_one_shift(const P& policy, const Backward<R>& b) {
  const Tile<R>& t = b.t;
  R *a_i = b.scratch, *a_j = a_i + t.ni;
  R highest = -kInf<R>, lowest = kInf<R>;
  auto range = [&](const R* grad, const R* stat, int n) {
    for (int i = 0; i < n; ++i)
      if (grad[i] != 0 && stat[i] < kInf<R>) highest = Max(highest, stat[i]), lowest = Min(lowest, stat[i]);
  };
  range(b.grad_i[k], b.stat_i[k], t.ni);
  if (symmetric) range(b.grad_j[k], b.stat_j[k], t.nj);
  if (!(highest - lowest < kOneShift<R>)) return false;
  auto scaled = [&](const R* grad, const R* stat, R* a, int n) {
    for (int i = 0; i < n; ++i) a[i] = grad[i] != 0 ? grad[i] * Exp(highest - stat[i]) : R(0);
  };
  scaled(b.grad_i[k], b.stat_i[k], a_i, t.ni);
  if (symmetric) scaled(b.grad_j[k], b.stat_j[k], a_j, t.nj);
  Pair<P, R, positive, mined, false> pair(policy, t);
  for (int i = 0; i < t.ni; ++i) {
    R* u = t.u + i * t.ld;
    pair.at_row(i);
    const R ai = a_i[i];
    for_segments(t, i, [&](int begin, int end) {
#pragma omp simd
      for (int j = begin; j < end; ++j) {
        R a = pair.in_row(u[j]) ? ai : R(0);
        if (symmetric) a += pair.in_col(u[j], j) ? a_j[j] : R(0);
        u[j] = a * Exp(pair.template term_i<k>(u[j], j) - highest) * pair.template slope_i<k>(u[j], j);
      }
    });
  }
  return true;
}

template <class P>
constexpr bool lse_both() {
  return slot_count<P>() == 2 && P::slots[0].kind == Kind::log_sum_exp && P::slots[1].kind == Kind::log_sum_exp;
}

template <class P, class R, bool positive, bool mined, bool fields, bool symmetric>
void backward_pairs(const P& policy, const Backward<R>& b) {
  const Tile<R>& t = b.t;
  bool done = false;
  if constexpr (lse_both<P>() && !fields) {
    constexpr int k = positive ? 0 : 1;
    done = backward_one_shift<P, R, k, positive, mined, symmetric>(policy, b);
  }
  Pair<P, R, positive, mined, fields> pair(policy, t);
  for (int i = 0; i < t.ni && !done; ++i) {
    R* u = t.u + i * t.ld;
    pair.at_row(i);
    for_segments(t, i, [&](int begin, int end) {
#pragma omp simd
      for (int j = begin; j < end; ++j) u[j] = weight<P, R, positive, mined, fields, symmetric>(pair, b, u[j], i, j);
    });
  }
  for (int i = 0; i < t.ni; ++i)
    for (int j = t.skip0[i]; j < t.skip1[i] && j < t.nj; ++j) t.u[i * t.ld + j] = 0;
}

template <class P, class R, bool positive, bool mined>
void backward(const R* params, const Backward<R>& b) {
  const P p = make<P>(params);
  if constexpr (P::fields) {
    if (b.t.row_i || b.t.col_j)
      return b.t.symmetric ? backward_pairs<P, R, positive, mined, true, true>(p, b)
                           : backward_pairs<P, R, positive, mined, true, false>(p, b);
  }
  if (b.t.symmetric)
    backward_pairs<P, R, positive, mined, false, true>(p, b);
  else
    backward_pairs<P, R, positive, mined, false, false>(p, b);
}

template <class P, class R, bool positive, bool mined>
void backward_live(const R* params, const Backward<R>& b, Live<R>* live, int n) {
  Pair<P, R, positive, mined, P::fields> pair(make<P>(params), b.t);
  for (int e = 0; e < n; ++e) {
    const int i = live[e].i, j = live[e].j;
    pair.at_row(i);
    live[e].u = b.t.symmetric ? weight<P, R, positive, mined, P::fields, true>(pair, b, live[e].u, i, j)
                              : weight<P, R, positive, mined, P::fields, false>(pair, b, live[e].u, i, j);
  }
}

template <class R>
int to_view(View view, R* s, int64_t ld, int ni, int nj, const R* scale_j, const R* size_i, const R* size_j,
            R tolerance) {
  int near = 0;
  for (int i = 0; i < ni; ++i) {
    R* u = s + i * ld;
    if (scale_j)
      for (int j = 0; j < nj; ++j) u[j] *= scale_j[j];
    if (view == View::dot) continue;
    const R size = size_i[i];
    int close = 0;
    if (view == View::cosine) {
#pragma omp simd reduction(+ : close)
      for (int j = 0; j < nj; ++j) close += size + size_j[j] - 2 * u[j] < tolerance * (size + size_j[j]);
    } else if (view == View::euclidean) {
#pragma omp simd reduction(+ : close)
      for (int j = 0; j < nj; ++j) {
        const R both = size + size_j[j], d2 = both - 2 * u[j];
        close += d2 < tolerance * both;
        u[j] = -Sqrt(Relu(d2));
      }
    } else {
#pragma omp simd reduction(+ : close)
      for (int j = 0; j < nj; ++j) {
        const R both = size + size_j[j], d2 = both - 2 * u[j];
        close += d2 < tolerance * both;
        u[j] = -Relu(d2);
      }
    }
    near += close;
  }
  return near;
}

template <class R>
void to_coefficient(View view, const R* u, R* w, int64_t n) {
  if (view == View::euclidean) {
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) w[k] = u[k] < 0 ? w[k] / u[k] : R(0);  // at D=0 the gradient of D is 0
  } else if (view == View::squared) {
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) w[k] = -2 * w[k];
  }
}

template <class R>
void dot(const R* x, const R* y, int64_t d, R* out) {
  R s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t k = 0; k < d; ++k) s = Fma(x[k], y[k], s);
  *out = s;
}

template <class R>
void squared_distance(const R* x, const R* y, int64_t d, R* out) {
  R s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t k = 0; k < d; ++k) s = Fma(x[k] - y[k], x[k] - y[k], s);
  *out = s;
}

template <class R>
void axpy(R a, const R* x, R* y, int64_t d) {
#pragma omp simd
  for (int64_t k = 0; k < d; ++k) y[k] = Fma(a, x[k], y[k]);
}

// Softmax weights of k neighbouring values; returns Σ p·u.
template <class R>
PYDML_HD R pooled_value(const R* u, int k, R sharpness, R* p) {
  R top = -kInf<R>, total = 0, value = 0;
  for (int c = 0; c < k; ++c) top = Max(top, sharpness * u[c]);
#pragma omp simd reduction(+ : total, value)
  for (int c = 0; c < k; ++c) {
    p[c] = Exp(sharpness * u[c] - top);
    total += p[c];
    value = Fma(p[c], u[c], value);
  }
  for (int c = 0; c < k; ++c) p[c] /= total;
  return value / total;
}

template <class R>
void pool(const R* u, int64_t ld, int ni, int nj, int k, R sharpness, R* pooled) {
  R p[k];
  for (int i = 0; i < ni; ++i)
    for (int j = 0; j < nj; ++j)
      pooled[int64_t(i) * nj + j] = pooled_value(u + i * ld + int64_t(j) * k, k, sharpness, p);
}

template <class R>
void unpool(R* u, int64_t ld, int ni, int nj, int k, R sharpness, const R* pooled, const R* w) {
  R p[k];
  for (int i = 0; i < ni; ++i)
    for (int j = 0; j < nj; ++j) {
      R* here = u + i * ld + int64_t(j) * k;
      const R value = pooled[int64_t(i) * nj + j], weight = w[int64_t(i) * nj + j];
      pooled_value(here, k, sharpness, p);
      for (int c = 0; c < k; ++c) here[c] = weight * p[c] * (1 + sharpness * (here[c] - value));
    }
}

// The first slot of a side, of bare similarities: what top-K selection goes by.
template <class P, class R, bool positive>
void terms(const R* params, const R* u, R* out, int n) {
  constexpr int k = positive ? 0 : slot_count<P>() / 2;
  const P p = make<P>(params);
#pragma omp simd
  for (int j = 0; j < n; ++j) out[j] = p.template term<k>(u[j], R(0), R(0));
}

#include "cpu/kernels_unweighted.h"

template <class P>
constexpr bool has_side(Side side) {
  for (const Slot& slot : P::slots)
    if (slot.side == side) return true;
  return false;
}

// Null where the policy has nothing on that side, or is not used with mining.
template <class P, class R>
void fill(PairKernels<R> (&out)[2][2]) {
  if constexpr (has_side<P>(Side::positives))
    out[0][0] = {forward<P, R, true, false>, backward<P, R, true, false>, backward_live<P, R, true, false>,
                 terms<P, R, true>};
  if constexpr (has_side<P>(Side::negatives))
    out[1][0] = {forward<P, R, false, false>, backward<P, R, false, false>, backward_live<P, R, false, false>,
                 terms<P, R, false>};
  if constexpr (P::mines) {
    out[0][1] = {forward<P, R, true, true>, backward<P, R, true, true>, backward_live<P, R, true, true>,
                 terms<P, R, true>};
    out[1][1] = {forward<P, R, false, true>, backward<P, R, false, true>, backward_live<P, R, false, true>,
                 terms<P, R, false>};
  }
}

template <class R>
void fill_kernels(Kernels<R>& k) {
  int id = 0;
#define PYDML_FILL(name, Policy) fill<Policy<R>, R>(k.pair[id++]);
  PYDML_POLICIES(PYDML_FILL)
#undef PYDML_FILL
  k.to_view = to_view<R>;
  k.to_coefficient = to_coefficient<R>;
  k.dot = dot<R>;
  k.squared_distance = squared_distance<R>;
  k.axpy = axpy<R>;
  k.pool = pool<R>;
  k.unpool = unpool<R>;
  k.histogram_forward = histogram_forward<R>;
  k.histogram_backward = histogram_backward<R>;
  k.tile_max = tile_max<R>;
  k.rank_forward = rank_forward<R>;
  k.triplet_forward = triplet_forward<R>;
  k.triplet_backward = triplet_backward<R>;
  k.triplets = triplets<R>;
  k.mark = mark<R>;
  k.best_below = best_below<R>;
}

void fill_kernels_float(Kernels<float>& k) { fill_kernels(k); }
void fill_kernels_double(Kernels<double>& k) { fill_kernels(k); }

}  // namespace PYDML_ISA
}  // namespace pydml
