"""Oriented similarities of listed pairs, a slice at a time: what losses on chosen pairs are computed from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pydml.declared import Backward, Dots
from pydml.tiled.sides import TILE_ELEMENTS, Matrix, near_tolerance


def _slices(m: Matrix, i: Tensor, j: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    step = max(1, TILE_ELEMENTS // max(m.row.x.shape[1], 1))
    for start in range(0, len(i), step):
        part = slice(start, start + step)
        yield part, m.row.x[i[part]], m.col.x[j[part]]


def dots(a: Dots) -> Tensor:
    """u [n] of the pairs (i, j)."""
    m, i, j, view = Matrix.of(a), a.i, a.j, a.view
    u = m.row.x.new_empty(len(i))
    for part, x, y in _slices(m, i, j):
        if view == "dot":
            u[part] = (x * y).sum(1)
            continue
        d2 = (x - y).square().sum(1)
        if view == "cosine":
            s = (x * y).sum(1)
            near = d2 < near_tolerance(d2.dtype) * (d2 + 2 * s)  # ‖x‖²+‖y‖² = D²+2S
            u[part] = torch.where(near & m.are_unit(i[part], j[part]), 1 - d2 / 2, s)
        else:
            u[part] = -d2 if view == "squared" else -d2.sqrt()
    (u,) = m.poison(u)
    return u


def dots_backward(b: Backward[Dots]) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/du [n]."""
    a = b.call
    m, i, j, view = Matrix.of(a), a.i, a.j, a.view
    m.start_gradient(b.want_rows, b.want_cols)
    (grad,) = m.poison(b.grad.u)
    for part, x, y in _slices(m, i, j):
        g = grad[part, None]
        if view in ("dot", "cosine"):
            m.row.push(i[part], g * y)
            m.col.push(j[part], g * x)
            continue
        away = x - y
        if view == "squared":
            push = -2 * g * away
        else:
            d = torch.linalg.vector_norm(away, dim=1, keepdim=True)
            push = -g * torch.where(d > 0, away / d, 0)  # at D=0 the gradient of D is 0
        m.row.push(i[part], push)
        m.col.push(j[part], -push)
    return m.gradients()
