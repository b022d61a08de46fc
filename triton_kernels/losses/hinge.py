"""Hinges on both sides, and how many are above 0: contrastive (Hadsell et al. 2006), margin (Wu et al. 2017) losses.

Σ_{positives} [c₊+row_i-u]₊, their number above 0, Σ_{negatives} [u-c₋-row_i]₊, their number above 0
"""

import triton
import triton.language as tl

from ..functions import relu


@triton.jit
def excess(k: tl.constexpr, u, row, c_pos, c_neg):
    if k < 2:
        return c_pos + row - u
    else:
        return u - c_neg - row


@triton.jit
def term(k: tl.constexpr, u, row, col, c_pos, c_neg):
    e = excess(k, u, row, c_pos, c_neg)
    if k % 2 == 0:
        return relu(e)
    else:
        return tl.where(e > 0, 1.0, 0.0)


@triton.jit
def slope(k: tl.constexpr, u, row, col, c_pos, c_neg):
    live = tl.where(excess(k, u, row, c_pos, c_neg) > 0, 1.0, 0.0)
    if k == 0:
        return -live
    else:
        return live
