// Binomial sums and log-sum-exps side by side: BinLifted, Wang et al. 2019, supplement eq. 10.
//   Σ_{positives} softplus(α(λ-u)), LSE_{positives}(-αu), Σ_{negatives} softplus(β(u-λ)), LSE_{negatives}(βu)
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct BinLifted {
  static constexpr Slot slots[4] = {{Side::positives, Kind::sum},
                                    {Side::positives, Kind::log_sum_exp},
                                    {Side::negatives, Kind::sum},
                                    {Side::negatives, Kind::log_sum_exp}};
  static constexpr bool sparse = false, mines = false, fields = false;
  R alpha, beta, base;
  template <int k>
  PYDML_HD R term(R u, R, R) const {
    if (k == 0) return Softplus(alpha * (base - u));
    if (k == 2) return Softplus(beta * (u - base));
    return k == 1 ? -alpha * u : beta * u;
  }
  template <int k>
  PYDML_HD R slope(R u, R, R) const {
    if (k == 0) return -alpha * Sigmoid(alpha * (base - u));
    if (k == 2) return beta * Sigmoid(beta * (u - base));
    return k == 1 ? -alpha : beta;
  }
};

}  // namespace pydml
