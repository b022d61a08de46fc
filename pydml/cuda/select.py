"""The select engines on a GPU: what a miner or a selecting loss keeps of each row. Indices only, no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import HALVES, Matrix, ranges_of
from pydml.declared import Extremes, Mined, Sample


def extreme(
    m: Matrix,
    signs: tuple[int, int],
    missing: tuple[float, float] = (0.0, 0.0),
    above: Tensor | None = None,
    below: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Columns [2, R] of the positive and the negative of largest (1) or smallest (-1) u, and those u, sorted.

    Only positives above ``above`` and negatives below ``below`` count; a sign of 0 leaves a side out.
    """
    splits = m.splits()
    chosen = m.row.order.new_full((2, m.row.n), -1)
    u = torch.empty(chosen.shape, dtype=torch.float32, device=chosen.device)
    for side, value in zip(u, missing, strict=True):  # a side that is left out has none
        side.fill_(value)
    if m.row.n:
        values = u.new_empty(splits * HALVES, m.row.n, 2)
        columns = chosen.new_empty(splits * HALVES, m.row.n, 2)
        m.ops.extremes(*m.arguments(splits), list(signs), list(missing), above, below, values, columns, chosen, u)
    return chosen, u


def extremes(ops: Any, a: Extremes) -> tuple[Tensor, Tensor]:
    m, positive, negative = Matrix.of(ops, a), a.positive, a.negative
    easy, hard = ({"easy": 1, "none": 0}.get(positive, -1), {"easy": -1, "none": 0}.get(negative, 1))
    inf = float("inf")
    if positive == "semihard":  # the hardest positive that is still nearer than the chosen negative
        chosen, u = extreme(m, (0, hard), (0.0, inf))
        return extreme(m, (-1, 0), above=u[1])[0][0], chosen[1]
    if negative == "semihard":  # the hardest negative that is still farther than the chosen positive
        chosen, u = extreme(m, (easy, 0), (-inf, 0.0))
        return chosen[0], extreme(m, (0, 1), below=u[0])[0][1]
    p, n = extreme(m, (easy, hard))[0].unbind()
    return p, n


def mined(ops: Any, a: Mined) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, epsilon = Matrix.of(ops, a), a.epsilon
    n_cols, splits, thresholds = m.col.n, m.splits(), None
    counts = m.row.order.new_zeros(2, m.row.n * splits * HALVES)
    if m.row.n:
        if epsilon is not None:
            u = extreme(m, (-1, 1), (float("inf"), -float("inf")))[1]
            thresholds = torch.stack((u[1] + epsilon, u[0] - epsilon), 1)
        ops.mined(*m.arguments(splits), thresholds, counts, None, None)
    pairs = [counts.new_empty(n) for n in counts.sum(1).tolist()]  # the one place where the host waits
    if m.row.n:
        ops.mined(*m.arguments(splits), thresholds, counts.cumsum(1) - counts, *pairs)
    (a1, p), (a2, n) = ((key // max(n_cols, 1), key % max(n_cols, 1)) for key in (k.sort().values for k in pairs))
    return a1, p, a2, n


def sample(ops: Any, a: Sample) -> Tensor:
    m = Matrix(ops, a.rows, a.cols, a.row_labels, a.col_labels, "euclidean", True)
    anchors = a.anchors
    drawn = torch.full_like(anchors, -1)
    if len(anchors) and m.col.n:
        labels = (a.row_labels if a.col_labels is None else a.col_labels)[m.col.order]
        m.row, m.row_range = m.side(m.row.given, anchors, True), ranges_of(a.row_labels[anchors], labels)
        m.symmetric = False  # a draw is not a row; and self pairs are no negatives
        splits = m.splits()
        values = a.rows.new_empty(splits * HALVES, len(anchors), dtype=torch.float64)
        columns = anchors.new_empty(splits * HALVES, len(anchors))
        cutoffs = a.cutoff, a.nonzero_loss_cutoff
        ops.sample(*m.arguments(splits), a.seed.to(a.rows.device), *cutoffs, values, columns, drawn)
    return drawn
