"""What all losses share: PML's call, checks, choice of backend, distances, reductions, regularisers.

A loss is a subclass with hyper-parameters, a textbook formula (``dense``) and the same formula on an engine's
statistics (``fused``).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from pydml import checks, distances, reducers
from pydml.distances import OTHER
from pydml.losses.batch import Batch, Dense
from pydml.ops import no_autocast
from pydml.pml import joins
from pydml.records import WithRecords
from pydml.reducers import Losses, elements

#: What ``dense`` and ``fused`` give: the loss, or its elements for a reducer that the engines do not have.
Value = Tensor | Losses


class Common(TypedDict, total=False):
    """Keyword arguments of every loss."""

    normalize_embeddings: bool
    distance: Any
    reduction: str
    reducer: Any
    embedding_regularizer: Callable[[Tensor], Tensor] | None
    embedding_reg_weight: float
    collect_stats: bool | None


@joins("losses.base_metric_loss_function", "BaseMetricLossFunction")
class MetricLoss(WithRecords):
    """Base of all losses.

    Attributes
    ----------
    distance, reducer
        The objects, as in PML. Another one may be assigned.
    kind, reduction
        What the engines call them, ``"other"`` for those that they do not have.
    """

    #: Distances that the engines have for the loss, the default first.
    distances: ClassVar[tuple[str, ...]] = ("cosine",)
    #: Does it average over anchors? Then ``reduction=`` takes mean, sum and none; else only its own mean.
    over_anchors: ClassVar[bool] = True
    #: Reductions that the engines have for the loss, its own first.
    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none", "nonzero", "anchor")
    #: Are its elements pairs or triplets? Then a reducer that the engines do not have needs them listed.
    lists: ClassVar[bool] = False
    #: The parts of PML's dict.
    sub_losses: ClassVar[tuple[str, ...]] = ("loss",)
    #: Does it take ``ref_emb``? Does it take ``indices_tuple``?
    takes_ref: ClassVar[bool] = True
    takes_tuple: ClassVar[bool] = True
    #: In a memory: is an embedding compared with its own copy there, too?
    sees_copies: ClassVar[bool] = False
    #: Must bit-identical rows have S = 1 to the last bit?
    exact_cosines: ClassVar[bool] = False
    #: For the tables: formula in one line, paper, and PML's name for it if PML has it.
    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    pml: ClassVar[str | None] = None
    epsilon: float | None = None
    triplets_per_anchor: int | str = "all"
    kind: str
    reduction: str
    normalize_embeddings: bool

    def __init__(
        self,
        normalize_embeddings: bool = True,
        distance: Any = None,
        reduction: str = "mean",
        reducer: Any = None,
        embedding_regularizer: Callable[[Tensor], Tensor] | None = None,
        embedding_reg_weight: float = 1,
        collect_stats: bool | None = None,
        **unknown: Any,
    ) -> None:
        checks.nothing_else(type(self), unknown)
        WithRecords.__init__(self, collect_stats)  # PML's own __init__ is not ours
        self.embedding_regularizer = embedding_regularizer
        self.embedding_reg_weight = checks.number("embedding_reg_weight", embedding_reg_weight)
        self.distance = self._distance(distance, checks.flag("normalize_embeddings", normalize_embeddings))
        self.reducer = self._reducer(reduction, reducer)
        if embedding_regularizer is not None and self.reduction == "none":
            raise ValueError("embedding_regularizer: got one with reduction='none', wanted a reduction to a scalar")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "distance":
            self.kind = distances.kind(value)
            self.normalize_embeddings = bool(getattr(value, "normalize_embeddings", True))
        elif name == "reducer":
            self.reduction = reducers.reduction(value, self.sub_losses)

    def get_default_distance(self) -> Any:
        """The distance where none is given."""
        return distances.named(self.distances[0])

    def get_default_reducer(self) -> Any:
        """The reducer where none is given."""
        return DEFAULTS[self.reductions[0]]()

    def _distance(self, distance: Any, normalize: bool) -> Any:
        """The distance object of the constructor's arguments."""
        if distance is None and normalize:
            return self.get_default_distance()
        if distance is None or isinstance(distance, str):
            name = self.distances[0] if distance is None else checks.choice("distance", distance, self.distances)
            return distances.named(name, normalize)
        if not callable(distance) or not hasattr(distance, "is_inverted") or reducers.is_a(distance, "BatchedDistance"):
            wanted = ", ".join(map(repr, self.distances))
            raise ValueError(f"distance: got {_called(distance)}, wanted one of {wanted} or a distance object")
        self.check_distance(distance)
        if getattr(distance, "normalize_embeddings", False) and not normalize:
            distance = copy.copy(distance)
            distance.normalize_embeddings = False
        return distance

    def check_distance(self, distance: Any) -> None:
        """Refuse a distance object that means nothing to this loss."""
        if self.pml is None and distances.kind(distance) not in self.distances:
            wanted = ", ".join(map(repr, self.distances))
            raise ValueError(f"distance: {type(self).__name__} got {_called(distance)}, wanted {wanted} or its like")

    def _reducer(self, reduction: str, reducer: Any) -> Any:
        """The reducer object of the constructor's arguments: one for each sub-loss, as in PML."""
        if reducer is None:
            checks.choice("reduction", reduction, ("mean", "sum", "none") if self.over_anchors else ("mean",))
            make: Callable[[], Any] = self.get_default_reducer if reduction == "mean" else DEFAULTS[reduction]
        elif reduction != "mean":
            raise ValueError(f"reducer: got one beside reduction={reduction!r}, wanted only one of the two")
        elif not callable(reducer):
            raise TypeError(f"reducer: got {checks.shown(reducer)}, wanted a reducer, such as MeanReducer()")
        else:
            kind = reducers.reduction(reducer, self.sub_losses)
            if kind not in self.reductions and (kind == "divisor" or (self.pml is None and not self.over_anchors)):
                wanted = ", ".join(name for name, known in reducers.REDUCTIONS.items() if known in self.reductions)
                raise ValueError(f"reducer: {type(self).__name__} got {type(reducer).__name__}, wanted one of {wanted}")
            if reducers.is_a(reducer, "MultipleReducers", "DoNothingReducer"):
                return reducer
            make = functools.partial(copy.deepcopy, reducer)
        names = self.sub_loss_names()
        return make() if len(names) == 1 else reducers.MultipleReducers({name: make() for name in names})

    def sub_loss_names(self) -> list[str]:
        """The parts of PML's dict, regularisers among them."""
        return [*self.sub_losses, *([] if self.embedding_regularizer is None else ["embedding_reg_loss"])]

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> Tensor:
        """The loss of a batch.

        Parameters
        ----------
        embeddings
            [B, d], raw: normalisation is part of the loss.
        labels
            [B] of any integer dtype.
        indices_tuple
            What a miner gives: (a, p, n) or (a1, p, a2, n).
        ref_emb, ref_labels
            Columns of the matrix where they are not the batch itself.
        backend
            One call's own choice; see :func:`pydml.use_backend`.
        """
        batch = self._batch(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        batch.choose(backend)
        return self.evaluate(batch)

    @property
    def fuses(self) -> bool:
        """Have the engines this distance and this reducer? If not, the whole matrix is computed, with autograd."""
        return self.kind in self.distances and not (self.lists and self.listing)

    @property
    def listing(self) -> bool:
        """Is the reducer one that the engines do not have? Then it gets the losses of all elements."""
        return self.reduction not in self.reductions

    def evaluate(self, batch: Batch) -> Tensor:
        """The loss of checked arguments, which may be those of one process or of many."""
        dense = batch.backend == "dense" or not self.fuses
        with no_autocast(batch.embeddings.device):
            if 0 in batch.size:
                return self._finished(self.reduce(batch.zeros()), batch)
            if self.triplets_per_anchor != "all":
                batch.draw_triplets(int(self.triplets_per_anchor))
            self._collect(batch)
            if not dense:
                return self._finished(self.fused(batch), batch)
            value = self.dense(Dense(batch, self.distance if self.kind == OTHER else None))
            return self._finished(batch.nan(value) if isinstance(value, Tensor) else value, batch)

    def additions(self, batch: Batch) -> dict[str, Tensor]:
        """What is added to the loss: regularisers, by PML's names."""
        if self.embedding_regularizer is None or 0 in batch.size:
            return {}
        return {"embedding_reg_loss": self.embedding_reg_weight * self.embedding_regularizer(batch.everything())}

    def _finished(self, value: Value, batch: Batch) -> Tensor:
        """Add what is to be added, and call the reducer if it has not been part of the loss."""
        additions = self.additions(batch)
        if isinstance(value, Tensor):
            for more in additions.values():
                value = value + more
            return value
        for part in value.values():
            if isinstance(part["losses"], Tensor) and not part["losses"].numel():
                part["losses"] = 0  # as PML's reducers know it
        parts = value | {name: elements(more, None, "already_reduced") for name, more in additions.items()}
        embeddings = batch.everything().to(batch.dtype)
        reduced: Tensor = self.reducer(parts, embeddings, batch.labels)  # DoNothingReducer: the dict
        return batch.nan(reduced) if isinstance(reduced, Tensor) else reduced

    def compared(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Rows and columns, as the distance object would get them."""
        return batch.embeddings, batch.embeddings if batch.ref is None else batch.ref

    def _collect(self, batch: Batch) -> None:
        """The statistics that the distance object would have collected, had it been called."""
        self.reset_stats()
        if self.kind != OTHER and getattr(self.distance, "collect_stats", False):
            rows, cols = self.compared(batch)
            normal = [self.distance.maybe_normalize(x) for x in (rows, cols)]
            self.distance.set_default_stats(rows, cols, *normal)

    def _batch(self, embeddings: Any, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any) -> Batch:
        """Check the arguments of a call."""
        name = type(self).__name__
        vectors = self.kind != OTHER  # the rows of another distance are its own affair
        z = checks.embeddings("embeddings", embeddings, vectors=vectors)
        symmetric = ref_emb is None or ref_emb is embeddings
        if ref_emb is None and ref_labels is not None:
            raise ValueError("ref_labels: got labels without ref_emb, wanted both or neither")
        if not symmetric:
            if not self.takes_ref:
                raise ValueError(f"ref_emb: {name} does not take a reference set")
            checks.embeddings("ref_emb", ref_emb, like=z, vectors=vectors)
        cols = z if symmetric else ref_emb
        pairs = None
        if indices_tuple is not None:
            if not self.takes_tuple or self.epsilon is not None:
                raise ValueError(f"indices_tuple: {name} selects its pairs by itself and takes no tuple")
            pairs = checks.indices_tuple(indices_tuple, len(z), len(cols), z.device)
        if labels is None and pairs is None:
            raise ValueError("labels: got None, wanted a tensor of integers (or an indices_tuple)")
        y = None if labels is None else checks.labels("labels", labels, z)
        ref_y = y
        if symmetric and ref_labels is not None:
            checks.labels_again("ref_labels", ref_labels, z, y)
        if not symmetric:
            if ref_labels is None and labels is not None:
                raise ValueError("ref_labels: got None beside ref_emb, wanted the labels of ref_emb")
            ref_y = None if ref_labels is None else checks.labels("ref_labels", ref_labels, ref_emb)
        return Batch(z, y, None if symmetric else ref_emb, ref_y, pairs, self.view, self.normalize_embeddings)

    @property
    def view(self) -> str:
        """How the engines see a pair: what the oriented similarity u is."""
        if self.kind == "cosine":
            return "cosine" if self.exact_cosines and self.normalize_embeddings else "dot"
        return self.kind

    def oriented(self, margin: float) -> float:
        """A margin on the scale of u: distances are negative there."""
        return margin if self.distance.is_inverted else -margin

    def reduce(self, values: Tensor, counted: Tensor | None = None) -> Value:
        """Reduce one value an anchor [B]; ``counted`` marks those that the loss' mean is over (default all)."""
        if self.listing:
            rows = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
            anchors = rows.nonzero()[:, 0]
            return {self.sub_losses[0]: elements(values[anchors], anchors, "element")}
        if counted is not None:
            values = torch.where(counted, values, 0)
        if self.reduction == "none":
            return values
        if self.reduction == "sum":
            return values.sum()
        if self.reduction == "nonzero":
            counted = values > 0
        number = len(values) if counted is None else counted.sum()
        return values.sum() / (max(number, 1) if isinstance(number, int) else number.clamp_min(1))

    def dense(self, batch: Dense) -> Value:
        """The textbook formula on the whole matrix."""
        raise NotImplementedError

    def fused(self, batch: Batch) -> Value:
        """The same by an engine."""
        raise NotImplementedError

    @property
    def _settings(self) -> list[str]:
        names = [n for n in inspect.signature(type(self).__init__).parameters if n not in ("self", "common")]
        return [n for n in names if hasattr(self, n)]

    @property
    def _record_these(self) -> list[str]:
        """What PML's loggers show: the numbers among the settings, and what was added by hand."""
        numbers = [n for n in self._settings if isinstance(getattr(self, n), (int, float, Tensor))]
        numbers = [n for n in numbers if not isinstance(getattr(self, n), bool)]
        numbers += ["embedding_reg_weight"] if self.embedding_regularizer is not None else []
        return numbers + [n for n in self.__dict__.get("_record_these", []) if n not in numbers]

    def extra_repr(self) -> str:
        shown = {n: getattr(self, n) for n in self._settings}
        shown = {n: v for n, v in shown.items() if isinstance(v, (int, float, str)) or n == "epsilon"}
        shown["distance"] = self.distance if self.kind == OTHER else self.kind
        shown["normalize_embeddings"] = self.normalize_embeddings
        shown["reduction"] = self.reducer if self.listing else self.reduction
        return ", ".join(f"{n}={v!r}" for n, v in shown.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


#: What the engines call a reduction -> its reducer.
DEFAULTS: dict[str, Callable[[], Any]] = {
    "mean": reducers.MeanReducer,
    "sum": reducers.SumReducer,
    "none": reducers.RowReducer,
    "nonzero": reducers.AvgNonZeroReducer,
    "divisor": reducers.DivisorReducer,
}


def triplet_number(value: Any) -> int | str:
    """Check ``triplets_per_anchor``."""
    return "all" if isinstance(value, str) and value == "all" else checks.integer("triplets_per_anchor", value, least=1)


def _called(distance: Any) -> str:
    """A distance object by its class and what it measures."""
    detail = "".join(f", {k}={getattr(distance, k)}" for k in ("p", "power") if hasattr(distance, k))
    return f"{type(distance).__name__}{detail}"
