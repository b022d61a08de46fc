"""What every op takes and returns, declared once: schemas are made of it, and direct calls are checked against it.

The losses have checked their arguments by the time they come to an op. ``torch.ops.pydml`` is open to everybody
though, and a kernel believes what it is told: a vector that is too short is read beyond its end. So a registered op
checks here, for all backends, that sizes, dtypes, devices, names and numbers fit together; entries of tensors are
looked at only where that does not wait for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from pydml.backends import BACKENDS, kernel, lacks, resolve
from pydml.checks import FLOATS
from pydml.policy import POLICIES

VIEWS = ("dot", "cosine", "euclidean", "squared")
INT64, DOUBLE, FLOAT = (torch.int64,), (torch.float64,), (torch.float32,)
#: The dtype that rows are computed in: fp64 for fp64, else fp32.
COMPUTED = ()
#: Nodes of a histogram; csrc/cpu/histogram.cpp has the same bound.
MOST_NODES = 1 << 20
#: Pairs that ``topk`` may be asked for, and rows of a list.
MOST_PAIRS, MOST_ROWS = 1 << 40, 1 << 31


class Call:
    """One call: its arguments by name, and the sizes that they have settled so far.

    R rows, C columns, N columns of the matrix (C, or one for each pool), d dimensions, K statistics of the policy, L
    listed pairs (P positive, Q negative ones), A anchors, S bytes or T tiles that the forward pass keeps.
    """

    __slots__ = ("computed", "device", "dtype", "first", "given", "sizes")

    def __init__(self, given: dict[str, Any], first: str) -> None:
        self.given, self.sizes, self.first = given, dict[str, int](), first
        tensor = given[first]
        if isinstance(tensor, Tensor):
            self.device, self.dtype = tensor.device, tensor.dtype
            self.computed = DOUBLE if tensor.dtype == torch.float64 else FLOAT


@dataclass(frozen=True)
class Argument:
    """One argument: its name, its type in the schema, and what it must be."""

    name: str
    type: ClassVar[str]

    @property
    def schema(self) -> str:
        return f"{self.type} {self.name}"

    def check(self, value: Any, call: Call) -> None:
        """Raise where the value does not fit; settle the sizes that it decides."""


@dataclass(frozen=True)
class Array(Argument):
    """A tensor; ``dims`` names its sizes, and the first argument that names a size decides it."""

    type = "Tensor"
    dims: tuple[str | int, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    #: Entries are places below this size.
    below: str = ""

    @property
    def schema(self) -> str:
        return f"Tensor{'?' * self.optional} {self.name}"

    def check(self, value: Any, call: Call) -> None:
        if value is None:
            if not self.optional:
                raise TypeError(f"{self.name}: got None, wanted a tensor of shape {self._wanted(call.sizes)}")
            return
        sizes, shape, dims = call.sizes, value.shape, self.dims
        fits = len(shape) == len(dims)
        for n, dim in zip(shape, dims, strict=False):
            fits = fits and n == (sizes.setdefault(dim, n) if isinstance(dim, str) else dim)
        if not fits:
            raise ValueError(f"{self.name}: got shape {list(shape)}, wanted {self._wanted(sizes)}")
        dtypes = self.dtypes or call.computed
        if value.dtype not in dtypes:
            raise TypeError(f"{self.name}: got dtype {value.dtype}, wanted {' or '.join(map(str, dtypes))}")
        self.check_device(value, call)
        if value.layout is not torch.strided:
            raise TypeError(f"{self.name}: got a tensor of layout {value.layout}, wanted a dense one")
        if self.below and call.device.type == "cpu" and len(value):  # a GPU would have to be waited for
            low, high = (int(t) for t in value.aminmax())
            if low < 0 or high >= sizes[self.below]:
                raise ValueError(
                    f"{self.name}: got entries from {low} to {high}, wanted them in [0, {self.below}), "
                    f"{self.below} = {sizes[self.below]}"
                )

    def check_device(self, value: Any, call: Call) -> None:
        if value is not None and value.device != call.device:
            raise ValueError(
                f"{self.name}: got a tensor on {value.device}, wanted {call.device}, where {call.first} is"
            )

    def _wanted(self, sizes: dict[str, int]) -> str:
        """«[R, K] = [8, 2]»."""
        names = f"[{', '.join(map(str, self.dims))}]"
        known = [sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in self.dims]
        return names if list(self.dims) == known else f"{names} = [{', '.join(map(str, known))}]"


@dataclass(frozen=True)
class Rows(Array):
    """Embeddings, of which there is at least one dimension."""

    def check(self, value: Any, call: Call) -> None:
        super().check(value, call)
        if value is not None and value.shape[1] == 0:
            raise ValueError(f"{self.name}: got shape {list(value.shape)}, wanted at least one dimension per embedding")


@dataclass(frozen=True)
class Columns(Rows):
    """Embeddings of the columns, or nothing where they are the rows: settles C and N."""

    def check(self, value: Any, call: Call) -> None:
        super().check(value, call)
        sizes, pool = call.sizes, call.given.get("pool_size", 1)
        if value is None:
            sizes["C"] = sizes["R"]
        elif (value.dtype == torch.float64) != (call.dtype == torch.float64):
            raise TypeError(
                f"{self.name}: got dtype {value.dtype} beside rows of {call.dtype}, wanted both in fp64 or neither"
            )
        if pool < 1 or sizes["C"] % pool or (pool > 1 and value is None):
            columns = "no columns but the rows" if value is None else f"{sizes['C']} columns"
            raise ValueError(f"pool_size: got {pool} beside {columns}, wanted a divisor of the number of columns")
        sizes["N"] = sizes["C"] // pool


@dataclass(frozen=True)
class ColumnLabels(Array):
    """Labels of the columns, where there are columns."""

    def check(self, value: Any, call: Call) -> None:
        super().check(value, call)
        if (value is None) != (call.given["cols"] is None):
            got, columns = ("None", "cols") if value is None else ("labels", "no cols")
            raise ValueError(f"{self.name}: got {got} beside {columns}, wanted both or neither")


@dataclass(frozen=True)
class Seed(Array):
    """One number, wherever it lies."""

    def check(self, value: Any, call: Call) -> None:
        if value is None or value.numel() != 1 or value.dtype != torch.int64 or value.device.type == "meta":
            got = "None" if value is None else f"{value.dtype} {list(value.shape)} on {value.device}"
            raise TypeError(f"{self.name}: got {got}, wanted one torch.int64")

    def check_device(self, value: Any, call: Call) -> None:
        pass


@dataclass(frozen=True)
class Choice(Argument):
    """One of a few names."""

    type = "str"
    options: Collection[str]

    def check(self, value: Any, call: Call) -> None:
        if value not in self.options:
            raise ValueError(f"{self.name}: got {value!r}, wanted one of {', '.join(map(repr, self.options))}")


@dataclass(frozen=True)
class Policy(Choice):
    """A policy's name: settles K."""

    def check(self, value: Any, call: Call) -> None:
        super().check(value, call)
        call.sizes["K"] = len(POLICIES[value].slots)


@cache
def _parameters(policy: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(policy))


@dataclass(frozen=True)
class Params(Argument):
    """The numbers of the policy."""

    type = "float[]"

    def check(self, value: Any, call: Call) -> None:
        policy: Any = POLICIES[call.given["policy"]]
        wanted = _parameters(policy)
        if len(value) != len(wanted):
            names = f" ({', '.join(wanted)})" if wanted else ""
            raise ValueError(f"{self.name}: got {len(value)} numbers, wanted {len(wanted)}{names}")


@dataclass(frozen=True)
class Number(Argument):
    """A finite number."""

    type = "float"
    optional: bool = False

    @property
    def schema(self) -> str:
        return f"float{'?' * self.optional} {self.name}"

    def check(self, value: Any, call: Call) -> None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{self.name}: got {value!r}, wanted a finite number")


@dataclass(frozen=True)
class Count(Argument):
    """A whole number; settles the size of its name."""

    type = "int"
    least: int
    most: int = 2**63 - 1

    def check(self, value: Any, call: Call) -> None:
        if not self.least <= value <= self.most:
            upper = f" <= {self.most}" if self.most < 2**63 - 1 else ""
            raise ValueError(f"{self.name}: got {value!r}, wanted an int >= {self.least}{upper}")
        call.sizes[self.name] = value


@dataclass(frozen=True)
class Flag(Argument):
    """True or False, as the schema has it."""

    type = "bool"


@dataclass(frozen=True)
class Backend(Argument):
    """A backend with engines, that is there and takes such tensors."""

    type = "str"

    def check(self, value: Any, call: Call) -> None:
        if value not in BACKENDS or value == "dense":
            names = ", ".join(repr(name) for name in BACKENDS if name != "dense")
            raise ValueError(f"{self.name}: got {value!r}, wanted one of {names}")
        resolve(value, call.device)


Rule = Callable[[Call], None]


@dataclass(frozen=True)
class Op:
    """An op: its arguments without the backend, its outputs, and what its arguments must be together."""

    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[Array, ...]
    rules: tuple[Rule, ...] = ()
    #: Sizes that the backend decides.
    decided: tuple[tuple[str, Callable[[Call], int]], ...] = ()
    #: How many of the first arguments are a backward's own; they are checked last, when all sizes are settled.
    own: int = 0
    #: The two arguments that have gradients; all tensors are where the first one is.
    sides: tuple[str, str] = ("rows", "cols")

    @property
    def schema(self) -> str:
        outputs = ", ".join("Tensor" for _ in self.outputs)
        returns = f"({outputs})" if len(self.outputs) > 1 else outputs
        return f"({', '.join(a.schema for a in (*self.arguments, BACKEND))}) -> {returns}"

    def backward(self, grads: int, kept: int) -> Op:
        """The op that takes gradients of the first outputs, the outputs that it wants kept, and the same arguments."""
        own = (
            *(replace(output, name=f"grad_{output.name}") for output in self.outputs[:grads]),
            *self.outputs[:kept],
        )
        arguments = (*own, *self.arguments, *(Flag(f"want_{side}") for side in self.sides))
        by_name = {argument.name: argument for argument in self.arguments if isinstance(argument, Array)}
        outputs = tuple(replace(by_name[side], name=f"d_{side}", optional=False) for side in self.sides)
        rules = (*self.rules, _gradients)
        return Op(f"{self.name}_backward", arguments, outputs, rules, self.decided, len(own), self.sides)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return (*(argument.name for argument in self.arguments), BACKEND.name)

    @cached_property
    def _shared(self) -> tuple[Argument, ...]:
        """What is checked first: numbers and names, which decide sizes, then tensors, but for a backward's own."""
        shared = [argument for argument in self.arguments[self.own :] if not isinstance(argument, Flag)]
        return (*sorted(shared, key=lambda argument: isinstance(argument, Array)), BACKEND)

    def check(self, values: Sequence[Any]) -> None:
        """Raise where the arguments of a call, the backend last, do not fit: which, what was given, what was wanted."""
        call = Call(dict(zip(self._names, values, strict=True)), self.sides[0])
        given = call.given
        for argument in self._shared:
            argument.check(given[argument.name], call)
        for rule in self.rules:
            rule(call)
        if self.own:
            for size, of in self.decided:
                call.sizes[size] = of(call)
            for argument in self.arguments[: self.own]:
                argument.check(given[argument.name], call)

    def check_options(self, values: Sequence[Any]) -> None:
        """The same for fakes, without sizes: they may be symbols there, and comparing them would fix them."""
        call = Call(dict(zip(self._names, values, strict=True)), self.sides[0])
        for argument in self.arguments:
            value = call.given[argument.name]
            if isinstance(argument, Array):
                argument.check_device(value, call)
            elif not isinstance(value, (torch.SymInt, torch.SymFloat)):
                argument.check(value, call)


# Rules


def _gradients(call: Call) -> None:
    if call.given.get("want_cols") and call.given["cols"] is None:
        raise ValueError("want_cols: got True without cols, wanted False")


def _able(call: Call) -> None:
    given = call.given
    mined = given["epsilon"] is not None
    why = lacks(given["backend"], given["policy"], mined=mined, pool_size=given["pool_size"], view=given["view"])
    if why:
        raise ValueError(f"{why}; got backend={given['backend']!r}, wanted another, 'tiled' say")


def _one_loss_a_side(call: Call) -> None:
    def ranks(policy: str) -> bool:
        return [slot.side for slot in POLICIES[policy].slots] == ["positives", "negatives"]

    policy = call.given["policy"]
    if not ranks(policy):
        known = ", ".join(repr(name) for name in POLICIES if ranks(name))
        raise ValueError(f"policy: got {policy!r}, wanted one with one statistic a side, to rank pairs by: {known}")
    _compiled(call)


def _compiled(call: Call) -> None:
    backend = call.given["backend"]
    if why := lacks(backend, call.given["policy"]):
        raise ValueError(f"{why}; got backend={backend!r}, wanted another, 'tiled' say")


def _rising(call: Call) -> None:
    low, high = call.given["low"], call.given["high"]
    if not low < high:
        raise ValueError(f"high: got {high!r} beside low={low!r}, wanted a larger number")


def _swappable(call: Call) -> None:
    if call.given["swap"] and call.given["cols"] is not None:
        raise ValueError("swap: got True beside cols, wanted False: it needs the similarities of columns to each other")


def _saved_bytes(call: Call) -> int:
    names = ("rows", "cols", "policy", "params", "view", "normalize", "epsilon", "pool_size", "sharpness")
    return int(kernel(call.given["backend"], "pair_saved")(*(call.given[name] for name in names)))


def _saved_tiles(call: Call) -> int:
    return int(kernel(call.given["backend"], "histogram_saved")(call.given["rows"], call.given["cols"]))


# Declarations

BACKEND = Backend("backend")
ROWS, COLS = Rows("rows", ("R", "d"), FLOATS), Columns("cols", ("C", "d"), FLOATS, optional=True)
MATRIX = (
    ROWS,
    COLS,
    Array("row_labels", ("R",), INT64),
    ColumnLabels("col_labels", ("N",), INT64, optional=True),
)
HOW = (Choice("view", VIEWS), Flag("normalize"))
POLICY = (Policy("policy", POLICIES), Params("params"))

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "pair",
            (
                *MATRIX,
                Array("row_field", ("R",), FLOATS, optional=True),
                Array("col_field", ("N",), FLOATS, optional=True),
                *POLICY,
                *HOW,
                Number("epsilon", optional=True),
                Count("pool_size", 1),
                Number("sharpness"),
            ),
            (
                Array("stats", ("R", "K"), COMPUTED),
                Array("thresholds", ("R", 2), COMPUTED),
                Array("saved", ("S",), (torch.uint8,)),
            ),
            rules=(_able,),
            decided=(("S", _saved_bytes),),
        ),
        Op(
            "dots",
            (ROWS, COLS, Array("i", ("L",), INT64, below="R"), Array("j", ("L",), INT64, below="C"), *HOW),
            (Array("u", ("L",), COMPUTED),),
        ),
        Op(
            "listed",
            (
                Array("pos", ("P",), (*FLOAT, *DOUBLE)),
                Array("neg", ("Q",), COMPUTED),
                Array("a1", ("P",), INT64, below="rows"),
                Array("a2", ("Q",), INT64, below="rows"),
                Array("row_field", ("rows",), FLOATS, optional=True),
                *POLICY,
                Count("rows", 0, MOST_ROWS),
            ),
            (Array("stats", ("rows", "K"), COMPUTED),),
            rules=(_compiled,),
            sides=("pos", "neg"),
        ),
        Op(
            "histogram",
            (*MATRIX, Count("nodes", 2, MOST_NODES), Number("low"), Number("high"), *HOW),
            (
                Array("positives", ("R", "nodes"), COMPUTED),
                Array("negatives", ("R", "nodes"), COMPUTED),
                Array("ranges", ("T", 2), COMPUTED),
            ),
            rules=(_rising,),
            decided=(("T", _saved_tiles),),
        ),
        Op(
            "triplet",
            (*MATRIX, Choice("mode", ("all", "semihard")), Number("margin"), Flag("swap"), Flag("smooth"), *HOW),
            (Array("total", ("R",), COMPUTED), Array("above", ("R",), COMPUTED)),
            rules=(_swappable,),
        ),
        Op(
            "listed_triplets",
            (
                ROWS,
                COLS,
                Array("a", ("L",), INT64, below="R"),
                Array("p", ("L",), INT64, below="C"),
                Array("n", ("L",), INT64, below="C"),
                Number("margin"),
                Flag("smooth"),
                *HOW,
            ),
            (
                Array("total", ("R",), COMPUTED),
                Array("above", ("R",), COMPUTED),
                Array("violation", ("L",), COMPUTED),
            ),
        ),
        Op(
            "extremes",
            (*MATRIX, *(Choice(side, ("easy", "hard", "semihard")) for side in ("positive", "negative")), *HOW),
            (Array("p", ("R",), INT64), Array("n", ("R",), INT64)),
        ),
        Op(
            "topk",
            (*MATRIX, *POLICY, Count("k", 1, MOST_PAIRS), Choice("side", ("all", "positives", "negatives")), *HOW),
            (Array("i", ("k",), INT64), Array("j", ("k",), INT64)),
            rules=(_one_loss_a_side,),
        ),
        Op(
            "mined",
            (*MATRIX, Number("epsilon", optional=True), *HOW),
            tuple(Array(name, (f"{name}s",), INT64) for name in ("a1", "p", "a2", "n")),
        ),
        Op(
            "sample",
            (
                *MATRIX,
                Array("anchors", ("A",), INT64, below="R"),
                Seed("seed", (), INT64),
                Number("cutoff"),
                Number("nonzero_loss_cutoff"),
            ),
            (Array("drawn", ("A",), INT64),),
        ),
        Op(
            "rank",
            (*MATRIX, Flag("normalize")),
            (
                Array("number", ("R",), INT64),
                Array("over", ("R", 2), INT64),
                Array("hits", ("R", 2), INT64),
                Array("precision", ("R", 2), (torch.float64,)),
            ),
        ),
    )
}
