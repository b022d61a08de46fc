"""Matrix products outside of the engines, whose gradients no autocast rounds.

A backward pass that runs inside ``torch.autocast`` forms the products of the gradient in half precision, whatever the
forward pass was told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pydml.ops import no_autocast


class _Product(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with no_autocast(a.device):
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (a, b), (want_a, want_b) = ctx.saved_tensors, ctx.needs_input_grad
        return product(g, b.mT) if want_a else None, product(a.mT, g) if want_b else None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        parts = [product(x, y) for x, y in ((da, b), (a, db)) if x is not None and y is not None]
        return torch.stack(parts).sum(0)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b [..., m, n] of two matrices, or of as many of both."""
    if torch.compiler.is_compiling():  # gradients are traced with the forward pass, outside of any autocast
        return a @ b
    out: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return out
