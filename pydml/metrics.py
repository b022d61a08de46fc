"""Retrieval metrics from one pass over query × gallery that stores neither the matrix nor neighbour lists, and NMI.

Conventions: a query is never its own neighbour (by index, when the gallery is the queries themselves); a mean is over
**all** queries, those without any positive counting 0 (``lone_queries="skip"`` leaves them out); where a positive and
a negative are exactly as similar the negative comes first (``ties="optimistic"``: the positive). With no query or no
gallery every metric is 0.0. NaN or infinities in the embeddings give NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydml import checks, ops
from pydml.backends import resolve
from pydml.declared import Rank
from pydml.tiled.sides import twins

__all__ = ["map_at_r", "nmi", "r_precision", "recall_at_k", "retrieval_metrics"]

#: Elements of a block of distances in k-means.
BLOCK = 1 << 22


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
    backend: str = "auto",
) -> dict[str, float]:
    """Recall@K, MAP@R and R-precision from one ranking.

    Parameters
    ----------
    query, labels
        [Q, d] and [Q] of any integer dtype.
    ks
        The K of Recall@K, each an int ≥ 1; beyond the size of the gallery they are allowed.
    gallery, gallery_labels
        [G, d] and [G] where the queries are not looked up among themselves.
    lone_queries
        "miss": a query without any positive in the gallery counts 0. "skip": it does not count.
    ties
        "pessimistic": of equally similar items the negatives come first. "optimistic": the positives.
    normalize_embeddings
        Rank by cosine, else by dot product.
    backend
        One call's own choice; see :func:`pydml.use_backend`.

    Returns
    -------
    dict
        ``"recall@K"`` for each K, ``"map@r"``, ``"r_precision"``.

    Examples
    --------
    >>> query, labels = torch.eye(4).repeat(2, 1), torch.arange(8) % 4
    >>> pydml.metrics.retrieval_metrics(query, labels, ks=(1, 2))
    {'recall@1': 1.0, 'recall@2': 1.0, 'map@r': 1.0, 'r_precision': 1.0}
    """
    if isinstance(ks, (str, Tensor)) or not isinstance(ks, Sequence):
        raise TypeError(f"ks: got {type(ks).__name__}, wanted a sequence of ints >= 1")
    if not len(ks):
        raise ValueError("ks: got an empty sequence, wanted at least one int >= 1")
    ks = [checks.integer(f"ks[{i}]", k, least=1) for i, k in enumerate(ks)]
    checks.choice("lone_queries", lone_queries, ("miss", "skip"))
    tie = ("optimistic", "pessimistic").index(checks.choice("ties", ties, ("pessimistic", "optimistic")))
    checks.flag("normalize_embeddings", normalize_embeddings)
    q, y, g, g_y = _sides(query, labels, gallery, gallery_labels)
    backend = resolve(backend, q.device)

    if not len(q) or (g is not None and not len(g)):
        return dict.fromkeys(_names(ks), 0.0)
    if not all(bool(z.isfinite().all()) for z in (q, g) if z is not None):
        return dict.fromkeys(_names(ks), float("nan"))
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        call = Rank(rows=q, cols=g, row_labels=y, col_labels=g_y, normalize=normalize_embeddings)
        found = _dense_rank(call) if backend == "dense" else ops.call(call, backend)
        positives, above, hits, precision = found
        has = positives > 0
        values = [has & (above[:, tie] < k) for k in ks]
        values += [precision[:, tie], hits[:, tie] / positives.clamp_min(1).double()]
        number = len(q) if lone_queries == "miss" else max(int(has.sum()), 1)
        return {n: float(v.double().sum() / number) for n, v in zip(_names(ks), values, strict=True)}


def recall_at_k(
    query: Tensor,
    labels: Tensor,
    ks: Sequence[int],
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    lone_queries: str = "miss",
    ties: str = "pessimistic",
    normalize_embeddings: bool = True,
    backend: str = "auto",
) -> dict[int, float]:
    """Recall@K: the share of queries with a positive among their K most similar items.

    R@K = 1/Q Σ_i 1[#{n ∈ N_i : S_in > max_{P_i} S} < K], and pessimistically with ≥ in place of >

    Parameters
    ----------
    query, labels, ks, gallery, gallery_labels, lone_queries, ties, normalize_embeddings, backend
        As for :func:`retrieval_metrics`.

    Examples
    --------
    >>> query = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.9, 0.1], [0.0, 1.0]])
    >>> pydml.metrics.recall_at_k(query, torch.tensor([0, 0, 1, 1]), ks=(1, 2, 3))
    {1: 0.0, 2: 0.75, 3: 1.0}
    """
    found = retrieval_metrics(
        query, labels, ks, gallery, gallery_labels,
        lone_queries=lone_queries, ties=ties, normalize_embeddings=normalize_embeddings, backend=backend,
    )  # fmt: skip
    return {k: found[f"recall@{k}"] for k in ks}


def map_at_r(
    query: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    lone_queries: str = "miss",
    ties: str = "pessimistic",
    normalize_embeddings: bool = True,
    backend: str = "auto",
) -> float:
    """MAP@R, Musgrave et al. 2020: mean average precision among the first R_i = |P_i| items.

    MAP@R = 1/Q Σ_i 1/R_i Σ_{k ≤ R_i} 1[the k-th is a positive]·(positives among the first k)/k

    Parameters
    ----------
    query, labels, gallery, gallery_labels, lone_queries, ties, normalize_embeddings, backend
        As for :func:`retrieval_metrics`.

    Examples
    --------
    >>> query = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.9, 0.1], [0.0, 1.0]])
    >>> pydml.metrics.map_at_r(query, torch.tensor([0, 1, 0, 1]))
    0.75
    """
    return retrieval_metrics(
        query, labels, (1,), gallery, gallery_labels,
        lone_queries=lone_queries, ties=ties, normalize_embeddings=normalize_embeddings, backend=backend,
    )["map@r"]  # fmt: skip


def r_precision(
    query: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    lone_queries: str = "miss",
    ties: str = "pessimistic",
    normalize_embeddings: bool = True,
    backend: str = "auto",
) -> float:
    """R-precision: the share of positives among the first R_i = |P_i| items.

    1/Q Σ_i (positives among the first R_i)/R_i

    Parameters
    ----------
    query, labels, gallery, gallery_labels, lone_queries, ties, normalize_embeddings, backend
        As for :func:`retrieval_metrics`.

    Examples
    --------
    >>> query = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.9, 0.1], [0.0, 1.0]])
    >>> pydml.metrics.r_precision(query, torch.tensor([0, 1, 0, 1]))
    0.75
    """
    return retrieval_metrics(
        query, labels, (1,), gallery, gallery_labels,
        lone_queries=lone_queries, ties=ties, normalize_embeddings=normalize_embeddings, backend=backend,
    )["r_precision"]  # fmt: skip


def _names(ks: Sequence[int]) -> list[str]:
    return [*(f"recall@{k}" for k in ks), "map@r", "r_precision"]


def _sides(
    query: Any, labels: Any, gallery: Any, gallery_labels: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check queries and gallery; the gallery is None where it is the queries."""
    q = checks.embeddings("query", query)
    y = checks.labels("labels", labels, q)
    if gallery is None and gallery_labels is not None:
        raise ValueError("gallery_labels: got labels without gallery, wanted both or neither")
    if gallery is None or gallery is query:
        return q, y, None, None
    g = checks.embeddings("gallery", gallery, like=q)
    if gallery_labels is None:
        raise ValueError("gallery_labels: got None beside gallery, wanted the labels of gallery")
    return q, y, g, checks.labels("gallery_labels", gallery_labels, g)


def _dense_rank(a: Rank) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the op ``rank`` gives, by sorting the whole matrix."""
    dtype = ops.compute_dtype(a.rows)
    q, g = a.rows.to(dtype), (a.rows if a.cols is None else a.cols).to(dtype)
    if a.normalize:
        q, g = torch.nn.functional.normalize(q), torch.nn.functional.normalize(g)
    s = q @ g.T
    first = twins(g)
    if first is not None:  # equal columns tie, whatever bits the product gave them
        s = s[:, first]
    same = a.row_labels[:, None] == (a.row_labels if a.col_labels is None else a.col_labels)[None, :]
    if a.cols is None:  # the query itself comes last, as a negative
        same.fill_diagonal_(False)
        s.fill_diagonal_(-torch.inf)
    positives = same.sum(1)
    place = torch.arange(1, s.shape[1] + 1, device=s.device)
    within = place <= positives[:, None]
    above, hits, precision = [], [], []
    for positives_first in (True, False):
        by_label = same.long().argsort(dim=1, descending=positives_first, stable=True)
        by_similarity = s.gather(1, by_label).argsort(dim=1, descending=True, stable=True)
        relevant = same.gather(1, by_label.gather(1, by_similarity))
        above.append(relevant.long().argmax(1))
        hits.append((relevant & within).sum(1))
        share = torch.where(relevant & within, relevant.cumsum(1).double() / place, 0)
        precision.append(share.sum(1) / positives.clamp_min(1))
    return positives, torch.stack(above, 1), torch.stack(hits, 1), torch.stack(precision, 1)


def nmi(embeddings: Tensor, labels: Tensor, clusters: int | None = None, seed: int = 0, iterations: int = 20) -> float:
    """Normalised mutual information of the labels y and a k-means clustering c of the normalised embeddings.

    NMI = I(y; c) / ½(H(y) + H(c)), 1 where both are a single class and cluster

    k-means++ chooses the first centres, Lloyd's iterations move them; distances are computed in blocks. One seed gives
    one value (on a GPU up to the order of summation). The first centres take ``clusters`` passes over the embeddings,
    an iteration takes Q·clusters·d multiplications.

    Parameters
    ----------
    embeddings, labels
        [Q, d] and [Q] of any integer dtype. With no embeddings the value is 0.0, with NaN or infinities it is NaN.
    clusters
        Their number; None is the number of different labels.
    seed
        Of k-means++.
    iterations
        At most so many; Lloyd stops where nothing moves any more.

    Examples
    --------
    >>> embeddings, labels = torch.eye(4).repeat(2, 1), torch.arange(8) % 4
    >>> pydml.metrics.nmi(embeddings, labels)
    1.0
    """
    z = checks.embeddings("embeddings", embeddings)
    y = checks.labels("labels", labels, z)
    if clusters is not None:
        checks.integer("clusters", clusters, least=1)
    checks.integer("seed", seed, least=0)
    checks.integer("iterations", iterations, least=1)
    if not len(z):
        return 0.0
    if not bool(z.isfinite().all()):
        return float("nan")
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        x = torch.nn.functional.normalize(z.to(ops.compute_dtype(z)))
        number = len(y.unique()) if clusters is None else clusters
        return _normalised_information(y, _k_means(x, number, seed, iterations))


def _k_means(x: Tensor, clusters: int, seed: int, iterations: int) -> Tensor:
    """Cluster [Q] of every row; fewer clusters than asked for where there are fewer different rows."""
    centres = _first_centres(x, clusters, torch.Generator().manual_seed(seed))
    step = max(1, BLOCK // len(centres))
    assigned = x.new_full((len(x),), -1, dtype=torch.int64)
    for _ in range(iterations):
        half = centres.square().sum(1) / 2  # ‖x-c‖² = ‖x‖² - 2 (x·c - ½‖c‖²)
        nearest = torch.cat([(block @ centres.T - half).argmax(1) for block in x.split(step)])
        if torch.equal(nearest, assigned):
            break
        assigned = nearest
        sums = torch.zeros_like(centres).index_add_(0, assigned, x)
        sizes = assigned.bincount(minlength=len(centres))[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp_min(1), centres)  # an empty cluster stays where it is
    return assigned


def _first_centres(x: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """k-means++, Arthur and Vassilvitskii 2007: each next centre is a row drawn with its D² to the nearest so far."""
    draws = torch.rand(clusters, dtype=torch.float64, generator=generator).tolist()
    chosen = [min(int(draws[0] * len(x)), len(x) - 1)]
    nearest = (x - x[chosen[0]]).square().sum(1)
    for draw in draws[1:]:
        total = nearest.double().cumsum(0)
        if not total[-1] > 0:  # every row is a centre already
            break
        at = torch.searchsorted(total, draw * total[-1], right=True).clamp_max(len(x) - 1)
        chosen.append(int(at))
        nearest = torch.minimum(nearest, (x - x[at]).square().sum(1))
    return x[chosen]


def _normalised_information(labels: Tensor, assigned: Tensor) -> float:
    """I(y; c) / ½(H(y) + H(c)), as scikit-learn's ``normalized_mutual_info_score``."""
    y, y_number = torch.unique(labels, return_inverse=True, return_counts=True)[1:]
    c, c_number = torch.unique(assigned, return_inverse=True, return_counts=True)[1:]
    if len(y_number) == len(c_number) == 1:
        return 1.0
    cell, number = torch.unique(y * len(c_number) + c, return_counts=True)
    p_y, p_c, p = (n.double() / len(labels) for n in (y_number, c_number, number))
    independent = p_y.log()[cell // len(c_number)] + p_c.log()[cell % len(c_number)]
    information = (p * (p.log() - independent)).sum().clamp_min(0)
    entropies = -(p_y * p_y.log()).sum() - (p_c * p_c.log()).sum()
    return min(float(2 * information / entropies), 1.0)
