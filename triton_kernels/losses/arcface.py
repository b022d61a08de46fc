"""Softmax logits with an angular margin on the target, Deng et al. 2019, eq. 3.

LSE_{positives}(s·cos(θ+m)), guarded past π by cosθ - m·sin m;  LSE_{negatives}(s·cosθ)

cos m and sin m come from the host: the device's own take local memory for angles that never occur here. Terms
are small, since the loss takes unit rows only: whether a compiler fuses their last product is all the same.
"""

import triton
import triton.language as tl

from ..functions import relu


@triton.jit
def term(k: tl.constexpr, u, row, col, margin, scale, cos_m, sin_m):
    if k == 1:
        return scale * u
    else:
        c = tl.clamp(u, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
        sine = tl.sqrt(relu(1 - c * c))
        return scale * tl.where(c >= -cos_m, c * cos_m - sine * sin_m, c - margin * sin_m)  # θ <= π-m


@triton.jit
def slope(k: tl.constexpr, u, row, col, margin, scale, cos_m, sin_m):
    if k == 1:
        return tl.zeros_like(u) + scale
    else:
        sine = tl.sqrt(relu(1 - u * u))
        cot = tl.where(sine > 0, u / sine, 0.0)  # the gradient of sinθ at c=±1 is 0
        return scale * tl.where(u >= -cos_m, cos_m + cot * sin_m, 1.0)
