"""The ``cpu`` backend: the C++ ops of ``pydml._C`` as kernels for :mod:`pydml.ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import pydml._C
from pydml import tiled
from pydml.backends import Kernel
from pydml.policy import POLICIES
from pydml.tiled.sides import Side, compute_dtype, twins

#: Engines of the extension, by the names of the ops.
ENGINES = (
    "pair",
    "pair_backward",
    "dots",
    "dots_backward",
    "listed",
    "listed_backward",
    "listed_triplets",
    "listed_triplets_backward",
    "histogram",
    "histogram_backward",
    "triplet",
    "triplet_backward",
    "extremes",
    "topk",
    "mined",
    "sample",
    "rank",
)
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


def pair_saved(rows: Tensor, cols: Tensor | None, policy: str, *rest: Any) -> int:
    """Bytes of the live pairs that the forward pass of ``pair`` keeps for the backward pass (csrc/cpu/pair.cpp)."""
    epsilon, pool_size = rest[3], rest[4]
    if epsilon is None and not POLICIES[policy].sparse:
        return 0
    n_rows = rows.shape[0]
    n_cols = n_rows if cols is None else cols.shape[0] // pool_size
    entry = 16 if rows.dtype == torch.float64 else 8
    return 16 * tile_count(rows, cols, pool_size) + 32 * (n_rows + n_cols) * entry


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


def _modest_classes(name: str, first_label: int) -> Kernel:
    """The C++ kernel, or the tiled one where a class is too large for it (or where it has no such option)."""
    native: Kernel = getattr(torch.ops.pydml_cpu, name).default

    def run(*arguments: Any, **selves: Any) -> Any:
        swap = name.startswith("triplet") and arguments[first_label + 4]
        if swap or most_positives(*arguments[first_label : first_label + 2]) > MOST_POSITIVES:
            return tiled.KERNELS[name](*arguments, **selves)
        return native(*arguments, **selves)

    return run


def _rank(rows: Tensor, cols: Tensor | None, row_labels: Tensor, col_labels: Tensor | None, normalize: bool) -> Any:
    """The C++ kernel, or the tiled one where equal columns have different labels: BLAS may give them different bits.

    fp64 has dot products of our own, which do not.
    """
    arguments: tuple[Any, ...] = rows, cols, row_labels, col_labels, normalize
    columns, labels = (rows, row_labels) if cols is None or col_labels is None else (cols, col_labels)
    if compute_dtype(rows) != torch.float64:
        first = twins(Side(columns, normalize).x)
        if first is not None and bool((labels != labels[first]).any()):
            return tiled.KERNELS["rank"](*arguments)
    return _modest_classes("rank", 2)(*arguments)


missing = [name for name in ENGINES if not hasattr(torch.ops.pydml_cpu, name)]
if missing:
    raise ImportError(f"pydml._C was built from other sources: it has no {', '.join(missing)}; build it again")

#: Policies that the kernels were compiled for.
COMPILED = tuple(pydml._C.losses())

KERNELS: dict[str, Kernel] = {
    "lacks": lacks,
    **{name: getattr(torch.ops.pydml_cpu, name).default for name in ENGINES},
    "pair_saved": pair_saved,
    "histogram_saved": tile_count,
    "triplet": _modest_classes("triplet", 2),
    "triplet_backward": _modest_classes("triplet_backward", 3),
    "rank": _rank,
}
