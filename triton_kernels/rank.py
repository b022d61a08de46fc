"""The rank engine: retrieval metrics by counting what lies above each positive. No neighbour lists, any class size.

A program owns BM queries and takes their positives P at a time: it picks their u out of the tiles that hold them, then
walks over all columns and counts, for each, the negatives and the positives above. Positives and negatives come from
the same tile function, so that equal rows give equal bits. 1u for up to P positives a query, and one more for each P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pydml.declared import Rank
from pydml.triton_kernels.matrix import Matrix, launch
from pydml.triton_kernels.tile import dot_tile, members, span

#: Positives of a query that are ranked in one walk over the columns.
POSITIVES = 16


@triton.jit
def rank_kernel(
    X, Y, FIRST, LAST, NUMBER, ABOVE, HITS, SHARE, n_rows, n_cols,
    P: tl.constexpr, D: tl.constexpr, SYMMETRIC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of BM queries: positives, and for both rules of ties negatives above the best, hits and Σ order/place."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < n_rows
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    number = tl.where(real, last - first, 0)
    if SYMMETRIC:
        number = tl.where(real, number - 1, 0)
    p = tl.arange(0, P)[None, :]
    threshold = tl.zeros((BM, P), tl.float32)  # u of P positives,
    over, reach = tl.zeros((BM, P), tl.int32), tl.zeros((BM, P), tl.int32)  # negatives above and at least as high,
    order = tl.zeros((BM, P), tl.int32)  # and 1 + positives before it
    above0, above1 = tl.zeros((BM,), tl.int32), tl.zeros((BM,), tl.int32)
    hits0, hits1 = tl.zeros((BM,), tl.int32), tl.zeros((BM,), tl.int32)
    share0, share1 = tl.zeros((BM,), tl.float64), tl.zeros((BM,), tl.float64)

    # A walk is over the tiles that hold positives, to find these, then over all tiles, to count. All walks are one
    # loop: the compiler for sm_100 fails on loops within loops within loops.
    n_found = high - low
    walk = n_found + tl.cdiv(n_cols, BN)
    for step in range(0, tl.cdiv(tl.max(number, 0), P).to(tl.int64) * walk):
        begin, at = (step // walk).to(tl.int32) * P, (step % walk).to(tl.int32)
        tile = tl.where(at < n_found, low + at, at - n_found)
        cols = tile * BN + tl.arange(0, BN)
        s = dot_tile(X, Y, rows, cols, D, BM, BN, BD, PRECISION)
        wanted = first[:, None] + begin + p  # [BM, P] columns of these positives
        if SYMMETRIC:  # step over the query itself
            wanted += (wanted >= rows[:, None]).to(tl.int32)
        ranked = begin + p < number[:, None]
        if at == 0:
            threshold = tl.full((BM, P), float("-inf"), tl.float32)
            over, reach = tl.zeros((BM, P), tl.int32), tl.zeros((BM, P), tl.int32)
            order = tl.full((BM, P), 1, tl.int32)
        if at < n_found:
            for k in range(0, P):
                column = tl.sum(tl.where(p == k, wanted, 0), 1)
                found = tl.max(tl.where(cols[None, :] == column[:, None], s, float("-inf")), 1)
                threshold = tl.where(p == k, tl.maximum(threshold, found[:, None]), threshold)
        else:
            mixed = (tile >= low) & (tile < high)
            if mixed | (tl.max(s) >= tl.min(tl.where(ranked, threshold, float("inf")))):
                same, diff = members(rows, cols, first, last, n_cols, SYMMETRIC, True)
                for k in range(0, P):
                    t = tl.max(tl.where(p == k, threshold, float("-inf")), 1)[:, None]
                    # both counts of a tile in one sum: neither reaches 2^15
                    counts = tl.sum(tl.where(diff & (s > t), 1, 0) + tl.where(diff & (s >= t), 32768, 0), 1)[:, None]
                    over += tl.where(p == k, counts & 32767, 0)
                    reach += tl.where(p == k, counts >> 15, 0)
                    if mixed:
                        column = tl.sum(tl.where(p == k, wanted, 0), 1)[:, None]
                        before = same & ((s > t) | ((s == t) & (cols[None, :] < column)))
                        order += tl.where(p == k, tl.sum(before.to(tl.int32), 1)[:, None], 0)
        if at == walk - 1:
            place0, place1 = order + over, order + reach
            hit0, hit1 = ranked & (place0 <= number[:, None]), ranked & (place1 <= number[:, None])
            hits0 += tl.sum(hit0.to(tl.int32), 1)
            hits1 += tl.sum(hit1.to(tl.int32), 1)
            share0 += tl.sum(tl.where(hit0, order.to(tl.float64) / place0.to(tl.float64), 0.0), 1)
            share1 += tl.sum(tl.where(hit1, order.to(tl.float64) / place1.to(tl.float64), 0.0), 1)
            best = ranked & (order == 1)
            above0 += tl.sum(tl.where(best, over, 0), 1)
            above1 += tl.sum(tl.where(best, reach, 0), 1)

    at = rows.to(tl.int64) * 2
    tl.store(NUMBER + rows, number, mask=real)
    tl.store(ABOVE + at, above0, mask=real)
    tl.store(ABOVE + at + 1, above1, mask=real)
    tl.store(HITS + at, hits0, mask=real)
    tl.store(HITS + at + 1, hits1, mask=real)
    tl.store(SHARE + at, share0, mask=real)
    tl.store(SHARE + at + 1, share1, mask=real)


def rank(a: Rank) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per query: positives [R], negatives above the best one, hits and average precision among the first R.

    The last three are [R, 2]: ties between a positive and a negative in favour of the positive, then against it.
    """
    m = Matrix.of(a)
    tiles = m.tiles("rank")
    number = torch.empty(m.row.size, dtype=torch.int32, device=m.device)
    above, hits = (number.new_empty(m.row.size, 2) for _ in "ah")
    share = torch.empty(m.row.size, 2, dtype=torch.float64, device=m.device)
    constants = {name: value for name, value in m.constants(tiles).items() if name != "VIEW"}
    launch(
        rank_kernel, (triton.cdiv(m.row.size, tiles.rows),), m.device, m.row.packed, m.col.packed,
        *m.ranges(m.row, m.col), number, above, hits, share, *m.shape, P=POSITIVES, **constants,
    )  # fmt: skip
    precision = share / number.clamp_min(1)[:, None]
    number, above, hits, precision = (m.row.unsort(t) for t in (number, above, hits, precision))
    kind = a.row_labels.dtype
    return number.to(kind), above.to(kind), hits.to(kind), precision
