"""pytorch-metric-learning's way to each loss: its loss, its miner where the loss means mining, or why there is none."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.cases import MEMORY_LIMIT, Case


class Skip(Exception):
    """This peer cannot run this case; the message says why."""


def _with_miner(loss: Callable[..., Tensor], miner: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, labels: loss(z, labels, miner(z, labels))


def imported() -> tuple[Any, Any]:
    """PML's losses and miners, if it is there."""
    try:
        from pytorch_metric_learning import losses, miners
    except ImportError as error:
        raise Skip(f"PML cannot be imported: {error}") from error
    warnings.filterwarnings("ignore", module="pytorch_metric_learning")  # it uses what torch means to change
    return losses, miners


def build(case: Case, ours: Any) -> tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]:
    """PML's function of embeddings and labels, and its proxies, with the arguments of our module."""
    losses, miners = imported()
    bytes_needed = needed(case)
    if bytes_needed > MEMORY_LIMIT:
        raise Skip(f"PML would need about {bytes_needed / 2**30:.0f} GiB")
    op, variant = case.variant.op, case.variant.variant
    if op == "extreme_triplet":
        miner = miners.BatchEasyHardMiner(ours.positive, ours.negative)
        return _with_miner(losses.NTXentLoss(ours.temperature), miner), []
    if op == "triplet" and variant == "hard":
        return _with_miner(losses.TripletMarginLoss(ours.margin), miners.BatchHardMiner()), []
    if (op, variant) == ("triplet", "semihard"):
        raise Skip("PML has no miner of the hardest semi-hard negative of each positive pair")
    name = getattr(type(ours), "pml", None)
    if name is None:
        raise Skip("PML does not have it")
    # PML's classes name their arguments as ours do: pass those that both have
    wanted = _arguments(getattr(losses, name))
    shared = {key: getattr(ours, key) for key in wanted if isinstance(getattr(ours, key, None), (int, float))}
    loss = getattr(losses, name)(**shared)
    if case.variant.kind == "proxy":
        parameter = getattr(ours, ours.parameter)
        setattr(loss, ours.parameter, parameter)
        return loss, [parameter]
    if (op, variant) == ("ms", "mined"):
        return _with_miner(loss, miners.MultiSimilarityMiner(ours.epsilon)), []
    return loss, []


def _arguments(cls: type) -> list[str]:
    """Names of a loss' arguments, those of its bases too."""
    names: list[str] = []
    for base in cls.__mro__:
        if base.__module__.startswith("pytorch_metric_learning.losses") and "__init__" in vars(base):
            names += [
                n for n, p in inspect.signature(vars(base)["__init__"]).parameters.items() if p.kind != p.VAR_KEYWORD
            ]
    return [name for name in names if name not in ("self", "learn_beta")]


def needed(case: Case) -> float:
    """Bytes that PML's code holds at its worst moment, about."""
    size, positives = case.shape.size, case.items - 1
    negatives = size - case.items
    if case.variant.op == "lifted":  # a matrix of all positive against all negative pairs
        return 4.0 * 3 * (size * positives) * (size * negatives)
    triplets = case.variant.op in ("histogram", "margin") or case.variant.name == "triplet/all"
    if triplets:  # a mask of all B³ triplets and the list of the real ones
        return float(size) ** 3 + 24.0 * 3 * size * positives * negatives
    return float(case.matrix_bytes) * (case.variant.matrices if case.variant.op == "fast_ap" else 16)
