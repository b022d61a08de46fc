// From a policy's number and parameters to its functions, inside a kernel. A switch that all threads take alike costs
// little beside a tile's exponentials, and spares compiling every kernel nine times.
#pragma once
#include "cuda/tile.cuh"
#include "losses.h"

namespace pydml {

constexpr int kMostSlots = 4, kMostParameters = 5;

struct PolicyChoice {
  int number;  // in the order of csrc/losses.h
  float parameters[kMostParameters];
};

template <class P>
constexpr int slot_count = sizeof(P::slots) / sizeof(Slot);

// f(Int<k>()) for every slot of a policy.
template <class P, class F>
PYDML_HD void for_slots(const F& f) {
  constexpr int n = slot_count<P>;
  static_assert(n <= kMostSlots, "raise kMostSlots");
  f(Int<0>());
  if constexpr (n > 1) f(Int<1>());
  if constexpr (n > 2) f(Int<2>());
  if constexpr (n > 3) f(Int<3>());
}

template <class P>
PYDML_HD P make_policy(const float* parameters) {
  P policy;
  if constexpr (sizeof(P) >= sizeof(float)) {  // a policy is its parameters, in their order
    static_assert(sizeof(P) <= kMostParameters * sizeof(float), "raise kMostParameters");
    __builtin_memcpy(&policy, parameters, sizeof(P));
  }
  return policy;
}

template <class F>
PYDML_HD void with_policy(const PolicyChoice& choice, const F& f) {
  int number = 0;
#define PYDML_CASE(name, Policy) \
  if (choice.number == number++) f(make_policy<Policy<float>>(choice.parameters));
  PYDML_POLICIES(PYDML_CASE)
#undef PYDML_CASE
}

}  // namespace pydml
