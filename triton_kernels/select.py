"""The select engine: which pairs a miner or a selecting loss keeps. Indices only, no gradient.

A program owns BM rows (of ``sample``: draws) and walks over one part of the columns; the parts meet in PyTorch. Columns
are known by their places before sorting, which decide between equals. ``topk`` is in :mod:`.topk`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pydml.declared import Extremes, Mined, Sample
from pydml.triton_kernels import table
from pydml.triton_kernels.matrix import Matrix, launch
from pydml.triton_kernels.tile import dot_tile, is_near, members, span, squares, without_selves

NOWHERE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def similarity(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D: tl.constexpr, VIEW: tl.constexpr,
               SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """u [BM, BN], each pair by itself, whatever else is in its tile: equal columns are equals wherever they stand."""
    s = dot_tile(X, Y, rows, cols, D, BM, BN, BD, PRECISION)
    if VIEW == "dot":
        return s
    else:
        size = tl.load(X2 + rows)[:, None] + tl.load(Y2 + cols)[None, :]
        d2 = size - 2 * s
        near = is_near(d2, size, D)
        if SYMMETRIC:
            near = near & (rows[:, None] != cols[None, :])
        near = without_selves(near, rows, cols, SELVES, n_rows, n_cols, SELF)
        if tl.max(near.to(tl.int32)) > 0:
            d2 = tl.where(near, squares(X, Y, rows, cols, D, BM, BN), d2)
        if VIEW == "cosine":
            return tl.where(near, 1 - 0.5 * d2, s)
        elif VIEW == "squared":
            return -tl.maximum(d2, 0.0)
        else:
            return -tl.sqrt(tl.maximum(d2, 0.0))


@triton.jit
def side(rows, cols, first, last, n_cols, mixed, POSITIVE: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Which pairs of a tile are on the wanted side; only a ``mixed`` tile is looked at pair by pair."""
    if POSITIVE:
        member, _ = members(rows, cols, first, last, n_cols, SYMMETRIC, True)
    else:
        if mixed:
            _, member = members(rows, cols, first, last, n_cols, SYMMETRIC, True)
        else:
            _, member = members(rows, cols, first, last, n_cols, SYMMETRIC, False)
    return member


@triton.jit
def part_of(n_cols, low, high, part, POSITIVE: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr):
    """The tiles [start, stop) of one part of the columns; positives are in [low, high) only."""
    n_tiles = tl.cdiv(n_cols, BN)
    start, stop = n_tiles * part // SPLITS, n_tiles * (part + 1) // SPLITS
    if POSITIVE:
        start, stop = tl.maximum(start, low), tl.minimum(stop, high)
    return start, stop


@triton.jit
def better(best, where, value, name, member):
    """The largest value of each row so far and its column's name; ties to the smallest name."""
    value = tl.where(member, value, float("-inf"))
    top = tl.max(value, 1)
    first = tl.min(tl.where(member & (value == top[:, None]), name, NOWHERE), 1)
    where = tl.where(top > best, first, tl.where(top == best, tl.minimum(where, first), where))
    return tl.maximum(best, top), where


@triton.jit
def extremes_kernel(
    X, Y, X2, Y2, FIRST, LAST, ORDER, BOUND, BEST, WHERE, SELVES, n_rows, n_cols,
    POSITIVE: tl.constexpr, SIGN: tl.constexpr, BOUNDED: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest SIGN·u of each row on one side, and where; BOUNDED: of positives above BOUND, of negatives below."""
    rows, part = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    real = rows < n_rows
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    start, stop = part_of(n_cols, low, high, part, POSITIVE, SPLITS, BN)
    best = tl.full((BM,), float("-inf"), tl.float32)
    where = tl.full((BM,), NOWHERE, tl.int32)
    if BOUNDED:
        bound = tl.load(BOUND + rows, mask=real, other=0.0)[:, None]
    for tile in range(start, stop):
        cols = tile * BN + tl.arange(0, BN)
        u = similarity(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, VIEW, SYMMETRIC, SELF, BM, BN, BD,
                       PRECISION)  # fmt: skip
        member = side(rows, cols, first, last, n_cols, (tile >= low) & (tile < high), POSITIVE, SYMMETRIC)
        if POSITIVE:
            member = without_selves(member, rows, cols, SELVES, n_rows, n_cols, SELF)
        if BOUNDED:
            if POSITIVE:
                member = member & (u > bound)
            else:
                member = member & (u < bound)
        name = tl.load(ORDER + cols, mask=cols < n_cols, other=NOWHERE)[None, :]
        best, where = better(best, where, u * SIGN, name, member)
    at = part.to(tl.int64) * n_rows + rows
    tl.store(BEST + at, best, mask=real)
    tl.store(WHERE + at, where, mask=real)


@triton.jit
def mined_kernel(
    X, Y, X2, Y2, FIRST, LAST, ROW_ORDER, COL_ORDER, BOUND, COUNT, START, PAIRS, n_rows, n_cols,
    POSITIVE: tl.constexpr, BOUNDED: tl.constexpr, FILL: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """How many pairs of one side each row keeps or, with FILL, the pairs i·N + j themselves, from START on.

    BOUNDED: positives below BOUND, negatives above; else all.
    """
    rows, part = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    real = rows < n_rows
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    start, stop = part_of(n_cols, low, high, part, POSITIVE, SPLITS, BN)
    at = part.to(tl.int64) * n_rows + rows
    count = tl.zeros((BM,), tl.int32)
    if BOUNDED:
        bound = tl.load(BOUND + rows, mask=real, other=0.0)[:, None]
    if FILL:
        begin = tl.load(START + at, mask=real, other=0)
        row_name = tl.load(ROW_ORDER + rows, mask=real, other=0)[:, None]
    for tile in range(start, stop):
        cols = tile * BN + tl.arange(0, BN)
        member = side(rows, cols, first, last, n_cols, (tile >= low) & (tile < high), POSITIVE, SYMMETRIC)
        if BOUNDED:
            u = similarity(X, Y, X2, Y2, rows, cols, FIRST, n_rows, n_cols, D, VIEW, SYMMETRIC, 0, BM, BN, BD,
                           PRECISION)  # fmt: skip
            if POSITIVE:
                member = member & (u < bound)
            else:
                member = member & (u > bound)
        member = member & real[:, None]
        one = member.to(tl.int32)
        if FILL:
            place = (begin + count)[:, None] + tl.cumsum(one, 1) - one
            name = tl.load(COL_ORDER + cols, mask=cols < n_cols, other=0)[None, :]
            tl.store(PAIRS + place, row_name.to(tl.int64) * n_cols + name, mask=member)
        count += tl.sum(one, 1)
    if not FILL:
        tl.store(COUNT + at, count, mask=real)


@triton.jit
def uniform(seed, counter):
    """Uniforms in (0, 1) from a counter, bit for bit those of :func:`pydml.tiled.select.uniform` (splitmix64)."""
    v = (counter + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + seed.to(tl.uint64)
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9
    v = (v ^ (v >> 27)) * 0x94D049BB133111EB
    v = v ^ (v >> 31)
    return ((v >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def sample_kernel(
    X, Y, X2, Y2, FIRST, LAST, ORDER, ANCHORS, SEED, BEST, WHERE, n_rows, n_cols, n_draws, dim,
    CUTOFF: tl.constexpr, LIMIT: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr,
    SYMMETRIC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gumbel-max of BM draws over one part of the columns: the largest log w + gumbel and where.

    In fp64, so that draws are those of the other backends; CUTOFF and LIMIT are constants because arguments are fp32.
    """
    draws, part = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    rows = tl.load(ANCHORS + tl.minimum(draws, n_draws - 1))
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    start, stop = part_of(n_cols, low, high, part, False, SPLITS, BN)
    seed = tl.load(SEED)
    best = tl.full((BM,), float("-inf"), tl.float64)
    where = tl.full((BM,), NOWHERE, tl.int32)
    for tile in range(start, stop):
        cols = tile * BN + tl.arange(0, BN)
        u = similarity(X, Y, X2, Y2, rows, cols, FIRST, n_rows, n_cols, D, VIEW, SYMMETRIC, 0, BM, BN, BD, PRECISION)
        member = side(rows, cols, first, last, n_cols, (tile >= low) & (tile < high), False, SYMMETRIC)
        name = tl.load(ORDER + cols, mask=cols < n_cols, other=0)[None, :]
        d = tl.maximum(-u.to(tl.float64), CUTOFF)
        log_w = (2 - dim) * tl.log(d) - (dim - 3) * 0.5 * tl.log(1 - 0.25 * d * d)
        gumbel = -tl.log(-tl.log(uniform(seed, draws.to(tl.int64)[:, None] * n_cols + name)))
        member = member & (d < LIMIT) & (tl.abs(log_w) < float("inf"))
        best, where = better(best, where, log_w + gumbel, name, member)
    at = part.to(tl.int64) * n_draws + draws
    tl.store(BEST + at, best, mask=draws < n_draws)
    tl.store(WHERE + at, where, mask=draws < n_draws)


class Pairs(Matrix):
    """A matrix with what the select kernels take."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.names = [side.order.to(torch.int32) for side in (self.row, self.col)]
        self.sides = (self.row.packed, self.col.packed, self.row.squares, self.col.squares)
        self.first, self.last = self.ranges(self.row, self.col)

    def parts(self, tiles: table.Tiles, rows: int, positive: bool) -> tuple[int, int]:
        """Blocks of rows and parts of columns; the few tiles with positives are not split."""
        blocks = triton.cdiv(rows, tiles.rows)
        return blocks, 1 if positive else self.splits(blocks, triton.cdiv(self.col.size, tiles.cols))

    def extreme(self, positive: bool, sign: int, bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """u of the largest sign·u of each sorted row and its column, ∓∞ and -1 where there is none."""
        tiles = self.tiles("select")
        grid = self.parts(tiles, self.row.size, positive)
        best = self.row.x.new_empty(grid[1], self.row.size)
        where = torch.empty_like(best, dtype=torch.int32)
        launch(
            extremes_kernel, grid, self.device, *self.sides, self.first, self.last, self.names[1],
            best if bound is None else bound, best, where, self.selves, *self.shape, SELF=self.self_of(),
            POSITIVE=positive, SIGN=sign, BOUNDED=bound is not None, SPLITS=grid[1], **self.constants(tiles),
        )  # fmt: skip
        top, name = merge(best, where)
        return sign * top, name

    def kept(self, positive: bool, bound: Tensor | None) -> tuple[Tensor, Any]:
        """How many pairs of a side are kept, and a function that lists them in the order of (i, j)."""
        tiles = self.tiles("select")
        grid = self.parts(tiles, self.row.size, positive)
        count = self.first.new_zeros(grid[1], self.row.size)

        def run(start: Tensor, pairs: Tensor, fill: bool) -> None:
            launch(
                mined_kernel, grid, self.device, *self.sides, self.first, self.last, *self.names,
                self.row.squares if bound is None else bound, count, start, pairs, *self.shape,
                POSITIVE=positive, BOUNDED=bound is not None, FILL=fill, SPLITS=grid[1], **self.constants(tiles),
            )  # fmt: skip

        run(count, count, False)
        stop = count.flatten().cumsum(0)

        def fill(number: int) -> tuple[Tensor, Tensor]:
            pairs = stop.new_zeros(number)
            run(stop - count.flatten(), pairs, True)
            pairs = pairs.sort().values
            return pairs // self.col.size, pairs % self.col.size

        return stop[-1], fill


def merge(best: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row over the parts [splits, n] and its column, the smallest of equals; -1 for none."""
    top = best.amax(0)
    name = torch.where(best == top, where, NOWHERE.value).amin(0)
    return top, torch.where(name == NOWHERE.value, -1, name)


def extremes(a: Extremes) -> tuple[Tensor, Tensor]:
    """Column of the easy/hard/semi-hard positive and negative of every row; -1 where it has none."""
    m, positive, negative = Pairs.of(a), a.positive, a.negative
    nowhere = m.first.new_full((m.row.size,), -1)

    def chosen(is_positive: bool, how: str, bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """u and column; «easy» is the most similar positive, the least similar negative."""
        if how == "none":
            return m.row.x.new_zeros(m.row.size), nowhere
        return m.extreme(is_positive, 1 if (how == "easy") == is_positive else -1, bound)

    if positive == "semihard":  # the hardest positive that is still nearer than the chosen negative
        u, n = chosen(False, "hard" if negative == "hard" else "none" if negative == "none" else "easy")
        _, p = chosen(True, positive, torch.where(n < 0, torch.inf, u))
    else:
        u, p = chosen(True, positive)
        # the hardest negative that is still farther than the chosen positive
        bound = torch.where(p < 0, -torch.inf, u) if negative == "semihard" else None
        _, n = chosen(False, negative, bound)
    p, n = (m.row.unsort(index).to(a.row_labels.dtype) for index in (p, n))
    return p, n


def mined(a: Mined) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multi-Similarity's mined pairs (a1, p, a2, n); with no ``epsilon``, all pairs. How many waits for the device."""
    m, epsilon = Pairs.of(a), a.epsilon
    below = above = None
    if epsilon is not None:
        below = m.extreme(False, 1)[0] + epsilon
        above = m.extreme(True, -1)[0] - epsilon
    counts, fills = zip(*(m.kept(positive, bound) for positive, bound in ((True, below), (False, above))), strict=True)
    (a1, p), (a2, n) = (fill(number) for fill, number in zip(fills, torch.stack(counts).tolist(), strict=True))
    return a1, p, a2, n


def sample(a: Sample) -> Tensor:
    """For each anchor a negative drawn with weight 1/q(D) by Gumbel-max, -1 where no weight is above 0."""
    m, anchors = Pairs(a.rows, a.cols, a.row_labels, a.col_labels, "euclidean", True), a.anchors
    draws = anchors.shape[0]
    if not draws:
        return torch.full_like(anchors, -1)
    tiles = m.tiles("sample")
    grid = m.parts(tiles, draws, False)
    best = torch.empty(grid[1], draws, dtype=torch.float64, device=m.device)
    where = torch.empty_like(best, dtype=torch.int32)
    places = m.row.unsort(torch.arange(m.row.size, dtype=torch.int32, device=m.device))
    launch(
        sample_kernel, grid, m.device, *m.sides, m.first, m.last, m.names[1], places[anchors], a.seed, best, where,
        *m.shape, draws, a.rows.shape[1], CUTOFF=a.cutoff, LIMIT=a.nonzero_loss_cutoff, SPLITS=grid[1],
        **m.constants(tiles),
    )  # fmt: skip
    return merge(best, where)[1].to(anchors.dtype)
