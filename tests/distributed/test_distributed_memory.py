"""A memory on several ranks: ShardedLoss(CrossBatchMemory(loss)) is one process with the memories of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import CASES, Case, assert_close, make_batch
from ranks import ranks
from torch import Tensor

from pydml.backends import recording
from pydml.distributed import ShardedLoss
from pydml.losses import MultiSimilarityLoss
from pydml.memory import CrossBatchMemory
from pydml.miners import MultiSimilarityMiner

DIM, CLASSES, MEMORY = 7, 5, 48
SIZES = [11, 7]
CAN = [case for case in CASES if case.takes_ref]
#: PML's lifted structure with references takes a column's number for a row's: it depends on the order of the columns,
#: which are those of all ranks one after the other.
IN_ANY_ORDER = [case for case in CAN if case.loss != "lifted"]


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    return [make_batch("trained", sum(SIZES), DIM, CLASSES, seed, dtype) for seed in range(3)]


def remembering(rank: int, size: int, case: Case, mode: str) -> dict[str, Any]:
    loss = case.build(CLASSES, DIM, torch.float64)
    module = ShardedLoss(CrossBatchMemory(loss, DIM, MEMORY), mode=mode)
    for z, labels in batches():
        z, labels = z.split(SIZES)[rank].clone().requires_grad_(), labels.split(SIZES)[rank]
        value = module(z, labels)
    value.backward()
    assert z.grad is not None
    return {"loss": value.detach().numpy(), "grad": z.grad.numpy()}


@pytest.mark.parametrize("mode", ["ring", "gather"])
@pytest.mark.parametrize("case", IN_ANY_ORDER, ids=lambda case: case.id)
def test_a_memory_on_two_ranks_is_that_of_one_process(case: Case, mode: str) -> None:
    memory = CrossBatchMemory(case.build(CLASSES, DIM, torch.float64), DIM, 2 * MEMORY)
    for z, labels in batches():
        z = z.clone().requires_grad_()
        want = memory(z, labels)
    want.backward()
    answers = ranks(2)(remembering, case, mode)
    assert z.grad is not None
    for answer in answers:
        assert_close(answer["loss"], want, 1e-10)
    assert_close(np.concatenate([answer["grad"] for answer in answers]), z.grad, 1e-10, "gradient")


def kernels(rank: int, size: int, case: Case, mode: str, memory: bool) -> set[tuple[str, str]]:
    loss: Any = case.build(CLASSES, DIM, torch.float32)
    module = ShardedLoss(CrossBatchMemory(loss, DIM, MEMORY) if memory else loss, mode=mode)
    z, labels = batches(torch.float32)[0]
    z = z.split(SIZES)[rank].clone().requires_grad_()
    with recording() as calls:
        module(z, labels.split(SIZES)[rank], backend="cpu").backward()
    return {(ran.op, ran.backend) for ran in calls}


@pytest.mark.parametrize("mode", ["ring", "gather"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ranks_and_memories_run_on_the_backend_that_was_asked_for(case: Case, mode: str) -> None:
    """Anchor-swapped triplets have no C++ kernel, on one process neither."""
    for memory in (False, True) if case in CAN else (False,):
        for ran in ranks(2)(kernels, case, mode, memory):
            if "swap" not in case.arguments:
                assert {backend for _, backend in ran} <= {"cpu"}, ran


def test_a_memory_with_a_miner_is_refused_by_name() -> None:
    memory = CrossBatchMemory(MultiSimilarityLoss(), DIM, MEMORY, miner=MultiSimilarityMiner())
    with pytest.raises(ValueError, match="loss: got a memory with a miner"):
        ShardedLoss(memory)


def test_alone_it_is_the_memory_itself() -> None:
    z, labels = batches()[0]
    one, other = (CrossBatchMemory(MultiSimilarityLoss(epsilon=0.1), DIM, MEMORY) for _ in "12")
    assert torch.equal(ShardedLoss(one)(z, labels), other(z, labels))
