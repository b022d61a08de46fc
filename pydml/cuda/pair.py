"""The pair engine on a GPU: row statistics of a policy, and the gradients that they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import HALVES, KEPT, Matrix, policy_number, sorted_field
from pydml.policy import POLICIES


def pair(
    ops: Any,
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    row_field: Tensor | None,
    col_field: Tensor | None,
    policy: str,
    params: Sequence[float],
    view: str,
    normalize: bool,
    epsilon: float | None,
    pool_size: int,
    sharpness: float,
) -> tuple[Tensor, Tensor, Tensor]:
    m = Matrix(ops, rows, cols, row_labels, col_labels, view, normalize, pool_size, sharpness)
    n = len(rows)
    stats = rows.new_empty(n, len(POLICIES[policy].slots), dtype=torch.float32)
    thresholds = stats.new_zeros(n, 2)
    if n:
        splits = m.splits()
        ops.pair(
            *m.arguments(splits),
            policy_number(policy),
            list(params),
            sorted_field(row_field, m.row),
            sorted_field(col_field, m.col),
            epsilon,
            thresholds,
            stats.new_empty(splits * HALVES, n, KEPT),
            stats,
        )
        if epsilon is not None:
            thresholds = m.unsorted(thresholds)
    return stats, thresholds, rows.new_empty(0, dtype=torch.uint8)


def pair_backward(
    ops: Any,
    grad: Tensor,
    stats: Tensor,
    thresholds: Tensor,
    saved: Tensor,
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    row_field: Tensor | None,
    col_field: Tensor | None,
    policy: str,
    params: Sequence[float],
    view: str,
    normalize: bool,
    epsilon: float | None,
    pool_size: int,
    sharpness: float,
    want_rows: bool,
    want_cols: bool,
) -> tuple[Tensor, Tensor]:
    m = Matrix(ops, rows, cols, row_labels, col_labels, view, normalize, pool_size, sharpness)
    fields = sorted_field(row_field, m.row), sorted_field(col_field, m.col)
    anchors = [t[m.row.order] for t in (stats, grad.float(), thresholds)]
    if m.symmetric:
        own = other = [*anchors, *fields]
    else:
        own, other = [*anchors, fields[0], None], [None, None, None, None, fields[1]]

    def weigh(arguments: Any, own_cols: bool, parts: Tensor) -> None:
        sides = [*other, *own] if own_cols else [*own, *other]
        ops.pair_backward(*arguments, policy_number(policy), list(params), epsilon is not None, *sides, parts)

    return m.gradients(want_rows, want_cols, weigh)
