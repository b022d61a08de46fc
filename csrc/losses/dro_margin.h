// Log-sum-exps of margin losses, Qi et al. 2020: LSE([m+λ-u]₊/γ₊) and LSE([m+u-λ]₊/γ₋).
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct DROMargin {
  PYDML_LSE_BOTH;
  static constexpr bool sparse = false, mines = false, fields = false;
  R margin, threshold, gamma_pos, gamma_neg;
  template <int k>
  PYDML_HD R term(R u, R, R) const {
    return k == 0 ? Relu(margin + threshold - u) / gamma_pos : Relu(margin + u - threshold) / gamma_neg;
  }
  template <int k>
  PYDML_HD R slope(R u, R, R) const {
    if (k == 0) return margin + threshold - u > 0 ? -1 / gamma_pos : R(0);
    return margin + u - threshold > 0 ? 1 / gamma_neg : R(0);
  }
};

}  // namespace pydml
