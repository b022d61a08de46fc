"""The histogram engine on a GPU: soft counts of u per row, for positives and for negatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import Matrix
from pydml.declared import Backward, Histogram
from pydml.tiled.histogram import density


def histogram(ops: Any, a: Histogram) -> tuple[Tensor, Tensor, Tensor]:
    m = Matrix.of(ops, a)
    splits = m.splits()
    counts = []
    for positives in (True, False):
        parts = a.rows.new_zeros(splits, len(a.rows), a.nodes, dtype=torch.float32)
        if len(a.rows):
            ops.histogram(*m.arguments(splits), a.nodes, a.low, density(a), positives, parts)
        counts.append(m.unsorted(parts.sum(0)))
    positive, negative = m.poison(*counts)
    return positive, negative, positive.new_empty(0, 2)


def histogram_backward(ops: Any, b: Backward[Histogram]) -> tuple[Tensor, Tensor]:
    a = b.call
    m = Matrix.of(ops, a)
    grads = torch.stack((b.grad.positives, b.grad.negatives)).float()
    slopes = grads.diff(dim=2)[:, m.row.order] * density(a)

    def weigh(arguments: Any, own_cols: bool, parts: Tensor) -> None:
        own, other = (None if own_cols else slopes), (slopes if own_cols or m.symmetric else None)
        ops.histogram_backward(*arguments, a.nodes, a.low, density(a), own, other, parts)

    return m.gradients(b.want_rows, b.want_cols, weigh)
