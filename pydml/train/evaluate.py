"""Embeddings of whole sets, and what they are worth: Recall@K, MAP@R, R-precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pydml import metrics
from pydml.train.batches import Images, Part, load


def autocast(device: torch.device, amp: str) -> Any:
    """The context of mixed precision; "none" switches it off."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp, torch.bfloat16)
    return torch.autocast(device.type, dtype=dtype, enabled=amp != "none")


def embed(
    model: nn.Module,
    data: Any,
    transform: Callable[[Any], Any] | None = None,
    *,
    batch: int = 256,
    workers: int = 0,
    amp: str = "none",
    indices: Sequence[int] | None = None,
) -> Tensor:
    """Embeddings [N, d] of an image set, fp32, on the CPU; the model is put back into the mode it was in.

    Parameters
    ----------
    model
        From images [n, C, H, W] to vectors.
    data
        A :class:`pydml.data.ImageSet`.
    transform
        Applied to each PIL image; None: images as they are stored.
    batch, workers, amp
        Images at once, processes that load them, mixed precision.
    indices
        Which images; None: all.
    """
    chosen = range(len(data)) if indices is None else indices
    parts = [Part(0, 0, at, tuple(chosen[at : at + batch])) for at in range(0, len(chosen), batch)]
    device = next(model.parameters()).device
    training, rows = model.training, []
    model.eval()
    try:
        with torch.no_grad(), autocast(device, amp):
            for images in load(Images(data, transform, 0), parts, workers):
                rows.append(model(images.to(device, non_blocking=True)).float().cpu())
    finally:
        model.train(training)
    return torch.cat(rows) if rows else torch.empty(0, 1)


def evaluate(
    model: nn.Module,
    data: Any,
    gallery: Any = None,
    transform: Callable[[Any], Any] | None = None,
    *,
    ks: Sequence[int] = (1, 10, 100, 1000),
    **options: Any,
) -> dict[str, float]:
    """Recall@K, MAP@R and R-precision of a set, each image a query against the others, or against a gallery."""
    query = embed(model, data, transform, **options)
    if gallery is None:
        return metrics.retrieval_metrics(query, data.labels, ks)
    found = embed(model, gallery, transform, **options)
    return metrics.retrieval_metrics(query, data.labels, ks, found, gallery.labels)
