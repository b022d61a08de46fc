"""The k pairs of largest loss, exactly, in O(k) memory and without a host sync.

A sample of rows gives a threshold that about 2k pairs are above; one pass over the matrix appends those pairs to a
buffer and counts the pairs that equal it. Where the counts say that the k largest are among them, a sort of the buffer
ends it: ½u for a symmetric matrix. Where they do not, which only the device knows, the same digit-by-digit search that
the sample used runs over all pairs, and the pass again (kernels that are not needed return at once). Pairs that equal
the threshold are usual (a hinge has many zeros), so they are not buffered but counted for each row: the first of them
in the order of (i, j) are in the rows whose counts are needed to fill up k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from pydml.declared import TopK
from pydml.triton_kernels.matrix import launch
from pydml.triton_kernels.pair import params
from pydml.triton_kernels.policy import term
from pydml.triton_kernels.select import Pairs, part_of, side, similarity
from pydml.triton_kernels.tile import members, span, without_selves

#: Pairs that fit into the buffer, if more than a few times k.
ROOM = 1 << 14
#: Rows of the sample: at least so many, and one of so many; the rank in it that is aimed at is at least LEAST.
SAMPLE, SAMPLED, LEAST = 64, 256, 32
#: Digits of a key, as (shift, bits), from the highest down.
DIGITS = ((21, 11), (10, 11), (0, 10))
LOWEST = -(1 << 31)
NO_PAIR = (1 << 63) - 1


@triton.jit
def loss_keys(
    X, Y, X2, Y2, rows, cols, first, last, SELVES, n_rows, n_cols, mixed, p0, p1, p2, p3, p4, POLICY: tl.constexpr,
    SIDE: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr,
    SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The losses of a tile as int32 in their order, and which pairs count; HALF: each unordered pair once."""
    u = similarity(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION)
    if SIDE == "positives" or SIDE == "negatives":
        loss = term(POLICY, 0 if SIDE == "positives" else 1, u, 0.0, 0.0, p0, p1, p2, p3, p4)
        member = side(rows, cols, first, last, n_cols, mixed, SIDE == "positives", SYMMETRIC)
    else:
        loss = term(POLICY, 1, u, 0.0, 0.0, p0, p1, p2, p3, p4)
        _, member = members(rows, cols, first, last, n_cols, SYMMETRIC, False)
        if mixed:
            same, _ = members(rows, cols, first, last, n_cols, SYMMETRIC, True)
            loss = tl.where(same, term(POLICY, 0, u, 0.0, 0.0, p0, p1, p2, p3, p4), loss)
        if SYMMETRIC:
            member = member & (rows[:, None] != cols[None, :])
    if SIDE != "negatives":
        member = without_selves(member, rows, cols, SELVES, n_rows, n_cols, SELF)
    if HALF:
        member = member & (rows[:, None] < cols[None, :])
    bits = tl.where(loss == 0, 0.0, loss).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF), member & (loss == loss)


@triton.jit
def digits_kernel(
    X, Y, X2, Y2, FIRST, LAST, ROWS, RUN, PREFIX, HISTOGRAM, SELVES, n_rows, n_cols, n_listed, p0, p1, p2, p3,
    p4,
    POLICY: tl.constexpr, SIDE: tl.constexpr, LISTED: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr,
    SPLITS: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """How many keys that begin as PREFIX does have each value of the next digit. LISTED: of the rows in ROWS only."""
    if tl.load(RUN) == 0:
        return
    block, part = tl.program_id(0), tl.program_id(1)
    places = block * BM + tl.arange(0, BM)
    if LISTED:
        real = places < n_listed
        rows = tl.load(ROWS + tl.minimum(places, n_listed - 1))
    else:
        real = places < n_rows
        rows = places
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    start, stop = part_of(n_cols, low, high, part, SIDE == "positives", SPLITS, BN)
    HALF: tl.constexpr = SYMMETRIC and not LISTED
    if HALF:
        start = tl.maximum(start, block * BM // BN)
    prefix = tl.load(PREFIX).to(tl.uint32)
    for tile in range(start, stop):
        cols = tile * BN + tl.arange(0, BN)
        key, member = loss_keys(X, Y, X2, Y2, rows, cols, first, last, SELVES, n_rows, n_cols,
                                (tile >= low) & (tile < high), p0, p1, p2, p3, p4, POLICY, SIDE, HALF, D, VIEW,
                                SYMMETRIC, SELF, BM, BN, BD, PRECISION)  # fmt: skip
        key = key.to(tl.uint32, bitcast=True) ^ 0x80000000
        member = member & real[:, None]
        if SHIFT + BITS < 32:
            member = member & ((key >> (SHIFT + BITS)) == (prefix >> (SHIFT + BITS)))
        digit = ((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        # the lowest digit of a tile, a hinge's zeros, is added once for all
        lowest = tl.min(tl.where(member, digit, 1 << BITS))
        low_ones = member & (digit == lowest)
        number = tl.sum(low_ones.to(tl.int32))
        tl.atomic_add(HISTOGRAM + lowest, number.to(tl.int64), mask=number > 0)
        tl.atomic_add(HISTOGRAM + digit, tl.full((BM, BN), 1, tl.int64), mask=member & (digit > lowest))


@triton.jit
def collect_kernel(
    X, Y, X2, Y2, FIRST, LAST, ROW_ORDER, COL_ORDER, RUN, THRESHOLD, TIES, START, NEEDED, CURSOR, KEYS, PAIRS, SELVES,
    n_rows, n_cols, capacity, p0, p1, p2, p3, p4,
    POLICY: tl.constexpr, SIDE: tl.constexpr, TIED: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Append the pairs above THRESHOLD in any order, and add to TIES [i] how many equal it.

    TIED: append those that equal it, of rows i with START [i] < NEEDED.
    """
    if tl.load(RUN) == 0:
        return
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    real = rows < n_rows
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    start, stop = part_of(n_cols, low, high, part, SIDE == "positives", SPLITS, BN)
    if SYMMETRIC:
        start = tl.maximum(start, block * BM // BN)
    row_name = tl.load(ROW_ORDER + rows, mask=real, other=0)
    threshold = tl.load(THRESHOLD)
    if TIED:
        needed = tl.load(NEEDED)
        row_start = tl.load(START + row_name, mask=real, other=9223372036854775807)
    for tile in range(start, stop):
        cols = tile * BN + tl.arange(0, BN)
        col_name = tl.load(COL_ORDER + cols, mask=cols < n_cols, other=0)
        look = True
        if TIED:
            look = tl.min(row_start, 0) < needed
            if SYMMETRIC:
                col_start = tl.load(START + col_name, mask=cols < n_cols, other=9223372036854775807)
                look = look | (tl.min(col_start, 0) < needed)
        if look:
            key, member = loss_keys(X, Y, X2, Y2, rows, cols, first, last, SELVES, n_rows, n_cols,
                                    (tile >= low) & (tile < high), p0, p1, p2, p3, p4, POLICY, SIDE, SYMMETRIC, D, VIEW,
                                    SYMMETRIC, SELF, BM, BN, BD, PRECISION)  # fmt: skip
            member = member & real[:, None]
            i, j = row_name[:, None], col_name[None, :]
            tie = member & (key == threshold)
            if TIED:
                if SYMMETRIC:
                    chosen = tie & (tl.where(i < j, row_start[:, None], col_start[None, :]) < needed)
                else:
                    chosen = tie & (row_start < needed)[:, None]
            else:
                chosen = member & (key > threshold)
                if tl.max(tie.to(tl.int32)) > 0:
                    if SYMMETRIC:  # a pair belongs to the smaller of its two names
                        of_rows = tl.sum((tie & (i < j)).to(tl.int32), 1)
                        of_cols = tl.sum((tie & (i > j)).to(tl.int32), 0)
                        tl.atomic_add(TIES + col_name, of_cols, mask=of_cols > 0)
                    else:
                        of_rows = tl.sum(tie.to(tl.int32), 1)
                    tl.atomic_add(TIES + row_name, of_rows, mask=of_rows > 0)
            one = chosen.to(tl.int32)
            each = tl.sum(one, 1)
            number = tl.sum(one)
            if number > 0:
                before = tl.cumsum(each, 0) - each
                head = tl.atomic_add(CURSOR, number.to(tl.int64))
                place = before[:, None] + tl.cumsum(one, 1) - one
                if SYMMETRIC:
                    pair = tl.minimum(i, j).to(tl.int64) * n_cols + tl.maximum(i, j)
                else:
                    pair = i.to(tl.int64) * n_cols + j
                room = tl.minimum(tl.maximum(capacity - head, 0), BM * BN).to(tl.int32)
                chosen = chosen & (place < room)
                tl.store(PAIRS + head + place, pair, mask=chosen)
                tl.store(KEYS + head + place, key, mask=chosen)


class Search(Pairs):
    """The search for the pairs of largest loss, step by step; ``run`` [1] is 0 where the device has to skip a step."""

    def __init__(self, a: TopK) -> None:
        super().__init__(a.rows, a.cols, a.row_labels, a.col_labels, a.view, a.normalize, selves=a.selves)
        self.kernel_tiles = self.tiles("topk")
        self.positive = a.side == "positives"
        self.numbers = params(a.policy, a.params)
        self.chosen = {"POLICY": a.policy, "SIDE": a.side, "SELF": self.self_of(), **self.constants(self.kernel_tiles)}

    def full(self, value: int, size: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=self.device)

    def buffer(self, size: int) -> tuple[Tensor, Tensor]:
        """Room for keys and pairs."""
        return tuple(torch.empty(size, dtype=t, device=self.device) for t in (torch.int32, torch.int64))

    def kth(self, rank: Tensor, rows: Tensor | None, run: Tensor) -> Tensor:
        """Key of the rank-th largest loss [1], of all pairs or of the listed rows' pairs, digit by digit."""
        n_listed = self.row.size if rows is None else len(rows)
        grid = self.parts(self.kernel_tiles, n_listed, self.positive)
        prefix = self.full(0)
        for shift, bits in DIGITS:
            histogram = self.full(0, 1 << bits)
            launch(
                digits_kernel, grid, self.device, *self.sides, self.first, self.last,
                self.first if rows is None else rows, run, prefix, histogram, self.selves, *self.shape, n_listed,
                *self.numbers, LISTED=rows is not None, SHIFT=shift, BITS=bits, SPLITS=grid[1], **self.chosen,
            )  # fmt: skip
            from_here = histogram.flip(0).cumsum(0).flip(0)  # keys with this digit or a larger one
            digit = ((from_here >= rank).sum(0, keepdim=True) - 1).clamp_min(0)
            rank = rank - (from_here - histogram)[digit]
            prefix = prefix + (digit << shift)
        return (prefix + LOWEST).to(torch.int32)

    def collect(self, threshold: Tensor, keys: Tensor, pairs: Tensor, run: Tensor, start: Tensor | None = None,
                needed: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Fill keys and pairs from above the threshold, or with those that equal it; how many, and ties of each row."""
        grid = self.parts(self.kernel_tiles, self.row.size, self.positive)
        cursor, ties = self.full(0), self.full(0, self.row.size, torch.int32)
        launch(
            collect_kernel, grid, self.device, *self.sides, self.first, self.last, *self.names, run, threshold, ties,
            cursor if start is None else start, cursor if needed is None else needed, cursor, keys, pairs,
            self.selves, *self.shape, len(keys), *self.numbers, TIED=start is not None, SPLITS=grid[1], **self.chosen,
        )  # fmt: skip
        return cursor, ties

    def number(self, total: int) -> Tensor:
        """Pairs of the side [1]; ``total`` of both, and of rows with their own columns."""
        same = (self.last - self.first).sum(dtype=torch.int64)[None]
        own = (self.selves >= 0).sum(dtype=torch.int64)[None] if self.has_selves else self.full(0)
        if self.symmetric:
            same = (same - self.row.size) // 2
        sides = {"positives": same - own, "negatives": total - same, "all": total - own}
        return sides[self.chosen["SIDE"]]

    def sampled(self, k: int) -> tuple[int, int]:
        """Rows of the sample, and the rank in it that about 2k of all pairs are above."""
        size = min(self.row.size, max(SAMPLE, self.row.size // SAMPLED))
        seen = 2 * size if self.symmetric else size  # a symmetric pair is seen from both of its rows
        return size, max(2 * k * seen // self.row.size, LEAST)


def _largest(buffers: list[tuple[Tensor, Tensor, Tensor]], k: int, n_cols: int) -> tuple[Tensor, Tensor]:
    """i and j of the k largest keys, ties to the smaller pair, of what stands at the head of each buffer."""
    keys, pairs = [], []
    for key, pair, count in buffers:
        empty = torch.arange(len(key), device=key.device) >= count
        keys.append(key.masked_fill(empty, LOWEST))
        pairs.append(pair.masked_fill(empty, NO_PAIR))
    flat, order = torch.cat(pairs).sort()
    order = torch.cat(keys)[order].sort(descending=True, stable=True).indices[:k]
    flat = torch.where(flat == NO_PAIR, -1, flat)[order]
    flat = pad(flat, (0, k - len(flat)), value=-1)
    return torch.where(flat < 0, -1, flat // n_cols), torch.where(flat < 0, -1, flat % n_cols)


def topk(a: TopK) -> tuple[Tensor, Tensor]:
    """The k pairs (i, j) of largest loss, ties to the smaller (i, j); -1 beyond the last pair.

    Unordered pairs (i < j) where the columns are the rows, else every (row, column) pair.
    """
    search, k = Search(a), a.k
    n_rows, n_cols = search.shape
    total = n_rows * (n_rows - 1) // 2 if search.symmetric else n_rows * n_cols
    if not total:  # a row alone
        return a.row_labels.new_full((k,), -1), a.row_labels.new_full((k,), -1)
    sample, rank = search.sampled(k)
    capacity = min(total, max(ROOM, 8 * k, 4 * rank * n_rows // sample))
    keys, pairs = search.buffer(capacity)
    always = search.full(1, dtype=torch.int32)
    if total == capacity:  # there is room for all
        count, _ = search.collect(search.full(LOWEST, dtype=torch.int32), keys, pairs, always)
        return _largest([(keys, pairs, count)], k, n_cols)

    listed = torch.arange(sample, dtype=torch.int64, device=search.device) * n_rows // sample
    guess = search.kth(search.full(rank), listed.to(torch.int32), always)
    count, ties = search.collect(guess, keys, pairs, always)
    wanted = search.number(total).clamp_max(k)
    good = (count <= capacity) & (count + ties.sum(dtype=torch.int64) >= wanted)
    missed = (~good).to(torch.int32)
    threshold = torch.where(good, guess, search.kth(wanted, None, missed))
    exact_count, exact_ties = search.collect(threshold, keys, pairs, missed)
    count, ties = torch.where(good, count, exact_count), torch.where(good, ties, exact_ties)

    needed = wanted - count
    before = ties.cumsum(0, dtype=torch.int64) - ties
    equal, tied = search.buffer(k + n_cols)
    tie_count, _ = search.collect(threshold, equal, tied, (needed > 0).to(torch.int32), before, needed)
    return _largest([(keys, pairs, count), (equal, tied, tie_count)], k, n_cols)
