"""Sums of u and the number of pairs on both sides: Multi-Similarity mining with equal weights."""

import triton
import triton.language as tl


@triton.jit
def term(k: tl.constexpr, u, row, col):
    if k % 2 == 0:
        return u
    else:
        return tl.zeros_like(u) + 1.0


@triton.jit
def slope(k: tl.constexpr, u, row, col):
    return tl.zeros_like(u) + 1.0
