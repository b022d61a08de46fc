"""Distributionally robust losses over pairs: top-K, KL and grouped KL, Qi et al. 2020."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import relu
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense, lse, lse_of_all
from pydml.policy import softplus


class _DROLoss(MetricLoss):
    """What the family shares: the loss l of one pair.

    margin: [m+λ-S]₊ for positives, [m+S-λ]₊ for negatives;
    binomial: softplus(α(λ-S))/α for positives, softplus(β(S-λ))/β for negatives
    """

    takes_tuple = False
    paper = "Qi et al. 2020"

    def _set(self, base_loss: str, margin: float, threshold: float, alpha: float, beta: float) -> None:
        self.base_loss = checks.choice("base_loss", base_loss, ("margin", "binomial"))
        self.margin = checks.number("margin", margin, least=0)
        self.threshold = checks.number("threshold", threshold)
        self.alpha = checks.number("alpha", alpha, above=0)
        self.beta = checks.number("beta", beta, above=0)

    def pair_loss(self, s: Tensor, same: Tensor) -> Tensor:
        """l of pairs."""
        if self.base_loss == "margin":
            return relu(self.margin + torch.where(same, self.threshold - s, s - self.threshold))
        positive = softplus(self.alpha * (self.threshold - s)) / self.alpha
        return torch.where(same, positive, softplus(self.beta * (s - self.threshold)) / self.beta)

    def policy(self, gamma_pos: float, gamma_neg: float) -> tuple[str, list[float]]:
        """The engines' name and numbers for l/γ."""
        if self.base_loss == "margin":
            return "dro_margin", [self.margin, self.threshold, gamma_pos, gamma_neg]
        return "dro_binomial", [self.alpha, self.beta, self.threshold, gamma_pos, gamma_neg]


class DROTopKLoss(_DROLoss):
    """Top-K DRO, Qi et al. 2020, section 3.2: the mean of the k largest pair losses over unordered pairs.

    ``balanced`` (TopK-PN): the k/2 largest of the positives and the k/2 largest of the negatives. Fewer pairs than
    asked for: all of them, divided by their number. Ties go to the smaller (i, j).

    ``matched``, with ``balanced``: where there are fewer positives than k/2, as many negatives as positives, as the
    authors' code does (which stops with an error where the negatives are fewer still).
    """

    over_anchors = False
    reductions = ("mean",)
    formula = "mean of the k largest pair losses"

    def __init__(
        self,
        k: int,
        base_loss: str = "margin",
        margin: float = 0.2,
        threshold: float = 0.5,
        alpha: float = 2,
        beta: float = 50,
        balanced: bool = False,
        matched: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.k = checks.integer("k", k, least=1)
        self._set(base_loss, margin, threshold, alpha, beta)
        self.balanced = checks.flag("balanced", balanced)
        if balanced and k % 2:
            raise ValueError(f"k: got {k} with balanced=True, wanted an even number")
        self.matched = checks.flag("matched", matched)
        if matched and not balanced:
            raise ValueError("matched: got True with balanced=False, wanted both: it is about the two sides")

    def fused(self, batch: Batch) -> Tensor:
        policy, params = self.policy(1.0, 1.0)
        rows, cols = batch.size
        total = rows * cols if batch.ref is not None else rows * (rows - 1) // 2
        k = min(self.k // 2 if self.balanced else self.k, total)
        if not k:
            return batch.zero()
        sides = ("positives", "negatives") if self.balanced else ("all",)
        chosen = [batch.topk(policy, params, k, side) for side in sides]
        i, j = (torch.cat(part) for part in zip(*chosen, strict=True))
        real = i >= 0
        if self.matched:  # the largest losses come first on each side
            positives = batch.positives().sum() // (2 if batch.ref is None else 1)
            real = real & (torch.arange(len(i), device=i.device) - k < positives)
        i, j = torch.where(real, i, 0), torch.where(real, j, 0)
        assert batch.ref_labels is not None
        same = batch.known_labels()[i] == batch.ref_labels[j]
        losses = self.pair_loss(batch.dots(i, j), same)
        return torch.where(real | losses.isnan(), losses, 0).sum() / real.sum().clamp_min(1)

    def dense(self, batch: Dense) -> Tensor:
        pairs = batch.same | batch.diff
        if batch.batch.ref is None:
            pairs = pairs.triu(1)
        losses = self.pair_loss(batch.S, batch.same)
        sides = (batch.same & pairs, batch.diff & pairs) if self.balanced else (pairs,)
        k = [self.k // len(sides)] * len(sides)
        if self.matched:
            k[1] = min(k[1], int(sides[0].sum()))
        falling = [losses[side].sort(descending=True, stable=True).values for side in sides]
        chosen = torch.cat([values[:most] for values, most in zip(falling, k, strict=True)])
        return chosen.sum() / max(len(chosen), 1)


class DROKLLoss(_DROLoss):
    """KL-regularised DRO, Qi et al. 2020, section 3.2: γ·log mean over unordered pairs of e^{l/γ}."""

    over_anchors = False
    reductions = ("mean",)
    formula = "γ·log mean e^{l/γ} over all pairs"

    def __init__(
        self,
        gamma: float = 0.1,
        base_loss: str = "margin",
        margin: float = 0.2,
        threshold: float = 0.5,
        alpha: float = 2,
        beta: float = 50,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.gamma = checks.number("gamma", gamma, above=0)
        self._set(base_loss, margin, threshold, alpha, beta)

    def fused(self, batch: Batch) -> Tensor:
        rows, cols = batch.size
        number = rows * (cols - int(batch.has_selves))
        if not number:
            return batch.zero()
        stats = batch.stats(*self.policy(self.gamma, self.gamma))
        return self.gamma * (lse_of_all(stats) - math.log(number))

    def dense(self, batch: Dense) -> Tensor:
        pairs = batch.same | batch.diff
        if batch.batch.ref is None:
            pairs = pairs.triu(1)
        losses = self.pair_loss(batch.S, batch.same)[pairs]
        if not len(losses):
            return batch.batch.zero()
        return self.gamma * (lse_of_all(losses / self.gamma) - math.log(len(losses)))


class DROKLGroupedLoss(_DROLoss):
    """Grouped KL DRO, Qi et al. 2020, eq. 7, averaged over the batch.

    L = 1/B Σ_i { γ₊·log mean_{P_i} e^{l/γ₊} + γ₋·log mean_{N_i} e^{l/γ₋} }, an empty side counted 0
    """

    formula = "γ₊·log mean₊ e^{l/γ₊} + γ₋·log mean₋ e^{l/γ₋}"

    def __init__(
        self,
        gamma_pos: float = 0.1,
        gamma_neg: float = 0.1,
        base_loss: str = "margin",
        margin: float = 0.2,
        threshold: float = 0.5,
        alpha: float = 2,
        beta: float = 50,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.gamma_pos = checks.number("gamma_pos", gamma_pos, above=0)
        self.gamma_neg = checks.number("gamma_neg", gamma_neg, above=0)
        self._set(base_loss, margin, threshold, alpha, beta)

    def fused(self, batch: Batch) -> Value:
        stats = batch.stats(*self.policy(self.gamma_pos, self.gamma_neg))
        number = torch.stack(batch.counts, 1)
        counted = (number > 0) | stats.isnan()
        positive, negative = torch.where(counted, stats - number.clamp_min(1).to(stats.dtype).log(), 0).unbind(1)
        return self.reduce(self.gamma_pos * positive + self.gamma_neg * negative)

    def dense(self, batch: Dense) -> Value:
        losses = self.pair_loss(batch.S, batch.same)
        total = torch.zeros_like(losses[:, 0])
        for gamma, side in ((self.gamma_pos, batch.pos), (self.gamma_neg, batch.neg)):
            mean = lse(losses / gamma, side) - side.sum(1).log()
            total = total + gamma * torch.where(side.sum(1) > 0, mean, 0)
        return self.reduce(total)
