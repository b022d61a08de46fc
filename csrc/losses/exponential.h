// Log-sum-exps of scaled similarities: Multi-Similarity (Wang et al. 2019, eq. 15), lifted structures, NCA, softmax and
// Proxy-Anchor losses.
//   P_i = LSE_{positives}(a₊(u-c₊) + col_j),  N_i = LSE_{negatives}(a₋(u-c₋) + col_j)
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct Exponential {
  PYDML_LSE_BOTH;
  static constexpr bool sparse = false, mines = true, fields = true;
  R a_pos, c_pos, a_neg, c_neg;  // order = fields of the Python policy
  template <int k>
  PYDML_HD R term(R u, R, R col) const {
    return (k == 0 ? a_pos * (u - c_pos) : a_neg * (u - c_neg)) + col;
  }
  template <int k>
  PYDML_HD R slope(R, R, R) const {
    return k == 0 ? a_pos : a_neg;
  }
};

}  // namespace pydml
