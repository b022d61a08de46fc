"""A miner on the batches of all ranks, for losses that take its tuple."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from pydml.distributed.group import Group, gather_batch


class ShardedMiner(nn.Module):
    """A miner that sees the batches of all ranks, and gives each rank the pairs or triplets of its own anchors.

    The tuple's numbers are places in the concatenated batch, as :class:`~pydml.distributed.ShardedLoss` takes them.
    Every rank gathers the embeddings and mines all of them: a miner's answer is a list for the whole batch anyway.

    Parameters
    ----------
    miner
        One of :mod:`pydml.miners` or of PML's.
    group
        As for ``ShardedLoss``.

    Examples
    --------
    >>> miner = pydml.distributed.ShardedMiner(pydml.miners.BatchHardMiner())
    >>> indices = miner(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    """

    def __init__(self, miner: Any, group: Any = None) -> None:
        super().__init__()
        self.miner, self.group = miner, Group(group)

    @torch.no_grad()
    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Mine this rank's [b, d] and [b] among those of all ranks."""
        z, y, sizes = gather_batch(self.group, embeddings, labels)
        found = self.miner(z, y)
        start = sum(sizes[: self.group.rank])
        stop = start + sizes[self.group.rank]

        def mine(anchors: Tensor, *others: Tensor) -> list[Tensor]:
            kept = (anchors >= start) & (anchors < stop)
            return [index[kept] for index in (anchors, *others)]

        if len(found) == 3:
            return tuple(mine(*found))
        return tuple(itertools.chain(mine(*found[:2]), mine(*found[2:])))
