"""BinLifted: the average of binomial deviance and LiftedStruct* weights, Wang et al. 2019, supplement eq. 10."""

from __future__ import annotations

from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense, lse, zero_if_empty
from pydml.policy import softplus


class BinLiftedLoss(MetricLoss):
    """BinLifted loss: the loss whose pair weights are those of Wang et al. 2019, supplement eq. 10.

    L = 1/B Σ_i ½{ 1/α[Σ_{P_i} softplus(α(λ-S)) + LSE_{P_i}(-αS)] + 1/β[Σ_{N_i} softplus(β(S-λ)) + LSE_{N_i}(βS)] }
    """

    formula = "½{1/α[Σ₊ softplus(α(λ-S)) + LSE₊(-αS)] + 1/β[Σ₋ softplus(β(S-λ)) + LSE₋(βS)]}"
    paper = "Wang et al. 2019"

    def __init__(self, alpha: float = 2, beta: float = 50, base: float = 0.5, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.alpha = checks.number("alpha", alpha, above=0)
        self.beta = checks.number("beta", beta, above=0)
        self.base = checks.number("base", base)

    def fused(self, batch: Batch) -> Value:
        stats = zero_if_empty(batch.stats("bin_lifted", [self.alpha, self.beta, self.base]))
        sum_pos, lse_pos, sum_neg, lse_neg = stats.unbind(1)
        return self.reduce(0.5 * ((sum_pos + lse_pos) / self.alpha + (sum_neg + lse_neg) / self.beta))

    def dense(self, batch: Dense) -> Value:
        binomial_pos = (softplus(self.alpha * (self.base - batch.S)) * batch.pos).sum(1)
        binomial_neg = (softplus(self.beta * (batch.S - self.base)) * batch.neg).sum(1)
        positive = binomial_pos + zero_if_empty(lse(-self.alpha * batch.S, batch.pos))
        negative = binomial_neg + zero_if_empty(lse(self.beta * batch.S, batch.neg))
        return self.reduce(0.5 * (positive / self.alpha + negative / self.beta))
