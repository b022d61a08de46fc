"""The ``cuda`` backend: the kernels of csrc/cuda behind the ops of :mod:`pydml.ops`.

``cuda-emulated`` is the same code on CPU tensors, with the kernels run by the emulator of the tests: a library that
PYDML_CUDA_EMULATED names. Nothing here waits for the device, except ``mined``: how long its results are is data.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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

#: Engines by op; each takes the table of C++ ops, then the arguments of the op.
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


def _runs_here(name: str, arguments: Sequence[Any]) -> bool:
    """Can the kernels take it? They know no fp64, and only softmax losses with pools that fit a tile."""
    if any(isinstance(t, Tensor) and t.ndim == 2 and t.dtype == torch.float64 for t in arguments):
        return False
    if name.startswith("pair"):
        policy, *_, pool_size, _ = arguments[6:13] if name == "pair" else arguments[10:17]
        return bool(pool_size == 1 or (pool_size <= TILE and policy == "exponential"))
    return True


def _engine(ops: Any, name: str) -> Kernel:
    kernel = ENGINES[name]

    def run(*arguments: Any) -> Any:
        return kernel(ops, *arguments) if _runs_here(name, arguments) else tiled.KERNELS[name](*arguments)

    return run


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
    return tiled.KERNELS | {"lacks": gpu_lacks} | engines | triplets_by(engines["dots"], engines["dots_backward"])
