"""One call's arguments where rows, and perhaps proxies, are spread over ranks: what :class:`Batch` is in one process.

Labels, tuples and row statistics are those of all ranks, so a loss computes its epilogue on every rank as if it were
alone; embeddings are this rank's only, and no similarity matrix is larger than one rank's rows by a block of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pydml import ops
from pydml.declared import Dots, TopK, Triplet
from pydml.distributed.engines import (
    Engine,
    Extremes,
    Histogram,
    Nearest,
    Pair,
    Sides,
    Triplets,
    row_statistics,
    run,
)
from pydml.distributed.fetch import fetch, owners
from pydml.distributed.functions import (
    gather_columns,
    gather_rows,
    lse_over_ranks,
    shared,
    sum_over_ranks,
)
from pydml.distributed.group import Group
from pydml.distributed.walk import WALKS, Walk
from pydml.losses.batch import Batch, pair_stats
from pydml.policy import POLICIES, softplus
from pydml.sums import add_at
from pydml.tiled.select import extremes_up_to

#: Positives of a row up to which triplets are streamed; they are fetched, so larger classes would bring most columns.
MOST_POSITIVES = 64


@dataclass
class Shards:
    """How many rows and reference columns each rank has, who wants gradients, and how columns travel."""

    group: Group
    sizes: list[int]
    ref_sizes: list[int] | None
    mode: str
    ref_grad: bool = False
    class_sizes: list[int] | None = None  # of sharded proxies; None: every rank has them all
    #: The columns [B] of the concatenated reference set that the rows of all ranks are, where there are such.
    selves: Tensor | None = None

    @property
    def own(self) -> slice:
        start = sum(self.sizes[: self.group.rank])
        return slice(start, start + self.sizes[self.group.rank])


@dataclass
class ShardedBatch(Batch):
    """A batch whose ``embeddings`` and ``ref`` are this rank's, and whose labels and tuple are those of all ranks."""

    shards: Shards | None = None

    @property
    def _shards(self) -> Shards:
        assert self.shards is not None
        return self.shards

    @property
    def size(self) -> tuple[int, int]:
        shards = self._shards
        return sum(shards.sizes), sum(shards.sizes if shards.ref_sizes is None else shards.ref_sizes)

    @property
    def has_selves(self) -> bool:
        return self.ref is None or self._shards.selves is not None

    def self_columns(self) -> Tensor:
        return super().self_columns() if self._shards.selves is None else self._shards.selves

    # What the epilogues ask for beside statistics

    def _gather(self, own: Tensor, what: str) -> Tensor:
        return gather_rows(own, self._shards.group, self._shards.sizes, what)

    def nan(self, value: Tensor) -> Tensor:
        wrong = sum((~torch.isfinite(t)).sum() for t in (self.embeddings, self.ref) if t is not None)
        assert isinstance(wrong, Tensor)
        everywhere = self._shards.group.all_reduce(wrong, "numbers that are not finite")
        return value * torch.where(everywhere == 0, 1.0, torch.nan).to(value.dtype)  # NaN in the gradients too

    def zero(self) -> Tensor:
        return sum_over_ranks(super().zero(), self._shards.group, "zeros")

    def zeros(self) -> Tensor:
        return self._gather(super().zeros(), "zeros")

    def everything(self) -> Tensor:
        return self._gather(self.embeddings, "embeddings")

    def draw_triplets(self, number: int) -> bool:
        """See :meth:`Batch.draw_triplets`; the draws of the first rank count."""
        drawn = super().draw_triplets(number)
        for index in self.indices if drawn and self.indices is not None else ():
            self._shards.group.broadcast(index, "triplets")
        return drawn

    # Rows against columns

    @cached_property
    def rows(self) -> Tensor:
        """This rank's rows in the dtype of the computation, so that parts of a gradient are added up in it."""
        return self.embeddings.to(self.dtype)

    @cached_property
    def cols(self) -> Tensor | None:
        """This rank's columns, None where they are its rows."""
        return None if self.ref is None else self.ref.to(self.dtype)

    def _walk(self, x: Tensor, sizes: list[int], mode: str | None = None) -> Walk:
        return WALKS[mode or self._shards.mode](self._shards.group, x, sizes, self.dtype)

    @cached_property
    def walk(self) -> Walk:
        shards = self._shards
        if self.ref is None or shards.ref_sizes is None:
            return self._walk(self.embeddings, shards.sizes)
        return self._walk(self.ref, shards.ref_sizes)

    def _sides(self, labels: Tensor | None = None) -> Sides:
        labels = self.known_labels() if labels is None else labels
        col_labels = labels if self.ref is None else self.ref_labels
        assert col_labels is not None
        return Sides(labels, col_labels, self.view, self.normalize, self.backend, self.selves)

    def _statistics(self, engine: Engine, more: Tensor | None = None) -> Tensor:
        shards = self._shards
        want_cols = self.ref is None or shards.ref_grad
        return row_statistics(engine, self.walk, self.rows, self.cols, shards.own, want_cols, more)

    def stats(
        self,
        policy: str,
        params: list[float],
        *,
        epsilon: float | None = None,
        row_field: Tensor | None = None,
        col_field: Tensor | None = None,
        listed: bool = True,
    ) -> Tensor:
        if listed and self.pairs is not None:
            return self.listed_stats(policy, params, row_field)[0]
        self.prepare(policy, epsilon)
        engine = Pair(self._sides(), policy, params, row_field, col_field, epsilon, self._shards.sizes)
        return self._gather(self._statistics(engine), "row statistics")

    def histogram(self, nodes: int, low: float, high: float) -> tuple[Tensor, Tensor]:
        counts = self._gather(self._statistics(Histogram(self._sides(), nodes, low, high)), "histograms")
        positives, negatives = counts.chunk(2, dim=1)
        return positives, negatives

    def histogram_totals(
        self, nodes: int, low: float, high: float, labels: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        shards = self._shards
        counts = self._statistics(Histogram(self._sides(labels), nodes, low, high))
        positives, negatives = counts.chunk(2, dim=1)
        mine = torch.cat((torch.where(counted[shards.own, None], positives, 0).sum(0), negatives.sum(0)))
        total_pos, total_neg = sum_over_ranks(mine, shards.group, "histograms").chunk(2)
        return total_pos, total_neg

    def triplet_sums(self, mode: str, margin: float, swap: bool, smooth: bool) -> tuple[Tensor, Tensor]:
        """See :meth:`Batch.triplet_sums`. A triplet has two columns: positives are fetched, or all columns gathered."""
        shards = self._shards
        if not (swap or self.walk.holds_all or (self.positives() > MOST_POSITIVES).any()):
            return self._streamed_triplets(mode, float(margin), smooth)
        how: dict[str, Any] = {"mode": mode, "margin": float(margin), "swap": swap, "smooth": smooth, **self.how}
        if swap:  # here it also needs the rows of its positives: every rank computes everything
            call = Triplet(self.everything(), None, self.known_labels(), None, **how)
            total, above = ops.call(call, self.backend)
            return total, above
        sizes = shards.sizes if shards.ref_sizes is None else shards.ref_sizes
        cols = gather_columns(self.rows if self.cols is None else self.cols, shards.group, sizes, "embeddings")
        sides, selves = self._sides(), self.self_columns()[shards.own] if self.has_selves else None
        call = Triplet(**sides.matrix(self.rows, cols, shards.own, slice(None)), **how, selves=selves)
        total, above = ops.call(call, self.backend)
        both = self._gather(torch.stack((total, above), 1), "sums over triplets")
        return both[:, 0], both[:, 1].detach()

    def _streamed_triplets(self, mode: str, margin: float, smooth: bool) -> tuple[Tensor, Tensor]:
        """The positives of a row are few and their similarities are known first; then negatives pass by."""
        own = self._shards.own
        i, place, j = self.positive_pairs()
        u_ap = self.dots(i, j)
        nothing = u_ap.new_full((self.size[0], int(place.amax()) + 1 if len(place) else 0), torch.inf)
        positives = nothing.index_put((i, place), u_ap)
        if mode == "all":
            mine = positives[own].contiguous()
            engine = Triplets(self._sides(), mine.detach(), margin, smooth)
            found = self._gather(self._statistics(engine, mine), "sums over triplets")
            return found[:, 0], found[:, 1].detach()
        n = self._search(Nearest(self._sides(), positives.detach()))[:, 1::2].long()[i, place] if len(place) else i
        i, u_ap, n = i[n >= 0], u_ap[n >= 0], n[n >= 0]
        violation = self.dots(i, n) - u_ap + margin
        term = softplus(violation) if smooth else torch.relu(violation)
        zeros = term.new_zeros(self.size[0])
        total, above = (add_at(zeros, i, x.to(term.dtype)) for x in (term, term > 0))
        return self.nan(total), above

    # Chosen pairs

    def listed_triplets(self, a: Tensor, p: Tensor, n: Tensor, margin: float, smooth: bool) -> tuple[Tensor, Tensor]:
        violation = self.dots(a, n) - self.dots(a, p) + margin
        term = softplus(violation) if smooth else torch.relu(violation)
        nothing = term.new_zeros(self.size[0])
        total, above = (add_at(nothing, a, x.to(term.dtype)) for x in (term, term > 0))
        return total, above.detach()

    def _search(self, engine: Engine) -> Tensor:
        """What an engine finds for all rows: similarities and columns [B, 2·searches]."""
        shards = self._shards
        mine, _ = run(engine, self.walk, self.rows.detach(), shards.own, self.ref is None)
        return shards.group.all_gather(mine, shards.sizes, "extremes")

    def extremes(self, positive: str, negative: str) -> tuple[Tensor, Tensor]:
        sides = self._sides()
        found = self._search(Extremes(sides, positive, "none" if negative == "semihard" else negative))
        p, n = found[:, 1].long(), found[:, 3].long()
        if negative == "semihard":
            u = found[:, :1].to(self.dtype) * (1 if positive == "easy" else -1)
            bound = torch.where(p[:, None] < 0, torch.inf, u)
            n = self._search(Nearest(sides, bound))[:, 1].long()
        return p, n

    def extremes_up_to(self, limit: float, semihard: bool) -> tuple[Tensor, Tensor]:
        """See :meth:`Batch.extremes_up_to`: in plain PyTorch there too, here with all columns on every rank."""
        shards, sides = self._shards, self._sides()
        own, sizes = shards.own, shards.sizes if shards.ref_sizes is None else shards.ref_sizes
        cols = shards.group.all_gather(self.walk.x, sizes, "embeddings").to(self.dtype)
        selves = self.self_columns()[own] if self.has_selves else None
        matrix = sides.matrix(self.rows.detach(), cols, own, slice(None))
        p, n = extremes_up_to(**matrix, limit=limit, semihard=semihard, **self.how, selves=selves)
        both = shards.group.all_gather(torch.stack((p, n), 1), shards.sizes, "extremes")
        return both[:, 0], both[:, 1]

    def topk(self, policy: str, params: list[float], k: int, side: str) -> tuple[Tensor, Tensor]:
        """See :meth:`Batch.topk`. Every rank proposes the k largest of its own pairs; the best of all are taken."""
        self.prepare(policy)
        shards, sides, loss = self._shards, self._sides(), POLICIES[policy](*params)
        symmetric, rows, own = self.ref is None, self.rows.detach(), shards.own
        zero, found = rows.new_zeros(1), []
        for block in self.walk.blocks(symmetric, both_ways=True):
            if not len(rows) or (block.x is not None and not len(block.x)):
                continue
            if symmetric and block.x is not None and not block.both and block.at.start < own.start:
                continue  # its owner meets this rank too, and takes these pairs
            matrix, selves = sides.matrix(rows, block.x, own, block.at), sides.among(own, block.at)
            ranked: dict[str, Any] = {"policy": policy, "params": [float(p) for p in params], "k": k, "side": side}
            i, j = sides.run(TopK(**matrix, **ranked, **self.how, selves=selves))
            i, j = i[i >= 0], j[i >= 0]
            u = sides.run(Dots(rows, block.x, i=i, j=j, **self.how))
            i, j = i + own.start, j + block.at.start
            same = sides.row_labels[i] == sides.col_labels[j]
            value = torch.where(same, loss.term(0, u, zero, zero), loss.term(1, u, zero, zero))
            if symmetric:
                i, j = torch.minimum(i, j), torch.maximum(i, j)
            found.append(torch.stack((value.double(), i.double(), j.double()), 1))
        mine = torch.cat([*found, rows.new_zeros(0, 3, dtype=torch.float64)])
        sizes = [row[0] for row in shards.group.facts([len(mine)], None)]
        value, i, j = shards.group.all_gather(mine, sizes, "candidates").unbind(1)
        by_place = torch.argsort(i * self.size[1] + j)
        best = by_place[torch.argsort(value[by_place], descending=True, stable=True)][:k]
        nothing = i.new_full((k - len(best),), -1)
        return torch.cat((i[best], nothing)).long(), torch.cat((j[best], nothing)).long()

    def dots(self, i: Tensor, j: Tensor) -> Tensor:
        """u of listed pairs. The owner of row i computes it, with column j from wherever that is."""
        shards = self._shards
        sizes = shards.sizes if shards.ref_sizes is None else shards.ref_sizes
        owner = owners(i, shards.sizes)
        order = torch.argsort(owner, stable=True)
        mine = (owner == shards.group.rank).nonzero()[:, 0]
        wanted, at = torch.unique(j[mine], return_inverse=True)
        cols = fetch(self.rows if self.cols is None else self.cols, wanted, shards.group, sizes)
        u = ops.call(Dots(self.rows, cols, i=i[mine] - shards.own.start, j=at, **self.how), self.backend)
        numbers = torch.bincount(owner, minlength=shards.group.size).tolist()
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        # A NaN on a rank that owns none of these pairs must not stay unseen: nothing compares as larger than it.
        return self.nan(gather_rows(u, shards.group, numbers, "similarities of chosen pairs")[place])

    def stats_between(self, i: Tensor, j: Tensor, policy: str, params: list[float], col_field: Tensor) -> Tensor:
        self.prepare(policy)
        shards, group, start = self._shards, self._shards.group, self._shards.own.start
        owner_i, owner_j = owners(i, shards.sizes), owners(j, shards.sizes)
        by_i, by_j = torch.argsort(owner_i, stable=True), torch.argsort(owner_j, stable=True)
        rows, cols = (self.rows[index[owner == group.rank] - start] for index, owner in ((i, owner_i), (j, owner_j)))
        n_rows, n_cols = (torch.bincount(owner, minlength=group.size).tolist() for owner in (owner_i, owner_j))
        sides = Sides(by_i, by_j, self.view, self.normalize, self.backend)
        engine = Pair(sides, policy, params, col_field=col_field[by_j])
        first = sum(n_rows[: group.rank])
        at = slice(first, first + len(rows))
        own = row_statistics(engine, self._walk(cols, n_cols), rows, cols, at)
        place = torch.empty_like(by_i).scatter_(0, by_i, torch.arange(len(by_i), device=by_i.device))
        return gather_rows(own, group, n_rows, "row statistics")[place]

    # Proxies

    @property
    def _options(self) -> dict[str, Any]:
        return {"view": self.view, "normalize": self.normalize, "backend": self.backend}

    def _all_rows(self) -> Tensor:
        return gather_columns(self.rows, self._shards.group, self._shards.sizes, "embeddings")

    def proxy_stats(self, w: Tensor, classes: Tensor, policy: str, params: list[float], **pooling: Any) -> Tensor:
        self.prepare(policy, pool_size=pooling.get("pool_size", 1))
        shards, labels = self._shards, self.known_labels()
        w = w.to(self.dtype)
        options: dict[str, Any] = self._options | pooling
        if shards.class_sizes is not None:  # all rows against the classes of this rank
            part = pair_stats(self._all_rows(), w, labels, classes, policy, params, **options)
            return lse_over_ranks(part, shards.group, "log-sum-exps over classes")
        own = labels[shards.own]
        if len(own):
            stats = pair_stats(self.rows, shared(w, shards.group, "proxies"), own, classes, policy, params, **options)
        else:
            nothing = (self.rows.sum() + shared(w, shards.group, "proxies").sum()) * 0
            stats = nothing.expand(0, len(POLICIES[policy].slots))
        return self._gather(stats, "row statistics")

    def anchor_stats(
        self, w: Tensor, classes: Tensor, policy: str, params: list[float], col_field: Tensor | None
    ) -> Tensor:
        self.prepare(policy)
        shards, labels = self._shards, self.known_labels()
        w = w.to(self.dtype)
        if shards.class_sizes is not None:
            own = pair_stats(w, self._all_rows(), classes, labels, policy, params, col_field=col_field, **self._options)
            return gather_rows(own, shards.group, shards.class_sizes, "statistics of proxies")
        col_field = None if col_field is None else col_field[shards.own]
        w = shared(w, shards.group, "proxies")
        if len(self.rows):
            part = pair_stats(
                w, self.rows, classes, labels[shards.own], policy, params, col_field=col_field, **self._options
            )
        else:
            part = torch.full_like(w[:, :1], -torch.inf).expand(-1, len(POLICIES[policy].slots))
            part = part + 0 * (w.sum() + self.rows.sum())
        return lse_over_ranks(part, shards.group, "statistics of proxies")

    def proxy_dots(self, w: Tensor) -> Tensor:
        shards = self._shards
        own = self.known_labels()[shards.own]
        at = torch.arange(len(own), device=own.device)
        w = shared(w.to(self.dtype), shards.group, "proxies")
        u = ops.call(Dots(w, self.rows, i=own, j=at, view="dot", normalize=True), self.backend)
        return self._gather(u, "similarities with proxies")

    def gram(self) -> Tensor:
        return sum_over_ranks(super().gram(), self._shards.group, "Gram matrices")

    def over_classes(self, value: Tensor) -> Tensor:
        shards = self._shards
        return value if shards.class_sizes is None else sum_over_ranks(value, shards.group, "a sum over classes")
