"""The Triton kernels; installed as ``pydml.triton_kernels``, because the bare name belongs to another project.

Importing it needs Triton. On a machine without a GPU the kernels run in Triton's interpreter, slowly, if
``TRITON_INTERPRET=1`` is set before the import.
"""

from __future__ import annotations

from typing import Any

import torch

from pydml import tiled
from pydml.backends import Kernel
from pydml.policy import gpu_lacks
from pydml.tiled.listed import triplets_by
from pydml.triton_kernels.dots import dots, dots_backward
from pydml.triton_kernels.histogram import histogram, histogram_backward, histogram_saved
from pydml.triton_kernels.pair import pair, pair_backward, pair_saved
from pydml.triton_kernels.rank import rank
from pydml.triton_kernels.select import extremes, mined, sample
from pydml.triton_kernels.topk import topk
from pydml.triton_kernels.triplet import triplet, triplet_backward

#: Engines by the names of the ops, and the place of ``rows`` among their arguments.
ENGINES: dict[str, tuple[Kernel, int]] = {
    "pair": (pair, 0),
    "pair_backward": (pair_backward, 4),
    "pair_saved": (pair_saved, 0),
    "histogram": (histogram, 0),
    "histogram_backward": (histogram_backward, 5),
    "histogram_saved": (histogram_saved, 0),
    "triplet": (triplet, 0),
    "triplet_backward": (triplet_backward, 1),
    "dots": (dots, 0),
    "dots_backward": (dots_backward, 1),
    "extremes": (extremes, 0),
    "topk": (topk, 0),
    "mined": (mined, 0),
    "sample": (sample, 0),
    "rank": (rank, 0),
}


def _kernel(name: str, run: Kernel, place: int) -> Kernel:
    """Triton for fp32, bf16 and fp16; fp64 is for checking, and runs on the tiled engines."""
    plain: Kernel = tiled.KERNELS[name]

    def choose(*arguments: Any) -> Any:
        return (plain if arguments[place].dtype == torch.float64 else run)(*arguments)

    return choose


KERNELS: dict[str, Kernel] = {
    **tiled.KERNELS,
    "lacks": gpu_lacks,
    **{name: _kernel(name, *engine) for name, engine in ENGINES.items()},
}
KERNELS |= triplets_by(KERNELS["dots"], KERNELS["dots_backward"])
