"""The pair engine in plain PyTorch: row statistics forward, recomputed tiles backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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

    def __init__(
        self,
        rows: Tensor,
        cols: Tensor | None,
        row_labels: Tensor,
        col_labels: Tensor | None,
        row_field: Tensor | None,
        col_field: Tensor | None,
        view: str,
        normalize: bool,
        pool_size: int,
        sharpness: float,
        selves: Tensor | None = None,
    ) -> None:
        super().__init__(rows, cols, row_labels, col_labels, view, normalize, selves)
        n_cols = self.shape[1] // pool_size
        dtype = self.row.x.dtype
        self.row_field = rows.new_zeros(len(rows), dtype=dtype) if row_field is None else row_field.to(dtype)
        self.col_field = rows.new_zeros(n_cols, dtype=dtype) if col_field is None else col_field.to(dtype)
        self.pool_size, self.sharpness = pool_size, sharpness

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


def keep(tile: Tile, thresholds: Tensor) -> None:
    """Restrict a tile's pairs to the mined ones."""
    tile.same &= tile.u < thresholds[:, :1]
    tile.diff &= tile.u > thresholds[:, 1:]


def members(slot: Slot, tile: Tile) -> Tensor:
    return tile.same if slot.side == "positives" else tile.diff


def pair(
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    row_field: Tensor | None,
    col_field: Tensor | None,
    policy: str,
    params: Sequence[float],
    view: str,
    normalize: bool,
    epsilon: float | None,
    pool_size: int,
    sharpness: float,
    selves: Tensor | None = None,
    mined: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row statistics [R, K], mining thresholds [R, 2], and nothing else to remember.

    ``mined`` are thresholds that are known already, where these columns are a part of those that were mined.
    """
    loss: Policy = POLICIES[policy](*params)
    m = Pairs(rows, cols, row_labels, col_labels, row_field, col_field, view, normalize, pool_size, sharpness, selves)
    stats = m.row.x.new_zeros(len(rows), len(loss.slots))
    thresholds = m.row.x.new_zeros(len(rows), 2)
    for tile in m.tiles():
        if epsilon is not None:
            thresholds[tile.rows] = mine(tile, epsilon) if mined is None else mined[tile.rows]
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


def pair_saved(*_: object) -> int:
    """Bytes that the forward keeps for the backward: none, tiles are recomputed."""
    return 0


def pair_backward(
    grad: Tensor,
    stats: Tensor,
    thresholds: Tensor,
    saved: Tensor,
    rows: Tensor,
    cols: Tensor | None,
    row_labels: Tensor,
    col_labels: Tensor | None,
    row_field: Tensor | None,
    col_field: Tensor | None,
    policy: str,
    params: Sequence[float],
    view: str,
    normalize: bool,
    epsilon: float | None,
    pool_size: int,
    sharpness: float,
    want_rows: bool,
    want_cols: bool,
    selves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dL/drows and dL/dcols from dL/dstats: w_ij = Σ_k dL/dstat_ik · dstat_ik/du_ij."""
    loss: Policy = POLICIES[policy](*params)
    m = Pairs(rows, cols, row_labels, col_labels, row_field, col_field, view, normalize, pool_size, sharpness, selves)
    m.start_gradient(want_rows, want_cols)
    (grad,) = m.poison(grad)
    known = torch.where(torch.isneginf(stats), torch.inf, stats)  # a sum of nothing has no shares
    for tile in m.tiles():
        if epsilon is not None:
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
