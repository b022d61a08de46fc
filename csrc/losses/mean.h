// Sums of u and the number of pairs on both sides: Multi-Similarity mining with equal weights, Wang et al. 2019, §5.1.
#pragma once
#include "policy.h"

namespace pydml {

template <class R>
struct Mean {
  PYDML_SUM_AND_COUNT_BOTH;
  static constexpr bool sparse = false, mines = true, fields = false;
  template <int k>
  PYDML_HD R term(R u, R, R) const {
    return k % 2 ? R(1) : u;
  }
  template <int k>
  PYDML_HD R slope(R, R, R) const {
    return R(1);
  }
};

}  // namespace pydml
