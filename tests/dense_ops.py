"""The ops in plain PyTorch on the whole matrix, or in plain loops, by their definitions: what kernels are held against.

Each takes the declared call and gives its results without what a backend keeps; autograd gives the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydml.declared import Above, Against, Below, Extremes, Histogram, Pair, Positives, TopK, Triplet
from pydml.policy import POLICIES, LogSumExp


def similarities(a: Any) -> Tensor:
    """u [R, C], from the rows themselves."""
    x, y = a.rows, a.rows if a.cols is None else a.cols
    if a.normalize:
        x, y = (torch.nn.functional.normalize(side) for side in (x, y))
    view = getattr(a, "view", "dot")
    if view in ("dot", "cosine"):
        return x @ y.T
    square = (x[:, None] - y).square().sum(2)
    return -square if view == "squared" else -torch.where(square > 0, square, 1).sqrt() * (square > 0)


def sides(a: Any) -> tuple[Tensor, Tensor]:
    """Which pairs are positives and which are negatives; a row makes none with the column that it is."""
    labels = a.row_labels if a.cols is None else a.col_labels
    columns = torch.arange(len(labels))
    selves = columns if a.cols is None else getattr(a, "selves", None)
    same = a.row_labels[:, None] == labels
    diff = ~same
    if selves is not None:
        same = same & (columns != selves[:, None])
    return same, diff


def largest(u: Tensor, member: Tensor) -> Tensor:
    """The largest u of each row's members; -inf where there is none."""
    return torch.cat((u.masked_fill(~member, -torch.inf), u.new_full((len(u), 1), -torch.inf)), 1).amax(1)


def lse(term: Tensor, member: Tensor) -> Tensor:
    """log Σ e^{term} of each row's members; -inf, and no gradient, where there is none."""
    if not term.shape[1]:
        return term.new_full((len(term),), -torch.inf)
    some = member.any(1)
    found = term.masked_fill(~(member | ~some[:, None]), -torch.inf)
    return torch.where(some, found.logsumexp(1), -torch.inf)


def pair(a: Pair) -> tuple[Tensor, Tensor]:
    """Statistics and thresholds."""
    u, (same, diff) = similarities(a), sides(a)
    if a.side != "both":
        same, diff = same & (a.side == "positives"), diff & (a.side == "negatives")
    thresholds = u.new_zeros(len(u), 2)
    if a.epsilon is not None:
        known = u.detach()
        thresholds = torch.stack((largest(known, diff) + a.epsilon, -largest(-known, same) - a.epsilon), 1)
        if a.bounds is not None:
            found = thresholds[:, :1]
            thresholds = torch.cat((found, a.bounds[:, 1:]), 1) if a.side == "negatives" else a.bounds
        same, diff = same & (known < thresholds[:, :1]), diff & (known > thresholds[:, 1:])
    policy = POLICIES[a.policy](*a.params)
    row = u.new_zeros(len(u), 1) if a.row_field is None else a.row_field[:, None]
    col = u.new_zeros(1, u.shape[1]) if a.col_field is None else a.col_field[None]
    stats = []
    for k, slot in enumerate(policy.slots):
        term, member = policy.term(k, u, row, col).expand_as(u), same if slot.side == "positives" else diff
        stats.append(lse(term, member) if isinstance(slot, LogSumExp) else torch.where(member, term, 0).sum(1))
    return torch.stack(stats, 1), thresholds


def histogram(a: Histogram) -> tuple[Tensor, ...]:
    """Every pair falls on the two nodes beside it."""
    at = ((similarities(a) - a.low) * (a.nodes - 1) / (a.high - a.low)).clamp(0, a.nodes - 1)
    share = torch.relu(1 - (at[..., None] - torch.arange(a.nodes)).abs())
    return tuple((member[..., None] * share).sum(1) for member in sides(a))


def losses(violation: Tensor, member: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
    """Sum and number above 0 of the losses of each row's triplets."""
    term = torch.nn.functional.softplus(violation, threshold=100) if smooth else torch.relu(violation)
    term = torch.where(member, term, 0).flatten(1)
    return term.sum(1), (term > 0).sum(1).to(term.dtype)


def triplet(a: Triplet) -> tuple[Tensor, Tensor]:
    u, (same, diff) = similarities(a), sides(a)
    if a.mode == "all":
        return losses(u[:, None] - u[:, :, None] + a.margin, same[:, :, None] & diff[:, None], a.smooth)
    below = diff[:, None] & (u[:, None] < u[:, :, None])  # of row, positive, negative
    best = u[:, None].masked_fill(~below, -torch.inf).argmax(2)
    return losses(u.gather(1, best) - u + a.margin, same & below.any(2), a.smooth)


def against(a: Against) -> tuple[Tensor, Tensor]:
    u, (_, diff) = similarities(a), sides(a)
    real = a.positives < torch.inf
    positives = torch.where(real, a.positives, 0)
    return losses(u[:, :, None] - positives[:, None] + a.margin, diff[:, :, None] & real[:, None], a.smooth)


def below(a: Below) -> tuple[Tensor, Tensor]:
    u, (_, diff) = similarities(a), sides(a)
    n, best = torch.full_like(a.bounds, -1, dtype=torch.int64), torch.full_like(a.bounds, -torch.inf)
    for i, bounds in enumerate(a.bounds.tolist()):
        for k, bound in enumerate(bounds):
            for j, value in enumerate(u[i].tolist()):
                if diff[i, j] and best[i, k] < value < bound < torch.inf:
                    n[i, k], best[i, k] = j, value
    return n, best


def positives(a: Positives) -> Tensor:
    u, (same, _) = similarities(a), sides(a)
    found = u.masked_fill(~same, torch.inf).sort(1).values[:, : a.most]
    return torch.nn.functional.pad(found, (0, a.most - found.shape[1]), value=torch.inf)


def above(a: Above) -> Tensor:
    u, (_, diff) = similarities(a), sides(a)
    counts = [(diff[:, None] & over(u[:, None], a.bounds[:, :, None])).sum(2) for over in (torch.gt, torch.ge)]
    return torch.stack(counts)


def extremes(a: Extremes) -> tuple[Tensor, Tensor]:
    """Row by row; what is semi-hard lies beyond the other side's choice. Ties go to the smallest column."""

    def choose(how: str, u: list[float], members: list[int], positive: bool) -> int:
        if how == "none" or not members:
            return -1
        most = positive == (how == "easy")
        return min(members, key=lambda j: (-u[j] if most else u[j], j))

    found = []
    matrix, masks = similarities(a), sides(a)
    for values, *member in zip(matrix.tolist(), *masks, strict=True):
        same, diff = ([j for j, is_in in enumerate(mask.tolist()) if is_in] for mask in member)
        if a.positive == "semihard":
            n = choose("hard" if a.negative == "hard" else "easy", values, diff, False) if a.negative != "none" else -1
            p = choose("hard", values, [j for j in same if n >= 0 and values[j] > values[n]], True)
        else:
            p = choose(a.positive, values, same, True)
            semihard = a.negative == "semihard"
            nearer = [j for j in diff if not semihard or (p >= 0 and values[j] < values[p])]
            n = choose("hard" if semihard else a.negative, values, nearer, False)
        found.append((p, n))
    p, n = torch.tensor(found, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return p, n


def topk(a: TopK) -> tuple[Tensor, Tensor]:
    u, (same, diff) = similarities(a), sides(a)
    policy, zero = POLICIES[a.policy](*a.params), u.new_zeros(1, 1)
    loss = torch.where(same, policy.term(0, u, zero, zero), policy.term(1, u, zero, zero))
    member = {"positives": same, "negatives": diff}.get(a.side, same | diff)
    if a.cols is None:
        member = member.triu(1)
    pairs = sorted((-float(loss[i, j]), i, j) for i, j in member.nonzero().tolist())[: a.k]
    i, j = torch.tensor([pair[1:] for pair in pairs] + [(-1, -1)] * (a.k - len(pairs))).unbind(1)
    return i, j


DENSE: dict[str, Callable[[Any], Any]] = {
    f.__name__: f for f in (pair, histogram, triplet, against, below, positives, above, extremes, topk)
}
