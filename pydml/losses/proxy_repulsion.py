"""Proxy repulsion, the loss of the thesis «Metric Learning: A Deep Dive», eq. 6.1 and 6.2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.batch import Batch, Dense, lse, pair_stats
from pydml.losses.proxy import ProxyCommon, ProxyLoss
from pydml.policy import softplus
from pydml.products import product
from pydml.sums import segment_lse


class ProxyRepulsionLoss(ProxyLoss):
    """Proxy repulsion, Psomas 2020, eq. 6.1 («proxy») and 6.2 («batch»). Parameter ``proxies`` [C, d].

    L = 1/|W⁺| Σ_{w∈W⁺} log(1+Σ_{X_w⁺} e^{-α(s-λ)}) + 1/C Σ_w log(1+Σ_{w'≠w} e^{α(G_ww'+λ)})

    Parameters
    ----------
    margin, alpha
        λ, α.
    variant
        ``"batch"``: G = Σ_x (w·x)(x·w'), ``"proxy"``: G = WWᵀ.
    aggregate
        ``"sum"`` (the thesis' code) or ``"mean"`` over the batch in G.
    """

    over_anchors = False
    reductions = ("divisor",)
    formula = "Proxy-Anchor's positive term + 1/C Σ_w log(1+Σ_{w'≠w} e^{α(G_ww'+λ)})"
    paper = "Psomas 2020"
    splits = False  # its negatives are pairs of proxies

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 0.1,
        alpha: float = 32,
        variant: str = "batch",
        aggregate: str = "sum",
        **common: Unpack[ProxyCommon],
    ) -> None:
        super().__init__(num_classes, embedding_size, **common)
        if not self.normalize_embeddings:
            raise ValueError("normalize_embeddings: ProxyRepulsionLoss got False, wanted True: it is one of cosines")
        self.margin = checks.number("margin", margin)
        self.alpha = checks.number("alpha", alpha, above=0)
        self.variant = checks.choice("variant", variant, ("batch", "proxy"))
        self.aggregate = checks.choice("aggregate", aggregate, ("sum", "mean"))

    @staticmethod
    def initialize(w: Tensor) -> None:
        nn.init.kaiming_normal_(w, mode="fan_out")

    def _average(self, positive: Tensor, negative: Tensor) -> Tensor:
        present = (~torch.isneginf(positive)).sum().clamp_min(1)
        return softplus(positive).sum() / present + softplus(negative).sum() / self.num_classes

    def fused(self, batch: Batch) -> Tensor:
        z, labels = batch.embeddings, batch.known_labels()
        proxies, classes = self.columns(z), self.classes(z)
        term = -self.alpha * (batch.proxy_dots(proxies) - self.margin)
        weights = batch.weights()
        positive = segment_lse(term if weights is None else term + weights - 1, labels, self.num_classes)
        params = [0.0, 0.0, self.alpha, -self.margin]  # the diagonal counts as the only positive: left out
        if self.variant == "proxy":
            negative = pair_stats(proxies, None, classes, None, "exponential", params, backend=batch.backend)[:, 1]
        else:
            # G = W (XᵀX) Wᵀ: a d×d matrix instead of the B×C cosines
            w = self.unit_columns(z)
            gram = batch.gram() / (batch.size[0] if self.aggregate == "mean" else 1)
            negative = pair_stats(
                product(w, gram), w, classes, classes, "exponential", params, normalize=False, backend=batch.backend
            )[:, 1]
        return self._average(positive, negative)

    def dense(self, batch: Dense) -> Tensor:
        s = self.scores(batch)
        positives = torch.nn.functional.one_hot(batch.batch.known_labels(), self.num_classes).to(s.dtype)
        positive = lse(-self.alpha * (s - self.margin) + (batch.weights() - 1)[:, None], positives, dim=0)
        if self.variant == "proxy":
            w = self.unit_columns(batch.z)
            g = product(w, w.T)
        else:
            g = product(s.T, s) / (len(s) if self.aggregate == "mean" else 1)
        others = 1 - torch.eye(self.num_classes, dtype=s.dtype, device=s.device)
        return self._average(positive, lse(self.alpha * (g + self.margin), others))
