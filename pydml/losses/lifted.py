"""Lifted structure losses: the original (Song et al. 2016), the generalised (Hermans et al. 2017), LiftedStruct*."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense, logaddexp, lse, zero_if_empty
from pydml.losses.multi_similarity import mining_epsilon
from pydml.reducers import elements
from pydml.sums import add_at


class LiftedStructureLoss(MetricLoss):
    """Lifted structure loss, Song et al. 2016, eq. 4, over ordered positive pairs.

    L = mean_{(i,j) positive} ½[log(Σ_{N_i} e^{m₋-D_ik} + Σ_{N_j} e^{m₋-D_jk}) + D_ij - m₊]₊²

    With a reference set N_j is that of row j of the batch, as in PML: right if column j is another view of row j
    """

    distances = ("euclidean", "cosine", "squared")
    over_anchors = False
    reductions = ("mean", "sum", "nonzero", "anchor")
    lists = True
    formula = "mean over positive pairs of ½[logaddexp(e_i, e_j)+D-m₊]₊², e_i = LSE₋(m₋-D)"
    paper = "Song et al. 2016"
    pml = "LiftedStructureLoss"

    def __init__(self, neg_margin: float = 1, pos_margin: float = 0, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.neg_margin = checks.number("neg_margin", neg_margin)
        self.pos_margin = checks.number("pos_margin", pos_margin)

    def _weights(self, above: Tensor, pairs: Tensor) -> Tensor:
        """What a pair of each row counts in the average, from the rows' numbers of pairs above 0 and of pairs."""
        if self.reduction == "anchor":
            return 1 / (pairs.clamp_min(1) * len(pairs))
        if self.reduction == "sum":
            return torch.ones_like(above)
        return (1 / (above if self.reduction == "nonzero" else pairs).sum().clamp_min(1)).expand(len(pairs))

    def _pair_losses(self, e: Tensor, a: Tensor, p: Tensor, u: Tensor) -> Tensor:
        """½[·]₊² of listed pairs from e_i = LSE over the negatives of row i; the two ends of a pair may be one row."""
        rows = len(e)
        other = torch.where((p < rows) & (p != a), e[p.clamp_max(rows - 1)], -torch.inf)
        # PML: a pair with no negative at either end has a sum of 0
        j = relu(zero_if_empty(logaddexp(e[a], other)) + self.oriented(self.pos_margin) - u)
        return 0.5 * j * j

    def _listed(self, losses: Tensor, a: Tensor, rows: int) -> Tensor:
        nothing = losses.new_zeros(rows)
        above, pairs = (add_at(nothing, a, x.to(losses.dtype)) for x in (losses > 0, torch.ones_like(losses)))
        return (self._weights(above, pairs)[a] * losses).sum()

    def fused(self, batch: Batch) -> Tensor:
        e = batch.stats("exponential", [0.0, 0.0, 1.0, self.oriented(self.neg_margin)])[:, 1]
        if batch.pairs is None and batch.ref is None:
            # e enters the positive pairs as a number; the same pass sums its derivative, which is joined on here. Row i
            # meets the pair (i, j) twice, in row i and in row j, with equal weights: they have equally many positives.
            known, params = e.detach(), [self.oriented(self.pos_margin)]
            total, slope, above = batch.stats("lifted", params, row_field=known, col_field=known).unbind(1)
            weights = self._weights(above, batch.counts[0].to(e.dtype))
            e = zero_if_empty(e)
            return (weights * (total + 2 * slope.detach() * (e - e.detach()))).sum()
        if batch.pairs is not None:
            a, p, a2, _ = batch.pairs
            if not len(a) or not len(a2):
                return batch.zero()
        else:
            a, _, p = batch.positive_pairs()
        loss = self._listed(self._pair_losses(e, a, p, batch.dots(a, p)), a, len(e))
        return torch.where(torch.isneginf(e).all(), 0 * loss, loss)  # no negatives, no loss

    def dense(self, batch: Dense) -> Value:
        a, p, a2, _ = batch.pairs
        if not len(a) or not len(a2):
            return self.reduce(batch.batch.zeros()[:0]) if self.listing else batch.batch.zero()
        e = lse(batch.u - self.oriented(self.neg_margin), batch.neg)
        losses = self._pair_losses(e, a, p, batch.u[a, p])
        return {"loss": elements(losses, (a, p), "pos_pair")} if self.listing else self._listed(losses, a, len(e))


class GeneralizedLiftedStructureLoss(MetricLoss):
    """Generalised lifted structure loss, Hermans et al. 2017; Wang et al. 2019, eq. 6.

    L = 1/B Σ_i [LSE_{P_i}(D-m₊) + LSE_{N_i}(m₋-D)]₊, an empty side counted 0;
    ``distance="cosine"``: LSE_{P_i}(m₊-S) and LSE_{N_i}(S-m₋)
    """

    distances = ("euclidean", "cosine", "squared")
    formula = "[LSE₊(D-m₊) + LSE₋(m₋-D)]₊"
    paper = "Hermans et al. 2017"
    pml = "GeneralizedLiftedStructureLoss"

    def __init__(self, neg_margin: float = 1, pos_margin: float = 0, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.neg_margin = checks.number("neg_margin", neg_margin)
        self.pos_margin = checks.number("pos_margin", pos_margin)

    def fused(self, batch: Batch) -> Value:
        batch.unique_pairs()
        params = [-1.0, self.oriented(self.pos_margin), 1.0, self.oriented(self.neg_margin)]
        positive, negative = zero_if_empty(batch.stats("exponential", params)).unbind(1)
        return self.reduce(relu(positive + negative))

    def dense(self, batch: Dense) -> Value:
        batch.batch.unique_pairs()
        positive = zero_if_empty(lse(self.oriented(self.pos_margin) - batch.u, batch.pos))
        negative = zero_if_empty(lse(batch.u - self.oriented(self.neg_margin), batch.neg))
        return self.reduce(relu(positive + negative))


class LiftedStarLoss(MetricLoss):
    """LiftedStruct*, Wang et al. 2019, eq. 16: no hinge, no margin.

    L = 1/B Σ_i { 1/α·LSE_{P_i}(-αS) + 1/β·LSE_{N_i}(βS) }, an empty side counted 0; ``epsilon`` mines first
    """

    formula = "1/α·LSE₊(-αS) + 1/β·LSE₋(βS)"
    paper = "Wang et al. 2019"

    def __init__(
        self, alpha: float = 2, beta: float = 50, epsilon: float | None = None, **common: Unpack[Common]
    ) -> None:
        super().__init__(**common)
        self.alpha = checks.number("alpha", alpha, above=0)
        self.beta = checks.number("beta", beta, above=0)
        self.epsilon = mining_epsilon(epsilon, self.kind)

    def fused(self, batch: Batch) -> Value:
        stats = batch.stats("exponential", [-self.alpha, 0.0, self.beta, 0.0], epsilon=self.epsilon)
        positive, negative = zero_if_empty(stats).unbind(1)
        return self.reduce(positive / self.alpha + negative / self.beta)

    def dense(self, batch: Dense) -> Value:
        if self.epsilon is not None:
            batch.mine(self.epsilon)
        positive = zero_if_empty(lse(-self.alpha * batch.S, batch.pos)) / self.alpha
        return self.reduce(positive + zero_if_empty(lse(self.beta * batch.S, batch.neg)) / self.beta)
