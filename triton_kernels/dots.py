"""Oriented similarities of listed pairs and their gradient: gathers of rows, no matrix.

Pairs are computed in fp32 from the unit rows themselves, whatever the arithmetic of the other engines, and distances
from differences, so no pair is too near. Backward, the pairs are sorted by the row that they push, and a program owns
that row: nothing is added by two programs, and the bits are the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pydml.declared import Backward, Dots
from pydml.tiled.sides import TINY, Matrix, Side
from pydml.triton_kernels.matrix import launch
from pydml.triton_kernels.tile import NEAR

#: ‖z‖ is clamped here: a row that is no longer is no unit row.
CLAMP: tl.constexpr = tl.constexpr(TINY)
#: Pairs, and columns of them, that a program looks at in one step.
PAIRS, WIDTH = 16, 128


@triton.jit
def dots_kernel(X, Y, X_NORM, Y_NORM, ROW, COL, U, n, d, VIEW: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr):
    """u of BP pairs."""
    at = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    real = at < n
    row, col = tl.load(ROW + at, mask=real, other=0), tl.load(COL + at, mask=real, other=0)
    x, y = X + row[:, None] * d, Y + col[:, None] * d
    if VIEW == "cosine":
        unit = (tl.load(X_NORM + row) > CLAMP) & (tl.load(Y_NORM + col) > CLAMP)
    s = tl.zeros((BP,), tl.float32)
    d2 = tl.zeros((BP,), tl.float32)
    for start in range(0, d, BD):
        k = start + tl.arange(0, BD)[None, :]
        inside = real[:, None] & (k < d)
        a, b = tl.load(x + k, mask=inside, other=0.0), tl.load(y + k, mask=inside, other=0.0)
        s += tl.sum(a * b, 1)
        d2 += tl.sum((a - b) * (a - b), 1)
    if VIEW == "dot":
        u = s
    elif VIEW == "cosine":
        u = tl.where(unit & (d2 < (d2 + 2 * s) * NEAR), 1 - 0.5 * d2, s)  # ‖x‖²+‖y‖² = D²+2S
    elif VIEW == "squared":
        u = -d2
    else:
        u = -tl.sqrt(d2)
    tl.store(U + at, u, mask=real)


@triton.jit
def dots_backward_kernel(X, Y, PAIR, OTHER, W, START, G, n, d, DISTANCE: tl.constexpr, BP: tl.constexpr,
                         BD: tl.constexpr):  # fmt: skip
    """dL/dx of one row, BD of its columns: Σ w·y over its pairs, or Σ w·(x - y) for distances.

    PAIR lists the entries by the row that they push, START where each row's begin; entry e is pair e modulo n.
    """
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    inside = k < d
    g = tl.zeros((BD,), tl.float32)
    x = tl.load(X + row * d + k, mask=inside, other=0.0)
    start, stop = tl.load(START + row), tl.load(START + row + 1)
    for first in range(start, stop, BP):
        at = first + tl.arange(0, BP)
        real = at < stop
        entry = tl.load(PAIR + at, mask=real, other=0)
        other = tl.load(OTHER + entry, mask=real, other=0)
        w = tl.load(W + entry % n, mask=real, other=0.0)[:, None]
        y = tl.load(Y + other[:, None] * d + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        if DISTANCE:
            y = tl.where(real[:, None], x[None, :] - y, 0.0)
        g += tl.sum(w * y, 0)
    tl.store(G + row * d + k, g, mask=inside)


def _width(x: Tensor) -> int:
    return min(WIDTH, triton.next_power_of_2(max(x.shape[1], 1)))


def _forward(m: Matrix, i: Tensor, j: Tensor) -> Tensor:
    n, d = i.shape[0], m.row.x.shape[1]
    u = m.row.x.new_empty(n)
    if n:
        launch(dots_kernel, (triton.cdiv(n, PAIRS),), u.device, m.row.x, m.col.x, m.row.norm, m.col.norm, i, j, u, n, d,
               VIEW=m.view, BP=PAIRS, BD=_width(m.row.x), num_warps=4)  # fmt: skip
    return u


def _matrix(a: Dots) -> Matrix:
    # S of rows that are not normalised is their product, however near they are
    view = "dot" if a.view == "cosine" and not a.normalize else a.view
    m = Matrix(a.rows, a.cols, a.i, None, view, a.normalize)
    for side in (m.row, m.col):
        side.x = side.x.contiguous()
    return m


def dots(a: Dots) -> Tensor:
    """u [n] of the pairs (i, j)."""
    m = _matrix(a)
    (u,) = m.poison(_forward(m, a.i.contiguous(), a.j.contiguous()))
    return u


def dots_backward(b: Backward[Dots]) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/du [n]."""
    a = b.call
    m, i, j = _matrix(a), a.i.contiguous(), a.j.contiguous()
    (w,) = m.poison(b.grad.u)
    if a.view == "euclidean":  # du = -(x-y)/D·dx, and at D=0 the gradient of D is 0
        u = _forward(m, i, j)
        w = w * torch.where(u < 0, 1 / u, 0)
    elif a.view == "squared":
        w = -2 * w

    def run(own: Side, other: Side, target: Tensor, source: Tensor) -> None:
        (size, d), width = own.x.shape, _width(own.x)
        pushed, entries = target.sort(stable=True)
        starts = torch.searchsorted(pushed, torch.arange(size + 1, device=pushed.device))
        own.grad = torch.zeros_like(own.x)
        if len(w) and size:
            launch(dots_backward_kernel, (size, triton.cdiv(d, width)), w.device, own.x, other.x, entries, source, w,
                   starts, own.grad, len(w), d, DISTANCE=a.view in ("euclidean", "squared"), BP=PAIRS, BD=width,
                   num_warps=4)  # fmt: skip

    if b.want_rows and m.symmetric:
        run(m.row, m.row, torch.cat((i, j)), torch.cat((j, i)))
    elif b.want_rows:
        run(m.row, m.col, i, j)
    if b.want_cols and not m.symmetric:
        run(m.col, m.row, j, i)
    return m.gradients()
