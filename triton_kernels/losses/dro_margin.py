"""Log-sum-exps of margin losses, Qi et al. 2020: LSE([m+λ-u]₊/γ₊) and LSE([m+u-λ]₊/γ₋)."""

import triton
import triton.language as tl

from ..functions import relu


@triton.jit
def term(k: tl.constexpr, u, row, col, margin, threshold, gamma_pos, gamma_neg):
    if k == 0:
        return relu((margin + threshold - u) / gamma_pos)  # rounded: nothing is fused through a maximum
    else:
        return relu((margin + u - threshold) / gamma_neg)


@triton.jit
def slope(k: tl.constexpr, u, row, col, margin, threshold, gamma_pos, gamma_neg):
    if k == 0:
        return tl.where(margin + threshold - u > 0, -1.0 / gamma_pos, 0.0)
    else:
        return tl.where(margin + u - threshold > 0, 1.0 / gamma_neg, 0.0)
