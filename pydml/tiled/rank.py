"""The rank engine in plain PyTorch: retrieval metrics by counting what lies above each positive. No neighbour lists."""

from __future__ import annotations

import torch
from torch import Tensor

from pydml.declared import Rank
from pydml.tiled.sides import Matrix, Tile, beyond, twins


def rank(a: Rank) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per query: positives [R], negatives above the best one, hits and average precision among the first R.

    The last three are [R, 2]: ties between a positive and a negative in favour of the positive, then against it.
    """
    m, queries = Matrix.of(a), len(a.rows)
    positives = torch.zeros_like(a.row_labels)
    above, hits = a.row_labels.new_zeros(queries, 2), a.row_labels.new_zeros(queries, 2)
    precision = m.row.x.new_zeros((queries, 2), dtype=torch.float64)
    first = twins(m.col.x)
    for tile in m.tiles():  # nothing where there are no queries
        if first is not None:  # equal columns tie, whatever bits the product gave them
            tile.u = tile.u[:, first]
        number = tile.same.sum(1)
        positives[tile.rows] = number
        most = int(number.amax())
        rising = tile.u.masked_fill(~tile.same, torch.inf).sort(1).values[:, :most].contiguous()
        above[tile.rows], hits[tile.rows], precision[tile.rows] = measures(number, above_positives(tile, rising))
    return positives, above, hits, precision


def above_positives(tile: Tile, rising: Tensor) -> Tensor:
    """Negatives of a tile above each positive [2, r, M]: ties in favour of the positive, then against it."""
    u = tile.u.contiguous()
    places = [torch.searchsorted(rising, u, right=right) for right in (False, True)]
    return torch.stack([beyond(k, tile.diff, rising.shape[1]) for k in places])


def measures(number: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the number of positives [r] and the negatives above each, the least similar first: see :func:`rank`."""
    most = before.shape[2]
    order = number[:, None] - torch.arange(most, device=number.device)  # 1 = the most similar; padding is below 1
    place = order + before
    counts = (order >= 1) & (place <= number[:, None])
    share = torch.where(counts, order.double() / place.clamp_min(1), 0).sum(2) / number.clamp_min(1)
    best = (number - 1).clamp_min(0)[None, :, None].expand(2, -1, 1)
    above = before.gather(2, best)[..., 0] if most else torch.zeros_like(counts.sum(2))
    return torch.where(number > 0, above, 0).T, counts.sum(2).T, share.T
