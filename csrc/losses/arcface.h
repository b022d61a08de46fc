// Softmax logits with an angular margin on the target, Deng et al. 2019, eq. 3.
//   LSE_{positives}(s·cos(θ+m)), guarded past π by cosθ - m·sin m;  LSE_{negatives}(s·cosθ)
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct ArcFace {
  PYDML_LSE_BOTH;
  static constexpr bool sparse = false, mines = false, fields = false;
  R margin, scale;
  PYDML_HD R cos_m() const { return R(Cos(double(margin))); }
  PYDML_HD R sin_m() const { return R(Sin(double(margin))); }
  template <int k>
  PYDML_HD R term(R u, R, R) const {
    if (k == 1) return scale * u;
    const R c = u < -1 ? R(-1) : (u > 1 ? R(1) : u);
    const R sine = Sqrt(Relu(1 - c * c));
    return scale * (c >= -cos_m() ? c * cos_m() - sine * sin_m() : c - margin * sin_m());  // θ <= π-m
  }
  template <int k>
  PYDML_HD R slope(R u, R, R) const {
    if (k == 1) return scale;
    const R sine = Sqrt(Relu(1 - u * u));
    const R cot = sine > 0 ? u / sine : R(0);  // the gradient of sinθ at c=±1 is 0
    return scale * (u >= -cos_m() ? cos_m() + cot * sin_m() : R(1));
  }
};

}  // namespace pydml
