"""Rows, columns and gradients of the similarity matrix as the CUDA kernels take them: what all engines share.

Sorting, ranges of classes and small tables are plain PyTorch on the device; C++ fills what is allocated here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from pydml.backends import tf32
from pydml.declared import Dots
from pydml.policy import BUILT_IN
from pydml.tiled.sides import centre_of

#: Edge of a tile, columns of a gradient in one block, and bytes of a slab of a row; as in csrc/cuda/.
TILE, DEPTH, SLAB_BYTES = 64, 256, 128
#: Blocks that fill a GPU: tiles of rows that are fewer share their walk over the columns between blocks.
BLOCKS = 256
MOST_SPLITS = 16
#: Numbers that a part of a row of ``pair`` keeps, and threads that share a row.
KEPT, HALVES = 10, 2
#: Views and formats of products, in the order of csrc/cuda/matrix.h.
VIEWS = ("dot", "cosine", "euclidean", "squared")
FP32, TF32, BF16, FP16 = range(4)


def math_of(dtype: torch.dtype) -> int:
    """How dot products are formed: fp32 as PyTorch's own products are."""
    if dtype == torch.float32:
        return TF32 if tf32() else FP32
    return BF16 if dtype == torch.bfloat16 else FP16


def ceil(a: int, b: int) -> int:
    return -(-a // b)


class Rows:
    """One side of the matrix in sorted order, padded to whole tiles; ``pool`` neighbouring rows are one item."""

    def __init__(
        self,
        ops: Any,
        z: Tensor,
        order: Tensor,
        pool: int,
        normalize: bool,
        math: int,
        centre: Tensor | None,
        trouble: Tensor,
    ) -> None:
        self.given, self.order, self.pool, self.normalize = z, order, pool, normalize
        self.n, self.tiles = len(order), ceil(len(order), TILE // pool)
        width = SLAB_BYTES // z.element_size()
        places = self.tiles * TILE
        if pool == 1:
            self.index = torch.nn.functional.pad(order, (0, places - self.n), value=-1)
        else:
            self.index = order.new_full((places,), -1)
            item, member = torch.arange(self.n, device=z.device), torch.arange(pool, device=z.device)
            place = item // (TILE // pool) * TILE + item % (TILE // pool) * pool
            self.index[place[:, None] + member] = order[:, None] * pool + member
        self.x = z.new_empty(places, ceil(z.shape[1], width) * width)
        self.numbers = z.new_empty(3, places, dtype=torch.float32)
        if places:
            ops.prepare(z, self.index, normalize, math, centre, self.x, self.numbers, trouble)

    def tensors(self) -> list[Tensor]:
        return [self.x, self.numbers, self.index]


class Matrix:
    """Rows against columns: both sides prepared, and where each finds its class on the other."""

    #: What is taken from rows and columns that have all but collapsed to a point.
    centre: Tensor | None = None

    def __init__(
        self,
        ops: Any,
        rows: Tensor,
        cols: Tensor | None,
        row_labels: Tensor,
        col_labels: Tensor | None,
        view: str,
        normalize: bool,
        pool: int = 1,
        sharpness: float = 1.0,
        selves: Tensor | None = None,
    ) -> None:
        self.begin(ops, rows, cols, view, sharpness)
        if self.dtype == torch.float32:  # 16-bit rows are stored exactly as they are, and less a centre could not be
            self.centre = centre_of(rows, view, normalize)
        labels, order = row_labels.sort(stable=True)
        self.row = self.col = self.side(rows, order, normalize)
        other = labels
        if cols is not None:
            assert col_labels is not None
            other, order = col_labels.sort(stable=True)
            self.col = self.side(cols, order, normalize, pool)
        self.row_range = ranges_of(labels, other)
        self.col_range = self.row_range if cols is None else ranges_of(other, labels)
        if selves is not None and self.col.n:
            self.selves = self.places_of(selves)

    @classmethod
    def of(cls, ops: Any, a: Any) -> Self:
        """The matrix of a call of an op; metrics have no view, only ``pair`` pools, and some know no selves."""
        rest = getattr(a, "pool_size", 1), getattr(a, "sharpness", 1.0), getattr(a, "selves", None)
        return cls(ops, a.rows, a.cols, a.row_labels, a.col_labels, getattr(a, "view", "dot"), a.normalize, *rest)

    def begin(self, ops: Any, rows: Tensor, cols: Tensor | None, view: str, sharpness: float) -> None:
        self.ops, self.symmetric, self.view, self.sharpness = ops, cols is None, VIEWS.index(view), sharpness
        self.given = rows, cols
        self.dtype = rows.dtype if cols is None else torch.promote_types(rows.dtype, cols.dtype)
        self.math = math_of(self.dtype)
        self.trouble = torch.zeros(1, dtype=torch.int32, device=rows.device)
        #: Place of the column [R] that each sorted row itself is, -1: none; empty where the columns hold no rows.
        self.selves = self.trouble.new_empty(0)

    def side(self, z: Tensor, order: Tensor, normalize: bool, pool: int = 1) -> Rows:
        return Rows(self.ops, z.detach().to(self.dtype), order, pool, normalize, self.math, self.centre, self.trouble)

    def places_of(self, selves: Tensor) -> Tensor:
        """``selves`` by places. A column of another class is a negative, whatever is said of it."""
        place = torch.empty_like(self.col.order)
        place[self.col.order] = torch.arange(self.col.n, device=place.device)
        selves = selves[self.row.order]
        found = torch.where(selves < 0, -1, place[selves.clamp_min(0)]).int()
        first, last = self.row_range.unbind(1)
        return torch.where((found >= first) & (found < last), found, -1)

    def arguments(self, splits: int, own_cols: bool = False) -> tuple[list[Tensor], list[int], float]:
        """What the C++ ops take for a matrix; with ``own_cols`` blocks own columns and walk over rows."""
        own, other, ranges, selves = self.row, self.col, self.row_range, [self.selves, self.selves[:0]]
        if own_cols:
            own, other, ranges, selves = self.col, self.row, self.col_range, selves[::-1]
        shape = [own.n, own.pool, other.n, other.pool, own.given.shape[1], self.math, self.view, int(self.symmetric)]
        return [*own.tensors(), *other.tensors(), ranges, self.trouble, *selves], [*shape, splits], self.sharpness

    def splits(self, own_cols: bool = False, depth: int = 1) -> int:
        """Blocks that share the walk of one tile of rows; sizes alone decide, so that bits do not hang on the GPU."""
        own, other = (self.col, self.row) if own_cols else (self.row, self.col)
        return max(1, min(MOST_SPLITS, BLOCKS // max(1, own.tiles * depth), other.tiles))

    def unsorted(self, values: Tensor) -> Tensor:
        """Rows of ``values`` from sorted order back to that of the embeddings."""
        return torch.empty_like(values).index_copy_(0, self.row.order, values)

    def poison(self, *values: Tensor) -> tuple[Tensor, ...]:
        """NaN in, NaN out: no comparison may hide a NaN or an infinity of the embeddings."""
        return tuple(torch.where(self.trouble == 0, v, torch.nan) for v in values)

    def gradients(self, want_rows: bool, want_cols: bool, weigh: Any) -> tuple[Tensor, Tensor]:
        """dL/d rows and dL/d columns (empty where not wanted); ``weigh(matrix, own_cols, parts)`` starts the kernel."""
        results = []
        for wanted, own_cols, side, given in zip(
            (want_rows, want_cols), (False, True), (self.row, self.col), self.given, strict=True
        ):
            if not wanted or given is None:
                results.append(self.given[0].new_empty(0))
                continue
            grad = torch.empty_like(side.given)
            if len(grad) and not (self.row if own_cols else self.col).n:
                grad.zero_()
            elif len(grad):
                splits = self.splits(own_cols, ceil(grad.shape[1], DEPTH))
                arguments = self.arguments(splits, own_cols)
                parts = grad.new_empty(splits, len(side.x), grad.shape[1], dtype=torch.float32)
                weigh(arguments, own_cols, parts)
                self.ops.finish(*arguments, parts, side.normalize, self.centre, grad)
            results.append(torch.empty_like(given).copy_(grad) if grad.dtype != given.dtype else grad)
        return results[0], results[1]


class Listed(Matrix):
    """A matrix of which only listed pairs are looked at: nothing is sorted, and products are fp32's own."""

    def __init__(self, ops: Any, a: Dots) -> None:
        rows, cols, normalize = a.rows, a.cols, a.normalize
        self.begin(ops, rows, cols, a.view, 1.0)
        self.math = FP32 if self.dtype == torch.float32 else self.math
        self.row = self.col = self.side(rows, torch.arange(len(rows), device=rows.device), normalize)
        if cols is not None:
            self.col = self.side(cols, torch.arange(len(cols), device=rows.device), normalize)
        self.row_range = self.col_range = self.trouble

    def splits(self, own_cols: bool = False, depth: int = 1) -> int:
        return 1


def ranges_of(own: Tensor, other: Tensor) -> Tensor:
    """[n, 2] places among the sorted labels ``other`` of each label of ``own``."""
    ends = [torch.searchsorted(other, own, right=right, out_int32=True) for right in (False, True)]
    return torch.stack(ends, 1)


def policy_number(policy: str) -> int:
    """A policy's place in csrc/losses.h, whose order is that of BUILT_IN."""
    return BUILT_IN.index(policy)


def sorted_field(field: Tensor | None, side: Rows) -> Tensor | None:
    return None if field is None else field.float()[side.order]
