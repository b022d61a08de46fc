"""What Triton policies are written with: the functions of csrc/policy.h, by the same names in lower case."""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def product(x, y):
    """x·y, rounded before anything is added to it.

    A compiler may make one operation of x·y+z in one pass and not in the other, and then e^{term - stat} is off by the
    last digit of the term: by a factor of e^4 where that is 5e7. It adds nothing to what is one operation already, and
    may not drop this 0, which -0 + 0 needs.
    """
    return tl.fma(x, y, 0.0)


@triton.jit
def larger(x, y):
    """max(x, y), NaN if either is: by itself a GPU takes the other."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu(x):
    return larger(x, 0.0)


@triton.jit
def log1p(y):
    """log(1+y) for 0 <= y <= 1: 2·atanh(y/(2+y)), whose argument is at most 1/3 (the hardware's log is coarse at 1)."""
    z = y / (2.0 + y)
    z2 = z * z
    p = z2 * (1.0 / 17) + 1.0 / 15
    p = p * z2 + 1.0 / 13
    p = p * z2 + 1.0 / 11
    p = p * z2 + 1.0 / 9
    p = p * z2 + 1.0 / 7
    p = p * z2 + 1.0 / 5
    p = p * z2 + 1.0 / 3
    return 2 * z * (p * z2 + 1.0)


@triton.jit
def softplus(t):
    """log(1+e^t)"""
    return relu(t) + log1p(tl.exp(-tl.abs(t)))


@triton.jit
def sigmoid(t):
    """1/(1+e^-t)"""
    e = tl.exp(-tl.abs(t))
    return tl.where(t >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def logaddexp(a, b):
    """log(e^a+e^b), -inf for two sums of nothing"""
    gap = -tl.abs(a - b)
    return larger(a, b) + tl.where(gap == gap, log1p(tl.exp(gap)), 0.0)
