"""Margin loss with a fixed or learned boundary β: Wu et al. 2017."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value, triplet_number
from pydml.losses.batch import Batch, Dense
from pydml.reducers import Losses, elements


class MarginLoss(MetricLoss):
    """Margin loss, Wu et al. 2017, eq. 5-6, over PML's triplets.

    L = Σ_{(a,p,n)} ([m+D_ap-β]₊ + [m+β-D_an]₊) / number of nonzero terms  (+ the ν-term)

    Every positive pair counts once for each negative of its anchor, and the other way round.

    Parameters
    ----------
    margin, nu, beta
        m, ν, β. ν counts only with ``learn_beta=True``: one β adds ν·β, β per class adds ν·Σβ[y_a] over the
        triplets divided by the number of nonzero terms.
    triplets_per_anchor
        ``"all"``, or how many random ones to draw where there is no tuple.
    learn_beta, num_classes
        Make β a parameter; one β for each class 0 … num_classes-1.

    Attributes
    ----------
    beta
        β as a tensor [1] or [num_classes], a parameter if it is learned.
    """

    distances = ("euclidean", "cosine", "squared")
    over_anchors = False
    reductions = ("divisor", "mean", "sum")
    lists = True
    sub_losses = ("margin_loss", "beta_reg_loss")
    formula = "Σ([m+D_ap-β]₊ + [m+β-D_an]₊) / nonzero terms"
    paper = "Wu et al. 2017"
    pml = "MarginLoss"

    #: β of the constructor, if it is not learned: written where the embeddings are, not copied there.
    constant: float | None = None

    def __init__(
        self,
        margin: float = 0.2,
        nu: float = 0,
        beta: float = 1.2,
        triplets_per_anchor: int | str = "all",
        learn_beta: bool = False,
        num_classes: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.margin = checks.number("margin", margin, least=0)
        self.nu = checks.number("nu", nu, least=0)
        self.triplets_per_anchor = triplet_number(triplets_per_anchor)
        self.learn_beta = checks.flag("learn_beta", learn_beta)
        self.num_classes = None if num_classes is None else checks.integer("num_classes", num_classes, least=1)
        beta = checks.number("beta", beta.item() if isinstance(beta, Tensor) and beta.numel() == 1 else beta)
        known = torch.full((num_classes or 1,), float(beta), dtype=None if learn_beta else torch.float64)
        self.beta: Tensor = nn.Parameter(known) if learn_beta else known  # a constant is kept to its last digit
        if not learn_beta:
            self.constant = beta

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "beta":  # somebody has another one
            self.constant = None

    def _betas(self, batch: Batch) -> Tensor:
        """β of every anchor [B]."""
        if len(self.beta) > 1:
            labels = batch.known_labels()
            checks.within("labels", labels, len(self.beta), f"classes of the {len(self.beta)} values of beta")
        if self.constant is not None:
            return batch.embeddings.new_full(batch.size[:1], self.constant, dtype=batch.dtype)
        beta = self.beta.to(batch.embeddings.device, batch.dtype)
        return beta.expand(batch.size[0]) if len(beta) == 1 else beta[labels]

    def _finish(self, total: Tensor, above: Tensor, triplets: Tensor, betas: Tensor) -> Tensor:
        """From each anchor's sum over its triplets, number of terms above 0, and number of triplets."""
        number = {"divisor": above, "mean": triplets}.get(self.reduction)
        divisor = total.new_ones(()) if number is None else number.sum().clamp_min(1)
        loss = total.sum() / divisor
        if self.learn_beta and self.nu:
            if len(self.beta) == 1:
                return loss + torch.where(triplets.sum() > 0, self.nu * betas[0], 0)
            return loss + torch.where(above.sum() > 0, self.nu * (betas * triplets).sum() / divisor, 0)
        return loss

    def _times(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of every anchor, how often a positive and how often a negative occurs in its triplets."""
        n_pos, n_neg = batch.counts
        if batch.indices is not None and len(batch.indices) == 3:
            n_pos, n_neg = torch.ones_like(n_pos), torch.ones_like(n_neg)
        return n_neg.to(batch.dtype), n_pos.to(batch.dtype)

    def fused(self, batch: Batch) -> Tensor:
        betas = self._betas(batch)
        center = betas if self.distance.is_inverted else -betas
        stats = batch.stats("hinge", [self.margin, -self.margin], row_field=center.detach())
        positive, above_pos, negative, above_neg = stats.unbind(1)
        shift = center - center.detach()  # β enters the hinges as a number; their counts are its derivative
        positive, negative = positive + above_pos * shift, negative - above_neg * shift
        per_pos, per_neg = self._times(batch)
        triplets = per_pos * batch.counts[0]
        return self._finish(
            per_pos * positive + per_neg * negative, per_pos * above_pos + per_neg * above_neg, triplets, betas
        )

    def _triplets(self, batch: Dense, pos: Tensor, neg: Tensor, betas: Tensor) -> Losses:
        """The sum of the two hinges of every triplet, and the ν-term, as PML's reducers get them."""
        a, p, n = batch.triplets
        positive, negative = pos[a, p], neg[a, n]
        divisor = (positive > 0).sum() + (negative > 0).sum()
        regular = elements(0, None, "already_reduced")
        if self.learn_beta and len(a):
            one = len(self.beta) == 1
            nu = self.nu * (betas[:1] if one else betas[a])
            regular = elements(nu, None, "already_reduced") if one else elements(nu, a, "element", divisor=divisor)
        hinges = elements(positive + negative, (a, p, n), "triplet", divisor=divisor)
        return {"margin_loss": hinges, "beta_reg_loss": regular}

    def dense(self, batch: Dense) -> Value:
        betas = self._betas(batch.batch)
        center = (betas if self.distance.is_inverted else -betas)[:, None]
        pos, neg = relu(self.margin + center - batch.u), relu(self.margin + batch.u - center)
        if self.listing:
            return self._triplets(batch, pos, neg, betas)
        per_pos, per_neg = self._times(batch.batch)
        total = per_pos * (pos * batch.pos).sum(1) + per_neg * (neg * batch.neg).sum(1)
        above = per_pos * ((pos > 0) * batch.pos).sum(1) + per_neg * ((neg > 0) * batch.neg).sum(1)
        return self._finish(total, above, per_pos * batch.pos.sum(1), betas)
