"""Easy-positive and hard-negative triplets, first and second order: Xuan et al., «Extreme Triplet Learning»."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from pydml import checks
from pydml.losses.base import Common, MetricLoss, Value
from pydml.losses.batch import Batch, Dense
from pydml.policy import softplus
from pydml.tiled.sides import twins


class ExtremeTripletLoss(MetricLoss):
    """One extreme triplet an anchor: EPHN, EPSHN, HPHN, EPEN and their second-order losses.

    order 1: softplus((S_an-S_ap)/T);  order 2: softplus((½S_an²-S_ap+½S_ap²)/T);
    mean over anchors with a positive and a (semi-hard: S_an<S_ap) negative

    Parameters
    ----------
    positive
        ``"easy"``: the most similar positive, ``"hard"``: the least similar.
    negative
        ``"hard"``: the most similar negative, ``"semihard"``: the most similar below S_ap, ``"easy"``: the least.
    order, temperature
        1 or 2; T (0.1 in the authors' code, 1 in the paper).
    official
        What the authors' code does beside the formula: a positive with S > 0.9999 is a duplicate and is not looked at,
        an anchor counts only if S_ap > 0 and S_an > 0, and a semi-hard negative may have S_an = S_ap. Only with
        ``positive="easy"`` and a hard or semi-hard negative. Selected by blocks of rows in PyTorch, not by an engine.
    """

    #: Positives above this similarity are duplicates to the authors' code.
    DUPLICATE: ClassVar[float] = 0.9999

    takes_tuple = False
    formula = "softplus((S_an-S_ap)/T) or softplus((½S_an²-S_ap+½S_ap²)/T)"
    paper = "Extreme Triplet Learning 2020"

    def __init__(
        self,
        positive: str = "easy",
        negative: str = "hard",
        order: int = 1,
        temperature: float = 0.1,
        official: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.positive = checks.choice("positive", positive, ("easy", "hard"))
        self.negative = checks.choice("negative", negative, ("hard", "semihard", "easy"))
        self.order = checks.choice("order", checks.integer("order", order, least=1), (1, 2))
        self.temperature = checks.number("temperature", temperature, above=0)
        self.official = checks.flag("official", official)
        if official and (positive != "easy" or negative == "easy"):
            raise ValueError(
                f"official: got True with positive={positive!r}, negative={negative!r}, wanted 'easy' with 'hard' or "
                "'semihard': the authors' code has no others"
            )

    def _loss(self, s_ap: Tensor, s_an: Tensor) -> Tensor:
        if self.order == 1:
            return softplus((s_an - s_ap) / self.temperature)
        return softplus((0.5 * s_an * s_an - s_ap + 0.5 * s_ap * s_ap) / self.temperature)

    def _counted(self, s_ap: Tensor, s_an: Tensor, found: Tensor) -> Tensor:
        """Anchors that the mean is over."""
        return found & (s_ap > 0) & (s_an > 0) if self.official else found

    def fused(self, batch: Batch) -> Value:
        if self.official:
            p, n = batch.extremes_up_to(self.DUPLICATE, self.negative == "semihard")
        else:
            p, n = batch.extremes(self.positive, self.negative)
        a = torch.arange(len(p), device=p.device)
        s_ap, s_an = batch.dots(a, p.clamp_min(0)), batch.dots(a, n.clamp_min(0))
        values = self._loss(s_ap, s_an)
        return self.reduce(values, self._counted(s_ap, s_an, (p >= 0) & (n >= 0)) | values.isnan())

    def dense(self, batch: Dense) -> Value:
        s, same, diff = batch.S, batch.same, batch.diff
        first = twins(batch.y.detach()) if self.official else None
        if first is not None:  # equal columns tie, whatever bits the product gave them
            s = s[:, first]
        a = torch.arange(len(s), device=s.device)
        if self.official:
            same = same & (s <= self.DUPLICATE)
        if self.positive == "easy":
            p = s.masked_fill(~same, -torch.inf).argmax(1)
        else:
            p = s.masked_fill(~same, torch.inf).argmin(1)
        if self.negative == "semihard":
            diff = diff & ((s <= s[a, p][:, None]) if self.official else (s < s[a, p][:, None]))
        if self.negative == "easy":
            n = s.masked_fill(~diff, torch.inf).argmin(1)
        else:
            n = s.masked_fill(~diff, -torch.inf).argmax(1)
        s_ap, s_an = s[a, p], s[a, n]
        return self.reduce(self._loss(s_ap, s_an), self._counted(s_ap, s_an, same.any(1) & diff.any(1)))
