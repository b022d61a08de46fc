"""FastAP: average precision by soft histograms of distances, Cakir et al. 2019."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense
from pydml.reducers import is_a
from pydml.sums import running_sum


class FastAPLoss(MetricLoss):
    """FastAP, Cakir et al. 2019 (supplement, eq. 21).

    L = 1 - mean over anchors with a positive of 1/N⁺·Σ_l h⁺_l H⁺_l/H_l (0/0 = 0), with num_bins+1 nodes on D² in [0, 4]
    (of another power of D on [0, 2^power])

    The gradient is the true one (the authors' code returns B/2 times it). Takes ``ref_emb``, which PML's does not.
    """

    distances = ("squared", "euclidean")
    formula = "1 - 1/N⁺·Σ_l h⁺_l H⁺_l/H_l"
    paper = "Cakir et al. 2019"
    pml = "FastAPLoss"

    def __init__(self, num_bins: int = 10, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        if not self.normalize_embeddings:
            raise ValueError("normalize_embeddings: got False, wanted True: the histogram spans D² in [0, 4]")
        self.num_bins = checks.integer("num_bins", num_bins, least=1)

    def check_distance(self, distance: Any) -> None:
        if not is_a(distance, "LpDistance") or distance.p != 2 or not distance.normalize_embeddings:
            raise ValueError(f"distance: FastAPLoss got {distance}, wanted LpDistance(p=2) of normalised embeddings")

    @property
    def _top(self) -> float:
        """The largest distance of unit rows."""
        return float(2**self.distance.power)

    def fused(self, batch: Batch) -> Value:
        positives, negatives = batch.histogram(self.num_bins + 1, -self._top, 0.0)
        # u rises where the distance falls: nodes come in the order of decreasing distance
        h_pos, h_neg = positives.flip(1), negatives.flip(1)
        ranked, ranked_all = running_sum(h_pos), running_sum(h_pos + h_neg)
        terms = h_pos * ranked / torch.where(ranked_all == 0, 1, ranked_all)
        number = batch.positives()
        values = 1 - terms.sum(1) / number.clamp_min(1)
        weights = batch.weights()
        counted = (number > 0) | values.isnan()
        return self.reduce(values if weights is None else values * weights, counted)

    def dense(self, batch: Dense) -> Value:
        nodes = torch.linspace(0, self._top, self.num_bins + 1, dtype=batch.z.dtype, device=batch.z.device)
        number = batch.same.sum(1)
        total_pos = total = torch.zeros_like(batch.u[:, 0])
        precision = torch.zeros_like(total)
        for node in nodes:
            pulse = (1 - (-batch.u - node).abs() * (self.num_bins / self._top)).clamp_min(0)
            h_pos, h = (pulse * batch.same).sum(1), (pulse * (batch.same | batch.diff)).sum(1)
            total_pos, total = total_pos + h_pos, total + h
            precision = precision + h_pos * total_pos / torch.where(total == 0, 1, total)
        return self.reduce((1 - precision / number.clamp_min(1)) * batch.weights(), number > 0)
