"""What is measured: every loss and its variants, and which of them on which batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bench import peers
from bench.data import ITEMS, REGIMES, Inputs, make

GIB = 2**30
#: What a peer may need; beyond it is skipped, and the row says so.
MEMORY_LIMIT = 16 * GIB
MODES = ("forward", "backward", "full")
KS = (1, 10, 100, 1000)

PADDED = "dense: all positives of an anchor in one padded tensor [B, M-1, B]"
SCATTER = "dense: scatter_add of every row into its bins"


@dataclass(frozen=True)
class Variant:
    """One loss with one set of arguments."""

    op: str  # key of pydml.losses.LOSSES, or "recall"
    variant: str
    dense: Callable[..., Tensor]
    arguments: dict[str, Any] = field(default_factory=dict)
    k_per_item: int = 0  # k = that many times B
    kind: str = "pair"  # or "proxy", "metric", "tuple"
    selects: bool = False  # rounding may decide otherwise where pairs are nearly alike
    matrices: int = 10  # fp32 matrices [B, B] or [B, C] that autograd keeps alive in the dense code
    note: str = ""
    loss: str = ""  # of a tuple: the class, by the name that both libraries have for it

    @property
    def name(self) -> str:
        return f"{self.op}/{self.variant}" if self.variant else self.op

    def keywords(self, size: int) -> dict[str, Any]:
        """Arguments of pydml's class for a batch of ``size``."""
        return self.arguments | ({"k": self.k_per_item * size} if self.k_per_item else {})


_VARIANTS = [
    Variant("ms", "", peers.multi_similarity),
    Variant("ms", "mined", peers.multi_similarity, {"epsilon": 0.1}, selects=True),
    Variant("ms_mining", "", peers.ms_mining, selects=True),
    Variant("contrastive", "", peers.contrastive),
    Variant("binomial", "", peers.binomial),
    Variant("lifted", "", peers.lifted),
    Variant("generalized_lifted", "", peers.generalized_lifted),
    Variant("lifted_star", "", peers.lifted_star),
    Variant("bin_lifted", "", peers.bin_lifted),
    Variant("nca", "", peers.nca),
    Variant("n_pairs", "", peers.n_pairs, matrices=4),
    Variant("margin", "", peers.margin, selects=True),
    Variant("triplet", "all", peers.triplet_all, {"triplets": "all"}, selects=True, matrices=30, note=PADDED),
    Variant("triplet", "hard", peers.triplet_hard, {"triplets": "hard"}, selects=True),
    Variant(
        "triplet", "semihard", peers.triplet_semihard, {"triplets": "semihard"}, selects=True, matrices=20, note=PADDED
    ),
    Variant("extreme_triplet", "", peers.extreme_triplet, selects=True),
    Variant("extreme_triplet", "semihard", peers.extreme_triplet, {"negative": "semihard"}, selects=True),
    Variant("histogram", "", peers.histogram, matrices=20, note=SCATTER),
    Variant("fast_ap", "", peers.fast_ap, matrices=60),
    Variant("dro_topk", "2B", peers.dro_topk, k_per_item=2, selects=True),
    Variant("dro_topk", "balanced", peers.dro_topk, {"balanced": True}, k_per_item=2, selects=True),
    Variant("dro_kl", "", peers.dro_kl),
    Variant("dro_kl_grouped", "", peers.dro_kl_grouped),
    Variant("normalized_softmax", "", peers.normalized_softmax, kind="proxy"),
    Variant("proxy_nca", "", peers.proxy_nca, kind="proxy"),
    Variant("arcface", "", peers.arcface, kind="proxy"),
    Variant("soft_triple", "", peers.soft_triple, kind="proxy"),
    Variant("proxy_anchor", "", peers.proxy_anchor, kind="proxy"),
    Variant("proxy_repulsion", "", peers.proxy_repulsion, kind="proxy"),
    Variant("proxy_repulsion", "proxy", peers.proxy_repulsion, {"variant": "proxy"}, kind="proxy"),
    Variant("recall", "", peers.recall, kind="metric", matrices=1),
]
#: ``ms/mined`` and the like -> variant.
VARIANTS = {variant.name: variant for variant in _VARIANTS}


def _no_dense(*_: Any) -> Tensor:
    raise NotImplementedError("a miner's tuple is compared with PML alone")


def _tuple(op: str, way: str, loss: str, **arguments: Any) -> Variant:
    return Variant(op, way, _no_dense, arguments, kind="tuple", selects=True, loss=loss)


#: Losses with a tuple, by how it comes to them: Multi-Similarity's miner, the batch-hard miner, a list of all triplets,
#: a cross-batch memory with a miner, and our loss in PML's memory.
TUPLES = {
    variant.name: variant
    for variant in (
        _tuple("ms", "ms-miner", "MultiSimilarityLoss"),
        _tuple("generalized_lifted", "ms-miner", "GeneralizedLiftedStructureLoss"),
        _tuple("contrastive", "ms-miner", "ContrastiveLoss"),
        _tuple("nca", "ms-miner", "NCALoss"),
        _tuple("fast_ap", "ms-miner", "FastAPLoss"),
        _tuple("margin", "ms-miner", "MarginLoss"),
        _tuple("lifted", "ms-miner", "LiftedStructureLoss"),
        _tuple("histogram", "ms-miner", "HistogramLoss", n_bins=100),
        _tuple("triplet", "ms-miner", "TripletMarginLoss"),
        _tuple("triplet", "batch-hard", "TripletMarginLoss"),
        _tuple("contrastive", "batch-hard", "ContrastiveLoss"),
        _tuple("triplet", "triplets", "TripletMarginLoss"),
        _tuple("ms", "xbm", "MultiSimilarityLoss"),
        _tuple("contrastive", "xbm", "ContrastiveLoss"),
        _tuple("ms", "pml-xbm", "MultiSimilarityLoss"),
    )
}


@dataclass(frozen=True)
class Shape:
    """B×d, or B×d×C for proxy losses."""

    size: int
    dim: int
    classes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From ``1024x128`` or ``512x128x10000``."""
        parts = text.lower().replace("×", "x").split("x")
        if len(parts) not in (2, 3) or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"shape: got {text!r}, wanted BxD or, for proxy losses, BxDxC")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return "×".join(str(n) for n in (self.size, self.dim, self.classes) if n is not None)


@dataclass(frozen=True)
class Case:
    """One variant on one batch."""

    variant: Variant
    shape: Shape
    regime: str
    centers: int = 1  # proxies of a class
    items: int = ITEMS

    @property
    def name(self) -> str:
        return f"{self.variant.name} {self.shape} {self.regime}"

    def inputs(self) -> Inputs:
        shape = self.shape
        return make(
            shape.size, shape.dim, self.regime, classes=shape.classes, centers=self.centers, items=self.items
        )  # fmt: skip

    @property
    def matrix_bytes(self) -> int:
        """Of one fp32 matrix that the dense code makes."""
        size, classes = self.shape.size, self.shape.classes
        if self.variant.kind == "metric":
            return 4 * 1000 * size
        if classes is None:
            return 4 * size * size
        if self.variant.op == "proxy_repulsion":
            return 4 * classes * classes
        return 4 * size * classes * self.centers

    @property
    def dense_bytes(self) -> int:
        return self.variant.matrices * self.matrix_bytes


def case(name: str, shape: str, regime: str = "trained") -> Case:
    """By names: ``case("ms/mined", "1024x128", "early")``."""
    if regime not in REGIMES:
        raise ValueError(f"regime: got {regime!r}, wanted one of {', '.join(map(repr, REGIMES))}")
    variant, parsed = (VARIANTS | TUPLES)[name], Shape.parse(shape)
    if (variant.kind == "proxy") != (parsed.classes is not None):
        raise ValueError(f"shape: got {shape} for {name}, wanted {'BxDxC' if variant.kind == 'proxy' else 'BxD'}")
    centers = 10 if variant.op == "soft_triple" else 1
    return Case(variant, parsed, regime, centers, items=5 if variant.kind == "metric" else ITEMS)


def select(losses: Sequence[str] | None, shapes: Sequence[str], regimes: Sequence[str]) -> list[Case]:
    """All cases of some losses: an op's name means all its variants, and each kind takes the shapes meant for it.

    Cases that share a compiled function come one after the other.
    """
    names = list(VARIANTS)
    if losses is not None:
        known = {variant.op for variant in VARIANTS.values()} | set(VARIANTS) | set(TUPLES)
        if unknown := [name for name in losses if name not in known]:
            raise ValueError(f"loss: got {', '.join(unknown)}, wanted some of {', '.join(sorted(known))}")
        names = [name for name, variant in VARIANTS.items() if variant.op in losses or name in losses]
        names += [name for name in TUPLES if name in losses]
    chosen = []
    for name in names:
        for shape in shapes:
            proxies = Shape.parse(shape).classes is not None
            kind = (VARIANTS | TUPLES)[name].kind
            if proxies == (kind == "proxy"):
                wanted = regimes if kind != "metric" else regimes[-1:]
                chosen += [case(name, shape, regime) for regime in wanted]
    return chosen


#: Losses that are followed over B in the default run.
FOLLOWED = ("ms/mined", "nca", "fast_ap", "triplet/all")


def default_cases(losses: Sequence[str] | None, regimes: Sequence[str]) -> list[Case]:
    """Every loss at a small and a large shape, and some of them over B."""
    every = select(losses, ["1024x128", "4096x512", "512x128x10000"], regimes)
    followed = [name for name in FOLLOWED if losses is None or name in losses or VARIANTS[name].op in losses]
    if losses is None:
        every += select(
            [name for name in TUPLES if not name.startswith(("margin", "lifted", "histogram"))], ["256x128"], regimes
        )
    if followed:
        every += select(followed, [f"{size}x128" for size in (256, 512, 2048, 4096, 8192)], regimes[:1])
    return every


def quick_cases() -> list[Case]:
    """A minute's worth: each engine once at 1024×128, two losses at 2048."""
    chosen = [case("ms/mined", "1024x128", "early")]
    names = ("ms/mined", "nca", "contrastive", "triplet/hard", "fast_ap", "dro_topk/2B")
    chosen += [case(name, "1024x128") for name in names]
    chosen += [case("proxy_anchor", "256x128x5000"), case("recall", "2048x128", "early")]
    return chosen + [case(name, "2048x128") for name in ("ms/mined", "nca")]
