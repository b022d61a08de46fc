"""Normalised softmax: cross-entropy of cosines, Zhai and Wu 2019."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.batch import Batch, Dense
from pydml.losses.proxy import ProxyCommon, ProxyLoss
from pydml.policy import softplus


class NormalizedSoftmaxLoss(ProxyLoss):
    """Normalised softmax, Zhai and Wu 2019, eq. 2: cross-entropy of cos(x, w_c)/T. Parameter ``W`` [d, C]."""

    parameter, transposed = "W", True
    formula = "cross-entropy of cosθ/T"
    paper = "Zhai & Wu 2019"
    pml = "NormalizedSoftmaxLoss"

    def __init__(
        self, num_classes: int, embedding_size: int, temperature: float = 0.05, **common: Unpack[ProxyCommon]
    ) -> None:
        super().__init__(num_classes, embedding_size, **common)
        self.temperature = checks.number("temperature", temperature, above=0)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """Class scores [B, C], for prediction."""
        x, w = (torch.nn.functional.normalize(t) for t in (embeddings, self.columns(embeddings)))
        return x @ w.T / self.temperature

    def fused(self, batch: Batch) -> Tensor:
        scale = 1 / self.temperature
        target, others = self.softmax_stats(batch, "exponential", [scale, 0.0, scale, 0.0])
        return self.weighted(softplus(others - target), batch)

    def dense(self, batch: Dense) -> Tensor:
        logits = self.cosines(batch) / self.temperature
        return self.weighted(cross_entropy(logits, batch.batch.known_labels(), reduction="none"), batch.batch)
