"""What the report draws, kept in the run itself: triplets, pair similarities and a retrieval gallery at some epochs."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pydml.train.checkpoint import write_atomically
from pydml.train.transforms import to_picture

#: Bins of the histograms of similarities on [-1, 1].
BINS = 100
#: Queries at most, drawn at random; each is compared with the whole set.
QUERIES = 4000
#: Rows and columns of the gallery, and its largest images.
SHOWN, NEIGHBOURS, THUMBNAIL = 10, 5, 96


def path(run: Path, epoch: int) -> Path:
    return run / "snapshots" / f"epoch-{epoch:04d}.npz"


def take(run: Path, epoch: int, z: Tensor, data: Any, seed: int = 0) -> None:
    """Write the snapshot of an epoch from the embeddings of the validation images."""
    if len(z) < 2:
        return
    x, labels = torch.nn.functional.normalize(z), data.labels
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    queries = order[:QUERIES].sort().values
    found = compare(x, labels, queries)
    shown = _shown(found, order)
    if not len(shown):  # no image has another of its class
        return
    neighbours = (x[shown] @ x.T).index_put_((torch.arange(len(shown)), shown), torch.tensor(-2.0))
    top = neighbours.topk(min(NEIGHBOURS, len(x) - 1)).indices
    cells = torch.cat((shown[:, None], top), 1)
    arrays: dict[str, Any] = {key: value.numpy() for key, value in found.items() if key != "queries"}
    thumbnails = _thumbnails(data.load(i) for i in cells.flatten().tolist())
    arrays["gallery"] = thumbnails.reshape(*cells.shape, *thumbnails.shape[1:])
    arrays["gallery_right"] = (labels[top] == labels[shown][:, None]).numpy()
    arrays["gallery_names"] = np.array([[data.classes[int(labels[i])] for i in row] for row in cells], dtype=str)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, epoch=np.int64(epoch), **arrays)
    path(run, epoch).parent.mkdir(exist_ok=True)
    write_atomically(path(run, epoch), buffer.getvalue())


def compare(x: Tensor, labels: Tensor, queries: Tensor, block: int = 512) -> dict[str, Tensor]:
    """Each query against all others, a block of rows at a time.

    Returns
    -------
    dict
        ``s_ap``, ``s_an``: similarity of the closest positive and the closest negative [Q], of queries that have both.
        ``positives``, ``negatives``: how many pairs have a similarity in each bin. ``queries``: those that have both.
    """
    closest: list[tuple[Tensor, Tensor]] = []
    counts = torch.zeros(2, BINS, dtype=torch.int64)
    for rows in queries.split(block):
        s = (x[rows] @ x.T).clamp_(-1, 1)
        same = labels[rows][:, None] == labels[None, :]
        bins = ((s + 1) * (BINS / 2)).long().clamp_(max=BINS - 1)
        itself = torch.zeros_like(same)
        itself[torch.arange(len(rows)), rows] = True
        counts[0] += bins[same & ~itself].bincount(minlength=BINS)
        counts[1] += bins[~same].bincount(minlength=BINS)
        positive = s.masked_fill(~same | itself, -torch.inf).amax(1)
        closest.append((positive, s.masked_fill(same, -torch.inf).amax(1)))
    s_ap, s_an = (torch.cat(side) for side in zip(*closest, strict=True))
    both = s_ap.isfinite() & s_an.isfinite()
    return {
        "s_ap": s_ap[both], "s_an": s_an[both], "queries": queries[both],
        "positives": counts[0], "negatives": counts[1],
    }  # fmt: skip


def _shown(found: dict[str, Tensor], order: Tensor) -> Tensor:
    """The gallery's queries: the first of a random order that have a positive at all."""
    able = torch.zeros(len(order), dtype=torch.bool)
    able[found["queries"]] = True
    return order[able[order]][:SHOWN]


def _thumbnails(images: Iterable[Any]) -> npt.NDArray[np.uint8]:
    """Square RGB pictures of one size [n, side, side, 3]: the images, made smaller where they are large, on white."""
    from PIL import Image

    pictures = [to_picture(image).convert("RGB") for image in images]
    for picture in pictures:
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
    largest = max(max(picture.size) for picture in pictures)
    side = next(side for side in (32, 48, THUMBNAIL) if largest <= side)
    canvases = [Image.new("RGB", (side, side), "white") for _ in pictures]
    for canvas, picture in zip(canvases, pictures, strict=True):
        canvas.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return np.stack([np.asarray(canvas) for canvas in canvases])
