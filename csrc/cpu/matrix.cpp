// Rows, columns, tiles and gradients of the matrix: see matrix.h.
#include "cpu/matrix.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>

#include "losses.h"

namespace pydml {

#define PYDML_DECLARE(isa)                    \
  namespace isa {                             \
  void fill_kernels_float(Kernels<float>&);   \
  void fill_kernels_double(Kernels<double>&); \
  }
PYDML_DECLARE(portable)
PYDML_DECLARE(avx2)
PYDML_DECLARE(avx512)
#undef PYDML_DECLARE

const char* isa_name() {
  static const char* const chosen = [] {
    const char* wanted = std::getenv("PYDML_ISA");
    auto may = [&](const char* name) { return !wanted || !std::strcmp(wanted, name); };
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && may("avx512")) return "avx512";
    if (avx2 && may("avx2")) return "avx2";
#endif
    TORCH_CHECK(may("portable"), "PYDML_ISA: got '", wanted,
                "', wanted portable, avx2 or avx512, and a CPU that has it");
    return "portable";
  }();
  return chosen;
}

template <class R>
const Kernels<R>& kernels() {
  static const Kernels<R> table = [] {
    Kernels<R> k{};
    const char* isa = isa_name();
#if defined(__x86_64__)
    if (!std::strcmp(isa, "avx512")) {
      if constexpr (std::is_same_v<R, float>)
        avx512::fill_kernels_float(k);
      else
        avx512::fill_kernels_double(k);
      return k;
    }
    if (!std::strcmp(isa, "avx2")) {
      if constexpr (std::is_same_v<R, float>)
        avx2::fill_kernels_float(k);
      else
        avx2::fill_kernels_double(k);
      return k;
    }
#endif
    if constexpr (std::is_same_v<R, float>)
      portable::fill_kernels_float(k);
    else
      portable::fill_kernels_double(k);
    return k;
  }();
  return table;
}

int policy_id(c10::string_view name) {
  int id = 0;
#define PYDML_NAME(known, Policy) \
  if (name == #known) return id;  \
  ++id;
  PYDML_POLICIES(PYDML_NAME)
#undef PYDML_NAME
  TORCH_CHECK(false, "policy: got '", name, "', which the C++ kernels do not know");
}

std::vector<Slot> slots_of(int policy) {
  std::vector<std::vector<Slot>> all;
#define PYDML_SLOTS(name, Policy) all.emplace_back(std::begin(Policy<float>::slots), std::end(Policy<float>::slots));
  PYDML_POLICIES(PYDML_SLOTS)
#undef PYDML_SLOTS
  return all[policy];
}

void check_params(int policy, size_t given) {
  const size_t wanted[] = {
#define PYDML_COUNT(name, Policy) sizeof(Policy<float>) / sizeof(float),
      PYDML_POLICIES(PYDML_COUNT)
#undef PYDML_COUNT
  };
  TORCH_CHECK(given == wanted[policy], "params: got ", given, " numbers, wanted ", wanted[policy]);
}

View view_of(c10::string_view name) {
  if (name == "dot") return View::dot;
  if (name == "cosine") return View::cosine;
  if (name == "euclidean") return View::euclidean;
  TORCH_CHECK(name == "squared", "view: got '", name, "', wanted dot, cosine, euclidean or squared");
  return View::squared;
}

std::vector<Round> rounds(int row_blocks, int col_blocks, bool symmetric) {
  std::vector<Round> all;
  if (!symmetric) {
    const int n = std::min(row_blocks, col_blocks), longer = std::max(row_blocks, col_blocks);
    for (int r = 0; r < n; ++r) {
      Round& round = all.emplace_back(n);
      for (int i = 0; i < n; ++i) {
        const int64_t strip = (i + r) % n;
        for (int j = int(strip * longer / n); j < int((strip + 1) * longer / n); ++j)
          row_blocks <= col_blocks ? round[i].emplace_back(i, j) : round[i].emplace_back(j, i);
      }
    }
    return all;
  }
  Round& diagonal = all.emplace_back();
  for (int i = 0; i < row_blocks; ++i) diagonal.push_back({Block(i, i)});
  const int n = row_blocks + row_blocks % 2;  // an odd number of players gets a bye
  for (int r = 0; r + 1 < n; ++r) {
    Round& round = all.emplace_back();
    for (int p = 0; p < n / 2; ++p) {  // the circle method: player n-1 stays, the others turn
      const int a = p == 0 ? n - 1 : (r + p) % (n - 1), b = (r + n - 1 - p) % (n - 1);
      if (std::max(a, b) < row_blocks) round.push_back({Block(std::min(a, b), std::max(a, b))});
    }
  }
  return all;
}

namespace {

constexpr double kTiny = 1e-12;  // ‖z‖ is clamped here, as torch.nn.functional.normalize does
// Rows whose spread is this little of their mean square are centred, and the number of rows that are looked at.
constexpr double kCollapsed = 1.0 / 32;
constexpr int64_t kLookedAt = 64;

template <class R>
at::Tensor wrap(R* data, int64_t rows, int64_t cols) {
  return at::from_blob(data, {rows, cols}, at::CPU(c10::CppTypeToScalarType<R>::value));
}

// The stable order of labels. They mostly number classes, so that counting them is enough.
std::vector<int64_t> sorted_order(const int64_t* y, int64_t n) {
  std::vector<int64_t> order(n);
  const auto [least, most] = std::minmax_element(y, y + n);
  const uint64_t range = uint64_t(*most) - uint64_t(*least);
  if (range >= uint64_t(2 * n + 1024)) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return y[a] < y[b]; });
    return order;
  }
  std::vector<int64_t> start(range + 2, 0);
  for (int64_t i = 0; i < n; ++i) ++start[y[i] - *least + 1];
  std::partial_sum(start.begin(), start.end(), start.begin());
  for (int64_t i = 0; i < n; ++i) order[start[y[i] - *least]++] = i;
  return order;
}

// Labels of columns where all that no row has (`rows`, sorted) have become one. Nobody asks for the order of those, so
// they keep that in which they lie in memory and are read fastest. Labels that are sorted stay as they are.
at::Tensor asked_for(const at::Tensor& labels, const std::vector<int64_t>& rows) {
  const at::Tensor out = labels.clone(at::MemoryFormat::Contiguous);
  int64_t *const y = out.data_ptr<int64_t>(), *const end = y + out.numel();
  if (rows.empty() || std::is_sorted(y, end)) return out;
  const int64_t least = rows.front(), most = rows.back();
  int64_t other = most;  // becomes the next label that no row has, upwards or else downwards
  if (most < std::numeric_limits<int64_t>::max()) {
    ++other;
  } else {
    for (auto row = rows.rbegin(); row != rows.rend() && *row >= other; ++row) other -= *row == other;
  }
  const uint64_t range = uint64_t(most) - uint64_t(least);
  std::vector<char> table(range < uint64_t(out.numel()) ? range + 1 : 0);
  for (size_t i = 0; !table.empty() && i < rows.size(); ++i) table[rows[i] - least] = 1;
  for (int64_t* at = y; at < end; ++at) {
    const bool inside = *at >= least && *at <= most;
    const bool asked =
        inside && (table.empty() ? std::binary_search(rows.begin(), rows.end(), *at) : table[*at - least] != 0);
    *at = asked ? *at : other;
  }
  return out;
}

// A loop over rows that may be split between threads anywhere: nothing is added up across rows.
template <class F>
void for_rows(int64_t n, int64_t work, const F& f) {
  at::parallel_for(0, n, std::max<int64_t>(1, 32768 / std::max<int64_t>(work, 1)), f);
}

}  // namespace

template <class R>
Vectors<R>::Vectors(const at::Tensor& given, const at::Tensor& labels, bool unit, Keep keep, int64_t group)
    : z(given), normalize(unit) {
  TORCH_CHECK(given.dim() == 2 && given.size(1) > 0, "embeddings: got shape ", given.sizes(), ", wanted [n, d], d > 0");
  TORCH_CHECK(at::isFloatingType(given.scalar_type()), "embeddings: got dtype ", given.scalar_type(),
              ", wanted floating-point numbers");
  TORCH_CHECK(labels.dim() == 1, "labels: got shape ", labels.sizes(), ", wanted 1 dimension");
  const at::Tensor data = given.to(compute_type(given));
  const int64_t n = data.size(0), d = data.size(1), groups = labels.size(0);
  TORCH_CHECK(groups * group == n, "labels: got ", groups, " for ", n, " rows");
  const at::Tensor given_labels = labels.contiguous();
  const int64_t* y = given_labels.template const_data_ptr<int64_t>();
  label.assign(y, y + groups);
  const bool sorted = std::is_sorted(label.begin(), label.end());
  if (!sorted) {
    TORCH_CHECK(group == 1, "labels of pooled columns must be sorted");
    order = sorted_order(y, n);
    for (int64_t i = 0; i < n; ++i) label[i] = y[order[i]];
  }
  norm.resize(n);
  const auto& k = kernels<R>();
  const R* from = data.template const_data_ptr<R>();
  const int64_t s0 = data.stride(0), s1 = data.stride(1);
  const bool rows_contiguous = s1 == 1 || d == 1, cols_contiguous = s0 == 1;
  loose = keep == Keep::always && !sorted && rows_contiguous;
  if (loose || (keep != Keep::never && sorted && (rows_contiguous || cols_contiguous))) {
    x = data;
    if (rows_contiguous) {
      std::vector<R> square(n);  // of the rows as they lie in memory
      for_rows(n, d, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) k.dot(from + i * s0, from + i * s0, d, &square[i]);
      });
      for (int64_t i = 0; i < n; ++i) norm[i] = square[place(i)];
    } else {
      for_rows(n, d, [&](int64_t begin, int64_t end) {
        std::fill(norm.begin() + begin, norm.begin() + end, R(0));
        for (int64_t c = 0; c < d; ++c)
          for (int64_t i = begin; i < end; ++i) norm[i] += from[i + c * s1] * from[i + c * s1];
      });
    }
    for (R& v : norm) v = std::sqrt(v);
    if (normalize) {
      scale.resize(n);
      for (int64_t i = 0; i < n; ++i) scale[i] = 1 / std::max(norm[i], R(kTiny));
    }
  } else {
    const at::Tensor source = rows_contiguous ? data : data.contiguous();
    const R* rows = source.template const_data_ptr<R>();
    const int64_t stride = source.stride(0);
    x = at::empty({n, d}, source.options());
    R* to = x.template data_ptr<R>();
    for_rows(n, d, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const R* v = rows + place(i) * stride;
        R square;
        k.dot(v, v, d, &square);
        norm[i] = std::sqrt(square);
        const R factor = normalize ? 1 / std::max(norm[i], R(kTiny)) : R(1);
        for (int64_t c = 0; c < d; ++c) to[i * d + c] = v[c] * factor;
      }
    });
  }
  finite = true;
  size.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(norm[i])) {  // a bad number, or good ones whose squares overflow: such a row is a zero row
      const R* v = from + place(i) * s0;
      for (int64_t c = 0; c < d; ++c) finite = finite && std::isfinite(v[c * s1]);
    }
    size[i] = !normalize ? norm[i] * norm[i] : std::isfinite(norm[i]) ? R(1) : R(0);
    if (normalize && norm[i] <= R(kTiny)) {  // no unit row, and its norm may have underflowed
      std::vector<R> copy(d);
      const R* v = row(i, copy.data());
      k.dot(v, v, d, &size[i]);
      clamped = true;
    }
  }
}

template <class R>
std::vector<R> Vectors<R>::centre() const {
  const int64_t d = x.size(1), looked_at = std::min(n(), kLookedAt);
  std::vector<R> mean(d), copy(d);
  R square = 0, of_mean;
  for (int64_t e = 0; e < looked_at; ++e) {
    const int64_t i = e * n() / looked_at;
    kernels<R>().axpy(R(1) / R(looked_at), row(i, copy.data()), mean.data(), d);
    square += size[i] / R(looked_at);
  }
  kernels<R>().dot(mean.data(), mean.data(), d, &of_mean);
  const bool collapsed = looked_at > 1 && square - of_mean < R(kCollapsed) * square;
  return collapsed ? mean : std::vector<R>();
}

template <class R>
void Vectors<R>::centre_on(const std::vector<R>& centre) {
  unit = x;
  x = at::empty_like(unit);
  const R* from = unit.template const_data_ptr<R>();
  R* to = x.template data_ptr<R>();
  const int64_t d = x.size(1);
  for_rows(n(), d, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t c = 0; c < d; ++c) to[i * d + c] = from[i * d + c] - centre[c];
      kernels<R>().dot(to + i * d, to + i * d, d, &size[i]);
    }
  });
}

template <class R>
const R* Vectors<R>::row(int64_t i, R* copy) const {
  const R* v = x.template const_data_ptr<R>() + (loose ? order[i] : i) * x.stride(0);
  if (scale.empty() && x.stride(1) == 1) return v;
  const R factor = scale.empty() ? R(1) : scale[i];
  for (int64_t c = 0; c < x.size(1); ++c) copy[c] = v[c * x.stride(1)] * factor;
  return copy;
}

template <class R>
at::Tensor Vectors<R>::span(int64_t first, int64_t count, Workspace<R>& w) const {
  if (!loose) return x.narrow(0, first, count);
  const int64_t d = x.size(1), stride = x.stride(0);
  if (first < w.gathered_first || first + count > w.gathered_first + w.gathered_rows) {
    constexpr int64_t ahead = 16;  // rows lie anywhere in memory: ask for them before they are needed
    const R* from = x.template const_data_ptr<R>();
    w.gathered.resize(std::max<size_t>(w.gathered.size(), size_t(count * d)));
    for (int64_t i = 0; i < count; ++i) {
      if (i + ahead < count)
        for (int64_t c = 0; c < d; c += 64 / int64_t(sizeof(R)))
          __builtin_prefetch(from + order[first + i + ahead] * stride + c);
      const R *v = from + order[first + i] * stride, factor = scale.empty() ? R(1) : scale[first + i];
      R* to = w.gathered.data() + i * d;
      for (int64_t c = 0; c < d; ++c) to[c] = v[c] * factor;
    }
    w.gathered_first = first, w.gathered_rows = count;
  }
  return wrap(w.gathered.data() + (first - w.gathered_first) * d, count, d);
}

template <class R>
void Vectors<R>::start_gradient() {
  grad = at::zeros_like(x);  // in the layout of x, which is that of z where it is not a copy
}

template <class R>
void Vectors<R>::add_to_gradient(int64_t i, R a, const R* v) {
  R* g = grad.template data_ptr<R>() + i * grad.stride(0);
  const int64_t d = grad.size(1), step = grad.stride(1);
  if (step == 1) return kernels<R>().axpy(a, v, g, d);
  for (int64_t c = 0; c < d; ++c) g[c * step] += a * v[c];
}

template <class R>
at::Tensor Vectors<R>::gradient() {
  const int64_t n = grad.size(0), d = grad.size(1);
  const bool direct = order.empty() && x.is_same(z);  // the gradient is laid out as the answer
  R* g = grad.template data_ptr<R>();
  const at::Tensor& from = unit.defined() ? unit : x;
  const R* v = from.template const_data_ptr<R>();
  const int64_t g0 = grad.stride(0), g1 = grad.stride(1), x0 = from.stride(0), x1 = from.stride(1);
  if (normalize && g1 != 1) {  // column by column: neighbours in memory are neighbouring rows
    for_rows(n, d, [&](int64_t begin, int64_t end) {
      std::vector<R> radial(end - begin, R(0));
      for (int64_t c = 0; c < d; ++c)
        for (int64_t i = begin; i < end; ++i) radial[i - begin] += g[i * g0 + c * g1] * v[i * x0 + c * x1];
      for (int64_t c = 0; c < d; ++c)
        for (int64_t i = begin; i < end; ++i) {
          const R s = scale.empty() ? R(1) : scale[i], along = norm[i] > R(kTiny) ? radial[i - begin] * s * s : R(0);
          R& value = g[i * g0 + c * g1];
          value = (value - along * v[i * x0 + c * x1]) / std::max(norm[i], R(kTiny));
        }
    });
  } else if (normalize) {
    for_rows(n, d, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const R s = scale.empty() ? R(1) : scale[i], inverse = 1 / std::max(norm[i], R(kTiny));
        R radial;
        const R* at = v + (loose ? order[i] : i) * x0;
        kernels<R>().dot(g + i * g0, at, d, &radial);
        const R along = norm[i] > R(kTiny) ? radial * s * s : R(0);
        for (int64_t c = 0; c < d; ++c) g[i * g0 + c] = (g[i * g0 + c] - along * at[c]) * inverse;
      }
    });
  }
  if (!finite) grad.fill_(std::nan(""));
  if (direct) return grad;
  at::Tensor out = at::empty_like(z);
  if (!order.empty()) {
    at::Tensor unsorted = at::empty_like(grad);
    R* to = unsorted.template data_ptr<R>();
    for_rows(n, d, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) std::memcpy(to + order[i] * d, g + i * g0, size_t(d) * sizeof(R));
    });
    if (out.scalar_type() == unsorted.scalar_type() && out.is_contiguous()) return unsorted;
    return out.copy_(unsorted);
  }
  return out.scalar_type() == grad.scalar_type() && out.strides() == grad.strides() ? grad : out.copy_(grad);
}

// Does what the columns are said to be fit together? Before anything is made of them.
static int64_t check_columns(const at::Tensor& rows, const std::optional<at::Tensor>& cols,
                             const std::optional<at::Tensor>& labels, View view, int64_t pooled) {
  TORCH_CHECK(rows.dim() == 2, "rows: got shape ", rows.sizes(), ", wanted [n, d]");
  TORCH_CHECK(pooled >= 1 && pooled <= kMostPooled, "pool_size: got ", pooled, ", wanted 1 to ", kMostPooled);
  TORCH_CHECK(pooled == 1 || (cols && view == View::dot), "pool_size: got ", pooled,
              ", wanted 1 but for dots with columns");
  if (!cols) return pooled;
  TORCH_CHECK(cols->dim() == 2 && cols->size(1) == rows.size(1), "cols: got shape ", cols->sizes(), ", wanted [n, ",
              rows.size(1), "]");
  TORCH_CHECK(compute_type(*cols) == compute_type(rows), "cols: got dtype ", cols->scalar_type(), " beside rows of ",
              rows.scalar_type(), ", wanted both in fp64 or neither");
  TORCH_CHECK(labels, "col_labels: got none, wanted one for each column");
  return pooled;
}

template <class R>
Matrix<R>::Matrix(const at::Tensor& rows, const std::optional<at::Tensor>& cols, const at::Tensor& row_labels,
                  const std::optional<at::Tensor>& col_labels, const std::optional<at::Tensor>& selves, View v,
                  bool normalize, Ties t, int64_t pooled, R sharp)
    : k(kernels<R>()),
      view(v),
      ties(t),
      symmetric(!cols.has_value()),
      pool(check_columns(rows, cols, col_labels, v, pooled)),
      sharpness(sharp),
      row(rows, row_labels, normalize, Keep::never, 1),
      centre(v == View::euclidean || v == View::squared ? row.centre() : std::vector<R>()),
      other(symmetric         ? nullptr
            : !centre.empty() ? new Vectors<R>(*cols, *col_labels, normalize, Keep::never, pooled)
            : rows.size(0) <= cols->size(0) / 4
                ? new Vectors<R>(*cols, asked_for(*col_labels, row.label), normalize, Keep::always, pooled)
                : new Vectors<R>(*cols, *col_labels, normalize, Keep::if_sorted, pooled)),
      col(symmetric ? row : *other),
      tangent(normalize && centre.empty() && !row.clamped && !col.clamped),
      n_rows(row.n()),
      n_cols(col.n() / pooled),
      d(row.x.size(1)),
      T(block_size(symmetric ? n_rows : std::max(n_rows, n_cols))),
      col_block(std::max<int64_t>(1, T / pooled)),
      finite(row.finite && col.finite) {
  Watched::start();
  if (!centre.empty()) {
    row.centre_on(centre);
    if (other) other->centre_on(centre);
  }
  same0.resize(n_rows);
  same1.resize(n_rows);
  for (int64_t i = 0, j = 0; i < n_rows;) {
    const int64_t y = row.label[i];
    int64_t end = i;
    while (end < n_rows && row.label[end] == y) ++end;
    if (symmetric) {
      j = i;
    } else {
      j = std::lower_bound(col.label.begin() + j, col.label.end(), y) - col.label.begin();
    }
    const int64_t last =
        symmetric ? end : std::upper_bound(col.label.begin() + j, col.label.end(), y) - col.label.begin();
    if (last > j && (!symmetric || end - i > 1)) classes.push_back({i, end, j, last});
    for (; i < end; ++i) same0[i] = j, same1[i] = last;
  }
  if (!selves) return;
  TORCH_CHECK(!symmetric, "selves: got them without columns, wanted both");
  const at::Tensor given = check_places("selves", *selves, -1, n_cols);
  check_shape("selves", given, {n_rows});
  self.resize(n_rows);
  for (int64_t i = 0; i < n_rows; ++i) {  // it has the label of its row: look among those, which are in rising order
    const int64_t column = given.template const_data_ptr<int64_t>()[row.place(i)];
    const auto begin = col.order.begin();
    if (col.order.empty()) {
      self[i] = column;
    } else {
      const auto found = std::lower_bound(begin + same0[i], begin + same1[i], column);
      self[i] = found != begin + same1[i] && *found == column ? found - begin : -1;
    }
  }
}

template <class R>
std::vector<Workspace<R>> Matrix<R>::workspaces() const {
  std::vector<Workspace<R>> all(at::get_num_threads());
  for (auto& w : all) {
    w.u.resize(T * col_block);
    if (pool > 1) w.raw.resize(T * col_block * pool);
    w.scratch.resize(2 * T + 4 * col_block);
    w.x.resize(d);
    w.y.resize(d);
    w.skip0.resize(T);
    w.skip1.resize(T);
  }
  return all;
}

template <class R>
void Matrix<R>::tile(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) const {
  Watched::look();
  const int64_t wide = int64_t(nj) * pool, first = j0 * pool;
  R* out = pool > 1 ? w.raw.data() : w.u.data();
  // MKL's fp64 product gives equal columns different bits on some CPUs, by whether their number is odd
  const bool dots = ties == Ties::exact ? sizeof(R) == 8 : ni * wide <= 64;
  if (dots) {
    for (int i = 0; i < ni; ++i) {
      const R* x = row.row(i0 + i, w.x.data());
      for (int64_t j = 0; j < wide; ++j) k.dot(x, col.row(first + j, w.y.data()), d, out + i * wide + j);
    }
  } else {
    // BLAS has other kernels for the smallest products, with other bits: they are cut out of larger ones. Those of a
    // symmetric matrix are so large that some of the classes that follow are in them too.
    const int64_t least = ties != Ties::exact ? 1 : symmetric ? 32 : 16;
    const int64_t mi = std::max<int64_t>(ni, std::min(least, row.n())), mj = std::max(wide, std::min(least, col.n()));
    const int64_t i1 = std::min(i0, row.n() - mi), j1 = std::min(first, col.n() - mj);
    const bool cut = mi > ni || mj > wide;
    const bool there = cut && i0 >= w.window_i && i0 + ni <= w.window_i + w.window_rows && first >= w.window_j &&
                       first + wide <= w.window_j + w.window_cols;
    if (!there) {
      if (cut) {
        w.window.resize(mi * mj);
        w.window_i = i1, w.window_j = j1, w.window_rows = mi, w.window_cols = mj;
      }
      at::Tensor s = wrap(cut ? w.window.data() : out, mi, mj);
      const at::AutoDispatchBelowADInplaceOrView guard;
      at::mm_out(s, row.x.narrow(0, i1, mi), col.span(j1, mj, w).t());
    }
    const R* from = w.window.data() + (i0 - w.window_i) * w.window_cols + (first - w.window_j);
    for (int i = 0; cut && i < ni; ++i) std::copy_n(from + i * w.window_cols, wide, out + i * wide);
  }
  const R* scale = dots ? nullptr : col.late_scale(first);
  w.near.clear();
  if (k.to_view(view, out, wide, ni, int(wide), scale, row.size.data() + i0, col.size.data() + first, kNear<R>))
    mend(i0, ni, j0, nj, w);
  if (pool > 1) k.pool(out, wide, ni, nj, int(pool), sharpness, w.u.data());
}

// D² of pairs so near that 2-2S has lost its digits, from the rows themselves.
template <class R>
void Matrix<R>::mend(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) const {
  for (int i = 0; i < ni; ++i)
    for (int j = 0; j < nj; ++j) {
      if (symmetric && i0 + i == j0 + j) continue;
      R& u = w.u[int64_t(i) * nj + j];
      const R both = row.size[i0 + i] + col.size[j0 + j];
      const R d2 = view == View::cosine ? both - 2 * u : view == View::squared ? -u : u * u;
      if (!(d2 < kNear<R> * both * R(1.001))) continue;
      R exact;
      k.squared_distance(row.row(i0 + i, w.x.data()), col.row(j0 + j, w.y.data()), d, &exact);
      u = view == View::cosine ? (both - exact) / 2 : view == View::squared ? -exact : -std::sqrt(exact);
      w.near.emplace_back(i, j);
    }
}

template <class R>
void Matrix<R>::negatives(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) const {
  for (int i = 0; i < ni; ++i) {
    const int64_t from = symmetric ? j0 : same0[i0 + i];  // sorted by label: what is before the class is below it
    w.skip0[i] = int(std::clamp<int64_t>(from - j0, 0, nj));
    w.skip1[i] = int(std::clamp<int64_t>(same1[i0 + i] - j0, w.skip0[i], nj));
  }
}

template <class R>
void Matrix<R>::positives(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) const {
  for (int i = 0; i < ni; ++i) {
    const int64_t own = symmetric ? i0 + i : self.empty() ? -1 : self[i0 + i];
    w.skip0[i] = symmetric ? 0 : int(std::clamp<int64_t>(own - j0, 0, nj));
    w.skip1[i] = own < 0 ? w.skip0[i] : int(std::clamp<int64_t>(own + 1 - j0, 0, nj));
  }
}

template <class R>
void Matrix<R>::start_gradient(bool want_rows, bool want_cols) {
  want_rows_ = want_rows;
  want_cols_ = symmetric ? want_rows : want_cols;
  if (want_rows) row.start_gradient();
  if (want_cols && !symmetric) col.start_gradient();
}

template <class R>
R Matrix<R>::coefficient(R weight, R u) const {
  if (view == View::euclidean) return u < 0 ? weight / u : R(0);  // at D=0 the gradient of D is 0
  return view == View::squared ? -2 * weight : weight;
}

template <class R>
void Matrix<R>::push(int64_t i, int64_t j, R q, Workspace<R>& w) {
  const R *x = row.row(i, w.x.data()), *y = col.row(j, w.y.data());
  R* away = w.scratch.data();
  if (int64_t(w.scratch.size()) < d) w.scratch.resize(d), away = w.scratch.data();
  for (int64_t c = 0; c < d; ++c) away[c] = x[c] - y[c];
  if (want_rows_) row.add_to_gradient(i, q, away);
  if (want_cols_) col.add_to_gradient(j, -q, away);
}

template <class R>
void Matrix<R>::keep(int ni, int nj, Workspace<R>& w) const {
  if (is_distance() || pool > 1) w.kept.assign(w.u.begin(), w.u.begin() + int64_t(ni) * nj);
}

template <class R>
void Matrix<R>::add_weight(int64_t i, int64_t j, R weight, R u, Workspace<R>& w) {
  const R q = coefficient(weight, u);
  if (is_distance() && !tangent) return push(i, j, q, w);
  const R sign = is_distance() ? R(-1) : R(1);
  if (is_distance()) {
    const R d2 = view == View::squared ? -u : u * u;
    if (d2 < (sizeof(R) == 4 ? R(4e-5) : R(4e-13))) return push(i, j, q, w);
  }
  if (want_rows_) row.add_to_gradient(i, sign * q, col.row(j, w.y.data()));
  if (want_cols_) col.add_to_gradient(j, sign * q, row.row(i, w.x.data()));
}

template <class R>
void Matrix<R>::add_weights(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) {
  int64_t first = j0, wide = nj;
  R* q = w.u.data();
  if (pool > 1) {
    k.unpool(w.raw.data(), nj * pool, ni, nj, int(pool), sharpness, w.kept.data(), q);
    first = j0 * pool, wide = nj * pool, q = w.raw.data();
  }
  if (is_distance()) {
    for (const auto& [i, j] : w.near) {  // differences first: q is huge where D is tiny
      push(i0 + i, j0 + j, coefficient(q[int64_t(i) * nj + j], w.kept[int64_t(i) * nj + j]), w);
      q[int64_t(i) * nj + j] = 0;
    }
    k.to_coefficient(view, w.kept.data(), q, int64_t(ni) * nj);
  }
  const double sign = is_distance() ? -1 : 1;
  const R factor = R(sign);
  if (ni * wide <= 64) {
    for (int i = 0; i < ni; ++i)
      for (int64_t j = 0; j < wide; ++j) {
        const R weight = q[i * wide + j];
        if (weight == 0) continue;
        if (is_distance() && !tangent) {
          push(i0 + i, first + j, weight, w);
          continue;
        }
        if (want_rows_) row.add_to_gradient(i0 + i, factor * weight, col.row(first + j, w.y.data()));
        if (want_cols_) col.add_to_gradient(first + j, factor * weight, row.row(i0 + i, w.x.data()));
      }
    return;
  }
  if (is_distance() && !tangent) {  // Σ_j q_ij·x_i, and the same for columns
    for (int i = 0; i < ni; ++i) {
      R total = 0;
      for (int64_t j = 0; j < wide; ++j) total += q[i * wide + j];
      if (want_rows_) row.add_to_gradient(i0 + i, total, row.row(i0 + i, w.x.data()));
    }
    for (int64_t j = 0; want_cols_ && j < wide; ++j) {
      R total = 0;
      for (int i = 0; i < ni; ++i) total += q[i * wide + j];
      col.add_to_gradient(first + j, total, col.row(first + j, w.y.data()));
    }
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor Q = wrap(q, ni, wide);
  if (want_cols_) col.grad.narrow(0, first, wide).addmm_(Q.t(), row.x.narrow(0, i0, ni), 1, sign);
  if (want_rows_) {
    if (const R* scale = col.late_scale(first))
      for (int i = 0; i < ni; ++i)
        for (int64_t j = 0; j < wide; ++j) q[i * wide + j] *= scale[j];
    row.grad.narrow(0, i0, ni).addmm_(Q, col.span(first, wide, w), 1, sign);
  }
}

template <class R>
void Matrix<R>::add_weights_sparsely(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) {
  int64_t live = 0;
  const int64_t all = int64_t(ni) * nj;
  for (int64_t e = 0; e < all; ++e) live += w.u[e] != 0;
  if (pool > 1 || live * 16 > all) return add_weights(i0, ni, j0, nj, w);
  for (int64_t e = 0; live && e < all; ++e)
    if (w.u[e] != 0) add_weight(i0 + e / nj, j0 + e % nj, w.u[e], is_distance() ? w.kept[e] : R(0), w);
}

template <class R>
std::tuple<at::Tensor, at::Tensor> Matrix<R>::gradients() {
  const at::Tensor nothing = at::empty({0}, row.z.options());
  row.finite = col.finite = finite;
  at::Tensor d_rows = want_rows_ ? row.gradient() : nothing;
  return {d_rows, !symmetric && want_cols_ ? col.gradient() : nothing.clone()};
}

#define PYDML_INSTANTIATE(R)               \
  template const Kernels<R>& kernels<R>(); \
  template struct Vectors<R>;              \
  template class Matrix<R>;
PYDML_INSTANTIATE(float)
PYDML_INSTANTIATE(double)
#undef PYDML_INSTANTIATE

}  // namespace pydml
