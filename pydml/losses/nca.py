"""NCA loss on squared distances: Goldberger et al. 2004."""

from __future__ import annotations

import torch
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense, lse
from pydml.policy import softplus


class NCALoss(MetricLoss):
    """Neighbourhood components analysis, Goldberger et al. 2004.

    L = mean over anchors with a positive of LSE_{k≠i}(s·l_ik) - LSE_{P_i}(s·l_ik), l = -D²

    Computed with log-sum-exps, so an anchor whose positive mass underflows still counts (PML drops it).
    """

    distances = ("squared", "euclidean", "cosine")
    formula = "LSE(-s·D²) - LSE₊(-s·D²)"
    paper = "Goldberger et al. 2004"
    pml = "NCALoss"
    sees_copies = True  # as PML's in its memory

    def __init__(self, softmax_scale: float = 1, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.softmax_scale = checks.number("softmax_scale", softmax_scale, above=0)

    def fused(self, batch: Batch) -> Value:
        scale = self.softmax_scale
        positive, negative = batch.stats("exponential", [scale, 0.0, scale, 0.0], listed=False).unbind(1)
        counted = ~torch.isneginf(positive)
        values = softplus(torch.where(counted, negative - positive, 0))  # LSE of all - LSE of the positives
        weights = batch.weights()
        return self.reduce(values if weights is None else values * weights, counted)

    def dense(self, batch: Dense) -> Value:
        logits = self.softmax_scale * batch.u
        everything = lse(logits, (batch.same | batch.diff).to(logits.dtype))
        values = everything - lse(logits, batch.same.to(logits.dtype))
        return self.reduce(values * batch.weights(), batch.same.any(1))
