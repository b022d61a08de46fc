"""The rank engine on a GPU: retrieval metrics by counting what lies above each positive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import Matrix


def rank(
    ops: Any, rows: Tensor, cols: Tensor | None, row_labels: Tensor, col_labels: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m = Matrix(ops, rows, cols, row_labels, col_labels, "dot", normalize)
    number, above, hits = row_labels.new_zeros(m.row.n), *row_labels.new_zeros(2, m.row.n, 2).unbind()
    precision = rows.new_zeros(m.row.n, 2, dtype=torch.float64)
    if m.row.n:
        ops.rank(*m.arguments(1), number, above, hits, precision)
    return number, above, hits, precision
