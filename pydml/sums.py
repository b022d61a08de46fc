"""Sums with the same bits every time, on GPUs too, where PyTorch's usual ones add in any order."""

from __future__ import annotations

import torch
from torch import Tensor


def add_at(total: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """``total`` with each of the values added to its row of that index."""
    return add_at_(total.clone(), index, values)


def add_at_(total: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """The same, in place."""
    if total.is_cuda:  # index_add has atomics there, and index_put sorts; on a CPU index_put has them
        return total.index_put_((index,), values, accumulate=True)
    return total.index_add_(0, index, values)


def segment_lse(term: Tensor, index: Tensor, size: int) -> Tensor:
    """log Σ e^{term} of the terms of each index [size]; -inf where there are none."""
    top = term.new_full((size,), -torch.inf).scatter_reduce(0, index, term.detach(), "amax")
    top = top.clamp_min(torch.finfo(term.dtype).min)
    total = add_at(torch.zeros_like(top), index, torch.exp(term - top[index]))
    return torch.where(total == 0, -torch.inf, top + torch.log(torch.where(total == 0, 1, total)))


def running_sum(x: Tensor) -> Tensor:
    """Cumulative sums along the last dimension.

    >>> running_sum(torch.tensor([1, 2, 3]))
    tensor([1, 3, 6])
    """
    return _doubling(x) if x.is_cuda else x.cumsum(-1)


def _doubling(x: Tensor) -> Tensor:
    """Every element gets the sum of 2, then of 4, 8, … up to itself: PyTorch's cumsum on a GPU adds in any order."""
    step = 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], x[..., step:] + x[..., :-step]), -1)
        step *= 2
    return x
