"""What PML's own tests ask of its classes and the other tests here do not: methods and orders that users rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pydml
from pydml.losses import ContrastiveLoss, CrossBatchMemory

pml_losses: Any = pytest.importorskip("pytorch_metric_learning.losses", reason="PML, the oracle, is not installed")
import pytorch_metric_learning.miners as pml_miners  # noqa: E402  (only if it is installed)


def batch(rows: int = 24, width: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(rows, width, generator=g, dtype=torch.float64), torch.arange(rows) % 5


@pytest.mark.parametrize("given", [None, "pairs", "triplets"])
@pytest.mark.parametrize("miner", [None, "MultiSimilarityMiner", "TripletMarginMiner"])
@pytest.mark.parametrize("drop", [True, False])
def test_a_memory_creates_the_tuple_that_pmls_creates(miner: str | None, given: str | None, drop: bool) -> None:
    z, y = batch()
    more = {
        None: None,
        "pairs": pml_miners.MultiSimilarityMiner()(z, y),
        "triplets": pml_miners.TripletMarginMiner()(z, y),
    }[given]
    found = []
    for lib, loss, queue in (
        (pydml.miners, ContrastiveLoss(), CrossBatchMemory),
        (pml_miners, pml_losses.ContrastiveLoss(), pml_losses.CrossBatchMemory),
    ):
        memory = queue(loss, 8, memory_size=40, miner=None if miner is None else getattr(lib, miner)())
        for _ in range(3):  # the third batch goes on from the first place
            memory(z, y)
        kept = memory.embedding_memory, memory.label_memory
        made = memory.create_indices_tuple(z, y, *kept, more, drop)
        sides = (made,) if len(made) == 3 else (made[:2], made[2:])
        found.append([sorted(zip(*(index.tolist() for index in side), strict=True)) for side in sides])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["MultiSimilarityMiner", "BatchHardMiner", "TripletMarginMiner", "HDCMiner"])
def test_a_miner_mines_by_pmls_method(name: str) -> None:
    z, y = batch()
    miner = getattr(pydml.miners, name)()
    for ref in ((z, y), (z.flip(0) + 0.1, y.flip(0))):
        for got, want in zip(miner.mine(z, y, *ref), miner(z, y, *ref), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("stats", [False, True])
def test_a_miner_of_your_own_needs_only_pmls_method(stats: bool) -> None:
    class Neighbours(pydml.miners.BaseMiner):
        """The next row is the positive, the one after it the negative."""

        def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
            assert ref_emb.shape[0] == ref_labels.shape[0] and not self.distance(embeddings, ref_emb).requires_grad
            a = torch.arange(0, len(embeddings) - 2, 3)
            return a, a + 1, a + 2

    z, y = batch()
    miner = Neighbours(collect_stats=stats)
    assert [index.tolist() for index in miner(z.requires_grad_(), y)] == [list(range(k, 24, 3)) for k in range(3)]
    assert miner.num_triplets == 8
    assert len(miner(z, y, z[:12], y[:12])[0]) == 8


@pytest.mark.parametrize("backend", ["auto", "tiled", "dense"])
@pytest.mark.parametrize("rows", [12, 300], ids=["at once", "by blocks"])
def test_hdc_gives_the_hardest_first_as_pmls_does(rows: int, backend: str) -> None:
    z, y = batch(rows, 64)
    got = pydml.miners.HDCMiner(0.3)(z, y, backend=backend)
    for index, theirs in zip(got, pml_miners.HDCMiner(0.3)(z, y), strict=True):
        assert index.shape == theirs.shape
    d = pydml.distances.LpDistance()(z)
    assert (d[got[0], got[1]].diff() <= 1e-12).all() and (d[got[2], got[3]].diff() >= -1e-12).all()
