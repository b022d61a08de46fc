"""The histogram engine in plain PyTorch: soft counts of u per row, for positives and for negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from pydml.tiled.sides import Matrix, Tile


def assign(tile: Tile, nodes: int, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Left node [r, N] and share of the right node of every pair: linear soft assignment on ``nodes`` nodes."""
    at = ((tile.u - low) * ((nodes - 1) / (high - low))).clamp(0, nodes - 1)
    left = at.nan_to_num(0).long().clamp_max(nodes - 2)  # u = high falls wholly on the last node
    return left, at - left


def histogram(
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    nodes: int,
    low: float,
    high: float,
    view: str,
    normalize: bool,
    selves: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Soft counts [R, nodes] of positives and of negatives, and nothing to remember of the tiles."""
    m = Matrix(rows, cols, row_labels, col_labels, view, normalize, selves)
    counts = m.row.x.new_zeros(2, len(rows), nodes)
    for tile in m.tiles():
        left, share = assign(tile, nodes, low, high)
        for h, member in zip(counts, (tile.same, tile.diff), strict=True):
            part = h[tile.rows]
            part.scatter_add_(1, left, torch.where(member, 1 - share, 0))
            part.scatter_add_(1, left + 1, torch.where(member, share, 0))
            h[tile.rows] = part
    positives, negatives = m.poison(*counts.unbind())
    return positives, negatives, positives.new_empty(0, 2)


def histogram_saved(*_: object) -> int:
    """Tiles whose range of u the forward pass keeps: none, all are computed again."""
    return 0


def histogram_backward(
    grad_positives: Tensor,
    grad_negatives: Tensor,
    positives: Tensor,
    negatives: Tensor,
    saved: Tensor,
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    nodes: int,
    low: float,
    high: float,
    view: str,
    normalize: bool,
    want_rows: bool,
    want_cols: bool,
    selves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols: a pair's weight is the slope of its row's table between two nodes."""
    m = Matrix(rows, cols, row_labels, col_labels, view, normalize, selves)
    m.start_gradient(want_rows, want_cols)
    slopes = [torch.diff(g, dim=1) * ((nodes - 1) / (high - low)) for g in m.poison(grad_positives, grad_negatives)]
    for tile in m.tiles():
        left, _ = assign(tile, nodes, low, high)
        same, diff = (slope[tile.rows].gather(1, left) for slope in slopes)
        m.add_weights(tile, torch.where(tile.same, same, 0) + torch.where(tile.diff, diff, 0))
    return m.gradients()
