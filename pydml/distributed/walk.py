"""The columns of all ranks as one rank meets them: gathered at once, or block by block round a ring.

Both walks yield blocks and take back what a block's owner is owed, its columns' gradient; the engines in
:mod:`pydml.distributed.engines` do not know which of the two they are on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pydml.distributed.group import Group, Transfer


@dataclass
class Block:
    """Some columns: where they stand in the concatenated batch, and the columns themselves."""

    at: slice
    x: Tensor | None  # None: they are this rank's rows, a symmetric block
    owner: int = -1  # the rank they came from; -1: several
    hop: int = 0
    both: bool = False  # this rank also computes the owner's rows against its own


class Walk:
    """What the two ways share: whose columns stand where."""

    #: Does the walk hold all columns at once anyway?
    holds_all = False

    def __init__(self, group: Group, x: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.group, self.sizes, self.dtype = group, list(sizes), dtype
        self.x = x.detach().contiguous()
        self.starts = [sum(sizes[:rank]) for rank in range(group.size + 1)]

    def span(self, rank: int) -> slice:
        """Where a rank's columns stand."""
        return slice(self.starts[rank], self.starts[rank + 1])

    @property
    def own(self) -> slice:
        return self.span(self.group.rank)

    def blocks(self, symmetric: bool, both_ways: bool) -> Iterator[Block]:
        """All columns, this rank's first; with ``both_ways`` a symmetric walk may leave half of them to others."""
        raise NotImplementedError

    def give_back(self, block: Block, grad: Tensor) -> None:
        """Hand in the gradient [block, d] of a block's columns."""
        raise NotImplementedError

    def collect(self) -> Tensor:
        """The gradient of this rank's columns that all ranks have handed in."""
        raise NotImplementedError

    def send_home(self, parts: dict[int, Tensor], like: Tensor) -> list[Tensor]:
        """Row statistics that were computed for other ranks, against those that they computed for this one."""
        return []


class Gather(Walk):
    """All columns by one all-gather, kept for the backward pass; gradients by one reduce-scatter."""

    holds_all = True
    _all: Tensor | None = None
    _owed: Tensor | None = None

    def everything(self) -> Tensor:
        if self._all is None:
            self._all = self.group.all_gather(self.x, self.sizes, "embeddings").to(self.dtype)
        return self._all

    def blocks(self, symmetric: bool, both_ways: bool) -> Iterator[Block]:
        everything, own = self.everything(), self.own
        if not symmetric:
            yield Block(slice(0, len(everything)), everything)
            return
        yield Block(own, None, self.group.rank)
        for at in (slice(0, own.start), slice(own.stop, len(everything))):
            if at.start < at.stop:
                yield Block(at, everything[at])

    def give_back(self, block: Block, grad: Tensor) -> None:
        if self._owed is None:
            self._owed = torch.zeros_like(self.everything())
        self._owed[block.at] = grad

    def collect(self) -> Tensor:
        owed, self._owed = self._owed, None
        if owed is None:
            owed = torch.zeros_like(self.everything())
        return self.group.reduce_scatter(owed, self.sizes, "gradients")


class Ring(Walk):
    """Blocks go from each rank to the next, while the last one is computed on; gradients go straight to their owner.

    With ``both_ways`` a rank computes its rows against a block and the block's rows against its own, so that
    ⌊P/2⌋ hops are enough: every pair of ranks meets once (at P/2 hops twice, and each computes its own rows only).
    """

    def __init__(self, group: Group, x: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(group, x, sizes, dtype)
        self._debt: tuple[Transfer, Tensor, Tensor] | None = None
        self._paid: Tensor | None = None

    def blocks(self, symmetric: bool, both_ways: bool) -> Iterator[Block]:
        rank, ranks = self.group.rank, self.group.size
        half = symmetric and both_ways
        hops = ranks // 2 if half else ranks - 1
        current, transfer, arriving = self.x, None, self.x
        for hop in range(hops + 1):
            if transfer is not None:
                transfer.wait()
                current = arriving
            if hop < hops:
                arriving = self.x.new_empty(self.sizes[(rank - hop - 1) % ranks], self.x.shape[1])
                transfer = self.group.shift(
                    [(current, (rank + 1) % ranks)], [(arriving, (rank - 1) % ranks)], "a block of embeddings"
                )
            owner = (rank - hop) % ranks
            x = None if symmetric and not hop else current.to(self.dtype)
            yield Block(self.span(owner), x, owner, hop, both=half and 0 < 2 * hop != ranks)

    def give_back(self, block: Block, grad: Tensor) -> None:
        self._settle()
        if not block.hop:
            self._paid = grad if self._paid is None else self._paid + grad
            return
        rank, ranks = self.group.rank, self.group.size
        due = grad.new_empty(self.sizes[rank], grad.shape[1])
        sent = grad.contiguous()
        transfer = self.group.shift([(sent, block.owner)], [(due, (rank + block.hop) % ranks)], "gradients")
        self._debt = transfer, sent, due  # what is sent stays alive until it has arrived

    def _settle(self) -> None:
        if self._debt is not None:
            transfer, _, due = self._debt
            transfer.wait()
            self._paid = due if self._paid is None else self._paid + due
            self._debt = None

    def collect(self) -> Tensor:
        self._settle()
        paid, self._paid = self._paid, None
        return torch.zeros_like(self.x, dtype=self.dtype) if paid is None else paid

    def send_home(self, parts: dict[int, Tensor], like: Tensor) -> list[Tensor]:
        rank, ranks = self.group.rank, self.group.size
        met = [(rank + hop) % ranks for hop in range(1, (ranks - 1) // 2 + 1)]  # who has computed this rank's rows
        if not met:
            return []
        sent = torch.cat([parts.get(owner, like[:0]) for owner in range(ranks)])
        send = [self.sizes[owner] if owner in parts else 0 for owner in range(ranks)]
        receive = [len(like) if owner in met else 0 for owner in range(ranks)]
        home = self.group.exchange(sent, send, receive, "row statistics")
        return list(home.split(len(like))) if len(like) else []


WALKS: dict[str, type[Walk]] = {"ring": Ring, "gather": Gather}
