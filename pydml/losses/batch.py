"""One call's checked arguments, and what losses ask of them: engine statistics, counts, weights, the dense matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pydml import ops
from pydml.backends import able, named, resolve
from pydml.declared import Dots, Extremes, Histogram, Listed, ListedTriplets, Pair, TopK, Triplet
from pydml.products import product
from pydml.tiled import select as tiled_select
from pydml.tiled.sides import TINY
from pydml.tuples import distinct, is_distinct

Pairs = tuple[Tensor, Tensor, Tensor, Tensor]
#: Lists of so many pairs together are looked up in one call.
JOINED = 1 << 15


def count_in(labels: Tensor, among: Tensor) -> Tensor:
    """How often each label occurs among others: sorted, so of static shape and without a B×B compare."""
    order = among.sort().values
    return torch.searchsorted(order, labels, right=True) - torch.searchsorted(order, labels)


def joined(a1: Tensor, p: Tensor, a2: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs as triplets: each positive pair with each negative pair of its anchor."""
    order = a2.sort(stable=True)
    first = torch.searchsorted(order.values, a1)
    number = torch.searchsorted(order.values, a1, right=True) - first
    of = torch.repeat_interleave(torch.arange(len(a1), device=a1.device), number)
    place = torch.arange(len(of), device=a1.device) - torch.repeat_interleave(number.cumsum(0) - number, number)
    return a1[of], p[of], n[order.indices[first[of] + place]]


@dataclass
class Batch:
    """Embeddings [B, d], labels [B], the reference set if there is one, the miner's tuple if there is one."""

    embeddings: Tensor
    labels: Tensor | None
    ref: Tensor | None
    ref_labels: Tensor | None
    indices: tuple[Tensor, ...] | None
    view: str
    normalize: bool
    backend: str = "auto"
    #: Was the backend asked for by name? One that was not may give way to another.
    named: bool = True

    def choose(self, requested: str) -> None:
        """Take the backend that a call asks for."""
        self.backend, self.named = resolve(requested, self.embeddings.device), named(requested)

    def prepare(self, policy: str, epsilon: float | None = None, pool_size: int = 1) -> None:
        """Take another backend where this one has no kernels for the pairs of a policy."""
        options = {"mined": epsilon is not None, "pool_size": pool_size, "view": self.view}
        self.backend = able(self.backend, self.named, policy, **options)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.embeddings.shape[0], self.embeddings.shape[0] if self.ref is None else self.ref.shape[0]

    @property
    def has_selves(self) -> bool:
        """Is every row one of the columns, with which it makes no pair?"""
        return self.ref is None

    def self_columns(self) -> Tensor:
        """Which column each row is, where it is one."""
        return torch.arange(self.size[0], device=self.embeddings.device)

    @property
    def dtype(self) -> torch.dtype:
        return ops.compute_dtype(self.embeddings)

    def known_labels(self) -> Tensor:
        """Labels, for losses that cannot do without."""
        if self.labels is None or self.ref_labels is None:
            raise ValueError("labels: got None, wanted a tensor of integers: this loss needs them beside indices_tuple")
        return self.labels

    def nan(self, value: Tensor) -> Tensor:
        """NaN in, NaN out: no comparison may hide a NaN or an infinity of the embeddings."""
        finite = torch.isfinite(self.embeddings).all()
        if self.ref is not None:
            finite = finite & torch.isfinite(self.ref).all()
        return torch.where(finite, value, torch.nan)

    def zero(self) -> Tensor:
        """The loss of a batch with nothing to learn from: 0 that still has a graph."""
        return (self.embeddings.to(self.dtype) * 0).sum()

    def zeros(self) -> Tensor:
        """The same for each row [B]."""
        return self.embeddings.to(self.dtype).flatten(1).sum(1) * 0

    def everything(self) -> Tensor:
        """All embeddings, for whoever has to see them themselves."""
        return self.embeddings

    @property
    def counts(self) -> tuple[Tensor, Tensor]:
        """Number of positives and of negatives of each row."""
        if self.pairs is not None:
            a1, _, a2, _ = self.pairs
            return torch.bincount(a1, minlength=self.size[0]), torch.bincount(a2, minlength=self.size[0])
        positives = self.positives()
        return positives, self.size[1] - int(self.has_selves) - positives

    def positives(self) -> Tensor:
        """Number of positives of each row by label, whatever the tuple says."""
        labels = self.known_labels()
        assert self.ref_labels is not None
        return count_in(labels, self.ref_labels) - int(self.has_selves)

    def positive_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, place among the positives of its row, and column of every positive pair, in the order of the rows."""
        labels, among = self.known_labels(), self.ref_labels
        assert among is not None
        order = among.argsort(stable=True)
        first, end = (torch.searchsorted(among[order], labels, right=right)[:, None] for right in (False, True))
        most = int((end - first).amax()) if len(labels) else 0
        at = first + torch.arange(most, device=labels.device)
        column = order[at.clamp_max(len(order) - 1)]
        real = at < end
        if self.has_selves:
            real &= column != self.self_columns()[:, None]
        i, place = real.nonzero(as_tuple=True)
        return i, place, column[i, place]

    def __post_init__(self) -> None:
        #: The miner's tuple as pairs (a1, p, a2, n).
        self.pairs: Pairs | None = None
        if self.indices is not None:
            a, p, *rest = self.indices
            self.pairs = (a, p, a, rest[0]) if len(rest) == 1 else (a, p, rest[0], rest[1])

    def draw_triplets(self, number: int) -> bool:
        """Take that many random triplets an anchor for the miner's tuple, if there is none; were they drawn?

        The draws are PML's for the same seed. As there, a batch in a memory that holds it keeps all its triplets.
        """
        if self.indices is not None or (self.has_selves and self.ref is not None):
            return False
        labels, among = self.known_labels(), self.ref_labels
        assert among is not None
        found = []
        for label in labels.unique():
            rows, positives = (torch.where(y == label)[0] for y in (labels, among))
            negatives = torch.where(among != label)[0]
            choices = len(positives) - int(self.has_selves)
            if choices < 1 or not len(negatives):
                continue
            a = torch.arange(len(rows)).repeat_interleave(number)
            p = torch.randint(0, choices, a.shape)
            n = torch.randint(0, len(negatives), a.shape)
            p = p + ((p >= a) if self.has_selves else 0)  # the positives of an anchor are its class without itself
            drawn = (of[at.to(of.device)] for of, at in ((rows, a), (positives, p), (negatives, n)))
            found.append(torch.stack(tuple(drawn)))
        a, p, n = torch.cat([*found, labels.new_empty(3, 0)], 1)
        self.indices, self.pairs = (a, p, n), (a, p, a, n)
        return True

    def unique_pairs(self) -> None:
        """Count a pair that occurs twice in the tuple once."""
        if self.pairs is not None and self.indices is not None and not is_distinct(self.indices, self.size):
            a1, p, a2, n = self.pairs
            self.pairs = *distinct(a1, p, self.size), *distinct(a2, n, self.size)

    def pairs_of_triplets(self) -> Pairs | None:
        """Of the tuple's triplets, the pairs that they are made of: those whose anchor occurs on both sides."""
        if self.indices is None or self.pairs is None or len(self.indices) == 3:
            return self.pairs
        a1, p, a2, n = self.pairs
        nowhere = torch.zeros(self.size[0], dtype=torch.bool, device=a1.device)
        one, other = nowhere.index_fill(0, a2, True)[a1], nowhere.index_fill(0, a1, True)[a2]
        return a1[one], p[one], a2[other], n[other]

    @property
    def triplets(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The miner's tuple as triplets: pairs are joined on their anchor."""
        if self.indices is None or len(self.indices) == 3:
            return self.indices
        return joined(*self.indices)

    def weights(self, anchors_only: bool = False) -> Tensor | None:
        """Weight of each row: its occurrences in the tuple over the largest number of occurrences (PML's rule)."""
        if self.indices is None or not any(len(index) for index in self.indices):
            return None
        listed = self.indices
        if anchors_only or self.ref is not None:  # positives and negatives are then no rows of the batch
            listed = self.indices[:1] if len(self.indices) == 3 else self.indices[::2]
        occurrences = torch.bincount(torch.cat(listed), minlength=self.size[0]).to(self.dtype)
        return occurrences / occurrences.max()

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
        """Row statistics [B, K] of a policy: by the pair engine, or of the listed pairs where there is a tuple."""
        if listed and self.pairs is not None:
            assert col_field is None
            return self.listed_stats(policy, params, row_field)[0]
        self.prepare(policy, epsilon)
        labels = self.known_labels()
        return pair_stats(
            self.embeddings, self.ref, labels, self.ref_labels if self.ref is not None else None, policy, params,
            view=self.view, normalize=self.normalize, epsilon=epsilon, row_field=row_field, col_field=col_field,
            selves=self.selves, backend=self.backend,
        )  # fmt: skip

    def listed_stats(
        self, policy: str, params: list[float], row_field: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row statistics of the tuple's pairs, and u of its positive and negative pairs, which they are made of."""
        assert self.pairs is not None
        self.prepare(policy)
        a1, p, a2, n = self.pairs
        field = None if row_field is None else row_field.detach()
        positive, negative = self.dots_of((a1, p), (a2, n))
        call = Listed(
            pos=positive, neg=negative, a1=a1, a2=a2, row_field=field,
            policy=policy, params=[float(x) for x in params], rows=self.size[0],
        )  # fmt: skip
        stats: Tensor = ops.call(call, self.backend)
        return stats, positive, negative

    def dots(self, i: Tensor, j: Tensor) -> Tensor:
        """u of listed pairs."""
        out: Tensor = ops.call(Dots(self.embeddings, self.ref, i=i, j=j, **self.how), self.backend)
        return out

    def dots_of(self, *lists: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        """u of several lists of pairs. Short ones are joined: a call costs more than they do."""
        numbers = [len(i) for i, _ in lists]
        if torch.compiler.is_compiling() or sum(numbers) > JOINED:
            return [self.dots(i, j) for i, j in lists]
        rows, cols = zip(*lists, strict=True)
        joined: Sequence[Tensor] = self.dots(torch.cat(rows), torch.cat(cols)).split(numbers)
        return joined

    @property
    def matrix(self) -> dict[str, Any]:
        """Arguments of the ops that look at the whole matrix."""
        return {
            "rows": self.embeddings,
            "cols": self.ref,
            "row_labels": self.known_labels(),
            "col_labels": None if self.ref is None else self.ref_labels,
        }

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of the ops that say how a pair is looked at."""
        return {"view": self.view, "normalize": self.normalize}

    @property
    def selves(self) -> Tensor | None:
        """The columns that the rows are, where they are some of the columns."""
        return self.self_columns() if self.has_selves and self.ref is not None else None

    def histogram(self, nodes: int, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Soft counts [B, nodes] of positives and of negatives."""
        call = Histogram(**self.matrix, nodes=nodes, low=low, high=high, **self.how, selves=self.selves)
        positives, negatives, _ = ops.call(call, self.backend)
        return positives, negatives

    def histogram_totals(
        self, nodes: int, low: float, high: float, labels: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Soft counts [nodes] under other labels: of the positives of rows that are counted, and of all negatives."""
        call = Histogram(self.embeddings, None, labels, None, nodes=nodes, low=low, high=high, **self.how)
        positives, negatives, _ = ops.call(call, self.backend)
        return torch.where(counted[:, None], positives, 0).sum(0), negatives.sum(0)

    def triplet_sums(self, mode: str, margin: float, swap: bool, smooth: bool) -> tuple[Tensor, Tensor]:
        """Of each anchor [B] the sum of its triplets' losses, and how many of them are above 0."""
        how: dict[str, Any] = {"mode": mode, "margin": float(margin), "swap": swap, "smooth": smooth}
        total, above = ops.call(Triplet(**self.matrix, **how, **self.how, selves=self.selves), self.backend)
        return total, above

    def listed_triplets(self, a: Tensor, p: Tensor, n: Tensor, margin: float, smooth: bool) -> tuple[Tensor, Tensor]:
        """The same of the triplets (a, p, n)."""
        call = ListedTriplets(
            self.embeddings, self.ref, a=a, p=p, n=n, margin=float(margin), smooth=smooth, **self.how
        )  # fmt: skip
        total, above, _ = ops.call(call, self.backend)
        return total, above

    def extremes(self, positive: str, negative: str) -> tuple[Tensor, Tensor]:
        """Column [B] of the easy, hard or semi-hard positive and negative of each row; -1 where there is none."""
        call = Extremes(**self.matrix, positive=positive, negative=negative, **self.how, selves=self.selves)
        p, n = ops.call(call, self.backend)
        return p, n

    def extremes_up_to(self, limit: float, semihard: bool) -> tuple[Tensor, Tensor]:
        """The most similar positive with u ≤ limit, and the most similar negative, ``semihard``: up to that positive.

        In blocks of rows on every backend: no engine has such a selection.
        """
        with torch.no_grad():
            return tiled_select.extremes_up_to(
                **self.matrix, limit=limit, semihard=semihard, **self.how, selves=self.selves
            )

    def topk(self, policy: str, params: list[float], k: int, side: str) -> tuple[Tensor, Tensor]:
        """The k pairs (i, j) of largest loss on one side or on «all»; -1 beyond the last."""
        self.prepare(policy)
        loss: dict[str, Any] = {"policy": policy, "params": [float(p) for p in params]}
        i, j = ops.call(TopK(**self.matrix, **loss, k=k, side=side, **self.how, selves=self.selves), self.backend)
        return i, j

    def stats_between(self, i: Tensor, j: Tensor, policy: str, params: list[float], col_field: Tensor) -> Tensor:
        """Row statistics of rows i [n] against rows j [n] as columns; the positive of a row is the column across."""
        self.prepare(policy)
        target = torch.arange(len(i), device=i.device)
        return pair_stats(
            self.embeddings[i], self.embeddings[j], target, target, policy, params,
            view=self.view, normalize=self.normalize, col_field=col_field, backend=self.backend,
        )  # fmt: skip

    def proxy_stats(self, w: Tensor, classes: Tensor, policy: str, params: list[float], **pooling: Any) -> Tensor:
        """Row statistics [B, K] with proxies as columns."""
        self.prepare(policy, pool_size=pooling.get("pool_size", 1))
        return pair_stats(
            self.embeddings, w, self.known_labels(), classes, policy, params,
            view=self.view, normalize=self.normalize, backend=self.backend, **pooling,
        )  # fmt: skip

    def anchor_stats(
        self, w: Tensor, classes: Tensor, policy: str, params: list[float], col_field: Tensor | None
    ) -> Tensor:
        """Statistics [C, K] of proxies as rows, with the batch as columns."""
        self.prepare(policy)
        labels = self.known_labels()
        return pair_stats(
            w, self.embeddings, classes, labels, policy, params,
            view=self.view, normalize=self.normalize, col_field=col_field, backend=self.backend,
        )  # fmt: skip

    def proxy_dots(self, w: Tensor) -> Tensor:
        """Cosine [B] of each row and the proxy of its class."""
        labels = self.known_labels()
        own = torch.arange(len(labels), device=labels.device)
        out: Tensor = ops.call(Dots(w, self.embeddings, i=labels, j=own, view="dot", normalize=True), self.backend)
        return out

    def gram(self) -> Tensor:
        """XᵀX [d, d] of the normalised rows."""
        x = torch.nn.functional.normalize(self.embeddings.to(self.dtype))
        return product(x.T, x)

    def over_classes(self, value: Tensor) -> Tensor:
        """A sum over the classes of this process as one over all classes."""
        return value


def lse_of_all(term: Tensor) -> Tensor:
    """log Σ e^{term} of all terms, whose shares add up to 1.

    torch.logsumexp's are e^{term - result}, of a result that is rounded to the digits of the largest term.
    """
    top = term.detach().amax()
    return top + torch.exp(term - top).sum().log()


def pair_stats(
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    policy: str,
    params: list[float],
    *,
    view: str = "dot",
    normalize: bool = True,
    epsilon: float | None = None,
    row_field: Tensor | None = None,
    col_field: Tensor | None = None,
    pool_size: int = 1,
    sharpness: float = 1.0,
    selves: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Row statistics [R, K] by the pair engine."""
    call = Pair(
        rows=rows, cols=cols, row_labels=row_labels, col_labels=col_labels, row_field=row_field, col_field=col_field,
        policy=policy, params=[float(p) for p in params], view=view, normalize=normalize,
        epsilon=None if epsilon is None else float(epsilon), pool_size=pool_size, sharpness=float(sharpness),
        selves=selves,
    )  # fmt: skip
    stats: Tensor = ops.call(call, backend)[0]
    return stats


class Dense:
    """The whole matrix of one batch: what the textbook formulas are written with.

    ``pos`` and ``neg`` [R, N] say how often a pair counts: 0 or 1, or its occurrences in the miner's tuple.
    ``distance`` is one that the engines do not have; ``u`` is then what it gives.
    """

    def __init__(self, batch: Batch, distance: Any = None) -> None:
        self.batch, self.distance = batch, distance
        self.z = batch.embeddings.to(batch.dtype)
        self.ref = self.z if batch.ref is None else batch.ref.to(batch.dtype)
        if batch.normalize:
            self.x = torch.nn.functional.normalize(self.z)
            self.y = self.x if batch.ref is None else torch.nn.functional.normalize(self.ref)
        else:
            self.x, self.y = self.z, self.ref

    @cached_property
    def S(self) -> Tensor:
        """Similarities; of bit-identical unit rows exactly 1."""
        s = product(self.x, self.y.T)
        if self.batch.normalize:
            unit = self.z.detach().norm(dim=1) > TINY  # others are 0, or too short to be normalised
            s = torch.where((self.D == 0) & unit[:, None], torch.ones_like(s), s)
        return s

    @cached_property
    def D(self) -> Tensor:
        """Euclidean distances from the rows themselves; the gradient at 0 is 0."""
        return torch.cdist(self.x, self.y, compute_mode="donot_use_mm_for_euclid_dist")

    @cached_property
    def u(self) -> Tensor:
        """Oriented similarities of the loss' distance."""
        if self.distance is not None:
            return self.against(self.ref)
        return {"dot": lambda: self.S, "cosine": lambda: self.S, "euclidean": lambda: -self.D,
                "squared": lambda: -self.D.square()}[self.batch.view]()  # fmt: skip

    def against(self, w: Tensor) -> Tensor:
        """Oriented similarities of the rows and others, proxies say."""
        if self.distance is not None:
            mat: Tensor = self.distance(self.z, w)
            return mat if self.distance.is_inverted else -mat
        w = torch.nn.functional.normalize(w) if self.batch.normalize else w
        if self.batch.view in ("dot", "cosine"):
            return product(self.x, w.T)
        d = torch.cdist(self.x, w, compute_mode="donot_use_mm_for_euclid_dist")
        return -d if self.batch.view == "euclidean" else -d.square()

    @property
    def pairs(self) -> Pairs:
        """The miner's pairs, or all."""
        if self.batch.pairs is not None:
            return self.batch.pairs
        a1, p, a2, n = *self.same.nonzero(as_tuple=True), *self.diff.nonzero(as_tuple=True)
        return a1, p, a2, n

    @property
    def triplets(self) -> tuple[Tensor, Tensor, Tensor]:
        """The miner's triplets, or all."""
        return self.batch.triplets or joined(*self.pairs)

    @cached_property
    def same(self) -> Tensor:
        """Positives by label, self excluded by index."""
        labels, batch = self.batch.known_labels(), self.batch
        assert batch.ref_labels is not None
        same = labels[:, None] == batch.ref_labels[None, :]
        return same.scatter(1, batch.self_columns()[:, None], False) if batch.has_selves else same

    @cached_property
    def diff(self) -> Tensor:
        """Negatives by label."""
        assert self.batch.ref_labels is not None
        return self.batch.known_labels()[:, None] != self.batch.ref_labels[None, :]

    def _listed(self, i: Tensor, j: Tensor) -> Tensor:
        times = self.z.new_zeros(self.batch.size)
        return times.index_put_((i, j), times.new_ones(()), accumulate=True)

    @cached_property
    def pos(self) -> Tensor:
        return self.same.to(self.z.dtype) if self.batch.pairs is None else self._listed(*self.batch.pairs[:2])

    @cached_property
    def neg(self) -> Tensor:
        return self.diff.to(self.z.dtype) if self.batch.pairs is None else self._listed(*self.batch.pairs[2:])

    def mine(self, epsilon: float) -> None:
        """Keep n if S_in > min_{P_i} S - ε and p if S_ip < max_{N_i} S + ε."""
        u = self.u.detach()
        least = u.masked_fill(~self.same, torch.inf).amin(1, keepdim=True)
        most = u.masked_fill(~self.diff, -torch.inf).amax(1, keepdim=True)
        self.neg = self.neg * (u > least - epsilon)
        self.pos = self.pos * (u < most + epsilon)

    def weights(self, anchors_only: bool = False) -> Tensor:
        """The tuple as weights of the rows, 1 where there is none."""
        w = self.batch.weights(anchors_only)
        return self.z.new_ones(len(self.z)) if w is None else w


def lse(terms: Tensor, times: Tensor, dim: int = 1) -> Tensor:
    """log Σ times·e^{term} along ``dim``; -inf where nothing is counted."""
    return torch.where(times > 0, terms + torch.log(times.clamp_min(1e-30)), -torch.inf).logsumexp(dim)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """torch.logaddexp, whose gradient is NaN where both are -inf; there neither has a share."""
    empty = torch.isneginf(a) & torch.isneginf(b)
    zero = torch.zeros_like(a)
    return torch.where(empty, -torch.inf, torch.logaddexp(torch.where(empty, zero, a), torch.where(empty, zero, b)))


def zero_if_empty(value: Tensor) -> Tensor:
    """An empty side counts 0."""
    return torch.where(torch.isneginf(value), 0, value)
