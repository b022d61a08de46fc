"""What proxy losses share: learnable proxies named and shaped as in PML, columns that are classes, cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pydml import checks, ops
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense

Init = Callable[[Tensor], Any]
Regularizer = Callable[[Tensor], Tensor]


class ProxyCommon(Common, total=False):
    """Keyword arguments of every proxy loss."""

    weight_init_func: Init | None
    weight_regularizer: Regularizer | None
    weight_reg_weight: float


class ProxyLoss(MetricLoss):
    """Base of the proxy losses. Subclasses say what their parameter is called and how it is laid out."""

    takes_ref = False
    #: Name of the parameter in the state_dict, and whether it is [d, C·K] (True) or [C·K, d].
    parameter: ClassVar[str] = "proxies"
    transposed: ClassVar[bool] = False
    #: Can its classes be split over ranks?
    splits: ClassVar[bool] = True

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        centers: int = 1,
        /,
        weight_init_func: Init | None = None,
        weight_regularizer: Regularizer | None = None,
        weight_reg_weight: float = 1,
        **common: Unpack[Common],
    ) -> None:
        self._regularized = weight_regularizer is not None  # the reducer asks for the names of the sub-losses
        super().__init__(**common)
        self.num_classes = checks.integer("num_classes", num_classes, least=1)
        self.class_range = range(num_classes)  # whose proxies this process holds
        self.embedding_size = checks.integer("embedding_size", embedding_size, least=1)
        rows = num_classes * centers
        shape = (embedding_size, rows) if self.transposed else (rows, embedding_size)
        self.register_parameter(self.parameter, nn.Parameter(torch.empty(shape)))
        (weight_init_func or self.initialize)(getattr(self, self.parameter).data)
        self.weight_regularizer = weight_regularizer
        self.weight_reg_weight = checks.number("weight_reg_weight", weight_reg_weight)
        if weight_regularizer is not None and self.reduction == "none":
            raise ValueError("weight_regularizer: got one with reduction='none', wanted a reduction to a scalar")

    @staticmethod
    def initialize(w: Tensor) -> None:
        nn.init.normal_(w)

    def columns(self, like: Tensor) -> Tensor:
        """The proxies [C·K, d] in their own dtype, which may be another than that of the embeddings.

        In mixed precision they, and their gradient, must not be rounded to half. Only what is computed in fp64 and what
        is not do not mix.
        """
        w: Tensor = getattr(self, self.parameter)
        w = w.T if self.transposed else w
        return w if ops.compute_dtype(w) == ops.compute_dtype(like) else w.to(ops.compute_dtype(like))

    def unit_columns(self, like: Tensor) -> Tensor:
        """The normalised proxies [C·K, d] in the dtype of the computation."""
        return torch.nn.functional.normalize(self.columns(like).to(ops.compute_dtype(like)))

    def seen(self, like: Tensor) -> Tensor:
        """The same as the distance gets them."""
        return self.columns(like)

    def _batch(self, *arguments: Any) -> Batch:
        batch = super()._batch(*arguments)
        labels = batch.known_labels()
        if batch.embeddings.shape[1] != self.embedding_size:
            raise ValueError(
                f"embeddings: got width {batch.embeddings.shape[1]}, wanted embedding_size={self.embedding_size}"
            )
        proxies = getattr(self, self.parameter)
        if proxies.device != batch.embeddings.device:
            raise ValueError(
                f"embeddings: got a tensor on {batch.embeddings.device}, wanted {proxies.device}, where "
                f"{self.parameter} is; move the loss with .to(device)"
            )
        checks.within("labels", labels, self.num_classes, f"classes of num_classes={self.num_classes}")
        return batch

    def sub_loss_names(self) -> list[str]:
        return [*super().sub_loss_names(), *(["weight_reg_loss"] if self._regularized else [])]

    def additions(self, batch: Batch) -> dict[str, Tensor]:
        more = super().additions(batch)
        if self.weight_regularizer is not None:
            regular = self.weight_regularizer(self.columns(batch.embeddings.new_empty(0, dtype=batch.dtype)))
            more["weight_reg_loss"] = self.weight_reg_weight * regular
        return more

    def compared(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.embeddings, self.seen(batch.embeddings)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """What the distance gives for every embedding and every proxy [B, C]; a similarity: scores for prediction."""
        z = embeddings.to(ops.compute_dtype(embeddings))
        with ops.no_autocast(z.device):
            logits: Tensor = self.distance(z, self.seen(z).to(z.dtype))
        return logits

    def classes(self, like: Tensor) -> Tensor:
        """The labels of the columns."""
        return torch.arange(self.class_range.start, self.class_range.stop, device=like.device)

    def softmax_stats(self, batch: Batch, policy: str, params: list[float], **keywords: Any) -> tuple[Tensor, Tensor]:
        """The target's logit and the log-sum-exp of the others, of each row."""
        z = batch.embeddings
        stats = batch.proxy_stats(self.seen(z), self.classes(z), policy, params, **keywords)
        target, others = stats.unbind(1)
        return target, others

    def scores(self, batch: Dense) -> Tensor:
        """u of every row and every proxy [B, C·K]."""
        return batch.against(self.seen(batch.z).to(batch.z.dtype))

    def weighted(self, values: Tensor, batch: Batch, anchors_only: bool = False) -> Value:
        """Reduce one value a row, weighted by the tuple."""
        weights = batch.weights(anchors_only)
        return self.reduce(values if weights is None else values * weights)
