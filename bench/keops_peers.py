"""The losses that KeOps can say: symbolic matrices, reduced by C++ that it generates and compiles at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, relu, softplus

LARGEST = 6e8  # B²·d: about ten seconds a step
FAR = 1e4  # subtracted from the exponent of a pair that does not count


def load() -> Any:
    """``LazyTensor``, with KeOps kept quiet."""
    import pykeops  # type: ignore[import-untyped]

    pykeops.set_verbose(False)
    from pykeops.torch import LazyTensor  # type: ignore[import-untyped]

    return LazyTensor


class Pairs:
    """The symbolic matrices of a batch: cosines, squared distances, positives, negatives (1 or 0)."""

    def __init__(self, z: Tensor, labels: Tensor) -> None:
        lazy = load()

        def both(values: Tensor) -> tuple[Any, Any]:
            values = values.to(z.dtype).reshape(len(z), -1).contiguous()
            return lazy(values[:, None, :]), lazy(values[None, :, :])

        x_i, x_j = both(normalize(z))
        self.s = (x_i * x_j).sum(-1)
        self.squared = ((x_i - x_j) ** 2).sum(-1)
        # small whole numbers: exact in fp32
        y_i, y_j = both(labels.unique(return_inverse=True)[1])
        at_i, at_j = both(torch.arange(len(z), device=z.device))
        self.same = (0.5 - (y_i - y_j).abs()).step()
        self.itself = (0.5 - (at_i - at_j).abs()).step()
        self.pos = self.same - self.itself
        self.neg = 1 - self.same

    @staticmethod
    def lse(terms: Any, counted: Any) -> Tensor:
        reduced: Tensor = (terms + FAR * (counted - 1)).logsumexp(dim=1)
        return reduced[:, 0]

    @staticmethod
    def sum(terms: Any) -> Tensor:
        reduced: Tensor = terms.sum(dim=1)
        return reduced[:, 0]


def _softplus(t: Any) -> Any:
    """log(1+e^t) of a symbolic matrix, for any t."""
    return t.relu() + (1 + (-t.abs()).exp()).log()


def multi_similarity(z: Tensor, labels: Tensor, *, alpha: float, beta: float, base: float) -> Tensor:
    m = Pairs(z, labels)
    positive = softplus(m.lse(-alpha * (m.s - base), m.pos)) / alpha
    return (positive + softplus(m.lse(beta * (m.s - base), m.neg)) / beta).mean()


def nca(z: Tensor, labels: Tensor, *, softmax_scale: float) -> Tensor:
    m = Pairs(z, labels)
    logits = -softmax_scale * m.squared
    return (m.lse(logits, 1 - m.itself) - m.lse(logits, m.pos)).mean()


def binomial(z: Tensor, labels: Tensor, *, alpha: float, beta: float, base: float) -> Tensor:
    m = Pairs(z, labels)
    positive = m.sum(m.pos * _softplus(alpha * (base - m.s))) / m.sum(m.pos).clamp_min(1)
    negative = m.sum(m.neg * _softplus(beta * (m.s - base))) / m.sum(m.neg).clamp_min(1)
    return (positive + negative).mean()


def contrastive(z: Tensor, labels: Tensor, *, pos_margin: float, neg_margin: float) -> Tensor:
    m = Pairs(z, labels)
    d = (m.squared + m.itself).sqrt()  # a distance of 0 has no slope: the diagonal, which does not count, is moved
    loss = torch.zeros_like(z[0, 0])
    for hinge, side in (((d - pos_margin).relu(), m.pos), ((neg_margin - d).relu(), m.neg)):
        above = m.sum(side * (1 - (-hinge).step()))
        loss = loss + m.sum(side * hinge).sum() / above.sum().clamp_min(1)
    return loss


def generalized_lifted(z: Tensor, labels: Tensor, *, neg_margin: float, pos_margin: float) -> Tensor:
    m = Pairs(z, labels)
    d = (m.squared + m.itself).sqrt()
    return relu(m.lse(d - pos_margin, m.pos) + m.lse(neg_margin - d, m.neg)).mean()


def lifted_star(z: Tensor, labels: Tensor, *, alpha: float, beta: float) -> Tensor:
    m = Pairs(z, labels)
    return (m.lse(-alpha * m.s, m.pos) / alpha + m.lse(beta * m.s, m.neg) / beta).mean()


#: Variant -> function.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "ms": multi_similarity,
    "nca": nca,
    "binomial": binomial,
    "contrastive": contrastive,
    "generalized_lifted": generalized_lifted,
    "lifted_star": lifted_star,
}
