"""What an argument of an op may be: kinds of arguments, each with its type in a schema and its check.

:mod:`pydml.declared` declares the ops with them. The losses have checked their arguments by the time they come to an
op. ``torch.ops.pydml`` is open to everybody though, and a kernel believes what it is told: a vector that is too short
is read beyond its end. So a registered op checks, for all backends, that sizes, dtypes, devices, names and numbers fit
together; entries of tensors are looked at only where that does not wait for a device.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from pydml.backends import BACKENDS, resolve
from pydml.policy import POLICIES

VIEWS = ("dot", "cosine", "euclidean", "squared")
INT64, DOUBLE, FLOAT = (torch.int64,), (torch.float64,), (torch.float32,)
#: The dtype that rows are computed in: fp64 for fp64, else fp32.
COMPUTED = ()
#: Nodes of a histogram; csrc/cpu/histogram.cpp has the same bound.
MOST_NODES = 1 << 20
#: Pairs that ``topk`` may be asked for, and rows of a list.
MOST_PAIRS, MOST_ROWS = 1 << 40, 1 << 31


class Checked:
    """A call while it is checked: its arguments by name, and the sizes that they have settled so far.

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
    """One argument: its type in the schema, and what it must be. Its name is that of the field it is declared in."""

    type: ClassVar[str]
    name: str = field(default="", kw_only=True)
    optional: bool = field(default=False, kw_only=True)

    @property
    def schema(self) -> str:
        return f"{self.type}{'?' * self.optional} {self.name}"

    def check(self, value: Any, call: Checked) -> None:
        """Raise where the value does not fit; settle the sizes that it decides."""

    def settle(self, value: Any, sizes: dict[str, Any]) -> None:
        """The sizes that it decides, unchecked: a fake's may be symbols, which a comparison would fix."""


@dataclass(frozen=True)
class Array(Argument):
    """A tensor; ``dims`` names its sizes, and the first argument that names a size decides it."""

    type = "Tensor"
    dims: tuple[str | int, ...]
    dtypes: tuple[torch.dtype, ...] = COMPUTED
    #: Entries are places from ``least`` on, below this size.
    below: str = ""
    least: int = 0

    def check(self, value: Any, call: Checked) -> None:
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
            if low < self.least or high >= sizes[self.below]:
                raise ValueError(
                    f"{self.name}: got entries from {low} to {high}, wanted them in [{self.least}, {self.below}), "
                    f"{self.below} = {sizes[self.below]}"
                )

    def settle(self, value: Any, sizes: dict[str, Any]) -> None:
        for n, dim in zip(() if value is None else value.shape, self.dims, strict=False):
            if isinstance(dim, str):
                sizes.setdefault(dim, n)

    def check_device(self, value: Any, call: Checked) -> None:
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

    def check(self, value: Any, call: Checked) -> None:
        super().check(value, call)
        if value is not None and value.shape[1] == 0:
            raise ValueError(f"{self.name}: got shape {list(value.shape)}, wanted at least one dimension per embedding")


@dataclass(frozen=True)
class Columns(Rows):
    """Embeddings of the columns, or nothing where they are the rows: settles C and N."""

    def check(self, value: Any, call: Checked) -> None:
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

    def check(self, value: Any, call: Checked) -> None:
        super().check(value, call)
        if (value is None) != (call.given["cols"] is None):
            got, columns = ("None", "cols") if value is None else ("labels", "no cols")
            raise ValueError(f"{self.name}: got {got} beside {columns}, wanted both or neither")


@dataclass(frozen=True)
class Selves(Array):
    """Columns that the rows themselves are, where there are columns."""

    def check(self, value: Any, call: Checked) -> None:
        super().check(value, call)
        if value is not None and call.given["cols"] is None:
            raise ValueError(f"{self.name}: got columns without cols, wanted None: the rows are the columns")


@dataclass(frozen=True)
class Seed(Array):
    """One number, wherever it lies."""

    def check(self, value: Any, call: Checked) -> None:
        if value is None or value.numel() != 1 or value.dtype != torch.int64 or value.device.type == "meta":
            got = "None" if value is None else f"{value.dtype} {list(value.shape)} on {value.device}"
            raise TypeError(f"{self.name}: got {got}, wanted one torch.int64")

    def check_device(self, value: Any, call: Checked) -> None:
        pass


@dataclass(frozen=True)
class Choice(Argument):
    """One of a few names."""

    type = "str"
    options: Collection[str]

    def check(self, value: Any, call: Checked) -> None:
        if value not in self.options:
            raise ValueError(f"{self.name}: got {value!r}, wanted one of {', '.join(map(repr, self.options))}")


@dataclass(frozen=True)
class Policy(Choice):
    """A policy's name: settles K."""

    def check(self, value: Any, call: Checked) -> None:
        super().check(value, call)
        self.settle(value, call.sizes)

    def settle(self, value: Any, sizes: dict[str, Any]) -> None:
        sizes["K"] = len(POLICIES[value].slots)


@cache
def _parameters(policy: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(policy))


@dataclass(frozen=True)
class Params(Argument):
    """The numbers of the policy."""

    type = "float[]"

    def check(self, value: Any, call: Checked) -> None:
        policy: Any = POLICIES[call.given["policy"]]
        wanted = _parameters(policy)
        if len(value) != len(wanted):
            names = f" ({', '.join(wanted)})" if wanted else ""
            raise ValueError(f"{self.name}: got {len(value)} numbers, wanted {len(wanted)}{names}")


@dataclass(frozen=True)
class Number(Argument):
    """A finite number."""

    type = "float"

    def check(self, value: Any, call: Checked) -> None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{self.name}: got {value!r}, wanted a finite number")


@dataclass(frozen=True)
class Count(Argument):
    """A whole number; settles the size of its name."""

    type = "int"
    least: int
    most: int = 2**63 - 1

    def check(self, value: Any, call: Checked) -> None:
        if not self.least <= value <= self.most:
            upper = f" <= {self.most}" if self.most < 2**63 - 1 else ""
            raise ValueError(f"{self.name}: got {value!r}, wanted an int >= {self.least}{upper}")
        self.settle(value, call.sizes)

    def settle(self, value: Any, sizes: dict[str, Any]) -> None:
        sizes[self.name] = value


@dataclass(frozen=True)
class Flag(Argument):
    """True or False, as the schema has it."""

    type = "bool"


@dataclass(frozen=True)
class Backend(Argument):
    """A backend with engines, that is there and takes such tensors."""

    type = "str"

    def check(self, value: Any, call: Checked) -> None:
        if value not in BACKENDS or value == "dense":
            names = ", ".join(repr(name) for name in BACKENDS if name != "dense")
            raise ValueError(f"{self.name}: got {value!r}, wanted one of {names}")
        resolve(value, call.device)
