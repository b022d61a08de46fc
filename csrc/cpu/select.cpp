// The select engine: which pairs a miner or a selecting loss keeps. Indices only, no gradient.
#include "cpu/engine.h"
#include "losses.h"

namespace pydml {
namespace {

// Largest (smallest) u of every row on one side and where it is; ties to the smallest original column.
template <class R>
struct Extreme {
  std::vector<R> u;
  std::vector<int64_t> where;
  explicit Extreme(int64_t n) : u(n, -std::numeric_limits<R>::infinity()), where(n, -1) {}
  void offer(int64_t i, R value, int64_t name) {
    if (value > u[i] || (value == u[i] && where[i] >= 0 && name < where[i])) u[i] = value, where[i] = name;
  }
};

// Among positives: sign·u largest, only those with u above `floor`.
template <class R>
Extreme<R> among_positives(const Matrix<R>& m, std::vector<Workspace<R>>& work, R sign, const std::vector<R>* floor) {
  Extreme<R> best(m.n_rows);
  m.for_positives(work, [&](int64_t i, int64_t j, R u) {
    if (!floor || u > (*floor)[i]) best.offer(i, sign * u, m.col.place(j));
  });
  return best;
}

// Among negatives: sign·u largest, only those with u below `ceiling` (with sign 1).
template <class R>
struct AmongNegatives {
  const Matrix<R>& m;
  const R* const ceiling;
  Extreme<R> best;
  std::vector<R> unlimited;
  std::vector<int64_t> names;
  const std::vector<int> one;

  AmongNegatives(const Matrix<R>& matrix, const std::vector<R>* limit)
      : m(matrix),
        ceiling(limit ? limit->data() : nullptr),
        best(m.n_rows),
        unlimited(limit ? 0 : m.n_rows, std::numeric_limits<R>::infinity()),
        names(m.n_cols),
        one(m.T, 1) {
    for (int64_t j = 0; j < m.n_cols; ++j) names[j] = m.col.place(j);
  }

  // With those of a tile that stands in w, sign·u in place of u.
  void offer(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) {
    const R* const limit = ceiling ? ceiling : unlimited.data();
    Thresholds<R> h{};
    h.t = bare_tile(m, ni, nj, w);
    h.stride = m.n_rows, h.most_j = 1, h.n_i = one.data();
    h.value_i = limit + i0, h.best_i = best.u.data() + i0, h.where_i = best.where.data() + i0;
    h.name_j = names.data() + j0;
    if (m.symmetric) {
      h.value_j = limit + j0, h.best_j = best.u.data() + j0, h.where_j = best.where.data() + j0;
      h.name_i = names.data() + i0;
    }
    m.k.best_below(h);
  }
};

template <class R>
Extreme<R> among_negatives(const Matrix<R>& m, std::vector<Workspace<R>>& work, R sign, const std::vector<R>* ceiling) {
  AmongNegatives<R> among(m, ceiling);
  m.for_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
    Workspace<R>& w = work[worker];
    m.tile(i0, ni, j0, nj, w);
    m.negatives(i0, ni, j0, nj, w);
    if (sign < 0)
      for (int64_t e = 0; e < int64_t(ni) * nj; ++e) w.u[e] = -w.u[e];
    among.offer(i0, ni, j0, nj, w);
  });
  return std::move(among.best);
}

template <class R>
std::tuple<Tensor, Tensor> run_extremes(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                        const OptionalTensor& col_labels, Text positive, Text negative, Text view,
                                        bool normalize, const OptionalTensor& selves) {
  const Matrix<R> m(rows, cols, row_labels, col_labels, selves, view_of(view), normalize, Ties::exact);
  auto work = m.workspaces();
  constexpr R inf = std::numeric_limits<R>::infinity();
  auto chosen = [&](const Extreme<R>& e, R sign, R missing) {
    std::vector<R> u(m.n_rows);
    for (int64_t i = 0; i < m.n_rows; ++i) u[i] = e.where[i] < 0 ? missing : sign * e.u[i];
    return u;
  };
  const R easy = positive == "easy" ? R(1) : R(-1), hard = negative == "easy" ? R(-1) : R(1);
  Extreme<R> p(0), q(0);
  if (positive == "semihard") {  // the hardest positive that is still nearer than the chosen negative
    q = negative == "none" ? Extreme<R>(m.n_rows) : among_negatives<R>(m, work, hard, nullptr);
    const std::vector<R> floor = chosen(q, hard, inf);
    p = among_positives<R>(m, work, -1, &floor);
  } else {
    p = positive == "none" ? Extreme<R>(m.n_rows) : among_positives<R>(m, work, easy, nullptr);
    const std::vector<R> ceiling = chosen(p, easy, -inf);
    if (negative == "none")
      q = Extreme<R>(m.n_rows);
    else
      q = among_negatives<R>(m, work, hard, negative == "semihard" ? &ceiling : nullptr);
  }
  Tensor out_p = at::empty({m.n_rows}, row_labels.options()), out_n = at::empty_like(out_p);
  for (int64_t i = 0; i < m.n_rows; ++i) {
    out_p.data_ptr<int64_t>()[m.row.place(i)] = p.where[i];
    out_n.data_ptr<int64_t>()[m.row.place(i)] = q.where[i];
  }
  return {out_p, out_n};
}

template <class R>
struct Candidate {
  R loss;
  int64_t i, j;  // original row and column
  bool operator<(const Candidate& o) const { return loss != o.loss ? loss > o.loss : i != o.i ? i < o.i : j < o.j; }
};

// The k best candidates seen by one thread: a buffer that is cut back to k when it is full. A pair that does not beat
// the k-th best of any thread is not among the k best of all.
template <class R>
struct Best {
  size_t k;
  std::vector<Candidate<R>> kept;
  Candidate<R> worst{-std::numeric_limits<R>::infinity(), INT64_MAX, INT64_MAX};
  void offer(const Candidate<R>& c) {
    if (!(c < worst)) return;
    kept.push_back(c);
    if (kept.size() >= 2 * k + 1024) cut();
  }
  void cut() {
    if (kept.size() <= k) return;
    std::nth_element(kept.begin(), kept.begin() + k - 1, kept.end());
    kept.resize(k);
    worst = kept[k - 1];
  }
};

template <class R>
std::tuple<Tensor, Tensor> run_topk(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                    const OptionalTensor& col_labels, Text policy, at::ArrayRef<double> numbers,
                                    int64_t k, Text side, Text view, bool normalize, const OptionalTensor& selves) {
  const Matrix<R> m(rows, cols, row_labels, col_labels, selves, view_of(view), normalize, Ties::exact);
  auto work = m.workspaces();
  TORCH_CHECK(k >= 1, "k: got ", k, ", wanted an int >= 1");
  TORCH_CHECK(side == "all" || side == "positives" || side == "negatives", "side: got '", side,
              "', wanted all, positives or negatives");
  check_params(policy_id(policy), numbers.size());
  std::vector<R> params(numbers.begin(), numbers.end());
  params.resize(8);
  std::vector<Best<R>> best(work.size());
  for (auto& b : best) b.k = size_t(k);
  const auto& table = m.k.pair[policy_id(policy)];
  TORCH_CHECK(table[0][0].terms && table[1][0].terms, "policy: got '", policy,
              "', wanted one with losses on both sides");
  std::vector<int64_t> name(m.n_cols);
  for (int64_t j = 0; j < m.n_cols; ++j) name[j] = m.col.place(j);
  auto collect = [&](int64_t i0, int ni, int64_t j0, int nj, bool negative, Workspace<R>& w, Best<R>& b) {
    R* loss = w.scratch.data();
    for (int i = 0; i < ni; ++i) {
      table[negative][0].terms(params.data(), w.u.data() + int64_t(i) * nj, loss, nj);
      const int64_t row = m.row.place(i0 + i), *names = name.data() + j0;
      // Does any pair of the row beat the k-th best, or equal it from an earlier place? Mostly not.
      const R worst = b.worst.loss;
      const int64_t last = b.worst.i;
      int beats = 0;
      for (int j = 0; j < nj; ++j)
        beats += (loss[j] > worst) | ((loss[j] == worst) & ((row <= last) | (m.symmetric & (names[j] <= last))));
      for (int j = 0; beats && j < nj; ++j) {
        if ((j >= w.skip0[i] && j < w.skip1[i]) || loss[j] < b.worst.loss) continue;
        const int64_t column = names[j];
        const bool turn = m.symmetric && column < row;
        b.offer({loss[j], turn ? column : row, turn ? row : column});
      }
    }
  };
  if (side != "positives")
    m.for_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
      Workspace<R>& w = work[worker];
      m.tile(i0, ni, j0, nj, w);
      m.negatives(i0, ni, j0, nj, w);
      collect(i0, ni, j0, nj, true, w, best[worker]);
    });
  if (side != "negatives")
    m.for_class_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
      Workspace<R>& w = work[worker];
      m.tile(i0, ni, j0, nj, w);
      m.positives(i0, ni, j0, nj, w);
      collect(i0, ni, j0, nj, false, w, best[worker]);
    });
  for (size_t b = 1; b < best.size(); ++b)
    best[0].kept.insert(best[0].kept.end(), best[b].kept.begin(), best[b].kept.end());
  best[0].cut();
  std::sort(best[0].kept.begin(), best[0].kept.end());
  Tensor i = at::full({k}, -1, row_labels.options()), j = at::full({k}, -1, row_labels.options());
  for (size_t e = 0; e < best[0].kept.size(); ++e) {
    i.data_ptr<int64_t>()[e] = best[0].kept[e].i;
    j.data_ptr<int64_t>()[e] = best[0].kept[e].j;
  }
  return {i, j};
}

// Pairs as tiles find them: up to 256 columns of a row, one bit each, kept only where a bit is set. So they take at
// most 40 bytes a pair, and a few bits where there are many.
class Found {
 public:
  static constexpr int kWords = 4;
  struct Part {
    int64_t row, first;  // sorted places; bit b of word w is column first + 64·w + b
    uint64_t bits[kWords];
  };

  explicit Found(size_t workers) : parts_(workers) {}

  void add(int64_t worker, int64_t row, int64_t first, const uint64_t* bits) {
    if (!(bits[0] | bits[1] | bits[2] | bits[3])) return;
    parts_[worker].push_back({row, first, {bits[0], bits[1], bits[2], bits[3]}});
  }

  // Rows and columns by the names that they were given, in order.
  template <class R>
  std::tuple<Tensor, Tensor> sorted(const Matrix<R>& m, const Tensor& like) const {
    const int64_t rows = m.n_rows, words = (m.n_cols + 63) / 64;
    std::vector<int64_t> start(rows + 1, 0), next(rows + 1, 0);  // pairs and parts before each row
    for (const auto& mine : parts_)
      for (const Part& part : mine) {
        const int64_t r = m.row.place(part.row);
        ++next[r + 1];
        for (const uint64_t bits : part.bits) start[r + 1] += __builtin_popcountll(bits);
      }
    for (int64_t r = 0; r < rows; ++r) start[r + 1] += start[r], next[r + 1] += next[r];
    std::vector<const Part*> by_row(next[rows]);
    for (const auto& mine : parts_)
      for (const Part& part : mine) by_row[next[m.row.place(part.row)]++] = &part;
    Tensor a = at::empty({start[rows]}, like.options()), b = at::empty_like(a);
    int64_t *out_a = a.data_ptr<int64_t>(), *out_b = b.data_ptr<int64_t>();
    at::parallel_for(0, rows, 1 + 16384 * rows / (start[rows] + words * rows + 1), [&](int64_t begin, int64_t end) {
      std::vector<uint64_t> seen(words, 0);
      for (int64_t r = begin; r < end; ++r) {
        if (start[r] == start[r + 1]) continue;
        std::fill(out_a + start[r], out_a + start[r + 1], r);
        for (int64_t p = r ? next[r - 1] : 0; p < next[r]; ++p)
          for (int w = 0; w < kWords; ++w)
            for (uint64_t bits = by_row[p]->bits[w]; bits; bits &= bits - 1) {
              const int64_t column = m.col.place(by_row[p]->first + 64 * w + __builtin_ctzll(bits));
              seen[column >> 6] |= uint64_t(1) << (column & 63);
            }
        int64_t* out = out_b + start[r];
        for (int64_t word = 0; word < words; ++word)
          for (uint64_t& bits = seen[word]; bits; bits &= bits - 1) *out++ = word * 64 + __builtin_ctzll(bits);
      }
    });
    return {a, b};
  }

 private:
  std::vector<std::vector<Part>> parts_;
};

template <class R>
std::tuple<Tensor, Tensor, Tensor, Tensor> run_mined(const Tensor& rows, const OptionalTensor& cols,
                                                     const Tensor& row_labels, const OptionalTensor& col_labels,
                                                     std::optional<double> epsilon, Text view, bool normalize) {
  const Matrix<R> m(rows, cols, row_labels, col_labels, {}, view_of(view), normalize, Ties::exact);
  auto work = m.workspaces();
  constexpr R inf = std::numeric_limits<R>::infinity();
  std::vector<R> below(m.n_rows, inf), above(m.n_rows, -inf);
  Found positives(work.size()), negatives(work.size());
  static_assert(64 * Found::kWords == Marks<R>::most && Marks<R>::most == 256, "a tile is at most so wide");
  constexpr int words = Marks<R>::most / 32;
  std::vector<std::vector<uint32_t>> marks(work.size(), std::vector<uint32_t>(size_t(2 * words) * m.T));
  auto collect = [&](int64_t i0, int ni, int64_t j0, int nj, bool under, const std::vector<R>& cut, Found& found,
                     int64_t worker) {
    Marks<R> h{};
    h.t = bare_tile(m, ni, nj, work[worker]);
    h.cut_i = cut.data() + i0, h.cut_j = m.symmetric ? cut.data() + j0 : nullptr;
    h.below = under, h.rows = marks[worker].data(), h.cols = h.rows + words * m.T;
    m.k.mark(h);
    auto add = [&](int64_t row, int64_t first, const uint32_t* bits, int64_t step) {
      uint64_t wide[Found::kWords];
      for (int w = 0; w < Found::kWords; ++w)
        wide[w] = uint64_t(bits[2 * w * step]) | uint64_t(bits[(2 * w + 1) * step]) << 32;
      found.add(worker, row, first, wide);
    };
    for (int i = 0; i < ni; ++i) add(i0 + i, j0, h.rows + i * words, 1);
    for (int j = 0; h.cut_j && j < nj; ++j) add(j0 + j, i0, h.cols + j, nj);
  };
  // The least similar positive is the cut of negatives, so that one pass over all pairs finds those and the most
  // similar negative, which is the cut of positives.
  if (epsilon) {
    const Extreme<R> least = among_positives<R>(m, work, -1, nullptr);
    for (int64_t i = 0; i < m.n_rows; ++i) above[i] = least.where[i] < 0 ? inf : -least.u[i] - R(*epsilon);
  }
  AmongNegatives<R> most(m, nullptr);
  m.for_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
    m.tile(i0, ni, j0, nj, work[worker]);
    m.negatives(i0, ni, j0, nj, work[worker]);
    if (epsilon) most.offer(i0, ni, j0, nj, work[worker]);
    collect(i0, ni, j0, nj, false, above, negatives, worker);
  });
  for (int64_t i = 0; epsilon && i < m.n_rows; ++i)
    below[i] = most.best.where[i] < 0 ? -inf : most.best.u[i] + R(*epsilon);
  m.for_class_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
    m.tile(i0, ni, j0, nj, work[worker]);
    m.positives(i0, ni, j0, nj, work[worker]);
    collect(i0, ni, j0, nj, true, below, positives, worker);
  });
  const auto [a1, p] = positives.sorted(m, row_labels);
  const auto [a2, n] = negatives.sorted(m, row_labels);
  return {a1, p, a2, n};
}

std::tuple<Tensor, Tensor> extremes(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                    const OptionalTensor& col_labels, Text positive, Text negative, Text view,
                                    bool normalize, const OptionalTensor& selves) {
  return with_type(rows, [&](auto r) {
    return run_extremes<decltype(r)>(rows, cols, row_labels, col_labels, positive, negative, view, normalize, selves);
  });
}

std::tuple<Tensor, Tensor> topk(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels,
                                const OptionalTensor& col_labels, Text policy, at::ArrayRef<double> params, int64_t k,
                                Text side, Text view, bool normalize, const OptionalTensor& selves) {
  return with_type(rows, [&](auto r) {
    return run_topk<decltype(r)>(rows, cols, row_labels, col_labels, policy, params, k, side, view, normalize, selves);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mined(const Tensor& rows, const OptionalTensor& cols,
                                                 const Tensor& row_labels, const OptionalTensor& col_labels,
                                                 std::optional<double> epsilon, Text view, bool normalize) {
  return with_type(rows, [&](auto r) {
    return run_mined<decltype(r)>(rows, cols, row_labels, col_labels, epsilon, view, normalize);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) {
  m.impl("extremes", extremes);
  m.impl("topk", topk);
  m.impl("mined", mined);
}

}  // namespace pydml
