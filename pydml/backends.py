"""Which backends are there, why one is missing, and which one a call uses.

Every engine (:mod:`pydml.ops`) asks here for its kernel, so that adding a backend is adding a table of kernels.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pydml import checks
from pydml.build_record import why_not_built

#: Name -> what it is. The order is the order in which ``auto`` does *not* choose: see :func:`resolve`.
BACKENDS: dict[str, str] = {
    "dense": "plain PyTorch on the full matrix, autograd: the reference",
    "tiled": "plain PyTorch in row chunks with our own backward: any device, no compiler",
    "cpu": "fused C++ kernels",
    "triton": "fused Triton kernels",
    "cuda": "fused CUDA C++ kernels",
    "cuda-emulated": "the CUDA C++ kernels run on the CPU by an emulator, for tests",
}

Kernel = Callable[..., Any]
Function = TypeVar("Function", bound=Kernel)


def constant(function: Function) -> Function:
    """``torch.compiler.assume_constant_result``, which itself would import torch._dynamo: as slow as torch."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Chosen(threading.local):
    """What :func:`use_backend` says in this thread (a ContextVar would stop torch.compile's tracing)."""

    name = "auto"


_chosen = _Chosen()
_deterministic = True
_largest_class: int | None = None
_tables: dict[str, dict[str, Kernel]] = {}
_reasons: dict[str, str] = {}
_warned: set[str] = set()


@constant  # torch.compile cannot trace an import
def _load(name: str) -> None:
    """Fill ``_tables[name]`` (engine -> kernel) or ``_reasons[name]``, once."""
    if name in _tables or name in _reasons:
        return
    try:
        if name == "dense":
            _tables[name] = {}
        elif name == "tiled":
            _tables[name] = importlib.import_module("pydml.tiled").KERNELS
        elif name == "cpu":
            _tables[name] = importlib.import_module("pydml.native").KERNELS
        elif name == "triton":
            importlib.import_module("triton")  # whose absence is the better reason
            if not (torch.cuda.is_available() or interpreted()):
                raise ImportError("no GPU is here (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly, for tests)")
            _tables[name] = importlib.import_module("pydml.triton_kernels").KERNELS
        else:
            _tables[name] = importlib.import_module("pydml.cuda").kernels(emulated=name == "cuda-emulated")
    except (ImportError, OSError) as error:
        missing = name == "cpu" and isinstance(error, ModuleNotFoundError)
        _reasons[name] = f"{error}: {why_not_built()[0]}" if missing else str(error)


def interpreted() -> bool:
    """Does Triton run its kernels on the CPU? It reads the variable when a kernel is defined, that is on import."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def backends() -> dict[str, str | None]:
    """Every backend by name: ``None`` if it can be used here, else the reason why not.

    >>> pydml.backends()["tiled"] is None
    True
    """
    for name in BACKENDS:
        _load(name)
    return {name: _reasons.get(name) for name in BACKENDS}


def _check_name(name: str) -> str:
    if name not in BACKENDS and name != "auto":
        raise ValueError(f"backend: got {name!r}, wanted 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    _load(name) if name != "auto" else None
    if name in _reasons:
        raise RuntimeError(f"backend: {name!r} is not available here: {_reasons[name]}")
    return name


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one backend for every call inside the block, in this thread.

    >>> with pydml.use_backend("dense"):
    ...     loss = pydml.losses.MultiSimilarityLoss()(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    """
    before, _chosen.name = _chosen.name, _check_name(name)
    try:
        yield
    finally:
        _chosen.name = before


def resolve(requested: str, device: torch.device) -> str:
    """The backend for one call: the call's own argument, then :func:`use_backend`, then the best for the device."""
    name = requested if requested != "auto" else _chosen.name
    if name != "auto":
        _check_name(name)
        if name in ("cpu", "cuda-emulated") and device.type != "cpu":
            raise RuntimeError(f"backend: {name!r} takes tensors on the CPU, got {device}")
        if name in ("cuda", "triton") and device.type != "cuda" and not (name == "triton" and interpreted()):
            raise RuntimeError(f"backend: {name!r} takes tensors on a GPU, got {device}")
        return name
    for name in {"cpu": ("cpu",), "cuda": ("triton", "cuda")}.get(device.type, ()):
        _load(name)
        if name in _tables:
            return name
    if device.type == "cpu":
        _miss_extension()
    return "tiled"


@constant
def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


@constant
def _miss_extension() -> None:
    """Say once that the fast kernels are missing, unless whoever built pydml left them out on purpose."""
    why, chosen = why_not_built()
    if not (chosen and _reasons["cpu"].endswith(why)):
        _warn_once(
            f"pydml runs on plain PyTorch, several times slower than its C++ extension, which is missing: "
            f"{_reasons['cpu']}. With torch and g++ 11 or newer installed, pip install --no-build-isolation builds it; "
            "pydml.use_backend('tiled') asks for plain PyTorch, without this warning"
        )


def named(requested: str) -> bool:
    """Was the backend asked for, by the call or by :func:`use_backend`, or left to pydml?"""
    return requested != "auto" or _chosen.name != "auto"


def able(backend: str, asked_for: bool, policy: str, **options: Any) -> str:
    """The backend itself, or ``tiled`` where it has no kernels for these pairs and was not asked for by name."""
    why = lacks(backend, policy, **options)
    if why is None:
        return backend
    if asked_for:
        raise RuntimeError(f"{why}; got backend={backend!r}, wanted 'tiled', or 'auto', which falls back to it")
    _warn_once(f"{why}; backend 'auto' takes 'tiled' instead of {backend!r}, which is slower")
    return "tiled"


def lacks(backend: str, policy: str, *, mined: bool = False, pool_size: int = 1, view: str = "dot") -> str | None:
    """Why the pairs of a policy are beyond a backend's own kernels, or ``None``: they are written policy by policy."""
    _load(backend)
    limits = _tables.get(backend, {}).get("lacks")
    return None if limits is None else limits(policy, mined, pool_size, view)


def set_deterministic(flag: bool) -> None:
    """Must results have the same bits in every run? They do by default; ``False`` lets Triton's backward pass add in
    any order, which halves its recomputation. For the whole process: a backward pass runs in threads of its own.

    >>> pydml.set_deterministic(True)
    """
    global _deterministic
    if not isinstance(flag, bool):
        raise TypeError(f"flag: got {flag!r}, wanted True or False")
    _deterministic = flag


def tf32() -> bool:
    """Are fp32 products on a GPU to be formed in TF32? As PyTorch was told, by its older setters or its newer ones."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@contextmanager
def fp32_products(name: str) -> Iterator[None]:
    """Form fp32 products on a GPU in "tf32", or as "ieee"."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, name
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def largest_class(rows: int) -> Iterator[None]:
    """Promise that no class has more than ``rows`` members among the columns of a batch, for the whole process.

    Only triplets on GPUs ask: they look at 256 positives of a row at a time and, since nobody waits to hear how many
    there are, launch as many rounds as a single class would need. A batch that breaks the promise gives NaN.

    >>> with pydml.largest_class(4):
    ...     loss = pydml.losses.TripletMarginLoss()(torch.randn(8, 2), torch.arange(8) // 4)
    """
    global _largest_class
    before, _largest_class = _largest_class, checks.integer("rows", rows, least=1)
    try:
        yield
    finally:
        _largest_class = before


def class_limit(n_cols: int) -> int:
    """What :func:`largest_class` said, or all columns."""
    return n_cols if _largest_class is None else min(_largest_class, n_cols)


def deterministic() -> bool:
    """What :func:`set_deterministic` said, unless PyTorch itself is told to be deterministic."""
    return _deterministic or torch.are_deterministic_algorithms_enabled()


def kernel(backend: str, engine: str) -> Kernel:
    """The function of ``backend`` that runs ``engine`` (an op's name); it takes what :mod:`pydml.declared` declares."""
    _load(backend)
    try:
        return _tables[backend][engine]
    except KeyError:
        raise RuntimeError(
            f"backend: {backend!r} has no {engine!r} engine; "
            f"it has {', '.join(sorted(_tables.get(backend, {}))) or 'none'}"
        ) from None


def runs_on(backend: str, call: Any) -> tuple[str, str | None]:
    """The backend that runs a call, and why that is ``tiled`` where another was chosen: its kernels do not take it."""
    _load(backend)
    yields = _tables.get(backend, {}).get("yields")
    why = None if yields is None else yields(call)
    return ("tiled", why) if why else (backend, None)


def saved_size(backend: str, call: Any) -> int:
    """How much the kernel of a call keeps for its backward: bytes, tiles, or what else the declaration counts."""
    return int(kernel(runs_on(backend, call)[0], f"{call.op}_saved")(call))


@dataclass(frozen=True)
class Ran:
    """One kernel call: the op, the backend that ran it, rows and columns; what was chosen and why it is another."""

    op: str
    backend: str
    shape: tuple[int, int]
    chosen: str
    why: str | None


#: What :func:`recording` blocks have seen; for the whole process, because a backward pass runs in threads of its own.
_recordings: list[list[Ran]] = []


@contextmanager
def recording() -> Iterator[list[Ran]]:
    """List the kernels that run inside the block.

    >>> with pydml.recording() as calls:
    ...     loss = pydml.losses.MultiSimilarityLoss()(torch.randn(8, 2), torch.arange(8) // 4, backend="tiled")
    >>> [(ran.op, ran.backend, ran.shape) for ran in calls]
    [('pair', 'tiled', (8, 8))]
    """
    calls: list[Ran] = []
    _recordings.append(calls)
    try:
        yield calls
    finally:
        _recordings[:] = [other for other in _recordings if other is not calls]


def run_kernel(received: Any, backend: str) -> Any:
    """Run the kernel of a declared call, or of its backward, on the backend or, with a warning, where it yields to."""
    call = getattr(received, "call", received)
    engine = call.op if received is call else f"{call.op}_backward"
    taken, why = runs_on(backend, call)
    if why:
        _warn_once(f"{call.op}: {why}; it runs on 'tiled' instead of {backend!r}, which is slower")
    if _recordings:
        rows, cols = (getattr(call, side) for side in call.sides[:2])
        shape = len(rows), len(rows if cols is None else cols)
        for calls in _recordings:
            calls.append(Ran(engine, taken, shape, backend, why))
    return kernel(taken, engine)(received)
