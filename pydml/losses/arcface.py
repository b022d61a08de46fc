"""ArcFace: softmax with an additive angular margin, Deng et al. 2019."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import Unpack

from pydml import checks, distances
from pydml.losses.base import Value
from pydml.losses.batch import Batch, Dense
from pydml.losses.proxy import ProxyCommon, ProxyLoss
from pydml.policy import softplus
from pydml.reducers import is_a


class ArcFaceLoss(ProxyLoss):
    """ArcFace, Deng et al. 2019, eq. 3: cross-entropy of s·cosθ with s·cos(θ+m) on the target. Parameter ``W`` [d, C].

    Past θ = π-m the target's logit goes on as s·(cosθ - m·sin m), so that it never rises with θ.

    Parameters
    ----------
    margin
        m in degrees, as in PML (28.6 = 0.5 rad).
    scale
        s.
    """

    parameter, transposed = "W", True
    formula = "cross-entropy of s·cosθ, target s·cos(θ+m)"
    paper = "Deng et al. 2019"
    pml = "ArcFaceLoss"

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 28.6,
        scale: float = 64,
        **common: Unpack[ProxyCommon],
    ) -> None:
        super().__init__(num_classes, embedding_size, **common)
        self.margin = checks.number("margin", margin, least=0)
        if margin > 180:
            raise ValueError(f"margin: got {margin!r}, wanted degrees in [0, 180]")
        self.scale = checks.number("scale", scale, above=0)
        if not self.normalize_embeddings:
            raise ValueError("normalize_embeddings: ArcFaceLoss got False, wanted True: it adds to an angle")
        self.add_to_recordable_attributes(name="avg_angle", is_stat=True)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """Class scores [B, C] without the margin, for prediction."""
        return self.scale * super().get_logits(embeddings)

    def check_distance(self, distance: Any) -> None:
        unit = distances.kind(distance) == "cosine" and distance.normalize_embeddings
        if not unit and not is_a(distance, "CosineSimilarity"):
            raise ValueError(f"distance: ArcFaceLoss got {distance}, wanted CosineSimilarity(): it adds to an angle")

    def _collect(self, batch: Batch) -> None:
        super()._collect(batch)
        if self.collect_stats:  # the angle to the own centre, in degrees
            with torch.no_grad():
                cosine = batch.proxy_dots(self.columns(batch.embeddings)).clamp(-1, 1)
                self.avg_angle = math.degrees(cosine.acos().mean().item())

    def fused(self, batch: Batch) -> Value:
        target, others = self.softmax_stats(batch, "arcface", [math.radians(self.margin), self.scale])
        return self.weighted(softplus(others - target), batch)

    def dense(self, batch: Dense) -> Value:
        labels, m = batch.batch.known_labels(), math.radians(self.margin)
        cosine = self.scores(batch)
        c = cosine.gather(1, labels[:, None]).clamp(-1, 1)
        square = 1 - c * c
        sine = torch.where(square > 0, torch.where(square > 0, square, 1).sqrt(), 0)
        inside = c >= math.cos(math.pi - m)
        target = torch.where(inside, c * math.cos(m) - sine * math.sin(m), c - m * math.sin(m))
        logits = self.scale * cosine.scatter(1, labels[:, None], target)
        return self.weighted(cross_entropy(logits, labels, reduction="none"), batch.batch)
