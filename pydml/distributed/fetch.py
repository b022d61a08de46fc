"""Single rows from whatever rank holds them: what losses on chosen pairs need instead of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pydml.distributed.group import Group
from pydml.sums import add_at


class _Fetch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, asked: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.save_for_backward(asked)
        ctx.rows, ctx.send, ctx.receive, ctx.group = len(x), send, receive, group
        return group.exchange(x.detach()[asked], send, receive, "chosen embeddings").clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (asked,), (grad,) = ctx.saved_tensors, grads
        home = ctx.group.exchange(grad, ctx.receive, ctx.send, "gradients of chosen embeddings")
        d_x = add_at(home.new_zeros(ctx.rows, home.shape[1]), asked, home)
        return d_x, None, None, None, None


def owners(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Which rank holds each row of the concatenated batch."""
    ends = torch.tensor(sizes, device=index.device).cumsum(0)
    return torch.searchsorted(ends, index, right=True)


def fetch(x: Tensor, wanted: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """Rows ``wanted`` (ascending, each once) of the ranks' ``x``, one after the other, with gradients to their owners.

    All ranks must call it, each with its own wishes.
    """
    mine = torch.bincount(owners(wanted, sizes), minlength=group.size)
    wishes = group.all_gather(mine[None].to(group.device), [1] * group.size, "numbers of chosen rows").tolist()
    receive, send = wishes[group.rank], [row[group.rank] for row in wishes]
    asked = group.exchange(wanted, receive, send, "chosen rows") - sum(sizes[: group.rank])
    out: Tensor = _Fetch.apply(x, asked, send, receive, group)  # type: ignore[no-untyped-call]
    return out
