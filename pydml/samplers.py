"""Samplers: which items of a dataset make up each batch.

Both know their place (``state_dict``) and draw a batch from nothing but (seed, epoch, number of the batch), so that a
run resumes where it stopped without replaying, and every rank of a distributed run knows the same global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Sampler

from pydml import checks

__all__ = ["CategorySampler", "MPerClassSampler"]

Item = TypeVar("Item", covariant=True)
Index = npt.NDArray[np.int64]
Integers = Tensor | Sequence[int] | npt.NDArray[Any]


class _Resumable(Sampler[Item]):
    """A place in an endless sequence of epochs of ``batches`` batches, and this rank's share of each batch.

    Iterating goes through one epoch; the next iteration goes on with the next epoch, whether or not this one was
    finished. Only the place given by :meth:`set_epoch` or :meth:`load_state_dict` starts inside an epoch.
    """

    batches: int

    def __init__(self, seed: int | None, rank: int, world_size: int) -> None:
        self.world_size = checks.integer("world_size", world_size, least=1)
        self.rank = checks.integer("rank", rank, least=0)
        if rank >= world_size:
            raise ValueError(f"rank: got {rank}, wanted one below world_size={world_size}")
        if seed is None:
            if world_size > 1:
                raise ValueError("seed: got None, wanted the same int on all ranks: they share each batch")
            seed = int(torch.randint(2**63 - 1, ()))
        self.seed = checks.integer("seed", seed, least=0)
        self.epoch = self.batch = 0
        self._begun = False

    def global_batch(self, epoch: int, batch: int) -> Index:
        """The whole batch number ``batch`` of an epoch, all ranks' shares together."""
        raise NotImplementedError

    def _share(self, batch: Index) -> Index:
        """This rank's part of a batch."""
        raise NotImplementedError

    def _random(self, epoch: int, place: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, epoch, place))

    def _shares(self) -> Iterator[list[int]]:
        """This rank's part of each batch that is left of the epoch."""
        # a generator on purpose: a DataLoader with workers makes an iterator that it throws away
        if self._begun:
            self.epoch, self.batch = self.epoch + 1, 0
        self._begun = True
        epoch, start = self.epoch, self.batch
        for batch in range(start, self.batches):
            self.epoch, self.batch = epoch, batch
            yield self._share(self.global_batch(epoch, batch)).tolist()
        self.epoch, self.batch, self._begun = epoch + 1, 0, False

    def set_epoch(self, epoch: int, batch: int | None = None) -> None:
        """Go to an epoch.

        Parameters
        ----------
        epoch
            Its number. The epoch that was just loaded by :meth:`load_state_dict` keeps its place.
        batch
            Where to start in it.
        """
        if batch is None:
            batch = self.batch if epoch == self.epoch and not self._begun else 0
        self._go(epoch, batch)

    def _go(self, epoch: int, batch: int) -> None:
        checks.integer("epoch", epoch, least=0)
        if checks.integer("batch", batch, least=0) > self.batches:
            raise ValueError(f"batch: got {batch}, wanted at most {self.batches}, the batches of an epoch")
        self.epoch, self.batch, self._begun = epoch, batch, False

    def state_dict(self) -> dict[str, int]:
        """Seed, epoch, and how many of its batches have been handed out.

        A DataLoader with workers asks for batches ahead of the training loop: there, put your own count under
        ``"batch"``.
        """
        return {"seed": self.seed, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken: the next iteration is the rest of that epoch."""
        if state.keys() != {"seed", "epoch", "batch"}:
            raise ValueError(f"state: got {sorted(state)}, wanted seed, epoch and batch")
        self.seed = checks.integer("seed", state["seed"], least=0)
        self._go(state["epoch"], state["batch"])


class MPerClassSampler(_Resumable[int]):
    """m items of each of batch_size/m classes in every batch: PML's sampler, with a seed, a place and ranks.

    Classes are drawn afresh for each batch without replacement, and so are the m items of a class; a class with fewer
    than m items gives them with replacement. It yields indices: give it to a DataLoader as ``sampler`` beside the
    same ``batch_size`` (on several ranks, batch_size/world_size).

    Parameters
    ----------
    labels
        One integer for each item: a tensor, an array or a list.
    m
        Items of a class in a batch.
    batch_size
        Of all ranks together; a multiple of m, and of world_size. None: a batch is m items of every class.
    length_before_new_iter
        Indices in an epoch over all ranks, rounded down to whole batches.
    seed
        None draws one from torch's default generator.
    rank, world_size
        Rank r yields the r-th of ``world_size`` equal parts of each batch. Parts hold whole classes if m divides
        batch_size/world_size.

    Examples
    --------
    >>> labels = torch.arange(100) // 10
    >>> sampler = pydml.samplers.MPerClassSampler(labels, m=4, batch_size=12, length_before_new_iter=120, seed=0)
    >>> len(sampler)
    120
    >>> labels[list(sampler)[:12]].unique(return_counts=True)[1]
    tensor([4, 4, 4])
    """

    def __init__(
        self,
        labels: Integers,
        m: int,
        batch_size: int | None = None,
        length_before_new_iter: int = 100000,
        *,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(seed, rank, world_size)
        self.m = checks.integer("m", m, least=1)
        self.classes = list(_groups(_integers("labels", labels)).values())
        length = checks.integer("length_before_new_iter", length_before_new_iter, least=1)
        every = m * len(self.classes)
        if batch_size is None:
            if world_size > 1:
                raise ValueError("batch_size: got None, wanted the size of a batch that ranks can share")
            self.batch_size, length = every, max(length, every)
        else:
            self.batch_size = checks.integer("batch_size", batch_size, least=1)
            if batch_size % m:
                raise ValueError(f"batch_size: got {batch_size}, wanted a multiple of m={m}")
            if batch_size > every:
                raise ValueError(
                    f"batch_size: got {batch_size}, wanted at most m x number of classes = {m} x {len(self.classes)}"
                )
            if batch_size % world_size:
                raise ValueError(f"batch_size: got {batch_size}, wanted a multiple of world_size={world_size}")
            if length < batch_size:
                raise ValueError(f"length_before_new_iter: got {length}, wanted at least batch_size={batch_size}")
        self.batches = length // self.batch_size

    def __len__(self) -> int:
        """Indices that this rank yields in a whole epoch."""
        return self.batches * self.batch_size // self.world_size

    def __iter__(self) -> Iterator[int]:
        for share in self._shares():
            yield from share[:-1]
            self.batch += 1  # the batch is out with its last index
            yield share[-1]

    def global_batch(self, epoch: int, batch: int) -> Index:
        """The whole batch number ``batch`` of an epoch, all ranks' shares together."""
        random = self._random(epoch, batch)
        chosen = random.permutation(len(self.classes))[: self.batch_size // self.m]
        items: list[Index] = []
        for c in (self.classes[i] for i in chosen):
            items.append(random.choice(c, self.m, replace=len(c) < self.m))
        return np.concatenate(items)

    def _share(self, batch: Index) -> Index:
        share: Index = batch.reshape(self.world_size, -1)[self.rank]
        return share


class CategorySampler(_Resumable[list[int]]):
    """FastAP's «hard» batches, Cakir et al. 2019, supplement A: half a batch from each of two categories.

    Classes of one category are hard to tell apart, so half of a batch of M items comes from one category and half from
    another: classes of the category are drawn in random order, each with all its items, until there are M/2; the last
    class is cut to fit, and a category with fewer than M/2 items starts over. An anchor whose class has n items then
    has n-1 positives, M/2-n hard negatives and M/2 easy ones.

    The plan of an epoch, in random order:

    - every unordered pair of categories ``batches_per_pair`` times: C(C-1)/2 · batches_per_pair batches.
      Stanford Online Products: 12 categories, 66 pairs × 5 = 330. In-Shop: 23 categories, 253 pairs × 2 = 506.
    - where some classes have no category (-1), each batch pairs one labelled category with classes that have none, and
      ``batches_per_pair`` is not used: category c of N_c items comes round(2·N_c/M) times, at least once, so that the
      epoch is about Σ_c 2·N_c/M batches and draws about as many labelled items as there are. PKU VehicleID: 250
      categories that cover about half of the items.

    It yields lists of indices: give it to a DataLoader as ``batch_sampler``.

    Parameters
    ----------
    labels
        One integer for each item, its class.
    categories
        One integer for each item, its category; all items of a class have the same. -1: none is known.
    batch_size
        M, of all ranks together; a multiple of 2·world_size.
    batches_per_pair
        Batches from each pair of categories.
    seed
        None draws one from torch's default generator.
    rank, world_size
        Rank r yields the r-th of ``world_size`` equal parts of either half.

    Examples
    --------
    >>> labels = torch.arange(480) // 4  # 12 categories of 10 classes of 4 items
    >>> sampler = pydml.samplers.CategorySampler(labels, labels // 10, batch_size=16, seed=0)
    >>> len(sampler)
    330
    >>> batch = next(iter(sampler))
    >>> (labels[batch] // 10).unique(return_counts=True)[1]
    tensor([8, 8])
    """

    def __init__(
        self,
        labels: Integers,
        categories: Integers,
        batch_size: int,
        batches_per_pair: int = 5,
        *,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(seed, rank, world_size)
        self.batch_size = checks.integer("batch_size", batch_size, least=2)
        if batch_size % (2 * world_size):
            raise ValueError(
                f"batch_size: got {batch_size}, wanted a multiple of 2 x world_size = {2 * world_size}: "
                "each rank has its part of either half"
            )
        self.batches_per_pair = checks.integer("batches_per_pair", batches_per_pair, least=1)
        y, category = _integers("labels", labels), _integers("categories", categories)
        if len(category) != len(y):
            raise ValueError(f"categories: got {len(category)} entries, wanted {len(y)}, one for each label")
        if category.min() < -1:
            raise ValueError(f"categories: got {category.min()}, wanted integers >= 0, or -1 where there is none")
        self.classes: dict[int, list[Index]] = {}  # items of each class, by category
        for label, items in _groups(y).items():
            of = np.unique(category[items])
            if len(of) > 1:
                raise ValueError(f"categories: class {label} is in {of.tolist()}, wanted one category a class")
            self.classes.setdefault(int(of[0]), []).append(items)
        labelled = sorted(self.classes.keys() - {-1})
        if -1 in self.classes:
            half = batch_size / 2
            times = {c: max(1, round(sum(map(len, self.classes[c])) / half)) for c in labelled}
            self.pairs = [(c, -1) for c in labelled for _ in range(times[c])]
        else:
            self.pairs = [pair for pair in combinations(labelled, 2) for _ in range(batches_per_pair)]
        if not self.pairs:
            raise ValueError(
                f"categories: got {sorted(self.classes)}, wanted at least two different ones, or one beside -1"
            )
        self.batches = len(self.pairs)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        for share in self._shares():
            self.batch += 1
            yield share

    def global_batch(self, epoch: int, batch: int) -> Index:
        """The whole batch number ``batch`` of an epoch, all ranks' shares together: one half, then the other."""
        pair = self.pairs[self._random(epoch, 0).permutation(self.batches)[batch]]
        random = self._random(epoch, 1 + batch)
        return np.concatenate([self._half(self.classes[category], random) for category in pair])

    def _half(self, classes: list[Index], random: np.random.Generator) -> Index:
        items: list[Index] = []
        missing = self.batch_size // 2
        while missing > 0:
            for c in random.permutation(len(classes)):
                items.append(random.permutation(classes[c])[:missing])
                missing -= len(items[-1])
                if not missing:
                    break
        return np.concatenate(items)

    def _share(self, batch: Index) -> Index:
        return batch.reshape(2, self.world_size, -1)[:, self.rank].reshape(-1)


def _integers(name: str, values: Integers) -> Index:
    """A vector of integers as int64."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: got shape {list(array.shape)}, wanted 1 dimension, one entry for each item")
    if not len(array):
        raise ValueError(f"{name}: got no entries, wanted one for each item")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: got dtype {array.dtype}, wanted integers")
    return array.astype(np.int64)


def _groups(labels: Index) -> dict[int, Index]:
    """Label -> its items."""
    found, counts = np.unique(labels, return_counts=True)
    items = np.split(labels.argsort(kind="stable"), counts.cumsum()[:-1])
    return dict(zip(found.tolist(), items, strict=True))
