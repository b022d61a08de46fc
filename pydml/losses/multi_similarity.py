"""Multi-Similarity loss with and without its mining, and its mining alone: Wang et al., CVPR 2019."""

from __future__ import annotations

from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense, lse
from pydml.policy import softplus


def mining_epsilon(epsilon: float | None, kind: str) -> float | None:
    """Check the ε of Multi-Similarity mining, which compares cosine similarities."""
    if epsilon is None:
        return None
    if kind != "cosine":
        raise ValueError(f"epsilon: got one with distance={kind!r}, wanted distance='cosine': mining compares S")
    return checks.number("epsilon", epsilon)


class MultiSimilarityLoss(MetricLoss):
    """Multi-Similarity loss, Wang et al. 2019, eq. 15; with ``epsilon`` after the mining of eq. 11-12.

    L = 1/B Σ_i { 1/α·log(1+Σ_{P_i} e^{-α(S-λ)}) + 1/β·log(1+Σ_{N_i} e^{β(S-λ)}) }

    Parameters
    ----------
    alpha, beta, base
        α, β, λ.
    epsilon
        ε: keep n if S_in > min_{P_i} S - ε and p if S_ip < max_{N_i} S + ε (0.1 in the paper). None: no mining.

    Examples
    --------
    >>> loss_fn = pydml.losses.MultiSimilarityLoss(epsilon=0.1)
    >>> embeddings = torch.randn(32, 16, requires_grad=True)
    >>> loss_fn(embeddings, torch.arange(32) % 8).backward()
    """

    distances = ("cosine", "euclidean", "squared")
    formula = "1/α·log(1+Σ₊ e^{-α(S-λ)}) + 1/β·log(1+Σ₋ e^{β(S-λ)})"
    paper = "Wang et al. 2019"
    pml = "MultiSimilarityLoss"

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
        batch.unique_pairs()
        base = self.oriented(self.base)
        stats = batch.stats("exponential", [-self.alpha, base, self.beta, base], epsilon=self.epsilon)
        return self.reduce(softplus(stats[:, 0]) / self.alpha + softplus(stats[:, 1]) / self.beta)

    def dense(self, batch: Dense) -> Value:
        batch.batch.unique_pairs()
        if self.epsilon is not None:
            batch.mine(self.epsilon)
        t = batch.u - self.oriented(self.base)
        positive = softplus(lse(-self.alpha * t, batch.pos)) / self.alpha
        negative = softplus(lse(self.beta * t, batch.neg)) / self.beta
        return self.reduce(positive + negative)


class MSMiningLoss(MetricLoss):
    """Multi-Similarity mining with equal weights, Wang et al. 2019, section 5.1, Table 2.

    L = 1/B Σ_i { mean_{mined P_i}(1-S) + mean_{mined N_i}(S) }, a mean over nothing being 0
    """

    takes_tuple = False
    formula = "mean₊(1-S) + mean₋(S) over MS-mined pairs"
    paper = "Wang et al. 2019"
    epsilon: float

    def __init__(self, epsilon: float = 0.1, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.epsilon = checks.number("epsilon", epsilon)

    def fused(self, batch: Batch) -> Value:
        s_pos, n_pos, s_neg, n_neg = batch.stats("mean", [], epsilon=self.epsilon).unbind(1)
        return self.reduce((n_pos - s_pos) / n_pos.clamp_min(1) + s_neg / n_neg.clamp_min(1))

    def dense(self, batch: Dense) -> Value:
        batch.mine(self.epsilon)
        positive = ((1 - batch.S) * batch.pos).sum(1) / batch.pos.sum(1).clamp_min(1)
        negative = (batch.S * batch.neg).sum(1) / batch.neg.sum(1).clamp_min(1)
        return self.reduce(positive + negative)
