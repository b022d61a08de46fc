// What the engine files share: argument types, dispatch on the compute dtype, and the padded positives of every row.
#pragma once
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "cpu/matrix.h"
#include "policy.h"

namespace pydml {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Text = c10::string_view;

// Run f(R()) with R the compute type of z.
template <class F>
auto with_type(const Tensor& z, const F& f) {
  return compute_type(z) == at::kDouble ? f(double()) : f(float());
}

template <class R>
constexpr at::ScalarType type_of() {
  return c10::CppTypeToScalarType<R>::value;
}

template <class R>
Tile<R> bare_tile(const Matrix<R>& m, int ni, int nj, Workspace<R>& w) {
  Tile<R> t{};
  t.u = w.u.data(), t.ld = nj, t.ni = ni, t.nj = nj;
  t.skip0 = w.skip0.data(), t.skip1 = w.skip1.data(), t.symmetric = m.symmetric;
  return t;
}

// The similarities of every row's positives, rising, padded with +inf: [most, n] with the row running fastest.
template <class R>
struct Positives {
  int most = 0;
  int64_t n;
  bool has_nan = false;        // among given ones
  std::vector<int> count;      // [n]
  std::vector<R> u;            // [most, n]
  std::vector<int64_t> place;  // [most, n] sorted place of the column; or, of given ones, their place in the list

  Positives(const Matrix<R>& m, std::vector<Workspace<R>>& work) : n(m.n_rows), count(n, 0) {
    for (const auto& c : m.classes) most = std::max(most, int(c.c1 - c.c0) - (m.symmetric ? 1 : 0));
    u.assign(size_t(most) * n, std::numeric_limits<R>::infinity());
    place.assign(size_t(most) * n, -1);
    m.for_positives(work, [&](int64_t i, int64_t j, R value) { add(i, j, value); });
    sort();
  }

  // Similarities that are known already [n, most], in the order of the rows; +inf: none.
  Positives(const Matrix<R>& m, const char* name, const Tensor& given) : n(m.n_rows), count(n, 0) {
    TORCH_CHECK(given.dim() == 2 && given.size(0) == n, name, ": got shape ", given.sizes(), ", wanted [", n, ", M]");
    TORCH_CHECK(given.scalar_type() == type_of<R>(), name, ": got dtype ", given.scalar_type(), ", wanted ",
                type_of<R>());
    most = int(given.size(1));
    u.assign(size_t(most) * n, std::numeric_limits<R>::infinity());
    place.assign(size_t(most) * n, -1);
    const Tensor values = given.contiguous();
    const R* const from = values.const_data_ptr<R>();
    for (int64_t i = 0; i < n; ++i)
      for (int p = 0; p < most; ++p) {
        const R value = from[m.row.place(i) * most + p];
        if (value != std::numeric_limits<R>::infinity()) add(i, p, value);
        has_nan = has_nan || value != value;
      }
    sort();
  }

  // Values [most, n] of the given ones, in their order and that of the rows.
  template <class T>
  void unsort(const Matrix<R>& m, const std::vector<T>& values, T* out) const {
    for (int64_t i = 0; i < n; ++i)
      for (int p = 0; p < count[i]; ++p) out[m.row.place(i) * most + place[p * n + i]] = values[p * n + i];
  }

 private:
  void sort() {
    std::vector<std::pair<R, int64_t>> row;
    for (int64_t i = 0; i < n; ++i) {
      row.clear();
      for (int p = 0; p < count[i]; ++p) row.emplace_back(u[p * n + i], place[p * n + i]);
      std::sort(row.begin(), row.end(), [](const auto& a, const auto& b) {  // NaN last: an order that holds for all
        const bool a_last = a.first != a.first, b_last = b.first != b.first;
        return a_last != b_last ? b_last : a.first != b.first && !a_last ? a.first < b.first : a.second < b.second;
      });
      for (int p = 0; p < count[i]; ++p) u[p * n + i] = row[p].first, place[p * n + i] = row[p].second;
    }
  }

  void add(int64_t i, int64_t j, R value) {
    const int p = count[i]++;
    u[p * n + i] = value, place[p * n + i] = j;
  }
};

}  // namespace pydml
