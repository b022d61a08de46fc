"""Log-sum-exps of scaled similarities: Multi-Similarity (Wang et al. 2019, eq. 15), lifted, NCA, softmax, Proxy-Anchor.

P_i = LSE_{positives}(a₊(u-c₊) + col_j),  N_i = LSE_{negatives}(a₋(u-c₋) + col_j)
"""

import triton
import triton.language as tl


@triton.jit
def term(k: tl.constexpr, u, row, col, a_pos, c_pos, a_neg, c_neg):
    if k == 0:
        return tl.fma(a_pos, u - c_pos, col)
    else:
        return tl.fma(a_neg, u - c_neg, col)


@triton.jit
def slope(k: tl.constexpr, u, row, col, a_pos, c_pos, a_neg, c_neg):
    if k == 0:
        return tl.zeros_like(u) + a_pos
    else:
        return tl.zeros_like(u) + a_neg
