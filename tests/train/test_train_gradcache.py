"""Gradient caching gives the gradient of the whole batch, in the memory of a micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close
from torch import Tensor, nn

from pydml.losses import MultiSimilarityLoss, ProxyAnchorLoss
from pydml.train import cached_backward


def network(*extra: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 32), *extra, nn.ReLU(), nn.Linear(32, 8)).to(dtype)


def batch(rows: int = 48, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 12, dtype=dtype, generator=torch.Generator().manual_seed(2)), torch.arange(rows) % 8


def grads(module: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def assert_grads(got: list[Tensor], want: list[Tensor], rtol: float = 1e-12) -> None:
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, rtol, "gradient", floor=1e-6)


@pytest.mark.parametrize("micro", [1, 7, 16, 48])
def test_gradient_is_that_of_the_whole_batch(micro: int) -> None:
    model, (images, labels), loss_fn = network(), batch(), MultiSimilarityLoss(epsilon=0.1)
    whole = loss_fn(model(images), labels)
    whole.backward()
    want = grads(model)
    value, z = cached_backward(model, images.split(micro), lambda z: loss_fn(z, labels))
    assert_close(value, whole, 1e-14)
    assert_grads(grads(model), want)
    assert z.shape == (48, 8) and not z.requires_grad and not value.requires_grad


def test_dropout_drops_the_same_units_in_both_passes() -> None:
    model, (images, labels), loss_fn = network(nn.Dropout(0.4)), batch(), MultiSimilarityLoss()
    torch.manual_seed(3)
    z = torch.cat([model(part) for part in images.split(16)])  # one graph over all micro-batches
    loss_fn(z, labels).backward()
    want, after = grads(model), torch.get_rng_state()
    torch.manual_seed(3)
    cached_backward(model, images.split(16), lambda z: loss_fn(z, labels))
    assert_grads(grads(model), want)
    assert torch.equal(torch.get_rng_state(), after), "the next step must draw what it would have drawn"


def test_a_wrong_dropout_mask_would_be_seen() -> None:
    """The comparison above can fail: another mask gives another gradient."""
    model, (images, labels), loss_fn = network(nn.Dropout(0.4)), batch(), MultiSimilarityLoss()
    found = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        cached_backward(model, images.split(16), lambda z: loss_fn(z, labels))
        found.append(grads(model))
    with pytest.raises(AssertionError):
        assert_grads(found[0], found[1], 1e-6)


def test_batchnorm_normalises_micro_batches_and_counts_them_once() -> None:
    model, (images, labels), loss_fn = network(nn.BatchNorm1d(32)), batch(), MultiSimilarityLoss()
    loss_fn(torch.cat([model(part) for part in images.split(16)]), labels).backward()
    want = grads(model)
    buffers = [b.clone() for b in model.buffers()]
    again = network(nn.BatchNorm1d(32))
    cached_backward(again, images.split(16), lambda z: loss_fn(z, labels))
    assert_grads(grads(again), want)
    for got, expected in zip(again.buffers(), buffers, strict=True):
        assert torch.equal(got, expected)


def test_parameters_of_the_loss_get_their_gradient_once() -> None:
    model, (images, labels) = network(), batch()
    loss_fn = ProxyAnchorLoss(num_classes=8, embedding_size=8).double()
    loss_fn(model(images), labels).backward()
    want, want_proxies = grads(model), grads(loss_fn)
    cached_backward(model, images.split(10), lambda z: loss_fn(z, labels))
    assert_grads(grads(model), want)
    assert_grads(grads(loss_fn), want_proxies)


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_mixed_precision_replays_the_same_numbers(amp: torch.dtype) -> None:
    model, (images, labels) = network(dtype=torch.float32), batch(dtype=torch.float32)
    loss_fn, scaler = MultiSimilarityLoss(), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def forward(model: nn.Module, part: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=amp):
            out: Tensor = model(part)
            return out

    found = []
    for micro in (48, 12):
        value, z = cached_backward(
            model, images.split(micro), lambda z: loss_fn(z, labels), forward=forward, scale=scaler.scale
        )
        assert z.dtype == torch.float32 and value < 100, "the loss comes back unscaled"
        found.append(grads(model))
    assert_grads(found[1], found[0], 0.02)  # sums over micro-batches are rounded to half precision in another order
    assert found[0][0].abs().max() > 1, "the gradient is scaled"


class Alive:
    """Bytes of the tensors that autograd keeps for backward passes, now and at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def __enter__(self) -> Alive:
        counter = self

        class Kept:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor, self.bytes = tensor, tensor.numel() * tensor.element_size()
                counter.now += self.bytes
                counter.peak = max(counter.peak, counter.now)

            def __del__(self) -> None:
                counter.now -= self.bytes

        self.hooks: Any = torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)


def test_a_batch_of_8192_needs_the_activations_of_a_micro_batch() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)), nn.Linear(256, 16))
    images, labels = torch.randn(8192, 256), torch.arange(8192) // 4
    loss_fn, peaks = MultiSimilarityLoss(epsilon=0.1), []
    for micro in (8192, 64):
        with Alive() as alive:
            cached_backward(model, images.split(micro), lambda z: loss_fn(z, labels))
        peaks.append(alive.peak)
    whole, cached = peaks
    assert whole > 8 * images.numel() * 4, "what eight layers keep"
    assert cached < whole / 20, "what one micro-batch and the loss keep"


def test_no_parts_is_an_error() -> None:
    with pytest.raises(ValueError, match="parts: got none"):
        cached_backward(network(), [], lambda z: z.sum())
