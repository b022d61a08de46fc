"""The triplet engine in plain PyTorch: all triplets, or one semi-hard negative a positive pair, with no triplet list.

Per anchor: its few positives become thresholds, and every negative is held against them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu

from pydml.policy import softplus
from pydml.tiled.sides import Matrix, Tile, beyond


class Anchors:
    """The positives of a tile's rows as a padded list: ``u``, column ``index`` [r, M], ``real`` where not padding."""

    def __init__(self, tile: Tile, ascending: bool) -> None:
        most = int(tile.same.sum(1).amax())
        key = tile.u.masked_fill(~tile.same, torch.inf) if ascending else (~tile.same).to(tile.u.dtype)
        self.index = key.sort(dim=1, stable=True).indices[:, :most]
        self.real = tile.same.gather(1, self.index)
        self.u = tile.u.gather(1, self.index)


def _hinges(tile: Tile, margin: float, w: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """All hinge triplets of a tile: sort the positives once, then each negative finds how many it violates."""
    a = Anchors(tile, ascending=True)
    thresholds = a.u.masked_fill(~a.real, torch.inf)
    reach = tile.u + margin
    k = torch.searchsorted(thresholds, reach.contiguous())  # positives with u_ap < u_an + m
    k = torch.where(tile.diff, k, 0)
    prefix = torch.cat((a.u.new_zeros(len(a.u), 1), a.u.masked_fill(~a.real, 0).cumsum(1)), 1)
    total = torch.where(tile.diff, k * reach - prefix.gather(1, k), 0).sum(1)
    if w is not None:
        w += g * k
        w.scatter_add_(1, a.index, -g * beyond(k, tile.diff, a.u.shape[1]) * a.real)
    return total, k.sum(1)


def _pairwise(
    m: Matrix, tile: Tile, margin: float, swap: bool, smooth: bool, w: Tensor | None, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Smooth or swapped triplets of a tile: one positive of every anchor at a time."""
    a = Anchors(tile, ascending=False)
    total, count = torch.zeros_like(tile.u[:, 0]), torch.zeros_like(tile.rows)
    for index, u_ap, real in zip(a.index.T, a.u.T, a.real.T, strict=True):
        member = tile.diff & real[:, None]
        other = m.tile(index) if swap else tile
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
            if swap:
                m.add_weights(other, torch.where(taken, push, 0))
    return total, count


def _semihard(tile: Tile, margin: float, smooth: bool, w: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """Per positive pair the most similar negative below it; ties go to the smallest column."""
    a = Anchors(tile, ascending=False)
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


def _tile(
    m: Matrix, tile: Tile, mode: str, margin: float, swap: bool, smooth: bool, w: Tensor | None, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses and counts of a tile's anchors; with ``w``, also add g·dloss/du to it."""
    if mode == "semihard":
        return _semihard(tile, margin, smooth, w, g)
    if swap or smooth:
        return _pairwise(m, tile, margin, swap, smooth, w, g)
    return _hinges(tile, margin, w, g)


def triplet(
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    mode: str,
    margin: float,
    swap: bool,
    smooth: bool,
    view: str,
    normalize: bool,
    selves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Per anchor: the sum of its triplets' losses and how many of them are above 0."""
    m = Matrix(rows, cols, row_labels, col_labels, view, normalize, selves)
    total, count = m.row.x.new_zeros(2, len(rows)).unbind()
    for tile in m.tiles():
        sums, above = _tile(m, tile, mode, margin, swap, smooth, None, total[:1])
        total[tile.rows], count[tile.rows] = sums, above.to(count.dtype)
    total, count = m.poison(total, count)
    return total, count


def triplet_backward(
    grad: Tensor,
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    mode: str,
    margin: float,
    swap: bool,
    smooth: bool,
    view: str,
    normalize: bool,
    want_rows: bool,
    want_cols: bool,
    selves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/dtotal [R]."""
    m = Matrix(rows, cols, row_labels, col_labels, view, normalize, selves)
    m.start_gradient(want_rows, want_cols)
    (grad,) = m.poison(grad)
    for tile in m.tiles():
        w = torch.zeros_like(tile.u)
        _tile(m, tile, mode, margin, swap, smooth, w, grad[tile.rows, None])
        m.add_weights(tile, w)
    return m.gradients()
