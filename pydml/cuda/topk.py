"""The pairs of largest loss on a GPU: a sampled threshold, one pass that lists what is above it, exact selection.

The device itself finds out whether the sample misjudged, and then searches the threshold digit by digit; the host never
looks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pydml.cuda.matrix import Matrix, policy_number
from pydml.declared import TopK

#: Stages of the sweep, as in csrc/cuda/topk.cu, and bits of the digits of the first three.
STAGES = ("first_digit", "second_digit", "last_digit", "list_above", "list_equal", "all_losses")
BITS = (11, 11, 10)
#: Pairs that the list has room for, if more than a few times k.
ROOM = 1 << 14
#: Rows of the sample, and the least rank in it that is aimed at.
SAMPLE, LEAST = 64, 32
NO_PAIR = torch.iinfo(torch.int64).max


def key_of(loss: Tensor) -> Tensor:
    """Numbers from 0 to 2³²-1 in the order of losses, as ``sortable`` of csrc/cuda/sweep.cuh."""
    bits = (loss + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, ~bits, bits + (1 << 31))


class Search:
    """The steps of the search; ``run`` [1] is 0 where the device has to leave one out."""

    def __init__(self, m: Matrix, policy: str, params: Sequence[float], side: str) -> None:
        self.m, self.side = m, side
        self.loss = policy_number(policy), list(params), side != "negatives", side != "positives"
        n = m.row.n
        self.total = n * (n - 1) // 2 if m.symmetric else n * m.col.n  # pairs, of both sides
        self.always = torch.ones(1, dtype=torch.int32, device=m.trouble.device)

    def stage(self, name: str, run: Tensor, found: Tensor, counts: Tensor | None = None, lists: Sequence[Tensor] = (),
              ties: Tensor | None = None, before: Tensor | None = None, needed: Tensor | None = None,
              matrix: Matrix | None = None) -> None:  # fmt: skip
        m = matrix or self.m
        rest = STAGES.index(name), run, found, counts, list(lists), ties, before, needed
        m.ops.topk(*m.arguments(m.splits()), *self.loss, *rest)

    def full(self, value: int, size: int = 1) -> Tensor:
        return self.m.row.order.new_full((size,), value)

    def room(self, size: int) -> tuple[Tensor, Tensor]:
        """Room for pairs and their losses."""
        pairs = self.full(NO_PAIR, size)
        return pairs, torch.empty(size, dtype=torch.float32, device=pairs.device)

    def number(self) -> Tensor:
        """Pairs of the side [1]."""
        m = self.m
        same = (m.row_range[:, 1] - m.row_range[:, 0]).sum(0, keepdim=True, dtype=torch.int64)
        if m.symmetric:
            same = (same - m.row.n) // 2
        selves = (m.selves >= 0).sum(0, keepdim=True)  # of which no pair is made
        return {"positives": same - selves, "negatives": self.total - same}.get(self.side, self.total - selves)

    def guess(self, rank: int, size: int) -> Tensor:
        """Key [1] of the rank-th largest loss of ``size`` rows, self pairs included: they are the most alike."""
        m = self.m
        rows = torch.arange(size, device=m.trouble.device) * m.row.n // size
        sample = copy.copy(m)
        sample.row, sample.row_range = m.side(m.given[0], m.row.order[rows], m.row.normalize), m.row_range[rows]
        sample.symmetric, sample.selves = False, m.selves[rows] if len(m.selves) else m.selves
        losses = torch.empty(size, m.col.n, dtype=torch.float32, device=rows.device)
        self.stage("all_losses", self.always, self.full(0), lists=[losses], matrix=sample)
        return key_of(losses.flatten().topk(min(rank, losses.numel())).values[-1:])

    def exact(self, rank: Tensor, run: Tensor) -> Tensor:
        """Key [1] of the rank-th largest loss of all pairs, digit by digit."""
        found = self.full(0)
        for name, bits in zip(STAGES, BITS, strict=False):
            counts = self.full(0, 2048)
            self.stage(name, run, found, counts)
            at_least = counts.flip(0).cumsum(0).flip(0)  # pairs with this digit or a larger one
            digit = ((at_least >= rank).sum(0, keepdim=True) - 1).clamp_min(0)
            rank = rank - (at_least - counts)[digit]
            found = found << bits | digit
        return found

    def above(self, threshold: Tensor, run: Tensor, pairs: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """List the pairs above the threshold: how many [1], and for each row how many equal it."""
        count, ties = self.full(0), self.full(0, self.m.row.n)
        self.stage("list_above", run, threshold, lists=[count, pairs, losses], ties=ties)
        return count, ties


def _largest(lists: Sequence[tuple[Tensor, Tensor, Tensor]], k: int, n_cols: int) -> tuple[Tensor, Tensor]:
    """i and j of the k largest losses, ties to the smaller pair, of the first ``count`` of each list."""
    empty = [torch.arange(len(pairs), device=pairs.device) >= count for count, pairs, _ in lists]
    pairs = torch.cat([pairs.masked_fill(none, NO_PAIR) for none, (_, pairs, _) in zip(empty, lists, strict=True)])
    losses = torch.cat([losses.masked_fill(none, -torch.inf) for none, (*_, losses) in zip(empty, lists, strict=True)])
    pairs, order = pairs.sort()
    pairs = pairs[losses[order].sort(descending=True, stable=True).indices[:k]]
    pairs = pad(torch.where(pairs == NO_PAIR, -1, pairs), (0, k - len(pairs)), value=-1)
    return torch.where(pairs < 0, -1, pairs // n_cols), torch.where(pairs < 0, -1, pairs % n_cols)


def topk(ops: Any, a: TopK) -> tuple[Tensor, Tensor]:
    m, k = Matrix.of(ops, a), a.k
    search = Search(m, a.policy, a.params, a.side)
    n, n_cols = m.row.n, m.col.n
    if not (search.total and k):
        return search.full(-1, k), search.full(-1, k)
    sample = min(n, SAMPLE)
    seen = 2 * sample if m.symmetric else sample  # a symmetric pair is seen from both of its rows
    rank = max(2 * k * seen // n, LEAST)
    room = min(search.total, max(ROOM, 8 * k, 4 * rank * n // sample))
    pairs, losses = search.room(room)
    if room == search.total:
        count, _ = search.above(search.full(0), search.always, pairs, losses)
        return _largest([(count, pairs, losses)], k, n_cols)

    guess, wanted = search.guess(rank, sample), search.number().clamp_max(k)
    count, ties = search.above(guess, search.always, pairs, losses)
    good = (count <= room) & (count + ties.sum() >= wanted)
    missed = (~good).int()
    threshold = torch.where(good, guess, search.exact(wanted, missed))
    exact_count, exact_ties = search.above(threshold, missed, pairs, losses)
    count, ties = torch.where(good, count, exact_count), torch.where(good, ties, exact_ties)

    needed = wanted - count
    before = ties.cumsum(0) - ties
    equals, of_equals = search.room(k + n_cols)
    found = search.full(0)
    run = (needed > 0).int()
    search.stage("list_equal", run, threshold, lists=[found, equals, of_equals], before=before, needed=needed)
    return _largest([(count, pairs, losses), (found, equals, of_equals)], k, n_cols)
