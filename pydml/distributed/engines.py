"""Row statistics of one rank's rows against the columns of all ranks, a block at a time.

Statistics of disjoint columns merge exactly: sums by adding, log-sum-exps by logaddexp, extremes by comparing. The
backward pass hands the *merged* statistics to the engines' own backward kernels, so a pair has the weight that it would
have in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pydml.among import KNOWING
from pydml.backends import kernel
from pydml.distributed.walk import Walk
from pydml.policy import POLICIES, LogSumExp
from pydml.tiled.pair import mine
from pydml.tiled.select import _extreme
from pydml.tiled.sides import Matrix, Tile
from pydml.tiled.triplet import Against, against


@dataclass
class Sides:
    """Labels of all rows and of all columns of the concatenated batch, and how a pair is looked at."""

    row_labels: Tensor
    col_labels: Tensor
    view: str
    normalize: bool
    backend: str

    def labels(self, i: slice, j: slice, cols: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.row_labels[i], None if cols is None else self.col_labels[j]

    def matrix(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> Matrix:
        return Matrix(rows, cols, *self.labels(i, j, cols), self.view, self.normalize)


class Engine:
    """Statistics [r, K] of rows i against columns j. Where there are none of either, they are :meth:`empty`."""

    #: Can the statistics of a block's rows be computed where the block is a visitor?
    both_ways = True

    def __init__(self, sides: Sides) -> None:
        self.sides = sides

    def empty(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        """Statistics, and what the backend keeps for its backward."""
        raise NotImplementedError

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(
        self, grad: Tensor, stats: Tensor, saved: Tensor | None, rows: Tensor, cols: Tensor | None, i: slice, j: slice,
        want_cols: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        raise NotImplementedError


#: What a backend keeps of a block, and of the same block with rows and columns exchanged.
Kept = tuple[Tensor | None, Tensor | None]


def run(engine: Engine, walk: Walk, rows: Tensor, i: slice, symmetric: bool) -> tuple[Tensor, list[Kept]]:
    """Merged statistics of this rank's rows, and what was kept of each block."""
    stats, kept, away = engine.empty(rows), list[Kept](), dict[int, Tensor]()
    for block in walk.blocks(symmetric, engine.both_ways):
        saved = exchanged = None
        live = len(rows) > 0 and (block.x is None or len(block.x) > 0)
        if live:
            part, saved = engine.forward(rows, block.x, i, block.at)
            stats = engine.merge(stats, part)
        if block.both:
            assert block.x is not None
            away[block.owner] = engine.empty(block.x)
            if live:
                away[block.owner], exchanged = engine.forward(block.x, rows, block.at, i)
        kept.append((saved, exchanged))
    if symmetric and engine.both_ways:
        for part in walk.send_home(away, stats):
            stats = engine.merge(stats, part)
    return stats, kept


class _RowStatistics(Function):
    """Statistics of this rank's rows with gradients to its rows and to everybody's columns."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, cols: Tensor | None, engine: Engine, walk: Walk, i: slice, want_cols: bool
    ) -> Tensor:
        ctx.engine, ctx.walk, ctx.i, ctx.symmetric, ctx.want_cols = engine, walk, i, cols is None, want_cols
        stats, saved = run(engine, walk, rows.detach(), i, cols is None)
        # a ring must not keep what grows with all columns; the C++ kernels then compute again what they had listed
        again = not walk.holds_all and engine.sides.backend == "cpu"
        ctx.saved = [(None, None) if again else both for both in saved]
        ctx.save_for_backward(rows, stats)
        return stats

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, stats = ctx.saved_tensors
        engine, walk, i = ctx.engine, ctx.walk, ctx.i
        grad = grads[0].contiguous()
        d_rows = torch.zeros_like(rows)
        both = ctx.symmetric and engine.both_ways and not walk.holds_all
        if both:  # the owners of visiting blocks need their weights here
            everyone = walk.group.all_gather(torch.cat((stats, grad), 1), walk.sizes, "gradients of row statistics")
            all_stats, all_grads = (part.contiguous() for part in everyone.chunk(2, dim=1))
        for block, (saved, exchanged) in zip(walk.blocks(ctx.symmetric, engine.both_ways), ctx.saved, strict=True):
            if block.x is None:
                if len(rows):
                    d_rows += engine.backward(grad, stats, saved, rows, None, i, block.at, False)[0]
                continue
            live = len(rows) > 0 and len(block.x) > 0
            d_block = torch.zeros_like(block.x)
            if live:
                g_rows, g_cols = engine.backward(grad, stats, saved, rows, block.x, i, block.at, ctx.want_cols)
                d_rows += g_rows
                d_block = g_cols
            if live and block.both:
                given = all_grads[block.at], all_stats[block.at], exchanged
                g_rows, g_cols = engine.backward(*given, block.x, rows, block.at, i, True)
                d_rows += g_cols
                d_block = d_block + g_rows
            if ctx.want_cols:
                walk.give_back(block, d_block)
        d_cols = walk.collect() if ctx.want_cols else None
        if ctx.symmetric:
            d_rows, d_cols = d_rows + d_cols, None  # type: ignore[operator]
        return d_rows, d_cols, None, None, None, None


def row_statistics(
    engine: Engine, walk: Walk, rows: Tensor, cols: Tensor | None, i: slice, want_cols: bool = True
) -> Tensor:
    """Statistics [b, K] of this rank's rows; ``cols`` are its columns, None where they are the rows."""
    out: Tensor = _RowStatistics.apply(rows, cols, engine, walk, i, want_cols)  # type: ignore[no-untyped-call]
    return out


class Pair(Engine):
    """A policy's statistics; with ``thresholds`` [B, 2] of all rows, of the mined pairs only.

    Engines that take no thresholds from elsewhere leave mined pairs to the tiled one.
    """

    def __init__(
        self,
        sides: Sides,
        policy: str,
        params: Sequence[float],
        row_field: Tensor | None = None,
        col_field: Tensor | None = None,
        thresholds: Tensor | None = None,
    ) -> None:
        super().__init__(sides)
        self.policy, self.params = policy, [float(p) for p in params]
        self.row_field, self.col_field, self.thresholds = row_field, col_field, thresholds
        self.slots = POLICIES[policy].slots
        self.logs = torch.tensor([isinstance(slot, LogSumExp) for slot in self.slots], device=sides.row_labels.device)
        given = thresholds is not None and sides.backend not in KNOWING
        self.backend = "tiled" if given else sides.backend

    def empty(self, rows: Tensor) -> Tensor:
        return torch.where(self.logs, -torch.inf, 0.0).to(rows.dtype).expand(len(rows), -1)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(self.logs, torch.logaddexp(a, b), a + b)

    def _options(self, cols: Tensor | None, i: slice, j: slice) -> tuple[Any, ...]:
        row_field = None if self.row_field is None else self.row_field[i]
        col_field = None if self.col_field is None else self.col_field[j]
        sides, epsilon = self.sides, None if self.thresholds is None else 0.0
        fields = *sides.labels(i, j, cols), row_field, col_field
        return *fields, self.policy, self.params, sides.view, sides.normalize, epsilon, 1, 1.0

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        options = self._options(cols, i, j)
        known = {} if self.thresholds is None else {"mined": self.thresholds[i]}
        stats, _, saved = kernel(self.backend, "pair")(rows, cols, *options, **known)
        return stats, saved

    def backward(
        self, grad: Tensor, stats: Tensor, saved: Tensor | None, rows: Tensor, cols: Tensor | None, i: slice, j: slice,
        want_cols: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        thresholds = stats.new_zeros(len(stats), 2) if self.thresholds is None else self.thresholds[i]
        saved = stats.new_empty(0, dtype=torch.uint8) if saved is None else saved
        back = kernel(self.backend, "pair_backward")
        d_rows, d_cols = back(grad, stats, thresholds, saved, rows, cols, *self._options(cols, i, j), True, want_cols)
        return d_rows, d_cols


class Hardest(Engine):
    """The most similar negative and the least similar positive of each row: what mining compares with."""

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_tensor([-torch.inf, torch.inf]).expand(len(rows), -1)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((torch.maximum(a[:, 0], b[:, 0]), torch.minimum(a[:, 1], b[:, 1])), 1)

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        sides = self.sides
        if sides.backend != "cpu":
            return torch.cat([mine(tile, 0.0) for tile in sides.matrix(rows, cols, i, j).tiles()]), None
        # the thresholds that its pair engine would mine with, by the cheapest policy that can be mined
        labels, view = sides.labels(i, j, cols), (sides.view, sides.normalize)
        return kernel("cpu", "pair")(rows, cols, *labels, None, None, "mean", [], *view, 0.0, 1, 1.0)[1], None


class Histogram(Engine):
    """Soft counts of positives, then of negatives [r, 2·nodes]: too wide to send them after their rows."""

    both_ways = False

    def __init__(self, sides: Sides, nodes: int, low: float, high: float) -> None:
        super().__init__(sides)
        self.nodes, self.range = nodes, (low, high)

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(len(rows), 2 * self.nodes)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def _options(self, cols: Tensor | None, i: slice, j: slice) -> tuple[Any, ...]:
        return *self.sides.labels(i, j, cols), self.nodes, *self.range, self.sides.view, self.sides.normalize

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        run = kernel(self.sides.backend, "histogram")
        positives, negatives, saved = run(rows, cols, *self._options(cols, i, j))
        return torch.cat((positives, negatives), 1), saved

    def backward(
        self, grad: Tensor, stats: Tensor, saved: Tensor | None, rows: Tensor, cols: Tensor | None, i: slice, j: slice,
        want_cols: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if saved is None:  # nothing is known of the tiles: they reach from one end to the other
            tiles = kernel(self.sides.backend, "histogram_saved")(rows, cols)
            saved = rows.new_tensor(self.range).expand(tiles, 2).contiguous()
        parts = [part.contiguous() for part in (*grad.chunk(2, dim=1), *stats.chunk(2, dim=1))]
        back = kernel(self.sides.backend, "histogram_backward")
        d_rows, d_cols = back(*parts, saved, rows, cols, *self._options(cols, i, j), True, want_cols)
        return d_rows, d_cols


@dataclass
class Search:
    """Look for the most (or least) similar positive or negative of each row, perhaps only below a bound [B]."""

    side: str
    largest: bool
    below: Tensor | None = None

    def members(self, tile: Tile, i: slice) -> Tensor:
        member = tile.same if self.side == "positives" else tile.diff
        return member if self.below is None else member & (tile.u < self.below[i][tile.rows, None])


class Extremes(Engine):
    """For each search the similarity and the column [r, 2·searches] of what it finds, in fp64; column -1: nothing."""

    def __init__(self, sides: Sides, searches: Sequence[Search]) -> None:
        super().__init__(sides)
        self.searches = list(searches)

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_tensor([-torch.inf, -1.0], dtype=torch.float64).repeat(len(rows), len(self.searches))

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        (u, p), (v, q) = ((t[:, 0::2], t[:, 1::2]) for t in (a, b))
        better = (v > u) | ((v == u) & (q >= 0) & ((q < p) | (p < 0)))  # ties go to the smallest column
        out = torch.empty_like(a)
        out[:, 0::2], out[:, 1::2] = torch.where(better, v, u), torch.where(better, q, p)
        return out

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        found = []
        for tile in self.sides.matrix(rows, cols, i, j).tiles():
            part = []
            for search in self.searches:
                column = _extreme(tile.u, search.members(tile, i), search.largest)
                u = tile.u.gather(1, column.clamp_min(0)[:, None])[:, 0].double() * (1 if search.largest else -1)
                part += [torch.where(column < 0, -torch.inf, u), torch.where(column < 0, -1, column + j.start).double()]
            found.append(torch.stack(part, 1))
        return torch.cat(found), None


class Triplets(Engine):
    """Triplets of each row's negatives and its positives, whose similarities [B, M] are known; +inf: none.

    [r, 2 + M]: the sum of the losses, how many are above 0, and the slopes by the positives, but for their sign.
    """

    def __init__(self, sides: Sides, positives: Tensor, margin: float, smooth: bool) -> None:
        super().__init__(sides)
        self.positives, self.margin, self.smooth = positives, margin, smooth

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(len(rows), 2 + self.positives.shape[1])

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def _against(self, tile: Tile, i: slice) -> Against:
        return against(tile, self.positives[i][tile.rows], self.margin, self.smooth)

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        matrix, found = self.sides.matrix(rows, cols, i, j), self.empty(rows)
        for tile in matrix.tiles():
            part = self._against(tile, i)
            found[tile.rows] = torch.cat((torch.stack((part.total, part.count), 1), part.positives), 1)
        return matrix.poison(found)[0], None

    def backward(
        self, grad: Tensor, stats: Tensor, saved: Tensor | None, rows: Tensor, cols: Tensor | None, i: slice, j: slice,
        want_cols: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        matrix = self.sides.matrix(rows, cols, i, j)
        matrix.start_gradient(True, want_cols)
        (grad,) = matrix.poison(grad[:, :1])
        for tile in matrix.tiles():
            matrix.add_weights(tile, grad[tile.rows] * self._against(tile, i).negatives)
        return matrix.gradients()


def mining_thresholds(
    sides: Sides, walk: Walk, rows: Tensor, i: slice, sizes: Sequence[int], symmetric: bool, epsilon: float
) -> Tensor:
    """Multi-Similarity's thresholds [B, 2] of all rows: keep positives below the first, negatives above the second."""
    hardest, _ = run(Hardest(sides), walk, rows.detach(), i, symmetric)
    return walk.group.all_gather(hardest + hardest.new_tensor([epsilon, -epsilon]), sizes, "mining thresholds")
