"""Proxy-NCA: Movshovitz-Attias et al. 2017."""

from __future__ import annotations

import torch
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Value
from pydml.losses.batch import Batch, Dense
from pydml.losses.proxy import ProxyCommon, ProxyLoss
from pydml.policy import softplus


class ProxyNCALoss(ProxyLoss):
    """Proxy-NCA, Movshovitz-Attias et al. 2017, eq. 4. Parameter ``proxies`` [C, d].

    L = 1/B Σ_i LSE_c(-s·D²_ic) + s·D²_{i,y}; the sum is over all classes, or, as in the paper, over c≠y with
    ``include_positive=False`` (then the loss can be negative, and num_classes must be at least 2)
    """

    distances = ("squared", "euclidean", "cosine")
    formula = "LSE_c(-s·D²) + s·D²_y"
    paper = "Movshovitz-Attias et al. 2017"
    pml = "ProxyNCALoss"

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        softmax_scale: float = 1,
        include_positive: bool = True,
        **common: Unpack[ProxyCommon],
    ) -> None:
        super().__init__(num_classes, embedding_size, **common)
        self.softmax_scale = checks.number("softmax_scale", softmax_scale, above=0)
        self.include_positive = checks.flag("include_positive", include_positive)
        if not include_positive and num_classes < 2:
            raise ValueError(f"num_classes: got {num_classes} with include_positive=False, wanted at least 2")

    def fused(self, batch: Batch) -> Value:
        scale = self.softmax_scale
        target, others = self.softmax_stats(batch, "exponential", [scale, 0.0, scale, 0.0])
        gap = others - target
        return self.weighted(softplus(gap) if self.include_positive else gap, batch, anchors_only=True)

    def dense(self, batch: Dense) -> Value:
        logits, labels = self.softmax_scale * self.scores(batch), batch.batch.known_labels()[:, None]
        total = logits if self.include_positive else logits.scatter(1, labels, -torch.inf)
        return self.weighted(total.logsumexp(1) - logits.gather(1, labels)[:, 0], batch.batch, anchors_only=True)
