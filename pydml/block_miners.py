"""PML's miners on margins, angles, shares and histograms of distances: by blocks of rows in PyTorch, for any distance.

No engine has these selections. The whole matrix is in memory only on the ``dense`` backend; else nothing is but a block
of it and what the tuple itself holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from pydml import checks, distances
from pydml.losses.batch import Batch, Dense
from pydml.miners import Indices, Miner
from pydml.tiled.sides import TILE_ELEMENTS, Tile

TYPES = ("all", "hard", "semihard", "easy")


class BlockMiner(Miner):
    """What these miners share: the same definition on the whole matrix and on its blocks."""

    def fused(self, batch: Batch) -> Indices:
        return self.by_rows(batch)


class _Triplets(BlockMiner):
    """Triplets by a number that each of them has."""

    def nothing(self, batch: Batch) -> Indices:
        return super().nothing(batch)[:3]

    def reset_stats(self) -> None:
        super().reset_stats()
        self._seen: list[Tensor] = []

    def dense(self, batch: Dense | Tile) -> Indices:
        found = []
        step = max(1, TILE_ELEMENTS // max(batch.same.shape[1], 1))  # no more triplets at once than a tile has elements
        pairs = batch.same.nonzero()
        for a, p in (part.unbind(1) for part in pairs.split(step)):
            kept = self.keep(batch, a, p)
            k, n = kept.nonzero(as_tuple=True)
            found.append(torch.stack((a[k], p[k], n)))
        empty = batch.same.new_empty(3, 0, dtype=torch.int64)
        a, p, n = torch.cat([*found, empty], 1)
        return a, p, n

    def keep(self, batch: Dense | Tile, a: Tensor, p: Tensor) -> Tensor:
        """Which columns [pairs, N] make a triplet with the pairs (a, p) that is wanted."""
        raise NotImplementedError


class TripletMarginMiner(_Triplets):
    """Triplets that violate a margin: D_an - D_ap ≤ m (S_ap - S_an ≤ m), Schroff et al. 2015.

    Blocks of rows on every backend but ``dense``.

    Parameters
    ----------
    margin
        m.
    type_of_triplets
        "all" of them; "hard": those with D_an ≤ D_ap, "semihard": the others; "easy": triplets that do not violate it.

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> a, p, n = pydml.miners.TripletMarginMiner(margin=0.1, type_of_triplets="semihard")(embeddings, labels)
    >>> d = torch.cdist(*[torch.nn.functional.normalize(embeddings)] * 2)
    >>> bool(((d[a, n] > d[a, p]) & (d[a, n] < d[a, p] + 0.11)).all())
    True
    """

    settings = ("margin",)
    statistics = ("avg_triplet_margin", "pos_pair_dist", "neg_pair_dist")

    def __init__(self, margin: float = 0.2, type_of_triplets: str = "all", **common: Any) -> None:
        super().__init__(**common)
        self.margin = checks.number("margin", margin)
        self.type_of_triplets = checks.choice("type_of_triplets", type_of_triplets, TYPES)
        self.add_settings()

    def keep(self, batch: Dense | Tile, a: Tensor, p: Tensor) -> Tensor:
        u_ap, u_an, diff = batch.u[a, p], batch.u[a], batch.diff[a]
        margin = u_ap[:, None] - u_an
        if self.collect_stats:
            n = diff.sum(1).double()
            u_an_total = torch.where(diff, u_an.double(), 0).sum()
            self._seen.append(torch.stack((n.sum(), (n * u_ap.double()).sum(), u_an_total)))
        if self.type_of_triplets == "easy":
            return diff & (margin > self.margin)
        kept = diff & (margin <= self.margin)
        if self.type_of_triplets == "all":
            return kept
        return kept & (margin <= 0 if self.type_of_triplets == "hard" else margin > 0)

    def set_stats(self, batch: Batch, found: Indices) -> None:
        number, u_ap, u_an = torch.stack(self._seen).sum(0).tolist() if self._seen else (0.0, 0.0, 0.0)
        sign = 1 if self.distance.is_inverted else -1
        if number:
            self.pos_pair_dist, self.neg_pair_dist = sign * u_ap / number, sign * u_an / number
            self.avg_triplet_margin = (u_ap - u_an) / number
        else:  # as in PML, the mean of nothing
            self.pos_pair_dist = self.neg_pair_dist = self.avg_triplet_margin = math.nan


class AngularMiner(_Triplets):
    """Triplets whose negative sees anchor and positive under a large angle, Wang et al. 2017.

    arctan(‖x_a - x_p‖ / (2·‖x_n - x_c‖)) > angle, x_c = (x_a + x_p)/2

    As in PML the angle is that of the embeddings as they are given, not of normalised ones, and 1e-6 is added to every
    coordinate of a difference. Blocks of rows on every backend but ``dense``; Euclidean distances only.

    Parameters
    ----------
    angle
        In degrees; the attribute is in radians, as PML's.

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> a, p, n = pydml.miners.AngularMiner(angle=30)(embeddings, labels)
    """

    distances = ("euclidean",)
    any_other = False
    settings = ("angle",)
    statistics = (
        "average_angle",
        "average_angle_above_threshold",
        "average_angle_below_threshold",
        "min_angle",
        "max_angle",
        "std_of_angle",
    )
    #: What torch.nn.functional.pairwise_distance adds to every coordinate.
    TINY = 1e-6

    def __init__(self, angle: float = 20, **common: Any) -> None:
        super().__init__(**common)
        if not self.normalize_embeddings:
            raise ValueError("normalize_embeddings: got False, wanted True, as in PML")
        self.angle = math.radians(checks.number("angle", angle))
        self.add_settings()

    def by_rows(self, batch: Batch) -> Indices:
        self._see(batch)
        return super().by_rows(batch)

    def by_matrix(self, batch: Batch) -> Indices:
        self._see(batch)
        return super().by_matrix(batch)

    def _see(self, batch: Batch) -> None:
        z = batch.embeddings.to(batch.dtype)
        self._rows, self._cols = z, z if batch.ref is None else batch.ref.to(batch.dtype)

    def keep(self, batch: Dense | Tile, a: Tensor, p: Tensor) -> Tensor:
        x = self._rows if isinstance(batch, Dense) else self._rows[batch.rows]
        anchors, positives, diff = x[a], self._cols[p], batch.diff[a]
        centres = (anchors + positives) / 2
        d_ap = (anchors - positives + self.TINY).norm(dim=1)
        d_nc = torch.cdist(centres, self._cols + self.TINY, compute_mode="donot_use_mm_for_euclid_dist")
        angles = torch.atan(d_ap[:, None] / (2 * d_nc))
        kept = diff & (angles > self.angle)
        if self.collect_stats:
            self._seen += [angles[kept].double(), angles[diff & ~kept].double()]
        return kept

    def set_stats(self, batch: Batch, found: Indices) -> None:
        empty = torch.zeros(0, dtype=torch.float64)
        above, below = (torch.cat([empty, *(t.cpu() for t in self._seen[k::2])]) for k in (0, 1))
        every = torch.cat((above, below))
        if len(every):
            self.average_angle, self.min_angle = math.degrees(every.mean()), math.degrees(every.min())
            self.max_angle, self.std_of_angle = math.degrees(every.max()), math.degrees(every.std())
        if len(above):
            self.average_angle_above_threshold = math.degrees(above.mean())
        if len(below):
            self.average_angle_below_threshold = math.degrees(below.mean())


class PairMarginMiner(BlockMiner):
    """Positives farther than ``pos_margin`` and negatives nearer than ``neg_margin`` (with similarities: less, more).

    Blocks of rows on every backend but ``dense``.

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> a1, p, a2, n = pydml.miners.PairMarginMiner(pos_margin=0.2, neg_margin=1.2)(embeddings, labels)
    """

    distinct = True
    settings = ("pos_margin", "neg_margin")
    statistics = ("pos_pair_dist", "neg_pair_dist")

    def __init__(self, pos_margin: float = 0.2, neg_margin: float = 0.8, **common: Any) -> None:
        super().__init__(**common)
        self.pos_margin = checks.number("pos_margin", pos_margin)
        self.neg_margin = checks.number("neg_margin", neg_margin)
        self.add_settings()

    def reset_stats(self) -> None:
        super().reset_stats()
        self._seen: list[Tensor] = []

    def dense(self, batch: Dense | Tile) -> Indices:
        u = batch.u
        if self.collect_stats:
            sides = [torch.where(side, u.double(), 0).sum() for side in (batch.same, batch.diff)]
            self._seen.append(torch.stack((*sides, batch.same.sum().double(), batch.diff.sum().double())))
        positives = batch.same & (u < self.oriented(self.pos_margin))
        negatives = batch.diff & (u > self.oriented(self.neg_margin))
        return *positives.nonzero(as_tuple=True), *negatives.nonzero(as_tuple=True)

    def set_stats(self, batch: Batch, found: Indices) -> None:
        if self._seen:
            positive, negative, n_pos, n_neg = torch.stack(self._seen).sum(0).tolist()
            sign = 1 if self.distance.is_inverted else -1
            self.pos_pair_dist = sign * positive / n_pos if n_pos else 0
            self.neg_pair_dist = sign * negative / n_neg if n_neg else 0


class HDCMiner(BlockMiner):
    """The hardest share of all positive and of all negative pairs, Yuan et al. 2017 (hard-aware deeply cascaded).

    ⌈share·pairs⌉ of each side, the hardest first; ``set_idx_externally`` gives pairs to take the share of, and each
    call then takes it of what the last one left. Blocks of rows on every backend but ``dense``.

    Parameters
    ----------
    filter_percentage
        The share, from 0 to 1.

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> a1, p, a2, n = pydml.miners.HDCMiner(filter_percentage=0.25)(embeddings, labels)
    >>> len(p), len(n)
    (24, 224)
    """

    settings = ("filter_percentage",)
    a1: Tensor | None
    p: Tensor | None
    a2: Tensor | None
    n: Tensor | None

    def __init__(self, filter_percentage: float = 0.5, **common: Any) -> None:
        super().__init__(**common)
        self.filter_percentage = checks.number("filter_percentage", filter_percentage, least=0)
        self.add_settings()
        self.reset_idx()

    def reset_idx(self) -> None:
        """Take the share of all pairs again."""
        self.a1 = self.p = self.a2 = self.n = None
        self.was_set_externally = False

    def set_idx_externally(self, external_indices_tuple: Indices, labels: Tensor) -> None:
        """Take the share of these pairs, (a1, p, a2, n) or triplets (a, p, n), from now on."""
        a, p, *rest = external_indices_tuple
        self.a1, self.p, self.a2, self.n = (a, p, a, rest[0]) if len(rest) == 1 else (a, p, rest[0], rest[1])
        self.was_set_externally = True

    def fused(self, batch: Batch) -> Indices:
        return self._share(batch)

    def by_rows(self, batch: Batch) -> Indices:
        return self._share(batch)

    def dense(self, batch: Dense | Tile) -> Indices:
        u = batch.u.flatten()
        found = []
        for side, hardest in ((batch.same, -u), (batch.diff, u)):
            at = side.flatten().nonzero()[:, 0]
            at = at[hardest[at].topk(self._number(len(at))).indices]
            found += [at // batch.u.shape[1], at % batch.u.shape[1]]
        self.a1, self.p, self.a2, self.n = found
        return tuple(found)

    def by_matrix(self, batch: Batch) -> Indices:
        return self._share_of_listed(batch) if self.was_set_externally else super().by_matrix(batch)

    def _number(self, pairs: int) -> int:
        return min(pairs, math.ceil(self.filter_percentage * pairs))

    def _share(self, batch: Batch) -> Indices:
        if self.was_set_externally:
            return self._share_of_listed(batch)
        if self.small(batch):
            return self.by_matrix(batch)
        rows, cols = batch.size
        n_pos = int(batch.positives().sum())
        n_neg = rows * (cols - int(batch.has_selves)) - n_pos
        numbers = self._number(n_pos), self._number(n_neg)
        empty = batch.embeddings.new_empty(0, dtype=batch.dtype)
        best = [(empty, empty.long()), (empty, empty.long())]
        for tile in self.tiles(batch):
            for k, side in enumerate((tile.same, tile.diff)):
                at = side.flatten().nonzero()[:, 0]
                u = tile.u.flatten()[at]
                value = torch.cat((best[k][0], u if k else -u))
                flat = torch.cat((best[k][1], at + tile.rows[0] * cols))
                top = value.topk(min(numbers[k], len(value)), sorted=False)
                best[k] = top.values, flat[top.indices]
        positive, negative = (flat[value.argsort(descending=True)] for value, flat in best)
        self.a1, self.p, self.a2, self.n = positive // cols, positive % cols, negative // cols, negative % cols
        return self.a1, self.p, self.a2, self.n

    def _share_of_listed(self, batch: Batch) -> Indices:
        for side, names in ((1, ("a1", "p")), (-1, ("a2", "n"))):
            i, j = (cast(Tensor, getattr(self, name)) for name in names)
            if len(i):
                hardest = self.raw(self.listed(batch, i, j)) * -side
                at = hardest.topk(self._number(len(i))).indices
                for name, index in zip(names, (i, j), strict=True):
                    setattr(self, name, index[at])
        return cast(Indices, (self.a1, self.p, self.a2, self.n))


class UniformHistogramMiner(BlockMiner):
    """Pairs drawn evenly over their distances: as many from every bin of a histogram that is not empty.

    The bins go from the least to the largest distance of a side. Draws are with replacement and come from torch's
    default generator. Three passes over blocks of rows: the range, the counts, the drawn pairs.

    Parameters
    ----------
    num_bins, pos_per_bin, neg_per_bin
        Bins of each side, and how many pairs are drawn from each that is not empty.

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> a1, p, a2, n = pydml.miners.UniformHistogramMiner(num_bins=5, pos_per_bin=2, neg_per_bin=3)(embeddings, labels)
    """

    settings = ("pos_per_bin", "neg_per_bin")

    def __init__(self, num_bins: int = 100, pos_per_bin: int = 10, neg_per_bin: int = 10, **common: Any) -> None:
        super().__init__(**common)
        self.num_bins = checks.integer("num_bins", num_bins, least=1)
        self.pos_per_bin = checks.integer("pos_per_bin", pos_per_bin, least=1)
        self.neg_per_bin = checks.integer("neg_per_bin", neg_per_bin, least=1)
        self.add_settings()

    def by_rows(self, batch: Batch) -> Indices:
        return self._drawn(batch, lambda: self.tiles(batch))

    def by_matrix(self, batch: Batch) -> Indices:
        if self.kind == distances.OTHER:
            return self.by_rows(batch)
        m = Dense(batch)
        whole = Tile(torch.arange(len(m.u), device=m.u.device), m.u, m.same, m.diff, None, None)
        return self._drawn(batch, lambda: [whole])

    def _drawn(self, batch: Batch, tiles: Callable[[], Iterable[Tile]]) -> Indices:
        found: list[Tensor] = []
        for side, each in (("same", self.pos_per_bin), ("diff", self.neg_per_bin)):
            found += self._side(batch, tiles, side, each)
        return tuple(found)

    def _side(self, batch: Batch, tiles: Callable[[], Iterable[Tile]], side: str, each: int) -> list[Tensor]:
        """Rows and columns of the pairs that are drawn of one side."""
        nothing = batch.embeddings.new_empty(0, dtype=torch.int64)
        least, most = torch.inf, -torch.inf
        for tile in tiles():
            distance = self.raw(tile.u)[getattr(tile, side)]
            if len(distance):
                least, most = min(least, float(distance.min())), max(most, float(distance.max()))
        if not math.isfinite(least) or not math.isfinite(most):
            return [nothing, nothing.clone()]
        edges = torch.linspace(least, most, self.num_bins + 1, dtype=batch.dtype, device=nothing.device)

        def binned(tile: Tile) -> tuple[Tensor, Tensor]:
            """Places of the side's pairs in the block, and their bins."""
            at = getattr(tile, side).flatten().nonzero()[:, 0]
            distance = self.raw(tile.u).flatten()[at]
            return at, (torch.bucketize(distance, edges, right=True) - 1).clamp(0, self.num_bins - 1)

        counts = [torch.bincount(binned(tile)[1], minlength=self.num_bins) for tile in tiles()]
        total = torch.stack(counts).sum(0)
        bins = (total > 0).nonzero()[:, 0].repeat_interleave(each)
        ranks = (torch.rand(len(bins), dtype=torch.float64, device=bins.device) * total[bins]).long()
        i, j = torch.empty_like(bins), torch.empty_like(bins)
        before = torch.zeros_like(total)
        for tile, count in zip(tiles(), counts, strict=True):
            at, of = binned(tile)
            order = of.argsort(stable=True)
            start = count.cumsum(0) - count
            here = ((ranks >= before[bins]) & (ranks < (before + count)[bins])).nonzero()[:, 0]
            flat = at[order[start[bins[here]] + ranks[here] - before[bins[here]]]]
            i[here], j[here] = tile.rows[flat // tile.u.shape[1]], flat % tile.u.shape[1]
            before = before + count
        return [i, j]


class EmbeddingsAlreadyPackagedAsTriplets(Miner):
    """Rows 0, 1, 2 are the first triplet, 3, 4, 5 the second, and so on.

    Examples
    --------
    >>> pydml.miners.EmbeddingsAlreadyPackagedAsTriplets()(torch.randn(6, 4), torch.arange(6))
    (tensor([0, 3]), tensor([1, 4]), tensor([2, 5]))
    """

    def nothing(self, batch: Batch) -> Indices:
        return super().nothing(batch)[:3]

    def fused(self, batch: Batch) -> Indices:
        if len(batch.embeddings) % 3:
            raise ValueError(f"embeddings: got {len(batch.embeddings)} rows, wanted triplets of them: a multiple of 3")
        a = torch.arange(0, len(batch.embeddings), 3, device=batch.embeddings.device)
        return a, a + 1, a + 2

    def by_rows(self, batch: Batch) -> Indices:
        return self.fused(batch)

    def by_matrix(self, batch: Batch) -> Indices:
        return self.fused(batch)
