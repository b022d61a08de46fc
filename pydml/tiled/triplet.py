"""The triplet engine in plain PyTorch: all triplets, or one semi-hard negative a positive pair, with no triplet list.

Per anchor: its few positives become thresholds, and every negative is held against them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu

from pydml.declared import Above, Against, Backward, Below, Positives, Triplet
from pydml.policy import softplus
from pydml.tiled.sides import Matrix, Tile, beyond


class Anchors:
    """The positives of a tile's rows as a padded list: ``u``, column ``index`` [r, M], ``real`` where not padding."""

    def __init__(self, tile: Tile) -> None:
        most = int(tile.same.sum(1).amax())
        self.index = (~tile.same).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most]
        self.real = tile.same.gather(1, self.index)
        self.u = tile.u.gather(1, self.index)


@dataclass
class Held:
    """Negatives [r, N] held against thresholds [r, M], the similarities of positives."""

    total: Tensor  # [r] sum of the losses
    count: Tensor  # [r] how many of them are above 0
    negatives: Tensor  # [r, N] slope of the total by each negative
    positives: Tensor  # [r, M] and, but for its sign, by each threshold


def held(tile: Tile, thresholds: Tensor, margin: float, smooth: bool) -> Held:
    """All triplets of a tile's rows and thresholds [r, M], +inf where there is none."""
    if smooth:  # one threshold at a time
        out = Held(tile.u.new_zeros(len(tile.u)), torch.zeros_like(tile.rows), torch.zeros_like(tile.u),
                      torch.zeros_like(thresholds))  # fmt: skip
        for p, u_ap in enumerate(thresholds.T):
            member = tile.diff & (u_ap < torch.inf)[:, None]
            violation = tile.u - u_ap[:, None] + margin
            term, slope = (torch.where(member, f(violation), 0) for f in (softplus, torch.sigmoid))
            out.total += term.sum(1)
            out.count += (term > 0).sum(1)
            out.negatives += slope
            out.positives[:, p] = slope.sum(1)
        return out
    rising, order = thresholds.sort(1)  # once, then each negative finds how many it violates
    reach = tile.u + margin
    k = torch.searchsorted(rising, reach.contiguous())  # positives with u_ap < u_an + m
    k = torch.where(tile.diff, k, 0)
    prefix = torch.nn.functional.pad(rising.masked_fill(rising == torch.inf, 0).cumsum(1), (1, 0))
    total = torch.where(tile.diff, k * reach - prefix.gather(1, k), 0).sum(1)
    passed = beyond(k, tile.diff, thresholds.shape[1]).to(total.dtype)
    return Held(total, k.sum(1), k.to(total.dtype), torch.empty_like(rising).scatter_(1, order, passed))


def _all(tile: Tile, margin: float, smooth: bool, w: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """All triplets of a tile."""
    a = Anchors(tile)
    found = held(tile, a.u.masked_fill(~a.real, torch.inf), margin, smooth)
    if w is not None:
        w += g * found.negatives
        w.scatter_add_(1, a.index, -g * found.positives * a.real)
    return found.total, found.count


def _swapped(m: Matrix, tile: Tile, margin: float, smooth: bool, w: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """Anchor-swapped triplets of a tile: one positive of every anchor at a time."""
    a = Anchors(tile)
    total, count = torch.zeros_like(tile.u[:, 0]), torch.zeros_like(tile.rows)
    for index, u_ap, real in zip(a.index.T, a.u.T, a.real.T, strict=True):
        member = tile.diff & real[:, None]
        other = m.tile(index)
        taken = other.u > tile.u  # the positive is nearer to the negative than the anchor is
        violation = torch.maximum(tile.u, other.u) - u_ap[:, None] + margin
        term = torch.where(member, softplus(violation) if smooth else relu(violation), 0)
        total += term.sum(1)
        count += (term > 0).sum(1)
        if w is not None:
            slope = torch.sigmoid(violation) if smooth else (violation > 0).to(w.dtype)
            push = torch.where(member, g * slope, 0)
            w += torch.where(taken, 0, push)
            w.scatter_add_(1, index[:, None], -push.sum(1, keepdim=True))
            m.add_weights(other, torch.where(taken, push, 0))
    return total, count


def _semihard(tile: Tile, margin: float, smooth: bool, w: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """Per positive pair the most similar negative below it; ties go to the smallest column."""
    a = Anchors(tile)
    falling, order = (-tile.u).masked_fill(~tile.diff, torch.inf).sort(dim=1, stable=True)
    place = torch.searchsorted(falling, (-a.u).contiguous(), right=True).clamp_max(falling.shape[1] - 1)
    u_an, n = -falling.gather(1, place), order.gather(1, place)
    member = a.real & (u_an < a.u) & torch.isfinite(u_an)
    violation = torch.where(member, u_an - a.u + margin, -torch.inf)
    term = softplus(violation) if smooth else relu(violation)
    if w is not None:
        push = torch.where(member, g * (torch.sigmoid(violation) if smooth else (violation > 0)), 0)
        w.scatter_add_(1, n, push)
        w.scatter_add_(1, a.index, -push)
    return term.sum(1), (term > 0).sum(1)


def _tile(m: Matrix, tile: Tile, a: Triplet, w: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and counts of a tile's anchors; with ``w``, also add g·dloss/du to it."""
    if a.mode == "semihard":
        return _semihard(tile, a.margin, a.smooth, w, g)
    return _swapped(m, tile, a.margin, a.smooth, w, g) if a.swap else _all(tile, a.margin, a.smooth, w, g)


def triplet(a: Triplet) -> tuple[Tensor, Tensor]:
    """Per anchor: the sum of its triplets' losses and how many of them are above 0."""
    m = Matrix.of(a)
    total, count = m.row.x.new_zeros(2, len(a.rows)).unbind()
    for tile in m.tiles():
        sums, above = _tile(m, tile, a, None, total[:1])
        total[tile.rows], count[tile.rows] = sums, above.to(count.dtype)
    total, count = m.poison(total, count)
    return total, count


def triplet_backward(b: Backward[Triplet]) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/dtotal [R]."""
    m = Matrix.of(b.call)
    m.start_gradient(b.want_rows, b.want_cols)
    (grad,) = m.poison(b.grad.total)
    for tile in m.tiles():
        w = torch.zeros_like(tile.u)
        _tile(m, tile, b.call, w, grad[tile.rows, None])
        m.add_weights(tile, w)
    return m.gradients()


def _against(a: Against) -> Matrix:
    """The matrix, poisoned by positives of NaN too: a comparison would drop them silently."""
    m = Matrix.of(a)
    m.finite = m.finite & ~a.positives.isnan().any()
    return m


def against(a: Against) -> tuple[Tensor, Tensor]:
    """Per row the sum of its triplets' losses, and how many of them are above 0."""
    m = _against(a)
    total, count = m.row.x.new_zeros(2, len(a.rows)).unbind()
    for tile in m.tiles():
        found = held(tile, a.positives[tile.rows], a.margin, a.smooth)
        total[tile.rows], count[tile.rows] = found.total, found.count.to(count.dtype)
    total, count = m.poison(total, count)
    return total, count


def against_backward(b: Backward[Against]) -> tuple[Tensor, Tensor, Tensor]:
    """dL/drows, dL/dcols and dL/dpositives from dL/dtotal [R]."""
    a = b.call
    m = _against(a)
    m.start_gradient(b.want_rows, b.want_cols)
    (grad,) = m.poison(b.grad.total)
    (d_positives,) = m.poison(torch.zeros_like(a.positives))
    for tile in m.tiles():
        found = held(tile, a.positives[tile.rows], a.margin, a.smooth)
        g = grad[tile.rows, None]
        m.add_weights(tile, g * found.negatives)
        d_positives[tile.rows] = -g * found.positives
    return *m.gradients(), d_positives if b.wants[2] else a.rows.new_empty(0)


def below(a: Below) -> tuple[Tensor, Tensor]:
    """Column and u [R, M] of the most similar negative below each bound; ties go to the smallest column."""
    m = Matrix.of(a)
    n, u = torch.full_like(a.bounds, -1, dtype=torch.int64), torch.full_like(a.bounds, -torch.inf)
    for tile in m.tiles():
        falling, order = (-tile.u).masked_fill(~tile.diff, torch.inf).sort(dim=1, stable=True)
        bounds = a.bounds[tile.rows]
        place = torch.searchsorted(falling, (-bounds).contiguous(), right=True)
        found = place < falling.shape[1]
        place = place.clamp_max(falling.shape[1] - 1)
        best = -falling.gather(1, place)
        found &= torch.isfinite(best) & (bounds < torch.inf)
        n[tile.rows] = torch.where(found, order.gather(1, place), -1)
        u[tile.rows] = torch.where(found, best, -torch.inf)
    return n, u


def positives(a: Positives) -> Tensor:
    """u [R, most] of each row's positives, +inf behind them."""
    m = Matrix.of(a)
    u = m.row.x.new_full((len(a.rows), a.most), torch.inf)
    for tile in m.tiles():
        rising = tile.u.masked_fill(~tile.same, torch.inf).sort(1).values[:, : a.most]
        u[tile.rows, : rising.shape[1]] = rising
    return u


def above(a: Above) -> Tensor:
    """Negatives [2, R, M] above each bound, and at or above it."""
    m = Matrix.of(a)
    rising, order = a.bounds.masked_fill(a.bounds.isnan(), torch.inf).sort(1)  # nothing is above either
    number = torch.zeros((2, *a.bounds.shape), dtype=torch.int64, device=a.bounds.device)
    for tile in m.tiles():
        for ties, right in enumerate((False, True)):
            k = torch.searchsorted(rising[tile.rows], tile.u.contiguous(), right=right)
            found = beyond(torch.where(tile.diff, k, 0), tile.diff, rising.shape[1])
            number[ties, tile.rows] = torch.empty_like(found).scatter_(1, order[tile.rows], found)
    return number
