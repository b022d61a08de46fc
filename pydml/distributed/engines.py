"""Row statistics of one rank's rows against the columns of all ranks, a block at a time.

Statistics of disjoint columns merge exactly: sums by adding, log-sum-exps by logaddexp, extremes by comparing. A block
is an ordinary call of an op (:mod:`pydml.declared`) on the backend that was asked for, with what only the whole batch
knows as arguments: which columns the rows are (``selves``), mining thresholds (``bounds``), similarities of positives.
The backward pass hands the *merged* statistics to the ops' backward, so a pair has the weight that it would have in
one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pydml import declared, ops
from pydml.declared import Backward, Call, HistogramOut, PairOut, TripletOut, some
from pydml.distributed.walk import Block, Walk
from pydml.policy import POLICIES, LogSumExp


@dataclass
class Sides:
    """Labels of all rows and of all columns of the concatenated batch, and how a pair is looked at."""

    row_labels: Tensor
    col_labels: Tensor
    view: str
    normalize: bool
    backend: str
    #: The columns that the rows are [B], where they are some of the columns.
    selves: Tensor | None = None

    def matrix(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> dict[str, Any]:
        """Arguments of the ops that look at a whole block."""
        col_labels = None if cols is None else self.col_labels[j]
        return {"rows": rows, "cols": cols, "row_labels": self.row_labels[i], "col_labels": col_labels}

    @property
    def how(self) -> dict[str, Any]:
        return {"view": self.view, "normalize": self.normalize}

    def among(self, i: slice, j: slice) -> Tensor | None:
        """Which columns of a block the rows are, -1: none of these."""
        if self.selves is None:
            return None
        here = self.selves[i] - j.start
        return torch.where((here >= 0) & (here < j.stop - j.start), here, -1)

    def run(self, received: Call | Backward[Any]) -> Any:
        return ops.direct(received, self.backend)


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

    def statistics(self, walk: Walk, rows: Tensor, i: slice, symmetric: bool) -> tuple[Tensor, list[Kept]]:
        """Merged statistics of this rank's rows, and what was kept of each block."""
        return run(self, walk, rows, i, symmetric)

    def backward(
        self, grad: Tensor, stats: Tensor, saved: Tensor | None, rows: Tensor, cols: Tensor | None, i: slice, j: slice,
        want_cols: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradients of rows and columns, and of what else the statistics were computed from."""
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
    """Statistics of this rank's rows with gradients to its rows, to everybody's columns and to what else there is."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, cols: Tensor | None, more: Tensor | None, engine: Engine, walk: Walk, i: slice,
        want_cols: bool,
    ) -> Tensor:  # fmt: skip
        ctx.engine, ctx.walk, ctx.i, ctx.symmetric, ctx.want_cols = engine, walk, i, cols is None, want_cols
        stats, ctx.saved = engine.statistics(walk, rows.detach(), i, cols is None)
        ctx.save_for_backward(rows, stats, more)
        return stats

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, stats, more = ctx.saved_tensors
        engine, walk, i = ctx.engine, ctx.walk, ctx.i
        grad = grads[0].contiguous()
        d_rows, d_more = torch.zeros_like(rows), None if more is None else torch.zeros_like(more)
        if ctx.symmetric and engine.both_ways and not walk.holds_all:  # owners of visiting blocks need their weights
            everyone = walk.group.all_gather(torch.cat((stats, grad), 1), walk.sizes, "gradients of row statistics")
            all_stats, all_grads = (part.contiguous() for part in everyone.chunk(2, dim=1))

        def add(block: Block, saved: Tensor | None, want_cols: bool) -> Tensor:
            nonlocal d_rows, d_more
            g_rows, g_cols, *g_more = engine.backward(grad, stats, saved, rows, block.x, i, block.at, want_cols)
            d_rows = d_rows + g_rows
            for g in g_more:
                d_more = d_more + g
            gradient: Tensor = g_cols
            return gradient

        for block, (saved, exchanged) in zip(walk.blocks(ctx.symmetric, engine.both_ways), ctx.saved, strict=True):
            live = len(rows) > 0 and (block.x is None or len(block.x) > 0)
            if block.x is None:
                if live:
                    add(block, saved, False)
                continue
            d_block = torch.zeros_like(block.x)
            if live:
                d_block = add(block, saved, ctx.want_cols)
            if live and block.both:
                given = all_grads[block.at], all_stats[block.at], exchanged
                g_rows, g_cols = engine.backward(*given, block.x, rows, block.at, i, True)
                d_rows = d_rows + g_cols
                d_block = d_block + g_rows
            if ctx.want_cols:
                walk.give_back(block, d_block)
        d_cols = walk.collect() if ctx.want_cols else None
        if ctx.symmetric:
            d_rows, d_cols = d_rows + d_cols, None  # type: ignore[operator]
        return d_rows, d_cols, d_more, None, None, None, None


def row_statistics(
    engine: Engine, walk: Walk, rows: Tensor, cols: Tensor | None, i: slice, want_cols: bool = True,
    more: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Statistics [b, K] of this rank's rows; ``cols`` are its columns, None where they are the rows."""
    out: Tensor = _RowStatistics.apply(rows, cols, more, engine, walk, i, want_cols)  # type: ignore[no-untyped-call]
    return out


class Pair(Engine):
    """A policy's statistics; with ``epsilon``, of the mined pairs only.

    Mining goes round three times, over what one process visits too: positives, for the threshold of negatives;
    negatives, whose statistics come with the threshold of positives; positives again. The first and the last look at
    the few pairs of equal labels.
    """

    def __init__(
        self,
        sides: Sides,
        policy: str,
        params: Sequence[float],
        row_field: Tensor | None = None,
        col_field: Tensor | None = None,
        epsilon: float | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        super().__init__(sides)
        self.policy, self.params = policy, [float(p) for p in params]
        self.row_field, self.col_field, self.epsilon, self.sizes = row_field, col_field, epsilon, sizes
        #: Mining thresholds [B, 2] of all rows, as far as they are known, and the pairs that are visited.
        self.bounds: Tensor | None = None
        self.side = "both"
        slots = POLICIES[policy].slots
        self.logs = torch.tensor([isinstance(slot, LogSumExp) for slot in slots], device=sides.row_labels.device)

    def empty(self, rows: Tensor) -> Tensor:
        return torch.where(self.logs, -torch.inf, 0.0).to(rows.dtype).expand(len(rows), -1)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(self.logs, torch.logaddexp(a, b), a + b)

    def _call(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> declared.Pair:
        return declared.Pair(
            **self.sides.matrix(rows, cols, i, j),
            row_field=None if self.row_field is None else self.row_field[i],
            col_field=None if self.col_field is None else self.col_field[j],
            policy=self.policy,
            params=self.params,
            **self.sides.how,
            epsilon=None if self.epsilon is None else 0.0,  # it is in the bounds
            pool_size=1,
            sharpness=1.0,
            selves=self.sides.among(i, j),
            bounds=None if self.bounds is None else self.bounds[i],
            side=self.side,
        )

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        stats, _, saved = self.sides.run(self._call(rows, cols, i, j))
        return stats, saved

    def statistics(self, walk: Walk, rows: Tensor, i: slice, symmetric: bool) -> tuple[Tensor, list[Kept]]:
        if self.epsilon is None:
            return run(self, walk, rows, i, symmetric)

        def everyone(own: Tensor) -> Tensor:
            return walk.group.all_gather(own, self.sizes, "mining thresholds")

        lowest, _ = run(_Lowest(self), walk, rows, i, symmetric)
        above = everyone(lowest) - self.epsilon
        self.bounds, self.side = torch.cat((above, above), 1), "negatives"
        found, kept = run(_Negatives(self), walk, rows, i, symmetric)
        below = everyone(found[:, -1:].contiguous()) + self.epsilon
        self.bounds, self.side = torch.cat((below, above), 1), "positives"
        positives, _ = run(self, walk, rows, i, symmetric)
        self.side = "both"
        return self.merge(found[:, :-1], positives), kept

    def backward(
        self, grad: Tensor, stats: Tensor, saved: Tensor | None, rows: Tensor, cols: Tensor | None, i: slice, j: slice,
        want_cols: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        thresholds = stats.new_zeros(len(stats), 2) if self.bounds is None else self.bounds[i]
        saved = stats.new_empty(0, dtype=torch.uint8) if saved is None else saved
        left = PairOut(stats, thresholds, saved)
        received = Backward(self._call(rows, cols, i, j), some(PairOut, stats=grad), left, (True, want_cols))
        gradients: tuple[Tensor, ...] = self.sides.run(received)
        return gradients


class _Lowest(Engine):
    """The least similar positive [r, 1] of each row, by the cheapest policy that can be mined."""

    def __init__(self, of: Pair) -> None:
        super().__init__(of.sides)

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_full((len(rows), 1), torch.inf)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b)

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        sides = self.sides
        call = declared.Pair(
            **sides.matrix(rows, cols, i, j), row_field=None, col_field=None, policy="mean", params=[], **sides.how,
            epsilon=0.0, pool_size=1, sharpness=1.0, selves=sides.among(i, j), side="positives",
        )  # fmt: skip
        _, thresholds, _ = sides.run(call)
        return thresholds[:, 1:], None


class _Negatives(Engine):
    """Statistics of mined negatives, and the most similar negative of each row behind them [r, K + 1]."""

    def __init__(self, of: Pair) -> None:
        super().__init__(of.sides)
        self.of = of

    def empty(self, rows: Tensor) -> Tensor:
        return torch.cat((self.of.empty(rows), rows.new_full((len(rows), 1), -torch.inf)), 1)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat((self.of.merge(a[:, :-1], b[:, :-1]), torch.maximum(a[:, -1:], b[:, -1:])), 1)

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        stats, thresholds, saved = self.sides.run(self.of._call(rows, cols, i, j))
        return torch.cat((stats, thresholds[:, :1]), 1), saved


class Histogram(Engine):
    """Soft counts of positives, then of negatives [r, 2·nodes]: too wide to send them after their rows."""

    both_ways = False

    def __init__(self, sides: Sides, nodes: int, low: float, high: float) -> None:
        super().__init__(sides)
        self.nodes, self.low, self.high = nodes, low, high

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(len(rows), 2 * self.nodes)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def _call(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> declared.Histogram:
        nodes: dict[str, Any] = {"nodes": self.nodes, "low": self.low, "high": self.high}
        sides = self.sides
        return declared.Histogram(**sides.matrix(rows, cols, i, j), **nodes, **sides.how, selves=sides.among(i, j))

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        positives, negatives, saved = self.sides.run(self._call(rows, cols, i, j))
        return torch.cat((positives, negatives), 1), saved

    def backward(
        self, grad: Tensor, stats: Tensor, saved: Tensor | None, rows: Tensor, cols: Tensor | None, i: slice, j: slice,
        want_cols: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parts = [[part.contiguous() for part in both.chunk(2, dim=1)] for both in (grad, stats)]
        g, h = (some(HistogramOut, positives=p, negatives=n) for p, n in parts)
        received = Backward(self._call(rows, cols, i, j), g, h._replace(ranges=saved), (True, want_cols))
        gradients: tuple[Tensor, ...] = self.sides.run(received)
        return gradients


class Places(Engine):
    """Similarities and columns [r, 2·n] of what is looked for, in fp64; column -1: none.

    The larger similarity is better; ties go to the smallest column.
    """

    searches = 1

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_tensor([-torch.inf, -1.0], dtype=torch.float64).repeat(len(rows), self.searches)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        (u, p), (v, q) = ((t[:, 0::2], t[:, 1::2]) for t in (a, b))
        better = (v > u) | ((v == u) & (q >= 0) & ((q < p) | (p < 0)))
        out = torch.empty_like(a)
        out[:, 0::2], out[:, 1::2] = torch.where(better, v, u), torch.where(better, q, p)
        return out

    def found(self, u: Tensor, column: Tensor, j: slice) -> Tensor:
        """[r, 2·n] from similarities and a block's columns [r, n]."""
        missing = column < 0
        u = torch.where(missing, -torch.inf, u.double())
        return torch.stack((u, torch.where(missing, -1, column + j.start).double()), 2).flatten(1)


class Extremes(Places):
    """The easy or hard positive and negative of each row; «none» on one side does not look for it."""

    searches = 2

    def __init__(self, sides: Sides, positive: str, negative: str) -> None:
        super().__init__(sides)
        self.positive, self.negative = positive, negative

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        sides = self.sides
        which: dict[str, Any] = {"positive": self.positive, "negative": self.negative}
        call = declared.Extremes(**sides.matrix(rows, cols, i, j), **which, **sides.how, selves=sides.among(i, j))
        columns = torch.stack(sides.run(call), 1)
        at = torch.arange(len(rows), device=rows.device).repeat_interleave(2)
        u = sides.run(declared.Dots(rows, cols, i=at, j=columns.clamp_min(0).flatten(), **sides.how)).view(-1, 2)
        signs = u.new_tensor([1 if self.positive == "easy" else -1, -1 if self.negative == "easy" else 1])
        return self.found(u * signs, columns, j), None


class Nearest(Places):
    """The most similar negative below each of some bounds [B, M] of each row."""

    def __init__(self, sides: Sides, bounds: Tensor) -> None:
        super().__init__(sides)
        self.bounds, self.searches = bounds, bounds.shape[1]

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        sides = self.sides
        n, u = sides.run(declared.Below(**sides.matrix(rows, cols, i, j), bounds=self.bounds[i], **sides.how))
        return self.found(u, n, j), None


class Triplets(Engine):
    """Triplets of each row's negatives and its positives, whose similarities [b, M] of this rank's rows are known.

    [r, 2]: the sum of the losses, and how many are above 0. The positives have a gradient too, which stays here: so the
    rows of a visitor are not computed.
    """

    both_ways = False

    def __init__(self, sides: Sides, positives: Tensor, margin: float, smooth: bool) -> None:
        super().__init__(sides)
        self.positives, self.margin, self.smooth = positives, margin, smooth

    def empty(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(len(rows), 2)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def _call(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> declared.Against:
        how: dict[str, Any] = {"positives": self.positives, "margin": self.margin, "smooth": self.smooth}
        return declared.Against(**self.sides.matrix(rows, cols, i, j), **how, **self.sides.how)

    def forward(self, rows: Tensor, cols: Tensor | None, i: slice, j: slice) -> tuple[Tensor, Tensor | None]:
        return torch.stack(self.sides.run(self._call(rows, cols, i, j)), 1), None

    def backward(
        self, grad: Tensor, stats: Tensor, saved: Tensor | None, rows: Tensor, cols: Tensor | None, i: slice, j: slice,
        want_cols: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        of = some(TripletOut, total=grad[:, 0].contiguous())
        received = Backward(self._call(rows, cols, i, j), of, some(TripletOut), (True, want_cols, True))
        gradients: tuple[Tensor, ...] = self.sides.run(received)
        return gradients
