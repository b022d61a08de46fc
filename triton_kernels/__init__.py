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
from pydml.triton_kernels import table
from pydml.triton_kernels.dots import dots, dots_backward
from pydml.triton_kernels.histogram import histogram, histogram_backward, histogram_saved
from pydml.triton_kernels.pair import pair, pair_backward, pair_saved
from pydml.triton_kernels.rank import rank
from pydml.triton_kernels.select import extremes, mined, sample
from pydml.triton_kernels.topk import topk
from pydml.triton_kernels.triplet import triplet, triplet_backward

#: Ops without a kernel here.
MISSING = ("against", "below", "above", "positives")


def yields(a: Any) -> str | None:
    """Why a call is left to the tiled engines, or None."""
    first = getattr(a, a.sides[0])
    if first.dtype == torch.float64:
        return "the Triton kernels take fp32, bf16 and fp16, not fp64"
    if a.op in MISSING:
        return "there is no Triton kernel for it yet"
    if a.op == "triplet" and a.swap:
        return "the Triton kernels have no anchor-swapped triplets"
    if a.op == "triplet" and a.smooth and a.selves is not None and table.architecture(first.device).name == "sm_100":
        return "Triton's compiler fails on smooth triplets of rows among the columns for sm_100"
    if a.op == "histogram" and a.view == "euclidean":
        return "the Triton kernels count cosines and squared distances, not distances"
    if hasattr(a, "row_labels") and not (first.shape[0] and (a.cols is None or a.cols.shape[0])):
        return "the matrix has no rows or no columns"
    return None


#: The engines of listed pairs and triplets are a few operations on top of ``dots``.
KERNELS: dict[str, Kernel] = {
    **tiled.KERNELS,
    **{
        f.__name__: f
        for f in (
            pair,
            pair_backward,
            pair_saved,
            histogram,
            histogram_backward,
            histogram_saved,
            triplet,
            triplet_backward,
            dots,
            dots_backward,
            extremes,
            topk,
            mined,
            sample,
            rank,
        )
    },
    **triplets_by(dots, dots_backward),
    "lacks": gpu_lacks,
    "yields": yields,
}
