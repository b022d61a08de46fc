"""Row statistics of listed pairs in plain PyTorch: what a policy makes of the similarities that ``dots`` found."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pydml.policy import POLICIES, LogSumExp, Policy, Slot
from pydml.sums import add_at, segment_lse


class _Sides:
    """u, anchors and field of the pairs of either side."""

    def __init__(self, pos: Tensor, neg: Tensor, a1: Tensor, a2: Tensor, row_field: Tensor | None) -> None:
        self.u = {"positives": pos, "negatives": neg}
        self.anchors = {"positives": a1, "negatives": a2}
        self.row_field = row_field

    def of(self, slot: Slot) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Anchors of a slot's pairs, and what a policy's functions take."""
        u, i = self.u[slot.side], self.anchors[slot.side]
        nothing = u.new_zeros(())
        return i, (u, nothing if self.row_field is None else self.row_field.to(u.dtype)[i], nothing)


def listed(
    pos: Tensor,
    neg: Tensor,
    a1: Tensor,
    a2: Tensor,
    row_field: Tensor | None,
    policy: str,
    params: Sequence[float],
    rows: int,
) -> Tensor:
    """Row statistics [rows, K] of positives and negatives of u ``pos`` and ``neg`` and anchors ``a1`` and ``a2``."""
    loss: Policy = POLICIES[policy](*params)
    sides = _Sides(pos, neg, a1, a2, row_field)
    stats = []
    for k, slot in enumerate(loss.slots):
        i, arguments = sides.of(slot)
        term = loss.term(k, *arguments)
        if isinstance(slot, LogSumExp):
            stats.append(segment_lse(term, i, rows))
        else:
            stats.append(add_at(term.new_zeros(rows), i, term))
    poison = torch.where(pos.isnan().any() | neg.isnan().any(), torch.nan, 0.0)  # a hinge drops it silently
    return torch.stack(stats, 1) + poison.to(pos.dtype)


def listed_backward(
    grad: Tensor,
    stats: Tensor,
    pos: Tensor,
    neg: Tensor,
    a1: Tensor,
    a2: Tensor,
    row_field: Tensor | None,
    policy: str,
    params: Sequence[float],
    rows: int,
    want_pos: bool,
    want_neg: bool,
) -> tuple[Tensor, Tensor]:
    """dL/du of the listed pairs from dL/dstats."""
    loss: Policy = POLICIES[policy](*params)
    sides = _Sides(pos, neg, a1, a2, row_field)
    known = torch.where(torch.isneginf(stats), torch.inf, stats)  # a sum of nothing has no shares
    w = {side: torch.zeros_like(u) for side, u in sides.u.items()}
    for k, slot in enumerate(loss.slots):
        if not isinstance(slot, LogSumExp) and slot.constant:
            continue
        i, arguments = sides.of(slot)
        g = grad[i, k] * loss.slope(k, *arguments)
        if isinstance(slot, LogSumExp):
            g = g * torch.exp(loss.term(k, *arguments) - known[i, k])
        w[slot.side] = w[slot.side] + g
    return w["positives"] if want_pos else pos.new_empty(0), w["negatives"] if want_neg else neg.new_empty(0)
