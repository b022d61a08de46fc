"""Distances under PML's names and with its interface: ``loss.distance``, ``distance=`` of losses, miners, regularisers.

The engines have cosines, dot products and Euclidean distances, plain or squared (``kind``). Any other, a subclass of
``BaseDistance`` too, is called for the whole matrix, which autograd then differentiates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pydml import checks
from pydml.pml import joins
from pydml.records import WithRecords

__all__ = [
    "BaseDistance",
    "BatchedDistance",
    "CosineSimilarity",
    "DotProductSimilarity",
    "LpDistance",
    "SNRDistance",
]


@joins("distances.base_distance", "BaseDistance")
class BaseDistance(WithRecords):
    """Base of all distances: subclasses define ``compute_mat`` and ``pairwise_distance``.

    Parameters
    ----------
    normalize_embeddings
        Are rows divided by their p-norm first?
    p, power
        The norm, and what each entry of the matrix is raised to.
    is_inverted
        Do larger values mean more alike?
    collect_stats
        Keep the average norms of the last call in ``initial_avg_query_norm`` and its like; None is the global flag.

    Examples
    --------
    >>> class Taxicab(pydml.distances.BaseDistance):
    ...     def compute_mat(self, query_emb, ref_emb):
    ...         return torch.cdist(query_emb, ref_emb, p=1)
    >>> loss_fn = pydml.losses.TripletMarginLoss(distance=Taxicab())
    >>> loss_fn(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    tensor(0.0500)
    """

    def __init__(
        self,
        normalize_embeddings: bool = True,
        p: float = 2,
        power: float = 1,
        is_inverted: bool = False,
        collect_stats: bool | None = None,
        **unknown: Any,
    ) -> None:
        checks.nothing_else(type(self), unknown)
        WithRecords.__init__(self, collect_stats)
        self.normalize_embeddings = checks.flag("normalize_embeddings", normalize_embeddings)
        self.p = checks.number("p", p, least=0)
        self.power = checks.number("power", power)
        self.is_inverted = checks.flag("is_inverted", is_inverted)
        self.add_to_recordable_attributes(list_of_names=["p", "power"])
        norms = [f"{when}_avg_{whose}_norm" for when in ("initial", "final") for whose in ("query", "ref")]
        self.add_to_recordable_attributes(list_of_names=norms, is_stat=True)

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """The matrix [len(query_emb), len(ref_emb)]; without ``ref_emb`` of the query with itself."""
        self.check_shapes(query_emb, ref_emb)
        query = self.maybe_normalize(query_emb)
        ref = query if ref_emb is None else self.maybe_normalize(ref_emb)
        self.set_default_stats(query_emb, query_emb if ref_emb is None else ref_emb, query, ref)
        mat: Tensor = self.compute_mat(query, ref)
        if mat.shape != (len(query), len(ref)):
            raise ValueError(
                f"compute_mat: {type(self).__name__} gave shape {list(mat.shape)}, wanted {[len(query), len(ref)]}"
            )
        return mat if self.power == 1 else mat**self.power

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """The matrix of two sets of rows, already normalised; not yet raised to ``power``."""
        raise NotImplementedError

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Of rows that stand side by side."""
        raise NotImplementedError

    def smallest_dist(self, *arguments: Any, **keywords: Any) -> Any:
        """torch.min in the sense of «most alike»."""
        return (torch.max if self.is_inverted else torch.min)(*arguments, **keywords)

    def largest_dist(self, *arguments: Any, **keywords: Any) -> Any:
        """torch.max in the sense of «least alike»."""
        return (torch.min if self.is_inverted else torch.max)(*arguments, **keywords)

    def margin(self, x: Any, y: Any) -> Any:
        """By how much x is less alike than y."""
        return y - x if self.is_inverted else x - y

    def normalize(self, embeddings: Tensor, dim: int = 1, **keywords: Any) -> Tensor:
        """Rows of p-norm 1."""
        return nn.functional.normalize(embeddings, p=self.p, dim=dim, **keywords)

    def maybe_normalize(self, embeddings: Tensor, dim: int = 1, **keywords: Any) -> Tensor:
        """Rows of p-norm 1 if the distance is one of such rows."""
        return self.normalize(embeddings, dim=dim, **keywords) if self.normalize_embeddings else embeddings

    def get_norm(self, embeddings: Tensor, dim: int = 1, **keywords: Any) -> Tensor:
        """p-norms of the rows."""
        norms: Tensor = torch.linalg.vector_norm(embeddings, ord=self.p, dim=dim, **keywords)
        return norms

    def set_default_stats(self, query_emb: Tensor, ref_emb: Tensor, query: Tensor, ref: Tensor) -> None:
        """Keep the average norms before and after normalisation, if statistics are asked for."""
        self.reset_stats()
        if self.collect_stats:
            with torch.no_grad():
                self.initial_avg_query_norm = self.get_norm(query_emb).mean().item()
                self.initial_avg_ref_norm = self.get_norm(ref_emb).mean().item()
                self.final_avg_query_norm = self.get_norm(query).mean().item()
                self.final_avg_ref_norm = self.get_norm(ref).mean().item()

    def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
        """Matrices only; a subclass whose rows are no vectors overrides it."""
        for name, z in (("query_emb", query_emb), ("ref_emb", ref_emb)):
            if z is not None and z.ndim != 2:
                raise ValueError(f"{name}: got shape {list(z.shape)}, wanted 2 dimensions [batch, dim]")

    def extra_repr(self) -> str:
        return f"normalize_embeddings={self.normalize_embeddings}, p={self.p:g}, power={self.power:g}"


@joins("distances.dot_product_similarity", "DotProductSimilarity")
class DotProductSimilarity(BaseDistance):
    """Dot products; of unit rows unless ``normalize_embeddings=False``."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(is_inverted=True, **keywords)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return query_emb @ ref_emb.mT

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (query_emb * ref_emb).sum(1)


@joins("distances.cosine_similarity", "CosineSimilarity")
class CosineSimilarity(DotProductSimilarity):
    """Cosines."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(normalize_embeddings=True, **keywords)


@joins("distances.lp_distance", "LpDistance")
class LpDistance(BaseDistance):
    """p-norms of differences; ``p=2`` are Euclidean distances, with ``power=2`` squared ones."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        if self.is_inverted:
            raise ValueError("is_inverted: got True, wanted False: a norm of differences grows with them")

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        single = query_emb.dtype in (torch.float16, torch.bfloat16)  # torch.cdist has neither
        query, ref = (query_emb.float(), ref_emb.float()) if single else (query_emb, ref_emb)
        mat = torch.cdist(query, ref, p=self.p, compute_mode="donot_use_mm_for_euclid_dist")
        return mat.to(query_emb.dtype)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return nn.functional.pairwise_distance(query_emb, ref_emb, p=self.p)


@joins("distances.snr_distance", "SNRDistance")
class SNRDistance(BaseDistance):
    """Noise-to-signal ratio, Yuan et al. 2019: var(x-y) / var(x), x the query."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        if self.is_inverted:
            raise ValueError("is_inverted: got True, wanted False: noise grows with the difference")

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        noise = (query_emb[:, None] - ref_emb[None, :]).var(dim=2)
        return noise / query_emb.var(dim=1)[:, None]

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (query_emb - ref_emb).var(dim=1) / query_emb.var(dim=1)


class BatchedDistance(nn.Module):
    """A distance by blocks of rows: ``iter_fn(block of the matrix, first row, past the last)`` sees one at a time."""

    def __init__(
        self, distance: Any, iter_fn: Callable[[Tensor, int, int], Any] | None = None, batch_size: int = 32
    ) -> None:
        super().__init__()
        self.distance, self.iter_fn = distance, iter_fn
        self.batch_size = checks.integer("batch_size", batch_size, least=1)

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> None:
        if self.iter_fn is None:
            raise ValueError("iter_fn: got None, wanted a function (block, first row, past the last)")
        for start in range(0, len(query_emb), self.batch_size):
            end = start + self.batch_size
            block = self.distance(query_emb[start:end], query_emb if ref_emb is None else ref_emb)
            self.iter_fn(block, start, end)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("distance"), name)


#: What the engines call a distance that they do not have.
OTHER = "other"


def known(thing: object) -> str:
    """The name of a class of ours or of PML's; of any other, a subclass of theirs too, nothing."""
    cls = type(thing)
    return cls.__name__ if cls.__module__.partition(".")[0] in ("pydml", "pytorch_metric_learning") else ""


def kind(distance: Any) -> str:
    """What the engines call a distance object: ``cosine``, ``euclidean``, ``squared`` or ``other``."""
    name, power = known(distance), getattr(distance, "power", 1)
    if name in ("CosineSimilarity", "DotProductSimilarity") and power == 1 and distance.p == 2:
        return "cosine"
    if name == "LpDistance" and distance.p == 2 and power in (1, 2):
        return "euclidean" if power == 1 else "squared"
    return OTHER


def named(name: str, normalize_embeddings: bool = True) -> BaseDistance:
    """The object of one of the engines' names."""
    if name == "cosine":
        return CosineSimilarity() if normalize_embeddings else DotProductSimilarity(normalize_embeddings=False)
    return LpDistance(power=1 if name == "euclidean" else 2, normalize_embeddings=normalize_embeddings)
