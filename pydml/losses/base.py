"""What all losses share: PML's call, checks, choice of backend, distances, reductions, regularisers.

A loss is a subclass with hyper-parameters, a textbook formula (``dense``) and the same formula on an engine's
statistics (``fused``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from pydml import checks
from pydml.backends import resolve
from pydml.losses.batch import Batch, Dense
from pydml.ops import no_autocast
from pydml.pml import joins


class Common(TypedDict, total=False):
    """Keyword arguments of every loss."""

    normalize_embeddings: bool
    distance: Any
    reduction: str
    reducer: Any
    embedding_regularizer: Callable[[Tensor], Tensor] | None
    embedding_reg_weight: float


#: PML's reducers by class name -> what we call them.
REDUCERS = {
    "MeanReducer": "mean",
    "SumReducer": "sum",
    "AvgNonZeroReducer": "nonzero",
    "PerAnchorReducer": "anchor",
    "DoNothingReducer": "none",
    "DivisorReducer": "divisor",
}


def _distance(distance: Any, allowed: tuple[str, ...], normalize: bool) -> tuple[str, bool]:
    """Name of the distance and whether rows are normalised, from a name or from one of PML's distance objects."""
    if isinstance(distance, str):
        return checks.choice("distance", distance, allowed), normalize
    kind, power = type(distance).__name__, getattr(distance, "power", 1)
    if kind in ("CosineSimilarity", "DotProductSimilarity") and power == 1:
        name = "cosine"
    elif kind == "LpDistance" and distance.p == 2 and power in (1, 2):
        name = "euclidean" if power == 1 else "squared"
    else:
        detail = "".join(f", {k}={getattr(distance, k)}" for k in ("p", "power") if hasattr(distance, k))
        raise ValueError(f"distance: got {kind}{detail}, wanted one of {', '.join(map(repr, allowed))} or PML's like")
    if name not in allowed:
        raise ValueError(f"distance: got {kind} ({name}), wanted one of {', '.join(map(repr, allowed))}")
    return name, bool(distance.normalize_embeddings) and normalize


@joins("losses.base_metric_loss_function", "BaseMetricLossFunction")
class MetricLoss(nn.Module):
    """Base of all losses."""

    #: Distances that the loss takes, the default first.
    distances: ClassVar[tuple[str, ...]] = ("cosine",)
    #: Does it average over anchors? Then ``reduction=`` takes mean, sum and none; else only its own mean.
    over_anchors: ClassVar[bool] = True
    #: What PML's reducers may ask for, the loss' own first.
    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none", "nonzero", "anchor")
    #: Does it take ``ref_emb``? Does it take ``indices_tuple``?
    takes_ref: ClassVar[bool] = True
    takes_tuple: ClassVar[bool] = True
    #: Must bit-identical rows have S = 1 to the last bit?
    exact_cosines: ClassVar[bool] = False
    #: For the tables: formula in one line, paper, and PML's name for it if PML has it.
    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    pml: ClassVar[str | None] = None
    epsilon: float | None = None

    def __init__(
        self,
        normalize_embeddings: bool = True,
        distance: Any = None,
        reduction: str = "mean",
        reducer: Any = None,
        embedding_regularizer: Callable[[Tensor], Tensor] | None = None,
        embedding_reg_weight: float = 1,
    ) -> None:
        nn.Module.__init__(self)  # PML's own __init__ would build distance and reducer modules that we do not use
        self.collect_stats = False
        normalize = checks.flag("normalize_embeddings", normalize_embeddings)
        self.distance, self.normalize_embeddings = _distance(
            self.distances[0] if distance is None else distance, self.distances, normalize
        )
        self.reduction = self._reduction(reduction, reducer)
        self.embedding_regularizer = embedding_regularizer
        self.embedding_reg_weight = checks.number("embedding_reg_weight", embedding_reg_weight)
        if embedding_regularizer is not None and self.reduction == "none":
            raise ValueError("embedding_regularizer: got one with reduction='none', wanted a reduction to a scalar")

    def _reduction(self, reduction: str, reducer: Any) -> str:
        own = self.reductions[0]
        options = ("mean", "sum", "none") if self.over_anchors else ("mean",)
        if reducer is None:
            return own if checks.choice("reduction", reduction, options) == "mean" else reduction
        if reduction != "mean":
            raise ValueError(f"reducer: got one beside reduction={reduction!r}, wanted only one of the two")
        name = type(reducer).__name__
        kind = REDUCERS.get(name)
        if kind == "anchor" and (
            type(reducer.reducer).__name__ != "MeanReducer" or reducer.aggregation_func.__name__ != "aggregation_func"
        ):
            kind = None
        if kind not in self.reductions:
            wanted = ", ".join(k for k, v in REDUCERS.items() if v in self.reductions)
            raise ValueError(f"reducer: {type(self).__name__} got {name}, wanted one of {wanted} with its defaults")
        return kind

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
        batch.backend = resolve(backend, embeddings.device)
        return self.evaluate(batch)

    def evaluate(self, batch: Batch) -> Tensor:
        """The loss of checked arguments, which may be those of one process or of many."""
        if 0 in batch.size:
            return self.reduce(batch.zeros())
        with no_autocast(batch.embeddings.device):
            loss = batch.nan(self.dense(Dense(batch))) if batch.backend == "dense" else self.fused(batch)
            if self.embedding_regularizer is not None:
                loss = loss + self.embedding_reg_weight * self.embedding_regularizer(batch.everything())
        return loss

    def _batch(self, embeddings: Any, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any) -> Batch:
        """Check the arguments of a call."""
        name = type(self).__name__
        z = checks.embeddings("embeddings", embeddings)
        symmetric = ref_emb is None or ref_emb is embeddings
        if ref_emb is None and ref_labels is not None:
            raise ValueError("ref_labels: got labels without ref_emb, wanted both or neither")
        if not symmetric:
            if not self.takes_ref:
                raise ValueError(f"ref_emb: {name} does not take a reference set")
            checks.embeddings("ref_emb", ref_emb, like=z)
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
        if self.distance == "cosine":
            return "cosine" if self.exact_cosines and self.normalize_embeddings else "dot"
        return self.distance

    def oriented(self, margin: float) -> float:
        """A margin on the scale of u: distances are negative there."""
        return margin if self.distance == "cosine" else -margin

    def reduce(self, values: Tensor, counted: Tensor | None = None) -> Tensor:
        """Reduce one value an anchor [B]; ``counted`` marks those that the loss' mean is over (default all)."""
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

    def dense(self, batch: Dense) -> Tensor:
        """The textbook formula on the whole matrix."""
        raise NotImplementedError

    def fused(self, batch: Batch) -> Tensor:
        """The same by an engine."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        names = [n for n in inspect.signature(type(self).__init__).parameters if n not in ("self", "common")]
        shown = [n for n in names if isinstance(getattr(self, n, None), (int, float, str)) or n == "epsilon"]
        shown += [n for n in ("distance", "normalize_embeddings", "reduction") if n not in shown]
        return ", ".join(f"{n}={getattr(self, n)!r}" for n in shown)
