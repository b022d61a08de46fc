"""The losses, under PML's names: ``from pydml.losses import MultiSimilarityLoss``. One file a family."""

from pydml.losses.arcface import ArcFaceLoss
from pydml.losses.base import MetricLoss
from pydml.losses.bin_lifted import BinLiftedLoss
from pydml.losses.binomial import BinomialDevianceLoss
from pydml.losses.contrastive import ContrastiveLoss
from pydml.losses.dro import DROKLGroupedLoss, DROKLLoss, DROTopKLoss
from pydml.losses.extreme_triplet import ExtremeTripletLoss
from pydml.losses.fast_ap import FastAPLoss
from pydml.losses.histogram import HistogramLoss
from pydml.losses.lifted import GeneralizedLiftedStructureLoss, LiftedStarLoss, LiftedStructureLoss
from pydml.losses.margin import MarginLoss
from pydml.losses.multi_similarity import MSMiningLoss, MultiSimilarityLoss
from pydml.losses.n_pairs import NPairsLoss
from pydml.losses.nca import NCALoss
from pydml.losses.normalized_softmax import NormalizedSoftmaxLoss
from pydml.losses.proxy import ProxyLoss
from pydml.losses.proxy_anchor import ProxyAnchorLoss
from pydml.losses.proxy_nca import ProxyNCALoss
from pydml.losses.proxy_repulsion import ProxyRepulsionLoss
from pydml.losses.soft_triple import SoftTripleLoss
from pydml.losses.triplet import TripletMarginLoss

#: Short name -> class: the registry that tests, tables, presets and the command line go through.
LOSSES: dict[str, type[MetricLoss]] = {
    "ms": MultiSimilarityLoss,
    "ms_mining": MSMiningLoss,
    "contrastive": ContrastiveLoss,
    "binomial": BinomialDevianceLoss,
    "lifted": LiftedStructureLoss,
    "generalized_lifted": GeneralizedLiftedStructureLoss,
    "lifted_star": LiftedStarLoss,
    "bin_lifted": BinLiftedLoss,
    "nca": NCALoss,
    "n_pairs": NPairsLoss,
    "margin": MarginLoss,
    "triplet": TripletMarginLoss,
    "extreme_triplet": ExtremeTripletLoss,
    "histogram": HistogramLoss,
    "fast_ap": FastAPLoss,
    "dro_topk": DROTopKLoss,
    "dro_kl": DROKLLoss,
    "dro_kl_grouped": DROKLGroupedLoss,
    "normalized_softmax": NormalizedSoftmaxLoss,
    "proxy_nca": ProxyNCALoss,
    "arcface": ArcFaceLoss,
    "soft_triple": SoftTripleLoss,
    "proxy_anchor": ProxyAnchorLoss,
    "proxy_repulsion": ProxyRepulsionLoss,
}

# Under PML's name of its module too; it needs the losses above.
from pydml.memory import CrossBatchMemory  # noqa: E402

__all__ = [
    "LOSSES",
    "ArcFaceLoss",
    "BinLiftedLoss",
    "BinomialDevianceLoss",
    "ContrastiveLoss",
    "CrossBatchMemory",
    "DROKLGroupedLoss",
    "DROKLLoss",
    "DROTopKLoss",
    "ExtremeTripletLoss",
    "FastAPLoss",
    "GeneralizedLiftedStructureLoss",
    "HistogramLoss",
    "LiftedStarLoss",
    "LiftedStructureLoss",
    "MSMiningLoss",
    "MarginLoss",
    "MetricLoss",
    "MultiSimilarityLoss",
    "NCALoss",
    "NPairsLoss",
    "NormalizedSoftmaxLoss",
    "ProxyAnchorLoss",
    "ProxyLoss",
    "ProxyNCALoss",
    "ProxyRepulsionLoss",
    "SoftTripleLoss",
    "TripletMarginLoss",
]
