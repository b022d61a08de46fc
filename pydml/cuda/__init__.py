"""The ``cuda`` backend: the kernels of csrc/cuda behind the ops of :mod:`pydml.ops`.

``cuda-emulated`` is the same code on CPU tensors, with the kernels run by the emulator of the tests: a library that
PYDML_CUDA_EMULATED names. Nothing here waits for the device, except ``mined``: how long its results are is data.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

from pydml import tiled
from pydml.backends import Kernel
from pydml.cuda.dots import dots, dots_backward
from pydml.cuda.histogram import histogram, histogram_backward
from pydml.cuda.matrix import TILE
from pydml.cuda.pair import pair, pair_backward
from pydml.cuda.rank import rank
from pydml.cuda.select import extremes, mined, sample
from pydml.cuda.topk import topk
from pydml.cuda.triplet import triplet, triplet_backward
from pydml.policy import gpu_lacks
from pydml.tiled.listed import triplets_by

#: Ops whose kernels are written for one block of columns only.
UNWRITTEN = ("against", "below", "above", "positives")
#: Engines by op; each takes the table of C++ ops, then what the op declares.
ENGINES: dict[str, Kernel] = {
    f.__name__: f
    for f in (
        pair,
        pair_backward,
        dots,
        dots_backward,
        histogram,
        histogram_backward,
        triplet,
        triplet_backward,
        extremes,
        topk,
        mined,
        sample,
        rank,
    )
}


def yields(a: Any) -> str | None:
    """Why a call is left to the tiled engines, or None."""
    first = getattr(a, a.sides[0])
    if first.dtype == torch.float64:
        return "fp64 is for checking, and the CUDA kernels have none"
    if a.op in UNWRITTEN:
        return "the CUDA backend has no kernel for it"
    if a.op == "triplet" and a.swap:
        return "the CUDA kernels have no anchor-swapped triplets"
    if a.op == "pair" and a.pool_size > 1 and (a.pool_size > TILE or a.policy != "exponential"):
        return f"the CUDA kernels pool up to {TILE} columns, for softmax losses"
    return None


def _engine(ops: Any, name: str) -> Kernel:
    kernel = ENGINES[name]
    return lambda received: kernel(ops, received)


@functools.cache
def kernels(emulated: bool) -> dict[str, Kernel]:
    """The table of kernels by op; raises where the library, or a GPU for it, is missing."""
    if emulated:
        path = os.environ.get("PYDML_CUDA_EMULATED", "")
        if not path:
            raise ImportError("the kernels were not built for the emulator (the tests do, and set PYDML_CUDA_EMULATED)")
    else:
        found = Path(__file__).parents[1] / "_cuda.so"
        if not found.exists():
            raise ImportError("pydml was built without the CUDA kernels")
        if torch.version.cuda is None:
            raise ImportError(f"torch {torch.__version__} was built without CUDA")
        if not torch.cuda.is_available():
            raise ImportError("torch sees no GPU here")
        path = str(found)
    torch.ops.load_library(path)
    ops = torch.ops.pydml_cuda_emulated if emulated else torch.ops.pydml_cuda
    engines = {name: _engine(ops, name) for name in ENGINES}
    table = tiled.KERNELS | {"lacks": gpu_lacks, "yields": yields} | engines
    return table | triplets_by(engines["dots"], engines["dots_backward"])
