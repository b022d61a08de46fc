// Log-sum-exps of binomial losses, Qi et al. 2020: l₊ = softplus(α(λ-u))/α and l₋ = softplus(β(u-λ))/β, over γ±.
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct DROBinomial {
  PYDML_LSE_BOTH;
  static constexpr bool sparse = false, mines = false, fields = false;
  R alpha, beta, threshold, gamma_pos, gamma_neg;
  template <int k>
  PYDML_HD R term(R u, R, R) const {
    return k == 0 ? Softplus(alpha * (threshold - u)) / (alpha * gamma_pos)
                  : Softplus(beta * (u - threshold)) / (beta * gamma_neg);
  }
  template <int k>
  PYDML_HD R slope(R u, R, R) const {
    return k == 0 ? -Sigmoid(alpha * (threshold - u)) / gamma_pos : Sigmoid(beta * (u - threshold)) / gamma_neg;
  }
};

}  // namespace pydml
