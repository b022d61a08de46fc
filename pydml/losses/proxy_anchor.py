"""Proxy-Anchor: proxies as anchors of Multi-Similarity-like sums, Kim et al. 2020."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Value
from pydml.losses.batch import Batch, Dense, lse
from pydml.losses.proxy import ProxyCommon, ProxyLoss
from pydml.policy import softplus
from pydml.reducers import elements


class ProxyAnchorLoss(ProxyLoss):
    """Proxy-Anchor, Kim et al. 2020, eq. 4. Parameter ``proxies`` [C, d].

    L = 1/|W⁺| Σ_{w∈W⁺} log(1+Σ_{X_w⁺} e^{-α(s-δ)}) + 1/C Σ_w log(1+Σ_{X_w⁻} e^{α(s+δ)}), W⁺ the classes in the batch
    """

    over_anchors = False
    reductions = ("divisor", "mean", "sum")
    formula = "1/|W⁺| Σ log(1+Σ₊ e^{-α(s-δ)}) + 1/C Σ log(1+Σ₋ e^{α(s+δ)})"
    paper = "Kim et al. 2020"
    pml = "ProxyAnchorLoss"
    distances = ("cosine", "euclidean", "squared")
    sub_losses = ("pos_loss", "neg_loss")

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 0.1,
        alpha: float = 32,
        **common: Unpack[ProxyCommon],
    ) -> None:
        super().__init__(num_classes, embedding_size, **common)
        self.margin = checks.number("margin", margin)
        self.alpha = checks.number("alpha", alpha, above=0)

    @staticmethod
    def initialize(w: Tensor) -> None:
        nn.init.kaiming_normal_(w, mode="fan_out")

    def _average(self, positive: Tensor, negative: Tensor) -> Value:
        """From the two log-sum-exps of every proxy."""
        present = (~torch.isneginf(positive)).sum().clamp_min(1)
        if self.listing:
            each = torch.arange(len(positive), device=positive.device)
            return {
                "pos_loss": elements(softplus(positive), each, "element", divisor=present),
                "neg_loss": elements(softplus(negative), each, "element", divisor=self.num_classes),
            }
        total_pos, total_neg = softplus(positive).sum(), softplus(negative).sum()
        if self.reduction == "sum":
            return total_pos + total_neg
        return total_pos / (present if self.reduction == "divisor" else self.num_classes) + total_neg / self.num_classes

    def fused(self, batch: Batch) -> Value:
        z, weights = batch.embeddings, batch.weights()
        margin = self.oriented(self.margin)
        params = [-self.alpha, margin, self.alpha, -margin]
        shift = None if weights is None else weights - 1
        stats = batch.anchor_stats(self.columns(z), self.classes(z), "exponential", params, shift)
        return self._average(*stats.unbind(1))

    def dense(self, batch: Dense) -> Value:
        s, margin = self.scores(batch), self.oriented(self.margin)
        positives = torch.nn.functional.one_hot(batch.batch.known_labels(), self.num_classes).to(s.dtype)
        shift = (batch.weights() - 1)[:, None]
        positive = lse(-self.alpha * (s - margin) + shift, positives, dim=0)
        return self._average(positive, lse(self.alpha * (s + margin) + shift, 1 - positives, dim=0))
