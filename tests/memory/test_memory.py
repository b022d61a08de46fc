"""Cross-batch memory: PML's values, the right pairs, a queue that survives a checkpoint, no B×M matrix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import BACKENDS, CASES, OFFICIAL, Case, Result, assert_close, assert_same, make_batch, over, run
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import miners as pml_miners
from torch import Tensor

from pydml import miners
from pydml.losses import (
    ContrastiveLoss,
    GeneralizedLiftedStructureLoss,
    MarginLoss,
    MultiSimilarityLoss,
    NCALoss,
    NPairsLoss,
    TripletMarginLoss,
)
from pydml.memory import CrossBatchMemory

DIM, CLASSES = 7, 5


def batches(number: int, rows: int = 8, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    return [make_batch("trained", rows, DIM, CLASSES, seed=seed, dtype=dtype) for seed in range(number)]


class Queue:
    """The definition: lists of embeddings and labels, the loss on listed pairs without self pairs."""

    def __init__(self, size: int) -> None:
        self.size, self.z, self.y, self.next = size, torch.zeros(0, DIM).double(), torch.zeros(0).long(), 0

    def add(self, z: Tensor, y: Tensor) -> Tensor:
        places = []
        for row, label in zip(z, y, strict=True):
            if self.next == len(self.z):
                self.z, self.y = torch.cat((self.z, row[None])), torch.cat((self.y, label[None]))
            self.z[self.next], self.y[self.next] = row, label
            places.append(self.next)
            self.next = (self.next + 1) % self.size
        return torch.tensor(places)

    def pairs(self, y: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        same = y[:, None] == self.y[None, :]
        other = torch.arange(len(self.z))[None, :] != places[:, None]
        return *(same & other).nonzero(as_tuple=True), *(~same).nonzero(as_tuple=True)


def step(loss_fn: Any, z: Tensor, *rest: Any, **forward: Any) -> Result:
    leaf = z.clone().requires_grad_()
    loss = loss_fn(leaf, *rest, **forward)
    loss.backward()
    assert leaf.grad is not None
    return Result(loss.detach(), {"embeddings": leaf.grad})


PARITY = {
    "contrastive": (ContrastiveLoss, pml_losses.ContrastiveLoss, {}),
    "contrastive-margins": (ContrastiveLoss, pml_losses.ContrastiveLoss, {"pos_margin": 0.1, "neg_margin": 1.3}),
    "ms": (MultiSimilarityLoss, pml_losses.MultiSimilarityLoss, {}),
    "nca": (NCALoss, pml_losses.NCALoss, {"softmax_scale": 3}),
    "triplet": (TripletMarginLoss, pml_losses.TripletMarginLoss, {"margin": 0.2}),
    "triplet-smooth": (TripletMarginLoss, pml_losses.TripletMarginLoss, {"smooth_loss": True}),
    "margin": (MarginLoss, pml_losses.MarginLoss, {}),
    "generalized_lifted": (GeneralizedLiftedStructureLoss, pml_losses.GeneralizedLiftedStructureLoss, {}),
}


@pytest.fixture
def in_fp64() -> Any:
    """PML keeps some constants in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("memory_size", [8, 19, 64])
@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_are_pmls(backend: str, name: str, memory_size: int) -> None:
    ours, theirs, arguments = PARITY[name]
    mine = CrossBatchMemory(ours(**arguments), DIM, memory_size)
    other = pml_losses.CrossBatchMemory(theirs(**arguments), DIM, memory_size)
    for z, y in batches(6):
        assert_same(step(mine, z, y, backend=backend), step(other, z, y), 1e-9)
    assert torch.equal(mine.embedding_memory, other.embedding_memory)
    assert torch.equal(mine.label_memory, other.label_memory)
    assert (mine.queue_idx, mine.has_been_filled) == (other.queue_idx, other.has_been_filled)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "pml"])
def test_a_miner_gives_pmls_values(ours: bool) -> None:
    miner = miners.MultiSimilarityMiner(epsilon=0.2) if ours else pml_miners.MultiSimilarityMiner(epsilon=0.2)
    mine = CrossBatchMemory(ContrastiveLoss(), DIM, 19, miner=miner)
    other = pml_losses.CrossBatchMemory(
        pml_losses.ContrastiveLoss(), DIM, 19, miner=pml_miners.MultiSimilarityMiner(epsilon=0.2)
    )
    for z, y in batches(5):
        assert_same(step(mine, z, y), step(other, z, y), 1e-9)


@pytest.mark.usefixtures("in_fp64")
def test_an_enqueue_mask_and_further_pairs_do_what_pmls_do() -> None:
    mine = CrossBatchMemory(MultiSimilarityLoss(), DIM, 19)
    other = pml_losses.CrossBatchMemory(pml_losses.MultiSimilarityLoss(), DIM, 19)
    mask = torch.arange(8) % 3 == 0
    for z, y in batches(5):
        got, want = step(mine, z, y, enqueue_mask=mask), step(other, z, y, enqueue_mask=mask)
        assert_same(got, want, 1e-9)
    mine, other = CrossBatchMemory(ContrastiveLoss(), DIM, 19), pml_losses.CrossBatchMemory(
        pml_losses.ContrastiveLoss(), DIM, 19
    )  # fmt: skip
    more = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    for z, y in batches(4):
        assert_same(step(mine, z, y, more), step(other, z, y, more), 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@over([*CASES, *OFFICIAL], lambda case: case.takes_ref and case.loss not in ("nca", "fast_ap"))
def test_every_loss_sees_all_pairs_but_those_with_itself(case: Case, backend: str) -> None:
    loss_fn, queue = case.build(CLASSES, DIM), Queue(19)
    memory = CrossBatchMemory(loss_fn, DIM, 19)
    for z, y in batches(5):
        places = queue.add(z, y)
        got = step(memory, z, y, backend=backend)
        if case.takes_tuple:
            want = run(loss_fn, z, y, ref_emb=queue.z, ref_labels=queue.y, indices_tuple=queue.pairs(y, places))
            assert_close(got.loss, want.loss, 1e-9)
            assert_close(got.grads["embeddings"], want.grads["embeddings"], 1e-9)
        else:
            check_selecting(case, loss_fn, got, z, y, queue, places)


def check_selecting(case: Case, loss_fn: Any, got: Result, z: Tensor, y: Tensor, queue: Queue, places: Tensor) -> None:
    """Losses that select by themselves, one row at a time: against a memory without the row's own copy."""
    if not case.cls.over_anchors:
        return check_global(case, loss_fn, got, z, y, queue, places)
    each = case.build(CLASSES, DIM, reduction="sum")
    total, counted, grads = torch.zeros(()).double(), 0, []
    for i in range(len(z)):
        others = torch.arange(len(queue.z)) != places[i]
        one = run(each, z[i : i + 1], y[i : i + 1], ref_emb=queue.z[others], ref_labels=queue.y[others])
        total, grads = total + one.loss, [*grads, one.grads["embeddings"]]
        positives, negatives = (queue.y[others] == y[i]).any(), (queue.y[others] != y[i]).any()
        needed = {"fast_ap": positives, "extreme_triplet": positives and negatives and one.loss != 0}
        counted += int(needed.get(case.loss, True))
    assert_close(got.loss, total / counted, 1e-9)
    assert_close(got.grads["embeddings"], torch.cat(grads) / counted, 1e-9)


def check_global(case: Case, loss_fn: Any, got: Result, z: Tensor, y: Tensor, queue: Queue, places: Tensor) -> None:
    """DRO over all pairs, and hard triplets, from the matrix of losses itself."""
    leaf = z.clone().requires_grad_()
    x, m = (torch.nn.functional.normalize(t) for t in (leaf, queue.z))
    s, same = x @ m.T, y[:, None] == queue.y[None, :]
    pairs, tied = torch.arange(len(m))[None, :] != places[:, None], False
    if case.loss == "triplet":
        d = torch.cdist(x, m, compute_mode="donot_use_mm_for_euclid_dist")
        if case.arguments["triplets"] == "hard":
            far = d.masked_fill(~(same & pairs), -torch.inf).amax(1)
            near = d.masked_fill(same, torch.inf).amin(1)
            terms = torch.relu(far - near + loss_fn.margin)[(same & pairs).any(1) & (~same).any(1)]
        else:
            terms = torch.stack([
                torch.relu(d[a, p] - d[a, n] + loss_fn.margin)
                for a in range(len(z)) for p in (same & pairs)[a].nonzero()[:, 0]
                for n in d[a].masked_fill(same[a] | (d[a] <= d[a, p]), torch.inf).argmin()[None]
                if not same[a, n] and d[a, n] > d[a, p]
            ])  # fmt: skip
        loss = terms.sum() / (terms > 0).sum().clamp_min(1)
    else:
        values = loss_fn.pair_loss(s, same)
        if case.loss == "dro_kl":
            chosen = values[pairs] / loss_fn.gamma
            loss = loss_fn.gamma * (chosen.logsumexp(0) - math.log(len(chosen)))
        else:
            sides = (same & pairs, ~same) if loss_fn.balanced else (pairs,)
            falling, k = [values[side].sort(descending=True).values for side in sides], loss_fn.k // len(sides)
            most = [k, min(k, len(falling[0])) if loss_fn.matched else k]
            loss = torch.cat([side[:k] for side, k in zip(falling, most, strict=False)]).mean()
            pairs_of = zip(falling, most, strict=False)
            tied = any(side[k - 1] - side[k] < 1e-9 for side, k in pairs_of if len(side) > k > 0)
    loss.backward()
    assert leaf.grad is not None
    assert_close(got.loss, loss, 1e-9)
    if not tied:  # else there is more than one right choice: (i, j) and (j, i) are as similar
        assert_close(got.grads["embeddings"], leaf.grad, 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fast_ap_counts_everything_but_itself(backend: str) -> None:
    case = next(case for case in CASES if case.id == "fast_ap")
    memory, queue = CrossBatchMemory(case.build(CLASSES, DIM), DIM, 19), Queue(19)
    for z, y in batches(5):
        places = queue.add(z, y)
        check_selecting(case, None, step(memory, z, y, backend=backend), z, y, queue, places)


def test_the_queue_survives_a_checkpoint() -> None:
    first, second = (CrossBatchMemory(ContrastiveLoss(), DIM, 19) for _ in range(2))
    given = batches(6)
    for z, y in given[:3]:
        first(z, y)
    second.load_state_dict(first.state_dict())
    for z, y in given[3:]:
        assert_same(step(second, z, y), step(first, z, y), 1e-12)
    assert {"embedding_memory", "label_memory"} <= first.state_dict().keys()


def test_the_first_batch_is_compared_with_itself_without_a_gradient_to_its_copies() -> None:
    (z, y), *_ = batches(1)
    got = step(CrossBatchMemory(MultiSimilarityLoss(), DIM, 64), z, y)
    whole = step(MultiSimilarityLoss(), z, y)
    assert_close(got.loss, whole.loss, 1e-12)
    assert (got.grads["embeddings"] - whole.grads["embeddings"]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_takes_the_dtype_of_the_embeddings(dtype: torch.dtype) -> None:
    memory, exact = (CrossBatchMemory(MultiSimilarityLoss(), DIM, 19) for _ in range(2))
    for z, y in batches(4, dtype=dtype):
        got, want = step(memory, z, y), step(exact, z.double(), y)
        assert got.grads["embeddings"].dtype == memory.embedding_memory.dtype == dtype
        assert_close(got.loss, want.loss, 2e-5)
        assert_close(got.grads["embeddings"], want.grads["embeddings"], 1e-2 if dtype == torch.bfloat16 else 2e-5)


def test_empty_batches_and_a_memory_of_one() -> None:
    memory = CrossBatchMemory(ContrastiveLoss(), DIM, 19)
    assert step(memory, torch.zeros(0, DIM), torch.zeros(0).long()).loss == 0
    one = CrossBatchMemory(MultiSimilarityLoss(), DIM, 1)
    for z, y in batches(3, rows=1):
        got = step(one, z, y)
        assert got.loss == 0 and not got.grads["embeddings"].any()


def test_a_large_memory_is_never_held_against_the_batch_at_once() -> None:
    """Nothing that a step keeps for its backward pass is larger than the memory: 16 times less than the matrix."""
    memory = CrossBatchMemory(MultiSimilarityLoss(), 4, 60_000)
    memory.embedding_memory.normal_()
    memory.label_memory.random_(1000)
    memory.has_been_filled = True
    z = torch.randn(64, 4, requires_grad=True)
    largest = 0

    def look(t: Any) -> Any:
        nonlocal largest
        largest = max(largest, t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(look, lambda t: t):
        memory(z, torch.arange(64)).backward()
    assert largest <= 60_000 * 4  # the memory itself


@pytest.mark.sanitize
@pytest.mark.skipif("cpu" not in BACKENDS, reason="the C++ extension was not built")
@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_a_memory_gives_the_same_bits_for_any_number_of_threads(epsilon: float | None) -> None:
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        torch.manual_seed(0)
        memory = CrossBatchMemory(MultiSimilarityLoss(epsilon=epsilon), 9, 3000)
        memory.embedding_memory.normal_()
        memory.label_memory.random_(300)
        memory.has_been_filled = True
        z = torch.randn(300, 9, requires_grad=True)
        loss = memory(z, torch.arange(300))
        loss.backward()
        assert z.grad is not None
        results.append((loss.detach(), z.grad))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(grad, results[0][1])


@pytest.mark.sanitize
@pytest.mark.skipif("cpu" not in BACKENDS, reason="the C++ extension was not built")
def test_a_memory_is_as_precise_as_dense_pytorch() -> None:
    """Its columns are scaled tile by tile; the error against fp64 stays within twice that of plain fp32."""
    z, labels = torch.randn(64, 32), torch.randint(0, 60, (64,))
    old, old_labels = 3 * torch.randn(2000, 32), torch.randint(0, 60, (2000,))

    def step(dtype: torch.dtype, backend: str) -> list[Tensor]:
        memory = CrossBatchMemory(MultiSimilarityLoss(), 32, 2000)
        memory.embedding_memory = old.to(dtype)
        memory.label_memory.copy_(old_labels)
        memory.has_been_filled = True
        x = z.to(dtype, copy=True).requires_grad_()
        loss = memory(x, labels, backend=backend)
        loss.backward()
        assert x.grad is not None
        return [loss.detach().double(), x.grad.double()]

    exact, dense = step(torch.float64, "dense"), step(torch.float32, "dense")
    for got, plain, want in zip(step(torch.float32, "cpu"), dense, exact, strict=True):
        assert (got - want).abs().max() <= 2 * (plain - want).abs().max() + 1e-6


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="loss: got NPairsLoss, which takes no reference set"):
        CrossBatchMemory(NPairsLoss(), DIM)
    with pytest.raises(ValueError, match="loss: got TripletMarginLoss"):
        CrossBatchMemory(TripletMarginLoss(swap=True), DIM)
    with pytest.raises(TypeError, match="loss: got Linear"):
        CrossBatchMemory(torch.nn.Linear(2, 2), DIM)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="miner: got one, but MultiSimilarityLoss selects its pairs by itself"):
        CrossBatchMemory(MultiSimilarityLoss(epsilon=0.1), DIM, miner=miners.MultiSimilarityMiner())
    with pytest.raises(ValueError, match="memory_size: got 0"):
        CrossBatchMemory(ContrastiveLoss(), DIM, 0)
    memory = CrossBatchMemory(ContrastiveLoss(), DIM, 4)
    z, y = batches(1)[0]
    with pytest.raises(ValueError, match="embeddings: got 8 to keep, wanted at most memory_size=4"):
        memory(z, y)
    with pytest.raises(ValueError, match="embeddings: got width 3, wanted embedding_size=7"):
        memory(z[:, :3], y)
    with pytest.raises(TypeError, match=r"enqueue_mask: got torch.int64 \[8\], wanted a bool tensor \[8\]"):
        memory(z, y, enqueue_mask=y)
    assert memory.queue_idx == 0  # nothing entered the queue
