"""Triplet margin loss over all, hardest or semi-hard triplets: Schroff et al. 2015; Hermans et al. 2017."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value, triplet_number
from pydml.losses.batch import Batch, Dense
from pydml.policy import softplus
from pydml.reducers import elements


class TripletMarginLoss(MetricLoss):
    """Triplet margin loss, exact over all triplets without a list of them.

    L = avg of nonzero [D_ap - D_an + m]₊

    Parameters
    ----------
    margin
        m >= 0.
    swap
        Use D_pn instead of D_an where it is smaller (anchor swap).
    smooth_loss
        softplus instead of the hinge.
    triplets_per_anchor
        ``"all"``, or how many random ones to draw where there is no tuple.
    triplets
        ``"all"``; ``"hard"``: the hardest positive and negative of each anchor (PML's ``BatchHardMiner``);
        ``"semihard"``: for each positive pair the most similar negative with S_an < S_ap.

    Examples
    --------
    >>> loss_fn = pydml.losses.TripletMarginLoss(margin=0.2, triplets="semihard")
    >>> loss_fn(torch.randn(32, 16), torch.arange(32) % 8).shape
    torch.Size([])
    """

    distances = ("euclidean", "cosine", "squared")
    over_anchors = False
    reductions = ("nonzero", "mean", "sum")
    lists = True
    formula = "avg of nonzero [D_ap-D_an+m]₊"
    paper = "Schroff et al. 2015"
    pml = "TripletMarginLoss"

    def __init__(
        self,
        margin: float = 0.05,
        swap: bool = False,
        smooth_loss: bool = False,
        triplets_per_anchor: int | str = "all",
        triplets: str = "all",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.margin = checks.number("margin", margin, least=0)
        self.swap = checks.flag("swap", swap)
        self.smooth_loss = checks.flag("smooth_loss", smooth_loss)
        self.triplets_per_anchor = triplet_number(triplets_per_anchor)
        self.triplets = checks.choice("triplets", triplets, ("all", "hard", "semihard"))
        if triplets == "semihard" and swap:
            raise ValueError("swap: got True with triplets='semihard', wanted triplets='all' or 'hard'")
        if triplets != "all" and triplets_per_anchor != "all":
            raise ValueError(
                f"triplets_per_anchor: got {triplets_per_anchor!r} beside triplets={triplets!r}, wanted 'all'"
            )
        if triplets == "semihard" and self.reduction == "mean":
            raise ValueError(
                "reducer: got MeanReducer with triplets='semihard', wanted AvgNonZeroReducer or SumReducer"
            )

    def _batch(self, *arguments: object) -> Batch:
        batch = super()._batch(*arguments)
        if self.swap and batch.ref is not None:
            raise ValueError("ref_emb: TripletMarginLoss with swap=True does not take a reference set")
        if self.triplets != "all" and batch.indices is not None:
            raise ValueError(f"indices_tuple: got one with triplets={self.triplets!r}, wanted triplets='all'")
        return batch

    def _loss(self, u_ap: Tensor, u_an: Tensor) -> Tensor:
        violation = u_an - u_ap + self.margin
        return softplus(violation) if self.smooth_loss else relu(violation)

    def _average(self, total: Tensor, above: Tensor, triplets: Tensor) -> Tensor:
        if self.reduction == "sum":
            return total
        return total / (above if self.reduction == "nonzero" else triplets).clamp_min(1)

    def _listed(self, batch: Batch, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        u_ap, u_an, *u_pn = batch.dots_of((a, p), (a, n), *([(p, n)] if self.swap else []))
        return self._loss(u_ap, torch.maximum(u_an, *u_pn) if self.swap else u_an)

    def fused(self, batch: Batch) -> Tensor:
        listed = batch.triplets
        if listed is not None:
            number = torch.tensor(len(listed[0]), device=listed[0].device)
            if self.swap:
                term = self._listed(batch, *listed)
                return self._average(term.sum(), (term > 0).sum(), number)
            total, above = batch.listed_triplets(*listed, self.margin, self.smooth_loss)
            return self._average(total.sum(), above.sum(), number)
        if self.triplets == "hard":
            p, n = batch.extremes("hard", "hard")
            a = torch.arange(len(p), device=p.device)
            real = (p >= 0) & (n >= 0)
            term = self._listed(batch, a, p.clamp_min(0), n.clamp_min(0))
            term = torch.where(real | term.isnan(), term, 0)
            return self._average(term.sum(), (term > 0).sum(), real.sum())
        total, above = batch.triplet_sums(self.triplets, self.margin, self.swap, self.smooth_loss)
        n_pos, n_neg = batch.counts
        return self._average(total.sum(), above.sum(), (n_pos * n_neg).sum())

    def _chosen(self, batch: Dense) -> tuple[Tensor, Tensor, Tensor]:
        u, same, diff = batch.u.detach(), batch.same, batch.diff
        a = torch.arange(len(u), device=u.device)
        if self.triplets == "hard":
            p = u.masked_fill(~same, torch.inf).argmin(1)
            n = u.masked_fill(~diff, -torch.inf).argmax(1)
            real = same.any(1) & diff.any(1)
            return a[real], p[real], n[real]
        found = []
        for i in a:
            p, n = same[i].nonzero()[:, 0], diff[i].nonzero()[:, 0]
            below = u[i, n][None, :] < u[i, p][:, None]
            p, below = p[below.any(1)], below[below.any(1)]
            if len(p):
                hardest = u[i, n].expand_as(below).masked_fill(~below, -torch.inf).argmax(1)
                found.append(torch.stack((i.expand_as(p), p, n[hardest]), 1))
        a, p, n = torch.cat([*found, a.new_empty(0, 3)]).T
        return a, p, n

    def dense(self, batch: Dense) -> Value:
        a, p, n = batch.triplets if self.triplets == "all" else self._chosen(batch)
        u_an = torch.maximum(batch.u[a, n], batch.u[p, n]) if self.swap else batch.u[a, n]
        term = self._loss(batch.u[a, p], u_an)
        if self.listing:
            return {"loss": elements(term, (a, p, n), "triplet")}
        return self._average(term.sum(), (term > 0).sum(), torch.tensor(len(a), device=term.device))
