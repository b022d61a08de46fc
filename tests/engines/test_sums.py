"""Sums with the same bits every time."""

from __future__ import annotations

import pytest
import torch
from helpers import generator
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pydml import sums


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (11,), (3, 16), (2, 3, 17)])
def test_doubling_is_cumsum_with_its_gradient(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=generator(1), dtype=torch.float64, requires_grad=True)
    g = torch.randn(shape, generator=generator(2), dtype=torch.float64)
    for got, want in zip(
        (sums._doubling(x), *torch.autograd.grad(sums._doubling(x), x, g)),
        (x.cumsum(-1), *torch.autograd.grad(x.cumsum(-1), x, g)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    assert torch.equal(sums.running_sum(x), x.cumsum(-1))


def test_values_are_added_at_their_indices_with_gradients() -> None:
    total, values = torch.ones(4, 2, requires_grad=True), torch.arange(6.0).view(3, 2).requires_grad_()
    result = sums.add_at(total, torch.tensor([3, 0, 3]), values)
    assert result.tolist() == [[3, 4], [1, 1], [1, 1], [5, 7]]
    result.square().sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[10, 14], [6, 8], [10, 14]]
    assert total.grad is not None and torch.equal(total.grad, 2 * result.detach())


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "op"), [("cpu", "index_add_"), ("cuda", "index_put_")])
def test_neither_device_adds_by_atomics(device: str, op: str) -> None:
    """On a CPU index_put_ would, on a GPU index_add_."""
    with FakeTensorMode(), Names() as names:
        total, index = torch.empty(3, device=device), torch.empty(4, dtype=torch.int64, device=device)
        sums.add_at_(total, index, torch.empty(4, device=device))
    assert any(name.startswith(op) for name in names.seen)
