"""Do the peers compute the same thing? Values and gradients are compared before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Of fp32: error of the value relative to it, error of a gradient relative to its largest entry.
VALUE_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = 1e-3
#: Where a loss selects pairs, or drops them at a margin that many are close to, rounding may decide otherwise; the
#: value hardly moves, but the gradients of the rows in question do. At most this share of the rows may differ.
SELECTED_ROWS = 0.02
SMALLEST = 1e-6  # below it a value counts as 0


@dataclass
class Result:
    """What one peer computed."""

    value: Tensor
    gradients: tuple[Tensor, ...]


@dataclass
class Difference:
    """How far one peer is from the reference."""

    value: float
    gradient: float
    differing_rows: float
    agrees: bool

    def __str__(self) -> str:
        return (
            f"value differs by {self.value:.1e}, gradient by {self.gradient:.1e} of its largest entry, in "
            f"{self.differing_rows:.2%} of the rows (allowed: {VALUE_TOLERANCE:g}, {GRADIENT_TOLERANCE:g})"
        )


def compare(found: Result, wanted: Result, *, selects: bool = False, exact: bool = False) -> Difference:
    """Hold one result against another; ``exact`` is for counts, which have no rounding to forgive."""
    value = _relative(found.value, wanted.value)
    gradient = rows = 0.0
    for mine, other in zip(found.gradients, wanted.gradients, strict=True):
        largest = other.abs().max()
        error = (mine - other).abs() / largest.clamp_min(SMALLEST)
        error = torch.where(error.isnan(), torch.inf, error)
        gradient = max(gradient, float(error.max()))
        # a parameter [d, C] has its rows in columns: whichever side has fewer differing lines is meant
        wrong = error > GRADIENT_TOLERANCE
        rows = max(rows, min(float(wrong.any(dim).double().mean()) for dim in (0, 1)))
    tolerated = SELECTED_ROWS if selects else 0.0
    agrees = value <= (1e-9 if exact else VALUE_TOLERANCE) and rows <= tolerated
    return Difference(value, gradient, rows, agrees)


def _relative(found: Tensor, wanted: Tensor) -> float:
    error = (found.double() - wanted.double()).abs() / wanted.double().abs().clamp_min(SMALLEST)
    return float(torch.where(error.isnan(), torch.inf, error).max())


def reference(peers: Sequence[str]) -> str:
    """The peer that the others are held against: the plainest that ran."""
    return next((name for name in ("dense", "faiss", "pml", "compile", "pydml") if name in peers), peers[0])
