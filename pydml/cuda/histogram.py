"""The histogram engine on a GPU: soft counts of u per row, for positives and for negatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import Matrix


def histogram(
    ops: Any,
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    nodes: int,
    low: float,
    high: float,
    view: str,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    m = Matrix(ops, rows, cols, row_labels, col_labels, view, normalize)
    splits, density = m.splits(), (nodes - 1) / (high - low)
    counts = []
    for positives in (True, False):
        parts = rows.new_zeros(splits, len(rows), nodes, dtype=torch.float32)
        if len(rows):
            ops.histogram(*m.arguments(splits), nodes, low, density, positives, parts)
        counts.append(m.unsorted(parts.sum(0)))
    positive, negative = m.poison(*counts)
    return positive, negative, positive.new_empty(0, 2)


def histogram_backward(
    ops: Any,
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
) -> tuple[Tensor, Tensor]:
    m = Matrix(ops, rows, cols, row_labels, col_labels, view, normalize)
    density = (nodes - 1) / (high - low)
    slopes = torch.stack((grad_positives, grad_negatives)).float().diff(dim=2)[:, m.row.order] * density

    def weigh(arguments: Any, own_cols: bool, parts: Tensor) -> None:
        own, other = (None if own_cols else slopes), (slopes if own_cols or m.symmetric else None)
        ops.histogram_backward(*arguments, nodes, low, density, own, other, parts)

    return m.gradients(want_rows, want_cols, weigh)
