"""From a sampler's batches to tensors: loading in micro-batches, by worker processes, with reproducible augmentation.

What is random about an image hangs on (seed, epoch, batch, place in the batch) alone: not on the number of workers or
ranks, nor on the size of the micro-batches, nor on whether the run was stopped and resumed in between.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pydml.train.transforms import Jitter, to_tensor

#: Images that a worker loads in one go where there are no micro-batches.
CHUNK = 256


@dataclass(frozen=True)
class Part:
    """A piece of a batch: its place and its images."""

    epoch: int
    batch: int
    start: int  # place of its first image in the whole batch
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """What a worker hands over instead of images."""

    reason: str


class Images(Dataset[Any]):
    """Parts of batches as uint8 (or float) tensors [n, C, H, W]."""

    def __init__(self, data: Any, transform: Callable[[Any], Any] | Jitter | None, seed: int) -> None:
        self.data, self.transform, self.seed = data, transform, seed

    def __getitem__(self, part: Part) -> Tensor | Failure:
        where = f"images {part.indices[0]} … {part.indices[-1]}"
        try:
            if self.transform is None or isinstance(self.transform, Jitter):
                images: Tensor = self.data.pixels(part.indices)
                if isinstance(self.transform, Jitter):
                    numbers = np.random.default_rng((self.seed, part.epoch, part.batch))
                    drawn = numbers.random((part.start + len(images), Jitter.NUMBERS))[part.start :]
                    images = self.transform(images, torch.from_numpy(drawn).float())
                return images
            rows = []
            for i, item in enumerate(part.indices):
                where = f"image {item}"
                seed_all(self.seed, part.epoch, part.batch, part.start + i)
                rows.append(to_tensor(self.transform(self.data.load(item))))
            return _stack(rows, part.indices)
        except Exception as error:  # names the image; the trainer raises it, without the worker's traceback
            return Failure(f"cannot load {where} of {self.data.name}: {error or type(error).__name__}")


def _stack(rows: list[Tensor], indices: Sequence[int]) -> Tensor:
    shapes = {tuple(row.shape) for row in rows}
    if len(shapes) > 1:
        odd = next(i for i, row in zip(indices, rows, strict=True) if row.shape != rows[0].shape)
        raise ValueError(f"images of different shapes, such as {sorted(shapes)[:2]} (image {odd}); crop them first")
    return torch.stack(rows)


def seed_all(*numbers: int) -> None:
    """Seed what transforms draw from."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def _quiet_worker(_: int) -> None:
    """Ctrl-C reaches every process of the terminal: the trainer saves and ends the workers, they do not end it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _parts(sampler: Any, start: tuple[int, int], epochs: int, rank: int, world_size: int, size: int) -> Iterator[Part]:
    """The parts of all batches from a place in the run to its end."""
    for at in range(_place(sampler, start), epochs * sampler.batches):
        epoch, batch = divmod(at, sampler.batches)
        whole = sampler.global_batch(epoch, batch)
        share = len(whole) // world_size
        for begin in range(rank * share, (rank + 1) * share, size):
            stop = min(begin + size, (rank + 1) * share)
            yield Part(epoch, batch, begin, tuple(whole[begin:stop].tolist()))


def _place(sampler: Any, start: tuple[int, int]) -> int:
    """Batches before ``start``; the end of an epoch is the beginning of the next."""
    return start[0] * int(sampler.batches) + start[1]


def stream(
    images: Images,
    labels: Tensor,
    sampler: Any,
    start: tuple[int, int],
    epochs: int,
    *,
    micro_batch: int | None,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """This rank's share of each batch from ``start`` = (epoch, batch) on: its parts, and all its labels.

    Raises
    ------
    RuntimeError
        That names the image that cannot be loaded, or says that a worker died.
    """
    share = sampler.batch_size // world_size
    size = min(micro_batch or CHUNK, share)
    asked, keys = itertools.tee(_parts(sampler, start, epochs, rank, world_size, size))  # drawn once: it takes a while
    loaded = load(images, asked, workers)
    for _ in range(_place(sampler, start), epochs * sampler.batches):
        batch: list[Tensor] = []
        indices: list[int] = []
        for _ in range(-(-share // size)):
            batch.append(next(loaded))
            indices += next(keys).indices
        if micro_batch is None:
            batch = [torch.cat(batch)]
        yield batch, labels[indices]


def load(images: Images, parts: Any, workers: int) -> Iterator[Tensor]:
    """The parts' images, in order."""
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_size=None,
        sampler=parts,
        num_workers=workers,
        worker_init_fn=_quiet_worker,
        prefetch_factor=2 if workers else None,
        generator=torch.Generator(),  # else it would draw a seed from the network's
    )
    source = iter(loader)
    while True:
        before = None if workers else (torch.get_rng_state(), random.getstate(), np.random.get_state())
        try:
            loaded = next(source)
        except StopIteration:
            return
        except RuntimeError as error:
            if "worker" not in str(error):
                raise
            raise RuntimeError(
                f"a data worker died ({str(error).splitlines()[0]}); killed for want of memory? Try fewer --workers"
            ) from error
        if before is not None:  # transforms were seeded in this process: give the network its generators back
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])
        if isinstance(loaded, Failure):
            raise RuntimeError(loaded.reason)
        yield loaded
