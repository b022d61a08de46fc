"""The rank engine on a GPU: retrieval metrics by counting what lies above each positive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import Matrix
from pydml.declared import Rank


def rank(ops: Any, a: Rank) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m = Matrix.of(ops, a)
    number, above, hits = torch.zeros_like(a.row_labels), *a.row_labels.new_zeros(2, m.row.n, 2).unbind()
    precision = a.rows.new_zeros(m.row.n, 2, dtype=torch.float64)
    if m.row.n:
        ops.rank(*m.arguments(1), number, above, hits, precision)
    return number, above, hits, precision
