"""The torch ops: one for each declaration of :mod:`pydml.declared`, with its fake and its autograd formula.

Its kernel is looked up by the ``backend`` argument (:mod:`pydml.backends`). Engines leave row statistics behind, not
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

from pydml.backends import interpreted, run_kernel
from pydml.checks import transformed
from pydml.declared import CALLS, Backward, Call, Op, op
from pydml.tiled.sides import compute_dtype

__all__ = ["call", "compute_dtype", "no_autocast", "traced"]

#: Ops whose output sizes are data: a compiler cannot look into them.
_OPAQUE = ("mined",)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Our dtypes are our own choice: no operation inside becomes one of lower precision."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def direct(received: Call | Backward[Any], backend: str) -> Any:
    """The kernel itself, as an op calls it."""
    made: Any = received.call if isinstance(received, Backward) else received
    with no_autocast(getattr(made, made.sides[0]).device):  # a backward may run inside a user's autocast
        return run_kernel(received, backend)


def traced(z: Tensor) -> bool:
    """Does anybody look on who needs to see the op: torch.compile, a fake or meta tensor, a dispatch mode?"""
    return (
        torch.compiler.is_compiling()
        or z.device.type == "meta"
        or type(z) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _define(declared: Op) -> Callable[..., Any]:
    """Define the op as declared; its last argument is the backend."""
    name = declared.name
    torch.library.define(f"pydml::{name}", declared.schema)

    def contiguous(*values: Any) -> Any:
        """Compilers may lay out arguments as they like; the layout of what comes back must not depend on them."""
        declared.check(values)
        output = direct(declared.read(values[:-1]), values[-1])
        return tuple(t.contiguous() for t in output) if isinstance(output, tuple) else output.contiguous()

    def see_through(mode: Any, called: Any, types: Any, values: Any, keywords: Any) -> Any:
        """As torch.library.triton_op: a compiler gets the launches themselves, and what is around them to fuse."""
        if values[-1] != "triton" or interpreted() or name in _OPAQUE:
            return mode.__torch_dispatch__(called, types, values, keywords)
        with mode:
            return direct(declared.read(values[:-1]), values[-1])

    torch.library.impl(f"pydml::{name}", "default", contiguous)
    torch.library.register_fake(f"pydml::{name}", lambda *values: declared.fake(values))
    torch.library.register_torch_dispatch(f"pydml::{name}", FunctionalTensorMode, see_through)
    registered: Callable[..., Any] = getattr(torch.ops.pydml, name).default
    return registered


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


def _differentiable(declared: Op) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Define an op and its backward; the registered op, and the same without the dispatcher's Python layers."""
    made, name = declared.call, declared.name
    backward_op = op(f"{name}_backward")
    registered, back = _define(declared), _define(backward_op)
    names, kept = declared.names, len(made.kept)
    sides = [names.index(side) for side in made.sides]
    outputs = made.Out._fields
    left = [outputs.index(result) for result in made.kept]
    carried = [outputs.index(result) for result in made.grads]
    constant = [i for i in range(len(outputs)) if i not in carried]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*(results[i] for i in left), *(x for x in inputs if isinstance(x, Tensor)))
        ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.like = [(results[i].shape, results[i].dtype, results[i].device) for i in carried]

    def backward(ctx: Any, *g: Any) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        results, tensors = saved[:kept], iter(saved[kept:])
        inputs = [next(tensors) if is_tensor else x for x, is_tensor in zip(ctx.inputs, ctx.is_tensor, strict=True)]
        grads = [
            torch.zeros(shape, dtype=dtype, device=device) if g[i] is None else g[i].contiguous()
            for i, (shape, dtype, device) in zip(carried, ctx.like, strict=True)
        ]
        wanted = [inputs[side] is not None and ctx.needs_input_grad[side] for side in sides]
        values = [*grads, *results, *inputs[:-1], *wanted]
        if torch.is_grad_enabled() or traced(inputs[sides[0]]):
            found = back(*values, inputs[-1])
        else:
            found = direct(backward_op.read(values), inputs[-1])
        gradients: list[Any] = [None] * len(inputs)
        for side, gradient, want in zip(sides, found, wanted, strict=True):
            gradients[side] = gradient if want else None
        return tuple(gradients)

    torch.library.register_autograd(f"pydml::{name}", backward, setup_context=setup_context)
    torch.library.register_autograd(f"pydml::{name}_backward", _no_double_backward)

    class Eager(torch.autograd.Function):
        """The dispatcher's Python layers cost more than a small batch does."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = direct(declared.read(inputs[:-1]), inputs[-1])
            setup_context(ctx, inputs, output)
            results = output if isinstance(output, tuple) else (output,)
            ctx.mark_non_differentiable(*(results[i] for i in constant))
            return output

    Eager.backward = staticmethod(backward)  # type: ignore[method-assign]
    Eager.jvp = staticmethod(_no_forward_mode)  # type: ignore[method-assign]
    return registered, Eager.apply


#: Op -> the registered op, and what an eager call takes instead.
_REGISTERED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
#: Op -> the names of its arguments.
_NAMES = {name: op(name).names for name in CALLS}
for _name, _call in CALLS.items():
    if _call.grads:
        _REGISTERED[_name] = _differentiable(op(_name))
    else:
        _registered = _define(op(_name))
        _REGISTERED[_name] = _registered, _registered


def call(made: Call, backend: str) -> Any:
    """Run an op: its results as a tuple, or its only one; differentiable where the declaration says so."""
    registered, eager = _REGISTERED[made.op]
    values = [getattr(made, name) for name in _NAMES[made.op]]
    _no_transform()
    if traced(getattr(made, made.sides[0])):
        return registered(*values, backend)
    return eager(*values, backend)
