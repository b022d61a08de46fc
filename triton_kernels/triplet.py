"""The triplet engine: all triplets, or one semi-hard negative a positive pair, with no triplet list.

A row's positives are thresholds, and every negative is held against them. Rows are sorted by label, so positive p of a
row is column first+p, and needs no index. What is known of positive pairs lies in tables [P, R], ``WINDOW`` of each row
at a time: the host launches the passes for each window, and a window that no class reaches ends at once, so that nobody
waits for the size of the largest class. O(R·P) memory, ⌈N/P⌉ rounds of launches.

Forward, all triplets: 1u (u = one B×B×d product), semi-hard: ⌈M/32⌉u for classes of M. Backward: one such pass over the
negatives for the positives' weights, then (⌈d/256⌉+1)u as in the pair engine, (⌈d/128⌉+1)u on sm_80. Beside the
products, M operations a pair.
Swapped triplets run on the tiled engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from pydml.backends import class_limit
from pydml.declared import Backward, Triplet
from pydml.triton_kernels.functions import relu, sigmoid, softplus
from pydml.triton_kernels.matrix import Matrix, Side, launch
from pydml.triton_kernels.select import similarity
from pydml.triton_kernels.tile import finish, members, negative_tile, negative_tiles, push, span, tile_u, without_selves

#: Positives of a row whose similarities are held at a time, and how many of them are in registers.
WINDOW, HELD = 256, 32


@triton.jit
def loss(violation, SMOOTH: tl.constexpr):
    if SMOOTH:
        return softplus(violation)
    else:
        return relu(violation)


@triton.jit
def slope(violation, SMOOTH: tl.constexpr):
    if SMOOTH:
        return sigmoid(violation)
    else:
        return tl.where(violation > 0, 1.0, 0.0)


@triton.jit
def some(mask):
    """Is any element of [BM, BN] true?"""
    return tl.max(mask.to(tl.int32)) > 0


@triton.jit
def own_column(SELVES, anchor, real, SELF: tl.constexpr):
    """The column of each anchor itself: its place in a symmetric matrix, or what SELVES has for it, -1 for none."""
    if SELF > 0:
        return tl.load(SELVES + anchor, mask=real, other=-1)
    else:
        return anchor


@triton.jit
def real_slot(p, held, first, window, own, SYMMETRIC: tl.constexpr, SELF: tl.constexpr):
    """Is positive window+p of the anchors one? Each has ``held`` of them in the window, ``own``, itself, among them."""
    if SYMMETRIC or SELF > 0:
        return (p < held) & (first + window + p != own)
    else:
        return p < held


@triton.jit
def positives_kernel(
    X, Y, X2, Y2, FIRST, LAST, SELVES, U, LEAST, n_rows, n_cols, window, P: tl.constexpr, D: tl.constexpr,
    VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U [P, n_rows]: similarities of the window's positives of BM rows; LEAST [n_rows]: the lowest."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < n_rows
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    least = tl.full((BM,), float("inf"), tl.float32)
    for tile in range(low, tl.where(tl.max(last - first, 0) > window, high, low)):
        cols = tile * BN + tl.arange(0, BN)
        u = similarity(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, VIEW, SYMMETRIC, SELF, BM, BN, BD,
                       PRECISION)  # fmt: skip
        same, _ = members(rows, cols, first, last, n_cols, SYMMETRIC, True)
        same = without_selves(same, rows, cols, SELVES, n_rows, n_cols, SELF)
        slot = cols[None, :] - first[:, None] - window
        same = same & real[:, None] & (slot >= 0) & (slot < P)
        tl.store(U + slot.to(tl.int64) * n_rows + rows[:, None], u, mask=same)
        least = tl.minimum(least, tl.min(tl.where(same, u, float("inf")), 1))
    tl.store(LEAST + rows, least, mask=real)


@triton.jit
def add(total, count, tile, X, Y, X2, Y2, rows, first, last, own, SELVES, held, most, least, U, n_rows, n_cols, window,
        margin, SMOOTH: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
        MIXED: tl.constexpr):  # fmt: skip
    """Add the triplets of a tile's negatives to total and count [BM]."""
    cols = tile * BN + tl.arange(0, BN)
    u = similarity(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION)
    _, diff = members(rows, cols, first, last, n_cols, SYMMETRIC, MIXED)
    if SMOOTH or some(diff & (u - least[:, None] + margin > 0)):
        sums = tl.zeros((BM, BN), tl.float32)
        above = tl.zeros((BM, BN), tl.int32)
        for p in range(0, most):
            u_ap = tl.load(U + rows, mask=real_slot(p, held, first, window, own, SYMMETRIC, SELF), other=float("inf"))
            term = loss(u - u_ap[:, None] + margin, SMOOTH)
            sums += term
            above += (term > 0).to(tl.int32)
            U += n_rows
        total += tl.sum(tl.where(diff, sums, 0.0), 1)
        count += tl.sum(tl.where(diff, above, 0), 1).to(tl.int64)
    return total, count


@triton.jit
def triplet_forward_kernel(
    X, Y, X2, Y2, FIRST, LAST, SELVES, U, LEAST, TOTAL, COUNT, n_rows, n_cols, window, margin,
    SMOOTH: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr,
    SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All triplets of BM anchors with the window's positives and one part of the columns."""
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    real = rows < n_rows
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    held = tl.minimum(last - first - window, P)
    most = tl.max(held, 0)
    if most <= 0:
        return
    least = tl.load(LEAST + rows, mask=real, other=float("inf"))
    own = own_column(SELVES, rows, real, SELF)
    n_tiles = tl.cdiv(n_cols, BN)
    start, stop = n_tiles * part // SPLITS, n_tiles * (part + 1) // SPLITS
    at = part.to(tl.int64) * n_rows + rows
    total = tl.load(TOTAL + at, mask=real, other=0.0)
    count = tl.load(COUNT + at, mask=real, other=0)
    for t in range(0, negative_tiles(start, stop, low, high)):
        tile = negative_tile(t, start, low, high)
        total, count = add(total, count, tile, X, Y, X2, Y2, rows, first, last, own, SELVES, held, most, least, U,
                           n_rows, n_cols, window, margin, SMOOTH, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION,
                           False)  # fmt: skip
    for tile in range(tl.maximum(low, start), tl.minimum(high, stop)):
        total, count = add(total, count, tile, X, Y, X2, Y2, rows, first, last, own, SELVES, held, most, least, U,
                           n_rows, n_cols, window, margin, SMOOTH, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION,
                           True)  # fmt: skip
    tl.store(TOTAL + at, total, mask=real)
    tl.store(COUNT + at, count, mask=real)


@triton.jit
def hold(found, place, tile, X, Y, X2, Y2, rows, first, last, own, SELVES, held, most, least, U, ORDER, n_rows, n_cols,
         window, margin, SEMIHARD: tl.constexpr, SMOOTH: tl.constexpr, PB: tl.constexpr, D: tl.constexpr,
         VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         BD: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr):  # fmt: skip
    """Hold a tile's negatives against PB positives of every row: found and place [BM, PB]."""
    cols = tile * BN + tl.arange(0, BN)
    u = similarity(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION)
    _, diff = members(rows, cols, first, last, n_cols, SYMMETRIC, MIXED)
    if SMOOTH or SEMIHARD or some(diff & (u - least[:, None] + margin > 0)):
        if SEMIHARD:
            name = tl.load(ORDER + cols, mask=cols < n_cols, other=0).to(tl.int32)[None, :]
        for p in range(0, most):
            here = (tl.arange(0, PB) == p)[None, :]
            mask = real_slot(p, held, first, window, own, SYMMETRIC, SELF)
            if SEMIHARD:
                u_ap = tl.load(U + rows, mask=mask, other=float("-inf"))
                below = diff & (u < u_ap[:, None])
                best = tl.max(tl.where(below, u, float("-inf")), 1)[:, None]
                smallest = tl.min(tl.where(below & (u == best), name, n_cols), 1)[:, None]
                better = here & ((best > found) | ((best == found) & (smallest < place)))
                found = tl.where(better, best, found)
                place = tl.where(better, smallest, place)
            else:
                u_ap = tl.load(U + rows, mask=mask, other=float("inf"))
                added = tl.sum(tl.where(diff, slope(u - u_ap[:, None] + margin, SMOOTH), 0.0), 1)
                found += tl.where(here, added[:, None], 0.0)
            U += n_rows
    return found, place


@triton.jit
def thresholds_kernel(
    X, Y, X2, Y2, FIRST, LAST, SELVES, U, LEAST, ORDER, BACK, FOUND, PLACE, n_rows, n_cols, window, margin,
    SEMIHARD: tl.constexpr, SMOOTH: tl.constexpr, P: tl.constexpr, PB: tl.constexpr, SPLITS: tl.constexpr,
    D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the negatives of one part of the columns are to PB positives of BM rows: FOUND, PLACE [SPLITS, P, n_rows].

    SEMIHARD: the violation (similarity, of one part of many) of the highest one below the positive, and the smallest
    column that has it; else Σ of slopes.
    """
    block, chunk, part = tl.program_id(0), tl.program_id(1) * PB, tl.program_id(2)
    rows = block * BM + tl.arange(0, BM)
    real = rows < n_rows
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    window += chunk
    held = tl.minimum(last - first - window, PB)
    most = tl.max(held, 0)
    if most <= 0:
        return
    U += chunk.to(tl.int64) * n_rows
    least = tl.load(LEAST + rows, mask=real, other=float("inf"))
    own = own_column(SELVES, rows, real, SELF)
    n_tiles = tl.cdiv(n_cols, BN)
    start, stop = n_tiles * part // SPLITS, n_tiles * (part + 1) // SPLITS
    found = tl.full((BM, PB), float("-inf") if SEMIHARD else 0.0, tl.float32)
    place = tl.zeros((BM, PB), tl.int32) + n_cols
    for t in range(0, negative_tiles(start, stop, low, high)):
        tile = negative_tile(t, start, low, high)
        found, place = hold(found, place, tile, X, Y, X2, Y2, rows, first, last, own, SELVES, held, most, least, U,
                            ORDER, n_rows, n_cols, window, margin, SEMIHARD, SMOOTH, PB, D, VIEW, SYMMETRIC, SELF, BM,
                            BN, BD, PRECISION, False)  # fmt: skip
    for tile in range(tl.maximum(low, start), tl.minimum(high, stop)):
        found, place = hold(found, place, tile, X, Y, X2, Y2, rows, first, last, own, SELVES, held, most, least, U,
                            ORDER, n_rows, n_cols, window, margin, SEMIHARD, SMOOTH, PB, D, VIEW, SYMMETRIC, SELF, BM,
                            BN, BD, PRECISION, True)  # fmt: skip
    slot = chunk + tl.arange(0, PB)
    at = (part.to(tl.int64) * P + slot)[None, :] * n_rows + rows[:, None]
    if SEMIHARD and SPLITS == 1:
        slots = tl.arange(0, PB).to(tl.int64)[None, :] * n_rows + rows[:, None]
        found = found - tl.load(U + slots, mask=real[:, None], other=0.0) + margin
    tl.store(FOUND + at, found, mask=real[:, None])
    if SEMIHARD:
        place = tl.load(BACK + place, mask=place < n_cols, other=-1).to(tl.int32)
        tl.store(PLACE + at, place, mask=real[:, None])


@triton.jit
def semihard_kernel(FOUND, FIRST, LAST, SELVES, TOTAL, COUNT, n_rows, window, SMOOTH: tl.constexpr, P: tl.constexpr,
                    SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Sum the losses of the window's positives of BM anchors with the negatives found for them."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < n_rows
    first = tl.load(FIRST + rows, mask=real, other=0)
    held = tl.minimum(tl.load(LAST + rows, mask=real, other=0) - first - window, P)
    total = tl.load(TOTAL + rows, mask=real, other=0.0)
    count = tl.load(COUNT + rows, mask=real, other=0)
    own = own_column(SELVES, rows, real, SELF)
    for p in range(0, tl.max(held, 0)):
        mask = real_slot(p, held, first, window, own, SYMMETRIC, SELF)
        term = loss(tl.load(FOUND + rows, mask=mask, other=float("-inf")), SMOOTH)
        total += term
        count += (term > 0).to(tl.int64)
        FOUND += n_rows
    tl.store(TOTAL + rows, total, mask=real)
    tl.store(COUNT + rows, count, mask=real)


@triton.jit
def weights(
    u, same, diff, anchor, item, real, U, LEAST, FOUND, PLACE, FIRST, LAST, SELVES, GRAD, n_anchors, window, margin,
    SEMIHARD: tl.constexpr, SMOOTH: tl.constexpr, P: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """w of the anchors' triplets; ``anchor`` and ``item`` are [BM, 1] and [1, BN], or the other way round."""
    first = tl.load(FIRST + anchor, mask=real, other=0)
    held = tl.minimum(tl.load(LAST + anchor, mask=real, other=0) - first - window, P)
    grad = tl.load(GRAD + anchor, mask=real, other=0.0)
    own = own_column(SELVES, anchor, real, SELF)
    w = tl.zeros_like(u)
    most = tl.max(held)
    if not SEMIHARD and not SMOOTH:
        least = tl.load(LEAST + anchor, mask=real, other=float("inf"))
        most = tl.where(some(diff & (u - least + margin > 0)), most, 0)
    u_ap, violation, place = U, FOUND, PLACE
    for p in range(0, most):
        mask = real_slot(p, held, first, window, own, SYMMETRIC, SELF)
        if SEMIHARD:
            steep = slope(tl.load(violation + anchor, mask=mask, other=float("-inf")), SMOOTH)
            w += tl.where(tl.load(place + anchor, mask=mask, other=-1) == item, steep, 0.0)
            violation += n_anchors
            place += n_anchors
        else:
            w += slope(u - tl.load(u_ap + anchor, mask=mask, other=float("inf")) + margin, SMOOTH)
            u_ap += n_anchors
    w = tl.where(diff, w, 0.0)
    if MIXED:
        slot = item - first - window
        same = same & (slot >= 0) & (slot < P)
        at = slot.to(tl.int64) * n_anchors + anchor
        pushed = tl.load(FOUND + at, mask=same, other=0.0)
        if SEMIHARD:
            pushed = slope(pushed, SMOOTH)
        w -= tl.where(same, pushed, 0.0)
    return tl.where(real, grad * w, 0.0)


@triton.jit
def hits(anchors, start, stop, PLACE, FIRST, LAST, SELVES, n_anchors, window, P: tl.constexpr, SYMMETRIC: tl.constexpr,
         SELF: tl.constexpr):  # fmt: skip
    """Is any semi-hard negative of these anchors in [start, stop)?"""
    real = anchors < n_anchors
    first = tl.load(FIRST + anchors, mask=real, other=0)
    held = tl.minimum(tl.load(LAST + anchors, mask=real, other=0) - first - window, P)
    own = own_column(SELVES, anchors, real, SELF)
    hit = tl.zeros_like(anchors)
    for p in range(0, tl.max(held, 0)):
        place = tl.load(PLACE + anchors, mask=real_slot(p, held, first, window, own, SYMMETRIC, SELF), other=-1)
        hit += ((place >= start) & (place < stop)).to(tl.int32)
        PLACE += n_anchors
    return tl.max(hit, 0) > 0


@triton.jit
def gather(
    g, total, tile, X, Y, X2, Y2, rows, first, last, U, LEAST, FOUND, PLACE, A_FIRST, A_LAST, SELVES, GRAD, FLAG,
    n_rows, n_cols, window, chunk, margin, SEMIHARD: tl.constexpr, SMOOTH: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr, EXACT: tl.constexpr, P: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr,
    SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    GD: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Add one tile's share of dL/dx to g."""
    cols = tile * BN + tl.arange(0, BN)
    same, diff = members(rows, cols, first, last, n_cols, SYMMETRIC, MIXED)
    if MIXED:
        same = without_selves(same, rows, cols, SELVES, n_rows, n_cols, SELF)
    if EXACT:
        u = similarity(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, VIEW, SYMMETRIC, SELF, BM, BN, BD,
                       PRECISION)  # fmt: skip
    else:
        u, near = tile_u(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, BM, BN, BD, VIEW, SYMMETRIC, SELF, False,
                         PRECISION)  # fmt: skip
        if VIEW != "dot":  # a tile with near pairs is left to the exact launch
            same = same & (near == 0)
            diff = diff & (near == 0)
            tl.store(FLAG, near.to(tl.uint8), mask=chunk == 0)
    same = same & (rows < n_rows)[:, None]
    w = tl.zeros_like(u)
    if OWN:  # the program's own rows are the anchors
        w += weights(u, same, diff, rows[:, None], cols[None, :], (rows < n_rows)[:, None], U, LEAST, FOUND, PLACE,
                     A_FIRST, A_LAST, SELVES, GRAD, n_rows, window, margin, SEMIHARD, SMOOTH, P, SYMMETRIC, SELF,
                     MIXED)  # fmt: skip
    if OTHER:  # the other side's rows are
        w += weights(u, same, diff, cols[None, :], rows[:, None], (cols < n_cols)[None, :], U, LEAST, FOUND, PLACE,
                     A_FIRST, A_LAST, SELVES, GRAD, n_cols, window, margin, SEMIHARD, SMOOTH, P, SYMMETRIC, SELF,
                     MIXED)  # fmt: skip
    if some(w != 0):
        g, total = push(g, total, w, u, X, Y, rows, cols, chunk, D, BN, GD, VIEW, EXACT, PRECISION)
    return g, total


@triton.jit
def triplet_backward_kernel(
    X, Y, X2, Y2, FIRST, LAST, U, LEAST, FOUND, PLACE, A_FIRST, A_LAST, SELVES, MOST, GRAD, FLAGS, G, n_rows, n_cols,
    window, g_slice, flag_tiles, margin, SEMIHARD: tl.constexpr, SMOOTH: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr, EXACT: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, FLAG_ROWS: tl.constexpr,
    FLAG_COLS: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, GD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the window's triplets give to dL/dx of BM own rows, GD of its columns, over one part of the other side.

    OWN, OTHER: whose rows are anchors; A_FIRST, A_LAST the ranges of their positives, MOST the longest of them. EXACT:
    only the tiles with pairs too near for 2-2S, FLAG_ROWS×FLAG_COLS, which the launch before has flagged and left out.
    """
    tl.static_assert(FLAG_ROWS % BM == 0 and FLAG_COLS % BN == 0, "a tile lies in one that was flagged")
    if tl.load(MOST) <= window:
        return
    block, part, chunk = tl.program_id(0), tl.program_id(2), tl.program_id(1) * GD
    rows = block * BM + tl.arange(0, BM)
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    n_tiles = tl.cdiv(n_cols, BN)
    start, stop = n_tiles * part // SPLITS, n_tiles * (part + 1) // SPLITS
    FLAGS += (block * BM // FLAG_ROWS).to(tl.int64) * flag_tiles
    G += part.to(tl.int64) * g_slice
    g = tl.zeros((BM, GD), tl.float32)
    total = tl.zeros((BM, 16), tl.float32)
    for t in range(0, negative_tiles(start, stop, low, high)):
        tile = negative_tile(t, start, low, high)
        FLAG = FLAGS + tile * BN // FLAG_COLS
        live = True
        if EXACT:
            live = tl.load(FLAG) != 0
        elif SEMIHARD:
            live = False
            if OWN:
                live = live | hits(rows, tile * BN, (tile + 1) * BN, PLACE, A_FIRST, A_LAST, SELVES, n_rows, window,
                                   P, SYMMETRIC, SELF)  # fmt: skip
            if OTHER:
                live = live | hits(tile * BN + tl.arange(0, BN), block * BM, (block + 1) * BM, PLACE, A_FIRST, A_LAST,
                                   SELVES, n_cols, window, P, SYMMETRIC, SELF)  # fmt: skip
        if live:
            g, total = gather(
                g, total, tile, X, Y, X2, Y2, rows, first, last, U, LEAST, FOUND, PLACE, A_FIRST, A_LAST, SELVES, GRAD,
                FLAG, n_rows, n_cols, window, chunk, margin, SEMIHARD, SMOOTH, OWN, OTHER, EXACT, P, D, VIEW, SYMMETRIC,
                SELF, BM, BN, BD, GD, PRECISION, False,
            )  # fmt: skip
    for tile in range(tl.maximum(low, start), tl.minimum(high, stop)):
        FLAG = FLAGS + tile * BN // FLAG_COLS
        live = True
        if EXACT:
            live = tl.load(FLAG) != 0
        if live:
            g, total = gather(
                g, total, tile, X, Y, X2, Y2, rows, first, last, U, LEAST, FOUND, PLACE, A_FIRST, A_LAST, SELVES, GRAD,
                FLAG, n_rows, n_cols, window, chunk, margin, SEMIHARD, SMOOTH, OWN, OTHER, EXACT, P, D, VIEW, SYMMETRIC,
                SELF, BM, BN, BD, GD, PRECISION, True,
            )  # fmt: skip
    before = tl.load(G + rows.to(tl.int64)[:, None] * D + chunk + tl.arange(0, GD)[None, :])
    if VIEW == "euclidean" or VIEW == "squared":
        before = -before  # as finish wants g
    finish(g + before, total, X, G, rows, n_rows, chunk, D, GD, VIEW)


class Triplets(Matrix):
    """A matrix with the tables [P, R] of the positive pairs of one window."""

    def __init__(self, a: Triplet) -> None:
        super().__init__(a.rows, a.cols, a.row_labels, a.col_labels, a.view, a.normalize, selves=a.selves)
        self.semihard, self.margin, self.smooth = a.mode == "semihard", a.margin, a.smooth
        self.narrow = self.tiles("triplet")
        # Semi-hard negatives are compared with positives: equal rows have to give equal bits, by the same instructions.
        self.tile = self.tiles("thresholds" if self.semihard or self.smooth else "sums")
        self.blocks = triton.cdiv(self.row.size, self.tile.rows)
        self.col_tiles = triton.cdiv(self.col.size, self.tile.cols)
        self.first, self.last = self.ranges(self.row, self.col)
        self.limit = class_limit(self.col.size)
        # NaN for a promise that was broken
        self.finite = self.finite & ((self.last - self.first).amax() <= self.limit)
        self.held = min(WINDOW, max(HELD, triton.next_power_of_2(self.col.size)))
        embeddings = self.row.packed, self.col.packed, self.row.squares, self.col.squares
        self.sides = *embeddings, self.first, self.last, self.selves
        self.back = torch.empty_like(self.col.order).index_copy_(
            0, self.col.order, torch.arange(self.col.size, device=self.device)
        )
        self.fixed = {"SMOOTH": self.smooth, "SELF": self.self_of(), "P": self.held, **self.constants(self.tile)}

    def windows(self) -> Iterator[int]:
        """The first positive of every window, with the similarities of its positives."""
        self.u = self.row.x.new_empty(self.held, self.row.size)
        self.least = self.row.x.new_empty(self.row.size)
        constants = {k: v for k, v in self.fixed.items() if k != "SMOOTH"}
        for window in range(0, self.limit, self.held):
            launch(
                positives_kernel, (self.blocks,), self.device,
                *self.sides, self.u, self.least, *self.shape, window, **constants,
            )  # fmt: skip
            yield window

    def hold(self, window: int) -> tuple[Tensor, Tensor]:
        """What the negatives are to every positive of the window: see :func:`thresholds_kernel`."""
        tiles = self.tiles("thresholds" if self.smooth or self.semihard else "hinge")
        blocks = triton.cdiv(self.row.size, tiles.rows)
        splits = self.splits(blocks, self.col_tiles)
        found = self.row.x.new_empty(splits, self.held, self.row.size)
        place = self.first.new_empty(found.shape if self.semihard else (1, 1, 1))
        launch(
            thresholds_kernel, (blocks, self.held // HELD, splits), self.device,
            *self.sides, self.u, self.least, self.col.order, self.back, found, place, *self.shape, window, self.margin,
            SEMIHARD=self.semihard, SELF=self.self_of(), PB=HELD, SPLITS=splits, SMOOTH=self.smooth, P=self.held,
            **self.constants(tiles),
        )  # fmt: skip
        if splits == 1:
            return found[0], place[0]
        if not self.semihard:
            return found.sum(0), place[0]
        best = found.amax(0)
        name = self.col.order[place.clamp(0, self.col.size - 1)]  # whatever stands in slots that are none
        name = torch.where((found == best) & (place >= 0), name, self.col.size - 1).amin(0)
        return best - self.u + self.margin, self.back[name].to(place.dtype)


def triplet(a: Triplet) -> tuple[Tensor, Tensor]:
    """Per anchor: the sum of its triplets' losses and how many of them are above 0."""
    m = Triplets(a)
    splits = 1 if m.semihard else m.splits(m.blocks, m.col_tiles)
    total = m.row.x.new_zeros(splits, m.row.size)
    count = total.new_zeros(total.shape, dtype=torch.int64)
    for window in m.windows():
        if m.semihard:
            found, _ = m.hold(window)
            launch(
                semihard_kernel, (m.blocks,), m.device,
                found, m.first, m.last, m.selves, total, count, m.row.size, window,
                SMOOTH=m.smooth, P=m.held, SYMMETRIC=m.symmetric, SELF=m.self_of(), BM=m.tile.rows,
            )  # fmt: skip
        else:
            launch(
                triplet_forward_kernel, (m.blocks, splits), m.device,
                *m.sides, m.u, m.least, total, count, *m.shape, window, m.margin, SPLITS=splits, **m.fixed,
            )  # fmt: skip
    sums, above = m.poison(m.row.unsort(total.sum(0)), m.row.unsort(count.sum(0).to(total.dtype)))
    return sums, above


def triplet_backward(b: Backward[Triplet]) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/dtotal [R]."""
    m = Triplets(b.call)
    grad = m.row.sort(b.grad.total)
    most = (m.last - m.first).amax()

    class Share:
        """One side's gradient."""

        def __init__(self, own: Side, other: Side, is_row: bool) -> None:
            self.own, self.other, self.is_row = own, other, is_row
            self.blocks, self.tiles = triton.cdiv(own.size, m.narrow.rows), triton.cdiv(other.size, m.narrow.cols)
            self.splits = m.splits(self.blocks * (own.width // m.narrow.chunk), self.tiles)
            self.g = own.x.new_zeros(self.splits, *own.packed.shape)
            self.flags = own.x.new_zeros(self.blocks * self.tiles, dtype=torch.uint8)
            self.ranges = m.ranges(own, other)

        def add(self, window: int, found: Tensor, place: Tensor) -> None:
            own, other = self.own, self.other
            for cut in (m.narrow, m.tiles("exact"))[: 1 if m.view == "dot" else 2]:
                grid = triton.cdiv(own.size, cut.rows), own.width // cut.chunk, self.splits
                launch(
                    triplet_backward_kernel, grid, m.device,
                    own.packed, other.packed, own.squares, other.squares, *self.ranges, m.u, m.least, found, place,
                    m.first, m.last, m.selves, most, grad, self.flags, self.g, own.size, other.size, window,
                    own.packed.numel(), self.tiles, m.margin, SEMIHARD=m.semihard, SMOOTH=m.smooth,
                    SELF=m.self_of(self.is_row), OWN=self.is_row, OTHER=m.symmetric or not self.is_row,
                    EXACT=cut is not m.narrow, P=m.held, SPLITS=self.splits, FLAG_ROWS=m.narrow.rows,
                    FLAG_COLS=m.narrow.cols, GD=cut.chunk, **m.constants(cut),
                )  # fmt: skip

    shares = [Share(m.row, m.col, True)] if b.want_rows else []
    if b.want_cols and not m.symmetric:
        shares.append(Share(m.col, m.row, False))
    for window in m.windows():
        found, place = m.hold(window)
        for share in shares:
            share.add(window, found, place)
    for share in shares:
        share.own.take_gradient(*m.poison(share.g))
    return m.gradients()
