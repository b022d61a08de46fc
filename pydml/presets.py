"""Settings of losses by name: ``preset("ms/paper")``, what the papers, their authors' code and the thesis used.

Names are ``system/where``: ``paper``; ``official``, the code of the system's authors; ``code``, other code that a
paper's numbers come from; ``thesis``, the text of «Metric Learning: A Deep Dive» (Psomas 2020), ``thesis-code``, what
its code does instead; ``tuned``, found by its search; ``pml``, the defaults of pytorch-metric-learning. Where sources
disagree, each has a name of its own and the note says so.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from pydml.losses import LOSSES, MetricLoss

Source = Literal["paper", "code", "thesis", "tuned"]


@dataclass(frozen=True)
class Preset:
    """One setting of a loss, and where it stands."""

    loss: type[MetricLoss]
    #: Arguments of the class; those not named keep their defaults.
    kwargs: Mapping[str, Any]
    #: What it means: equation, table or code, and who says otherwise.
    note: str
    source: Source
    #: What else the setting needs: miner, sampler, batch, optimizer, learning rate of the loss' own parameters.
    recipe: Mapping[str, str] = field(default_factory=dict)
    #: Arguments that depend on the data set, beside those of the class that have no default.
    needs: tuple[str, ...] = ()

    @property
    def required(self) -> list[str]:
        """Arguments that the caller must give."""
        parameters = inspect.signature(self.loss).parameters.values()
        bare = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        return [name for name in (*bare, *self.needs) if name not in self.kwargs]


def mean_squared_norm(embeddings: Tensor) -> Tensor:
    """1/B Σ ‖f‖²: the L2 penalty of the N-pairs loss (Sohn 2016), for a batch of N anchors and their N positives.

    >>> mean_squared_norm(2 * torch.eye(3))
    tensor(4.)
    """
    return embeddings.square().sum(1).mean()


_FIVE = "MPerClassSampler with m=5"
_MS = {"sampler": _FIVE, "optimizer": "Adam, learning rate 1e-5 (supplement, section 4)"}
_DRO = {
    "sampler": _FIVE,
    "batch": "80 on CUB and Cars, 640 on In-Shop",
    "optimizer": "Adam, learning rate 1e-5",
}
_EXTREME = {
    "sampler": "MPerClassSampler with m=8 on CUB, 16 on Cars, 2 on SOP and In-Shop",
    "batch": "128",
    "optimizer": "SGD, learning rate 0.0025 on CUB, else 0.005, divided by 10 after epochs 20 and 30 of 40",
}
_VECTOR_FIELD = {
    "sampler": "MPerClassSampler with m=16, on Cars",
    "optimizer": "SGD, learning rate 1e-5, two epochs: an experiment on where triplets move, not a recipe",
}
_THESIS = {
    "batch": "100 with ResNet50, 180 with GoogLeNet and BNInception",
    "optimizer": "AdamW with StepLR, learning rates in its Table 3",
}
_DISTANCE_WEIGHTED = "DistanceWeightedMiner(cutoff=0.5, nonzero_loss_cutoff=1.4)"

_PRESETS: dict[str, Preset] = {}


def _add(
    name: str,
    loss: str,
    source: Source,
    note: str,
    recipe: Mapping[str, str] | None = None,
    needs: tuple[str, ...] = (),
    **kwargs: Any,
) -> None:
    assert name not in _PRESETS, name
    _PRESETS[name] = Preset(
        LOSSES[loss], MappingProxyType(kwargs), note, source, MappingProxyType(dict(recipe or {})), needs
    )


# Multi-Similarity and the losses of its ablation (Wang et al. 2019, Table 2)
_add(
    "ms/paper", "ms", "paper",
    "Wang et al. 2019, eq. 15 after the mining of eq. 11-12; numbers in section 5. Its authors' code has λ=0.5 and "
    "β=40 (ms/official).",
    _MS, alpha=2, beta=50, base=1.0, epsilon=0.1,
)  # fmt: skip
_add(
    "ms/official", "ms", "code",
    "The authors' code: λ=0.5 and β=40 where the paper says 1 and 50. It also drops positives with S >= 1-1e-5 by "
    "value; here only the anchor itself is left out, by index.",
    _MS, alpha=2, beta=40, base=0.5, epsilon=0.1,
)  # fmt: skip
_add(
    "ms/weighting", "ms", "paper",
    "«MS weighting» of Wang et al. 2019, Table 2: eq. 15 over all pairs, no mining.",
    _MS, alpha=2, beta=50, base=1.0,
)  # fmt: skip
_add(
    "ms/dro", "ms", "paper",
    "What Qi et al. 2020 compare with (section 4.2): λ=0.5. They give no ε: their Cars row is «MS weighting» of Wang "
    "et al., without mining, while their run times are with mining.",
    _DRO, alpha=2, beta=50, base=0.5,
)  # fmt: skip
_add(
    "ms/thesis", "ms", "thesis",
    "Thesis, Tables 4 and 5: λ=0.5 where Wang et al. say 1.",
    {"sampler": _FIVE, **_THESIS}, alpha=2, beta=50, base=0.5, epsilon=0.1,
)  # fmt: skip
_add(
    "ms/thesis-tuned", "ms", "tuned",
    "Thesis, Table 15: found on 10 held-out classes of CUB, R@1 65.61 (Table 16). Its code has more digits "
    "(ms/thesis-tuned-code).",
    {"sampler": _FIVE, **_THESIS}, alpha=18, beta=76, base=0.8, epsilon=0.4,
)  # fmt: skip
_add(
    "ms/thesis-tuned-code", "ms", "code",
    "The thesis' code behind ms/thesis-tuned, before rounding.",
    {"sampler": _FIVE, **_THESIS}, alpha=17.97, beta=75.66, base=0.77, epsilon=0.39,
)  # fmt: skip
_add(
    "ms-mining/paper", "ms_mining", "paper",
    "«MS mining» of Wang et al. 2019, Table 2: mined pairs with equal weights, here a mean on each side as in an "
    "author's earlier code; the paper prints no formula.",
    _MS, epsilon=0.1,
)  # fmt: skip
_add(
    "binomial/paper", "binomial", "paper",
    "Wang et al. 2019, eq. 9. The paper prints numbers only for eq. 15, whose α, β, λ it says are those of eq. 9; it "
    "sums over anchors where this is their mean (reduction='sum' gives its scale).",
    _MS, alpha=2, beta=50, base=1.0,
)  # fmt: skip
_add(
    "binomial/paper-mined", "binomial", "paper",
    "«Binomial_m» of Wang et al. 2019, Table 2: eq. 9 after the mining of eq. 11-12.",
    _MS, alpha=2, beta=50, base=1.0, epsilon=0.1,
)  # fmt: skip
_add(
    "binomial/code", "binomial", "code",
    "An MS author's earlier code: eq. 9 with λ=0.5 and β=40. Its branch with mining multiplies the sides by 2/α and "
    "2/β; that is not done here.",
    alpha=2, beta=40, base=0.5,
)  # fmt: skip
_add(
    "lifted-star/paper", "lifted_star", "paper",
    "LiftedStruct* of Wang et al. 2019, eq. 16.",
    _MS, alpha=2, beta=50,
)  # fmt: skip
_add(
    "lifted-star/paper-mined", "lifted_star", "paper",
    "«LiftedStruct*_m» of Wang et al. 2019, Table 2: eq. 16 after the mining of eq. 11-12.",
    _MS, alpha=2, beta=50, epsilon=0.1,
)  # fmt: skip
_add(
    "lifted-star/code", "lifted_star", "code",
    "An MS author's earlier code: 40 for the negatives (there called alpha) where the paper says 50, and prefactors "
    "2/α and 2/β: its value is twice this one.",
    alpha=2, beta=40,
)  # fmt: skip
_add(
    "lifted-star/thesis-code", "lifted_star", "code",
    "What the thesis trains as LiftedStructure: lifted-star/code with mining always on, its margin unused, although "
    "its eq. 2.21 and Table 4 are generalized-lifted/thesis. ε is that of its Table 4 for Multi-Similarity.",
    _THESIS, alpha=2, beta=40, epsilon=0.1,
)  # fmt: skip
_add(
    "bin-lifted/paper", "bin_lifted", "paper",
    "BinLifted of Wang et al. 2019, supplement eq. 10. The paper prints numbers only for eq. 15; these are they.",
    _MS, alpha=2, beta=50, base=1.0,
)  # fmt: skip

# Contrastive, triplet, lifted structure, N-pairs, NCA, histogram
_add(
    "contrastive/paper", "contrastive", "paper",
    "Wang et al. 2019, eq. 4 (thesis, eq. 2.15), with 1-S for -S; each side averaged over all its pairs, for which "
    "neither gives a rule. λ=0.5 is the thesis' (Table 4); Wang et al. print none.",
    distance="cosine", pos_margin=1, neg_margin=0.5, denominator="pairs",
)  # fmt: skip
_add(
    "contrastive/xbm", "contrastive", "code",
    "The XBM authors' code: sums over the batch divided by its size. It adds S where this adds S-λ: same gradient, "
    "another value.",
    distance="cosine", pos_margin=1, neg_margin=0.5, denominator="batch",
)  # fmt: skip
_add(
    "contrastive/thesis", "contrastive", "thesis",
    "Thesis, eq. 2.15 and Table 4: λ=0.5 on cosines, averaged over nonzero terms as in its code. Its code takes "
    "Euclidean distances (contrastive/thesis-code).",
    _THESIS, distance="cosine", pos_margin=1, neg_margin=0.5,
)  # fmt: skip
_add(
    "contrastive/thesis-code", "contrastive", "code",
    "The thesis' code: PML's loss with the text's 0.5 as a Euclidean margin.",
    _THESIS, neg_margin=0.5,
)  # fmt: skip
_add(
    "triplet/thesis", "triplet", "thesis",
    "Thesis, eq. 2.17 with the semi-hard negatives of eq. 2.20, Tables 4 and 5. Its code takes PML's semi-hard miner "
    "instead: every triplet inside the margin.",
    _THESIS, distance="cosine", margin=0.1, triplets="semihard",
)  # fmt: skip
_add(
    "triplet/thesis-hard", "triplet", "thesis",
    "Thesis, eq. 2.17 with the hardest positive and negative of eq. 2.18-2.19, margin of Table 4; described there, not "
    "among its results.",
    _THESIS, distance="cosine", margin=0.1, triplets="hard",
)  # fmt: skip
_add(
    "lifted/official", "lifted", "code",
    "The authors' code of Song et al. 2016: margin 1, embeddings not normalised. It goes over unordered pairs: same "
    "mean.",
    neg_margin=1, pos_margin=0, normalize_embeddings=False,
)  # fmt: skip
_add(
    "generalized-lifted/paper", "generalized_lifted", "paper",
    "Wang et al. 2019, eq. 6, here the mean over anchors. They print no λ; 0.5 is that of the thesis and of Qi et al.",
    distance="cosine", pos_margin=0.5, neg_margin=0,
)  # fmt: skip
_add(
    "generalized-lifted/thesis", "generalized_lifted", "thesis",
    "Thesis, eq. 2.21 and Table 4, here the mean over anchors. Its code trains lifted-star/thesis-code.",
    _THESIS, distance="cosine", pos_margin=0.5, neg_margin=0,
)  # fmt: skip
_add(
    "generalized-lifted/dro", "generalized_lifted", "paper",
    "Qi et al. 2020, eq. 3, with λ on both sides, where it cancels, so that the margin does nothing.",
    _DRO, distance="cosine", pos_margin=0.5, neg_margin=0.5,
)  # fmt: skip
_add(
    "n-pairs/paper", "n_pairs", "paper",
    "Sohn 2016: raw dot products and an L2 penalty on the norms. Its weight is 0.02 by the thesis' Table 4; others "
    "read 0.02·0.25 in the author's implementation.",
    {"sampler": "MPerClassSampler with m=2"},
    normalize_embeddings=False, embedding_regularizer=mean_squared_norm, embedding_reg_weight=0.02,
)  # fmt: skip
_add(
    "n-pairs/thesis", "n_pairs", "thesis",
    "Thesis, Table 4: normalised, l2=0.02 on the raw embeddings. Its eq. 2.22 is ambiguous about positives, and its "
    "code has no penalty (n-pairs/pml).",
    _THESIS, embedding_regularizer=mean_squared_norm, embedding_reg_weight=0.02,
)  # fmt: skip
_add(
    "nca/paper", "nca", "paper",
    "Wang et al. 2019, supplement eq. 1, on cosines, with the minus sign that is missing there and without the anchor "
    "itself. PML's is on squared distances: twice the scale.",
    distance="cosine", softmax_scale=1,
)  # fmt: skip
_add(
    "histogram/rdml", "histogram", "code",
    "The «Revisiting Deep Metric Learning» code: 65 nodes, so 64 bins. Wang et al. 2019, supplement eq. 3-5, give no "
    "number.",
    n_bins=64,
)  # fmt: skip

# Margin loss
_add(
    "margin/official", "margin", "code",
    "The code of Wu et al. 2017: one learned β for each class, ν=0.",
    {"miner": _DISTANCE_WEIGHTED, "parameters": "learning rate 0.1 for β"}, ("num_classes",),
    margin=0.2, nu=0, beta=1.2, learn_beta=True,
)  # fmt: skip
_add(
    "margin/thesis", "margin", "thesis",
    "Thesis, Tables 4 and 5, on Euclidean distances: as a cosine, which its eq. 2.23 has, β=1.2 would be out of reach. "
    "One β, for which it says nothing else. Its code has margin 0.2 (margin/thesis-code).",
    {"miner": _DISTANCE_WEIGHTED, "parameters": "learning rate 5e-5 for β", **_THESIS},
    margin=0.5, beta=1.2, learn_beta=True,
)  # fmt: skip
_add(
    "margin/thesis-code", "margin", "code",
    "The thesis' code: margin 0.2 where its Table 4 says 0.5.",
    {"miner": _DISTANCE_WEIGHTED, "parameters": "learning rate 5e-5 for β", **_THESIS},
    margin=0.2, beta=1.2, learn_beta=True,
)  # fmt: skip
_add(
    "margin/dro", "margin", "paper",
    "The margin loss of Qi et al. 2020, sections 3.3 and 4.2, on cosines, with the y=±1 that its formula needs; what "
    "they train with distance-weighted sampling to compare.",
    {"miner": _DISTANCE_WEIGHTED, **_DRO}, distance="cosine", margin=0.2, beta=0.5,
)  # fmt: skip

# Easy positives and hard negatives (Extreme Triplet Learning)
for _order, _suffix, _equation in ((1, "", 1), (2, "-2nd", 16)):
    for _system, _positive, _negative, _words in (
        ("ephn", "easy", "hard", "easy positive, hard negative; figure 4 and Table 1"),
        ("epshn", "easy", "semihard", "easy positive, semi-hard negative; figure 4"),
        ("hphn", "hard", "hard", "hard positive, hard negative; section 6.1, one triplet for each vector there"),
        ("epen", "easy", "easy", "easy positive, easy negative; section 6.1, one triplet for each vector there"),
    ):
        _add(
            f"{_system}{_suffix}/paper", "extreme_triplet", "paper",
            f"Extreme Triplet Learning, eq. {_equation} ({_words}). No temperature is printed, so T=1"
            + ("; its code has 0.1." if _order == 1 else "; code of the second order was never released."),
            _VECTOR_FIELD if _system in ("hphn", "epen") else _EXTREME,
            positive=_positive, negative=_negative, order=_order, temperature=1,
        )  # fmt: skip
for _system, _negative in (("ephn", "hard"), ("epshn", "semihard")):
    _add(
        f"{_system}/official", "extreme_triplet", "code",
        "The authors' easy-positive code: T=0.1; positives with S > 0.9999 are left out, and so are anchors whose best "
        "positive or negative has S <= 0. Without any anchor it is NaN there, 0 here.",
        _EXTREME, positive="easy", negative=_negative, order=1, temperature=0.1, official=True,
    )  # fmt: skip

# FastAP
_add(
    "fastap/paper", "fast_ap", "paper",
    "Cakir et al. 2019, supplement eq. 21. It leaves the number of bins open: 10 is the authors' code's.",
    {
        "sampler": "CategorySampler: two categories a batch, half of it from each, whole classes; SOP 5 batches a pair "
        "of categories (330 an epoch), In-Shop 2 (506), VehicleID one labelled category and unlabelled classes",
        "batch": "320 with GoogLeNet, 256 with ResNet-18, 96 with ResNet-50",
    },
    num_bins=10,
)  # fmt: skip
_add(
    "fastap/official", "fast_ap", "code",
    "The authors' code: 10 bins, so 11 centres. Its backward returns B/2 times the true gradient and ignores the "
    "gradient that it is given: scale the learning rate when a recipe is carried over.",
    num_bins=10,
)  # fmt: skip

# Distributionally robust losses (Qi et al. 2020)
for _system, _balanced in (("dro-topk", False), ("dro-topk-pn", True)):
    _name = "DRO-TopK-PN" if _balanced else "DRO-TopK"
    _options: dict[str, Any] = {"margin": 0.2, "threshold": 0.5, "balanced": _balanced}
    _matched = " With fewer positive pairs than K it takes as many negative ones, here too." if _balanced else ""
    _add(
        f"{_system}/paper", "dro_topk", "paper",
        f"{_name}_M of Qi et al. 2020, section 3.2, with K=2B of section 4.2 at B=80; K is tuned over 160, 200, 240, "
        "280 on CUB and Cars.",
        _DRO, k=160, base_loss="margin", **_options,
    )  # fmt: skip
    _add(
        f"{_system}/paper-in-shop", "dro_topk", "paper",
        f"{_name}_M of Qi et al. 2020 on In-Shop: K=2B at B=640"
        + ("; K is tuned over 640 to 1920." if _balanced else ", the best of 640 to 2560 in figure 3."),
        _DRO, k=1280, base_loss="margin", **_options,
    )  # fmt: skip
    _add(
        f"{_system}/official", "dro_topk", "code",
        f"The authors' scripts for {_name}_M: K=80 there is 4K ordered, so 2K=160 unordered pairs. Zero losses count "
        "in the mean, as here; the paper would leave them out." + _matched,
        _DRO, k=160, base_loss="margin", **_options, matched=_balanced,
    )  # fmt: skip
    _add(
        f"{_system}/official-binomial", "dro_topk", "code",
        f"The authors' scripts for {_name}_B, whose α and β the paper does not print. They multiply by 2/α and 2/β: "
        "their value is twice this one." + _matched,
        _DRO, k=160, base_loss="binomial", alpha=2, beta=40, threshold=0.5, balanced=_balanced, matched=_balanced,
    )  # fmt: skip
_add(
    "dro-kl/paper", "dro_kl", "paper",
    "DRO-KL_M of Qi et al. 2020, section 3.2; γ=0.1 is that of its run times, tuned over 0.1, 0.3 … 0.9 elsewhere. The "
    "paper and its code sample pairs by p* ∝ e^{l/γ}, the code by e^{l/γ}-1; this is the expectation.",
    _DRO, gamma=0.1, base_loss="margin", margin=0.2, threshold=0.5,
)  # fmt: skip
for _gamma, _words in (
    (1, "which is the lifted structure loss without its hinge where all pair losses are above 0"),
    (0.1, "for comparison"),
    (0.01, "the best R@1 of the four on CUB and In-Shop"),
    (0.001, "the best R@1 of the four on Cars"),
):
    _add(
        f"dro-kl-g/paper-{_gamma}", "dro_kl_grouped", "paper",
        f"DRO-KL-G of Qi et al. 2020, eq. 7, Tables 2 and 4: γ={_gamma}, {_words}. It sums over anchors where this is "
        "their mean, and leaves out pairs of zero loss, which count here.",
        {**_DRO, "batch": "80"}, gamma_pos=_gamma, gamma_neg=_gamma, base_loss="margin", margin=0.2, threshold=0.5,
    )  # fmt: skip

# Proxy losses
_add(
    "proxy-nca/paper", "proxy_nca", "paper",
    "Movshovitz-Attias et al. 2017: the own proxy is not in the denominator. PML has it there (proxy-nca/pml).",
    softmax_scale=1, include_positive=False,
)  # fmt: skip
_add(
    "proxy-nca/thesis", "proxy_nca", "thesis",
    "Thesis, eq. 2.27, on inner products of unit vectors: half the scale of squared distances. Here the mean over the "
    "batch. Its code is proxy-nca/thesis-code.",
    {"parameters": "learning rate 1e-5 for the proxies", **_THESIS},
    distance="cosine", softmax_scale=1, include_positive=False,
)  # fmt: skip
_add(
    "proxy-nca/thesis-code", "proxy_nca", "code",
    "The thesis' code: PML's loss with scale 32. Its proxies are not given to the optimizer; yours should be.",
    _THESIS, softmax_scale=32,
)  # fmt: skip
_add(
    "arcface/paper", "arcface", "paper",
    "Deng et al. 2019: m=0.5 rad, which is 28.6 degrees, s=64.",
    margin=28.6, scale=64,
)  # fmt: skip
_add(
    "arcface/thesis", "arcface", "thesis",
    "Thesis, Table 4. Its section 4.2.5 says that ArcFace was tuned, and its code has s=220 (arcface/thesis-code).",
    {"parameters": "learning rate 1e-4 for the weights", **_THESIS}, margin=28.6, scale=64,
)  # fmt: skip
_add(
    "arcface/thesis-code", "arcface", "code",
    "The thesis' code: s=220 where its Table 4 says 64.",
    {"parameters": "learning rate 1e-4 for the weights", **_THESIS}, margin=28.6, scale=220,
)  # fmt: skip
_add(
    "soft-triple/official", "soft_triple", "code",
    "The code of Qian et al. 2019: ten centres, γ=0.1, τ=0.2.",
    centers_per_class=10, la=20, gamma=0.1, margin=0.01, tau=0.2,
)  # fmt: skip
_add(
    "soft-triple/thesis", "soft_triple", "thesis",
    "Thesis, Table 4: margin 0.1 where the authors' code has 0.01; its gamma 10 multiplies, so γ=1/10. Two centres as "
    "in its code; its eq. 2.30 prints the loss of one.",
    {"parameters": "learning rate 1e-4 for the centres", **_THESIS},
    centers_per_class=2, la=20, gamma=0.1, margin=0.1, tau=0.2,
)  # fmt: skip
_add(
    "soft-triple/thesis-tuned", "soft_triple", "tuned",
    "Thesis, Table 15: found on 10 held-out classes of CUB, R@1 66.12 (Table 16); its gamma 58 read as in Table 4, "
    "γ=1/58. Two centres as in its code.",
    {"parameters": "learning rate 5e-5 for the centres", **_THESIS},
    centers_per_class=2, la=78, gamma=1 / 58, margin=0.4, tau=0.4,
)  # fmt: skip
_add(
    "proxy-anchor/paper", "proxy_anchor", "paper",
    "Kim et al. 2020; the authors' code has the same numbers.",
    {"parameters": "100 times the learning rate for the proxies"}, margin=0.1, alpha=32,
)  # fmt: skip
_add(
    "proxy-anchor/thesis", "proxy_anchor", "thesis",
    "Thesis, eq. 2.31 and Table 4; its search of Table 15 ends at the same numbers.",
    _THESIS, margin=0.1, alpha=32,
)  # fmt: skip
_add(
    "proxy-repulsion/thesis-v1", "proxy_repulsion", "thesis",
    "Thesis, eq. 6.1, with all classes and without the proxy itself, as in its code, from which the numbers are too. "
    "It gives no results of this variant.",
    _THESIS, margin=0.1, alpha=32, variant="proxy",
)  # fmt: skip
_add(
    "proxy-repulsion/thesis-v2", "proxy_repulsion", "thesis",
    "Thesis, eq. 6.2, the one in its Tables 17-19; numbers from its code. The exponent is a sum over the batch and "
    "grows with it; aggregate='mean' does not.",
    _THESIS, margin=0.1, alpha=32, variant="batch", aggregate="sum",
)  # fmt: skip

for _short, _cls in LOSSES.items():
    if _cls.pml is not None:
        _add(
            f"{_short.replace('fast_ap', 'fastap').replace('_', '-')}/pml", _short, "code",
            f"pytorch-metric-learning's {_cls.pml} with its defaults, which are pydml's own.",
        )  # fmt: skip


def presets() -> dict[str, Preset]:
    """Every preset by name.

    >>> dict(presets()["ms/official"].kwargs)
    {'alpha': 2, 'beta': 40, 'base': 0.5, 'epsilon': 0.1}
    """
    return dict(_PRESETS)


def near_presets(name: str, most: int = 8) -> list[str]:
    """Names of presets like a misspelt one, the likest first; losses go by the names of their classes too.

    >>> near_presets("MultiSimilarity/papr", most=1), near_presets("proxy_ancor", most=1)
    (['ms/paper'], ['proxy-anchor/paper'])
    """

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9/.]" if "/" in name else r"[^a-z0-9.]", "", text.lower())

    def likeness(other: str) -> float:
        system, _, where = other.partition("/")
        systems = system, _PRESETS[other].loss.__name__.removesuffix("Loss")
        spellings = [f"{known}/{where}" for known in systems] + ([] if "/" in name else [*systems])
        return max(difflib.SequenceMatcher(None, plain(name), plain(known)).ratio() for known in spellings)

    score = {other: likeness(other) for other in _PRESETS}
    order = sorted(_PRESETS, key=lambda other: -score[other])
    like = [other for other in order if score[other] >= 0.6] or order[:3]
    return like[:most]


def preset(name: str, **overrides: Any) -> MetricLoss:
    """The loss of a preset.

    Parameters
    ----------
    name
        One of :func:`presets`.
    **overrides
        Arguments of the class that replace or add to the preset's; proxy losses need ``num_classes`` and
        ``embedding_size``.

    Examples
    --------
    >>> preset("ms/paper", epsilon=None)
    MultiSimilarityLoss(alpha=2, beta=50, base=1.0, epsilon=None, distance='cosine', normalize_embeddings=True, \
reduction='mean')
    >>> preset("proxy-anchor/paper", num_classes=100, embedding_size=64).proxies.shape
    torch.Size([100, 64])
    """
    if name not in _PRESETS:
        near = ", ".join(map(repr, near_presets(name)))
        raise ValueError(f"preset: got {name!r}, wanted one of the names of presets(); near matches: {near}")
    chosen = _PRESETS[name]
    missing = [argument for argument in chosen.required if argument not in overrides]
    if missing:
        call = "".join(f", {argument}=…" for argument in missing)
        raise TypeError(f"preset: {name!r} needs {' and '.join(missing)}: preset({name!r}{call})")
    return chosen.loss(**{**chosen.kwargs, **overrides})
