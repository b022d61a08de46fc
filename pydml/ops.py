"""The torch ops: one schema, one fake and one autograd formula for each engine, whatever the backend.

What an op takes is declared in :mod:`pydml.opchecks`; its kernel is looked up by the ``backend`` argument
(:mod:`pydml.backends`). Engines leave row statistics behind, not
losses: what a loss makes of them is a little PyTorch on [B] vectors in ``pydml/losses``, differentiated by autograd.
The backward ops take the output gradients, what the forward left behind, and the forward's own arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from pydml.backends import interpreted, kernel
from pydml.checks import transformed
from pydml.opchecks import OPS, Op
from pydml.policy import POLICIES

#: Ops whose output sizes are data: a compiler cannot look into them.
_OPAQUE = ("mined",)


def compute_dtype(z: Tensor) -> torch.dtype:
    """fp64 stays fp64, everything else is computed, and returned, in fp32."""
    return torch.float64 if z.dtype == torch.float64 else torch.float32


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Our dtypes are our own choice: no operation inside becomes one of lower precision."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _define(declared: Op, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the op as declared; its last argument is the backend, the kernel gets all the others."""
    name = declared.name
    torch.library.define(f"pydml::{name}", declared.schema)

    run = _direct(name)

    def contiguous(*arguments: Any) -> Any:
        """Compilers may lay out arguments as they like, so the layout of what comes back must not hang on them."""
        declared.check(arguments)
        output = run(*arguments)
        return tuple(t.contiguous() for t in output) if isinstance(output, tuple) else output.contiguous()

    def see_through(mode: Any, op: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        """As torch.library.triton_op: a compiler gets the launches themselves, and what is around them to fuse."""
        if arguments[-1] != "triton" or interpreted() or name in _OPAQUE:
            return mode.__torch_dispatch__(op, types, arguments, keywords)
        with mode:
            return run(*arguments)

    def checked_fake(*arguments: Any) -> Any:
        declared.check_options(arguments)
        return fake(*arguments)

    torch.library.impl(f"pydml::{name}", "default", contiguous)
    torch.library.register_fake(f"pydml::{name}", checked_fake)
    torch.library.register_torch_dispatch(f"pydml::{name}", FunctionalTensorMode, see_through)
    op: Callable[..., Any] = getattr(torch.ops.pydml, name).default
    return op


def _no_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "pydml: double backward is not supported by the fused ops; use backend='dense' for second derivatives of "
        "losses on cosines (PyTorch has none of its distances)"
    )


def _no_transform() -> None:
    """torch.func sees into PyTorch's own operations only, and its messages name neither us nor what to do."""
    if transformed():
        raise RuntimeError(
            "pydml: torch.func (grad, vmap, jacrev, jvp) does not see into the fused ops; use backend='dense' (jvp on "
            "cosines of proxies only: PyTorch has none of its distances), or loss.backward() and torch.autograd.grad"
        )


def _no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise RuntimeError("pydml: forward-mode derivatives are not supported by the fused ops; use backend='dense'")


def _differentiable(declared: Op, fake: Callable[..., Any], grads: int, kept: int) -> Callable[..., Any]:
    """Define an op and its backward: gradients of the first ``grads`` outputs flow to rows and columns.

    The backward op gets those gradients, the first ``kept`` outputs, the forward's arguments, and which of the two
    gradients are wanted; it returns both, empty where not wanted.
    """
    name = declared.name
    op = _define(declared, fake)

    def fake_backward(*args: Any) -> tuple[Tensor, Tensor]:
        rows, cols = args[grads + kept : grads + kept + 2]
        want_rows, want_cols = args[-3:-1]
        return (
            torch.empty_like(rows, memory_format=torch.contiguous_format) if want_rows else rows.new_empty(0),
            torch.empty_like(cols, memory_format=torch.contiguous_format) if want_cols else rows.new_empty(0),
        )

    back = _define(declared.backward(grads, kept), fake_backward)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = [*outputs[:kept], *(x for x in inputs if isinstance(x, Tensor))]
        ctx.save_for_backward(*tensors)
        ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in outputs[:grads]]

    def backward(ctx: Any, *g: Any) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        outputs, tensors = saved[:kept], iter(saved[kept:])
        inputs = [next(tensors) if t else x for x, t in zip(ctx.inputs, ctx.is_tensor, strict=True)]
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if x is None else x.contiguous()
            for x, (shape, dtype, device) in zip(g, ctx.shapes, strict=False)
        ]
        want_rows, want_cols = ctx.needs_input_grad[0], inputs[1] is not None and ctx.needs_input_grad[1]
        run = back if torch.is_grad_enabled() or traced(inputs[0]) else _direct(f"{name}_backward")
        d_rows, d_cols = run(*given, *outputs, *inputs[:-1], want_rows, want_cols, inputs[-1])
        rest = [None] * (len(inputs) - 2)
        return (d_rows if want_rows else None, d_cols if want_cols else None, *rest)

    torch.library.register_autograd(f"pydml::{name}", backward, setup_context=setup_context)
    torch.library.register_autograd(f"pydml::{name}_backward", _no_double_backward)

    class Eager(torch.autograd.Function):
        """The same op without the dispatcher's Python layers, which cost more than a small batch does."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = _direct(name)(*inputs)
            setup_context(ctx, inputs, output)
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.mark_non_differentiable(*outputs[grads:])
            return output

    Eager.backward = staticmethod(backward)  # type: ignore[method-assign]
    Eager.jvp = staticmethod(_no_forward_mode)  # type: ignore[method-assign]

    def call(*arguments: Any) -> Any:
        _no_transform()
        return op(*arguments) if traced(arguments[0]) else Eager.apply(*arguments)  # type: ignore[no-untyped-call]

    call._schema = op._schema  # type: ignore[attr-defined]
    return call


def _direct(name: str) -> Callable[..., Any]:
    """The kernel itself, with the arguments of the op."""

    def run(*arguments: Any) -> Any:
        with no_autocast(arguments[0].device):  # a backward may run inside a user's autocast
            return kernel(arguments[-1], name)(*arguments[:-1])

    return run


def traced(z: Tensor) -> bool:
    """Does anybody look on who needs to see the op: torch.compile, a fake or meta tensor, a dispatch mode?"""
    return (
        torch.compiler.is_compiling()
        or z.device.type == "meta"
        or type(z) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _fake_pair(rows: Tensor, cols: Any, row_labels: Any, col_labels: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    policy, backend = rest[2], rest[-1]
    n = rows.shape[0]
    dtype = compute_dtype(rows)
    saved = kernel(backend, "pair_saved")(rows, cols, *rest[2:-1])
    return (
        rows.new_empty((n, len(POLICIES[policy].slots)), dtype=dtype),
        rows.new_empty((n, 2), dtype=dtype),
        rows.new_empty(saved, dtype=torch.uint8),
    )


#: Row statistics [R, K] of a policy, mining thresholds [R, 2], and bytes that the backend keeps for its backward.
pair = _differentiable(OPS["pair"], _fake_pair, grads=1, kept=3)

#: Oriented similarities [n] of listed pairs.
dots = _differentiable(
    OPS["dots"],
    lambda rows, cols, i, *_: rows.new_empty(i.shape[0], dtype=compute_dtype(rows)),
    grads=1,
    kept=0,
)

#: Row statistics [rows, K] of a policy over listed pairs, from their u and their anchors.
listed = _differentiable(
    OPS["listed"],
    lambda pos, neg, a1, a2, row_field, policy, params, rows, _: pos.new_empty((rows, len(POLICIES[policy].slots))),
    grads=1,
    kept=1,
)


def _fake_histogram(rows: Tensor, cols: Any, row_labels: Any, col_labels: Any, nodes: int, *rest: Any) -> Any:
    counts = rows.new_empty((rows.shape[0], nodes), dtype=compute_dtype(rows))
    tiles = kernel(rest[-1], "histogram_saved")(rows, cols)
    return counts, torch.empty_like(counts), rows.new_empty((tiles, 2), dtype=compute_dtype(rows))


#: Soft counts [R, nodes] of u for positives and for negatives, and the range of u in tiles that the backend keeps.
histogram = _differentiable(OPS["histogram"], _fake_histogram, grads=2, kept=3)


def _fake_triplet(rows: Tensor, *_: Any) -> Any:
    total = rows.new_empty(rows.shape[0], dtype=compute_dtype(rows))
    return total, torch.empty_like(total)


#: Per anchor [R]: the sum of its triplets' losses, and how many of them are above 0.
triplet = _differentiable(OPS["triplet"], _fake_triplet, grads=1, kept=0)


def _fake_listed_triplets(rows: Tensor, cols: Any, a: Tensor, *_: Any) -> Any:
    return *_fake_triplet(rows), rows.new_empty(a.shape[0], dtype=compute_dtype(rows))


#: The same of listed triplets, and by how much each of them is violated [n].
listed_triplets = _differentiable(OPS["listed_triplets"], _fake_listed_triplets, grads=1, kept=3)

#: Columns [R] of the easy/hard/semi-hard positive and negative of every row, -1 where there is none.
extremes = _define(
    OPS["extremes"],
    lambda rows, cols, row_labels, *_: (torch.empty_like(row_labels), torch.empty_like(row_labels)),
)

#: The k pairs (i, j) of largest loss, -1 beyond the last.
topk = _define(
    OPS["topk"],
    lambda rows, cols, row_labels, col_labels, policy, params, k, *_: (
        row_labels.new_empty(k),
        row_labels.new_empty(k),
    ),
)


def _fake_mined(rows: Tensor, cols: Any, row_labels: Tensor, *_: Any) -> Any:
    context = torch.library.get_ctx()
    positives, negatives = context.new_dynamic_size(), context.new_dynamic_size()
    return tuple(row_labels.new_empty(n) for n in (positives, positives, negatives, negatives))


#: Multi-Similarity's mined pairs (a1, p, a2, n), or all pairs.
mined = _define(OPS["mined"], _fake_mined)

#: One distance-weighted negative for each anchor, -1 where there is none.
sample = _define(
    OPS["sample"],
    lambda rows, cols, row_labels, col_labels, anchors, *_: torch.empty_like(anchors),
)


def _fake_rank(rows: Tensor, cols: Any, row_labels: Tensor, *_: Any) -> Any:
    n = rows.shape[0]
    pair_of = row_labels.new_empty((n, 2))
    return row_labels.new_empty(n), pair_of, torch.empty_like(pair_of), pair_of.to(torch.float64)


#: Per query: positives [R], negatives above the best, hits and average precision among the first R [R, 2].
rank = _define(OPS["rank"], _fake_rank)
