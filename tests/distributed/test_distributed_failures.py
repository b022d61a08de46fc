"""What goes wrong on one rank is an error on all of them, with its reason, and never a hang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Died, Ranks, ranks

from pydml.distributed import ShardedLoss
from pydml.distributed.group import Group
from pydml.losses import ContrastiveLoss, MultiSimilarityLoss, NCALoss, ProxyAnchorLoss

#: Seconds of the group's timeout where a rank is to go missing, and what a loaded machine may add to it.
TIMEOUT, GRACE = 10, 60


def wrong(rank: int, size: int, which: str) -> None:
    """One call with a mistake on the last rank."""
    last = rank == size - 1
    z, y = torch.randn(4, 8 if which != "width" or not last else 7, requires_grad=True), torch.arange(4) % 2
    module = ShardedLoss(ContrastiveLoss())
    forward: dict[str, Any] = {}
    if which == "dtype" and last:
        z = z.double()
    if which == "labels" and last:
        y = y[:3]
    if which == "no tensor" and last:
        z = None  # type: ignore[assignment]
    if which == "reference" and last:
        forward = {"ref_emb": torch.randn(2, 8), "ref_labels": torch.arange(2)}
    if which == "tuple":
        index = torch.tensor([0, 4 * size - 1 + last])
        forward = {"indices_tuple": (index, index, index)}
    if which == "settings":
        module = ShardedLoss(ContrastiveLoss(neg_margin=1 + last))
    if which == "loss":
        module = ShardedLoss(NCALoss() if last else ContrastiveLoss())
    if which == "class":
        module = ShardedLoss(ProxyAnchorLoss(2, 8))
        y = y + last
    if which == "two":
        y = y[:rank]
    module(z, y, **forward)


MISTAKES = {
    "width": "ValueError: embeddings: got different widths: 8 on rank 0, 8 on rank 1, 7 on rank 2; wanted the same",
    "dtype": "ValueError: embeddings: got different dtypes: torch.float32 on rank 0, torch.float32 on rank 1, "
    "torch.float64 on rank 2; wanted the same on all ranks",
    "labels": "ValueError: rank 2: labels: got 3 labels, wanted 4, one for each embedding",
    "no tensor": "TypeError: rank 2: embeddings: got NoneType, wanted a torch.Tensor",
    "reference": "ValueError: ref_emb: got different reference sets: none on rank 0, none on rank 1, one on rank 2",
    "tuple": "ValueError: rank 2: indices_tuple: a: got entries outside [0, 12)",
    "settings": "ValueError: loss: got different settings or backends",
    "loss": "ValueError: loss: got different settings or backends",
    "class": "ValueError: rank 2: labels: got entries outside [0, 2)",
    "two": "rank 0: labels: got 0 labels, wanted 4, one for each embedding; rank 1: labels: got 1 labels",
}


@pytest.mark.parametrize("which", MISTAKES)
def test_a_mistake_on_one_rank_is_told_on_all_and_the_group_goes_on(which: str) -> None:
    for answer in ranks(3).answers(wrong, which):
        assert isinstance(answer, RuntimeError), f"{which}: a rank went on with {answer!r}"
        assert MISTAKES[which] in answer.args[0]
    assert ranks(3)(healthy) == [6.0] * 3


def other_parameters(rank: int, size: int, which: str) -> None:
    """The last rank makes its loss otherwise."""
    last = rank == size - 1
    loss_fn = ProxyAnchorLoss(3 if last and which == "classes" else 4, 8)
    if last and which == "dtype":
        loss_fn.double()
    if last and which == "none":
        ShardedLoss(ContrastiveLoss())
    ShardedLoss(loss_fn)


@pytest.mark.parametrize(
    ("which", "last"),
    [("classes", "[3, 8] of torch.float32"), ("dtype", "[4, 8] of torch.float64"), ("none", "none")],
)
def test_other_parameters_on_one_rank_are_told_on_all_before_they_are_copied(which: str, last: str) -> None:
    ours = "[4, 8] of torch.float32"
    for answer in ranks(3).answers(other_parameters, which):
        assert isinstance(answer, RuntimeError), f"{which}: a rank went on with {answer!r}"
        want = f"parameters proxies: {ours} on rank 0, {ours} on rank 1, {last} on rank 2; wanted the same shape and"
        assert want in answer.args[0]
    assert ranks(3)(healthy) == [6.0] * 3


def ready(rank: int, size: int) -> None:
    """Nothing, but the rank has imported this file then."""


def healthy(rank: int, size: int) -> float:
    return float(Group().all_reduce(torch.tensor(rank + 1.0), "numbers"))


def step(rank: int, size: int, mode: str, when: str) -> str:
    """A step in which the last rank is killed, or falls asleep, before the loss or before its backward pass."""
    torch.manual_seed(rank)
    module = ShardedLoss(MultiSimilarityLoss(), mode=mode)
    z = torch.randn(64, 8, requires_grad=True)
    if rank == size - 1 and when == "forward":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == size - 1 and when == "asleep":
        time.sleep(TIMEOUT + GRACE)
        os.kill(os.getpid(), signal.SIGKILL)
    loss = module(z, torch.arange(64) % 8)
    if rank == size - 1 and when == "backward":
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    return "went on"


@pytest.mark.parametrize(("mode", "when"), [("ring", "forward"), ("gather", "backward"), ("ring", "asleep")])
def test_a_rank_that_dies_or_hangs_is_reported_within_the_timeout(mode: str, when: str) -> None:
    doomed = Ranks(3, timeout=TIMEOUT)
    try:
        doomed(ready)
        doomed(healthy)
        for pipe in doomed.pipes:
            pipe.send((step, (mode, when)))
        began = time.monotonic()
        answers = [doomed._answer(pipe) for pipe in doomed.pipes[:2]]
        assert time.monotonic() - began < TIMEOUT + GRACE
        for rank, answer in enumerate(answers):
            assert isinstance(answer, RuntimeError), f"rank {rank}: {answer!r}"
            assert f"rank {rank} of 3 could not" in answer.args[0]
            assert "another rank died" in answer.args[0] and "The backend says: " in answer.args[0]
        if when != "asleep":
            assert isinstance(doomed._answer(doomed.pipes[2]), Died)
    finally:
        for process in doomed.processes:
            process.kill()
        doomed.close()


def in_a_group_of_two(rank: int, size: int) -> str:
    """The first and the last rank form a group; the others are not in it."""
    group = dist.new_group([0, size - 1])
    if rank not in (0, size - 1):
        with pytest.raises(ValueError, match="group: got one that this process is not in") as error:
            ShardedLoss(ContrastiveLoss(), group=group)
        return str(error.value)
    values = []
    for mode in ("ring", "gather"):
        z = torch.eye(4)[[0, 1] if rank == 0 else [2, 3]].requires_grad_()
        loss = ShardedLoss(ContrastiveLoss(), group=group, mode=mode)(z, torch.tensor([0, 0] if rank == 0 else [1, 1]))
        loss.backward()
        assert z.grad is not None and z.grad.any()
        values.append(f"{loss.item():.4f}")
    return " ".join(values)


def test_a_group_of_some_ranks() -> None:
    first, middle, last = ranks(3)(in_a_group_of_two)
    assert first == last == "1.4142 1.4142"
    assert "wanted a group with it" in middle


def without_gradients_here(rank: int, size: int) -> Any:
    z = torch.eye(4)[2 * rank : 2 * rank + 2].requires_grad_(rank == 0)
    loss = ShardedLoss(ContrastiveLoss())(z, torch.arange(2))
    loss.backward()  # has a part in the gradients of the other
    with torch.no_grad():
        silent = ShardedLoss(ContrastiveLoss())(z, torch.arange(2))
    return loss.item() == silent.item() and not silent.requires_grad and (z.grad is not None) == (rank == 0)


def test_a_rank_that_wants_no_gradient_helps_the_others() -> None:
    assert ranks(2)(without_gradients_here) == [True, True]


def test_a_group_needs_an_initialised_process_group() -> None:
    with pytest.raises(ValueError, match="group: got a process group, wanted torch"):
        Group(object())
