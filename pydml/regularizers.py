"""Regularisers under PML's names: ``embedding_regularizer=`` and ``weight_regularizer=`` of the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydml import checks
from pydml.distances import BaseDistance, CosineSimilarity, LpDistance
from pydml.pml import joins
from pydml.records import WithRecords
from pydml.reducers import BaseReducer, DivisorReducer, Losses, MeanReducer, elements, is_a

__all__ = [
    "BaseRegularizer",
    "CenterInvariantRegularizer",
    "LpRegularizer",
    "RegularFaceRegularizer",
    "SparseCentersRegularizer",
    "ZeroMeanRegularizer",
]


@joins("regularizers.base_regularizer", "BaseRegularizer")
class BaseRegularizer(WithRecords):
    """Base of all regularisers: subclasses define ``compute_loss`` of rows [N, d], embeddings or proxies."""

    def __init__(
        self, reducer: Any = None, distance: Any = None, collect_stats: bool | None = None, **unknown: Any
    ) -> None:
        checks.nothing_else(type(self), unknown)
        WithRecords.__init__(self, collect_stats)
        self.distance = self.get_default_distance() if distance is None else distance
        self.reducer = self.get_default_reducer() if reducer is None else reducer

    def get_default_distance(self) -> BaseDistance:
        """The distance where none is given."""
        return LpDistance()

    def get_default_reducer(self) -> BaseReducer:
        """The reducer where none is given."""
        return MeanReducer()

    def compute_loss(self, x: Tensor) -> Losses:
        """What the reducer gets."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        """The regulariser of rows [N, d]."""
        self.reset_stats()
        return self.reducer(self.compute_loss(x), x, torch.arange(len(x), device=x.device))

    def _wants(self, ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(f"distance: {type(self).__name__} got {checks.shown(self.distance)}, wanted {what}")


def each(losses: Tensor, **more: Any) -> Losses:
    """One loss an element, in their order."""
    return {"loss": elements(losses, torch.arange(len(losses), device=losses.device), "element", **more)}


@joins("regularizers.lp_regularizer", "LpRegularizer")
class LpRegularizer(BaseRegularizer):
    """‖x‖_p^power."""

    def __init__(self, p: float = 2, power: float = 1, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.p = checks.number("p", p, least=0)
        self.power = checks.number("power", power)
        self.add_to_recordable_attributes(list_of_names=["p", "power"])

    def compute_loss(self, x: Tensor) -> Losses:
        norms = torch.linalg.vector_norm(x, ord=self.p, dim=1)
        return each(norms if self.power == 1 else norms**self.power)


@joins("regularizers.zero_mean_regularizer", "ZeroMeanRegularizer")
class ZeroMeanRegularizer(BaseRegularizer):
    """|Σ_k x_k|."""

    def compute_loss(self, x: Tensor) -> Losses:
        return each(x.sum(1).abs())


@joins("regularizers.center_invariant_regularizer", "CenterInvariantRegularizer")
class CenterInvariantRegularizer(BaseRegularizer):
    """¼(‖w‖² - mean ‖w‖²)², Wu et al. 2017: proxies of one length."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        d = self.distance
        plain = is_a(d, "LpDistance") and d.power == 1 and not d.normalize_embeddings
        self._wants(plain, "LpDistance(normalize_embeddings=False)")

    def get_default_distance(self) -> BaseDistance:
        return LpDistance(normalize_embeddings=False)

    def compute_loss(self, x: Tensor) -> Losses:
        squares = self.distance.get_norm(x) ** 2
        return each((squares - squares.mean()) ** 2 / 4)


@joins("regularizers.regular_face_regularizer", "RegularFaceRegularizer")
class RegularFaceRegularizer(BaseRegularizer):
    """The similarity of each proxy and the one most like it, Zhao et al. 2019."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._wants(self.distance.is_inverted, "a similarity, such as CosineSimilarity()")

    def get_default_distance(self) -> BaseDistance:
        return CosineSimilarity()

    def compute_loss(self, x: Tensor) -> Losses:
        s = self.distance(x)
        nearest = s.detach().clone().fill_diagonal_(-torch.inf).argmax(1)
        return each(s.gather(1, nearest[:, None])[:, 0])


@joins("regularizers.sparse_centers_regularizer", "SparseCentersRegularizer")
class SparseCentersRegularizer(BaseRegularizer):
    """Σ √(2-2s) over the pairs of centres of one class, over twice their number: SoftTriple's, Qian et al. 2019.

    Only products of centres of one class are computed, unless statistics are asked for.
    """

    def __init__(self, num_classes: int, centers_per_class: int, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.num_classes = checks.integer("num_classes", num_classes, least=1)
        self.centers_per_class = checks.integer("centers_per_class", centers_per_class, least=2)
        self._wants(is_a(self.distance, "CosineSimilarity"), "CosineSimilarity()")
        self.add_to_recordable_attributes(list_of_names=["num_classes", "centers_per_class"])
        self.add_to_recordable_attributes(
            list_of_names=["same_class_center_sim", "diff_class_center_sim"], is_stat=True
        )

    def get_default_distance(self) -> BaseDistance:
        return CosineSimilarity()

    def get_default_reducer(self) -> BaseReducer:
        return DivisorReducer()

    def compute_loss(self, x: Tensor) -> Losses:
        classes, k = self.num_classes, self.centers_per_class
        if len(x) != classes * k:
            raise ValueError(f"x: got {len(x)} rows, wanted num_classes·centers_per_class = {classes * k}")
        w = self.distance.normalize(x).unflatten(0, (classes, k))
        i, j = torch.triu_indices(k, k, 1, device=x.device).unbind()
        s = ((w @ w.mT) ** self.distance.power)[:, i, j].flatten()
        if self.collect_stats:
            with torch.no_grad():
                owner = torch.arange(len(x), device=x.device) // k
                self.same_class_center_sim = s.mean().item()
                self.diff_class_center_sim = self.distance(x)[owner[:, None] != owner].mean().item()
        # the smallest number of the dtype keeps the gradient finite where two centres are one
        roots = torch.sqrt(2 + torch.finfo(x.dtype).tiny - (2 * s).clamp_max(2))
        return each(roots, divisor=2 * len(s))
