"""The select engine in plain PyTorch: which pairs a miner or a selecting loss keeps. Indices only, no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from pydml.declared import Extremes, Mined, Sample, TopK
from pydml.policy import POLICIES
from pydml.tiled.pair import keep, mine
from pydml.tiled.sides import Matrix, Tile, twins


def _extreme(u: Tensor, member: Tensor, largest: bool) -> Tensor:
    """Column of the largest (smallest) u among members, the first of equals; -1 where there is none."""
    best = u.masked_fill(~member, -torch.inf).amax(1) if largest else u.masked_fill(~member, torch.inf).amin(1)
    reached = member & (u == best[:, None])
    return torch.where(reached.any(1), reached.to(torch.uint8).argmax(1), -1)


def _at(u: Tensor, index: Tensor, missing: float) -> Tensor:
    return torch.where(index >= 0, u.gather(1, index.clamp_min(0)[:, None])[:, 0], missing)[:, None]


def _extremes(tile: Tile, positive: str, negative: str) -> tuple[Tensor, Tensor]:
    for side, mask in ((positive, tile.same), (negative, tile.diff)):
        if side == "none":
            mask.fill_(False)
    if positive == "semihard":  # the hardest positive that is still nearer than the chosen negative
        n = _extreme(tile.u, tile.diff, largest=negative == "hard")
        return _extreme(tile.u, tile.same & (tile.u > _at(tile.u, n, torch.inf)), largest=False), n
    p = _extreme(tile.u, tile.same, largest=positive == "easy")
    member = tile.diff
    if negative == "semihard":  # the hardest negative that is still farther than the chosen positive
        member = member & (tile.u < _at(tile.u, p, -torch.inf))
    return p, _extreme(tile.u, member, largest=negative != "easy")


def extremes(a: Extremes) -> tuple[Tensor, Tensor]:
    """Column of the easy/hard/semi-hard positive and negative of every row; -1 where it has none."""
    m = Matrix.of(a)
    p, n = torch.full_like(a.row_labels, -1), torch.full_like(a.row_labels, -1)
    for tile in m.tiles():
        p[tile.rows], n[tile.rows] = _extremes(tile, a.positive, a.negative)
    return p, n


def extremes_up_to(
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    limit: float,
    semihard: bool,
    view: str,
    normalize: bool,
    selves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The most similar positive with u ≤ limit and the most similar negative, semi-hard: with u ≤ that positive's."""
    m = Matrix(rows, cols, row_labels, col_labels, view, normalize, selves)
    p, n = row_labels.new_full((len(rows),), -1), row_labels.new_full((len(rows),), -1)
    first = twins(m.col.x) if semihard else None
    for tile in m.tiles():
        if first is not None:  # a negative that equals the positive ties with it, whatever bits the product gave them
            tile.u = tile.u[:, first]
        p[tile.rows] = best = _extreme(tile.u, tile.same & (tile.u <= limit), largest=True)
        member = tile.diff & (tile.u <= _at(tile.u, best, -torch.inf)) if semihard else tile.diff
        n[tile.rows] = _extreme(tile.u, member, largest=True)
    return p, n


def topk(a: TopK) -> tuple[Tensor, Tensor]:
    """The k pairs (i, j) of largest loss, ties to the smaller (i, j); -1 beyond the last pair.

    Unordered pairs (i < j) where the columns are the rows, else every (row, column) pair.
    """
    loss, k, side = POLICIES[a.policy](*a.params), a.k, a.side
    m = Matrix.of(a)
    zero = m.row.x.new_zeros(1, 1)
    best, flat = m.row.x.new_full((k,), -torch.inf), a.row_labels.new_full((k,), -1)
    for tile in m.tiles():
        member = {"positives": tile.same, "negatives": tile.diff}.get(side, tile.same | tile.diff)
        if m.symmetric:
            member = member & (tile.rows[:, None] < m.columns)
        value = torch.where(tile.same, loss.term(0, tile.u, zero, zero), loss.term(1, tile.u, zero, zero))
        value = value.masked_fill(~member, -torch.inf).flatten()
        least = value.topk(min(k, len(value))).values[-1:]
        at = ((value >= least) & member.flatten()).nonzero()[:, 0]  # in the order of (i, j)
        best, order = torch.cat((best, value[at])).sort(descending=True, stable=True)
        flat = torch.cat((flat, at + tile.rows[0] * m.shape[1]))[order]
        best, flat = best[:k], flat[:k]
    # -inf stands for "no pair"; the initial fillers come first among them, hence stay -1
    i = torch.where(flat < 0, -1, flat // max(m.shape[1], 1))
    return i, torch.where(flat < 0, -1, flat % max(m.shape[1], 1))


def mined(a: Mined) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multi-Similarity's mined pairs (a1, p, a2, n); with no ``epsilon``, all pairs."""
    m, epsilon = Matrix.of(a), a.epsilon
    found: list[tuple[Tensor, ...]] = []
    for tile in m.tiles():
        if epsilon is not None:
            keep(tile, mine(tile, epsilon))
        a1, p = tile.same.nonzero(as_tuple=True)
        a2, n = tile.diff.nonzero(as_tuple=True)
        found.append((tile.rows[a1], p, tile.rows[a2], n))
    empty = a.row_labels.new_empty(0)
    a1, p, a2, n = (torch.cat(part) for part in zip(*found, strict=True)) if found else (empty.clone() for _ in "apan")
    return a1, p, a2, n


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Uniforms in (0, 1) from a counter: splitmix64's finaliser, so that a draw hangs on nothing but its place."""

    def shift(v: Tensor, bits: int) -> Tensor:  # logical, as the unsigned shift of the kernels
        return (v >> bits) & ((1 << (64 - bits)) - 1)

    v = (counter + 1) * -7046029254386353131 + seed
    v = (v ^ shift(v, 30)) * -4658895280553007687
    v = (v ^ shift(v, 27)) * -7723592293110705685
    v = v ^ shift(v, 31)
    return (shift(v, 11).double() + 0.5) * 2.0**-53


def sample(a: Sample) -> Tensor:
    """For each anchor a negative drawn with weight 1/q(D) by Gumbel-max, -1 where no weight is above 0.

    log w = (2-d)·log D - (d-3)/2·log(1-D²/4), D clamped below at ``cutoff``, only D < ``nonzero_loss_cutoff``
    (Wu et al. 2017, section 4).
    """
    m = Matrix(a.rows, a.cols, a.row_labels, a.col_labels, "euclidean", True)
    dim, columns = a.rows.shape[1], m.columns
    drawn = torch.full_like(a.anchors, -1)
    for places in torch.arange(len(a.anchors), device=a.rows.device).split(1024) if len(columns) else ():
        tile = m.tile(a.anchors[places])
        d = (-tile.u.double()).clamp_min(a.cutoff)
        log_w = (2.0 - dim) * d.log() - (dim - 3) / 2 * torch.log1p(-0.25 * d * d)
        member = tile.diff & (d < a.nonzero_loss_cutoff) & torch.isfinite(log_w)
        gumbel = -torch.log(-torch.log(uniform(a.seed, places[:, None] * len(columns) + columns)))
        drawn[places] = _extreme(log_w + gumbel, member, largest=True)
    return drawn
