// What policies are written with: the slots that they declare and the functions that they may call. No torch, no std,
// so that a policy compiles under bare g++ and under nvcc unchanged; transcendentals only from here.
#pragma once

#if defined(__CUDACC__)
#define PYDML_HD __host__ __device__ __forceinline__
#else
// Always inlined: the same policy is compiled for several instruction sets, and no copy may be shared between them.
#define PYDML_HD inline __attribute__((always_inline))
#endif

namespace pydml {

enum class Side { positives, negatives };
enum class Kind { log_sum_exp, sum, constant };  // constant: a sum that carries no gradient, a count say

// A row statistic: log Σ e^term or Σ term over one side of the row.
struct Slot {
  Side side;
  Kind kind;
};

// A policy says: slots; whether weights can be exactly 0 (sparse), whether it is used with Multi-Similarity mining
// (mines) and with fields of rows or columns (fields); term<k> = what a pair adds to slot k; slope<k> = d term / du.
#define PYDML_LSE_BOTH \
  static constexpr Slot slots[2] = {{Side::positives, Kind::log_sum_exp}, {Side::negatives, Kind::log_sum_exp}}
#define PYDML_SUM_AND_COUNT_BOTH                                       \
  static constexpr Slot slots[4] = {{Side::positives, Kind::sum},      \
                                    {Side::positives, Kind::constant}, \
                                    {Side::negatives, Kind::sum},      \
                                    {Side::negatives, Kind::constant}}

// a·b + c, rounded once where the target can. No compiler makes one by itself: all of this is compiled without
// contraction (-ffp-contract=off in setup.py, --fmad=false in csrc/cuda/nvcc.py), because e^(term - statistic) is a
// share only if a term has the same bits wherever it is computed, and a product that is rounded in one place and
// contracted in another has not.
template <class R>
PYDML_HD R Fma(R a, R b, R c) {
#if defined(__CUDA_ARCH__)
  return fma(a, b, c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  if constexpr (sizeof(R) == 4)
    return __builtin_fmaf(a, b, c);
  else
    return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

template <class R>
struct Exponent;
template <>
struct Exponent<float> {
  static constexpr float magic = 12582912.f, log2e = 1.44269504088896341f, high = 0.693359375f, low = -2.12194440e-4f,
                         least = -87.f, most = 88.f;
  using Int = int;
  static constexpr Int bias = 127, shift = 23;
  static PYDML_HD float mantissa(float r) {
    float p = 1.9875691500e-4f;
    p = Fma(p, r, 1.3981999507e-3f);
    p = Fma(p, r, 8.3334519073e-3f);
    p = Fma(p, r, 4.1665795894e-2f);
    p = Fma(p, r, 1.6666665459e-1f);
    p = Fma(p, r, 5.0000001201e-1f);
    return Fma(p * r, r, r) + 1.f;
  }
};
template <>
struct Exponent<double> {
  static constexpr double magic = 6755399441055744.0, log2e = 1.44269504088896340736, high = 6.93145751953125e-1,
                          low = 1.42860682030941723212e-6, least = -707.0, most = 709.0;
  using Int = long long;
  static constexpr Int bias = 1023, shift = 52;
  static PYDML_HD double mantissa(double r) {
    const double r2 = r * r;
    const double p =
        r * Fma(Fma(1.26177193074810590878e-4, r2, 3.02994407707441961300e-2), r2, 9.99999999999999999910e-1);
    const double q =
        Fma(Fma(Fma(3.00198505138664455042e-6, r2, 2.52448340349684104192e-3), r2, 2.27265548208155028766e-1), r2,
            2.00000000000000000009e0);
    return 1.0 + 2.0 * p / (q - p);
  }
};

// e^x by a polynomial that compilers vectorise (they do not vectorise a call to expf). 0 below the smallest normal.
template <class R>
PYDML_HD R Exp(R x) {
#if defined(__CUDA_ARCH__)
  return exp(x);
#else
  using E = Exponent<R>;
  const R y = x < E::least ? E::least : (x > E::most ? E::most : x);
  const R shifted = Fma(y, E::log2e, E::magic);  // adding 1.5·2^(mantissa bits) rounds to the nearest integer
  const R n = shifted - E::magic;
  const R r = Fma(-n, E::low, Fma(-n, E::high, y));
  const typename E::Int bits = (static_cast<typename E::Int>(n) + E::bias) << E::shift;
  const R scaled = E::mantissa(r) * __builtin_bit_cast(R, bits);
  return x < E::least ? R(0) : scaled;
#endif
}

// log(1+y) for 0 <= y <= 1: 2·atanh(y/(2+y)), whose argument is at most 1/3.
template <class R>
PYDML_HD R Log1p(R y) {
#if defined(__CUDA_ARCH__)
  return log1p(y);
#else
  const R z = y / (R(2) + y), z2 = z * z;
  constexpr int terms = sizeof(R) == 4 ? 8 : 17;
  R p = R(1) / R(2 * terms + 1);
#if !defined(__CUDACC__)
#pragma GCC unroll 17
#endif
  for (int k = terms - 1; k >= 0; --k) p = Fma(p, z2, R(1) / R(2 * k + 1));
  return 2 * z * p;
#endif
}

template <class R>
PYDML_HD R Abs(R x) {
  return x < 0 ? -x : x;
}
template <class R>
PYDML_HD R Relu(R x) {
  return x > 0 ? x : R(0);
}
// cos and sin of an angle that is a parameter. On a GPU by way of half turns, whose reduction needs no local memory.
PYDML_HD double Cos(double x) {
#if defined(__CUDA_ARCH__)
  return cospi(x * 0.31830988618379067154);
#else
  return __builtin_cos(x);
#endif
}
PYDML_HD double Sin(double x) {
#if defined(__CUDA_ARCH__)
  return sinpi(x * 0.31830988618379067154);
#else
  return __builtin_sin(x);
#endif
}
PYDML_HD float Sqrt(float x) { return __builtin_sqrtf(x); }
PYDML_HD double Sqrt(double x) { return __builtin_sqrt(x); }
// log(1+e^t)
template <class R>
PYDML_HD R Softplus(R t) {
  return Relu(t) + Log1p(Exp(-Abs(t)));
}
// 1/(1+e^-t)
template <class R>
PYDML_HD R Sigmoid(R t) {
  const R e = Exp(-Abs(t));
  return (t >= 0 ? R(1) : e) / (R(1) + e);
}
// log(e^a+e^b), -inf for two sums of nothing
template <class R>
PYDML_HD R LogAddExp(R a, R b) {
  const R top = a > b ? a : b, gap = a > b ? b - a : a - b;
  return top + (gap == gap ? Log1p(Exp(gap)) : R(0));
}

}  // namespace pydml
