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
from pydml.sums import add_at, add_at_


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

    def _ends(self, e: Tensor, a: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """e of both ends of listed pairs, which may be one row; a column that is no row has none."""
        rows = len(e)
        return e[a], torch.where((p < rows) & (p != a), e[p.clamp_max(rows - 1)], -torch.inf)

    def _hinges(self, both: Tensor, u: Tensor) -> Tensor:
        """[·]₊ of listed pairs, whose loss is half the square, from the log-sum-exp over the negatives of both ends."""
        # PML: a pair with no negative at either end has a sum of 0
        return relu(zero_if_empty(both) + self.oriented(self.pos_margin) - u)

    def _listed(self, hinges: Tensor, a: Tensor, rows: int) -> Tensor:
        """What each of the listed pairs counts in the average."""
        if self.reduction == "mean":
            return hinges.new_full((), 1 / max(len(a), 1))
        nothing = hinges.new_zeros(rows)
        above, pairs = (add_at(nothing, a, x.to(hinges.dtype)) for x in (hinges > 0, torch.ones_like(hinges)))
        return self._weights(above, pairs)[a]

    def _by_hand(self, e: Tensor, a: Tensor, p: Tensor, u: Tensor) -> Tensor:
        """The loss of listed pairs with its derivatives beside it: autograd's way through it takes twice as long."""
        known, value = e.detach(), u.detach()
        own, other = self._ends(known, a, p)
        both = torch.logaddexp(own, other)
        hinges = self._hinges(both, value)
        push = self._listed(hinges, a, len(e)) * hinges
        empty = torch.isneginf(both)
        shares = (torch.where(empty, 0, push * torch.exp(end - both)) for end in (own, other))
        slope = torch.zeros_like(known)
        for at, share in zip((a, p.clamp_max(len(e) - 1)), shares, strict=True):
            slope = add_at_(slope, at, share)
        loss = (0.5 * push * hinges).sum()
        # 0 with the slopes as its gradient
        return loss + (slope * (zero_if_empty(e) - zero_if_empty(known))).sum() - (push * (u - value)).sum()

    def fused(self, batch: Batch) -> Tensor:
        params = [0.0, 0.0, 1.0, self.oriented(self.neg_margin)]
        if batch.pairs is not None:
            a, p, a2, _ = batch.pairs
            if not len(a) or not len(a2):
                return batch.zero()
            stats, u, _ = batch.listed_stats("exponential", params)
            return self._by_hand(stats[:, 1], a, p, u)
        e = batch.stats("exponential", params)[:, 1]
        if batch.ref is None:
            # e enters the positive pairs as a number; the same pass sums its derivative, which is joined on here. Row i
            # meets the pair (i, j) twice, in row i and in row j, with equal weights: they have equally many positives.
            known, params = e.detach(), [self.oriented(self.pos_margin)]
            total, slope, above = batch.stats("lifted", params, row_field=known, col_field=known).unbind(1)
            weights = self._weights(above, batch.counts[0].to(e.dtype))
            e = zero_if_empty(e)
            return (weights * (total + 2 * slope.detach() * (e - e.detach()))).sum()
        a, _, p = batch.positive_pairs()
        loss = self._by_hand(e, a, p, batch.dots(a, p))
        return torch.where(torch.isneginf(e).all(), 0 * loss, loss)  # no negatives, no loss

    def dense(self, batch: Dense) -> Value:
        a, p, a2, _ = batch.pairs
        if not len(a) or not len(a2):
            return self.reduce(batch.batch.zeros()[:0]) if self.listing else batch.batch.zero()
        e = lse(batch.u - self.oriented(self.neg_margin), batch.neg)
        hinges = self._hinges(logaddexp(*self._ends(e, a, p)), batch.u[a, p])
        losses = 0.5 * hinges * hinges
        if self.listing:
            return {"loss": elements(losses, (a, p), "pos_pair")}
        return (self._listed(hinges, a, len(e)) * losses).sum()


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
