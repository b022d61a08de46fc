"""What a pair loss tells the pair engine: its row statistics, as functions of one pair's similarity.

An engine knows tiles, masks and reductions; a policy knows the maths of a pair. ``u`` is the pair's oriented
similarity: S for cosine and dot products, -D for Euclidean distances, -D² for squared ones, so that larger always
means more alike and one formula serves every distance. C++ and Triton mirror each policy by basename and by the two
functions ``term`` and ``slope``; what a loss makes of the statistics is written once, in its Python class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import relu

Side = Literal["positives", "negatives"]


def softplus(t: Tensor) -> Tensor:
    """log(1+e^t) to full fp64 precision (torch's default switches to t already at 20, an error of 2e-9)."""
    return torch.nn.functional.softplus(t, threshold=40.0)


@dataclass(frozen=True)
class LogSumExp:
    """log Σ e^{term} over one side of the row; -inf where it is empty."""

    side: Side


@dataclass(frozen=True)
class Sum:
    """Σ term over one side of the row; ``constant`` marks a statistic that carries no gradient (a count, say)."""

    side: Side
    constant: bool = False


Slot = LogSumExp | Sum
LSE_BOTH: tuple[Slot, ...] = (LogSumExp("positives"), LogSumExp("negatives"))


class Policy:
    """Base of the policies: ``slots`` are the row statistics, the dataclass fields the numbers that it needs."""

    slots: ClassVar[tuple[Slot, ...]]
    #: Can a pair's weight be exactly 0? Kernels then list the others.
    sparse: ClassVar[bool] = False
    #: Do losses use it with Multi-Similarity mining? The C++ kernels are compiled for that only where they do.
    mines: ClassVar[bool] = False

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        """What a pair adds to slot ``k``; ``row`` [r, 1] and ``col`` [1, c] are fields that a loss may give."""
        raise NotImplementedError

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor | float:
        """d term / du, by hand as in the kernels (a test holds it against finite differences)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exponential(Policy):
    """Log-sum-exps of scaled similarities: Multi-Similarity, lifted structures, NCA, softmax and Proxy-Anchor losses.

    P_i = LSE_{positives}(a₊(u - c₊) + col_j),  N_i = LSE_{negatives}(a₋(u - c₋) + col_j)
    """

    slots = LSE_BOTH
    mines = True
    a_pos: float
    c_pos: float
    a_neg: float
    c_neg: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return (self.a_pos * (u - self.c_pos) if k == 0 else self.a_neg * (u - self.c_neg)) + col

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> float:
        return self.a_pos if k == 0 else self.a_neg


@dataclass(frozen=True)
class Binomial(Policy):
    """Sums of binomial deviances and the number of pairs, Wang et al. 2019, eq. 9.

    Σ_{positives} softplus(α(λ-u)), their number, Σ_{negatives} softplus(β(u-λ)), their number
    """

    slots = (Sum("positives"), Sum("positives", constant=True), Sum("negatives"), Sum("negatives", constant=True))
    mines = True
    alpha: float
    beta: float
    base: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if k in (1, 3):
            return torch.ones_like(u)
        return softplus(self.alpha * (self.base - u) if k == 0 else self.beta * (u - self.base))

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if k == 0:
            return -self.alpha * torch.sigmoid(self.alpha * (self.base - u))
        return self.beta * torch.sigmoid(self.beta * (u - self.base))


@dataclass(frozen=True)
class BinLifted(Policy):
    """Binomial sums and log-sum-exps side by side: BinLifted, Wang et al. 2019, supplement eq. 10."""

    slots = (Sum("positives"), LogSumExp("positives"), Sum("negatives"), LogSumExp("negatives"))
    alpha: float
    beta: float
    base: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if k == 0:
            return softplus(self.alpha * (self.base - u))
        if k == 2:
            return softplus(self.beta * (u - self.base))
        return -self.alpha * u if k == 1 else self.beta * u

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor | float:
        if k == 0:
            return -self.alpha * torch.sigmoid(self.alpha * (self.base - u))
        if k == 2:
            return self.beta * torch.sigmoid(self.beta * (u - self.base))
        return -self.alpha if k == 1 else self.beta


@dataclass(frozen=True)
class Hinge(Policy):
    """Hinges on both sides, and how many are above 0: contrastive and margin losses.

    Σ_{positives} [c₊+row_i-u]₊, their number above 0, Σ_{negatives} [u-c₋-row_i]₊, their number above 0
    """

    slots = (Sum("positives"), Sum("positives", constant=True), Sum("negatives"), Sum("negatives", constant=True))
    sparse = True
    c_pos: float
    c_neg: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        excess = self.c_pos + row - u if k < 2 else u - self.c_neg - row
        return relu(excess) if k in (0, 2) else (excess > 0).to(u.dtype)

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return -self.term(1, u, row, col) if k == 0 else self.term(3, u, row, col)


@dataclass(frozen=True)
class Mean(Policy):
    """Sums of u and the number of pairs on both sides: Multi-Similarity mining with equal weights."""

    slots = (Sum("positives"), Sum("positives", constant=True), Sum("negatives"), Sum("negatives", constant=True))
    mines = True

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return u if k in (0, 2) else torch.ones_like(u)

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> float:
        return 1.0


@dataclass(frozen=True)
class Lifted(Policy):
    """Positive pairs of the lifted structure loss, Song et al. 2016, eq. 4, given e = LSE_{negatives}(m₋-D).

    J_ij = log(e^{row_i} + e^{col_j}) + c₊ - u;  Σ ½[J]₊², Σ [J]₊σ(row_i - col_j) = the first's derivative by row_i,
    and how many J are above 0
    """

    slots = (Sum("positives"), Sum("positives", constant=True), Sum("positives", constant=True))
    c_pos: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        j = relu(torch.logaddexp(row, col) + self.c_pos - u)
        if k == 0:
            return 0.5 * j * j
        return torch.where(j > 0, j * torch.sigmoid(row - col), 0) if k == 1 else (j > 0).to(u.dtype)

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return -relu(torch.logaddexp(row, col) + self.c_pos - u)


@dataclass(frozen=True)
class ArcFace(Policy):
    """Softmax logits with an angular margin on the target, Deng et al. 2019, eq. 3.

    LSE_{positives}(s·cos(θ+m)), guarded past π by cosθ - m·sin m;  LSE_{negatives}(s·cosθ)
    """

    slots = LSE_BOTH
    margin: float  # in radians
    scale: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if k == 1:
            return self.scale * u
        m = self.margin
        c = u.clamp(-1, 1)
        sine = (1 - c * c).clamp_min(0).sqrt()
        inside = c >= math.cos(math.pi - m)  # θ <= π - m
        return self.scale * torch.where(inside, c * math.cos(m) - sine * math.sin(m), c - m * math.sin(m))

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor | float:
        if k == 1:
            return self.scale
        m = self.margin
        sine = (1 - u * u).clamp_min(0).sqrt()
        cot = torch.where(sine > 0, u / sine, 0)  # the gradient of sinθ at c=±1 is 0
        inside = u >= math.cos(math.pi - m)
        return self.scale * torch.where(inside, math.cos(m) + cot * math.sin(m), 1)


@dataclass(frozen=True)
class DROMargin(Policy):
    """Log-sum-exps of margin losses, Qi et al. 2020: LSE([m+λ-u]₊/γ₊) and LSE([m+u-λ]₊/γ₋)."""

    slots = LSE_BOTH
    margin: float
    threshold: float
    gamma_pos: float
    gamma_neg: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if k == 0:
            return relu(self.margin + self.threshold - u) / self.gamma_pos
        return relu(self.margin + u - self.threshold) / self.gamma_neg

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        live = (self.term(k, u, row, col) > 0).to(u.dtype)
        return -live / self.gamma_pos if k == 0 else live / self.gamma_neg


@dataclass(frozen=True)
class DROBinomial(Policy):
    """Log-sum-exps of binomial losses, Qi et al. 2020: l₊ = softplus(α(λ-u))/α, l₋ = softplus(β(u-λ))/β."""

    slots = LSE_BOTH
    alpha: float
    beta: float
    threshold: float
    gamma_pos: float
    gamma_neg: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if k == 0:
            return softplus(self.alpha * (self.threshold - u)) / (self.alpha * self.gamma_pos)
        return softplus(self.beta * (u - self.threshold)) / (self.beta * self.gamma_neg)

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if k == 0:
            return -torch.sigmoid(self.alpha * (self.threshold - u)) / self.gamma_pos
        return torch.sigmoid(self.beta * (u - self.threshold)) / self.gamma_neg


#: The names by which the ops know them; also the basenames in csrc/losses and triton_kernels/losses.
POLICIES: dict[str, type[Policy]] = {
    "exponential": Exponential,
    "binomial": Binomial,
    "bin_lifted": BinLifted,
    "hinge": Hinge,
    "mean": Mean,
    "lifted": Lifted,
    "arcface": ArcFace,
    "dro_margin": DROMargin,
    "dro_binomial": DROBinomial,
}
#: Those that the kernels of GPUs were written for, in their order. Others that are added run on plain PyTorch.
BUILT_IN = tuple(POLICIES)


def gpu_lacks(policy: str, mined: bool, pool_size: int, view: str) -> str | None:
    """What those kernels do not do, by the argument that asks for it."""
    return None if policy in BUILT_IN else f"policy: the kernels know {', '.join(BUILT_IN)}, not {policy!r}"
