"""The pair engine on a GPU: row statistics of a policy, and the gradients that they lead to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import HALVES, KEPT, Matrix, policy_number, sorted_field
from pydml.declared import Backward, Pair
from pydml.policy import POLICIES

#: Which pairs to visit, in the order of csrc/cuda/launchers.h.
VISITS = ("both", "positives", "negatives")


def pair(ops: Any, a: Pair) -> tuple[Tensor, Tensor, Tensor]:
    m = Matrix.of(ops, a)
    n = len(a.rows)
    stats = a.rows.new_empty(n, len(POLICIES[a.policy].slots), dtype=torch.float32)
    thresholds = stats.new_zeros(n, 2)
    if a.bounds is not None:
        thresholds = a.bounds[m.row.order]
    elif a.mines:  # what is not found keeps no pair
        thresholds[:, 0], thresholds[:, 1] = -torch.inf, torch.inf
    if n:
        splits = m.splits()
        ops.pair(
            *m.arguments(splits),
            policy_number(a.policy),
            list(a.params),
            sorted_field(a.row_field, m.row),
            sorted_field(a.col_field, m.col),
            a.epsilon,
            a.bounds is not None,
            VISITS.index(a.side),
            thresholds,
            stats.new_empty(splits * HALVES, n, KEPT),
            stats,
        )
        if a.epsilon is not None:
            thresholds = m.unsorted(thresholds)
    return stats, thresholds, a.rows.new_empty(0, dtype=torch.uint8)


def pair_backward(ops: Any, b: Backward[Pair]) -> tuple[Tensor, Tensor]:
    a = b.call
    m = Matrix.of(ops, a)
    fields = sorted_field(a.row_field, m.row), sorted_field(a.col_field, m.col)
    anchors = [t[m.row.order] for t in (b.out.stats, b.grad.stats.float(), b.out.thresholds)]
    if m.symmetric:
        own = other = [*anchors, *fields]
    else:
        own, other = [*anchors, fields[0], None], [None, None, None, None, fields[1]]

    def weigh(arguments: Any, own_cols: bool, parts: Tensor) -> None:
        sides = [*other, *own] if own_cols else [*own, *other]
        ops.pair_backward(
            *arguments, policy_number(a.policy), list(a.params), a.mines, VISITS.index(a.side), *sides, parts
        )

    return m.gradients(b.want_rows, b.want_cols, weigh)
