"""N-pairs loss as PML computes it: Sohn 2016."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pydml.distances import DotProductSimilarity
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense
from pydml.policy import softplus
from pydml.reducers import elements
from pydml.sums import add_at


class NPairsLoss(MetricLoss):
    """N-pairs loss, Sohn 2016, eq. 7: the first two items of each class are anchor and positive.

    L = mean over classes with two items of cross-entropy over the (normalised) dot products with all positives
    """

    distances = ("cosine", "euclidean", "squared")
    takes_ref = False
    formula = "LSE_c(S_{a,p_c}) - S_{a,p} for the first two items of each class"
    paper = "Sohn 2016"
    pml = "NPairsLoss"

    def __init__(self, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.add_to_recordable_attributes(name="num_pairs", is_stat=True)

    def get_default_distance(self) -> DotProductSimilarity:
        return DotProductSimilarity()

    def _pairs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor, positive and «this is a pair» [B//2] (of a tuple: up to B): padded, so of static shape."""
        labels = batch.known_labels()
        if batch.pairs is not None:
            a, p, _, _ = batch.pairs
            order = torch.argsort(labels[a], stable=True)
            classes = labels[a][order]
            first = torch.ones_like(classes, dtype=torch.bool)
            first[1:] = classes[1:] != classes[:-1]
            at = torch.argsort(~first, stable=True)[: len(labels)]  # there are no more classes than items
            return a[order][at], p[order][at], first[at]
        order = torch.argsort(labels, stable=True)
        classes = labels[order]
        starts = torch.ones_like(classes, dtype=torch.bool)
        starts[1:] = classes[1:] != classes[:-1]
        first = starts[:-1] & ~starts[1:]  # an item that opens a class and has a follower in it
        at = torch.argsort(~first, stable=True)[: len(labels) // 2]
        return order[at], order[1:][at], first[at]

    def compared(self, batch: Batch) -> tuple[Tensor, Tensor]:
        (anchor, positive, real), z = self._pairs(batch), batch.everything()
        return z[anchor[real]], z[positive[real]]

    def _scatter(self, values: Tensor, anchor: Tensor, real: Tensor, batch: Batch) -> Value:
        """Values of the pairs at their anchors [B]."""
        if self.collect_stats:
            self.num_pairs = int(real.sum())
        if self.listing:
            return {"loss": elements(values[real], anchor[real], "element")}
        values = torch.where(real, values, 0)
        rows = torch.zeros(batch.size[0], dtype=values.dtype, device=values.device)
        counted = add_at(torch.zeros_like(rows), anchor, real.to(rows.dtype)) > 0
        return self.reduce(add_at(rows, anchor, values), counted)

    def fused(self, batch: Batch) -> Value:
        anchor, positive, real = self._pairs(batch)
        if not len(anchor):
            return self.reduce(batch.zeros())
        padding = torch.where(real, 0.0, -torch.inf)  # a padded column adds e^{-inf} to every sum
        stats = batch.stats_between(anchor, positive, "exponential", [1.0, 0.0, 1.0, 0.0], padding)
        own, others = stats.unbind(1)
        values = softplus(torch.where(real, others - own, 0))
        value = self._scatter(values, anchor, real, batch)
        return batch.nan(value) if isinstance(value, Tensor) else value

    def dense(self, batch: Dense) -> Value:
        anchor, positive, real = self._pairs(batch.batch)
        anchor, positive = anchor[real], positive[real]
        if not len(anchor):
            return self.reduce(batch.z.sum(1) * 0)
        logits = batch.u[anchor][:, positive]
        values = cross_entropy(logits, torch.arange(len(anchor), device=logits.device), reduction="none")
        return self._scatter(values, anchor, torch.ones_like(real[real]), batch.batch)
