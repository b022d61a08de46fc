"""The ops, each declared once: a dataclass of its arguments and a tuple of its results, with their shapes.

From a declaration come the op's schema and that of its backward, the fakes, the autograd formula and the checks of
direct calls (:mod:`pydml.ops`), and an instance of it is what a backend's kernel receives: arguments are read by name.
An argument is a field whose annotation holds its kind (:mod:`pydml.arguments`); the letters in shapes stand for sizes:
R rows, C columns, N columns of the matrix (C, or one for each pool), d dimensions, K statistics of the policy, L listed
pairs (P positive, Q negative), A anchors, S bytes or T tiles that the forward pass keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from pydml.arguments import (
    INT64,
    MOST_NODES,
    MOST_PAIRS,
    MOST_ROWS,
    VIEWS,
    Argument,
    Array,
    Backend,
    Checked,
    Choice,
    ColumnLabels,
    Columns,
    Count,
    Flag,
    Number,
    Params,
    Policy,
    Rows,
    Seed,
    Selves,
)
from pydml.backends import lacks, saved_size
from pydml.checks import FLOATS
from pydml.policy import POLICIES

BACKEND = Backend(name="backend")

RowsOf = Annotated[Tensor, Rows(("R", "d"), FLOATS)]
ColsOf = Annotated[Tensor | None, Columns(("C", "d"), FLOATS)]
View = Annotated[str, Choice(VIEWS)]
Bool = Annotated[bool, Flag()]
Float = Annotated[float, Number()]
PolicyName = Annotated[str, Policy(POLICIES)]
PolicyParams = Annotated[Sequence[float], Params()]
RowField = Annotated[Tensor | None, Array(("R",), FLOATS)]
#: The column that each row itself is, where rows are some of the columns; -1: none of these. No pair is made with it.
SelfColumns = Annotated[Tensor | None, Selves(("R",), INT64, below="N", least=-1)]
#: Results: row by row, in the dtype of the computation, or places.
PerRow = Annotated[Tensor, Array(("R",))]
Places = Annotated[Tensor, Array(("R",), INT64)]


class Call:
    """The arguments of one call. What they must be together is checked by :meth:`check`."""

    #: The op's name, and a named tuple of its results.
    op: ClassVar[str]
    Out: ClassVar[Any]
    #: Results whose gradients flow to the two ``sides``; none: the op is not differentiable.
    grads: ClassVar[tuple[str, ...]] = ()
    #: Results that the backward wants to see again.
    kept: ClassVar[tuple[str, ...]] = ()
    #: The arguments that have gradients, two or more; all tensors are where the first one is.
    sides: ClassVar[tuple[str, ...]] = ("rows", "cols")
    #: Sizes that the backend decides.
    decided: ClassVar[tuple[str, ...]] = ()

    def check(self, backend: str) -> None:
        """Raise where arguments that are right one by one do not fit together."""


C = TypeVar("C", bound=Call)


@dataclass(slots=True)
class Backward(Generic[C]):
    """What a backward kernel receives: the forward's call, gradients and kept results by name, what is wanted."""

    call: C
    #: As the call's ``Out``; None where there is no gradient, or where a result was not kept.
    grad: Any
    out: Any
    #: Are the gradients of the call's ``sides`` wanted? Those that are not come back empty.
    wants: tuple[bool, ...]

    @property
    def want_rows(self) -> bool:
        return self.wants[0]

    @property
    def want_cols(self) -> bool:
        return self.wants[1]


def some(out: Any, **given: Any) -> Any:
    """Results of which only those are there that are given; the others are None."""
    return out(**{name: given.get(name) for name in out._fields})


@dataclass(slots=True)
class Matrix(Call):
    """Rows against columns, or against each other where there are no columns."""

    rows: RowsOf
    cols: ColsOf
    row_labels: Annotated[Tensor, Array(("R",), INT64)]
    col_labels: Annotated[Tensor | None, ColumnLabels(("N",), INT64)]


class PairOut(NamedTuple):
    stats: Annotated[Tensor, Array(("R", "K"))]
    #: Mining: positives are kept below the first, negatives above the second.
    thresholds: Annotated[Tensor, Array(("R", 2))]
    #: What the backend keeps for its backward.
    saved: Annotated[Tensor, Array(("S",), (torch.uint8,))]


@dataclass(slots=True)
class Pair(Matrix):
    """Row statistics of a policy over positives and negatives, all of them or the mined ones."""

    op, Out, grads, kept, decided = "pair", PairOut, ("stats",), ("stats", "thresholds", "saved"), ("S",)

    row_field: RowField
    col_field: Annotated[Tensor | None, Array(("N",), FLOATS)]
    policy: PolicyName
    params: PolicyParams
    view: View
    normalize: Bool
    epsilon: Annotated[float | None, Number()]
    pool_size: Annotated[int, Count(1)]
    sharpness: Float
    selves: SelfColumns = None
    #: Mining thresholds that are known already: these columns are a part of those that were mined.
    bounds: Annotated[Tensor | None, Array(("R", 2))] = None
    #: Which pairs to visit. Statistics of the others are those of nothing. «negatives» finds the threshold of positives
    #: among its columns even where ``bounds`` are given, which it takes that of negatives from.
    side: Annotated[str, Choice(("both", "positives", "negatives"))] = "both"

    def check(self, backend: str) -> None:
        why = lacks(backend, self.policy, mined=self.mines, pool_size=self.pool_size, view=self.view)
        if why:
            raise ValueError(f"{why}; got backend={backend!r}, wanted another, 'tiled' say")
        if self.bounds is not None and self.epsilon is None:
            raise ValueError("bounds: got them without epsilon, wanted both")

    @property
    def mines(self) -> bool:
        return self.epsilon is not None


class DotsOut(NamedTuple):
    u: Annotated[Tensor, Array(("L",))]


@dataclass(slots=True)
class Dots(Call):
    """Oriented similarities of listed pairs."""

    op, Out, grads = "dots", DotsOut, ("u",)

    rows: RowsOf
    cols: ColsOf
    i: Annotated[Tensor, Array(("L",), INT64, below="R")]
    j: Annotated[Tensor, Array(("L",), INT64, below="C")]
    view: View
    normalize: Bool


class ListedOut(NamedTuple):
    stats: Annotated[Tensor, Array(("rows", "K"))]


@dataclass(slots=True)
class Listed(Call):
    """Row statistics of a policy over listed pairs, from their u and their anchors."""

    op, Out, grads, kept, sides = "listed", ListedOut, ("stats",), ("stats",), ("pos", "neg")

    pos: Annotated[Tensor, Array(("P",), (torch.float32, torch.float64))]
    neg: Annotated[Tensor, Array(("Q",))]
    a1: Annotated[Tensor, Array(("P",), INT64, below="rows")]
    a2: Annotated[Tensor, Array(("Q",), INT64, below="rows")]
    row_field: Annotated[Tensor | None, Array(("rows",), FLOATS)]
    policy: PolicyName
    params: PolicyParams
    rows: Annotated[int, Count(0, MOST_ROWS)]

    def check(self, backend: str) -> None:
        _compiled(self.policy, backend)


class HistogramOut(NamedTuple):
    positives: Annotated[Tensor, Array(("R", "nodes"))]
    negatives: Annotated[Tensor, Array(("R", "nodes"))]
    #: The range of u in tiles that the backend keeps.
    ranges: Annotated[Tensor, Array(("T", 2))]


@dataclass(slots=True)
class Histogram(Matrix):
    """Soft counts of u on equidistant nodes, for positives and for negatives."""

    op, Out, decided = "histogram", HistogramOut, ("T",)
    grads, kept = ("positives", "negatives"), ("positives", "negatives", "ranges")

    nodes: Annotated[int, Count(2, MOST_NODES)]
    low: Float
    high: Float
    view: View
    normalize: Bool
    selves: SelfColumns = None

    def check(self, backend: str) -> None:
        if not self.low < self.high:
            raise ValueError(f"high: got {self.high!r} beside low={self.low!r}, wanted a larger number")


class TripletOut(NamedTuple):
    #: Per anchor: the sum of its triplets' losses, and how many of them are above 0.
    total: PerRow
    above: PerRow


@dataclass(slots=True)
class Triplet(Matrix):
    """All triplets, or the semi-hard one of each positive pair."""

    op, Out, grads = "triplet", TripletOut, ("total",)

    mode: Annotated[str, Choice(("all", "semihard"))]
    margin: Float
    swap: Bool
    smooth: Bool
    view: View
    normalize: Bool
    selves: SelfColumns = None

    def check(self, backend: str) -> None:
        if self.swap and self.cols is not None:
            raise ValueError(
                "swap: got True beside cols, wanted False: it needs the similarities of columns to each other"
            )


class ListedTripletsOut(NamedTuple):
    total: PerRow
    above: PerRow
    #: By how much each triplet is violated, or what else the backend keeps of it.
    violation: Annotated[Tensor, Array(("L",))]


@dataclass(slots=True)
class ListedTriplets(Call):
    """The same of listed triplets."""

    op, Out, grads, kept = "listed_triplets", ListedTripletsOut, ("total",), ("total", "above", "violation")

    rows: RowsOf
    cols: ColsOf
    a: Annotated[Tensor, Array(("L",), INT64, below="R")]
    p: Annotated[Tensor, Array(("L",), INT64, below="C")]
    n: Annotated[Tensor, Array(("L",), INT64, below="C")]
    margin: Float
    smooth: Bool
    view: View
    normalize: Bool


@dataclass(slots=True)
class Against(Matrix):
    """Triplets of each row's negatives among these columns and positives that are known by their u."""

    op, Out, grads, sides = "against", TripletOut, ("total",), ("rows", "cols", "positives")

    #: u of each row's positives, wherever they are; +inf: none.
    positives: Annotated[Tensor, Array(("R", "M"))]
    margin: Float
    smooth: Bool
    view: View
    normalize: Bool


class BelowOut(NamedTuple):
    #: Column and u of the most similar negative below each bound; -1 and -inf: none.
    n: Annotated[Tensor, Array(("R", "M"), INT64)]
    u: Annotated[Tensor, Array(("R", "M"))]


@dataclass(slots=True)
class Below(Matrix):
    """For each row and each of its bounds the most similar negative below it."""

    op, Out = "below", BelowOut

    bounds: Annotated[Tensor, Array(("R", "M"))]
    view: View
    normalize: Bool


class PositivesOut(NamedTuple):
    u: Annotated[Tensor, Array(("R", "most"))]


@dataclass(slots=True)
class Positives(Matrix):
    """Similarities of each row's positives among these columns, rising; +inf behind them."""

    op, Out = "positives", PositivesOut

    #: Room for so many; of more, some are left out.
    most: Annotated[int, Count(0, MOST_ROWS)]
    normalize: Bool
    selves: SelfColumns = None


class AboveOut(NamedTuple):
    #: Negatives above each bound, and at or above it.
    number: Annotated[Tensor, Array((2, "R", "M"), INT64)]


@dataclass(slots=True)
class Above(Matrix):
    """For each row and each of its bounds the number of negatives above it."""

    op, Out = "above", AboveOut

    bounds: Annotated[Tensor, Array(("R", "M"))]
    normalize: Bool


class ExtremesOut(NamedTuple):
    p: Places
    n: Places


@dataclass(slots=True)
class Extremes(Matrix):
    """Column of the easy, hard or semi-hard positive and negative of every row; -1 where it has none.

    «none» on one side does not look for it there.
    """

    op, Out = "extremes", ExtremesOut

    positive: Annotated[str, Choice(("easy", "hard", "semihard", "none"))]
    negative: Annotated[str, Choice(("easy", "hard", "semihard", "none"))]
    view: View
    normalize: Bool
    selves: SelfColumns = None


class TopKOut(NamedTuple):
    i: Annotated[Tensor, Array(("k",), INT64)]
    j: Annotated[Tensor, Array(("k",), INT64)]


@dataclass(slots=True)
class TopK(Matrix):
    """The k pairs (i, j) of largest loss; -1 beyond the last."""

    op, Out = "topk", TopKOut

    policy: PolicyName
    params: PolicyParams
    k: Annotated[int, Count(1, MOST_PAIRS)]
    side: Annotated[str, Choice(("all", "positives", "negatives"))]
    view: View
    normalize: Bool
    selves: SelfColumns = None

    def check(self, backend: str) -> None:
        def ranks(policy: str) -> bool:
            return [slot.side for slot in POLICIES[policy].slots] == ["positives", "negatives"]

        if not ranks(self.policy):
            known = ", ".join(repr(name) for name in POLICIES if ranks(name))
            raise ValueError(
                f"policy: got {self.policy!r}, wanted one with one statistic a side, to rank pairs by: {known}"
            )
        _compiled(self.policy, backend)


class MinedOut(NamedTuple):
    a1: Annotated[Tensor, Array(("P",), INT64)]
    p: Annotated[Tensor, Array(("P",), INT64)]
    a2: Annotated[Tensor, Array(("Q",), INT64)]
    n: Annotated[Tensor, Array(("Q",), INT64)]


@dataclass(slots=True)
class Mined(Matrix):
    """Multi-Similarity's mined pairs, or all pairs."""

    op, Out = "mined", MinedOut

    epsilon: Annotated[float | None, Number()]
    view: View
    normalize: Bool


class SampleOut(NamedTuple):
    drawn: Annotated[Tensor, Array(("A",), INT64)]


@dataclass(slots=True)
class Sample(Matrix):
    """One distance-weighted negative for each anchor; -1 where there is none."""

    op, Out = "sample", SampleOut

    anchors: Annotated[Tensor, Array(("A",), INT64, below="R")]
    seed: Annotated[Tensor, Seed((), INT64)]
    cutoff: Float
    nonzero_loss_cutoff: Float


class RankOut(NamedTuple):
    #: Positives of each query; of both rules of ties: negatives above the best, hits and precision among the first R.
    number: Places
    over: Annotated[Tensor, Array(("R", 2), INT64)]
    hits: Annotated[Tensor, Array(("R", 2), INT64)]
    precision: Annotated[Tensor, Array(("R", 2), (torch.float64,))]


@dataclass(slots=True)
class Rank(Matrix):
    """What retrieval metrics are made of."""

    op, Out = "rank", RankOut

    normalize: Bool


def _compiled(policy: str, backend: str) -> None:
    if why := lacks(backend, policy):
        raise ValueError(f"{why}; got backend={backend!r}, wanted another, 'tiled' say")


CALLS: dict[str, type[Any]] = {
    call.op: call
    for call in (
        Pair, Dots, Listed, Histogram, Triplet, ListedTriplets, Against, Below, Positives, Above, Extremes, TopK, Mined,
        Sample, Rank,
    )
}  # fmt: skip


def _bound(name: str, hint: Any) -> Argument:
    """The kind of argument in an annotation, with its name; ``Tensor | None`` may be left out."""
    assert get_origin(hint) is Annotated, f"{name}: its annotation has no kind"
    given, kind = get_args(hint)
    changes: dict[str, Any] = {"name": name} | ({"optional": True} if NoneType in get_args(given) else {})
    bound: Argument = replace(kind, **changes)
    return bound


class Op:
    """An op made from its declaration, or its backward: schema, checks, sizes of its results."""

    def __init__(self, call: type[Any], backward: bool = False) -> None:
        hints = get_type_hints(call, include_extras=True)
        self.call, self.is_backward = call, backward
        self.forward_arguments = [_bound(f.name, hints[f.name]) for f in fields(call)]
        results = get_type_hints(call.Out, include_extras=True)
        self.forward_outputs = {name: _bound(name, results[name]) for name in call.Out._fields}
        by_name = {argument.name: argument for argument in self.forward_arguments}
        #: A backward's own arguments come first, and are checked last, when all sizes are settled.
        self.own: list[Argument] = []
        self.arguments, self.outputs = self.forward_arguments, list(self.forward_outputs.values())
        self.name = call.op
        if backward:
            self.name = f"{call.op}_backward"
            self.own = [replace(self.forward_outputs[name], name=f"grad_{name}") for name in call.grads]
            self.own += [self.forward_outputs[name] for name in call.kept]
            wants = [Flag(name=f"want_{side}") for side in call.sides]
            self.arguments = [*self.own, *self.forward_arguments, *wants]
            self.outputs = [replace(by_name[side], name=f"d_{side}", optional=False) for side in call.sides]
        self.names = tuple(argument.name for argument in self.arguments)
        shared = [a for a in self.arguments[len(self.own) :] if not isinstance(a, Flag)]
        #: What is checked first: numbers and names, which decide sizes, then tensors.
        self.shared = (*sorted(shared, key=lambda argument: isinstance(argument, Array)), BACKEND)

    @property
    def schema(self) -> str:
        outputs = ", ".join("Tensor" for _ in self.outputs)
        returns = f"({outputs})" if len(self.outputs) > 1 else outputs
        return f"({', '.join(a.schema for a in (*self.arguments, BACKEND))}) -> {returns}"

    @property
    def kernel_schema(self) -> str:
        """The same of a backend's own op, which has no backend to choose."""
        return self.schema.replace(f", {BACKEND.schema})", ")")

    def read(self, values: Sequence[Any]) -> Any:
        """What a kernel receives, from the arguments of the op in their order; those with defaults may be left out."""
        if not self.is_backward:
            return self.call(*values)
        at, end, out = len(self.own), len(values) - len(self.call.sides), self.call.Out
        grads = dict(zip(self.call.grads, values, strict=False))
        kept = dict(zip(self.call.kept, values[len(grads) : at], strict=True))
        return Backward(self.call(*values[at:end]), some(out, **grads), some(out, **kept), tuple(values[end:]))

    def check(self, values: Sequence[Any]) -> None:
        """Raise where the arguments of a call, the backend last, do not fit: which, what was given, what was wanted."""
        backend = values[-1]
        given = dict(zip((*self.names, BACKEND.name), values, strict=True))
        checked = Checked(given, self.call.sides[0])
        for argument in self.shared:
            argument.check(given[argument.name], checked)
        call = self.call(*(given[argument.name] for argument in self.forward_arguments))
        call.check(backend)
        if self.is_backward:
            second = self.call.sides[1]
            if given[f"want_{second}"] and given[second] is None:
                raise ValueError(f"want_{second}: got True without {second}, wanted False")
            for size in self.call.decided:
                checked.sizes[size] = saved_size(backend, call)
            for argument in self.own:
                argument.check(given[argument.name], checked)

    def check_options(self, values: Sequence[Any]) -> None:
        """The same for fakes, without sizes: they may be symbols there, and comparing them would fix them."""
        given = dict(zip((*self.names, BACKEND.name), values, strict=True))
        checked = Checked(given, self.call.sides[0])
        for argument in self.arguments:
            value = given[argument.name]
            if isinstance(argument, Array):
                argument.check_device(value, checked)
            elif not isinstance(value, (torch.SymInt, torch.SymFloat)):
                argument.check(value, checked)

    def fake(self, values: Sequence[Any]) -> Any:
        """Results without data, of the shapes that are declared."""
        self.check_options(values)
        given = dict(zip(self.names, values, strict=False))
        if self.is_backward:
            made = [
                torch.empty_like(given[side], memory_format=torch.contiguous_format)
                if given[f"want_{side}"]
                else given[self.call.sides[0]].new_empty(0)
                for side in self.call.sides
            ]
            return tuple(made)
        sizes: dict[str, Any] = {}
        for argument in self.forward_arguments:
            argument.settle(given[argument.name], sizes)
        first = given[self.call.sides[0]]
        for size in self.call.decided:
            sizes[size] = saved_size(values[-1], self.call(*values[:-1]))
        outputs = []
        for output in self.outputs:
            assert isinstance(output, Array)
            for dim in output.dims:
                if isinstance(dim, str) and dim not in sizes:  # how many there are is data
                    sizes[dim] = torch.library.get_ctx().new_dynamic_size()
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in output.dims]
            computed = torch.float64 if first.dtype == torch.float64 else torch.float32
            outputs.append(first.new_empty(shape, dtype=output.dtypes[0] if output.dtypes else computed))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


@cache
def op(name: str) -> Op:
    """An op by its name, or its backward by ``name_backward``."""
    forward = name.removesuffix("_backward")
    return Op(CALLS[forward], backward=forward != name)
