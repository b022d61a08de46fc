"""Tuples of pairs, as miners give them to losses: which of them hold no pair twice, and how to leave repeats out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: A list of at least 1 in so many of all pairs is told apart by a flag for each of those, which takes half of what the
#: list itself takes; a shorter one is sorted.
FLAGGED = 8


class Distinct(tuple[Tensor, ...]):
    """A miner's tuple that remembers that it holds no pair twice, and rows and columns of which batch.

    It is a tuple like any other. What is made of it (a part, a sum, a copy, another device's) is a plain tuple or knows
    nothing, and so does the tuple itself once one of its tensors has been written to.

    >>> pairs = torch.tensor([0, 1]), torch.tensor([1, 0])
    >>> found = Distinct.of((*pairs, *pairs), (2, 2))
    >>> found.within((2, 2)), (found + found).__class__.__name__
    (True, 'tuple')
    """

    _size: tuple[int, int] | None = None
    _versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, indices: Iterable[Tensor], size: tuple[int, int]) -> Distinct:
        """Int64 tensors of which the caller knows that they are distinct pairs of ``size`` rows and columns."""
        made = cls(indices)
        if not any(index.is_inference() for index in made):  # those do not count what is written to them
            made._size, made._versions = size, tuple(index._version for index in made)
        return made

    def within(self, size: tuple[int, int]) -> bool:
        """Are these still the pairs that were found, and are they within a matrix of ``size``?"""
        return (
            self._size is not None
            and self._size[0] <= size[0]
            and self._size[1] <= size[1]
            and self._versions == tuple(index._version for index in self)
        )

    def __reduce__(self) -> tuple[type[tuple[Tensor, ...]], tuple[tuple[Tensor, ...]]]:
        return tuple, (tuple(self),)  # a copy's tensors count anew: it could not tell


def is_distinct(indices: tuple[Tensor, ...], size: tuple[int, int]) -> bool:
    """Is it known, without a look at them, that these pairs of a matrix of ``size`` are there and differ?"""
    return not torch.compiler.is_compiling() and isinstance(indices, Distinct) and indices.within(size)


def distinct(i: Tensor, j: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The pairs (i, j) of a matrix of ``size``, each once, in order.

    >>> distinct(torch.tensor([1, 0, 1]), torch.tensor([0, 1, 0]), (2, 2))
    (tensor([0, 1]), tensor([1, 0]))
    """
    rows, cols = size
    key = i * cols + j
    if not torch.compiler.is_compiling():
        if bool((key[1:] > key[:-1]).all()):  # most lists come in order
            return i, j
        if len(key) * FLAGGED >= rows * cols:
            listed = torch.zeros(rows * cols, dtype=torch.bool, device=key.device)
            listed[key] = True
            first, second = listed.view(rows, cols).nonzero(as_tuple=True)
            return first, second
    key = torch.unique(key)
    return torch.div(key, cols, rounding_mode="floor"), key % cols
