"""Rows, columns and tiles of the similarity matrix that is never stored: what all tiled engines share.

The readable model of the kernels: normalise, walk over blocks of rows, turn dot products into oriented similarities,
and carry dL/du back to the embeddings, a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from pydml.sums import add_at_

#: Elements of one tile; the rows of a tile are chosen so that temporaries stay near 16 MiB in fp32.
TILE_ELEMENTS = 1 << 22
#: ‖z‖ is clamped here, as torch.nn.functional.normalize does.
TINY = 1e-12
#: Rows whose spread is this little of their mean square are centred, and how many rows are looked at to know it.
COLLAPSED, LOOKED_AT = 1 / 32, 64


def compute_dtype(z: Tensor) -> torch.dtype:
    """fp64 stays fp64, everything else is computed in fp32."""
    return torch.float64 if z.dtype == torch.float64 else torch.float32


def near_tolerance(dtype: torch.dtype) -> float:
    """S within this of 1: 2-2S has lost its digits, and D² is taken from the rows themselves."""
    return 1e-13 if dtype == torch.float64 else 1e-5


def twins(x: Tensor) -> Tensor | None:
    """For each row [n] the first one that is equal to it; None where no two are.

    A matrix product gives equal columns different bits, by where they stand, on some CPUs: who compares similarities
    for ties takes them from the first of equals.
    """
    if len(x) < 2:
        return None
    bits = torch.int64 if x.dtype == torch.float64 else torch.int32
    weights = uniform_bits(x.shape[1], x.device)
    step = max(1, TILE_ELEMENTS // x.shape[1])
    keys = torch.cat([((part + 0.0).view(bits).long() * weights).sum(1) for part in x.contiguous().split(step)])
    keys, order = keys.sort(stable=True)
    again = torch.cat((keys.new_zeros(1, dtype=torch.bool), keys[1:] == keys[:-1]))
    at = again.nonzero()[:, 0]
    if not len(at):
        return None
    again[at] = (x[order[at]] == x[order[at - 1]]).all(1)
    place = torch.arange(len(x), device=x.device)
    start = torch.where(again, 0, place).cummax(0).values
    return torch.empty_like(order).scatter_(0, order, order[start])


def uniform_bits(n: int, device: torch.device) -> Tensor:
    """n odd int64 numbers that look random, always the same."""
    v = (torch.arange(1, n + 1, device=device) * -7046029254386353131) ^ 0x5851F42D4C957F2D
    v = (v ^ (v >> 29)) * -4658895280553007687
    return (v ^ (v >> 32)) | 1


class Side:
    """One set of embeddings ``z`` [n, d]: what the matrix is made of (``x``), and the gradient that comes back."""

    def __init__(self, z: Tensor, normalize: bool, centre: Tensor | None = None) -> None:
        self.given, self.normalize = z.detach(), normalize
        z = self.given.to(compute_dtype(z))
        self.norm = torch.linalg.vector_norm(z, dim=1, keepdim=True)  # [n, 1]
        self.unit = z / self.norm.clamp_min(TINY) if normalize else z
        self.x = self.unit if centre is None else self.unit - centre
        self.finite = torch.isfinite(z).all()
        self.grad: Tensor | None = None

    def start_gradient(self) -> None:
        self.grad = torch.zeros_like(self.x)

    def push(self, index: Tensor, g: Tensor) -> None:
        """Add dL/dx of some rows."""
        if self.grad is not None:
            add_at_(self.grad, index, g)

    def gradient(self) -> Tensor:
        """dL/dz from dL/dx: the normalisation's own backward. Empty where it was not asked for."""
        g = self.grad
        if g is None:
            return self.given.new_empty(0)
        if self.normalize:
            radial = (g * self.unit).sum(1, keepdim=True) * self.unit
            g = torch.where(self.norm > TINY, g - radial, g) / self.norm.clamp_min(TINY)
        return torch.empty_like(self.given).copy_(g)  # in the dtype and the layout of z


def centre_of(rows: Tensor, view: str, normalize: bool) -> Tensor | None:
    """What distances are better taken from [d]: the mean of rows that have all but collapsed to a point, 0 for others.

    ‖x_i‖²+‖x_j‖²-2S loses the digits that D² is smaller by than the rows; distances do not change where a common vector
    is taken from all rows, and the digits then are there. Some rows stand for all: any vector near them will do.
    """
    if view in ("dot", "cosine") or rows.shape[0] < 2:
        return None
    some = torch.arange(LOOKED_AT, device=rows.device) * rows.shape[0] // LOOKED_AT
    x = Side(rows[some], normalize).x
    mean, square = x.mean(0), x.square().sum(1).mean()
    return torch.where(square - mean.square().sum() < COLLAPSED * square, mean, 0)


@dataclass
class Tile:
    """Rows ``rows`` of the matrix against all columns."""

    rows: Tensor  # [r] their indices
    u: Tensor  # [r, N] oriented similarity
    same: Tensor  # [r, N] bool: positives, self excluded
    diff: Tensor  # [r, N] bool: negatives
    slope: Tensor | None  # [r, N] du/dD² where u is a distance
    near: tuple[Tensor, Tensor] | None  # pairs whose D² came from the rows


class Matrix:
    """The R×N matrix of oriented similarities, by tiles."""

    def __init__(
        self,
        rows: Tensor,
        cols: Tensor | None,
        row_labels: Tensor,
        col_labels: Tensor | None,
        view: str,
        normalize: bool,
        selves: Tensor | None = None,
    ) -> None:
        self.symmetric = cols is None
        self.view = view
        centre = centre_of(rows, view, normalize)
        self.row = Side(rows, normalize, centre)
        self.col = self.row if cols is None else Side(cols, normalize, centre)
        self.row_labels = row_labels
        self.col_labels = row_labels if col_labels is None else col_labels
        self.columns = torch.arange(len(self.col.x), device=rows.device)
        #: The column [R] that is the row itself, for rows that are among the columns.
        self.selves = self.columns if cols is None else selves
        self.finite = self.row.finite & self.col.finite
        #: Are du/dD² wanted? Who only selects leaves them out.
        self.slopes = True

    @classmethod
    def of(cls, a: Any) -> Self:
        """The matrix of a call of an op; metrics have no view, and listed pairs no labels."""
        nowhere = a.rows.new_empty(0, dtype=torch.int64)
        labels = getattr(a, "row_labels", nowhere), getattr(a, "col_labels", None)
        return cls(a.rows, a.cols, *labels, getattr(a, "view", "dot"), a.normalize, getattr(a, "selves", None))

    @property
    def shape(self) -> tuple[int, int]:
        return self.row.x.shape[0], self.col.x.shape[0]

    def tiles(self) -> Iterator[Tile]:
        """The matrix by blocks of whole rows; nothing where it has no columns."""
        rows, cols = self.shape
        if rows and cols:
            for block in torch.arange(rows, device=self.row.x.device).split(max(16, min(1024, TILE_ELEMENTS // cols))):
                yield self.tile(block)

    def tile(self, rows: Tensor) -> Tile:
        same = self.row_labels[rows, None] == self.col_labels[None, :]
        diff = ~same
        self.clear_self(same, rows)
        u, slope, near = self.similarity(rows)
        return Tile(rows, u, same, diff, slope, near)

    def clear_self(self, mask: Tensor, rows: Tensor) -> None:
        """Self pairs are excluded by index, never by value."""
        if self.selves is not None:
            selves = self.selves[rows]
            mask[torch.arange(len(rows), device=rows.device), selves.clamp_min(0)] &= selves < 0

    def similarity(self, rows: Tensor) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """u, du/dD² and the near pairs of a block of rows."""
        x, y = self.row.x[rows], self.col.x
        s = x @ y.T
        if self.view == "dot":
            return s, None, None
        size = (x * x).sum(1)[:, None] + (y * y).sum(1)[None, :]
        d2 = size - 2 * s
        close = d2 < near_tolerance(s.dtype) * size
        self.clear_self(close, rows)
        i, j = close.nonzero(as_tuple=True)
        d2[i, j] = self.near_squares(x, i, j)
        if self.view == "cosine":
            s[i, j] = torch.where(self.are_unit(rows[i], j), 1 - d2[i, j] / 2, s[i, j])
            return s, None, None
        d2 = d2.clamp_min_(0)
        if self.view == "squared":
            return -d2, torch.full_like(d2, -1.0), (i, j)
        d = d2.sqrt_()
        slope = torch.where(d > 0, -0.5 / d, 0) if self.slopes else None  # at D=0 the gradient of D is 0
        return -d, slope, (i, j)

    def are_unit(self, i: Tensor, j: Tensor) -> Tensor:
        """Are both rows of listed pairs of length 1: normalised, neither 0 nor too short for it?"""
        least = TINY if self.row.normalize else torch.inf
        unit: Tensor = (self.row.norm[i, 0] > least) & (self.col.norm[j, 0] > least)
        return unit

    def near_squares(self, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """‖x_i - y_j‖² of listed pairs, in slices that hold no more than a tile does."""
        step = max(1, TILE_ELEMENTS // max(x.shape[1], 1))
        parts = [(x[a] - self.col.x[b]).square().sum(1) for a, b in zip(i.split(step), j.split(step), strict=True)]
        return torch.cat(parts) if parts else x.new_empty(0)

    def start_gradient(self, want_rows: bool, want_cols: bool) -> None:
        if want_rows:
            self.row.start_gradient()
        if want_cols and not self.symmetric:
            self.col.start_gradient()

    def add_weights(self, tile: Tile, w: Tensor) -> None:
        """Carry w = dL/du of a tile (0 outside its pairs) to the gradients of rows and columns."""
        x, y = self.row.x[tile.rows], self.col.x
        if tile.slope is None:
            if self.row.grad is not None:
                self.row.push(tile.rows, w @ y)
            if self.col.grad is not None:
                self.col.push(self.columns, w.T @ x)
            return
        q = 2 * w * tile.slope  # dD²/dx_i = 2 (x_i - y_j)
        assert tile.near is not None
        i, j = tile.near
        step = max(1, TILE_ELEMENTS // max(x.shape[1], 1))
        for a, b in zip(i.split(step), j.split(step), strict=True):  # differences first: q is huge where D is tiny
            push = q[a, b, None] * (x[a] - y[b])
            self.row.push(tile.rows[a], push)
            self.col.push(b, -push)
        q[i, j] = 0
        if self.row.grad is not None:
            self.row.push(tile.rows, q.sum(1, keepdim=True) * x - q @ y)
        if self.col.grad is not None:
            self.col.push(self.columns, q.sum(0)[:, None] * y - q.T @ x)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """dL/d rows and dL/d columns (empty where the columns are the rows: theirs is in the first already)."""
        g = self.row.gradient()
        return g, g.new_empty(0) if self.symmetric else self.col.gradient()

    def poison(self, *values: Tensor) -> tuple[Tensor, ...]:
        """NaN in, NaN out: no comparison may hide a NaN or an infinity of the embeddings."""
        return tuple(torch.where(self.finite, v, torch.nan) for v in values)


def beyond(k: Tensor, member: Tensor, thresholds: int) -> Tensor:
    """[r, thresholds]: how many members have passed each threshold, from how many thresholds each member passed."""
    passed = k.new_zeros(len(k), thresholds + 1).scatter_add_(1, torch.where(member, k, 0), member.to(k.dtype))
    return passed.flip(1).cumsum(1).flip(1)[:, 1:]
