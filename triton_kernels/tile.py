"""What every Triton engine does to a tile: S from packed rows, the oriented similarity u, and the way of w back.

Rows and columns arrive packed (:mod:`.matrix`): sorted by label, padded with zeros to whole tiles in both directions,
so no load of them needs a mask, and the positives of a row are a range of columns, so no label is compared.
Names: X, Y embeddings of the program's own side and of the other one; X2, Y2 their squared norms; ``rows``, ``cols``
indices into them; D their padded width; BM×BN a tile, BD a step along d.
"""

import triton
import triton.language as tl

from .functions import relu

#: S within this of 1: 2-2S has lost its digits, and D² is taken from the rows themselves.
NEAR: tl.constexpr = tl.constexpr(1e-5)
#: And what each product may add to it: tensor cores cut the digits of long sums off instead of rounding them.
NEAR_STEP: tl.constexpr = tl.constexpr(1e-8)


@triton.jit
def is_near(d2, size, D: tl.constexpr):
    """Is ‖x‖²+‖y‖²-2S, from sums of D products, too small to be right? ``size`` is ‖x‖²+‖y‖²."""
    if D * NEAR_STEP > NEAR:
        return d2 < size * (D * NEAR_STEP)
    else:
        return d2 < size * NEAR


@triton.jit
def to_tf32(w):
    """fp32 rounded to TF32 as :func:`.matrix.rounded` does: a tensor core would cut the digits off."""
    bits = (w.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(w == w, bits.to(tl.float32, bitcast=True), w)


@triton.jit
def dot_tile(X, Y, rows, cols, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """S [BM, BN]"""
    depth = tl.arange(0, BD)
    x = X + rows.to(tl.int64)[:, None] * D + depth[None, :]
    y = Y + cols.to(tl.int64)[:, None] * D + depth[None, :]
    s = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BD):
        s = tl.dot(tl.load(x + k), tl.trans(tl.load(y + k)), s, input_precision=PRECISION)
    return s


@triton.jit
def squares(X, Y, rows, cols, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """‖x_i - y_j‖² [BM, BN] from the differences themselves, column by column: slow, exact and rarely called."""
    d2 = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D):
        x = tl.load(X + rows.to(tl.int64) * D + k).to(tl.float32)
        y = tl.load(Y + cols.to(tl.int64) * D + k).to(tl.float32)
        away = x[:, None] - y[None, :]
        d2 += away * away
    return d2


@triton.jit
def members(rows, cols, first, last, n_cols, SYMMETRIC: tl.constexpr, MIXED: tl.constexpr):
    """same, diff [BM, BN]: the positives of a row are its range of columns, itself left out by its index.

    Where a tile is not MIXED there are no positives, and ``same`` is not to be looked at.
    """
    real = (rows[:, None] >= 0) & (cols < n_cols)[None, :]
    if MIXED:
        among = (cols[None, :] >= first[:, None]) & (cols[None, :] < last[:, None])
        same = among & real
        if SYMMETRIC:
            same = same & (rows[:, None] != cols[None, :])
        return same, real & (among == 0)
    else:
        return real, real


@triton.jit
def without_selves(mask, rows, cols, SELVES, n_rows, n_cols, SELF: tl.constexpr):
    """Clear in ``mask`` [BM, BN] the pairs of a row and its own column, where a rectangular matrix has such.

    SELF: 0 it has none, 1 SELVES [n_rows] has the column of each row, -1 for none, 2 [n_cols] the row of each column.
    """
    if SELF == 1:
        own = tl.load(SELVES + rows, mask=rows < n_rows, other=-1)
        return mask & (own[:, None] != cols[None, :])
    elif SELF == 2:
        own = tl.load(SELVES + cols, mask=cols < n_cols, other=-1)
        return mask & (own[None, :] != rows[:, None])
    else:
        return mask


@triton.jit
def span(FIRST, LAST, rows, n_rows, BN: tl.constexpr):
    """The tiles [low, high) of columns among which the positives of a block of rows lie; others are all negative."""
    first = tl.load(FIRST + rows, mask=rows < n_rows, other=1 << 30)  # beyond all, and far from overflow
    last = tl.load(LAST + rows, mask=rows < n_rows, other=0)
    low, high = tl.min(first, 0) // BN, tl.cdiv(tl.max(last, 0), BN)
    return first, last, low, tl.maximum(low, high)


@triton.jit
def negative_tile(t, start, low, high):
    """Number of the t-th tile from ``start`` on that is not in [low, high)."""
    tile = start + t
    return tl.where(tile < low, tile, tl.maximum(tile, tile + high - tl.maximum(low, start)))


@triton.jit
def negative_tiles(start, stop, low, high):
    """How many tiles of [start, stop) are not in [low, high)."""
    return stop - start - tl.maximum(tl.minimum(stop, high) - tl.maximum(start, low), 0)


@triton.jit
def push_near(g, q, X, Y, rows, cols, chunk, D: tl.constexpr, GD: tl.constexpr):
    """g [BM, GD] -= Σ_j q_ij (x_i - y_j), differences first: q is huge where D is tiny."""
    for k in range(0, GD):
        x = tl.load(X + rows.to(tl.int64) * D + chunk + k).to(tl.float32)
        y = tl.load(Y + cols.to(tl.int64) * D + chunk + k).to(tl.float32)
        push = tl.sum(q * (y[None, :] - x[:, None]), 1)
        g += tl.where((tl.arange(0, GD) == k)[None, :], push[:, None], 0.0)
    return g


@triton.jit
def tile_u(X, Y, X2, Y2, rows, cols, SELVES, n_rows, n_cols, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           BD: tl.constexpr, VIEW: tl.constexpr, SYMMETRIC: tl.constexpr, SELF: tl.constexpr, EXACT: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """u [BM, BN], and whether some pair is too near for D² = ‖x‖²+‖y‖²-2S; EXACT takes it from differences instead."""
    if VIEW == "dot":
        return dot_tile(X, Y, rows, cols, D, BM, BN, BD, PRECISION), False
    elif EXACT:
        d2 = squares(X, Y, rows, cols, D, BM, BN)
        if VIEW == "cosine":  # S of rows that are not near is right as it is, and 1-D²/2 only if they are of length 1
            s = dot_tile(X, Y, rows, cols, D, BM, BN, BD, PRECISION)
            size = tl.load(X2 + rows)[:, None] + tl.load(Y2 + cols)[None, :]
            return tl.where(is_near(size - 2 * s, size, D), 1 - 0.5 * d2, s), True
        elif VIEW == "squared":
            return -d2, True
        else:
            return -tl.sqrt(d2), True
    else:
        s = dot_tile(X, Y, rows, cols, D, BM, BN, BD, PRECISION)
        size = tl.load(X2 + rows)[:, None] + tl.load(Y2 + cols)[None, :]
        d2 = size - 2 * s
        near = is_near(d2, size, D)
        if SYMMETRIC:
            near = near & (rows[:, None] != cols[None, :])
        near = without_selves(near, rows, cols, SELVES, n_rows, n_cols, SELF)
        some = tl.max(near.to(tl.int32)) > 0
        if VIEW == "cosine":
            return s, some
        elif VIEW == "squared":
            return -relu(d2), some
        else:
            return -tl.sqrt(relu(d2)), some


@triton.jit
def push(g, total, w, u, X, Y, rows, cols, chunk, D: tl.constexpr, BN: tl.constexpr, GD: tl.constexpr,
              VIEW: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Carry w = dL/du of a tile to g [BM, GD], columns chunk … of dL/dx; ``total`` [BM, 16] gathers Σ_j q_ij.

    dL/dx_i is Σ_j w_ij y_j for products, and Σ_j q_ij (x_i - y_j) with q = 2w·du/dD² for distances: :func:`finish`.
    """
    distance: tl.constexpr = VIEW == "euclidean" or VIEW == "squared"
    if VIEW == "euclidean":
        w *= tl.where(u < 0, 1.0 / tl.where(u < 0, u, 1.0), 0.0)  # du/dD² = -1/(2D); at D=0 the gradient of D is 0
    elif VIEW == "squared":
        w = -2 * w
    if distance and EXACT:
        return push_near(g, w, X, Y, rows, cols, chunk, D, GD), total
    else:
        depth = chunk + tl.arange(0, GD)
        y = tl.load(Y + cols.to(tl.int64)[:, None] * D + depth[None, :])
        if y.dtype == tl.bfloat16:
            w = w.to(tl.bfloat16)
        elif y.dtype == tl.float16:  # w does not fit fp16's range: TF32 has its mantissa
            y = y.to(tl.float32)
        if w.dtype == tl.float32 and PRECISION == "tf32":
            w = to_tf32(w)
        if distance:  # Σ_j as a product with ones: a reduction would want w, and what leads to it, in another layout
            total = tl.dot(w, tl.full((BN, 16), 1.0, tl.float32).to(w.dtype), total, input_precision=PRECISION)
        return tl.dot(w, y, g, input_precision=PRECISION), total


@triton.jit
def finish(g, total, X, G, rows, n_rows, chunk, D: tl.constexpr, GD: tl.constexpr, VIEW: tl.constexpr):
    """Write dL/dx of a program's rows from what :func:`push` gathered."""
    depth = chunk + tl.arange(0, GD)
    at = rows.to(tl.int64)[:, None] * D + depth[None, :]
    if VIEW == "euclidean" or VIEW == "squared":
        total = tl.sum(total, 1) * (1.0 / 16)  # its columns are alike
        g = total[:, None] * tl.load(X + at).to(tl.float32) - g
    tl.store(G + at, g, mask=(rows < n_rows)[:, None])
