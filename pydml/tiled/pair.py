"""The pair engine in plain PyTorch: row statistics forward, recomputed tiles backward."""

from __future__ import annotations

import torch
from torch import Tensor

from pydml.declared import Backward, Pair
from pydml.policy import POLICIES, LogSumExp, Policy, Slot
from pydml.tiled.sides import Matrix, Tile


def pool(u: Tensor, size: int, sharpness: float) -> tuple[Tensor, Tensor | None]:
    """Softmax-pool every ``size`` neighbouring columns: U = Σ_k softmax_k(sharpness·u)·u, and dU/du."""
    if size == 1:
        return u, None
    u = u.unflatten(1, (-1, size))
    p = torch.softmax(sharpness * u, dim=2)
    pooled = (p * u).sum(2)
    return pooled, p * (1 + sharpness * (u - pooled[..., None]))


class Pairs(Matrix):
    """A matrix with the fields, the mining and the pooling that pair losses may ask for."""

    def __init__(self, a: Pair) -> None:
        super().__init__(a.rows, a.cols, a.row_labels, a.col_labels, a.view, a.normalize, a.selves)
        n_rows, n_cols, dtype = len(a.rows), self.shape[1] // a.pool_size, self.row.x.dtype
        self.row_field = self.row.x.new_zeros(n_rows) if a.row_field is None else a.row_field.to(dtype)
        self.col_field = self.row.x.new_zeros(n_cols) if a.col_field is None else a.col_field.to(dtype)
        self.pool_size, self.sharpness, self.side = a.pool_size, a.sharpness, a.side

    def tile(self, rows: Tensor) -> Tile:
        tile = super().tile(rows)
        if self.side != "both":
            (tile.diff if self.side == "positives" else tile.same).fill_(False)
        return tile

    def similarity(self, rows: Tensor) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        u, slope, near = super().similarity(rows)
        u, self.pooling = pool(u, self.pool_size, self.sharpness)
        return u, slope, near

    def arguments(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """What a policy's functions take."""
        return tile.u, self.row_field[tile.rows, None], self.col_field[None, :]

    def add_weights(self, tile: Tile, w: Tensor) -> None:
        if self.pooling is not None:
            w = (w[..., None] * self.pooling).flatten(1)
        super().add_weights(tile, w)


def mine(tile: Tile, epsilon: float) -> Tensor:
    """Multi-Similarity thresholds [r, 2]: keep positives below the first, negatives above the second."""
    hardest_negative = tile.u.masked_fill(~tile.diff, -torch.inf).amax(1)
    hardest_positive = tile.u.masked_fill(~tile.same, torch.inf).amin(1)
    return torch.stack((hardest_negative + epsilon, hardest_positive - epsilon), 1)


def settled(found: Tensor, a: Pair, rows: Tensor | slice) -> Tensor:
    """Thresholds [r, 2] with those that are known already in the place of those that were found."""
    if a.bounds is not None:
        known = slice(1, 2) if a.side == "negatives" else slice(0, 2)
        found[:, known] = a.bounds[rows, known]
    return found


def keep(tile: Tile, thresholds: Tensor) -> None:
    """Restrict a tile's pairs to the mined ones."""
    tile.same &= tile.u < thresholds[:, :1]
    tile.diff &= tile.u > thresholds[:, 1:]


def members(slot: Slot, tile: Tile) -> Tensor:
    return tile.same if slot.side == "positives" else tile.diff


def pair(a: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Row statistics [R, K], mining thresholds [R, 2], and nothing else to remember."""
    loss: Policy = POLICIES[a.policy](*a.params)
    m = Pairs(a)
    stats = m.row.x.new_zeros(len(a.rows), len(loss.slots))
    thresholds = m.row.x.new_zeros(len(a.rows), 2)
    if a.epsilon is not None and not m.shape[1]:  # the extremes of nothing
        thresholds[:, 0], thresholds[:, 1] = -torch.inf, torch.inf
        thresholds = settled(thresholds, a, slice(None))
    for tile in m.tiles():
        if a.epsilon is not None:
            thresholds[tile.rows] = settled(mine(tile, a.epsilon), a, tile.rows)
            keep(tile, thresholds[tile.rows])
        arguments = m.arguments(tile)
        for k, slot in enumerate(loss.slots):
            term, member = loss.term(k, *arguments), members(slot, tile)
            if isinstance(slot, LogSumExp):
                stats[tile.rows, k] = term.masked_fill(~member, -torch.inf).logsumexp(1)
            else:
                stats[tile.rows, k] = torch.where(member, term, 0).sum(1)
    if not m.shape[1]:
        empty = [-torch.inf if isinstance(slot, LogSumExp) else 0.0 for slot in loss.slots]
        stats += torch.tensor(empty, dtype=stats.dtype, device=stats.device)
    (stats,) = m.poison(stats)
    return stats, thresholds, stats.new_empty(0, dtype=torch.uint8)


def pair_saved(a: Pair) -> int:
    """Bytes that the forward keeps for the backward: none, tiles are recomputed."""
    return 0


def pair_backward(b: Backward[Pair]) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/dstats: w_ij = Σ_k dL/dstat_ik · dstat_ik/du_ij."""
    a, stats, thresholds = b.call, b.out.stats, b.out.thresholds
    loss: Policy = POLICIES[a.policy](*a.params)
    m = Pairs(a)
    m.start_gradient(b.want_rows, b.want_cols)
    (grad,) = m.poison(b.grad.stats)
    known = torch.where(torch.isneginf(stats), torch.inf, stats)  # a sum of nothing has no shares
    for tile in m.tiles():
        if a.epsilon is not None:
            keep(tile, thresholds[tile.rows])
        arguments = m.arguments(tile)
        w = torch.zeros_like(tile.u)
        for k, slot in enumerate(loss.slots):
            if isinstance(slot, LogSumExp):
                share = torch.exp(loss.term(k, *arguments) - known[tile.rows, k, None])
            elif slot.constant:
                continue
            else:
                share = torch.ones_like(tile.u)
            g = grad[tile.rows, k, None] * share * loss.slope(k, *arguments)
            w += torch.where(members(slot, tile), g, 0)
        m.add_weights(tile, w)
    return m.gradients()
