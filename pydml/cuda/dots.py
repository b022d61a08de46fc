"""Oriented similarities of listed pairs on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml.cuda.matrix import Listed
from pydml.declared import Backward, Dots


def dots(ops: Any, a: Dots) -> Tensor:
    m = Listed(ops, a)
    u = a.rows.new_empty(len(a.i), dtype=torch.float32)
    ops.dots(*m.arguments(1), a.i.contiguous(), a.j.contiguous(), None, u)
    return u


def dots_backward(ops: Any, b: Backward[Dots]) -> tuple[Tensor, Tensor]:
    m, grad = Listed(ops, b.call), b.grad.u
    i, j = b.call.i.contiguous(), b.call.j.contiguous()
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

    return m.gradients(b.want_rows, b.want_cols, weigh)
