"""The histogram engine in plain PyTorch: soft counts of u per row, for positives and for negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from pydml.declared import Backward, Histogram
from pydml.tiled.sides import Matrix, Tile


def density(a: Histogram) -> float:
    """Nodes per unit of u."""
    return (a.nodes - 1) / (a.high - a.low)


def assign(tile: Tile, a: Histogram) -> tuple[Tensor, Tensor]:
    """Left node [r, N] and share of the right node of every pair: linear soft assignment."""
    at = ((tile.u - a.low) * density(a)).clamp(0, a.nodes - 1)
    left = at.nan_to_num(0).long().clamp_max(a.nodes - 2)  # u = high falls wholly on the last node
    return left, at - left


def histogram(a: Histogram) -> tuple[Tensor, Tensor, Tensor]:
    """Soft counts [R, nodes] of positives and of negatives, and nothing to remember of the tiles."""
    m = Matrix.of(a)
    counts = m.row.x.new_zeros(2, len(a.rows), a.nodes)
    for tile in m.tiles():
        left, share = assign(tile, a)
        for h, member in zip(counts, (tile.same, tile.diff), strict=True):
            part = h[tile.rows]
            part.scatter_add_(1, left, torch.where(member, 1 - share, 0))
            part.scatter_add_(1, left + 1, torch.where(member, share, 0))
            h[tile.rows] = part
    positives, negatives = m.poison(*counts.unbind())
    return positives, negatives, positives.new_empty(0, 2)


def histogram_saved(a: Histogram) -> int:
    """Tiles whose range of u the forward pass keeps: none, all are computed again."""
    return 0


def histogram_backward(b: Backward[Histogram]) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols: a pair's weight is the slope of its row's table between two nodes."""
    a = b.call
    m = Matrix.of(a)
    m.start_gradient(b.want_rows, b.want_cols)
    slopes = [torch.diff(g, dim=1) * density(a) for g in m.poison(b.grad.positives, b.grad.negatives)]
    for tile in m.tiles():
        left, _ = assign(tile, a)
        same, diff = (slope[tile.rows].gather(1, left) for slope in slopes)
        m.add_weights(tile, torch.where(tile.same, same, 0) + torch.where(tile.diff, diff, 0))
    return m.gradients()
