"""Sharded losses under DDP and FSDP: parameters get the gradient of one process on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import CASES, Case, assert_close, make_batch, over
from ranks import ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pydml.distributed import ShardedLoss
from pydml.losses import LOSSES, MetricLoss

SHARDS, INPUTS, DIM, CLASSES = [11, 18], 6, 7, 5
SOME = ("ms-mined", "histogram", "dro_topk", "proxy_anchor", "triplet", "margin-per_class")


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(INPUTS, 9), nn.Tanh(), nn.Linear(9, DIM)).double()


def data() -> tuple[Tensor, Tensor]:
    return make_batch("trained", sum(SHARDS), INPUTS, CLASSES)


def named_gradients(*modules: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the names that parameters have before anything wraps them."""
    grads = {}
    for at, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            grad: Any = parameter.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            grads[f"{at}.{name.removeprefix('module.').removeprefix('loss.')}"] = whole
    return grads


def one_process(loss_fn: MetricLoss) -> dict[str, Tensor]:
    net, (x, y) = model(), data()
    loss = loss_fn(net(x), y)
    loss.backward()
    return {"loss": loss.detach(), **named_gradients(net, loss_fn)}


def trained(rank: int, size: int, case: Case, kind: str, mode: str) -> dict[str, Tensor]:
    """Loss and gradients of one step of a wrapped model."""
    net: Any = model()
    x, y = (t.split(SHARDS)[rank] for t in data())
    criterion: Any = ShardedLoss(case.build(CLASSES, DIM), mode=mode, ddp=True)
    if kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    else:
        net = DistributedDataParallel(net)
    if kind == "ddp of both" and [*criterion.parameters()]:
        criterion = DistributedDataParallel(criterion)
    loss = criterion(net(x), y)
    loss.backward()
    return {"loss": loss.detach(), **named_gradients(net, criterion)}


@pytest.mark.parametrize("kind", ["ddp", "ddp of both", "fsdp"])
@over(CASES, lambda case: case.id in SOME)
def test_a_wrapped_model_gets_the_gradient_of_one_process(case: Case, kind: str) -> None:
    want = one_process(case.build(CLASSES, DIM))
    for mode in ("ring", "gather"):
        for got in ranks(2)(trained, case, kind, mode):
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert_close(got[name], value, 1e-10, f"{name} in {mode}")


def curve(rank: int, size: int, name: str, steps: int) -> list[float]:
    """Losses of a training with SGD on the model and on the parameters of the loss, by one process or by all."""
    torch.manual_seed(1)
    arguments = (CLASSES, DIM) if LOSSES[name].__base__.__name__ == "ProxyLoss" else ()
    loss_fn: Any = LOSSES[name](*arguments).double()
    net: Any = model()
    x, y = data()
    if size > 1:
        x, y = (t.split(SHARDS)[rank] for t in (x, y))
        net, loss_fn = DistributedDataParallel(net), ShardedLoss(loss_fn, ddp=True)
    optimizer = torch.optim.SGD([*net.parameters(), *loss_fn.parameters()], lr=0.3, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["ms", "contrastive", "proxy_anchor", "fast_ap"])
def test_two_processes_follow_the_loss_curve_of_one(name: str) -> None:
    want = curve(0, 1, name, steps=25)
    assert want[-1] < 0.9 * want[0]  # it learns
    for got in ranks(2)(curve, name, 25):
        assert got == pytest.approx(want, rel=1e-6)


def test_proxies_start_equal_even_from_different_seeds() -> None:
    first, second = ranks(2)(drawn)
    assert torch.equal(first, second)


def drawn(rank: int, size: int) -> Tensor:
    torch.manual_seed(rank)
    module = ShardedLoss(LOSSES["proxy_anchor"](CLASSES, DIM))
    return copy.deepcopy(next(module.parameters()).detach())
