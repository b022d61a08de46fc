"""The pair engine: row statistics forward, recomputed tiles backward, each program the owner of its rows.

Forward, 1u (u = one B×B×d product): a program owns BM rows and walks over the columns, twice more over the few tiles
that hold positives where a loss mines. Backward, (⌈d/GD⌉+1)u: a program owns BM rows and GD columns of dL/dx and
recomputes S; both rows' weights come from the one tile, so nothing is added by two programs and the bits are the same
every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pydml.backends import deterministic
from pydml.declared import Backward, Pair
from pydml.policy import POLICIES, LogSumExp
from pydml.triton_kernels.functions import LN2, LOG2E, product
from pydml.triton_kernels.matrix import Matrix, Side, launch, tiles_for
from pydml.triton_kernels.policy import slope, term
from pydml.triton_kernels.tile import (
    dot_tile,
    finish,
    members,
    negative_tile,
    negative_tiles,
    push,
    span,
    tile_u,
    to_tf32,
    without_selves,
)


@triton.jit
def similarity(X, Y, X2, Y2, x_slice, y_slice, rows, cols, SELVES, n_rows, n_cols, sharpness, POOL: tl.constexpr,
               D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, BD: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """u [BM, BN], is some pair too near, and of the pooled centres top = max t_c and Σ_c 2^(t_c - top).

    t = sharpness·log₂e·s, as :func:`gather` has it, to the last bit.
    """
    if POOL == 1:
        u, near = tile_u(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, BM, BN, BD, VIEW, SYMMETRIC, SELF, EXACT,
                         PRECISION)  # fmt: skip
        return u, near, u, u
    else:  # U = Σ_c softmax_c(sharpness·s)·s, streamed over the centres
        top = tl.full((BM, BN), float("-inf"), tl.float32)
        total = tl.zeros((BM, BN), tl.float32)
        mean = tl.zeros((BM, BN), tl.float32)
        x, y = X, Y
        for _ in range(0, POOL):
            s = dot_tile(x, y, rows, cols, D, BM, BN, BD, PRECISION)
            t = product(s, sharpness * LOG2E)
            higher = tl.maximum(top, t)
            fade, e = tl.exp2(top - higher), tl.exp2(t - higher)
            total = total * fade + e
            mean = mean * fade + e * s
            top = higher
            x, y = x + x_slice, y + y_slice
        return mean / total, False, top, total


@triton.jit
def slot(mask: tl.constexpr, k: tl.constexpr):
    return (mask >> k) & 1


@triton.jit
def add(top, sums, u, same, diff, row, col, p0, p1, p2, p3, p4, POLICY: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
        ACTIVE: tl.constexpr, POSITIVE: tl.constexpr, LSE: tl.constexpr, MIXED: tl.constexpr):  # fmt: skip
    """Add a tile to the statistics: top [BM, KP] and sums [BM, KP].

    The top is a term as the backward pass has it, to the last bit: :func:`weights` takes e^{term - stat}.
    """
    for k in tl.static_range(K):
        if slot(ACTIVE, k) == 1 and (MIXED or slot(POSITIVE, k) == 0):
            if slot(POSITIVE, k) == 1:
                member = same
            else:
                member = diff
            here = (tl.arange(0, KP) == k)[None, :]
            t = term(POLICY, k, u, row, col, p0, p1, p2, p3, p4)
            if slot(LSE, k) == 1:
                t = tl.where(member, t, float("-inf"))
                before = tl.max(tl.where(here, top, float("-inf")), 1)
                after = tl.maximum(before, tl.max(t, 1))
                shift = tl.where(tl.abs(after) == float("inf"), 0.0, after)
                added = tl.sum(tl.exp2((t - shift[:, None]) * LOG2E), 1)
                fade = tl.exp2((before - shift) * LOG2E)
                sums = tl.where(here, sums * fade[:, None] + added[:, None], sums)
                top = tl.where(here, after[:, None], top)
            else:
                sums += tl.where(here, tl.sum(tl.where(member, t, 0.0), 1)[:, None], 0.0)
    return top, sums


@triton.jit
def wanted(FLAGS, flag_tiles, block, tile, OWN: tl.constexpr, OTHER: tl.constexpr, EXACT: tl.constexpr,
           FLAG_ROWS: tl.constexpr, FLAG_COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Has a tile, as seen from either side that has anchors, weights, and are they this launch's?"""
    tl.static_assert(FLAG_ROWS % BM == 0 and FLAG_COLS % BN == 0, "a tile lies in one tile of the forward pass")
    tl.static_assert(FLAG_ROWS % BN == 0 and FLAG_COLS % BM == 0, "and so does its mirror image")
    flag = tl.zeros((), tl.int32)
    zero = tl.zeros((), tl.int64)
    if OWN:
        i, j = zero + block * BM // FLAG_ROWS, tile * BN // FLAG_COLS
        flag = flag | tl.load(FLAGS + i * flag_tiles + j).to(tl.int32)
    if OTHER:
        i, j = zero + tile * BN // FLAG_ROWS, block * BM // FLAG_COLS
        flag = flag | tl.load(FLAGS + i * flag_tiles + j).to(tl.int32)
    if EXACT:
        return flag > 1
    else:
        return flag == 1


@triton.jit
def visit(
    top, sums, extreme, tile, X, Y, X2, Y2, rows, real, first, last, row, COL_FIELD, threshold, FLAG, SELVES, n_rows,
    n_cols, y_slice, sharpness, p0, p1, p2, p3, p4,
    POLICY: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ACTIVE: tl.constexpr, POSITIVE: tl.constexpr,
    LSE: tl.constexpr, CONSTANT: tl.constexpr, MINES: tl.constexpr, MARK: tl.constexpr, EXACT: tl.constexpr,
    POOL: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Add one tile to the statistics and the extremes, and note in FLAG whether it is live (1) and near (2)."""
    cols = tile * BN + tl.arange(0, BN)
    u, near, _, _ = similarity(X, Y, X2, Y2, 0, y_slice, rows, cols, SELVES, n_rows, n_cols, sharpness, POOL, D, VIEW,
                               SYMMETRIC, SELF, BM, BN, BD, EXACT, PRECISION)  # fmt: skip
    same, diff = members(rows, cols, first, last, n_cols, SYMMETRIC, MIXED)
    if MIXED:
        same = without_selves(same, rows, cols, SELVES, n_rows, n_cols, SELF)
    col = tl.load(COL_FIELD + cols, mask=cols < n_cols, other=0.0)[None, :]
    if VIEW != "dot" and not EXACT:  # near tiles are left to the exact launch
        same = same & (near == 0)
        diff = diff & (near == 0)
    if MINES == 1:
        extreme = tl.maximum(extreme, tl.max(tl.where(same, -u, float("-inf")), 1))
    elif MINES == 2:
        extreme = tl.maximum(extreme, tl.max(tl.where(diff, u, float("-inf")), 1))
        diff = diff & (u > threshold)
    elif MINES == 3:
        same = same & (u < threshold)
    if not EXACT:
        flag = tl.full((), 1, tl.int32)
        if MARK and not MIXED:
            flag = tl.zeros((), tl.int32)
            for k in tl.static_range(K):
                if slot(POSITIVE, k) == 0 and slot(CONSTANT, k) == 0:
                    live = diff & real[:, None] & (slope(POLICY, k, u, row, col, p0, p1, p2, p3, p4) != 0)
                    flag = tl.maximum(flag, tl.max(live.to(tl.int32)))
        if VIEW != "dot":
            flag = tl.where(near, 3, flag)
        if MARK or VIEW != "dot":
            tl.store(FLAG + tile, flag.to(tl.uint8))
    top, sums = add(top, sums, u, same, diff, row, col, p0, p1, p2, p3, p4, POLICY, K, KP, ACTIVE, POSITIVE, LSE, MIXED)
    return top, sums, extreme


@triton.jit
def pair_forward_kernel(
    X, Y, X2, Y2, FIRST, LAST, ROW_FIELD, COL_FIELD, MINE, STATS, EXTREMES, FLAGS, SELVES,
    n_rows, n_cols, y_slice, flag_tiles, sharpness, p0, p1, p2, p3, p4,
    POLICY: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ACTIVE: tl.constexpr, POSITIVE: tl.constexpr,
    LSE: tl.constexpr, CONSTANT: tl.constexpr, MINES: tl.constexpr, SPAN: tl.constexpr, MARK: tl.constexpr,
    EXACT: tl.constexpr, POOL: tl.constexpr, SPLITS: tl.constexpr, FLAG_ROWS: tl.constexpr, FLAG_COLS: tl.constexpr,
    D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Statistics of BM rows over one part of the columns: the slots in ACTIVE, and the extremes that mining needs.

    SPAN: only tiles with positives. MINES: 1 the lowest positive is wanted, 2 the highest negative (and negatives are
    mined), 3 positives are mined. MARK: note which tiles have a weight other than 0. EXACT: only the tiles with pairs
    too near for 2-2S, which the launch before this one has flagged and left out.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    real = rows < n_rows
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    row = tl.load(ROW_FIELD + rows, mask=real, other=0.0)[:, None]
    n_tiles = tl.cdiv(n_cols, BN)
    start, stop = n_tiles * part // SPLITS, n_tiles * (part + 1) // SPLITS
    FLAG = FLAGS + block.to(tl.int64) * flag_tiles
    top = tl.full((BM, KP), float("-inf"), tl.float32)
    sums = tl.zeros((BM, KP), tl.float32)
    extreme = tl.full((BM,), float("-inf"), tl.float32)
    threshold = tl.zeros((BM, 1), tl.float32)
    if MINES > 1:
        threshold = tl.load(MINE + rows, mask=real, other=0.0)[:, None]
    if not SPAN:
        for t in range(0, negative_tiles(start, stop, low, high)):
            tile = negative_tile(t, start, low, high)
            todo = True
            if EXACT:
                todo = wanted(FLAGS, flag_tiles, block, tile, True, False, True, FLAG_ROWS, FLAG_COLS, BM, BN)
            if todo:
                top, sums, extreme = visit(
                    top, sums, extreme, tile, X, Y, X2, Y2, rows, real, first, last, row, COL_FIELD, threshold, FLAG,
                    SELVES, n_rows, n_cols, y_slice, sharpness, p0, p1, p2, p3, p4, POLICY, K, KP, ACTIVE, POSITIVE,
                    LSE, CONSTANT, MINES, MARK, EXACT, POOL, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION, False,
                )  # fmt: skip
    for tile in range(tl.maximum(low, start), tl.minimum(high, stop)):
        todo = True
        if EXACT:
            todo = wanted(FLAGS, flag_tiles, block, tile, True, False, True, FLAG_ROWS, FLAG_COLS, BM, BN)
        if todo:
            top, sums, extreme = visit(
                top, sums, extreme, tile, X, Y, X2, Y2, rows, real, first, last, row, COL_FIELD, threshold, FLAG,
                SELVES, n_rows, n_cols, y_slice, sharpness, p0, p1, p2, p3, p4, POLICY, K, KP, ACTIVE, POSITIVE, LSE,
                CONSTANT, MINES, MARK, EXACT, POOL, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION, True,
            )  # fmt: skip
    at = part.to(tl.int64) * n_rows + rows
    if MINES == 1 or MINES == 2:
        tl.store(EXTREMES + at, extreme, mask=real)
    for k in tl.static_range(K):
        if slot(ACTIVE, k) == 1:
            here = (tl.arange(0, KP) == k)[None, :]
            value = tl.sum(tl.where(here, sums, 0.0), 1)
            if slot(LSE, k) == 1:
                peak = tl.max(tl.where(here, top, float("-inf")), 1)
                value = tl.where(value == 0, peak, peak + tl.log2(value) * LN2)  # NaN stays
            tl.store(STATS + at * K + k, value, mask=real)


@triton.jit
def weights(u, same, diff, row, col, GRAD, KNOWN, MINE, at, real, p0, p1, p2, p3, p4, POLICY: tl.constexpr,
            K: tl.constexpr, POSITIVE: tl.constexpr, LSE: tl.constexpr, CONSTANT: tl.constexpr, MINES: tl.constexpr,
            MIXED: tl.constexpr):  # fmt: skip
    """w = Σ_k dL/dstat_k · dstat_k/du, where ``at`` ([BM, 1] or [1, BN]) are the rows whose statistics count."""
    if MINES:
        same = same & (u < tl.load(MINE + at * 2, mask=real, other=0.0))
        diff = diff & (u > tl.load(MINE + at * 2 + 1, mask=real, other=0.0))
    w = tl.zeros_like(u)
    for k in tl.static_range(K):
        if slot(CONSTANT, k) == 0 and (MIXED or slot(POSITIVE, k) == 0):
            if slot(POSITIVE, k) == 1:
                member = same
            else:
                member = diff
            value = tl.load(GRAD + at * K + k, mask=real, other=0.0) * slope(POLICY, k, u, row, col, p0, p1, p2, p3, p4)
            if slot(LSE, k) == 1:
                known = tl.load(KNOWN + at * K + k, mask=real, other=0.0)
                value *= tl.exp2((term(POLICY, k, u, row, col, p0, p1, p2, p3, p4) - known) * LOG2E)
            w += tl.where(member, value, 0.0)
    return w


@triton.jit
def gather(
    g, total, tile, X, Y, X2, Y2, first, last, rows, X_ROW, X_COL, Y_ROW, Y_COL, X_GRAD, X_KNOWN, X_MINE, Y_GRAD,
    Y_KNOWN, Y_MINE, G, SELVES, n_rows, n_cols, x_slice, y_slice, centre, chunk, sharpness, p0, p1, p2, p3, p4,
    POLICY: tl.constexpr, K: tl.constexpr, POSITIVE: tl.constexpr, LSE: tl.constexpr, CONSTANT: tl.constexpr,
    MINES: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, POOL: tl.constexpr, D: tl.constexpr,
    VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr, HALF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, GD: tl.constexpr, PRECISION: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """Add one tile's share of dL/dx to g."""
    cols = tile * BN + tl.arange(0, BN)
    u, near, top, pooled = similarity(X, Y, X2, Y2, x_slice, y_slice, rows, cols, SELVES, n_rows, n_cols, sharpness,
                                      POOL, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, EXACT, PRECISION)  # fmt: skip
    same, diff = members(rows, cols, first, last, n_cols, SYMMETRIC, MIXED)
    if MIXED:
        same = without_selves(same, rows, cols, SELVES, n_rows, n_cols, SELF)
    real_x, real_y = rows < n_rows, cols < n_cols
    w = tl.zeros_like(u)
    if OWN:  # the program's own rows are the anchors
        row = tl.load(X_ROW + rows, mask=real_x, other=0.0)[:, None]
        col = tl.load(Y_COL + cols, mask=real_y, other=0.0)[None, :]
        w += weights(u, same, diff, row, col, X_GRAD, X_KNOWN, X_MINE, rows.to(tl.int64)[:, None], real_x[:, None],
                     p0, p1, p2, p3, p4, POLICY, K, POSITIVE, LSE, CONSTANT, MINES, MIXED)  # fmt: skip
    if OTHER:  # the other side's rows are
        row = tl.load(Y_ROW + cols, mask=real_y, other=0.0)[None, :]
        col = tl.load(X_COL + rows, mask=real_x, other=0.0)[:, None]
        w += weights(u, same, diff, row, col, Y_GRAD, Y_KNOWN, Y_MINE, cols.to(tl.int64)[None, :], real_y[None, :],
                     p0, p1, p2, p3, p4, POLICY, K, POSITIVE, LSE, CONSTANT, MINES, MIXED)  # fmt: skip
    if HALF:  # the tile across the diagonal is this one: its rows' share goes to them right away
        depth = chunk + tl.arange(0, GD)
        x = tl.load(X + rows.to(tl.int64)[:, None] * D + depth[None, :])
        if x.dtype == tl.float16:
            x = x.to(tl.float32)
        across = (cols >= tl.min(rows, 0) + BM)[None, :] & real_x[:, None]  # not where both are in the own block
        mirrored = tl.where(across, w, 0.0)
        if x.dtype == tl.float32 and PRECISION == "tf32":
            mirrored = to_tf32(mirrored)
        share = tl.dot(tl.trans(mirrored.to(x.dtype)), x, input_precision=PRECISION)
        tl.atomic_add(G + cols.to(tl.int64)[:, None] * D + depth[None, :], share, mask=real_y[:, None], sem="relaxed")
    if POOL == 1:
        return push(g, total, w, u, X, Y, rows, cols, chunk, D, BN, GD, VIEW, EXACT, PRECISION)
    else:  # dU/ds_c = p_c (1 + sharpness·(s_c - U))
        w /= pooled
        x, y = X + centre.to(tl.int64) * x_slice, Y
        for _ in range(0, POOL if OWN else 1):  # all centres of a column, or the one that this program owns
            s = dot_tile(x, y, rows, cols, D, BM, BN, BD, PRECISION)
            share = tl.exp2(product(s, sharpness * LOG2E) - top) * (1 + sharpness * (s - u))
            g, total = push(g, total, w * share, u, x, y, rows, cols, chunk, D, BN, GD, VIEW, EXACT, PRECISION)
            y += y_slice
        return g, total


@triton.jit
def pair_backward_kernel(
    X, Y, X2, Y2, FIRST, LAST, X_ROW, X_COL, Y_ROW, Y_COL, X_GRAD, X_KNOWN, X_MINE, Y_GRAD, Y_KNOWN, Y_MINE, FLAGS,
    SELVES, G, n_rows, n_cols, x_slice, y_slice, g_slice, flag_tiles, sharpness, p0, p1, p2, p3, p4,
    POLICY: tl.constexpr, K: tl.constexpr, POSITIVE: tl.constexpr, LSE: tl.constexpr, CONSTANT: tl.constexpr,
    MINES: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, SKIP: tl.constexpr, EXACT: tl.constexpr,
    HALF: tl.constexpr, POOL: tl.constexpr, CENTRES: tl.constexpr, SPLITS: tl.constexpr, FLAG_ROWS: tl.constexpr,
    FLAG_COLS: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, GD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dL/dx of BM own rows (of one centre), GD of its columns, over one part of the other side.

    OWN, OTHER: whose rows are anchors. SKIP: the forward pass has flagged its tiles, FLAG_ROWS×FLAG_COLS, multiples of
    these: dead ones are left out, near ones are left to the EXACT launch. HALF: of a symmetric matrix only tiles from
    the diagonal on are computed, for both their rows and their columns, by atomic additions in any order.
    """
    block, part, centre = tl.program_id(0), tl.program_id(2) // CENTRES, tl.program_id(2) % CENTRES
    chunk = tl.program_id(1) * GD
    rows = block * BM + tl.arange(0, BM)
    first, last, low, high = span(FIRST, LAST, rows, n_rows, BN)
    n_tiles = tl.cdiv(n_cols, BN)
    start, stop = n_tiles * part // SPLITS, n_tiles * (part + 1) // SPLITS
    if HALF:
        tl.static_assert(BM % BN == 0, "a tile is on one side of the own block, or in it")
        start = tl.minimum(tl.maximum(start, block * BM // BN), stop)
    mine = G + (part * CENTRES + centre).to(tl.int64) * g_slice
    g = tl.zeros((BM, GD), tl.float32)
    total = tl.zeros((BM, 16), tl.float32)
    for t in range(0, negative_tiles(start, stop, low, high)):
        tile = negative_tile(t, start, low, high)
        todo = True
        if SKIP:
            todo = wanted(FLAGS, flag_tiles, block, tile, OWN, OTHER, EXACT, FLAG_ROWS, FLAG_COLS, BM, BN)
        if todo:
            g, total = gather(
                g, total, tile, X, Y, X2, Y2, first, last, rows, X_ROW, X_COL, Y_ROW, Y_COL, X_GRAD, X_KNOWN, X_MINE,
                Y_GRAD, Y_KNOWN, Y_MINE, mine, SELVES, n_rows, n_cols, x_slice, y_slice, centre, chunk, sharpness, p0,
                p1, p2, p3, p4, POLICY, K, POSITIVE, LSE, CONSTANT, MINES, OWN, OTHER, POOL, D, VIEW, SYMMETRIC, SELF,
                EXACT, HALF, BM, BN, BD, GD, PRECISION, False,
            )  # fmt: skip
    for tile in range(tl.maximum(low, start), tl.minimum(high, stop)):
        todo = True
        if SKIP:
            todo = wanted(FLAGS, flag_tiles, block, tile, OWN, OTHER, EXACT, FLAG_ROWS, FLAG_COLS, BM, BN)
        if todo:
            g, total = gather(
                g, total, tile, X, Y, X2, Y2, first, last, rows, X_ROW, X_COL, Y_ROW, Y_COL, X_GRAD, X_KNOWN, X_MINE,
                Y_GRAD, Y_KNOWN, Y_MINE, mine, SELVES, n_rows, n_cols, x_slice, y_slice, centre, chunk, sharpness, p0,
                p1, p2, p3, p4, POLICY, K, POSITIVE, LSE, CONSTANT, MINES, OWN, OTHER, POOL, D, VIEW, SYMMETRIC, SELF,
                EXACT, HALF, BM, BN, BD, GD, PRECISION, True,
            )  # fmt: skip
    if HALF:
        at = rows.to(tl.int64)[:, None] * D + chunk + tl.arange(0, GD)[None, :]
        tl.atomic_add(mine + at, g, mask=(rows < n_rows)[:, None], sem="relaxed")
    else:
        finish(g, total, X + centre.to(tl.int64) * x_slice, mine, rows, n_rows, chunk, D, GD, VIEW)


class Slots:
    """A policy's row statistics as the kernels' compile-time masks, a bit for each slot."""

    def __init__(self, a: Pair) -> None:
        slots = POLICIES[a.policy].slots
        self.count = len(slots)
        self.all = (1 << self.count) - 1
        self.positive = sum(1 << k for k, s in enumerate(slots) if s.side == "positives")
        self.negative = self.all & ~self.positive
        self.lse = sum(1 << k for k, s in enumerate(slots) if isinstance(s, LogSumExp))
        #: Of the sides that are visited.
        self.active = {"both": self.all, "positives": self.positive, "negatives": self.negative}[a.side]
        #: Slots without a gradient.
        self.constant = sum(1 << k for k, s in enumerate(slots) if not isinstance(s, LogSumExp) and s.constant)
        self.constant |= self.all & ~self.active

    def constants(self, policy: str) -> dict[str, Any]:
        return {
            "POLICY": policy,
            "K": self.count,
            "POSITIVE": self.positive,
            "LSE": self.lse,
            "CONSTANT": self.constant,
        }

    def merge(self, parts: Tensor) -> Tensor:
        """[n, K] from the parts [splits, n, K] of the columns."""
        if len(parts) == 1:
            return parts[0]
        return self.choose(self.lse, parts.logsumexp(0), parts.sum(0))

    def nothing(self, like: Tensor) -> Tensor:
        """[n, K]: the statistics of no pairs; ``like`` [n, …]."""
        of = [-torch.inf if self.lse >> k & 1 else 0.0 for k in range(self.count)]
        return torch.stack([like.new_full((like.shape[0],), value) for value in of], 1)

    def choose(self, mask: int, given: Tensor, other: Tensor) -> Tensor:
        """[n, K]: a column of ``given`` where the mask has its bit. (A mask tensor would be copied to the device.)"""
        return torch.stack([(given if mask >> k & 1 else other)[:, k] for k in range(self.count)], 1)


def marks(a: Pair) -> bool:
    """Does the forward pass note which tiles are dead? Where weights can be exactly 0."""
    return a.mines or POLICIES[a.policy].sparse or a.side == "positives"


def flags(a: Pair) -> bool:
    """Does it leave a byte for each tile: dead, live, near?"""
    return a.view != "dot" or marks(a)


def tile_count(m: Matrix) -> tuple[int, int]:
    """Tiles of the forward pass."""
    tiles, (rows, cols) = m.tiles("forward"), m.shape
    return triton.cdiv(rows, tiles.rows), triton.cdiv(cols, tiles.cols)


def params(policy: str, values: Sequence[float]) -> list[float]:
    """p0 … p4 of a policy: its fields, and for the angular margin its cosine and sine."""
    if policy == "arcface":
        values = [*values, math.cos(values[0]), math.sin(values[0])]
    return [*values, *([0.0] * (5 - len(values)))]


def pair(a: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Row statistics [R, K], mining thresholds [R, 2], and a byte for each tile, where they are flagged."""
    slots, m = Slots(a), Matrix.of(a)
    tiles = m.tiles("forward")
    blocks, col_tiles = tile_count(m)
    first, last = m.ranges(m.row, m.col)
    fields = m.row.sort(a.row_field), m.col.sort(a.col_field)
    # tiles that no launch visits are dead
    flag = a.rows.new_zeros(blocks * col_tiles if flags(a) else 0, dtype=torch.uint8)

    def run(active: int, mines: int, span_only: bool, threshold: Tensor) -> tuple[Tensor, Tensor]:
        splits = 1 if span_only else m.splits(blocks, col_tiles)
        launches = 1 if a.view == "dot" else 2
        stats = m.row.x.new_empty(launches * splits, m.row.size, slots.count)
        extremes = m.row.x.new_empty(launches * splits, m.row.size if mines in (1, 2) else 0)
        for exact, (part, extreme) in enumerate(zip(stats.split(splits), extremes.split(splits), strict=True)):
            cut = m.tiles("exact") if exact else tiles
            launch(
                pair_forward_kernel, (triton.cdiv(m.row.size, cut.rows), splits), m.device,
                m.row.packed, m.col.packed, m.row.squares, m.col.squares, first, last, *fields, threshold, part,
                extreme, flag, m.selves, m.row.size, m.col.size, m.col.slice, col_tiles, a.sharpness,
                *params(a.policy, a.params), **slots.constants(a.policy), KP=triton.next_power_of_2(slots.count),
                ACTIVE=active, MINES=mines, SPAN=span_only, SELF=m.self_of(), MARK=marks(a), EXACT=bool(exact),
                POOL=a.pool_size, SPLITS=splits, FLAG_ROWS=tiles.rows, FLAG_COLS=tiles.cols, **m.constants(cut),
            )  # fmt: skip
        return slots.merge(stats), extremes.amax(0)

    if a.epsilon is None:
        stats, _ = run(slots.active, 0, a.side == "positives", first)
        if a.side != "both":
            stats = slots.choose(slots.active, stats, slots.nothing(stats))
        thresholds = m.row.x.new_zeros(m.row.size, 2)
    else:  # the lowest positive is the threshold of negatives, the highest negative that of positives
        bounds = None if a.bounds is None else m.row.sort(a.bounds)
        if a.side != "both":
            infinite = m.row.x.new_full((m.row.size,), torch.inf)
            positives = negatives = slots.nothing(infinite)
            highest = -infinite
        if bounds is not None:
            above = bounds[:, 1].contiguous()
        elif a.side == "negatives":
            above = infinite
        else:
            above = -run(0, 1, True, first)[1] - a.epsilon
        if a.side != "positives":
            negatives, highest = run(slots.negative, 2, False, above)
        below = highest + a.epsilon if bounds is None or a.side == "negatives" else bounds[:, 0].contiguous()
        if a.side != "negatives":
            positives, _ = run(slots.positive, 3, True, below)
        stats = slots.choose(slots.positive, positives, negatives)
        thresholds = m.row.unsort(torch.stack((below, above), 1))
    (stats,) = m.poison(m.row.unsort(stats))
    return stats, thresholds, flag


def pair_saved(a: Pair) -> int:
    """Bytes that :func:`pair` keeps: one for each tile, where it flags them."""
    if not flags(a):
        return 0
    tiles, n_rows = tiles_for(a.rows, a.cols, "forward"), a.rows.shape[0]
    n_cols = n_rows if a.cols is None else a.cols.shape[0] // a.pool_size
    return triton.cdiv(n_rows, tiles.rows) * triton.cdiv(n_cols, tiles.cols)


def pair_backward(b: Backward[Pair]) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/dstats."""
    a = b.call
    slots, m = Slots(a), Matrix.of(a)
    half = m.symmetric and a.view == "dot" and not deterministic()
    tiles, forward = m.tiles("half" if half else "backward"), m.tiles("forward")
    (grad,) = m.poison(b.grad.stats)
    known = torch.where(torch.isneginf(b.out.stats), torch.inf, b.out.stats)  # a sum of nothing has no shares
    of_rows = [m.row.sort(t) for t in (grad, known, b.out.thresholds)]
    # a rectangular kernel reads each from the one side that has it
    fields = m.row.sort(a.row_field), m.col.sort(a.col_field)

    def run(own: Side, other: Side, is_row: bool) -> None:
        programs = triton.cdiv(own.size, tiles.rows) * (own.width // tiles.chunk) * own.pool
        splits = m.splits(programs, triton.cdiv(other.size, tiles.cols))
        launches = 1 if a.view == "dot" else 2
        splits = 1 if half else splits
        g = (own.x.new_zeros if half else own.x.new_empty)(launches * splits, *own.packed.shape)
        for exact, part in enumerate(g.split(splits)):
            cut = m.tiles("exact") if exact else tiles
            grid = (triton.cdiv(own.size, cut.rows), own.width // cut.chunk, splits * own.pool)
            launch(
                pair_backward_kernel, grid, m.device,
                own.packed, other.packed, own.squares, other.squares, *m.ranges(own, other), *fields, *fields, *of_rows,
                *of_rows, b.out.saved, m.selves, part, own.size, other.size, own.slice, other.slice,
                own.packed[0].numel(), tile_count(m)[1], a.sharpness, *params(a.policy, a.params),
                **slots.constants(a.policy), MINES=a.mines, SELF=m.self_of(is_row), OWN=is_row,
                OTHER=m.symmetric or not is_row, SKIP=flags(a), EXACT=bool(exact), HALF=half, POOL=a.pool_size,
                CENTRES=own.pool, SPLITS=splits, FLAG_ROWS=forward.rows, FLAG_COLS=forward.cols, GD=cut.chunk,
                **m.constants(cut),
            )  # fmt: skip
        own.take_gradient(g)

    if b.want_rows:
        run(m.row, m.col, True)
    if b.want_cols and not m.symmetric:
        run(m.col, m.row, False)
    return m.gradients()
