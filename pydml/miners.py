"""Miners under PML's names: which pairs or triplets of a batch to learn from, for any loss, ours or PML's.

The select engine finds them tile by tile, so nothing of size B×B is stored but what the tuple itself holds.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pydml import checks, ops
from pydml.backends import resolve
from pydml.losses.base import _distance
from pydml.losses.batch import Batch, Dense
from pydml.pml import joins
from pydml.tuples import Distinct

__all__ = ["BatchEasyHardMiner", "BatchHardMiner", "DistanceWeightedMiner", "Miner", "MultiSimilarityMiner"]

Indices = tuple[Tensor, ...]
STRATEGIES = ("easy", "hard", "semihard", "all")


@joins("miners.base_miner", "BaseMiner")
class Miner(nn.Module):
    """Base of all miners.

    Parameters
    ----------
    distance
        A name or one of PML's distance objects, as for the losses; None is the miner's own.
    normalize_embeddings
        Are rows normalised first?

    Attributes
    ----------
    num_triplets, num_pos_pairs, num_neg_pairs
        How many the last call has found.
    """

    #: Distances that the miner takes, the default first.
    distances: ClassVar[tuple[str, ...]] = ("euclidean", "cosine", "squared")
    #: Does it never give a pair twice? Losses that count a pair once then need not look.
    distinct: ClassVar[bool] = False

    def __init__(self, *, distance: Any = None, normalize_embeddings: bool = True) -> None:
        nn.Module.__init__(self)  # PML's own __init__ would build a distance module that we do not use
        self.collect_stats = False
        normalize = checks.flag("normalize_embeddings", normalize_embeddings)
        self.distance, self.normalize_embeddings = _distance(
            self.distances[0] if distance is None else distance, self.distances, normalize
        )
        self.num_triplets = self.num_pos_pairs = self.num_neg_pairs = 0

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
        batch = self._batch(embeddings, labels, ref_emb, ref_labels)
        batch.backend = resolve(backend, batch.embeddings.device)
        with torch.no_grad(), torch.autocast(batch.embeddings.device.type, enabled=False):
            if 0 in batch.size:
                found = self.nothing(batch)
            else:
                found = self.dense(Dense(batch)) if batch.backend == "dense" else self.fused(batch)
        if len(found) == 3:
            self.num_triplets = len(found[0])
        else:
            self.num_pos_pairs, self.num_neg_pairs = len(found[0]), len(found[2])
        return Distinct.of(found, batch.size) if self.distinct and not torch.compiler.is_compiling() else found

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
        return "dot" if self.distance == "cosine" else self.distance

    def nothing(self, batch: Batch) -> Indices:
        """The tuple of a batch in which there is nothing to find."""
        return tuple(batch.embeddings.new_empty(0, dtype=torch.int64) for _ in range(4))

    def dense(self, batch: Dense) -> Indices:
        """The textbook definition on the whole matrix."""
        raise NotImplementedError

    def fused(self, batch: Batch) -> Indices:
        """The same by an engine."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        names = [n for n in inspect.signature(type(self).__init__).parameters if n != "self"]
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

    def __init__(self, epsilon: float = 0.1, *, distance: Any = None, normalize_embeddings: bool = True) -> None:
        super().__init__(distance=distance, normalize_embeddings=normalize_embeddings)
        self.epsilon = checks.number("epsilon", epsilon)

    def fused(self, batch: Batch) -> Indices:
        return tuple(ops.mined(*batch.matrix(), float(self.epsilon), batch.view, batch.normalize, batch.backend))

    def dense(self, batch: Dense) -> Indices:
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
        "easy", "hard", "semihard" or "all".

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> miner = pydml.miners.BatchEasyHardMiner("easy", "hard")
    >>> [len(index) for index in miner(embeddings, labels)]
    [32, 32, 32, 32]
    """

    distinct = True

    def __init__(
        self,
        pos_strategy: str = "easy",
        neg_strategy: str = "semihard",
        *,
        distance: Any = None,
        normalize_embeddings: bool = True,
    ) -> None:
        super().__init__(distance=distance, normalize_embeddings=normalize_embeddings)
        self.pos_strategy = checks.choice("pos_strategy", pos_strategy, STRATEGIES)
        self.neg_strategy = checks.choice("neg_strategy", neg_strategy, STRATEGIES)
        chosen = {pos_strategy, neg_strategy}
        if chosen == {"semihard"} or chosen == {"semihard", "all"}:
            raise ValueError(
                f"pos_strategy, neg_strategy: got {pos_strategy!r} and {neg_strategy!r}, "
                "wanted 'easy' or 'hard' on the other side of 'semihard'"
            )

    def fused(self, batch: Batch) -> Indices:
        every = self.pos_strategy == "all", self.neg_strategy == "all"
        tail = batch.view, batch.normalize, batch.backend
        if every == (True, True):
            return tuple(ops.mined(*batch.matrix(), None, *tail))
        p, n = ops.extremes(
            *batch.matrix(), "easy" if every[0] else self.pos_strategy, "hard" if every[1] else self.neg_strategy, *tail
        )
        if every[0]:
            return *_positive_pairs(batch), *_found(n)
        if every[1]:
            return *_found(p), *ops.mined(*batch.matrix(), None, *tail)[2:]
        return _both(p, n)

    def dense(self, batch: Dense) -> Indices:
        every = self.pos_strategy == "all", self.neg_strategy == "all"
        u, same, diff = batch.u, batch.same, batch.diff
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

    def __init__(self, *, distance: Any = None, normalize_embeddings: bool = True) -> None:
        super().__init__("hard", "hard", distance=distance, normalize_embeddings=normalize_embeddings)

    def nothing(self, batch: Batch) -> Indices:
        return super().nothing(batch)[:3]

    def fused(self, batch: Batch) -> Indices:
        a, p, _, n = super().fused(batch)
        return a, p, n

    def dense(self, batch: Dense) -> Indices:
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
        Negatives at this distance or beyond are never drawn.

    Examples
    --------
    >>> embeddings, labels = torch.randn(32, 16), torch.arange(32) % 8
    >>> a, p, n = pydml.miners.DistanceWeightedMiner()(embeddings, labels)
    >>> bool((labels[a] == labels[p]).all() and (labels[a] != labels[n]).all() and (a != p).all())
    True
    """

    distances = ("euclidean",)

    def __init__(
        self,
        cutoff: float = 0.5,
        nonzero_loss_cutoff: float = 1.4,
        *,
        distance: Any = None,
        normalize_embeddings: bool = True,
    ) -> None:
        super().__init__(distance=distance, normalize_embeddings=normalize_embeddings)
        if not self.normalize_embeddings:
            raise ValueError("normalize_embeddings: got False, wanted True: the weights are those of the unit sphere")
        self.cutoff = checks.number("cutoff", cutoff, least=0)
        self.nonzero_loss_cutoff = checks.number("nonzero_loss_cutoff", nonzero_loss_cutoff, above=cutoff)

    def nothing(self, batch: Batch) -> Indices:
        return super().nothing(batch)[:3]

    def fused(self, batch: Batch) -> Indices:
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
        n = ops.sample(
            *batch.matrix(), a, seed, float(self.cutoff), float(self.nonzero_loss_cutoff), batch.backend
        )  # fmt: skip
        kept = n >= 0
        return a[kept], p[kept], n[kept]

    def dense(self, batch: Dense) -> Indices:
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
