"""Retrieval metrics of queries and galleries spread over ranks: the numbers of :mod:`pydml.metrics` on all of them.

Columns go round as in the losses, twice: once for the similarities of each query's positives, once to count the
negatives above them. Counts of disjoint columns add up, so no rank needs more than a block of the gallery.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydml import checks, metrics, ops
from pydml.backends import resolve
from pydml.declared import Above, Positives
from pydml.distributed.group import Group, Rules, compare, gather_batch, same_shapes
from pydml.distributed.walk import WALKS, Walk
from pydml.losses.batch import count_in
from pydml.metrics import _names, _sides
from pydml.tiled.rank import measures

_MUST_AGREE: Rules = {
    **same_shapes("query"),
    3: ("gallery", "galleries", lambda given: "one" if given else "none"),
    5: ("ks", "ks or options (as a checksum)", str),
}


def retrieval_metrics(
    query: Tensor,
    labels: Tensor,
    ks: Sequence[int] = (1,),
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    lone_queries: str = "miss",
    ties: str = "pessimistic",
    normalize_embeddings: bool = True,
    mode: str = "ring",
    group: Any = None,
) -> dict[str, float]:
    """Recall@K, MAP@R and R-precision of all ranks' queries among all ranks' galleries; the same on every rank.

    Parameters
    ----------
    query, labels, gallery, gallery_labels
        This rank's part of each, perhaps empty. Without a gallery the queries of all ranks are looked up among
        themselves.
    ks, lone_queries, ties, normalize_embeddings
        As for :func:`pydml.metrics.retrieval_metrics`, the same on all ranks.
    mode, group
        As for :class:`pydml.distributed.ShardedLoss`.

    Examples
    --------
    >>> query, labels = torch.eye(4).repeat(2, 1), torch.arange(8) % 4
    >>> pydml.distributed.retrieval_metrics(query, labels, ks=(1, 2))
    {'recall@1': 1.0, 'recall@2': 1.0, 'map@r': 1.0, 'r_precision': 1.0}
    """
    ranks, error, facts = Group(group), None, [0] * 5
    options = f"{ks} {lone_queries} {ties} {normalize_embeddings} {mode}"
    try:
        empty = torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)  # the checks of options are those of one process
        metrics.retrieval_metrics(
            *empty, ks, lone_queries=lone_queries, ties=ties, normalize_embeddings=normalize_embeddings
        )
        checks.choice("mode", mode, tuple(WALKS))
        q, y, g, g_y = _sides(query, labels, gallery, gallery_labels)
        facts = [len(q), q.shape[1], checks.FLOATS.index(q.dtype), int(g is not None), 0 if g is None else len(g)]
    except (TypeError, ValueError) as wrong:
        error = wrong
    table = ranks.facts([*facts, zlib.crc32(options.encode())], error)
    compare(table, _MUST_AGREE)
    sizes, gallery_sizes = [row[0] for row in table], [row[4] for row in table]
    if not sum(sizes) or (g is not None and not sum(gallery_sizes)):
        return dict.fromkeys(_names(ks), 0.0)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        wrong_numbers = sum((~torch.isfinite(z)).sum() for z in (q, g) if z is not None)
        assert isinstance(wrong_numbers, Tensor)
        if int(ranks.all_reduce(wrong_numbers, "numbers that are not finite")):
            return dict.fromkeys(_names(ks), float("nan"))
        if ranks.size == 1:
            how: dict[str, Any] = {
                "lone_queries": lone_queries,
                "ties": ties,
                "normalize_embeddings": normalize_embeddings,
            }
            return metrics.retrieval_metrics(q, y, ks, g, g_y, **how)
        columns = (q, sizes, y) if g is None or g_y is None else (g, gallery_sizes, g_y)
        all_labels = ranks.all_gather(columns[2], columns[1], "labels")
        walk = WALKS[mode](ranks, columns[0], columns[1], ops.compute_dtype(q))
        positives, above, hits, precision = _rank(
            q, y, walk, all_labels, g is None, normalize_embeddings, resolve("auto", q.device)
        )
        tie = ("optimistic", "pessimistic").index(ties)
        has = positives > 0
        values = [has & (above[:, tie] < k) for k in ks]
        values += [precision[:, tie], hits[:, tie] / positives.clamp_min(1).double()]
        sums = torch.stack([has.double().sum(), *(v.double().sum() for v in values)])
        found, *totals = ranks.all_reduce(sums, "metrics").tolist()
        number = sum(sizes) if lone_queries == "miss" else max(found, 1)
        return {name: total / number for name, total in zip(_names(ks), totals, strict=True)}


def _rank(
    query: Tensor, labels: Tensor, walk: Walk, all_labels: Tensor, symmetric: bool, normalize: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the op ``rank`` gives, of this rank's queries against the columns of all ranks."""
    rows, backend = query.to(walk.dtype), "tiled" if backend == "dense" else backend
    number = count_in(labels, all_labels) - int(symmetric)
    most = int(number.max()) if len(number) else 0
    bounds = rows.new_full((len(rows), most), torch.inf)
    filled = torch.zeros_like(number)

    def blocks() -> Any:
        for block in walk.blocks(symmetric, both_ways=False):
            if len(rows) and (block.x is None or len(block.x)):
                col_labels = None if block.x is None else all_labels[block.at]
                yield {"rows": rows, "cols": block.x, "row_labels": labels, "col_labels": col_labels}

    for matrix in blocks():
        u = ops.direct(Positives(**matrix, most=most, normalize=normalize), backend)
        real = u < torch.inf
        r, c = real.nonzero(as_tuple=True)
        bounds[r, filled[r] + (real.cumsum(1) - 1)[r, c]] = u[r, c]
        filled += real.sum(1)
    bounds = bounds.sort(1).values
    before = number.new_zeros(2, len(rows), most)
    for matrix in blocks():
        before += ops.direct(Above(**matrix, bounds=bounds, normalize=normalize), backend)
    return number, *measures(number, before)


def recall_at_k(query: Tensor, labels: Tensor, ks: Sequence[int], *more: Any, **options: Any) -> dict[int, float]:
    """Recall@K over all ranks; arguments as for :func:`retrieval_metrics`."""
    found = retrieval_metrics(query, labels, ks, *more, **options)
    return {k: found[f"recall@{k}"] for k in ks}


def map_at_r(query: Tensor, labels: Tensor, *more: Any, **options: Any) -> float:
    """MAP@R over all ranks; arguments as for :func:`retrieval_metrics`, without ``ks``."""
    return retrieval_metrics(query, labels, (1,), *more, **options)["map@r"]


def r_precision(query: Tensor, labels: Tensor, *more: Any, **options: Any) -> float:
    """R-precision over all ranks; arguments as for :func:`retrieval_metrics`, without ``ks``."""
    return retrieval_metrics(query, labels, (1,), *more, **options)["r_precision"]


def nmi(embeddings: Tensor, labels: Tensor, *more: Any, group: Any = None, **options: Any) -> float:
    """NMI of all ranks' embeddings: k-means moves all of them at once, so every rank gathers them and does the same."""
    z, y, _ = gather_batch(Group(group), embeddings, labels)
    return metrics.nmi(z, y, *more, **options)
