// Vector kernels of the engines that know no policy: histogram, thresholds (triplet, rank), extremes. Included by
// kernels.h inside the namespace of an instruction set.

// ---- histogram: linear soft assignment of u to nodes low, low+1/inverse, ...
// -----------------------------------------

// Left node and share of the right node of row i's pairs [begin, end).
template <class R>
PYDML_HD void assign(const Histogram<R>& h, const R* u, int begin, int end, int* left, R* share) {
  const R last = R(h.nodes - 1);
#pragma omp simd
  for (int j = begin; j < end; ++j) {
    const R raw = (u[j] - h.low) * h.inverse;
    const R at = raw > 0 ? (raw < last ? raw : last) : R(0);
    const int node = Min(int(at), h.nodes - 2);
    left[j] = node;
    share[j] = at - R(node);
  }
}

template <class R>
void histogram_forward(const Histogram<R>& h) {
  const Tile<R>& t = h.t;
  int* left = h.left;
  R* share = h.share;
  for (int i = 0; i < t.ni; ++i) {
    const R* u = t.u + i * t.ld;
    R* row = h.counts_i + int64_t(i) * h.nodes;
    for_segments(t, i, [&](int begin, int end) {
      assign(h, u, begin, end, left, share);
      for (int j = begin; j < end; ++j) row[left[j]] += 1 - share[j], row[left[j] + 1] += share[j];
      if (t.symmetric)
        for (int j = begin; j < end; ++j) {
          R* col = h.counts_j + int64_t(j) * h.nodes + left[j];
          col[0] += 1 - share[j], col[1] += share[j];
        }
    });
  }
}

// u becomes w: the slope of the row's table between the pair's two nodes, in both roles.
template <class R>
void histogram_backward(const Histogram<R>& h) {
  const Tile<R>& t = h.t;
  for (int i = 0; i < t.ni; ++i) {
    R* u = t.u + i * t.ld;
    const R* row = h.slopes_i + int64_t(i) * (h.nodes - 1);
    for_segments(t, i, [&](int begin, int end) {
      assign(h, u, begin, end, h.left, h.share);
      if (t.symmetric) {
        for (int j = begin; j < end; ++j) u[j] = row[h.left[j]] + h.slopes_j[int64_t(j) * (h.nodes - 1) + h.left[j]];
      } else {
        for (int j = begin; j < end; ++j) u[j] = row[h.left[j]];
      }
    });
    for (int j = t.skip0[i]; j < t.skip1[i] && j < t.nj; ++j) u[j] = 0;
  }
}

// ---- thresholds: every negative of a row against the u of the row's positives
// ----------------------------------------

template <class R>
R tile_max(const Tile<R>& t) {
  R top = -kInf<R>;
  for (int i = 0; i < t.ni; ++i) {
    const R* u = t.u + i * t.ld;
    for_segments(t, i, [&](int begin, int end) {
#pragma omp simd reduction(max : top)
      for (int j = begin; j < end; ++j) top = Max(top, u[j]);
    });
  }
  return top;
}

// Call f(row role: begin, end, row, threshold number) and g(column role: …) for all pairs of a tile and all thresholds.
template <class R, class F, class G>
PYDML_HD void for_thresholds(const Thresholds<R>& h, F f, G g) {
  const Tile<R>& t = h.t;
  for (int i = 0; i < t.ni; ++i)
    for_segments(t, i, [&](int begin, int end) {
      for (int p = 0; p < h.n_i[i]; ++p) f(begin, end, i, p);
      if (t.symmetric)
        for (int p = 0; p < h.most_j; ++p) g(begin, end, i, p);
    });
}

// How many pairs reach u_ap, strictly and with ties: what is above each positive.
template <class R>
void rank_forward(const Thresholds<R>& h) {
  const Tile<R>& t = h.t;
  for_thresholds(
      h,
      [&](int begin, int end, int i, int p) {
        const R* u = t.u + i * t.ld;
        const R threshold = h.value_i[p * h.stride + i];
        int over = 0, reach = 0;
#pragma omp simd reduction(+ : over, reach)
        for (int j = begin; j < end; ++j) over += u[j] > threshold, reach += u[j] >= threshold;
        h.over_i[p * h.stride + i] += over, h.reach_i[p * h.stride + i] += reach;
      },
      [&](int begin, int end, int i, int p) {
        const R *u = t.u + i * t.ld, *threshold = h.value_j + p * h.stride;
        int *over = h.over_j + p * h.stride, *reach = h.reach_j + p * h.stride;
#pragma omp simd
        for (int j = begin; j < end; ++j) over[j] += u[j] > threshold[j], reach[j] += u[j] >= threshold[j];
      });
}

template <class R, bool smooth>
PYDML_HD R triplet_loss(R violation) {
  return smooth ? Softplus(violation) : Relu(violation);
}
template <class R, bool smooth>
PYDML_HD R triplet_slope(R violation) {
  return smooth ? Sigmoid(violation) : (violation > 0 ? R(1) : R(0));
}

// Sum and number above 0 of [u_an - u_ap + m]₊ (or softplus) of every anchor.
template <class R, bool smooth>
void triplet_forward_with(const Thresholds<R>& h) {
  const Tile<R>& t = h.t;
  const R m = h.margin;
  R *col_sum = h.scratch, *col_count = h.scratch + t.nj;
  for (int j = 0; j < t.nj; ++j) col_sum[j] = col_count[j] = 0;
  for_thresholds(
      h,
      [&](int begin, int end, int i, int p) {
        const R* u = t.u + i * t.ld;
        const R shift = m - h.value_i[p * h.stride + i];
        R total = 0, count = 0;
#pragma omp simd reduction(+ : total, count)
        for (int j = begin; j < end; ++j) {
          const R loss = triplet_loss<R, smooth>(u[j] + shift);
          total += loss, count += loss > 0 ? R(1) : R(0);
        }
        h.sum_i[i] += double(total), h.count_i[i] += double(count);
      },
      [&](int begin, int end, int i, int p) {
        const R *u = t.u + i * t.ld, *threshold = h.value_j + p * h.stride;
#pragma omp simd
        for (int j = begin; j < end; ++j) {
          const R loss = threshold[j] < kInf<R> ? triplet_loss<R, smooth>(u[j] + m - threshold[j]) : R(0);
          col_sum[j] += loss, col_count[j] += loss > 0 ? R(1) : R(0);
        }
      });
  if (t.symmetric)
    for (int j = 0; j < t.nj; ++j) h.sum_j[j] += double(col_sum[j]), h.count_j[j] += double(col_count[j]);
}

// u becomes w of the negatives; the slopes of every positive pair add up in slope_i, slope_j.
template <class R, bool smooth>
void triplet_backward_with(const Thresholds<R>& h) {
  const Tile<R>& t = h.t;
  const R m = h.margin;
  R* w = h.scratch;
  for (int i = 0; i < t.ni; ++i) {
    R* u = t.u + i * t.ld;
    for (int j = 0; j < t.nj; ++j) w[j] = 0;
    for_segments(t, i, [&](int begin, int end) {
      for (int p = 0; p < h.n_i[i]; ++p) {
        const R shift = m - h.value_i[p * h.stride + i], g = h.grad_i[i];
        R total = 0;
#pragma omp simd reduction(+ : total)
        for (int j = begin; j < end; ++j) {
          const R slope = triplet_slope<R, smooth>(u[j] + shift);
          w[j] = Fma(g, slope, w[j]), total += slope;
        }
        h.slope_i[p * h.stride + i] += total;
      }
      if (!t.symmetric) return;
      for (int p = 0; p < h.most_j; ++p) {
        const R* threshold = h.value_j + p * h.stride;
        R* slopes = h.slope_j + p * h.stride;
#pragma omp simd
        for (int j = begin; j < end; ++j) {
          const R slope = threshold[j] < kInf<R> ? triplet_slope<R, smooth>(u[j] + m - threshold[j]) : R(0);
          w[j] = Fma(h.grad_j[j], slope, w[j]), slopes[j] += slope;
        }
      }
    });
    for (int j = 0; j < t.nj; ++j) u[j] = w[j];
  }
}

template <class R>
void triplet_forward(const Thresholds<R>& h) {
  h.smooth ? triplet_forward_with<R, true>(h) : triplet_forward_with<R, false>(h);
}
template <class R>
void triplet_backward(const Thresholds<R>& h) {
  h.smooth ? triplet_backward_with<R, true>(h) : triplet_backward_with<R, false>(h);
}

// The largest u below each threshold and where it is, ties to the smallest original column. Most tiles change nothing.
template <class R>
void best_below(const Thresholds<R>& h) {
  const Tile<R>& t = h.t;
  for_thresholds(
      h,
      [&](int begin, int end, int i, int p) {
        const R* u = t.u + i * t.ld;
        const R limit = h.value_i[p * h.stride + i];
        R top = -kInf<R>;
#pragma omp simd reduction(max : top)
        for (int j = begin; j < end; ++j) top = Max(top, u[j] < limit ? u[j] : -kInf<R>);
        R& best = h.best_i[p * h.stride + i];
        if (!(top >= best) || !(top > -kInf<R>)) return;
        int64_t& where = h.where_i[p * h.stride + i];
        if (top > best) best = top, where = INT64_MAX;
        for (int j = begin; j < end; ++j)
          if (u[j] == top) where = Min(where, h.name_j[j]);
      },
      [&](int begin, int end, int i, int p) {
        const R *u = t.u + i * t.ld, *limit = h.value_j + p * h.stride;
        R* best = h.best_j + p * h.stride;
        int better = 0;
#pragma omp simd reduction(+ : better)
        for (int j = begin; j < end; ++j) better += (u[j] < limit[j]) & (u[j] >= best[j]);
        if (!better) return;
        int64_t* where = h.where_j + p * h.stride;
        for (int j = begin; j < end; ++j) {
          if (!(u[j] < limit[j]) || !(u[j] >= best[j])) continue;
          where[j] = u[j] > best[j] ? h.name_i[i] : Min(where[j], h.name_i[i]);
          best[j] = u[j];
        }
      });
}
