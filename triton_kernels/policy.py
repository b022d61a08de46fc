"""The list of policies: which file's functions a kernel calls, by the policy's name.

The name is a compile-time constant, so a kernel holds the code of one policy only.
"""

import triton
import triton.language as tl

from .losses.arcface import slope as arcface_slope
from .losses.arcface import term as arcface_term
from .losses.bin_lifted import slope as bin_lifted_slope
from .losses.bin_lifted import term as bin_lifted_term
from .losses.binomial import slope as binomial_slope
from .losses.binomial import term as binomial_term
from .losses.dro_binomial import slope as dro_binomial_slope
from .losses.dro_binomial import term as dro_binomial_term
from .losses.dro_margin import slope as dro_margin_slope
from .losses.dro_margin import term as dro_margin_term
from .losses.exponential import slope as exponential_slope
from .losses.exponential import term as exponential_term
from .losses.hinge import slope as hinge_slope
from .losses.hinge import term as hinge_term
from .losses.lifted import slope as lifted_slope
from .losses.lifted import term as lifted_term
from .losses.mean import slope as mean_slope
from .losses.mean import term as mean_term


@triton.jit
def term(POLICY: tl.constexpr, k: tl.constexpr, u, row, col, p0, p1, p2, p3, p4):
    """What a pair adds to slot k."""
    if POLICY == "exponential":
        return exponential_term(k, u, row, col, p0, p1, p2, p3)
    elif POLICY == "binomial":
        return binomial_term(k, u, row, col, p0, p1, p2)
    elif POLICY == "bin_lifted":
        return bin_lifted_term(k, u, row, col, p0, p1, p2)
    elif POLICY == "hinge":
        return hinge_term(k, u, row, col, p0, p1)
    elif POLICY == "mean":
        return mean_term(k, u, row, col)
    elif POLICY == "lifted":
        return lifted_term(k, u, row, col, p0)
    elif POLICY == "arcface":
        return arcface_term(k, u, row, col, p0, p1, p2, p3)
    elif POLICY == "dro_margin":
        return dro_margin_term(k, u, row, col, p0, p1, p2, p3)
    else:
        tl.static_assert(POLICY == "dro_binomial", "no such policy")
        return dro_binomial_term(k, u, row, col, p0, p1, p2, p3, p4)


@triton.jit
def slope(POLICY: tl.constexpr, k: tl.constexpr, u, row, col, p0, p1, p2, p3, p4):
    """d term / du"""
    if POLICY == "exponential":
        return exponential_slope(k, u, row, col, p0, p1, p2, p3)
    elif POLICY == "binomial":
        return binomial_slope(k, u, row, col, p0, p1, p2)
    elif POLICY == "bin_lifted":
        return bin_lifted_slope(k, u, row, col, p0, p1, p2)
    elif POLICY == "hinge":
        return hinge_slope(k, u, row, col, p0, p1)
    elif POLICY == "mean":
        return mean_slope(k, u, row, col)
    elif POLICY == "lifted":
        return lifted_slope(k, u, row, col, p0)
    elif POLICY == "arcface":
        return arcface_slope(k, u, row, col, p0, p1, p2, p3)
    elif POLICY == "dro_margin":
        return dro_margin_slope(k, u, row, col, p0, p1, p2, p3)
    else:
        tl.static_assert(POLICY == "dro_binomial", "no such policy")
        return dro_binomial_slope(k, u, row, col, p0, p1, p2, p3, p4)
