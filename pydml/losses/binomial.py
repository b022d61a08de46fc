"""Binomial deviance loss: Yi et al. 2014; Wang et al. 2019, eq. 9."""

from __future__ import annotations

from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense
from pydml.losses.multi_similarity import mining_epsilon
from pydml.policy import softplus


class BinomialDevianceLoss(MetricLoss):
    """Binomial deviance loss, Wang et al. 2019, eq. 9, averaged over the batch.

    L = 1/B Σ_i { mean_{P_i} softplus(α(λ-S)) + mean_{N_i} softplus(β(S-λ)) }, a mean over nothing being 0

    Parameters
    ----------
    alpha, beta, base
        α, β, λ.
    epsilon
        ε of the Multi-Similarity mining done first; None: no mining.
    """

    formula = "mean₊ softplus(α(λ-S)) + mean₋ softplus(β(S-λ))"
    paper = "Yi et al. 2014"

    def __init__(
        self,
        alpha: float = 2,
        beta: float = 50,
        base: float = 0.5,
        epsilon: float | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.alpha = checks.number("alpha", alpha, above=0)
        self.beta = checks.number("beta", beta, above=0)
        self.base = checks.number("base", base)
        self.epsilon = mining_epsilon(epsilon, self.kind)

    def fused(self, batch: Batch) -> Value:
        params = [self.alpha, self.beta, self.base]
        positive, n_pos, negative, n_neg = batch.stats("binomial", params, epsilon=self.epsilon).unbind(1)
        return self.reduce(positive / n_pos.clamp_min(1) + negative / n_neg.clamp_min(1))

    def dense(self, batch: Dense) -> Value:
        if self.epsilon is not None:
            batch.mine(self.epsilon)
        positive = softplus(self.alpha * (self.base - batch.S)) * batch.pos
        negative = softplus(self.beta * (batch.S - self.base)) * batch.neg
        mean_pos = positive.sum(1) / batch.pos.sum(1).clamp_min(1)
        return self.reduce(mean_pos + negative.sum(1) / batch.neg.sum(1).clamp_min(1))
