"""Gradient caching (Gao et al. 2021): the gradient of a batch that is too large for the network's memory.

1. Embed micro-batches without a graph. 2. One loss on all embeddings; its gradient by them is B×d numbers.
3. Embed each micro-batch again, now with a graph, and send its rows of that gradient through it.

A loss reaches the network only through the embeddings, so the sum over micro-batches *is* the gradient of the whole
batch. That needs the second pass to see what the first saw: the state of the random number generators is put back for
dropout, and buffers (the running statistics of BatchNorm) are put back so that they are updated once. BatchNorm in
training mode normalises with the statistics of the micro-batch: the result is exact for that network, but it is another
network than BatchNorm over the whole batch. Freeze it, or use layers that know one image at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor], Tensor]


def cached_backward(
    model: nn.Module,
    parts: Sequence[Any],
    loss: Loss,
    *,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    scale: Callable[[Tensor], Tensor] = lambda value: value,
    on_loss: AbstractContextManager[Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of ``loss(model(all parts))`` to the parameters of the model and of the loss.

    Parameters
    ----------
    model
        The network; under DistributedDataParallel gradients are exchanged with the last part only.
    parts
        The micro-batches. With a single one this is an ordinary backward pass, without a second forward pass.
    loss
        From all embeddings [B, d] to a scalar.
    forward
        How to call the model on a part; default ``model(part)``. Mixed precision belongs here.
    scale
        Applied to the loss before its backward pass: ``GradScaler.scale``.
    on_loss
        Entered around the loss' forward and backward pass, to time them.

    Returns
    -------
    loss, embeddings
        Both detached; the loss unscaled.

    Examples
    --------
    >>> model = torch.nn.Linear(8, 4)
    >>> images, labels = torch.randn(64, 8), torch.arange(64) % 8
    >>> loss_fn = pydml.losses.MultiSimilarityLoss()
    >>> value, z = cached_backward(model, images.split(16), lambda z: loss_fn(z, labels))
    >>> z.shape, model.weight.grad.shape
    (torch.Size([64, 4]), torch.Size([4, 8]))
    """
    call = forward or (lambda model, part: model(part))
    if not parts:
        raise ValueError("parts: got none, wanted at least one micro-batch")
    whole = len(parts) == 1
    states: list[Any] = []
    buffers = [buffer.clone() for buffer in model.buffers()] if not whole else []
    with torch.set_grad_enabled(whole):
        embedded = []
        for part in parts:
            states.append(None if whole else _generators(model))
            z = call(model, part)
            embedded.append(z.float() if z.dtype in (torch.float16, torch.bfloat16) else z)
    after = None if whole else _generators(model)
    z = torch.cat([e.detach() for e in embedded]).requires_grad_()
    with on_loss or nullcontext():
        value = loss(z)
        scale(value).backward()
    grad = z.grad if z.grad is not None else torch.zeros_like(z)

    if whole:
        embedded[0].backward(grad)
        return value.detach(), z.detach()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    grads = grad.split([len(e) for e in embedded])
    for i, (part, state) in enumerate(zip(parts, states, strict=True)):
        _set_generators(state)
        last = i == len(parts) - 1
        no_sync = getattr(model, "no_sync", None)
        with nullcontext() if last or no_sync is None else no_sync():
            again = call(model, part)
            again.backward(grads[i].to(again.dtype))
    _set_generators(after)
    return value.detach(), z.detach()


def _generators(model: nn.Module) -> tuple[Tensor, list[tuple[torch.device, Tensor]]]:
    """The state of the random number generators that the model's layers may draw from."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return torch.get_rng_state(), [(device, torch.cuda.get_rng_state(device)) for device in devices]


def _set_generators(state: Any) -> None:
    cpu, devices = state
    torch.set_rng_state(cpu)
    for device, value in devices:
        torch.cuda.set_rng_state(value, device)
