"""Sums of binomial deviances and the number of pairs, Wang et al. 2019, eq. 9.

Σ_{positives} softplus(α(λ-u)), their number, Σ_{negatives} softplus(β(u-λ)), their number
"""

import triton
import triton.language as tl

from ..functions import sigmoid, softplus


@triton.jit
def term(k: tl.constexpr, u, row, col, alpha, beta, base):
    if k == 0:
        return softplus(alpha * (base - u))
    elif k == 2:
        return softplus(beta * (u - base))
    else:
        return tl.zeros_like(u) + 1.0


@triton.jit
def slope(k: tl.constexpr, u, row, col, alpha, beta, base):
    if k == 0:
        return -alpha * sigmoid(alpha * (base - u))
    else:
        return beta * sigmoid(beta * (u - base))
