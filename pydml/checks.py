"""Input checks: every error names the argument, what was given and what was wanted."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pydml.tuples import is_distinct

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))


def shown(value: Any) -> str:
    """A value as errors show it: tensors by dtype and shape, nothing longer than a line."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def unexpected(owner: str, name: str, allowed: Sequence[str]) -> TypeError:
    """The error of an argument that ``owner`` does not have, with the nearest one that it has."""
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? It takes" if near else "it takes"
    return TypeError(f"{owner}: got an unexpected argument {name!r}; {hint} {', '.join(allowed) or 'none'}")


def nothing_else(cls: type, unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that neither a class nor its bases' constructors name."""
    for name in unknown:
        taken = {
            parameter.name: None
            for base in cls.__mro__
            if "__init__" in vars(base) and base.__module__.startswith(("pydml.", cls.__module__))
            for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY) and parameter.name != "self"
        }
        raise unexpected(cls.__name__, name, list(taken))


def number(name: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    """A finite real number, within bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {shown(value)} of type {type(value).__name__}, wanted a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}: got {shown(value)}, wanted a finite number")
    if above is not None and not value > above:
        raise ValueError(f"{name}: got {shown(value)}, wanted a number > {above:g}")
    if least is not None and not value >= least:
        raise ValueError(f"{name}: got {shown(value)}, wanted a number >= {least:g}")
    return value


def integer(name: str, value: Any, *, least: int) -> int:
    """A whole number, at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {shown(value)} of type {type(value).__name__}, wanted an int >= {least}")
    if value < least:
        raise ValueError(f"{name}: got {shown(value)}, wanted an int >= {least}")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {shown(value)} of type {type(value).__name__}, wanted True or False")
    return value


def choice(name: str, value: Any, options: Sequence[Any]) -> Any:
    if isinstance(value, Tensor) or value not in options:
        raise ValueError(f"{name}: got {shown(value)}, wanted one of {', '.join(map(repr, options))}")
    return value


def embeddings(name: str, z: Any, like: Tensor | None = None, vectors: bool = True) -> Tensor:
    """A floating-point matrix, without ``vectors`` of rows of any shape; with ``like``, of its width and device, and
    in fp64 where that is.
    """
    if not isinstance(z, Tensor):
        raise TypeError(f"{name}: got {type(z).__name__}, wanted a torch.Tensor of shape [batch, dim]")
    if z.ndim != 2 if vectors else z.ndim < 2:
        raise ValueError(f"{name}: got shape {list(z.shape)}, wanted 2 dimensions [batch, dim]")
    if z.dtype not in FLOATS:
        raise TypeError(f"{name}: got dtype {z.dtype}, wanted one of {', '.join(map(str, FLOATS))}")
    if z.shape[1] == 0:
        raise ValueError(f"{name}: got shape {list(z.shape)}, wanted at least one dimension per embedding")
    if like is not None:
        if z.shape[1] != like.shape[1]:
            raise ValueError(f"{name}: got width {z.shape[1]}, wanted {like.shape[1]}, that of the embeddings")
        if z.dtype != like.dtype and torch.float64 in (z.dtype, like.dtype):
            raise TypeError(f"{name}: got dtype {z.dtype}, wanted {like.dtype}, that of the embeddings")
        if z.device != like.device:
            raise ValueError(f"{name}: got a tensor on {z.device}, wanted {like.device}, where the embeddings are")
    return z


def transformed() -> bool:
    """Are we inside torch.func.grad, vmap or the like, where values cannot be looked at?"""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def labels(name: str, y: Any, of: Tensor) -> Tensor:
    """An integer vector, one entry for each row of ``of``; returned as int64."""
    if not isinstance(y, Tensor):
        raise TypeError(f"{name}: got {type(y).__name__}, wanted a torch.Tensor of integers of shape [batch]")
    if y.ndim != 1:
        raise ValueError(f"{name}: got shape {list(y.shape)}, wanted 1 dimension [batch]")
    if y.dtype not in INTEGERS:
        raise TypeError(f"{name}: got dtype {y.dtype}, wanted an integer dtype")
    if len(y) != len(of):
        raise ValueError(f"{name}: got {len(y)} labels, wanted {len(of)}, one for each embedding")
    if y.device != of.device:
        raise ValueError(f"{name}: got a tensor on {y.device}, wanted {of.device}, where the embeddings are")
    return y.long()


def labels_again(name: str, y: Any, of: Tensor, known: Tensor | None) -> None:
    """Labels given a second time, for the batch as its own reference set: they must be the same."""
    again = labels(name, y, of)
    if known is None or again.device.type != "cpu" or torch.compiler.is_compiling():
        return  # comparing them would wait for the device
    if not torch.equal(again, known):
        raise ValueError(f"{name}: got other labels than labels beside ref_emb=embeddings, wanted the same or none")


def within(name: str, index: Tensor, below: int, what: str) -> None:
    """All entries in [0, below). On a GPU and under torch.compile the device asserts it: no host sync."""
    if not len(index) or transformed():
        return
    least, most = index.aminmax()
    ok = (least >= 0) & (most < below)
    message = f"{name}: got entries outside [0, {below}), wanted {what}"
    if torch.compiler.is_compiling() or index.device.type != "cpu":
        torch._assert_async(ok, message)
    elif not ok:
        raise ValueError(f"{message}; the range given is [{int(least)}, {int(most)}]")


def indices_tuple(value: Any, rows: int, cols: int, device: torch.device) -> tuple[Tensor, ...]:
    """A miner's output: (a, p, n) or (a1, p, a2, n), as int64 tensors within the batch."""
    if not isinstance(value, (tuple, list)) or len(value) not in (3, 4):
        got = f"{type(value).__name__} of length {len(value)}" if hasattr(value, "__len__") else type(value).__name__
        raise ValueError(f"indices_tuple: got {got}, wanted a tuple (a, p, n) or (a1, p, a2, n)")
    if isinstance(value, tuple) and is_distinct(value, (rows, cols)) and value[0].device == device:
        return value  # one of our own miners has made it
    names = ("a", "p", "n") if len(value) == 3 else ("a1", "p", "a2", "n")
    for name, index in zip(names, value, strict=True):
        if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in INTEGERS:
            got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"indices_tuple: {name} is {got}, wanted an integer vector")
        if index.device != device:
            raise ValueError(f"indices_tuple: {name} is on {index.device}, wanted {device}, where the embeddings are")
        limit, what = (rows, "rows of the batch") if name.startswith("a") else (cols, "columns (batch or ref_emb)")
        within(f"indices_tuple: {name}", index.long(), limit, what)
    lengths = [len(index) for index in value]
    if len({*lengths}) > 1 if len(value) == 3 else lengths[0] != lengths[1] or lengths[2] != lengths[3]:
        raise ValueError(f"indices_tuple: got lengths {lengths}, wanted equal ones for {', '.join(names)}")
    return tuple(index.long() for index in value)
