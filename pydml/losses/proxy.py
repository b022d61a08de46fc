"""What proxy losses share: learnable proxies named and shaped as in PML, columns that are classes, cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss
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

    def __init__(self, num_classes: int, embedding_size: int, centers: int = 1, **common: Unpack[ProxyCommon]) -> None:
        init = common.pop("weight_init_func", None)
        self_regularizer = common.pop("weight_regularizer", None)
        weight = checks.number("weight_reg_weight", common.pop("weight_reg_weight", 1))
        super().__init__(**common)  # type: ignore[misc]
        if not self.normalize_embeddings:
            raise ValueError(f"normalize_embeddings: {type(self).__name__} got False, wanted True")
        self.num_classes = checks.integer("num_classes", num_classes, least=1)
        self.class_range = range(num_classes)  # whose proxies this process holds
        self.embedding_size = checks.integer("embedding_size", embedding_size, least=1)
        rows = num_classes * centers
        shape = (embedding_size, rows) if self.transposed else (rows, embedding_size)
        self.register_parameter(self.parameter, nn.Parameter(torch.empty(shape)))
        (init or self.initialize)(getattr(self, self.parameter).data)
        self.weight_regularizer, self.weight_reg_weight = self_regularizer, weight
        if self_regularizer is not None and self.reduction == "none":
            raise ValueError("weight_regularizer: got one with reduction='none', wanted a reduction to a scalar")

    @staticmethod
    def initialize(w: Tensor) -> None:
        nn.init.normal_(w)

    def columns(self, like: Tensor) -> Tensor:
        """The proxies [C·K, d] in the dtype of the embeddings."""
        w: Tensor = getattr(self, self.parameter)
        return (w.T if self.transposed else w).to(like.dtype)

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

    def evaluate(self, batch: Batch) -> Tensor:
        """See :meth:`MetricLoss.evaluate`; adds the weight regulariser."""
        loss = super().evaluate(batch)
        if self.weight_regularizer is not None:
            loss = loss + self.weight_reg_weight * self.weight_regularizer(self.columns(loss))
        return loss

    def classes(self, like: Tensor) -> Tensor:
        """The labels of the columns."""
        return torch.arange(self.class_range.start, self.class_range.stop, device=like.device)

    def softmax_stats(self, batch: Batch, policy: str, params: list[float], **keywords: Any) -> tuple[Tensor, Tensor]:
        """The target's logit and the log-sum-exp of the others, of each row."""
        z = batch.embeddings
        stats = batch.proxy_stats(self.columns(z), self.classes(z), policy, params, **keywords)
        target, others = stats.unbind(1)
        return target, others

    def cosines(self, batch: Dense) -> Tensor:
        """cos(x_i, w_c) [B, C·K]."""
        w = torch.nn.functional.normalize(self.columns(batch.z))
        return batch.x @ w.T

    def weighted(self, values: Tensor, batch: Batch, anchors_only: bool = False) -> Tensor:
        """Reduce one value a row, weighted by the tuple."""
        weights = batch.weights(anchors_only)
        return self.reduce(values if weights is None else values * weights)
