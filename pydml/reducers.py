"""Reducers under PML's names and with its interface: how a loss makes one number of its elements' losses.

A loss hands its reducer PML's dict: for each sub-loss its ``losses``, their ``indices`` and ``reduction_type``
(``element``, ``pos_pair``, ``neg_pair``, ``triplet`` or ``already_reduced``). The engines have the reducers of
``REDUCTIONS``; for others a loss over pairs or triplets lists them, as PML's does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pydml import checks
from pydml.distances import OTHER, known
from pydml.pml import joins
from pydml.records import WithRecords

__all__ = [
    "AvgNonZeroReducer",
    "BaseReducer",
    "ClassWeightedReducer",
    "DivisorReducer",
    "DoNothingReducer",
    "MeanReducer",
    "MultipleReducers",
    "PerAnchorReducer",
    "SumReducer",
    "ThresholdReducer",
]

#: What a loss hands its reducer: name of the sub-loss -> losses, indices, reduction_type and perhaps divisor.
Losses = dict[str, dict[str, Any]]


def elements(losses: Any, indices: Any, reduction_type: str, **more: Any) -> dict[str, Any]:
    """One sub-loss."""
    return {"losses": losses, "indices": indices, "reduction_type": reduction_type, **more}


@joins("reducers.base_reducer", "BaseReducer")
class BaseReducer(WithRecords):
    """Base of all reducers: subclasses define ``element_reduction`` and its like for pairs and triplets.

    Nothing to reduce is 0.

    Examples
    --------
    >>> class Largest(pydml.reducers.BaseReducer):
    ...     def element_reduction(self, losses, loss_indices, embeddings, labels):
    ...         return losses.max()
    >>> loss_fn = pydml.losses.MultiSimilarityLoss(reducer=Largest())
    >>> loss_fn(torch.eye(4), torch.tensor([0, 0, 1, 1])).shape
    torch.Size([])
    """

    def __init__(self, collect_stats: bool | None = None, **unknown: Any) -> None:
        checks.nothing_else(type(self), unknown)
        WithRecords.__init__(self, collect_stats)
        self.add_to_recordable_attributes(name="losses_size", is_stat=True)

    def forward(self, loss_dict: Losses, embeddings: Tensor, labels: Tensor | None) -> Any:
        """The value of one sub-loss."""
        self.reset_stats()
        if len(loss_dict) != 1:
            raise ValueError(f"loss_dict: got {len(loss_dict)} sub-losses, wanted 1; MultipleReducers takes more")
        (info,) = loss_dict.values()
        losses, indices, reduction_type, keywords = self.unpack_loss_info(info)
        return self.reduce_the_loss(losses, indices, reduction_type, keywords, embeddings, labels)

    def unpack_loss_info(self, loss_info: dict[str, Any]) -> tuple[Any, Any, str, dict[str, Any]]:
        """Losses, indices, reduction type, and further arguments of the reduction."""
        return loss_info["losses"], loss_info["indices"], loss_info["reduction_type"], {}

    def reduce_the_loss(
        self,
        losses: Any,
        loss_indices: Any,
        reduction_type: str,
        kwargs: dict[str, Any],
        embeddings: Tensor,
        labels: Tensor | None,
    ) -> Any:
        """Check the sizes, then the reduction of this type."""
        if self.collect_stats:
            self.losses_size = len(losses) if isinstance(losses, Tensor) and losses.ndim else 1
        if self.input_is_zero_loss(losses):
            return self.zero_loss(embeddings)
        self.assert_sizes(losses, loss_indices, reduction_type)
        return self.get_reduction_func(reduction_type)(losses, loss_indices, embeddings, labels, **kwargs)

    def get_reduction_func(self, reduction_type: str) -> Callable[..., Any]:
        """The method of a reduction type."""
        method: Callable[..., Any] = getattr(self, f"{reduction_type}_reduction")
        return method

    def already_reduced_reduction(self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any) -> Any:
        """One number, as it is."""
        if losses.numel() != 1:
            raise ValueError(f"losses: got {losses.numel()} of type already_reduced, wanted 1")
        return losses

    def _undefined(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no reduction of this type; define it in a subclass")

    element_reduction = pos_pair_reduction = neg_pair_reduction = triplet_reduction = _undefined

    def assert_sizes(self, losses: Any, loss_indices: Any, reduction_type: str) -> None:
        """One index an element, two a pair, three a triplet."""
        number = {"element": 1, "pos_pair": 2, "neg_pair": 2, "triplet": 3}.get(reduction_type)
        if number is None:
            return
        parts = [loss_indices] if number == 1 else loss_indices
        lengths = [len(part) for part in parts]
        if lengths != [len(losses)] * number:
            raise ValueError(f"loss_indices: got lengths {lengths}, wanted {number} of {len(losses)}: {reduction_type}")

    def zero_loss(self, embeddings: Tensor) -> Tensor:
        """0 that still has a graph."""
        return (embeddings * 0).sum()

    def input_is_zero_loss(self, losses: Any) -> bool:
        """Is there nothing to reduce?"""
        return not losses.numel() if isinstance(losses, Tensor) else losses == 0

    def extra_repr(self) -> str:
        settings = [name for name in self.__dict__.get("_record_these", [])]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in settings)


@joins("reducers.mean_reducer", "MeanReducer")
class MeanReducer(BaseReducer):
    """The mean."""

    def element_reduction(self, losses: Tensor, *_: Any) -> Tensor:
        return losses.mean()

    def pos_pair_reduction(self, losses: Tensor, *arguments: Any) -> Any:
        return self.element_reduction(losses, *arguments)

    def neg_pair_reduction(self, losses: Tensor, *arguments: Any) -> Any:
        return self.element_reduction(losses, *arguments)

    def triplet_reduction(self, losses: Tensor, *arguments: Any) -> Any:
        return self.element_reduction(losses, *arguments)


@joins("reducers.sum_reducer", "SumReducer")
class SumReducer(MeanReducer):
    """The sum."""

    def element_reduction(self, losses: Tensor, *_: Any) -> Tensor:
        return losses.sum()


@joins("reducers.threshold_reducer", "ThresholdReducer")
class ThresholdReducer(MeanReducer):
    """The mean of those above ``low`` and below ``high``; 0 if there are none."""

    def __init__(self, low: float | None = None, high: float | None = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        if low is None and high is None:
            raise ValueError("low, high: got None for both, wanted a number for one of them at least")
        self.low = None if low is None else checks.number("low", low)
        self.high = None if high is None else checks.number("high", high)
        self.add_to_recordable_attributes(list_of_names=["low", "high"])
        self.add_to_recordable_attributes(
            list_of_names=["num_past_filter", "num_above_low", "num_below_high"], is_stat=True
        )

    def element_reduction(self, losses: Tensor, loss_indices: Any, embeddings: Tensor, *_: Any) -> Tensor:
        above = torch.ones_like(losses, dtype=torch.bool) if self.low is None else losses > self.low
        below = torch.ones_like(losses, dtype=torch.bool) if self.high is None else losses < self.high
        kept = losses[above & below]
        if self.collect_stats:
            self.num_past_filter = len(kept)
            self.num_above_low = 0 if self.low is None else int(above.sum())
            self.num_below_high = 0 if self.high is None else int(below.sum())
        return kept.mean() if len(kept) else self.zero_loss(embeddings)


@joins("reducers.avg_non_zero_reducer", "AvgNonZeroReducer")
class AvgNonZeroReducer(ThresholdReducer):
    """The mean of those above 0; 0 if there are none."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(low=0, **keywords)


@joins("reducers.class_weighted_reducer", "ClassWeightedReducer")
class ClassWeightedReducer(MeanReducer):
    """The mean after each loss was multiplied by the weight of its anchor's class; ``weights`` [classes]."""

    def __init__(self, weights: Tensor, **keywords: Any) -> None:
        super().__init__(**keywords)
        if not isinstance(weights, Tensor) or weights.ndim != 1:
            raise TypeError(f"weights: got {checks.shown(weights)}, wanted a tensor [classes]")
        self.weights = weights

    def element_reduction(self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        if labels is None:
            raise ValueError("labels: got None, wanted a tensor of integers: ClassWeightedReducer weighs classes")
        anchors = loss_indices if isinstance(loss_indices, Tensor) else loss_indices[0]
        checks.within("labels", labels, len(self.weights), f"classes of the {len(self.weights)} weights")
        return (losses * self.weights.to(losses.device, losses.dtype)[labels[anchors]]).mean()


@joins("reducers.divisor_reducer", "DivisorReducer")
class DivisorReducer(MeanReducer):
    """The sum over what the loss says to divide by (MarginLoss, ProxyAnchorLoss, SparseCentersRegularizer)."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.add_to_recordable_attributes(name="divisor", is_stat=True)

    def unpack_loss_info(self, loss_info: dict[str, Any]) -> tuple[Any, Any, str, dict[str, Any]]:
        *info, keywords = super().unpack_loss_info(loss_info)
        if loss_info["reduction_type"] != "already_reduced":
            if "divisor" not in loss_info:
                raise ValueError("reducer: got DivisorReducer with a loss that names no divisor, wanted another")
            keywords = {"divisor": loss_info["divisor"]}
            if self.collect_stats:
                self.divisor = float(loss_info["divisor"])
        return *info, keywords

    def element_reduction(
        self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Any, divisor: Any = 1
    ) -> Tensor:
        return losses.sum() / divisor if divisor != 0 else self.zero_loss(embeddings)

    def pos_pair_reduction(self, *arguments: Any, **keywords: Any) -> Any:
        return self.element_reduction(*arguments, **keywords)

    neg_pair_reduction = triplet_reduction = pos_pair_reduction


@joins("reducers.do_nothing_reducer", "DoNothingReducer")
class DoNothingReducer(BaseReducer):
    """The dict of sub-losses, as it is."""

    def forward(self, loss_dict: Losses, embeddings: Tensor, labels: Tensor | None) -> Any:
        return loss_dict


class RowReducer(DoNothingReducer):
    """What ``reduction="none"`` means: one value an anchor."""


@joins("reducers.multiple_reducers", "MultipleReducers")
class MultipleReducers(BaseReducer):
    """A reducer for each sub-loss by name, ``default_reducer`` for the others; then the sum."""

    def __init__(self, reducers: Mapping[str, Any], default_reducer: Any = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.reducers = nn.ModuleDict(dict(reducers))
        self.default_reducer = MeanReducer() if default_reducer is None else default_reducer

    def of(self, name: str) -> Any:
        """The reducer of a sub-loss."""
        return dict(self.reducers.items()).get(name, self.default_reducer)

    def forward(self, loss_dict: Losses, embeddings: Tensor, labels: Tensor | None) -> Any:
        self.reset_stats()
        values = [self.of(name)({name: info}, embeddings, labels).reshape(()) for name, info in loss_dict.items()]
        return self.sub_loss_reduction(torch.stack(values), embeddings, labels)

    def sub_loss_reduction(self, sub_losses: Tensor, embeddings: Any = None, labels: Any = None) -> Any:
        """One number of the sub-losses' numbers."""
        return sub_losses.sum()


def mean_of_pairs(x: Tensor, num_per_row: Tensor) -> Tensor:
    """Each anchor's mean over its pairs, 0 where it has none."""
    return x.sum(1) / num_per_row.clamp_min(1)


@joins("reducers.per_anchor_reducer", "PerAnchorReducer")
class PerAnchorReducer(BaseReducer):
    """First each anchor's pairs by ``aggregation_func``, then the anchors by ``reducer``.

    ``aggregation_func(x, num_per_row)`` gets the losses [anchors, columns], 0 where there is no pair, and how many
    each anchor has. A pair that is listed twice counts once.
    """

    def __init__(
        self,
        reducer: Any = None,
        aggregation_func: Callable[[Tensor, Tensor], Tensor] = mean_of_pairs,
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        self.reducer = MeanReducer() if reducer is None else reducer
        self.aggregation_func = aggregation_func

    def element_reduction(self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Any) -> Any:
        return self.reducer({"loss": elements(losses, loss_indices, "element")}, embeddings, labels)

    def pos_pair_reduction(self, losses: Tensor, loss_indices: Any, embeddings: Tensor, labels: Any) -> Any:
        anchors, others = loss_indices
        cols = max(len(embeddings), int(others.max()) + 1)
        place, first = torch.unique(anchors * cols + others, return_inverse=True)
        at = torch.empty_like(place).scatter_(0, first, torch.arange(len(first), device=place.device))
        a, j = anchors[at], others[at]
        x = losses.new_zeros(len(embeddings), cols).index_put((a, j), losses[at])
        values = self.aggregation_func(x, torch.bincount(a, minlength=len(embeddings)))
        return self.element_reduction(values, torch.arange(len(values), device=a.device), embeddings, labels)

    neg_pair_reduction = pos_pair_reduction

    def triplet_reduction(self, *_: Any) -> Any:
        raise NotImplementedError("reducer: got PerAnchorReducer with triplets, wanted another: it reduces pairs")


#: Reducers by class name -> what the engines call them.
REDUCTIONS = {
    "MeanReducer": "mean",
    "SumReducer": "sum",
    "AvgNonZeroReducer": "nonzero",
    "RowReducer": "none",
    "DivisorReducer": "divisor",
}


def reduction(reducer: Any, sub_losses: tuple[str, ...] = ("loss",)) -> str:
    """What the engines call a reducer of these sub-losses: ``other`` if it is none of theirs or collects statistics."""
    name = known(reducer)
    if not name or getattr(reducer, "collect_stats", False):
        return OTHER
    if name == "MultipleReducers":
        given = dict(reducer.reducers.items())
        kinds = {reduction(given.get(part, reducer.default_reducer)) for part in sub_losses}
        return kinds.pop() if len(kinds) == 1 else OTHER
    if name == "PerAnchorReducer":
        function = reducer.aggregation_func
        own = getattr(function, "__module__", "") == type(reducer).__module__  # the default of its class
        return "anchor" if own and reduction(reducer.reducer) == "mean" else OTHER
    return REDUCTIONS.get(name, OTHER)


def is_a(thing: object, *names: str) -> bool:
    """Is it of one of these classes, ours or PML's, or of a subclass?"""
    return any(known_class.__name__ in names for known_class in type(thing).__mro__)
