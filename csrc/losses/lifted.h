// Positive pairs of the lifted structure loss, Song et al. 2016, eq. 4, given e = LSE_{negatives}(m₋-D) as the field.
//   J_ij = log(e^{row_i}+e^{col_j}) + c₊ - u
//   Slots: Σ ½[J]₊², Σ [J]₊σ(row_i-col_j), which is its derivative by row_i, and the number of J > 0.
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct Lifted {
  static constexpr Slot slots[3] = {
      {Side::positives, Kind::sum}, {Side::positives, Kind::constant}, {Side::positives, Kind::constant}};
  static constexpr bool sparse = false, mines = false, fields = true;
  R c_pos;
  PYDML_HD R hinge(R u, R row, R col) const { return Relu(LogAddExp(row, col) + c_pos - u); }
  template <int k>
  PYDML_HD R term(R u, R row, R col) const {
    const R j = hinge(u, row, col);
    if (k == 0) return R(0.5) * j * j;
    if (k == 2) return j > 0 ? R(1) : R(0);
    return j > 0 ? j * Sigmoid(row - col) : R(0);
  }
  template <int k>
  PYDML_HD R slope(R u, R row, R col) const {
    return -hinge(u, row, col);
  }
};

}  // namespace pydml
