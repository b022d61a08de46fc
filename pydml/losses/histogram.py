"""Histogram loss: Ustinova and Lempitsky 2016."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense
from pydml.reducers import elements
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
        if delta is not None:
            bins = round(2 / checks.number("delta", delta, above=0))
            if abs(bins * delta - 2) > 1e-9 or (n_bins is not None and n_bins != bins):
                raise ValueError(f"delta: got {delta!r} with n_bins={n_bins!r}, wanted delta = 2/n_bins")
            n_bins = bins
        self.n_bins = checks.integer("n_bins", 100 if n_bins is None else n_bins, least=1)
        self.delta = 2 / self.n_bins

    @property
    def fuses(self) -> bool:
        return super().fuses and self.normalize_embeddings

    def _overlap(self, positives: Tensor, negatives: Tensor) -> Value:
        """From the two histograms, not yet of mass 1."""
        h_pos, h_neg = positives / positives.sum().clamp_min(1), negatives / negatives.sum().clamp_min(1)
        value = (h_neg * running_sum(h_pos)).sum()
        return {"loss": elements(value, None, "already_reduced")} if self.listing else value

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

    def fused(self, batch: Batch) -> Value:
        listed = self._unordered(batch)
        if listed is not None:
            return self._overlap(*(self._soft(batch.dots(i, j)) for i, j in listed))
        labels = batch.known_labels()
        lone = batch.counts[0] == 0
        # lone items all get one label of their own: their pairs with each other are then no negatives
        classes = torch.where(lone, len(labels), torch.searchsorted(labels.sort().values, labels))
        positives, negatives = batch.histogram_totals(self.n_bins + 1, -1.0, 1.0, classes, ~lone)
        return self._overlap(positives / 2, negatives / 2)

    def _entries(self, batch: Dense) -> Tensor:
        """What is counted: S, or the entries of another matrix."""
        if self.fuses:
            return batch.S.clamp(-1, 1)
        return batch.u if self.distance.is_inverted else -batch.u

    def _pulses(self, s: Tensor) -> Tensor:
        """Soft histogram by the formula."""
        if len(s) and s.detach().abs().max() > 1:
            span = f"[{float(s.min()):.3g}, {float(s.max()):.3g}]"
            raise ValueError(f"distance: got values in {span}, wanted [-1, 1], which the histogram spans")
        nodes = torch.linspace(-1, 1, self.n_bins + 1, dtype=s.dtype, device=s.device)
        return (1 - (s[:, None] - nodes).abs() * (self.n_bins / 2)).clamp_min(0).sum(0)

    def dense(self, batch: Dense) -> Value:
        listed, values = self._unordered(batch.batch), self._entries(batch)
        if listed is not None:
            pos, neg = (values[pairs] for pairs in listed)
        else:
            above = torch.ones_like(batch.same).triu(1)
            paired = batch.same.any(1)
            pos = values[batch.same & above]
            neg = values[batch.diff & above & (paired[:, None] | paired[None, :])]
        return self._overlap(self._pulses(pos), self._pulses(neg))
