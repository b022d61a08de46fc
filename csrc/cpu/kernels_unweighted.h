// Vector kernels of the engines that know no policy: histogram, thresholds (triplet, rank), extremes. Included by
// kernels.h inside the namespace of an instruction set.

// Histogram: linear soft assignment of u to nodes low, low+1/inverse, ...

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

// Thresholds: every negative of a row against the u of the row's positives

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

// Violations, losses and slopes of some listed triplets of one anchor. Most lists have those of one positive together,
// and their negatives one after the other.
template <class R, bool smooth>
void triplets_with(Piece<R>& t) {
  const int number = t.number;
  const int64_t p0 = t.p[0], n0 = t.n[0];
  int64_t other_p = 0, gaps = 0;
#pragma omp simd reduction(| : other_p, gaps)
  for (int e = 0; e < number; ++e) other_p |= t.p[e] ^ p0, gaps |= (t.n[e] - e) ^ n0;
  R* const v = t.violation;
  if (t.u) {
    const R *const u = t.u, m = t.margin;
    const int64_t *const p = t.p, *const n = t.n;
    if (!other_p && !gaps) {
      const R u_ap = u[p0], *const from = u + n0;
#pragma omp simd
      for (int e = 0; e < number; ++e) v[e] = from[e] - u_ap + m;
    } else if (!other_p) {
      const R u_ap = u[p0];
#pragma omp simd
      for (int e = 0; e < number; ++e) v[e] = u[n[e]] - u_ap + m;
    } else {
#pragma omp simd
      for (int e = 0; e < number; ++e) v[e] = u[n[e]] - u[p[e]] + m;
    }
  }
  double sum = 0;
  int above = 0;
#pragma omp simd reduction(+ : sum, above)
  for (int e = 0; e < number; ++e) {
    const R loss = triplet_loss<R, smooth>(v[e]);
    sum += double(loss), above += loss > 0 ? 1 : 0;
  }
  t.sum = sum, t.above = above;
  if (!t.slope) return;
  R same = 0;  // of neighbours with the same positive
  if (!other_p) {
    R* const to = t.slope + n0;
#pragma omp simd reduction(+ : same)
    for (int e = 0; e < number; ++e) v[e] = triplet_slope<R, smooth>(v[e]), same += v[e];
    if (gaps) {
      for (int e = 0; e < number; ++e) t.slope[t.n[e]] += v[e];
    } else {
#pragma omp simd
      for (int e = 0; e < number; ++e) to[e] += v[e];
    }
    t.slope[p0] -= same;
    return;
  }
  for (int e = 0; e < number; ++e) {
    const R slope = triplet_slope<R, smooth>(v[e]);
    t.slope[t.n[e]] += slope;
    same += slope;
    if (e + 1 == number || t.p[e + 1] != t.p[e]) t.slope[t.p[e]] -= same, same = 0;
  }
}

template <class R>
void triplets(Piece<R>& t) {
  t.smooth ? triplets_with<R, true>(t) : triplets_with<R, false>(t);
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
template <class R, bool below>
void mark_with(const Marks<R>& h) {
  constexpr int words = Marks<R>::most / 32;
  static constexpr uint32_t bit[32] = {1u,       1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                       1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
                                       1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
                                       1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};
  const Tile<R>& t = h.t;
  for (int e = 0; e < t.ni * words; ++e) h.rows[e] = 0;
  for (int e = 0; h.cut_j && e < words * t.nj; ++e) h.cols[e] = 0;
  for (int i = 0; i < t.ni; ++i) {
    const R *const u = t.u + i * t.ld, cut_i = h.cut_i[i];
    uint32_t *const row = h.rows + i * words, *const column = h.cols + (i / 32) * t.nj;
    const uint32_t own = bit[i % 32];
    for_segments(t, i, [&](int begin, int end) {
      for (int word = begin / 32; word * 32 < end; ++word) {
        const int from = Max(begin - word * 32, 0), to = Min(end - word * 32, 32);
        const R* const part = u + word * 32;
        uint32_t found = 0;
#pragma omp simd reduction(| : found)
        for (int b = from; b < to; ++b) found |= (below ? part[b] < cut_i : part[b] > cut_i) ? bit[b] : 0u;
        row[word] |= found;
      }
      if (!h.cut_j) return;
      const R* const cut_j = h.cut_j;
#pragma omp simd
      for (int j = begin; j < end; ++j) column[j] |= (below ? u[j] < cut_j[j] : u[j] > cut_j[j]) ? own : 0u;
    });
  }
}

template <class R>
void mark(const Marks<R>& h) {
  h.below ? mark_with<R, true>(h) : mark_with<R, false>(h);
}
