"""Miners under PML's names: which pairs or triplets of a batch to learn from, for any loss, ours or PML's.

The select engine finds them tile by tile, so nothing of size B×B is stored but what the tuple itself holds. Where no
engine has the selection (ranges, margins on triplets, distances that are neither cosine nor Euclidean), blocks of rows
in PyTorch do: see each class, and :mod:`pydml.block_miners`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pydml import checks, distances, ops
from pydml.declared import Extremes, Mined, Sample
from pydml.losses.batch import Batch, Dense
from pydml.pml import joins
from pydml.records import WithRecords
from pydml.tiled.sides import TILE_ELEMENTS, Matrix, Tile, compute_dtype
from pydml.tuples import Distinct

__all__ = [
    "AngularMiner",
    "BaseMiner",
    "BatchEasyHardMiner",
    "BatchHardMiner",
    "DistanceWeightedMiner",
    "EmbeddingsAlreadyPackagedAsTriplets",
    "HDCMiner",
    "Miner",
    "MultiSimilarityMiner",
    "PairMarginMiner",
    "TripletMarginMiner",
    "UniformHistogramMiner",
]

Indices = tuple[Tensor, ...]
#: Multiplications up to which a matrix is made at once: 64 rows of width 256.
SMALL = 1 << 20
STRATEGIES = ("easy", "hard", "semihard", "all")


@joins("miners.base_miner", "BaseMiner")
class Miner(WithRecords):
    """Base of all miners.

    Parameters
    ----------
    distance
        A name, or a distance object of ours, of PML's or of your own; None is the miner's own. Cosines, dot products
        and Euclidean distances are the engines'; any other is called for blocks of rows.
    normalize_embeddings
        Are rows normalised first? A distance object says so itself.
    collect_stats
        Keep statistics of the last call in attributes, as PML does; None is the global flag.

    Attributes
    ----------
    num_triplets, num_pos_pairs, num_neg_pairs
        How many the last call has found.
    distance
        The distance object.
    """

    #: Distances that the miner takes, the default first.
    distances: ClassVar[tuple[str, ...]] = ("euclidean", "cosine", "squared")
    #: Does it never give a pair twice? Losses that count a pair once then need not look.
    distinct: ClassVar[bool] = False

    #: Settings and statistics that loggers of PML show.
    settings: ClassVar[tuple[str, ...]] = ()
    statistics: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *, distance: Any = None, normalize_embeddings: bool = True, collect_stats: bool | None = None
    ) -> None:
        WithRecords.__init__(self, collect_stats)
        normalize = checks.flag("normalize_embeddings", normalize_embeddings)
        self.distance = self._object(distance, normalize)
        #: What the engines call the distance; «other» is none of theirs.
        self.kind = distances.kind(self.distance)
        if self.kind not in (*self.distances, distances.OTHER) or (self.kind == distances.OTHER and not self.any_other):
            given = f"{type(self.distance).__name__} ({self.kind})"
            raise ValueError(f"distance: got {given}, wanted one of {', '.join(map(repr, self.distances))}")
        self.normalize_embeddings = bool(self.distance.normalize_embeddings)
        self.num_triplets = self.num_pos_pairs = self.num_neg_pairs = 0
        self.add_to_recordable_attributes(
            list_of_names=["num_pos_pairs", "num_neg_pairs", "num_triplets", *self.statistics], is_stat=True
        )

    #: Does the miner take distances beside those of the engines?
    any_other: ClassVar[bool] = True

    def _object(self, distance: Any, normalize: bool) -> Any:
        if distance is None or isinstance(distance, str):
            name = self.distances[0] if distance is None else checks.choice("distance", distance, self.distances)
            return distances.named(name, normalize)
        if not callable(distance) or not hasattr(distance, "is_inverted"):
            wanted = ", ".join(map(repr, self.distances))
            raise ValueError(
                f"distance: got {type(distance).__name__}, wanted one of {wanted}, or a distance object of "
                "pydml.distances or PML's"
            )
        kind = distances.kind(distance)
        if normalize or not distance.normalize_embeddings:
            return distance
        if kind == distances.OTHER:
            raise ValueError("normalize_embeddings: got False beside a distance that normalises, wanted it to say so")
        return distances.named(kind, False)

    def add_settings(self) -> None:
        """Record the settings, once they are there."""
        self.add_to_recordable_attributes(list_of_names=self.settings)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> Indices:
        """Mine one batch.

        A batch with NaN or infinities gives indices within the batch that mean nothing else.

        Parameters
        ----------
        embeddings
            [B, d], raw: normalisation is part of the miner.
        labels
            [B] of any integer dtype.
        ref_emb, ref_labels
            Where positives and negatives are looked for if not in the batch itself.
        backend
            One call's own choice; see :func:`pydml.use_backend`.

        Returns
        -------
        tuple of int64 tensors
            (a, p, n) or (a1, p, a2, n): ``indices_tuple`` of any loss. Anchors are rows of ``embeddings``, positives
            and negatives are rows of ``ref_emb`` or, without one, of ``embeddings``.
        """
        self.reset_stats()
        batch = self._batch(embeddings, labels, ref_emb, ref_labels)
        batch.choose(backend)
        with torch.no_grad(), ops.no_autocast(batch.embeddings.device):
            if type(self).mine is not Miner.mine:  # a miner of your own, written for PML's base class
                z, y = batch.embeddings, batch.known_labels()
                ref, ref_y = (z, y) if batch.ref is None else (batch.ref, batch.ref_labels)
                assert ref_y is not None
                found = self.mine(z, y, ref, ref_y)
            elif 0 in batch.size:
                found = self.nothing(batch)
            elif batch.backend == "dense":
                found = self.by_matrix(batch)
            else:
                found = self.by_rows(batch) if self.kind == distances.OTHER else self.fused(batch)
            if self.collect_stats and type(self).mine is Miner.mine:
                self.set_stats(batch, found)
        if len(found) == 3:
            self.num_triplets = len(found[0])
        else:
            self.num_pos_pairs, self.num_neg_pairs = len(found[0]), len(found[2])
        return Distinct.of(found, batch.size) if self.distinct and not torch.compiler.is_compiling() else found

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Indices:
        """PML's name for the selection: the same as a call. A subclass may have its own, as subclasses of PML's do."""
        found: Indices = self(embeddings, labels, ref_emb, ref_labels)
        return found

    def _batch(self, embeddings: Any, labels: Any, ref_emb: Any, ref_labels: Any) -> Batch:
        """Check the arguments of a call."""
        z = checks.embeddings("embeddings", embeddings)
        y = checks.labels("labels", labels, z)
        if ref_emb is None and ref_labels is not None:
            raise ValueError("ref_labels: got labels without ref_emb, wanted both or neither")
        if ref_emb is None or ref_emb is embeddings:
            return Batch(z, y, None, y, None, self.view, self.normalize_embeddings)
        checks.embeddings("ref_emb", ref_emb, like=z)
        if ref_labels is None:
            raise ValueError("ref_labels: got None beside ref_emb, wanted the labels of ref_emb")
        ref_y = checks.labels("ref_labels", ref_labels, ref_emb)
        return Batch(z, y, ref_emb, ref_y, None, self.view, self.normalize_embeddings)

    @property
    def view(self) -> str:
        """How the engines see a pair: what the oriented similarity u is."""
        return {"cosine": "dot", distances.OTHER: "dot"}.get(self.kind, self.kind)

    def raw(self, u: Tensor) -> Tensor:
        """What the distance itself says, from the oriented similarity, and back: it changes the sign or nothing."""
        return u if self.distance.is_inverted else -u

    def oriented(self, margin: float) -> float:
        """A threshold on the distance on the scale of u."""
        return margin if self.distance.is_inverted else -margin

    def tiles(self, batch: Batch) -> Iterator[Tile]:
        """Blocks of whole rows: oriented similarities, positives, negatives."""
        m = Matrix(**batch.matrix, **batch.how)
        m.slopes = False
        if self.kind != distances.OTHER:
            yield from m.tiles()
            return
        z, ref = (None if x is None else x.to(compute_dtype(x)) for x in (batch.embeddings, batch.ref))
        assert z is not None
        ref = z if ref is None else ref
        step = max(1, min(1024, TILE_ELEMENTS // len(ref)))
        for rows in torch.arange(len(z), device=z.device).split(len(z) if batch.backend == "dense" else step):
            same = m.row_labels[rows, None] == m.col_labels[None, :]
            diff = ~same
            m.clear_self(same, rows)
            yield Tile(rows, self.raw(self.distance(z[rows], ref)), same, diff, None, None)

    def small(self, batch: Batch) -> bool:
        """Is the whole matrix smaller than what blocks need around it? Then it is also faster, by fewer operations."""
        rows, cols = batch.size
        return self.kind != distances.OTHER and rows * cols * batch.embeddings.shape[1] <= SMALL

    def by_matrix(self, batch: Batch) -> Indices:
        """The textbook definition on the whole matrix."""
        return self.dense(next(self.tiles(batch)) if self.kind == distances.OTHER else Dense(batch))

    def by_rows(self, batch: Batch) -> Indices:
        """The textbook definition on one block of rows after the other: right where each row decides for itself."""
        if self.small(batch):
            return self.by_matrix(batch)
        found = []
        for tile in self.tiles(batch):
            part = self.dense(tile)
            anchors = (0,) if len(part) == 3 else (0, 2)
            found.append([tile.rows[index] if k in anchors else index for k, index in enumerate(part)])
        return tuple(torch.cat(index) for index in zip(*found, strict=True)) if found else self.nothing(batch)

    def listed(self, batch: Batch, i: Tensor, j: Tensor) -> Tensor:
        """What the distance says of listed pairs."""
        if self.kind != distances.OTHER:
            return self.raw(Dense(batch).u[i, j] if batch.backend == "dense" else batch.dots(i, j))
        out = batch.embeddings.new_empty(len(i), dtype=batch.dtype)
        for tile in self.tiles(batch):
            at = ((i >= tile.rows[0]) & (i <= tile.rows[-1])).nonzero()[:, 0]
            out[at] = self.raw(tile.u)[i[at] - tile.rows[0], j[at]]
        return out

    def set_stats(self, batch: Batch, found: Indices) -> None:
        """Statistics of one call; what they are hangs on the miner."""

    def nothing(self, batch: Batch) -> Indices:
        """The tuple of a batch in which there is nothing to find."""
        return tuple(batch.embeddings.new_empty(0, dtype=torch.int64) for _ in range(4))

    def dense(self, batch: Dense | Tile) -> Indices:
        """The textbook definition on the whole matrix, or on whole rows of it."""
        raise NotImplementedError

    def fused(self, batch: Batch) -> Indices:
        """The same by an engine."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        names = [
            n for n in inspect.signature(type(self).__init__).parameters if n not in ("self", "distance", "common")
        ]
        return ", ".join(f"{n}={getattr(self, n)!r}" for n in names)


class MultiSimilarityMiner(Miner):
    """Multi-Similarity mining, Wang et al. 2019, eq. 11-12: the pairs that the hardest of the other side does not beat.

    keep n if S_in > min_{P_i} S - ε, keep p if S_ip < max_{N_i} S + ε; an anchor without positives keeps no negative,
    one without negatives keeps no positive. With a distance D in place of S, S = -D.

    ``pydml.losses.MultiSimilarityLoss(epsilon=...)`` is the same without the list of pairs, and cheaper.

    Parameters
    ----------
    epsilon
        ε (0.1 in the paper).

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> indices_tuple = pydml.miners.MultiSimilarityMiner(epsilon=0.1)(embeddings, labels)
    >>> a1, p, a2, n = indices_tuple
    >>> bool((labels[a1] == labels[p]).all() and (labels[a2] != labels[n]).all())
    True
    >>> loss = pydml.losses.ContrastiveLoss()(embeddings, labels, indices_tuple)
    """

    distances = ("cosine", "euclidean", "squared")
    distinct = True
    settings = ("epsilon",)

    def __init__(self, epsilon: float = 0.1, **common: Any) -> None:
        super().__init__(**common)
        self.epsilon = checks.number("epsilon", epsilon)
        self.add_settings()

    def fused(self, batch: Batch) -> Indices:
        return tuple(ops.call(Mined(**batch.matrix, epsilon=float(self.epsilon), **batch.how), batch.backend))

    def dense(self, batch: Dense | Tile) -> Indices:
        hardest_positive = batch.u.masked_fill(~batch.same, torch.inf).amin(1, keepdim=True)
        hardest_negative = batch.u.masked_fill(~batch.diff, -torch.inf).amax(1, keepdim=True)
        positives = batch.same & (batch.u < hardest_negative + self.epsilon)
        negatives = batch.diff & (batch.u > hardest_positive - self.epsilon)
        return *positives.nonzero(as_tuple=True), *negatives.nonzero(as_tuple=True)


class BatchEasyHardMiner(Miner):
    """One positive and one negative an anchor by how hard they are, or all of them.

    With u = S, or u = -D for a distance (the default is D):

    - positive: easy argmax_{P_i} u, hard argmin_{P_i} u, semihard argmin {u_ip : u_ip > u_in};
    - negative: hard argmax_{N_i} u, easy argmin_{N_i} u, semihard argmax {u_in : u_in < u_ip};

    the first of equals. Anchors for which one of the two is missing are left out. With "all" on one side that side is
    every pair, and the other side is every anchor that has one. "semihard" is measured against the one item chosen on
    the other side, so it goes neither with "all" nor with "semihard" there.

    Parameters
    ----------
    pos_strategy, neg_strategy
        "easy", "hard", "semihard" or "all"; also by the names HARD, SEMIHARD, EASY, ALL of the class.
    allowed_pos_range, allowed_neg_range
        (least, most) of the distance (with similarities: of the similarity) of pairs that may be chosen; "all" ignores
        it, as in PML. With a range the selection goes by blocks of rows in PyTorch instead of by the engine.

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> miner = pydml.miners.BatchEasyHardMiner("easy", "hard")
    >>> [len(index) for index in miner(embeddings, labels)]
    [32, 32, 32, 32]
    """

    distinct = True
    HARD: ClassVar[str] = "hard"
    SEMIHARD: ClassVar[str] = "semihard"
    EASY: ClassVar[str] = "easy"
    ALL: ClassVar[str] = "all"
    all_batch_mining_strategies: ClassVar[list[str]] = [HARD, SEMIHARD, EASY, ALL]
    statistics = (
        "easiest_triplet",
        "hardest_triplet",
        "easiest_pos_pair",
        "hardest_pos_pair",
        "easiest_neg_pair",
        "hardest_neg_pair",
    )

    def __init__(
        self,
        pos_strategy: str = EASY,
        neg_strategy: str = SEMIHARD,
        allowed_pos_range: Sequence[float] | None = None,
        allowed_neg_range: Sequence[float] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.allowed_pos_range = _range("allowed_pos_range", allowed_pos_range)
        self.allowed_neg_range = _range("allowed_neg_range", allowed_neg_range)
        self.pos_strategy = checks.choice("pos_strategy", pos_strategy, STRATEGIES)
        self.neg_strategy = checks.choice("neg_strategy", neg_strategy, STRATEGIES)
        chosen = {pos_strategy, neg_strategy}
        if chosen == {"semihard"} or chosen == {"semihard", "all"}:
            raise ValueError(
                f"pos_strategy, neg_strategy: got {pos_strategy!r} and {neg_strategy!r}, "
                "wanted 'easy' or 'hard' on the other side of 'semihard'"
            )

    def fused(self, batch: Batch) -> Indices:
        if self.allowed_pos_range is not None or self.allowed_neg_range is not None:
            return self.by_rows(batch)
        every = self.pos_strategy == "all", self.neg_strategy == "all"
        everything = Mined(**batch.matrix, epsilon=None, **batch.how)
        if every == (True, True):
            return tuple(ops.call(everything, batch.backend))
        positive, negative = "easy" if every[0] else self.pos_strategy, "hard" if every[1] else self.neg_strategy
        p, n = ops.call(Extremes(**batch.matrix, positive=positive, negative=negative, **batch.how), batch.backend)
        if every[0]:
            return *_positive_pairs(batch), *_found(n)
        if every[1]:
            return *_found(p), *ops.call(everything, batch.backend)[2:]
        return _both(p, n)

    def dense(self, batch: Dense | Tile) -> Indices:
        every = self.pos_strategy == "all", self.neg_strategy == "all"
        u, same, diff = batch.u, batch.same, batch.diff
        if not every[0]:
            same = same & self._allowed(u, self.allowed_pos_range)
        if not every[1]:
            diff = diff & self._allowed(u, self.allowed_neg_range)
        if self.pos_strategy == "semihard":
            n = _farthest(-u, diff) if self.neg_strategy == "hard" else _farthest(u, diff)
            same = same & (u > u.gather(1, n.clamp_min(0)[:, None])) & (n >= 0)[:, None]
            p = _farthest(u, same)
        else:
            p = _farthest(-u, same) if self.pos_strategy == "easy" else _farthest(u, same)
            if self.neg_strategy == "semihard":
                diff = diff & (u < u.gather(1, p.clamp_min(0)[:, None])) & (p >= 0)[:, None]
            n = _farthest(u, diff) if self.neg_strategy == "easy" else _farthest(-u, diff)
        if every == (False, False):
            return _both(p, n)
        positives = same.nonzero(as_tuple=True) if every[0] else _found(p)
        return *positives, *(diff.nonzero(as_tuple=True) if every[1] else _found(n))

    def _allowed(self, u: Tensor, bounds: Sequence[float] | None) -> Tensor:
        distance = self.raw(u)
        return (
            torch.ones_like(u, dtype=torch.bool)
            if bounds is None
            else ((distance >= bounds[0]) & (distance <= bounds[1]))
        )

    def set_stats(self, batch: Batch, found: Indices) -> None:
        a1, p, a2, n = (found[0], found[1], found[0], found[2]) if len(found) == 3 else found
        positive, negative = self.listed(batch, a1, p), self.listed(batch, a2, n)
        # «easiest» is nearest for positives and farthest for negatives
        near, far = (torch.max, torch.min) if self.distance.is_inverted else (torch.min, torch.max)
        if len(p) and len(n) and "all" not in (self.pos_strategy, self.neg_strategy):
            self.easiest_triplet = float(near(positive - negative))
            self.hardest_triplet = float(far(positive - negative))
        if len(p):
            self.easiest_pos_pair, self.hardest_pos_pair = float(near(positive)), float(far(positive))
        if len(n):
            self.easiest_neg_pair, self.hardest_neg_pair = float(far(negative)), float(near(negative))


class BatchHardMiner(BatchEasyHardMiner):
    """Hardest positive and hardest negative of every anchor that has both, Hermans et al. 2017: triplets (a, p, n).

    p = argmax_{P_a} D, n = argmin_{N_a} D, the first of equals.

    ``pydml.losses.TripletMarginLoss(triplets="hard")`` is the same without the list of triplets.

    Examples
    --------
    >>> embeddings, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
    >>> pydml.miners.BatchHardMiner()(embeddings, labels)
    (tensor([0, 1, 2, 3]), tensor([1, 0, 3, 2]), tensor([2, 2, 0, 0]))
    """

    def __init__(self, **common: Any) -> None:
        super().__init__("hard", "hard", **common)

    def nothing(self, batch: Batch) -> Indices:
        return super().nothing(batch)[:3]

    def fused(self, batch: Batch) -> Indices:
        a, p, _, n = super().fused(batch)
        return a, p, n

    def dense(self, batch: Dense | Tile) -> Indices:
        a, p, _, n = super().dense(batch)
        return a, p, n


class DistanceWeightedMiner(Miner):
    """Distance-weighted sampling, Wu et al. 2017, section 4: negatives spread evenly over their distances.

    P(n | a) ∝ 1/q(D_an), q(D) = D^{d-2}·(1 - D²/4)^{(d-3)/2}, D clamped below at ``cutoff``, 0 from
    ``nonzero_loss_cutoff`` on

    As in PML, an anchor that has a positive and a negative gives as many triplets as its class has items among the
    columns, each with a positive drawn uniformly (never the anchor itself) and a negative drawn with these weights.
    Anchors without any negative nearer than ``nonzero_loss_cutoff`` are left out. Weights are compared as logarithms,
    so none underflows (PML's may, and it then leaves out the anchor).

    Draws come from torch's default generator: ``torch.manual_seed`` repeats them on one backend.

    Parameters
    ----------
    cutoff
        Distances below count as this, against the variance of near negatives.
    nonzero_loss_cutoff
        Negatives at this distance or beyond are never drawn; up to ``cutoff`` that is all of them.

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> a, p, n = pydml.miners.DistanceWeightedMiner()(embeddings, labels)
    >>> bool((labels[a] == labels[p]).all() and (labels[a] != labels[n]).all() and (a != p).all())
    True
    """

    distances = ("euclidean",)
    any_other = False
    settings = ("cutoff", "nonzero_loss_cutoff")

    def __init__(self, cutoff: float = 0.5, nonzero_loss_cutoff: float = 1.4, **common: Any) -> None:
        super().__init__(**common)
        if not self.normalize_embeddings:
            raise ValueError("normalize_embeddings: got False, wanted True: the weights are those of the unit sphere")
        self.cutoff = checks.number("cutoff", cutoff, least=0)
        self.nonzero_loss_cutoff = checks.number("nonzero_loss_cutoff", nonzero_loss_cutoff)
        self.add_settings()

    def nothing(self, batch: Batch) -> Indices:
        return super().nothing(batch)[:3]

    def fused(self, batch: Batch) -> Indices:
        if self.nonzero_loss_cutoff <= self.cutoff:
            return self.nothing(batch)
        order, first, number = _classes(batch)
        positives, negatives = batch.counts
        rows = torch.arange(batch.size[0], device=order.device)
        a = rows.repeat_interleave(torch.where((positives > 0) & (negatives > 0), number, 0))
        place = (torch.rand(len(a), dtype=torch.float64, device=a.device) * positives[a]).long()
        if batch.ref is None:  # step over the anchor's own place in its class
            own = torch.empty_like(order).scatter_(0, order, rows) - first
            place += place >= own[a]
        p = order[first[a] + place]
        seed = torch.randint(2**63 - 1, (1,), device=a.device)
        cutoffs: dict[str, Any] = {"cutoff": float(self.cutoff), "nonzero_loss_cutoff": float(self.nonzero_loss_cutoff)}
        n = ops.call(Sample(**batch.matrix, anchors=a, seed=seed, **cutoffs), batch.backend)
        kept = n >= 0
        return a[kept], p[kept], n[kept]

    def dense(self, batch: Dense | Tile) -> Indices:
        assert isinstance(batch, Dense)
        dim, d = batch.x.shape[1], batch.D.double().clamp_min(self.cutoff)
        log_q = (dim - 2) * d.log() + (dim - 3) / 2 * (1 - d * d / 4).log()
        usable = batch.diff & (d < self.nonzero_loss_cutoff) & log_q.isfinite()
        weights = (-log_q).masked_fill(~usable, -torch.inf).softmax(1)  # rows without any are NaN, and not drawn from
        drawn = []
        for a in (usable.any(1) & batch.same.any(1)).nonzero()[:, 0].tolist():
            k = int(batch.same[a].sum()) + int(batch.batch.ref is None)
            p = batch.same[a].double().multinomial(k, replacement=True)
            drawn.append(torch.stack((torch.full_like(p, a), p, weights[a].multinomial(k, replacement=True))))
        return tuple(torch.cat(drawn, 1)) if drawn else self.nothing(batch.batch)


def _range(name: str, bounds: Any) -> tuple[float, float] | None:
    if bounds is None:
        return None
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"{name}: got {bounds!r}, wanted a pair (least, most) or None")
    return bounds[0], bounds[1]


def _farthest(u: Tensor, member: Tensor) -> Tensor:
    """Column of the smallest u among members, the first of equals; -1 where there is none."""
    return torch.where(member.any(1), u.masked_fill(~member, torch.inf).argmin(1), -1)


def _found(index: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that have a column, and the column."""
    rows = (index >= 0).nonzero()[:, 0]
    return rows, index[rows]


def _both(p: Tensor, n: Tensor) -> Indices:
    """(a, p, a, n) of the rows that have both."""
    a = ((p >= 0) & (n >= 0)).nonzero()[:, 0]
    return a, p[a], a, n[a]


def _classes(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Columns in the order of their labels, and for each row the first of its class there and how many they are."""
    labels, among = batch.known_labels(), batch.ref_labels
    assert among is not None
    among, order = among.sort(stable=True)
    first = torch.searchsorted(among, labels)
    return order, first, torch.searchsorted(among, labels, right=True) - first


def _positive_pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """All positive pairs (a, p) in order, without a B×B compare."""
    order, first, number = _classes(batch)
    a = torch.arange(batch.size[0], device=order.device).repeat_interleave(number)
    before = (number.cumsum(0) - number)[a]
    p = order[first[a] + torch.arange(len(a), device=a.device) - before]
    kept = a != p if batch.ref is None else a >= 0
    return a[kept], p[kept]


#: PML's name of the base.
BaseMiner = Miner

from pydml.block_miners import (  # noqa: E402  (they are subclasses of what stands above)
    AngularMiner,
    EmbeddingsAlreadyPackagedAsTriplets,
    HDCMiner,
    PairMarginMiner,
    TripletMarginMiner,
    UniformHistogramMiner,
)
