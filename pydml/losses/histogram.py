"""Histogram loss: Ustinova and Lempitsky 2016."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss
from pydml.losses.batch import Batch, Dense
from pydml.sums import add_at, running_sum
from pydml.tuples import distinct


class HistogramLoss(MetricLoss):
    """Histogram loss, Ustinova and Lempitsky 2016, eq. 4, over unordered pairs.

    L = Σ_r h⁻_r Σ_{q≤r} h⁺_q, h± the soft histograms of S on n_bins+1 nodes of [-1, 1], each of mass 1

    A negative pair counts only if at least one of its two items has a positive in the batch.

    Parameters
    ----------
    n_bins
        Intervals between nodes; ``delta`` = 2/n_bins is PML's other way to say it.
    """

    over_anchors = False
    exact_cosines = True
    reductions = ("mean", "sum", "nonzero", "anchor", "divisor")  # the value is one number: all the same
    takes_ref = False
    formula = "Σ_r h⁻_r Σ_{q≤r} h⁺_q"
    paper = "Ustinova & Lempitsky 2016"
    pml = "HistogramLoss"

    def __init__(self, n_bins: int | None = None, delta: float | None = None, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        if not self.normalize_embeddings:
            raise ValueError("normalize_embeddings: got False, wanted True: the histogram spans S in [-1, 1]")
        if delta is not None:
            bins = round(2 / checks.number("delta", delta, above=0))
            if abs(bins * delta - 2) > 1e-9 or (n_bins is not None and n_bins != bins):
                raise ValueError(f"delta: got {delta!r} with n_bins={n_bins!r}, wanted delta = 2/n_bins")
            n_bins = bins
        self.n_bins = checks.integer("n_bins", 100 if n_bins is None else n_bins, least=1)

    @staticmethod
    def _overlap(positives: Tensor, negatives: Tensor) -> Tensor:
        """From the two histograms, not yet of mass 1."""
        h_pos, h_neg = positives / positives.sum().clamp_min(1), negatives / negatives.sum().clamp_min(1)
        return (h_neg * running_sum(h_pos)).sum()

    @staticmethod
    def _unordered(batch: Batch) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """The positive and the negative pairs of the tuple's triplets, each once, whichever way round it is."""
        listed = batch.pairs_of_triplets()
        if listed is None:
            return None
        a1, p, a2, n = listed
        sides = ((a1, p), (a2, n))
        pos, neg = (distinct(torch.minimum(i, j), torch.maximum(i, j), batch.size) for i, j in sides)
        return pos, neg

    def _soft(self, s: Tensor) -> Tensor:
        """Soft histogram of some similarities."""
        at = (s.clamp(-1, 1) + 1) * (self.n_bins / 2)
        left = at.detach().nan_to_num(0).long().clamp_max(self.n_bins - 1)
        h = torch.zeros(self.n_bins + 1, dtype=s.dtype, device=s.device)
        return add_at(add_at(h, left, 1 - (at - left)), left + 1, at - left)

    def fused(self, batch: Batch) -> Tensor:
        listed = self._unordered(batch)
        if listed is not None:
            return self._overlap(*(self._soft(batch.dots(i, j)) for i, j in listed))
        labels = batch.known_labels()
        lone = batch.counts[0] == 0
        # lone items all get one label of their own: their pairs with each other are then no negatives
        classes = torch.where(lone, len(labels), torch.searchsorted(labels.sort().values, labels))
        positives, negatives = batch.histogram_totals(self.n_bins + 1, -1.0, 1.0, classes, ~lone)
        return self._overlap(positives / 2, negatives / 2)

    def dense(self, batch: Dense) -> Tensor:
        listed = self._unordered(batch.batch)
        if listed is not None:
            pos, neg = (batch.S[pairs] for pairs in listed)
        else:
            above = torch.ones_like(batch.same).triu(1)
            paired = batch.same.any(1)
            pos = batch.S[batch.same & above]
            neg = batch.S[batch.diff & above & (paired[:, None] | paired[None, :])]
        nodes = torch.linspace(-1, 1, self.n_bins + 1, dtype=pos.dtype, device=pos.device)
        h_pos, h_neg = (
            (1 - (s.clamp(-1, 1)[:, None] - nodes).abs() * (self.n_bins / 2)).clamp_min(0).sum(0) / max(len(s), 1)
            for s in (pos, neg)
        )
        return (h_neg * h_pos.cumsum(0)).sum()
