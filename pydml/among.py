"""The engines for rows that are some of the columns, as differentiable functions.

The ops know rows that are all of the columns, or none of them. A rank's rows among the columns of all ranks, or a batch
in a memory of batches, are neither: ``selves`` [R] says which column each row itself is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from pydml.backends import Kernel, kernel
from pydml.ops import no_autocast

#: Backends whose engines take ``selves``, and thresholds that were found elsewhere.
KNOWING = ("cpu", "tiled")
#: Engine -> how many outputs have gradients, and how many its backward wants to see again.
_OUTPUTS = {"pair": (1, 3), "histogram": (2, 3), "triplet": (1, 0)}


def knowing(backend: str, name: str) -> Kernel:
    """An engine that takes ``selves``: the backend's, or the tiled one."""
    return kernel(backend if backend in KNOWING else "tiled", name)


class _Among(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, cols: Tensor, selves: Tensor | None, backend: str, name: str, *options: Any
    ) -> Any:
        with no_autocast(rows.device):
            outputs = knowing(backend, name)(rows, cols, *options, selves=selves)
        grads, kept = _OUTPUTS[name]
        ctx.backend, ctx.name, ctx.options, ctx.kept = backend, name, options, kept
        ctx.save_for_backward(rows, cols, selves, *outputs[:kept])
        ctx.mark_non_differentiable(*outputs[grads:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, cols, selves, *kept = ctx.saved_tensors
        given = [grad.contiguous() for grad in grads[: _OUTPUTS[ctx.name][0]]]
        want = ctx.needs_input_grad[:2]
        with no_autocast(rows.device):
            back = knowing(ctx.backend, f"{ctx.name}_backward")
            d_rows, d_cols = back(*given, *kept, rows, cols, *ctx.options, *want, selves=selves)
        return d_rows if want[0] else None, d_cols if want[1] else None, *(None,) * (3 + len(ctx.options))


def among(
    rows: Tensor, cols: Tensor, selves: Tensor | None, backend: str, name: str, *options: Any
) -> tuple[Tensor, ...]:
    """Outputs of an engine; ``options`` are the op's arguments from the labels on, without the backend."""
    out: tuple[Tensor, ...] = _Among.apply(rows, cols, selves, backend, name, *options)  # type: ignore[no-untyped-call]
    return out
