"""Oriented similarities of listed pairs on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import Listed


def dots(ops: Any, rows: Tensor, cols: Tensor | None, i: Tensor, j: Tensor, view: str, normalize: bool) -> Tensor:
    m = Listed(ops, rows, cols, view, normalize)
    u = rows.new_empty(len(i), dtype=torch.float32)
    ops.dots(*m.arguments(1), i.contiguous(), j.contiguous(), None, u)
    return u


def dots_backward(
    ops: Any,
    grad: Tensor,
    rows: Tensor,
    cols: Tensor | None,
    i: Tensor,
    j: Tensor,
    view: str,
    normalize: bool,
    want_rows: bool,
    want_cols: bool,
) -> tuple[Tensor, Tensor]:
    m = Listed(ops, rows, cols, view, normalize)
    i, j = i.contiguous(), j.contiguous()
    factor = torch.empty_like(grad, dtype=torch.float32)
    ops.dots(*m.arguments(1), i, j, grad.float().contiguous(), factor)

    def gather(arguments: Any, own: Tensor, other: Tensor, n: int, parts: Tensor) -> None:
        rising, order = own.sort(stable=True)
        start = torch.searchsorted(rising, torch.arange(n + 1, device=own.device))
        ops.gather(*arguments, start, order, other, factor, parts)

    def weigh(arguments: Any, own_cols: bool, parts: Tensor) -> None:
        parts.zero_()
        if not own_cols:
            gather(arguments, i, j, m.row.n, parts)
        if own_cols or m.symmetric:
            gather(arguments, j, i, m.col.n, parts)

    return m.gradients(want_rows, want_cols, weigh)
