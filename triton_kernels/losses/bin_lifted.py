"""Binomial sums and log-sum-exps side by side: BinLifted, Wang et al. 2019, supplement eq. 10.

Σ_{positives} softplus(α(λ-u)), LSE_{positives}(-αu), Σ_{negatives} softplus(β(u-λ)), LSE_{negatives}(βu)
"""

import triton
import triton.language as tl

from ..functions import product, sigmoid, softplus


@triton.jit
def term(k: tl.constexpr, u, row, col, alpha, beta, base):
    if k == 0:
        return softplus(alpha * (base - u))
    elif k == 1:
        return product(-alpha, u)
    elif k == 2:
        return softplus(beta * (u - base))
    else:
        return product(beta, u)


@triton.jit
def slope(k: tl.constexpr, u, row, col, alpha, beta, base):
    if k == 0:
        return -alpha * sigmoid(alpha * (base - u))
    elif k == 1:
        return tl.zeros_like(u) - alpha
    elif k == 2:
        return beta * sigmoid(beta * (u - base))
    else:
        return tl.zeros_like(u) + beta
