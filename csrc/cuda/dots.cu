// Listed pairs: their oriented similarities, and the gradients that come back. A warp does a pair, or gathers what all
// pairs of one row send to it, in their order.
#include "cuda/launchers.h"
#include "cuda/tile.cuh"

namespace pydml {
namespace {

constexpr int kWarps = kThreads / 32, kHeld = 4;  // columns of a row in a thread's registers

__device__ __forceinline__ int64_t warp_number() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; }

template <class M>
__device__ __forceinline__ void measure(const Matrix& m, int64_t i, int64_t j, float& dot, float& d2) {
  dot = d2 = 0;
  for (int k = int(threadIdx.x) % 32; k < m.d; k += 32) {
    const float x = entry<M>(m, m.own, i, k), y = entry<M>(m, m.other, j, k);
    dot = Fma(x, y, dot), d2 = Fma(x - y, x - y, d2);
  }
  dot = warp_sum(dot), d2 = warp_sum(d2);
}

template <class M>
__global__ void __launch_bounds__(kThreads, 4) similarities(const Matrix m, const DotsArguments a) {
  const int64_t n = warp_number();
  if (n >= a.n) return;
  float u, d2;
  measure<M>(m, a.i[n], a.j[n], u, d2);
  const bool close = d2 < kNear * Fma(2.f, u, d2);  // |x|²+|y|² = D²+2S
  if (View(m.view) == View::cosine && close && are_unit(m, a.i[n], a.j[n])) u = Fma(-0.5f, d2, 1.f);
  if (View(m.view) == View::squared) u = -d2;
  if (View(m.view) == View::euclidean) u = -Sqrt(d2);
  if (threadIdx.x % 32 == 0) a.u[n] = *m.trouble == 0 ? u : NAN;
}

// dL/du -> the factor of y_j, or of x_i-y_j where u is a distance.
template <class M>
__global__ void __launch_bounds__(kThreads, 4) factors(const Matrix m, const DotsArguments a) {
  const int64_t n = warp_number();
  if (n >= a.n) return;
  float factor = a.grad[n];
  if (View(m.view) == View::squared) factor *= -2;
  if (View(m.view) == View::euclidean) {
    float dot, d2;
    measure<M>(m, a.i[n], a.j[n], dot, d2);
    factor = d2 > 0 ? -factor / Sqrt(d2) : 0.f;  // at D=0 the gradient of D is 0
  }
  if (threadIdx.x % 32 == 0) a.u[n] = factor;
}

template <class M>
__global__ void __launch_bounds__(kThreads, 4) gather(const Matrix m, const GatherArguments a) {
  const int64_t i = warp_number();
  if (i >= m.own.n) return;
  const bool distance = is_distance(m);
  for (int k0 = int(threadIdx.x) % 32; k0 < m.d; k0 += 32 * kHeld) {
    float g[kHeld] = {};
    for (int64_t at = a.start[i]; at < a.start[i + 1]; ++at) {
      const int64_t n = a.order[at], j = a.partner[n];
#pragma unroll
      for (int e = 0; e < kHeld; ++e) {
        const int k = k0 + 32 * e;
        if (k >= m.d) continue;
        const float y = entry<M>(m, m.other, j, k);
        g[e] = Fma(a.factor[n], distance ? entry<M>(m, m.own, i, k) - y : y, g[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < kHeld; ++e)
      if (k0 + 32 * e < m.d) a.parts[i * m.d + k0 + 32 * e] += g[e];
  }
}

template <class F>
int each_warp(int64_t n, const Matrix& m, const F& kernel) {
  return n ? with_math(m.math, [&](auto math) { return kernel(math, dim3(unsigned((n + kWarps - 1) / kWarps))); }) : 0;
}

}  // namespace

int launch_dots(const Matrix& m, const DotsArguments& a, void* stream) {
  return each_warp(a.n, m, [&](auto math, dim3 grid) {
    using M = decltype(math);
    return a.grad ? launch(&factors<M>, grid, kThreads, 0, stream, m, a)
                  : launch(&similarities<M>, grid, kThreads, 0, stream, m, a);
  });
}

int launch_gather(const Matrix& m, const GatherArguments& a, void* stream) {
  return each_warp(m.own.n, m, [&](auto math, dim3 grid) {
    return launch(&gather<decltype(math)>, grid, kThreads, 0, stream, m, a);
  });
}

}  // namespace pydml
