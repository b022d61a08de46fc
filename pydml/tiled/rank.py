"""The rank engine in plain PyTorch: retrieval metrics by counting what lies above each positive. No neighbour lists."""

from __future__ import annotations

import torch
from torch import Tensor

from pydml.tiled.sides import Matrix, beyond


def rank(
    rows: Tensor, cols: Tensor | None, row_labels: Tensor, col_labels: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per query: positives [R], negatives above the best one, hits and average precision among the first R.

    The last three are [R, 2]: ties between a positive and a negative in favour of the positive, then against it.
    """
    m = Matrix(rows, cols, row_labels, col_labels, "dot", normalize)
    positives = row_labels.new_zeros(len(rows))
    above, hits = row_labels.new_zeros(len(rows), 2), row_labels.new_zeros(len(rows), 2)
    precision = m.row.x.new_zeros((len(rows), 2), dtype=torch.float64)
    for tile in m.tiles():  # nothing where there are no queries
        number = tile.same.sum(1)
        positives[tile.rows] = number
        most = int(number.amax())
        rising = tile.u.masked_fill(~tile.same, torch.inf).sort(1).values[:, :most].contiguous()
        column = torch.arange(most, device=rows.device)
        order = number[:, None] - column  # 1 = the most similar positive; padding is below 1
        for tie, right in enumerate((False, True)):
            k = torch.searchsorted(rising, tile.u.contiguous(), right=right)
            before = beyond(k, tile.diff, most)  # negatives above each positive
            place = order + before
            counts = (order >= 1) & (place <= number[:, None])
            hits[tile.rows, tie] = counts.sum(1)
            share = torch.where(counts, order.double() / place.clamp_min(1), 0).sum(1)
            precision[tile.rows, tie] = share / number.clamp_min(1)
            if most:
                above[tile.rows, tie] = torch.where(
                    number > 0, before.gather(1, (number - 1).clamp_min(0)[:, None])[:, 0], 0
                )
    return positives, above, hits, precision
