// Terms of policies that are plain arithmetic, less a statistic: what no compiler may contract. Compiled by
// test_cuda_gate.py, never run.
#include "losses.h"

namespace pydml {

template <class P>
__device__ void shares(const P& p, const float* u, float* to) {
  to[0] = p.template term<0>(u[0], u[1], u[2]) - u[3];
  to[1] = p.template term<1>(u[0], u[1], u[2]) - u[3];
}

extern "C" __global__ void terms(const float* u, float* to) {
  shares(Exponential<float>{u[4], u[5], u[6], u[7]}, u, to);
  shares(Hinge<float>{u[4], u[5]}, u, to + 2);
}

}  // namespace pydml
