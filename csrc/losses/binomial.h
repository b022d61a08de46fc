// Binomial deviances and the number of pairs, Wang et al. 2019, eq. 9.
//   Σ_{positives} softplus(α(λ-u)), their number, Σ_{negatives} softplus(β(u-λ)), their number
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct Binomial {
  PYDML_SUM_AND_COUNT_BOTH;
  static constexpr bool sparse = false, mines = true, fields = false;
  R alpha, beta, base;
  template <int k>
  PYDML_HD R term(R u, R, R) const {
    if (k % 2) return R(1);
    return Softplus(k == 0 ? alpha * (base - u) : beta * (u - base));
  }
  template <int k>
  PYDML_HD R slope(R u, R, R) const {
    return k == 0 ? -alpha * Sigmoid(alpha * (base - u)) : beta * Sigmoid(beta * (u - base));
  }
};

}  // namespace pydml
