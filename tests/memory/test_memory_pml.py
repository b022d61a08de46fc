"""PML's memory and ours in each other's place: losses of either in either, attributes, checkpoints, over many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Result, assert_same, make_batch
from torch import Tensor, nn

import pydml
from pydml.losses import CrossBatchMemory

pml_losses = pytest.importorskip("pytorch_metric_learning.losses", reason="pytorch-metric-learning is not installed")
from pytorch_metric_learning import distances as pml_distances  # noqa: E402
from pytorch_metric_learning import miners as pml_miners  # noqa: E402

DIM, ROWS, SIZE = 7, 8, 19

#: Losses that only PML has, and some that both have.
LOSSES = ["ContrastiveLoss", "MultiSimilarityLoss", "TripletMarginLoss", "CircleLoss", "NTXentLoss", "SupConLoss",
          "TupletMarginLoss", "AngularLoss", "IntraPairVarianceLoss", "SignalToNoiseRatioContrastiveLoss"]  # fmt: skip
SHARED = [name for name in LOSSES if hasattr(pydml.losses, name)]


@pytest.fixture(autouse=True)
def in_fp64() -> Any:
    """PML keeps some constants in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    return [make_batch("trained", ROWS, DIM, 4, seed=seed) for seed in range(steps)]


def step(memory: Any, z: Tensor, y: Tensor, **forward: Any) -> Result:
    leaf = z.clone().requires_grad_()
    loss = memory(leaf, y, **forward)
    loss.backward()
    assert leaf.grad is not None
    return Result(loss.detach(), {"embeddings": leaf.grad})


def same_state(ours: Any, theirs: Any) -> None:
    for name in ("embedding_memory", "label_memory", "curr_batch_idx"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("queue_idx", "has_been_filled", "embedding_size", "memory_size"):
        assert getattr(ours, name) == getattr(theirs, name), name


def both(ours: Any, theirs: Any, miner: str | None = None, size: int = SIZE) -> tuple[Any, Any]:
    """Our memory and PML's."""
    miners = [None, None] if miner is None else [getattr(pml_miners, miner)() for _ in range(2)]
    return (
        CrossBatchMemory(ours, DIM, size, miners[0]),
        pml_losses.CrossBatchMemory(theirs, DIM, size, miners[1]),
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("miner", [None, "MultiSimilarityMiner", "BatchHardMiner"])
def test_losses_of_pml_in_our_memory_are_those_in_pmls(name: str, miner: str | None) -> None:
    make = getattr(pml_losses, name)
    mine, other = both(make(), make(), miner)
    for z, y in batches(6):
        assert_same(step(mine, z, y), step(other, z, y), 1e-9)
        same_state(mine, other)


ALIKE = ["LiftedStructureLoss", "GeneralizedLiftedStructureLoss", "MarginLoss", "NCALoss"]


@pytest.mark.parametrize("name", [*SHARED, *ALIKE])
@pytest.mark.parametrize("distance", [None, "SNRDistance", "CosineSimilarity"])
def test_our_losses_in_our_memory_are_pmls_in_pmls(name: str, distance: str | None) -> None:
    given = {} if distance is None else {"distance": getattr(pml_distances, distance)()}
    mine, other = both(getattr(pydml.losses, name)(**given), getattr(pml_losses, name)(**given))
    for z, y in batches(5):
        assert_same(step(mine, z, y), step(other, z, y), 1e-9)


@pytest.mark.parametrize("name", [*SHARED, *ALIKE])
@pytest.mark.parametrize("miner", [None, "MultiSimilarityMiner", "BatchHardMiner"])
def test_our_losses_in_pmls_memory_are_pmls(name: str, miner: str | None) -> None:
    given = [None, None] if miner is None else [getattr(pml_miners, miner)() for _ in range(2)]
    mine = pml_losses.CrossBatchMemory(getattr(pydml.losses, name)(), DIM, SIZE, given[0])
    other = pml_losses.CrossBatchMemory(getattr(pml_losses, name)(), DIM, SIZE, given[1])
    for z, y in batches(5):
        assert_same(step(mine, z, y), step(other, z, y), 1e-9)


@pytest.mark.parametrize("ours", [True, False], ids=["our loss", "pml's loss"])
@pytest.mark.parametrize("size", [ROWS, SIZE, 64])
def test_masks_and_further_pairs_over_many_steps(ours: bool, size: int) -> None:
    make = pydml.losses.ContrastiveLoss if ours else pml_losses.ContrastiveLoss
    mine, other = both(make(), pml_losses.ContrastiveLoss(), size=size)
    pairs = torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7])
    triplets = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    for k, (z, y) in enumerate(batches(8)):
        mask = torch.arange(ROWS) % 3 == k % 3
        forward: Any = [{}, {"enqueue_mask": mask}, {"indices_tuple": pairs}, {"indices_tuple": triplets}][k % 4]
        assert_same(step(mine, z, y, **forward), step(other, z, y, **forward), 1e-9)
        same_state(mine, other)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_checkpoint_of_pmls_memory_goes_on_here(steps: int) -> None:
    """After 2 steps of 8 rows the queue of 19 has room, after 5 it has gone round; PML does not say where it ends."""
    mine, other = both(pydml.losses.ContrastiveLoss(), pml_losses.ContrastiveLoss())
    given = batches(6)
    for z, y in given[:steps]:
        other(z, y)
    assert mine.load_state_dict(other.state_dict()) == ([], [])
    assert torch.equal(mine.embedding_memory, other.embedding_memory)
    assert torch.equal(mine.label_memory, other.label_memory)
    assert mine.has_been_filled == other.has_been_filled
    if not other.has_been_filled:
        assert mine.queue_idx == other.queue_idx
        assert_same(step(mine, *given[5]), step(other, *given[5]), 1e-9)


def test_a_checkpoint_of_an_empty_or_nested_memory_of_pml_loads() -> None:
    mine, other = both(pydml.losses.ContrastiveLoss(), pml_losses.ContrastiveLoss())
    nn.ModuleDict({"xbm": mine}).load_state_dict(nn.ModuleDict({"xbm": other}).state_dict())
    assert (mine.queue_idx, mine.has_been_filled) == (0, False)
    other(*batches(1)[0])
    nn.ModuleDict({"xbm": mine}).load_state_dict(nn.ModuleDict({"xbm": other}).state_dict())
    assert (mine.queue_idx, mine.has_been_filled) == (ROWS, False)


def test_pml_loads_our_checkpoint_without_strictness() -> None:
    mine, other = both(pydml.losses.ContrastiveLoss(), pml_losses.ContrastiveLoss())
    for z, y in batches(2):
        mine(z, y)
    assert other.load_state_dict(mine.state_dict(), strict=False) == ([], ["_extra_state"])
    assert torch.equal(mine.embedding_memory, other.embedding_memory)
    other.queue_idx, other.has_been_filled = mine.queue_idx, mine.has_been_filled  # PML never keeps these
    z, y = batches(3)[2]
    assert_same(step(mine, z, y), step(other, z, y), 1e-9)


def test_what_loggers_and_users_of_pml_look_at() -> None:
    mine, other = both(pydml.losses.ContrastiveLoss(), pml_losses.ContrastiveLoss())
    assert mine._record_these == other._record_these
    assert mine.supported_losses() == other.supported_losses()
    assert pydml.losses.CrossBatchMemory is pydml.memory.CrossBatchMemory
    for name in ("loss", "miner", "collect_stats", "reset_queue", "add_to_memory", "check_loss_support"):
        assert hasattr(mine, name) and hasattr(other, name)
    z, y = batches(1)[0]
    for memory in (mine, other):
        memory.add_to_memory(z[:3], y[:3], 3)
    same_state(mine, other)


class Own(nn.Module):
    """A loss of the user's own, with PML's signature."""

    def forward(self, embeddings: Any, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any) -> Tensor:
        a1, p, a2, n = indices_tuple
        assert torch.equal(labels[a1], ref_labels[p])
        return (embeddings[a2] * ref_emb[n]).sum() - (embeddings[a1] * ref_emb[p]).sum()


def test_a_loss_of_ones_own_sees_all_pairs_but_those_with_itself() -> None:
    memory = CrossBatchMemory(Own(), DIM, 64)
    z, y = batches(1)[0]
    got = step(memory, z, y)
    same = (y[:, None] == y).to(z.dtype)
    want = ((1 - same) * (z @ z.T)).sum() - ((same - torch.eye(ROWS)) * (z @ z.T)).sum()
    torch.testing.assert_close(got.loss, want)


def test_losses_that_cannot_be_here_are_named() -> None:
    with pytest.raises(TypeError, match=r"loss: got Linear, wanted a loss .* or one with the signature"):
        CrossBatchMemory(nn.Linear(2, 2), DIM)
    with pytest.raises(ValueError, match="loss: got ArcFaceLoss, wanted one of AngularLoss"):
        CrossBatchMemory(pml_losses.ArcFaceLoss(4, DIM), DIM)
