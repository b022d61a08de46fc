// Hinges on both sides, and how many are above 0: contrastive (Hadsell et al. 2006) and margin (Wu et al. 2017) losses.
//   Σ_{positives} [c₊+row_i-u]₊, their number above 0, Σ_{negatives} [u-c₋-row_i]₊, their number above 0
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct Hinge {
  PYDML_SUM_AND_COUNT_BOTH;
  static constexpr bool sparse = true, mines = false, fields = true;
  R c_pos, c_neg;
  template <int k>
  PYDML_HD R excess(R u, R row) const {
    return k < 2 ? c_pos + row - u : u - c_neg - row;
  }
  template <int k>
  PYDML_HD R term(R u, R row, R) const {
    const R e = excess<k>(u, row);
    return k % 2 ? (e > 0 ? R(1) : R(0)) : Relu(e);
  }
  template <int k>
  PYDML_HD R slope(R u, R row, R) const {
    return excess<k>(u, row) > 0 ? (k == 0 ? R(-1) : R(1)) : R(0);
  }
};

}  // namespace pydml
