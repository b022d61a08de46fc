"""The ``cpu`` backend: the C++ ops of ``pydml._C`` as kernels for :mod:`pydml.ops`.

C++ registers implementations only; the schemas of its ops are made here, from the declarations.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import pydml._C
from pydml.backends import Kernel
from pydml.declared import CALLS, Backward, Histogram, Pair, op
from pydml.policy import POLICIES
from pydml.tiled.sides import Side, compute_dtype, twins

#: Engines that hold the positives of all rows at once do so up to this class size; beyond it the tiled ones, which hold
#: those of one block of rows, take over, so that memory stays linear in the batch.
MOST_POSITIVES = 64
#: Columns that one pooled column may stand for; as in csrc/cpu/matrix.h.
MOST_POOLED = 4096


def block_size(n: int) -> int:
    """Edge of a tile; must agree with csrc/cpu/matrix.h."""
    return 256 if n >= 1024 else 128 if n >= 512 else 64


def tile_count(rows: Tensor, cols: Tensor | None, pool_size: int = 1) -> int:
    """Tiles of the matrix, as csrc/cpu/matrix.h cuts it."""
    n_rows = rows.shape[0]
    n_cols = n_rows if cols is None else cols.shape[0] // pool_size
    block = block_size(n_rows if cols is None or n_rows > n_cols else n_cols)
    row_blocks = -(-n_rows // block)
    if cols is None:
        return row_blocks * (row_blocks + 1) // 2
    return row_blocks * -(-n_cols // max(1, block // pool_size))


def pair_saved(a: Pair) -> int:
    """Bytes of the live pairs that the forward pass of ``pair`` keeps for the backward pass (csrc/cpu/pair.cpp)."""
    if a.epsilon is None and not POLICIES[a.policy].sparse:
        return 0
    n_rows = a.rows.shape[0]
    n_cols = n_rows if a.cols is None else a.cols.shape[0] // a.pool_size
    entry = 16 if a.rows.dtype == torch.float64 else 8
    return 16 * tile_count(a.rows, a.cols, a.pool_size) + 32 * (n_rows + n_cols) * entry


def histogram_saved(a: Histogram) -> int:
    """Tiles whose range of u the forward pass of ``histogram`` keeps: all of them."""
    return tile_count(a.rows, a.cols)


def lacks(policy: str, mined: bool, pool_size: int, view: str) -> str | None:
    """What the C++ kernels do not do, by the argument that asks for it; csrc/cpu refuses the same."""
    if policy not in COMPILED:
        return f"policy: the C++ kernels know {', '.join(COMPILED)}, not {policy!r}"
    if mined and not POLICIES[policy].mines:
        mining = ", ".join(name for name in COMPILED if POLICIES[name].mines)
        return f"epsilon: the C++ kernels mine with {mining}, not with {policy!r}"
    if pool_size > MOST_POOLED:
        return f"pool_size: the C++ kernels pool up to {MOST_POOLED} columns, not {pool_size}"
    if pool_size > 1 and (view != "dot" or mined or POLICIES[policy].sparse):
        return f"pool_size: the C++ kernels pool dots without mining or hinges, not {view!r} with {policy!r}"
    return None


def most_positives(row_labels: Tensor, col_labels: Tensor | None) -> int:
    """Size of the largest class among the columns that the rows ask for."""
    among = (row_labels if col_labels is None else col_labels).sort().values
    if not len(among) or not len(row_labels):
        return 0
    return int((torch.searchsorted(among, row_labels, right=True) - torch.searchsorted(among, row_labels)).max())


def ambiguous(a: Any) -> bool:
    """Have equal columns different labels? BLAS may give them different bits, and `rank` compares them with each other.

    fp64 has dot products of our own, which do not.
    """
    columns, labels = (a.rows, a.row_labels) if a.cols is None else (a.cols, a.col_labels)
    if compute_dtype(a.rows) == torch.float64:
        return False
    first = twins(Side(columns, a.normalize).x)
    return first is not None and bool((labels != labels[first]).any())


def yields(a: Any) -> str | None:
    """Why a call is left to the tiled engines, or None."""
    if a.op == "triplet" and a.swap:
        return "the C++ kernels have no anchor-swapped triplets"
    if a.op in ("triplet", "rank") and most_positives(a.row_labels, a.col_labels) > MOST_POSITIVES:
        return f"the C++ kernels hold up to {MOST_POSITIVES} positives of a row, and a class here is larger"
    if a.op == "rank" and ambiguous(a):
        return "equal columns have different labels, and a matrix product may give them different bits"
    return None


def _engine(name: str) -> Kernel:
    """The C++ op of a name as a kernel; its schema is that of the declaration."""
    declared = op(name)
    torch.library.define(f"pydml_cpu::{name}", declared.kernel_schema)
    run: Kernel = getattr(torch.ops.pydml_cpu, name).default
    read = attrgetter(*(argument.name for argument in declared.forward_arguments))
    if not declared.is_backward:
        return lambda a: run(*read(a))
    grads, kept = declared.call.grads, declared.call.kept

    def backward(b: Backward[Any]) -> Any:
        own = [*(getattr(b.grad, name) for name in grads), *(getattr(b.out, name) for name in kept)]
        return run(*own, *read(b.call), *b.wants)

    return backward


ENGINES = [*CALLS, *(f"{name}_backward" for name, call in CALLS.items() if call.grads)]
_compiled = set(torch._C._dispatch_get_registrations_for_dispatch_key("CPU"))
if missing := [name for name in ENGINES if f"pydml_cpu::{name}" not in _compiled]:
    raise ImportError(f"pydml._C was built from other sources: it has no {', '.join(missing)}; build it again")

#: Policies that the kernels were compiled for.
COMPILED = tuple(pydml._C.losses())

KERNELS: dict[str, Kernel] = {
    **{name: _engine(name) for name in ENGINES},
    "lacks": lacks,
    "yields": yields,
    "pair_saved": pair_saved,
    "histogram_saved": histogram_saved,
}
