"""SoftTriple: several centres a class, pooled by a softmax, Qian et al. 2019."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Value
from pydml.losses.batch import Batch, Dense
from pydml.losses.proxy import ProxyCommon, ProxyLoss
from pydml.policy import softplus
from pydml.products import product


class SoftTripleLoss(ProxyLoss):
    """SoftTriple, Qian et al. 2019, eq. 7-8. Parameter ``fc`` [d, C·K].

    L = cross-entropy of λ(S_ic - δ1[c=y]), S_ic = Σ_k softmax_k(s_ck/γ)·s_ck, plus
    τ·Σ_c Σ_{k<k'} √(2+1e-5-2w_k·w_k') / (C·K·(K-1)) that merges centres

    Parameters
    ----------
    centers_per_class, la, gamma, margin, tau
        K, λ, γ, δ, τ (0.2 in the authors' code).
    """

    parameter, transposed = "fc", True
    formula = "cross-entropy of λ(S_c-δ1[c=y]), S_c = Σ_k softmax_k(s_ck/γ)s_ck"
    paper = "Qian et al. 2019"
    pml = "SoftTripleLoss"

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        centers_per_class: int = 10,
        la: float = 20,
        gamma: float = 0.1,
        margin: float = 0.01,
        tau: float = 0,
        **common: Unpack[ProxyCommon],
    ) -> None:
        self.centers_per_class = checks.integer("centers_per_class", centers_per_class, least=1)
        super().__init__(num_classes, embedding_size, centers_per_class, **common)
        self.centers_per_class = centers_per_class
        self.la = checks.number("la", la, above=0)
        self.gamma = checks.number("gamma", gamma, above=0)
        self.margin = checks.number("margin", margin, least=0)
        self.tau = checks.number("tau", tau, least=0)
        if tau and self.reduction == "none":
            raise ValueError("tau: got one with reduction='none', wanted a reduction to a scalar")

    @staticmethod
    def initialize(w: Tensor) -> None:
        nn.init.kaiming_uniform_(w, a=math.sqrt(5))

    def additions(self, batch: Batch) -> dict[str, Tensor]:
        more, k = super().additions(batch), self.centers_per_class
        if self.tau and k > 1 and 0 not in batch.size:
            more["merging_loss"] = batch.over_classes(self._merging(batch.embeddings.new_empty(0, dtype=batch.dtype)))
        return more

    def _merging(self, like: Tensor) -> Tensor:
        """The τ-term."""
        k = self.centers_per_class
        w = self.unit_columns(like).unflatten(0, (-1, k))
        i, j = torch.triu_indices(k, k, 1, device=w.device).unbind()
        gram = product(w, w.mT)[:, i, j]
        return self.tau * torch.sqrt(2 + 1e-5 - 2 * gram).sum() / (self.num_classes * k * (k - 1))

    def _pooled(self, s: Tensor) -> Tensor:
        s = s.unflatten(1, (-1, self.centers_per_class))
        return (torch.softmax(s / self.gamma, dim=2) * s).sum(2)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """Class scores S_ic [B, C], for prediction."""
        return self._pooled(super().get_logits(embeddings))

    def check_distance(self, distance: Any) -> None:
        if not distance.is_inverted:
            raise ValueError(f"distance: SoftTripleLoss got {distance}, wanted a similarity such as CosineSimilarity()")

    def fused(self, batch: Batch) -> Value:
        params = [self.la, self.margin, self.la, 0.0]
        pooling = {"pool_size": self.centers_per_class, "sharpness": 1 / self.gamma}
        target, others = self.softmax_stats(batch, "exponential", params, **pooling)
        return self.weighted(softplus(others - target), batch)

    def dense(self, batch: Dense) -> Value:
        labels = batch.batch.known_labels()
        pooled = self._pooled(self.scores(batch))
        target = torch.nn.functional.one_hot(labels, self.num_classes).to(pooled.dtype)
        values = cross_entropy(self.la * (pooled - self.margin * target), labels, reduction="none")
        return self.weighted(values, batch.batch)
