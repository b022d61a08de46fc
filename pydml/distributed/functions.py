"""How tensors pass between «one rank's own» and «the same on all ranks», with their gradients.

A *replicated* tensor has the same value on every rank, and so has its gradient: every rank computes the whole epilogue
of a loss from the whole row statistics. What a rank computes from its own rows is a part. These functions lead from the
one to the other, and their backward passes say who owes whom a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pydml.distributed.group import Group


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int], what: str) -> Tensor:
        ctx.start, ctx.rows = sum(sizes[: group.rank]), len(x)
        return group.all_gather(x.detach(), sizes, what).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad[ctx.start : ctx.start + ctx.rows], None, None, None


class _GatherColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sizes: Sequence[int], what: str) -> Tensor:
        ctx.group, ctx.sizes, ctx.what = group, sizes, what
        return group.all_gather(x.detach(), sizes, what).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.reduce_scatter(grads[0], ctx.sizes, f"gradients of {ctx.what}"), None, None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        return group.all_reduce(x.detach(), what).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *grads, None, None


class _LogSumExp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        x = x.detach()
        top = group.all_reduce(x, what, largest=True).clamp_min(torch.finfo(x.dtype).min)
        total = top + group.all_reduce(torch.exp(x - top), what).log()
        ctx.save_for_backward(x, total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, total = ctx.saved_tensors
        return torch.where(torch.isneginf(x), 0, torch.exp(x - total) * grads[0]), None, None


class _Shared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.group.all_reduce(grads[0], f"gradients of {ctx.what}"), None, None


class _Scale(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


def gather_rows(x: Tensor, group: Group, sizes: Sequence[int], what: str) -> Tensor:
    """Own rows → the rows of all ranks, replicated."""
    out: Tensor = _GatherRows.apply(x, group, sizes, what)  # type: ignore[no-untyped-call]
    return out


def gather_columns(x: Tensor, group: Group, sizes: Sequence[int], what: str) -> Tensor:
    """Own rows → the rows of all ranks, for every rank to use in its own part: the parts' gradients are added up."""
    out: Tensor = _GatherColumns.apply(x, group, sizes, what)  # type: ignore[no-untyped-call]
    return out


def sum_over_ranks(x: Tensor, group: Group, what: str) -> Tensor:
    """A part of a sum → the sum, replicated."""
    out: Tensor = _Sum.apply(x, group, what)  # type: ignore[no-untyped-call]
    return out


def lse_over_ranks(x: Tensor, group: Group, what: str) -> Tensor:
    """Log-sum-exps over parts → those over everything, replicated; -inf is a sum of nothing."""
    out: Tensor = _LogSumExp.apply(x, group, what)  # type: ignore[no-untyped-call]
    return out


def shared(x: Tensor, group: Group, what: str) -> Tensor:
    """A replicated tensor that every rank uses for its own part: the parts' gradients are added up."""
    out: Tensor = _Shared.apply(x, group, what)  # type: ignore[no-untyped-call]
    return out


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """The same value; its gradient is multiplied."""
    out: Tensor = _Scale.apply(x, factor)  # type: ignore[no-untyped-call]
    return out
