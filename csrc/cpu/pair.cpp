// The pair engine: row statistics of a policy forward, dL/drows and dL/dcols backward. Positives are visited class by
// class, negatives tile by tile, so that mining thresholds are known before the one big pass.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "cpu/matrix.h"
#include "losses.h"

namespace pydml {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool sparse_of(int policy) {
  std::vector<bool> all;
#define PYDML_SPARSE(name, Policy) all.push_back(Policy<float>::sparse);
  PYDML_POLICIES(PYDML_SPARSE)
#undef PYDML_SPARSE
  return all[policy];
}

// Live pairs of every tile, as the forward pass leaves them in a byte tensor: first (offset, count) of every tile,
// count -1 where the tile has more than were kept, then the pairs.
template <class R>
struct LiveList {
  int64_t* directory;
  Live<R>* pairs;
  int64_t capacity, used = 0;
  LiveList(const Tensor& bytes, int64_t n_tiles)
      : directory(reinterpret_cast<int64_t*>(bytes.data_ptr<uint8_t>())),
        pairs(reinterpret_cast<Live<R>*>(directory + 2 * n_tiles)),
        capacity((bytes.numel() - 16 * n_tiles) / int64_t(sizeof(Live<R>))) {}
};

// A tile is cheaper as a list while fewer than 1 in 16 of its pairs are live.
inline int tile_capacity(int64_t rows, int64_t cols) { return int(rows * cols / 16); }

int64_t saved_bytes(int64_t n_tiles, int64_t rows, int64_t cols, bool symmetric, size_t entry) {
  return 16 * n_tiles + 32 * (rows + (symmetric ? rows : cols)) * int64_t(entry);
}

// Statistics, thresholds and fields in sorted order, and the calls into the kernels.
template <class R>
struct PairEngine {
  Matrix<R> m;
  const int policy;
  const std::vector<Slot> slots;
  std::vector<R> params, row_field, col_field;
  const bool mined;
  const bool visits[2];         // positives, negatives
  std::vector<R> below, above;  // mining: keep positives below, negatives above
  std::vector<Workspace<R>> work;

  PairEngine(const Tensor& rows, const OptionalTensor& cols, const Tensor& row_labels, const OptionalTensor& col_labels,
             const OptionalTensor& rf, const OptionalTensor& cf, c10::string_view name, at::ArrayRef<double> numbers,
             c10::string_view view, bool normalize, bool mines, int64_t pool, double sharpness,
             const OptionalTensor& selves, c10::string_view side)
      : m(rows, cols, row_labels, col_labels, selves, view_of(view), normalize, Ties::any, pool, R(sharpness)),
        policy(policy_id(name)),
        slots(slots_of(policy)),
        params(numbers.begin(), numbers.end()),
        mined(mines),
        visits{side != "negatives", side != "positives"},
        work(m.workspaces()) {
    check_params(policy, numbers.size());
    TORCH_CHECK(side == "both" || side == "positives" || side == "negatives", "side: got '", side,
                "', wanted both, positives or negatives");
    params.resize(8);
    for (const Slot& s : slots)
      TORCH_CHECK(kernel(s.side).forward, "epsilon: got one, but the C++ kernels do not mine with the policy '", name,
                  "'");
    TORCH_CHECK(pool == 1 || !(mines || sparse_of(policy)), "pool_size: got ", pool,
                ", wanted 1 where pairs are mined or weights can be 0");
    if (rf) check_shape("row_field", *rf, {m.n_rows});
    if (cf) check_shape("col_field", *cf, {m.n_cols});
    if (rf || cf) {  // one missing field is a field of zeros
      row_field = rf ? sorted(*rf, m.row, 1) : std::vector<R>(m.n_rows);
      col_field = cf ? sorted(*cf, m.col, pool) : std::vector<R>(m.n_cols);
    }
  }

  std::vector<R> sorted(const Tensor& values, const Vectors<R>& v, int64_t group) const {
    const Tensor given = values.to(c10::CppTypeToScalarType<R>::value).contiguous();
    const R* from = given.template const_data_ptr<R>();
    std::vector<R> out(given.numel());
    for (int64_t i = 0; i < int64_t(out.size()); ++i) out[i] = from[group == 1 ? v.place(i) : i];
    return out;
  }

  // Column k of row statistics or the like, in sorted order.
  std::vector<R> column(const Tensor& values, int k) const { return sorted(values.select(1, k), m.row, 1); }

  void take_thresholds(const char* name, const Tensor& thresholds) {
    check_shape(name, thresholds, {m.n_rows, 2});
    below = column(thresholds, 0), above = column(thresholds, 1);
  }

  const PairKernels<R>& kernel(Side side) const { return m.k.pair[policy][side == Side::negatives][mined]; }

  bool has(Side side) const {
    if (!visits[side == Side::negatives]) return false;
    for (const Slot& s : slots)
      if (s.side == side) return true;
    return false;
  }

  Tile<R> describe(int64_t i0, int ni, int64_t j0, int nj, Side side, Workspace<R>& w) const {
    const std::vector<R>& cut = side == Side::positives ? below : above;
    auto at = [](const std::vector<R>& v, int64_t i) { return v.empty() ? nullptr : v.data() + i; };
    Tile<R> t{w.u.data(), nj,      ni,      nj,      w.skip0.data(), w.skip1.data(), m.symmetric,
              nullptr,    nullptr, nullptr, nullptr, at(cut, i0),    nullptr};
    t.row_i = at(row_field, i0), t.col_j = at(col_field, j0);
    if (m.symmetric) t.row_j = at(row_field, j0), t.col_i = at(col_field, i0), t.cut_j = at(cut, j0);
    return t;
  }

  void skip(int64_t i0, int ni, int64_t j0, int nj, Side side, Workspace<R>& w) const {
    side == Side::positives ? m.positives(i0, ni, j0, nj, w) : m.negatives(i0, ni, j0, nj, w);
  }
};

template <class R>
std::tuple<Tensor, Tensor, Tensor> forward(PairEngine<R>& e, const Tensor& rows, std::optional<double> epsilon,
                                           const OptionalTensor& known) {
  Matrix<R>& m = e.m;
  const int64_t n = m.n_rows;
  const int K = int(e.slots.size());
  constexpr R inf = std::numeric_limits<R>::infinity();
  std::vector<std::vector<R>> top(K, std::vector<R>(n, -inf));
  std::vector<std::vector<double>> sum(K, std::vector<double>(n, 0.0));
  const bool listing = e.mined || sparse_of(e.policy);
  const Tensor saved = at::zeros({listing ? saved_bytes(m.n_tiles(), n, m.n_cols, m.symmetric, sizeof(Live<R>)) : 0},
                                 rows.options().dtype(at::kByte));
  LiveList<R> list(saved, listing ? m.n_tiles() : 0);

  auto run = [&](int64_t i0, int ni, int64_t j0, int nj, Side side, Workspace<R>& w, std::vector<R>* most,
                 Live<R>* live, int capacity) {
    m.tile(i0, ni, j0, nj, w);
    e.skip(i0, ni, j0, nj, side, w);
    Forward<R> f{};
    f.t = e.describe(i0, ni, j0, nj, side, w);
    for (int k = 0; k < K; ++k) {
      f.stat_i[k] = {top[k].data() + i0, sum[k].data() + i0};
      if (m.symmetric) f.stat_j[k] = {top[k].data() + j0, sum[k].data() + j0};
    }
    if (most) {
      f.top_i = most->data() + i0;
      if (m.symmetric) f.top_j = most->data() + j0;
    }
    f.live = live, f.live_capacity = capacity, f.scratch = w.scratch.data();
    e.kernel(side).forward(e.params.data(), f);
    return f.n_live;
  };

  // Negatives alone look for the threshold of positives even where thresholds are known; it is what they are asked for.
  const bool mines = e.mined && (!known || !e.visits[0]);
  std::vector<R> hardest;
  if (e.mined && known) {
    e.take_thresholds("bounds", *known);
  } else if (e.mined) {  // positives first: their least similar one is what negatives are compared with
    e.above.assign(n, inf);
    if (e.visits[0]) m.for_positives(e.work, [&](int64_t i, int64_t, R u) { e.above[i] = std::min(e.above[i], u); });
    for (R& v : e.above) v -= R(*epsilon);
  }
  if (mines) hardest.assign(n, -inf);
  if (e.has(Side::negatives) && m.n_cols) {
    const int capacity = tile_capacity(m.T, m.col_block);
    std::vector<std::vector<Live<R>>> found(std::max(m.row_blocks(), m.col_blocks()));  // by the tasks of a round
    m.for_tiles(
        [&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker, int64_t number, int64_t task) {
          std::vector<R>* const most = mines ? &hardest : nullptr;
          Workspace<R>& w = e.work[worker];
          if (!listing) {
            run(i0, ni, j0, nj, Side::negatives, w, most, nullptr, 0);
            return;
          }
          std::vector<Live<R>>& live = found[task];
          const size_t used = live.size();
          live.resize(used + capacity);
          const int n_live = run(i0, ni, j0, nj, Side::negatives, w, most, live.data() + used, capacity);
          live.resize(used + std::max(n_live, 0));
          list.directory[2 * number + 1] = n_live;
        },
        [&](int64_t first, int64_t tiles, int64_t task) {  // in the order of the schedule: the same tiles always fit
          const Live<R>* next = listing ? found[task].data() : nullptr;
          for (int64_t number = first; listing && number < first + tiles; ++number) {
            int64_t& n_live = list.directory[2 * number + 1];
            list.directory[2 * number] = list.used;
            if (n_live < 0) continue;
            const Live<R>* const from = next;
            next += n_live;
            if (list.used + n_live > list.capacity) {
              n_live = -1;
              continue;
            }
            std::copy_n(from, n_live, list.pairs + list.used);
            list.used += n_live;
          }
          if (listing) found[task].clear();
        });
  }
  if (mines) {
    e.below = hardest;  // -inf where negatives are not visited: nothing is mined
    for (R& v : e.below) v += R(*epsilon);
  }
  if (e.has(Side::positives))
    m.for_class_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
      run(i0, ni, j0, nj, Side::positives, e.work[worker], nullptr, nullptr, 0);
    });

  const auto options = rows.options().dtype(c10::CppTypeToScalarType<R>::value);
  Tensor stats = at::empty({n, K}, options), thresholds = at::zeros({n, 2}, options);
  R *out = stats.template data_ptr<R>(), *cuts = thresholds.template data_ptr<R>();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t r = m.row.place(i);
    for (int k = 0; k < K; ++k) {
      const double z = sum[k][i];
      const R value = e.slots[k].kind != Kind::log_sum_exp ? R(z) : z > 0 ? R(top[k][i] + std::log(z)) : -inf;
      out[r * K + k] = m.finite ? value : std::numeric_limits<R>::quiet_NaN();
    }
    if (e.mined) cuts[2 * r] = e.below[i], cuts[2 * r + 1] = e.above[i];
  }
  return {stats, thresholds, saved};
}

template <class R>
std::tuple<Tensor, Tensor> backward(PairEngine<R>& e, const Tensor& grad, const Tensor& stats, const Tensor& thresholds,
                                    const Tensor& saved, bool want_rows, bool want_cols) {
  Matrix<R>& m = e.m;
  const int K = int(e.slots.size());
  constexpr R inf = std::numeric_limits<R>::infinity();
  check_shape("grad", grad, {m.n_rows, K});
  check_shape("stats", stats, {m.n_rows, K});
  std::vector<std::vector<R>> g(K), s(K);
  for (int k = 0; k < K; ++k) {
    g[k] = e.column(grad, k), s[k] = e.column(stats, k);
    if (e.slots[k].kind == Kind::log_sum_exp)
      for (R& v : s[k]) v = v == -inf ? inf : v;  // a sum of nothing has no shares
  }
  if (e.mined) e.take_thresholds("thresholds", thresholds);
  m.start_gradient(want_rows, want_cols);

  auto describe = [&](int64_t i0, int ni, int64_t j0, int nj, Side side, Workspace<R>& w) {
    Backward<R> b{};
    b.t = e.describe(i0, ni, j0, nj, side, w);
    for (int k = 0; k < K; ++k) {
      b.grad_i[k] = g[k].data() + i0, b.stat_i[k] = s[k].data() + i0;
      if (m.symmetric) b.grad_j[k] = g[k].data() + j0, b.stat_j[k] = s[k].data() + j0;
    }
    b.scratch = w.scratch.data();
    return b;
  };
  auto run = [&](int64_t i0, int ni, int64_t j0, int nj, Side side, Workspace<R>& w) {
    m.tile(i0, ni, j0, nj, w);
    m.keep(ni, nj, w);
    e.skip(i0, ni, j0, nj, side, w);
    e.kernel(side).backward(e.params.data(), describe(i0, ni, j0, nj, side, w));
    m.add_weights(i0, ni, j0, nj, w);
  };

  const bool listing = saved.numel() > 0;
  check_kept("saved", saved, at::kByte, alignof(int64_t));
  if (listing)
    check_shape("saved", saved, {saved_bytes(m.n_tiles(), m.n_rows, m.n_cols, m.symmetric, sizeof(Live<R>))});
  LiveList<R> list(saved, listing ? m.n_tiles() : 0);
  for (int64_t number = 0; listing && number < m.n_tiles(); ++number) {
    const int64_t first = list.directory[2 * number], count = list.directory[2 * number + 1];
    TORCH_CHECK(count <= 0 || (first >= 0 && count <= list.capacity && first <= list.capacity - count), "saved: tile ",
                number, " has pairs that are not there, wanted what the forward pass returned");
  }
  std::vector<std::vector<Live<R>>> weights(e.work.size());
  if (e.has(Side::negatives) && m.n_cols)
    m.for_tiles(
        [&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker, int64_t number, int64_t) {
          Workspace<R>& w = e.work[worker];
          const int64_t n_live = listing ? list.directory[2 * number + 1] : -1;
          if (n_live < 0) return run(i0, ni, j0, nj, Side::negatives, w);
          if (n_live == 0) return;
          const Live<R>* live = list.pairs + list.directory[2 * number];
          for (int64_t p = 0; p < n_live; ++p)
            TORCH_CHECK(live[p].i < ni && live[p].j < nj, "saved: tile ", number,
                        " has a pair outside of it, wanted what the forward pass returned");
          std::vector<Live<R>>& mine = weights[worker];
          mine.assign(live, live + n_live);
          e.kernel(Side::negatives)
              .backward_live(e.params.data(), describe(i0, ni, j0, nj, Side::negatives, w), mine.data(), int(n_live));
          for (int64_t p = 0; p < n_live; ++p) m.add_weight(i0 + live[p].i, j0 + live[p].j, mine[p].u, live[p].u, w);
        },
        [](int64_t, int64_t, int64_t) {});
  if (e.has(Side::positives))
    m.for_class_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
      run(i0, ni, j0, nj, Side::positives, e.work[worker]);
    });
  return m.gradients();
}

#define PYDML_ARGUMENTS                                                                                                \
  const Tensor &rows, const OptionalTensor &cols, const Tensor &row_labels, const OptionalTensor &col_labels,          \
      const OptionalTensor &row_field, const OptionalTensor &col_field, c10::string_view policy,                       \
      at::ArrayRef<double> params, c10::string_view view, bool normalize, std::optional<double> epsilon, int64_t pool, \
      double sharpness, const OptionalTensor &selves, [[maybe_unused]] const OptionalTensor &bounds,                   \
      c10::string_view side
#define PYDML_ENGINE(R)                                                                                           \
  PairEngine<R> engine(rows, cols, row_labels, col_labels, row_field, col_field, policy, params, view, normalize, \
                       epsilon.has_value(), pool, sharpness, selves, side)

std::tuple<Tensor, Tensor, Tensor> pair(PYDML_ARGUMENTS) {
  if (compute_type(rows) == at::kDouble) {
    PYDML_ENGINE(double);
    return forward(engine, rows, epsilon, bounds);
  }
  PYDML_ENGINE(float);
  return forward(engine, rows, epsilon, bounds);
}

std::tuple<Tensor, Tensor> pair_backward(const Tensor& grad, const Tensor& stats, const Tensor& thresholds,
                                         const Tensor& saved, PYDML_ARGUMENTS, bool want_rows, bool want_cols) {
  if (compute_type(rows) == at::kDouble) {
    PYDML_ENGINE(double);
    return backward(engine, grad, stats, thresholds, saved, want_rows, want_cols);
  }
  PYDML_ENGINE(float);
  return backward(engine, grad, stats, thresholds, saved, want_rows, want_cols);
}

}  // namespace

TORCH_LIBRARY_IMPL(pydml_cpu, CPU, m) {
  m.impl("pair", pair);
  m.impl("pair_backward", pair_backward);
}

}  // namespace pydml
