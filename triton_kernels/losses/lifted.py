"""Positive pairs of the lifted structure loss, Song et al. 2016, eq. 4, given e = LSE_{negatives}(m₋-D) as the field.

J_ij = log(e^{row_i}+e^{col_j}) + c₊ - u;  Σ ½[J]₊², Σ [J]₊σ(row_i-col_j) = its derivative by row_i, number of J > 0
"""

import triton
import triton.language as tl

from ..functions import logaddexp, relu, sigmoid


@triton.jit
def hinge(u, row, col, c_pos):
    return relu(logaddexp(row, col) + c_pos - u)


@triton.jit
def term(k: tl.constexpr, u, row, col, c_pos):
    j = hinge(u, row, col, c_pos)
    if k == 0:
        return 0.5 * j * j
    elif k == 1:
        return tl.where(j > 0, j * sigmoid(row - col), 0.0)
    else:
        return tl.where(j > 0, 1.0, 0.0)


@triton.jit
def slope(k: tl.constexpr, u, row, col, c_pos):
    return -hinge(u, row, col, c_pos)
