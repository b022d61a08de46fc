"""Batches to measure on: three regimes of training, deterministic, with the share of negatives that mining keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Name -> what it stands for.
REGIMES = {
    "trained": "S of positives about 0.85, of negatives 0 ± 1/√d; one class in ten has a look-alike",
    "early": "positives hardly closer than negatives: about half of all negatives are mined with ε = 0.1",
    "collapsed": "all S about 0.99",
}
ITEMS = 4  # of a class in a batch
EPSILON = 0.1  # of Multi-Similarity mining


@dataclass
class Inputs:
    """One batch: embeddings [B, d], labels [B] and, for proxy losses, proxies [C·K, d]."""

    z: Tensor
    labels: Tensor
    proxies: Tensor | None = None

    @property
    def positives(self) -> int:
        """The largest number of positives that an anchor has."""
        return int(self.labels.bincount().max()) - 1


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x)


def _around(centres: Tensor, cosine: float, random: torch.Generator) -> Tensor:
    """Unit rows whose cosine with another row around the same centre is about ``cosine``."""
    noise = torch.randn(centres.shape, generator=random) / math.sqrt(centres.shape[1])
    return _unit(math.sqrt(cosine) * centres + math.sqrt(1 - cosine) * noise)


def make(
    size: int, dim: int, regime: str, *, classes: int | None = None, centers: int = 1, items: int = ITEMS, seed: int = 0
) -> Inputs:
    """A batch of one regime; with ``classes`` also proxies, ``centers`` of each class.

    The rows come in random order, and their lengths differ: losses must sort and normalise by themselves.
    """
    random = torch.Generator().manual_seed(seed)
    present = -(-size // items)
    if classes is not None and classes < present:
        raise ValueError(f"classes: got {classes}, wanted at least {present} for {size} rows of {items} a class")
    number = classes or present
    centres = _unit(torch.randn(number, dim, generator=random))
    drawn = torch.randperm(number, generator=random)[:present] if classes else torch.arange(number)
    labels = drawn.repeat_interleave(items)[:size]
    if regime == "trained":
        alike = drawn[: 2 * max(present // 20, min(present // 2, 1))]
        centres[alike[::2]] = _around(centres[alike[1::2]], 0.92, random)
        cosine = 0.85
    elif regime == "early":
        cosine = EPSILON + 0.8 / math.sqrt(dim)
    elif regime == "collapsed":
        common = _unit(torch.randn(1, dim, generator=random))
        centres = _unit(math.sqrt(0.99) * common + math.sqrt(0.01) * centres)
        cosine = 0.995
    else:
        raise ValueError(f"regime: got {regime!r}, wanted one of {', '.join(map(repr, REGIMES))}")
    lengths = 0.5 + torch.rand(size, 1, generator=random)
    z = _around(centres[labels], cosine, random) * lengths
    order = torch.randperm(size, generator=random)
    proxies = None
    if classes is not None:
        proxies = _around(centres.repeat_interleave(centers, 0), cosine, random)
    return Inputs(z[order].contiguous(), labels[order], proxies)


def mined_fraction(inputs: Inputs, epsilon: float = EPSILON, anchors: int = 1024) -> float:
    """Share of the negatives that Multi-Similarity mining keeps, over at most so many anchors."""
    x = _unit(inputs.z)
    rows = torch.arange(min(anchors, len(x)))
    s = x[rows] @ x.T
    same = inputs.labels[rows, None] == inputs.labels
    positive = same.clone()
    positive[rows, rows] = False
    least = s.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    return float(((s > least - epsilon) & ~same).sum() / (~same).sum().clamp_min(1))


def similarities(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """S of all positive and of all negative pairs: for small batches."""
    x = _unit(inputs.z)
    same = inputs.labels[:, None] == inputs.labels
    s = x @ x.T
    return s[same.triu(1)], s[(~same).triu(1)]
