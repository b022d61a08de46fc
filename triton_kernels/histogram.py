"""The histogram engine: soft counts of u per row, for positives and for negatives, and their gradient.

Forward, (1 + share of tiles with positives)·⌈nodes/128⌉ u (u = one B×B×d product): a program owns BM rows and up to 128
nodes of one side's counts, in registers. Per tile it visits only the nodes between the tile's least and largest u, and
each of them gathers its own triangle of the pairs: no scatter, so the bits are the same every time.
Backward, (⌈d/256⌉+1)u as in the pair engine; a pair's weight is the slope of its row's table between two nodes. A tile
whose range of u, kept by the forward pass, lies where the tables of its rows are flat is not computed again.
Pairs too near for D² = 2-2S are no case of their own: a count is off by 1e-6 of a node at most. That is not so for D,
of which no loss counts; such histograms run on the tiled engine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pydml.declared import Backward, Histogram
from pydml.tiled.histogram import density
from pydml.triton_kernels.functions import relu
from pydml.triton_kernels.matrix import Matrix, Side, launch, tiles_for
from pydml.triton_kernels.tile import finish, members, negative_tile, negative_tiles, push, span, tile_u, without_selves

#: Nodes whose counts a program holds in registers; S is computed once for each block of them.
NODE_BLOCK = 128


@triton.jit
def place(u, low, inverse, nodes):
    """Where u lies on the scale of the nodes, 0 … nodes-1; NaN lies at 0, so that it addresses nothing outside."""
    t = (u - low) * inverse
    return tl.where(t > 0, tl.minimum(t, nodes - 1.0), 0.0)


@triton.jit
def count(
    h, tile, X, Y, X2, Y2, rows, first, last, RANGES, SELVES, n_rows, n_cols, base, nodes, low, inverse,
    POSITIVES: tl.constexpr, NB: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr,
    SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """Add a tile's positives, or negatives, to the counts h [BM, NB] of nodes base …"""
    cols = tile * BN + tl.arange(0, BN)
    u, _ = tile_u(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, BM, BN, BD, VIEW, SYMMETRIC, SELF, False,
                  PRECISION)  # fmt: skip
    same, diff = members(rows, cols, first, last, n_cols, SYMMETRIC, MIXED)
    if MIXED:
        same = without_selves(same, rows, cols, SELVES, n_rows, n_cols, SELF)
    if POSITIVES:
        member = same & (rows < n_rows)[:, None]
    else:
        member = diff & (rows < n_rows)[:, None]
    t = place(u, low, inverse, nodes)
    least = tl.min(tl.where(member, t, nodes * 1.0))
    most = tl.max(tl.where(member, t, -1.0))
    if not POSITIVES and base == 0:
        tl.store(RANGES + 2 * tile, least)
        tl.store(RANGES + 2 * tile + 1, most)
    t = tl.where(member, t, -2.0)  # near no node
    start, stop = tl.maximum(least.to(tl.int32), base), tl.minimum(most.to(tl.int32) + 2, tl.minimum(base + NB, nodes))
    for node in range(start, stop):
        share = tl.sum(relu(1.0 - tl.abs(t - node)), 1)
        h += tl.where((base + tl.arange(0, NB) == node)[None, :], share[:, None], 0.0)
    return h


@triton.jit
def histogram_forward_kernel(
    X, Y, X2, Y2, FIRST, LAST, COUNTS, RANGES, SELVES, n_rows, n_cols, nodes, low, inverse,
    POSITIVES: tl.constexpr, NB: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr,
    SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Counts of BM rows at NB nodes over one part of the columns: of their positives, or of their negatives.

    With the negatives go the RANGES: where the least and the largest one of every tile lie.
    """
    block, part, base = tl.program_id(0), tl.program_id(1), tl.program_id(2) * NB
    rows = block * BM + tl.arange(0, BM)
    first, last, low_tile, high_tile = span(FIRST, LAST, rows, n_rows, BN)
    n_tiles = tl.cdiv(n_cols, BN)
    start, stop = n_tiles * part // SPLITS, n_tiles * (part + 1) // SPLITS
    RANGES += block.to(tl.int64) * n_tiles * 2
    h = tl.zeros((BM, NB), tl.float32)
    if not POSITIVES:
        for t in range(0, negative_tiles(start, stop, low_tile, high_tile)):
            tile = negative_tile(t, start, low_tile, high_tile)
            h = count(h, tile, X, Y, X2, Y2, rows, first, last, RANGES, SELVES, n_rows, n_cols, base, nodes, low,
                      inverse, POSITIVES, NB, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION, False)  # fmt: skip
    for tile in range(tl.maximum(low_tile, start), tl.minimum(high_tile, stop)):
        h = count(h, tile, X, Y, X2, Y2, rows, first, last, RANGES, SELVES, n_rows, n_cols, base, nodes, low, inverse,
                  POSITIVES, NB, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, PRECISION, True)  # fmt: skip
    node = base + tl.arange(0, NB)
    at = (part.to(tl.int64) * n_rows + rows)[:, None] * nodes + node[None, :]
    tl.store(COUNTS + at, h, mask=(rows < n_rows)[:, None] & (node < nodes)[None, :])


@triton.jit
def weights(u, same, diff, anchor, real, SLOPES, n_anchors, low, inverse, nodes, MIXED: tl.constexpr):
    """w = the slope of the anchor's table at u; ``anchor`` is [BM, 1] or [1, BN], SLOPES [negatives, positives]."""
    left = tl.minimum(place(u, low, inverse, nodes).to(tl.int32), nodes - 2)  # u = high falls wholly on the last node
    if MIXED:
        anchor = anchor + tl.where(same, n_anchors, 0)
        diff = diff | same
    return tl.load(SLOPES + anchor * (nodes - 1) + left, mask=diff & real, other=0.0)


@triton.jit
def steep(anchors, n_anchors, i, j, RANGES, STEEP, range_tiles, nodes):
    """Is any of these anchors' tables of negatives not flat in the range of the forward pass' tile (i, j)?"""
    at = RANGES + (i.to(tl.int64) * range_tiles + j) * 2
    left = tl.minimum(tl.load(at, mask=j < range_tiles, other=0.0).to(tl.int32), nodes - 2)
    right = tl.minimum(tl.load(at + 1, mask=j < range_tiles, other=0.0).to(tl.int32), nodes - 2) + 1
    row, real = STEEP + anchors.to(tl.int64) * nodes, anchors < n_anchors
    before, after = tl.load(row + left, mask=real, other=0), tl.load(row + right, mask=real, other=0)
    return tl.max((after != before).to(tl.int32), 0) > 0


@triton.jit
def gather(
    g, total, tile, X, Y, X2, Y2, first, last, rows, SLOPES, SELVES, n_rows, n_cols, nodes, chunk, low, inverse,
    OWN: tl.constexpr, OTHER: tl.constexpr, D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr,
    SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, GD: tl.constexpr, PRECISION: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """Add one tile's share of dL/dx to g."""
    cols = tile * BN + tl.arange(0, BN)
    u, _ = tile_u(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D, BM, BN, BD, VIEW, SYMMETRIC, SELF, False,
                  PRECISION)  # fmt: skip
    same, diff = members(rows, cols, first, last, n_cols, SYMMETRIC, MIXED)
    if MIXED:
        same = without_selves(same, rows, cols, SELVES, n_rows, n_cols, SELF)
    w = tl.zeros_like(u)
    if OWN:  # the program's own rows are the anchors
        w += weights(u, same, diff, rows.to(tl.int64)[:, None], (rows < n_rows)[:, None], SLOPES, n_rows, low, inverse,
                     nodes, MIXED)  # fmt: skip
    if OTHER:  # the other side's rows are
        w += weights(u, same, diff, cols.to(tl.int64)[None, :], (cols < n_cols)[None, :], SLOPES, n_cols, low, inverse,
                     nodes, MIXED)  # fmt: skip
    return push(g, total, w, u, X, Y, rows, cols, chunk, D, BN, GD, VIEW, False, PRECISION)


@triton.jit
def histogram_backward_kernel(
    X, Y, X2, Y2, FIRST, LAST, SLOPES, STEEP, RANGES, SELVES, G, n_rows, n_cols, nodes, range_tiles, g_slice, low,
    inverse,
    OWN: tl.constexpr, OTHER: tl.constexpr, SPLITS: tl.constexpr, RANGE_ROWS: tl.constexpr, RANGE_COLS: tl.constexpr,
    D: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, GD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dL/dx of BM own rows, GD of its columns, over one part of the other side. OWN, OTHER: whose rows are anchors.

    RANGES are those of the forward pass' tiles, RANGE_ROWS×RANGE_COLS.
    """
    tl.static_assert(RANGE_ROWS % BM == 0 and RANGE_COLS % BN == 0, "a tile lies in one tile of the forward pass")
    tl.static_assert(RANGE_ROWS % BN == 0 and BM % RANGE_COLS == 0, "and its mirror image in whole ones of one row")
    block, part, chunk = tl.program_id(0), tl.program_id(2), tl.program_id(1) * GD
    rows = block * BM + tl.arange(0, BM)
    first, last, low_tile, high_tile = span(FIRST, LAST, rows, n_rows, BN)
    n_tiles = tl.cdiv(n_cols, BN)
    start, stop = n_tiles * part // SPLITS, n_tiles * (part + 1) // SPLITS
    g = tl.zeros((BM, GD), tl.float32)
    total = tl.zeros((BM, 16), tl.float32)
    for t in range(0, negative_tiles(start, stop, low_tile, high_tile)):
        tile = negative_tile(t, start, low_tile, high_tile)
        live = False
        if OWN:
            live = live | steep(rows, n_rows, block * BM // RANGE_ROWS, tile * BN // RANGE_COLS, RANGES, STEEP,
                                range_tiles, nodes)  # fmt: skip
        if OTHER:
            cols = tile * BN + tl.arange(0, BN)
            for k in tl.static_range(BM // RANGE_COLS):
                live = live | steep(cols, n_cols, tile * BN // RANGE_ROWS, block * BM // RANGE_COLS + k, RANGES, STEEP,
                                    range_tiles, nodes)  # fmt: skip
        if live:
            g, total = gather(g, total, tile, X, Y, X2, Y2, first, last, rows, SLOPES, SELVES, n_rows, n_cols, nodes,
                              chunk, low, inverse, OWN, OTHER, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, GD, PRECISION,
                              False)  # fmt: skip
    for tile in range(tl.maximum(low_tile, start), tl.minimum(high_tile, stop)):
        g, total = gather(g, total, tile, X, Y, X2, Y2, first, last, rows, SLOPES, SELVES, n_rows, n_cols, nodes, chunk,
                          low, inverse, OWN, OTHER, D, VIEW, SYMMETRIC, SELF, BM, BN, BD, GD, PRECISION,
                          True)  # fmt: skip
    finish(g, total, X, G + part.to(tl.int64) * g_slice, rows, n_rows, chunk, D, GD, VIEW)


def histogram(a: Histogram) -> tuple[Tensor, Tensor, Tensor]:
    """Soft counts [R, nodes] of positives and of negatives, and where each tile's negatives lie [tiles, 2]."""
    m, nodes = Matrix.of(a), a.nodes
    ranges = m.row.x.new_empty(histogram_saved(a), 2)
    tiles = m.tiles("counts")
    blocks, col_tiles = triton.cdiv(m.row.size, tiles.rows), triton.cdiv(m.col.size, tiles.cols)
    held = min(max(16, triton.next_power_of_2(nodes)), NODE_BLOCK)
    node_blocks = triton.cdiv(nodes, held)
    splits = m.splits(blocks * node_blocks, col_tiles)
    first, last = m.ranges(m.row, m.col)

    def run(positives: bool) -> Tensor:
        counts = m.row.x.new_empty(splits, m.row.size, nodes)
        launch(
            histogram_forward_kernel, (blocks, splits, node_blocks), m.device,
            m.row.packed, m.col.packed, m.row.squares, m.col.squares, first, last, counts, ranges,
            m.selves, m.row.size, m.col.size, nodes, a.low, density(a),
            POSITIVES=positives, SELF=m.self_of(), NB=held, SPLITS=splits, **m.constants(tiles),
        )  # fmt: skip
        return m.row.unsort(counts.sum(0))

    positives, negatives = m.poison(run(True), run(False))
    return positives, negatives, ranges


def histogram_saved(a: Histogram) -> int:
    """Tiles of which :func:`histogram` keeps the range."""
    tiles = tiles_for(a.rows, a.cols, "counts")
    n_cols = (a.rows if a.cols is None else a.cols).shape[0]
    return triton.cdiv(a.rows.shape[0], tiles.rows) * triton.cdiv(n_cols, tiles.cols)


def histogram_backward(b: Backward[Histogram]) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/dcounts."""
    a = b.call
    m, nodes, inverse = Matrix.of(a), a.nodes, density(a)
    tiles, forward = m.tiles("histogram"), m.tiles("counts")
    slopes = torch.stack([m.row.sort(g).diff(dim=1) * inverse for g in (b.grad.negatives, b.grad.positives)])
    # How many slopes of a row's negatives up to each node are not 0.
    steps = torch.nn.functional.pad((slopes[0] != 0).cumsum(1, dtype=torch.int32), (1, 0))

    def run(own: Side, other: Side, is_row: bool) -> None:
        blocks, chunks = triton.cdiv(own.size, tiles.rows), own.width // tiles.chunk
        splits = m.splits(blocks * chunks, triton.cdiv(other.size, tiles.cols))
        g = own.x.new_empty(splits, *own.packed.shape)
        launch(
            histogram_backward_kernel, (blocks, chunks, splits), m.device,
            own.packed, other.packed, own.squares, other.squares, *m.ranges(own, other), slopes, steps, b.out.ranges,
            m.selves, g, own.size, other.size, nodes, triton.cdiv(m.col.size, forward.cols), own.packed.numel(), a.low,
            inverse, SELF=m.self_of(is_row), OWN=is_row, OTHER=m.symmetric or not is_row, SPLITS=splits,
            RANGE_ROWS=forward.rows, RANGE_COLS=forward.cols, GD=tiles.chunk, **m.constants(tiles),
        )  # fmt: skip
        own.take_gradient(*m.poison(g))

    if b.want_rows:
        run(m.row, m.col, True)
    if b.want_cols and not m.symmetric:
        run(m.col, m.row, False)
    return m.gradients()
