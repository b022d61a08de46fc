"""Log-sum-exps of binomial losses, Qi et al. 2020: l₊ = softplus(α(λ-u))/α, l₋ = softplus(β(u-λ))/β, over γ."""

import triton
import triton.language as tl

from ..functions import product, sigmoid, softplus


@triton.jit
def term(k: tl.constexpr, u, row, col, alpha, beta, threshold, gamma_pos, gamma_neg):
    if k == 0:
        return product(softplus(alpha * (threshold - u)), 1.0 / (alpha * gamma_pos))
    else:
        return product(softplus(beta * (u - threshold)), 1.0 / (beta * gamma_neg))


@triton.jit
def slope(k: tl.constexpr, u, row, col, alpha, beta, threshold, gamma_pos, gamma_neg):
    if k == 0:
        return -sigmoid(alpha * (threshold - u)) / gamma_pos
    else:
        return sigmoid(beta * (u - threshold)) / gamma_neg
