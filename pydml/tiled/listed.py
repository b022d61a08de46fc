"""Row statistics of listed pairs in plain PyTorch: what a policy makes of the similarities that ``dots`` found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydml.policy import POLICIES, LogSumExp, Policy, Slot, softplus
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


def triplets_by(dots: Callable[..., Any], dots_backward: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The engines of listed triplets, made of a backend's engines of listed pairs."""

    def listed_triplets(
        rows: Tensor,
        cols: Tensor | None,
        a: Tensor,
        p: Tensor,
        n: Tensor,
        margin: float,
        smooth: bool,
        view: str,
        normalize: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each anchor [R] the sum of its triplets' losses and how many of them are above 0; their violations [n]."""
        u_ap, u_an = (dots(rows, cols, a, j, view, normalize) for j in (p, n))
        violation = u_an - u_ap + margin
        term = softplus(violation) if smooth else torch.relu(violation)
        nothing = term.new_zeros(len(rows))
        return add_at(nothing, a, term), add_at(nothing, a, (term > 0).to(term.dtype)), violation

    def listed_triplets_backward(
        grad: Tensor,
        total: Tensor,
        above: Tensor,
        violation: Tensor,
        rows: Tensor,
        cols: Tensor | None,
        a: Tensor,
        p: Tensor,
        n: Tensor,
        margin: float,
        smooth: bool,
        view: str,
        normalize: bool,
        want_rows: bool,
        want_cols: bool,
    ) -> tuple[Tensor, Tensor]:
        """dL/drows and dL/dcols from dL/dsums."""
        tail = view, normalize, want_rows, want_cols
        w = grad[a] * (torch.sigmoid(violation) if smooth else (violation > 0).to(grad.dtype))
        more, less = (dots_backward(g, rows, cols, a, j, *tail) for g, j in ((w, n), (-w, p)))
        return more[0] + less[0], more[1] + less[1]

    return {f.__name__: f for f in (listed_triplets, listed_triplets_backward)}
