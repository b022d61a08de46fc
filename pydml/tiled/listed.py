"""Row statistics of listed pairs in plain PyTorch: what a policy makes of the similarities that ``dots`` found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydml.declared import Backward, Dots, DotsOut, Listed, ListedTriplets, some
from pydml.policy import POLICIES, LogSumExp, Policy, Slot, softplus
from pydml.sums import add_at, segment_lse


class _Sides:
    """u, anchors and field of the pairs of either side."""

    def __init__(self, a: Listed) -> None:
        self.u = {"positives": a.pos, "negatives": a.neg}
        self.anchors = {"positives": a.a1, "negatives": a.a2}
        self.row_field = a.row_field

    def of(self, slot: Slot) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Anchors of a slot's pairs, and what a policy's functions take."""
        u, i = self.u[slot.side], self.anchors[slot.side]
        nothing = u.new_zeros(())
        return i, (u, nothing if self.row_field is None else self.row_field.to(u.dtype)[i], nothing)


def listed(a: Listed) -> Tensor:
    """Row statistics [rows, K] of positives and negatives of u ``pos`` and ``neg`` and anchors ``a1`` and ``a2``."""
    loss: Policy = POLICIES[a.policy](*a.params)
    sides, rows = _Sides(a), a.rows
    stats = []
    for k, slot in enumerate(loss.slots):
        i, arguments = sides.of(slot)
        term = loss.term(k, *arguments)
        if isinstance(slot, LogSumExp):
            stats.append(segment_lse(term, i, rows))
        else:
            stats.append(add_at(term.new_zeros(rows), i, term))
    poison = torch.where(a.pos.isnan().any() | a.neg.isnan().any(), torch.nan, 0.0)  # a hinge drops it silently
    return torch.stack(stats, 1) + poison.to(a.pos.dtype)


def listed_backward(b: Backward[Listed]) -> tuple[Tensor, Tensor]:
    """dL/du of the listed pairs from dL/dstats."""
    a, grad, stats = b.call, b.grad.stats, b.out.stats
    loss: Policy = POLICIES[a.policy](*a.params)
    sides = _Sides(a)
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
    nothing = grad.new_empty(0)
    return w["positives"] if b.want_rows else nothing, w["negatives"] if b.want_cols else nothing


def triplets_by(dots: Callable[..., Any], dots_backward: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The engines of listed triplets, made of a backend's engines of listed pairs."""

    def pairs(a: ListedTriplets, j: Tensor) -> Dots:
        return Dots(a.rows, a.cols, i=a.a, j=j, view=a.view, normalize=a.normalize)

    def listed_triplets(a: ListedTriplets) -> tuple[Tensor, Tensor, Tensor]:
        """Of each anchor [R] the sum of its triplets' losses and how many of them are above 0; their violations [n]."""
        u_ap, u_an = (dots(pairs(a, j)) for j in (a.p, a.n))
        violation = u_an - u_ap + a.margin
        term = softplus(violation) if a.smooth else torch.relu(violation)
        nothing = term.new_zeros(len(a.rows))
        return add_at(nothing, a.a, term), add_at(nothing, a.a, (term > 0).to(term.dtype)), violation

    def listed_triplets_backward(b: Backward[ListedTriplets]) -> tuple[Tensor, Tensor]:
        """dL/drows and dL/dcols from dL/dsums."""
        a, violation, grad = b.call, b.out.violation, b.grad.total
        w = grad[a.a] * (torch.sigmoid(violation) if a.smooth else (violation > 0).to(grad.dtype))
        more, less = (
            dots_backward(Backward(pairs(a, j), some(DotsOut, u=g), some(DotsOut), b.wants))
            for g, j in ((w, a.n), (-w, a.p))
        )
        return more[0] + less[0], more[1] + less[1]

    return {f.__name__: f for f in (listed_triplets, listed_triplets_backward)}
