"""Normalised softmax: cross-entropy of cosines, Zhai and Wu 2019."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pydml import checks
from pydml.distances import OTHER, DotProductSimilarity
from pydml.losses.base import Value
from pydml.losses.batch import Batch, Dense
from pydml.losses.proxy import ProxyCommon, ProxyLoss
from pydml.policy import softplus


class NormalizedSoftmaxLoss(ProxyLoss):
    """Normalised softmax, Zhai and Wu 2019, eq. 2: cross-entropy of cos(x, w_c)/T. Parameter ``W`` [d, C].

    Another distance, or raw embeddings, compare x with w_c of unit length.
    """

    parameter, transposed = "W", True
    formula = "cross-entropy of cosθ/T"
    paper = "Zhai & Wu 2019"
    pml = "NormalizedSoftmaxLoss"
    distances = ("cosine", "euclidean", "squared")

    def __init__(
        self, num_classes: int, embedding_size: int, temperature: float = 0.05, **common: Unpack[ProxyCommon]
    ) -> None:
        super().__init__(num_classes, embedding_size, **common)
        self.temperature = checks.number("temperature", temperature, above=0)

    def get_default_distance(self) -> DotProductSimilarity:
        return DotProductSimilarity()

    def seen(self, like: Tensor) -> Tensor:
        """See :meth:`ProxyLoss.seen`: of unit length whatever the embeddings are; engines that normalise do it."""
        w = super().seen(like)
        unit: Tensor = w if self.normalize_embeddings and self.kind != OTHER else self.distance.normalize(w)
        return unit

    def compared(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows, w = super().compared(batch)
        return rows, self.distance.normalize(w)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """Class scores [B, C], for prediction."""
        logits = super().get_logits(embeddings) / self.temperature
        return logits if self.distance.is_inverted else -logits

    def fused(self, batch: Batch) -> Value:
        scale = 1 / self.temperature
        target, others = self.softmax_stats(batch, "exponential", [scale, 0.0, scale, 0.0])
        return self.weighted(softplus(others - target), batch)

    def dense(self, batch: Dense) -> Value:
        logits = self.scores(batch) / self.temperature
        return self.weighted(cross_entropy(logits, batch.batch.known_labels(), reduction="none"), batch.batch)
