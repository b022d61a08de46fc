"""The triplet engine on a GPU: positives become thresholds, and every negative is held against them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.backends import class_limit
from pydml.cuda.matrix import HALVES, Matrix, ceil
from pydml.declared import Backward, Triplet

#: Positives of a row that a block holds at a time, as in csrc/cuda/thresholds.cuh, and that the tables of the gradient
#: have room for. Larger classes take more windows; as nobody waits for the size of the largest class, all windows are
#: launched that :func:`pydml.largest_class` does not exclude, and end at once where no class reaches them.
CHUNK, WINDOW = 32, 256


def longest_range(m: Matrix) -> Tensor:
    """Most positives of a row [1], itself included; more than were promised are trouble."""
    if not m.row.n:
        return m.trouble
    longest = (m.row_range[:, 1] - m.row_range[:, 0]).amax(0, keepdim=True)
    m.trouble += longest > class_limit(m.col.n)
    return longest


def triplet(ops: Any, a: Triplet) -> tuple[Tensor, Tensor]:
    m, semihard = Matrix.of(ops, a), a.mode == "semihard"
    splits = 1 if semihard else m.splits()
    sums = a.rows.new_zeros(splits * HALVES, m.row.n, 2, dtype=torch.float32)
    if m.row.n:
        longest_range(m)
        ops.triplet(*m.arguments(splits), semihard, a.smooth, a.margin, 0, [], sums)
    total, count = m.poison(*m.unsorted(sums.sum(0)).unbind(1))
    return total, count


def triplet_backward(ops: Any, b: Backward[Triplet]) -> tuple[Tensor, Tensor]:
    a = b.call
    m = Matrix.of(ops, a)
    grad = b.grad.total.float()[m.row.order]
    longest = longest_range(m)
    shape = m.row.n, min(WINDOW, ceil(m.col.n, CHUNK) * CHUNK)
    tables = [grad.new_empty(shape), grad.new_empty(shape), grad.new_empty(shape, dtype=torch.int32)]

    def weigh(arguments: Any, own_cols: bool, parts: Tensor) -> None:
        anchors = not own_cols, own_cols or m.symmetric
        for window in range(0, class_limit(m.col.n), WINDOW):
            how = a.mode == "semihard", a.smooth, a.margin, window
            ops.triplet(*m.arguments(1), *how, tables, None)
            ops.triplet_backward(*arguments, *how, *anchors, m.row_range, longest, tables, grad, parts)

    return m.gradients(b.want_rows, b.want_cols, weigh)
