"""Losses with a miner's tuple, as somebody meets them who swaps the imports: our miner and loss against PML's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench.cases import TUPLES, Case, case
from bench.data import EPSILON, Inputs, make

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
#: Embeddings in the cross-batch memory, the batch among them.
MEMORY = 4096
#: PML holds all triplets, or all positive against all negative pairs, for some losses: those are measured up to here.
LARGEST = {"lifted": 256, "margin": 256, "histogram": 256, "triplet": 256}
#: A list of all triplets has 12 million of them at 2048; a memory of 4096 is full at 4096.
LARGEST_WAY = {"triplets": 2048, "xbm": 2048, "pml-xbm": 2048}

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Library:
    """pydml or PML: both have these, under the same names."""

    losses: Any
    miners: Any
    memory: Any


@cache
def library(ours: bool) -> Library:
    if ours:
        from pydml import losses, memory, miners

        return Library(losses, miners, memory.CrossBatchMemory)
    from pytorch_metric_learning import losses, miners

    return Library(losses, miners, losses.CrossBatchMemory)


def _mined(miner: Any, loss: Any, inputs: Inputs) -> Step:
    return lambda z: loss(z, inputs.labels, miner(z, inputs.labels))


def _listed(loss: Any, inputs: Inputs) -> Step:
    triplets = all_triplets(inputs.labels)
    return lambda z: loss(z, inputs.labels, triplets)


def _remembered(memory: Any, miner: Any, loss: Any, at: Case, inputs: Inputs) -> Step:
    size, dim = inputs.z.shape
    module = memory(loss, dim, MEMORY, miner=miner)
    earlier = make(MEMORY, dim, at.regime, seed=1)
    earlier.z[:size], earlier.labels[:size] = inputs.z.detach(), inputs.labels
    module.embedding_memory, module.label_memory = earlier.z, earlier.labels

    def step(z: Tensor) -> Tensor:
        module.queue_idx, module.has_been_filled = 0, True  # every call finds the same memory
        value: Tensor = module(z, inputs.labels)
        return value

    return step


def step(at: Case, inputs: Inputs, ours: bool) -> Step:
    """Miner and loss of one library as a function of the embeddings."""
    lib, way = library(ours), at.variant.variant
    loss = getattr(lib.losses, TUPLES[at.variant.name].loss)(**at.variant.arguments)
    if way == "triplets":
        return _listed(loss, inputs)
    if way == "batch-hard":
        return _mined(lib.miners.BatchHardMiner(), loss, inputs)
    miner = lib.miners.MultiSimilarityMiner(EPSILON)
    if way == "ms-miner":
        return _mined(miner, loss, inputs)
    memory = lib.memory if way == "xbm" else library(ours=False).memory
    return _remembered(memory, miner, loss, at, inputs)


def all_triplets(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every triplet in the order in which PML lists them, without its mask of B³."""
    same = labels[:, None] == labels
    a, p = (same & ~torch.eye(len(labels), dtype=torch.bool)).nonzero(as_tuple=True)
    negatives = [row.nonzero()[:, 0] for row in ~same]
    found = [negatives[i] for i in a.tolist()]
    number = torch.tensor([len(n) for n in found])
    return a.repeat_interleave(number), p.repeat_interleave(number), torch.cat(found)


def cases(size: int) -> tuple[Case, ...]:
    """The cases of one batch size, in both regimes."""
    chosen = []
    for name, variant in TUPLES.items():
        largest = LARGEST.get(variant.op, SIZES[-1]) if variant.variant == "ms-miner" else SIZES[-1]
        if size <= min(largest, LARGEST_WAY.get(variant.variant, SIZES[-1])):
            chosen += [case(name, f"{size}x128", regime) for regime in ("early", "trained")]
    return tuple(chosen)
