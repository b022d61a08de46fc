"""The triplet engine on a GPU: positives become thresholds, and every negative is held against them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.dots import dots_backward
from pydml.cuda.matrix import HALVES, Matrix
from pydml.policy import softplus
from pydml.tiled.triplet import triplet as tiled_triplet
from pydml.tiled.triplet import triplet_backward as tiled_triplet_backward

#: Stages of the sweep, as in csrc/cuda/triplet.cu.
STAGES = ("list_positives", "sum_losses", "count_passed", "sum_slopes", "best_below")
#: The thresholds of all rows are held at once up to this class size; beyond it the tiled engine, which holds those of
#: one block of rows, takes over, so that memory stays linear in the batch.
MOST_POSITIVES = 64


class Triplets:
    """The positives of every anchor as rising thresholds, and what the triplet engine finds by them."""

    def __init__(self, m: Matrix, margin: float, smooth: bool) -> None:
        self.m, self.margin, self.smooth = m, margin, smooth
        number = m.row_range[:, 1] - m.row_range[:, 0] - int(m.symmetric)
        most = int(number.max()) if m.row.n else 0  # the host waits: memory hangs on it
        self.fits = most <= MOST_POSITIVES
        if not self.fits:
            return
        self.real = torch.arange(most, device=number.device) < number[:, None]
        self.value = torch.full((m.row.n, most), torch.inf, dtype=torch.float32, device=number.device)
        self.prefix = self.value
        self.value, self.slot = self.run("list_positives", self.value).sort(1)
        self.prefix = torch.nn.functional.pad(torch.where(self.real, self.value, 0).cumsum(1), (1, 0))

    @property
    def most(self) -> int:
        return self.value.shape[1]

    def run(self, stage: str, result: Tensor) -> Tensor:
        """Start a sweep that fills ``result``; nothing where no anchor has a positive."""
        if self.most:
            arguments = self.m.arguments(self.m.splits())
            number = STAGES.index(stage)
            self.m.ops.triplet(*arguments, number, self.margin, self.smooth, self.value, self.prefix, result)
        return result

    def sums(self) -> tuple[Tensor, Tensor]:
        """Per anchor, sorted: the sum of its triplets' losses and how many of them are above 0."""
        parts = self.value.new_zeros(self.m.splits() * HALVES, self.m.row.n, 2)
        total, count = self.run("sum_losses", parts).sum(0).unbind(1)
        return total, count

    def pushed(self) -> Tensor:
        """Per anchor and positive, in the order of columns: the sum of its triplets' slopes."""
        splits, n = self.m.splits(), self.m.row.n
        if self.smooth:
            pushed = self.run("sum_slopes", self.value.new_zeros(splits, n, self.most)).sum(0)
        else:
            counts = self.value.new_zeros(splits, n, self.most + 1, dtype=torch.int32)
            counts = self.run("count_passed", counts).sum(0)
            pushed = counts.flip(1).cumsum(1).flip(1)[:, 1:].float()
        return torch.empty_like(self.value).scatter_(1, self.slot, pushed)

    def semihard(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per anchor and positive, sorted: is there a negative below, its u, its column."""
        none = torch.iinfo(torch.int64).min
        best = self.m.row.order.new_full((self.m.splits(), self.m.row.n, self.most + 1), none)
        best = self.run("best_below", best).amax(0).cummax(1).values[:, : self.most]
        high = (best >> 32).int()
        u = torch.where(high < 0, ~(high ^ torch.iinfo(torch.int32).min), high).view(torch.float32)
        there = self.real & (best != none)
        return there, torch.where(there, u, 0), torch.where(there, 0xFFFFFFFF - (best & 0xFFFFFFFF), 0)

    def violations(self) -> tuple[Tensor, Tensor]:
        """Of the semi-hard triplets: how far each is violated, -inf where there is none, and its negative."""
        there, u, negative = self.semihard()
        return torch.where(there, u - self.value + self.margin, -torch.inf), negative

    def positives(self) -> Tensor:
        """Columns of the positives, as ``value`` has them."""
        first, row = self.m.row_range[:, :1], torch.arange(self.m.row.n, device=self.slot.device)[:, None]
        at = first + self.slot
        at = at + (at >= row).int() * int(self.m.symmetric)
        return self.m.col.order[at.clamp_max(self.m.col.n - 1)]


def triplet(
    ops: Any,
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
) -> tuple[Tensor, Tensor]:
    m = Matrix(ops, rows, cols, row_labels, col_labels, view, normalize)
    t = Triplets(m, margin, smooth)
    if swap or not t.fits:
        return tiled_triplet(rows, cols, row_labels, col_labels, mode, margin, swap, smooth, view, normalize)
    if mode == "semihard":
        violation, _ = t.violations()
        losses = softplus(violation) if smooth else violation.relu()
        total, count = losses.sum(1), (losses > 0).sum(1)
    else:
        total, count = t.sums()
    total, count = m.poison(m.unsorted(total), m.unsorted(count.float()))
    return total, count


def triplet_backward(
    ops: Any,
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
) -> tuple[Tensor, Tensor]:
    m = Matrix(ops, rows, cols, row_labels, col_labels, view, normalize)
    t = Triplets(m, margin, smooth)
    if swap or not t.fits:
        return tiled_triplet_backward(
            grad, rows, cols, row_labels, col_labels, mode, margin, swap, smooth, view, normalize, want_rows, want_cols
        )
    grad = grad.float()[m.row.order]
    if mode == "semihard":  # few pairs: they are listed
        violation, negative = t.violations()
        push = grad[:, None] * (violation.sigmoid() if smooth else (violation > 0).float())
        anchor = m.row.order[:, None].expand_as(negative)
        i = torch.cat((anchor, anchor)).flatten()
        j = torch.cat((negative, torch.where(t.real, t.positives(), 0))).flatten()
        return dots_backward(
            ops, torch.cat((push, -push)).flatten(), rows, cols, i, j, view, normalize, want_rows, want_cols
        )
    pushed = t.pushed()

    def weigh(arguments: Any, own_cols: bool, parts: Tensor) -> None:
        anchors = not own_cols, own_cols or m.symmetric
        ops.triplet_backward(*arguments, margin, smooth, *anchors, m.row_range, t.value, pushed, grad, parts)

    return m.gradients(want_rows, want_cols, weigh)
