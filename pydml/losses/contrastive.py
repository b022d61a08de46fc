"""Contrastive loss on Euclidean distances (PML's default) or cosines: Hadsell et al. 2006; Wang et al. 2019, eq. 4."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense
from pydml.reducers import Losses, elements
from pydml.sums import add_at


class ContrastiveLoss(MetricLoss):
    """Contrastive loss: hinges on both sides, each averaged by itself over ordered pairs, then added.

    L = avg [D-m₊]₊ over positives + avg [m₋-D]₊ over negatives; ``distance="cosine"``: [m₊-S]₊ and [S-m₋]₊

    Parameters
    ----------
    pos_margin, neg_margin
        m₊, m₋. Euclidean: both >= 0. The paper's is ``distance="cosine", pos_margin=1, neg_margin=0.5``.
    denominator
        What each sum is divided by: its ``nonzero`` terms, its ``pairs``, or the ``batch`` size.

    Examples
    --------
    >>> pydml.losses.ContrastiveLoss()(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    tensor(1.4142)
    """

    distances = ("euclidean", "cosine", "squared")
    over_anchors = False
    exact_cosines = True
    reductions = ("nonzero", "mean", "sum", "anchor")
    lists = True
    sub_losses = ("pos_loss", "neg_loss")
    formula = "avg₊[D-m₊]₊ + avg₋[m₋-D]₊, over nonzero terms"
    paper = "Hadsell et al. 2006"
    pml = "ContrastiveLoss"

    def __init__(
        self, pos_margin: float = 0, neg_margin: float = 1, denominator: str = "nonzero", **common: Unpack[Common]
    ) -> None:
        super().__init__(**common)
        least = None if self.distance.is_inverted else 0.0
        self.pos_margin = checks.number("pos_margin", pos_margin, least=least)
        self.neg_margin = checks.number("neg_margin", neg_margin, least=least)
        self.denominator = checks.choice("denominator", denominator, ("nonzero", "pairs", "batch"))
        if self.reduction != "nonzero" and denominator != "nonzero":
            raise ValueError(f"denominator: got {denominator!r} beside a reducer, wanted only one of the two")

    def _average(self, total: Tensor, above: Tensor, pairs: Tensor) -> Tensor:
        """One side from its rows' sums, numbers of terms above 0 and numbers of pairs."""
        if self.reduction == "anchor":
            return (total / pairs.clamp_min(1)).sum() / max(len(total), 1)
        if self.reduction == "sum":
            return total.sum()
        if self.denominator == "batch":
            return total.sum() / max(len(total), 1)
        number = pairs if self.reduction == "mean" or self.denominator == "pairs" else above
        return total.sum() / number.sum().clamp_min(1)

    def fused(self, batch: Batch) -> Tensor:
        if self.reduction == "anchor":  # PML's reducer counts a pair that occurs twice once
            batch.unique_pairs()
        margins = [self.oriented(self.pos_margin), self.oriented(self.neg_margin)]
        stats = batch.stats("hinge", margins)
        if self.reduction == self.denominator == "nonzero":  # both sides at once: a small batch feels every operation
            total, above = stats.sum(0).view(2, 2).unbind(1)
            return (total / above.detach().clamp_min(1)).sum()
        positive, above_pos, negative, above_neg = stats.unbind(1)
        counted = self.reduction in ("mean", "anchor") or self.denominator == "pairs"
        n_pos, n_neg = batch.counts if counted else (above_pos, above_neg)  # a long tuple takes a while to count
        return self._average(positive, above_pos, n_pos) + self._average(negative, above_neg, n_neg)

    def _hinges(self, batch: Dense) -> Losses:
        a1, p, a2, n = batch.pairs
        positive = relu(self.oriented(self.pos_margin) - batch.u[a1, p])
        negative = relu(batch.u[a2, n] - self.oriented(self.neg_margin))
        return {
            "pos_loss": elements(positive, (a1, p), "pos_pair"),
            "neg_loss": elements(negative, (a2, n), "neg_pair"),
        }

    def dense(self, batch: Dense) -> Value:
        if self.reduction == "anchor":
            batch.batch.unique_pairs()
        sides = self._hinges(batch)
        if self.listing:
            return sides
        loss, nothing = torch.zeros_like(batch.z[:0].sum()), torch.zeros_like(batch.u[:, 0])
        for side in sides.values():
            hinge, (anchor, _) = side["losses"], side["indices"]
            terms = (hinge, hinge > 0, torch.ones_like(hinge))
            total, above, pairs = (add_at(nothing, anchor, x.to(hinge.dtype)) for x in terms)
            loss = loss + self._average(total, above, pairs)
        return loss
