"""Rows that are some of the columns, and thresholds found elsewhere: the C++ engines against the tiled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pydml
from pydml.among import among, knowing
from pydml.losses import MultiSimilarityLoss
from pydml.memory import CrossBatchMemory
from pydml.policy import POLICIES, LogSumExp

pytestmark = [
    pytest.mark.sanitize,
    pytest.mark.skipif(pydml.backends()["cpu"] is not None, reason="the extension is not built"),
]

ROWS, DIM = 37, 9
VIEWS = ("dot", "cosine", "euclidean", "squared")
MS = ("exponential", [-2.0, 0.5, 50.0, 0.5])
#: Engine and the rest of its arguments, from behind the labels on; {view} stands for how u is made.
ENGINES: dict[str, tuple[str, list[Any]]] = {
    "pair": ("pair", [None, None, *MS, "{view}", True, None, 1, 1.0]),
    "mined": ("pair", [None, None, *MS, "{view}", True, 0.1, 1, 1.0]),
    "not normalised": ("pair", [None, None, "binomial", [2.0, 5.0, 0.5], "{view}", False, None, 1, 1.0]),
    "hinges": ("pair", [None, None, "hinge", [0.9, 0.1], "{view}", True, None, 1, 1.0]),
    "histogram": ("histogram", [11, -4.0, 1.0, "{view}", True]),
    "triplet": ("triplet", ["all", 0.2, False, False, "{view}", True]),
    "semihard": ("triplet", ["semihard", 0.2, False, True, "{view}", True]),
}


def sides(cols: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, columns, their labels, and the columns that the rows are; the labels come in no order.

    Rows do not look like those columns: what is left out by its index must not be left out for its value.
    """
    random = torch.Generator().manual_seed(cols)
    labels = torch.randint(-3, 9, (cols,), generator=random)
    col = torch.randn(12, DIM, generator=random, dtype=torch.float64)[labels + 3]
    col = (col + torch.randn(cols, DIM, generator=random, dtype=torch.float64)).to(dtype)
    selves = torch.randperm(cols, generator=random)[:ROWS]
    rows = torch.randn(ROWS, DIM, generator=random, dtype=torch.float64).to(dtype)
    return rows, col, labels[selves], labels, selves


def outputs(name: str, view: str, given: Any, backend: str) -> list[Tensor]:
    """What an engine gives that has a gradient, then the gradients of rows and columns."""
    engine, options = ENGINES[name]
    rows, cols, *labels, selves = given
    rows, cols = (x.clone().requires_grad_() for x in (rows, cols))
    options = [view if x == "{view}" else x for x in options]
    out = [x for x in among(rows, cols, selves, backend, engine, *labels, *options) if x.requires_grad]
    weights = torch.linspace(0.5, 2.0, len(rows), dtype=rows.dtype)
    for x in out:
        w = weights if x.ndim == 1 else weights[:, None] * torch.linspace(1, 2, x.shape[1], dtype=rows.dtype)
        (torch.where(torch.isfinite(x), x, 0) * w).sum().backward(retain_graph=True)
    return [*out, rows.grad, cols.grad]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) >= 3
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cols", [38, 140, 333], ids=["copied", "copied, larger", "gathered tile by tile"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_leaves_out_each_rows_own_column(name: str, view: str, cols: int) -> None:
    given = sides(cols)
    got, want = (outputs(name, view, given, backend) for backend in ("cpu", "tiled"))
    assert_equal(got, want)
    with_itself = outputs(name, view, (*given[:4], None), "cpu")
    assert not torch.allclose(with_itself[0], want[0])  # the test would see a self pair


LEAST, MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
#: Twelve labels to stand for those of the columns: far apart, and at the ends of what there is.
NAMES = {
    "huge": [10**17 * k for k in range(-5, 7)],
    "turned": [-(10**17) * k for k in range(-5, 7)],
    "at the ends": [LEAST, LEAST + 1, -1, 0, 1, MOST - 9, *range(MOST - 5, MOST + 1)],
    "all at one end": [*range(MOST - 11, MOST + 1)],
}


@pytest.mark.parametrize("few", [False, True], ids=["all classes asked for", "few classes asked for"])
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_labels_may_be_any_integers(names: list[int], few: bool) -> None:
    """Columns that no row asks for are of one class to the engine, whose label must not be one that a row has."""
    rows, cols, y, labels, selves = sides(333)
    if few:
        asked = y >= 6
        rows, y, selves = rows[asked], y[asked], selves[asked]
    named = torch.tensor(names)
    given = rows, cols, named[y + 3], named[labels + 3], selves
    assert_equal(
        outputs("mined", "dot", given, "cpu"), outputs("mined", "dot", (*given[:2], y, labels, selves), "tiled")
    )


@pytest.mark.parametrize("options", [("easy", "hard"), ("hard", "semihard"), ("semihard", "easy")], ids=str)
@pytest.mark.parametrize("cols", [60, 333])
def test_extremes_leave_out_each_rows_own_column(cols: int, options: tuple[str, str]) -> None:
    *given, selves = sides(cols)
    got, want = (knowing(b, "extremes")(*given, *options, "dot", True, selves=selves) for b in ("cpu", "tiled"))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("side", ["all", "positives", "negatives"])
def test_the_largest_pairs_leave_out_each_rows_own_column(side: str) -> None:
    *given, selves = sides(333)
    options = "dro_margin", [0.2, 0.5, 1.0, 1.0], 100, side, "dot", True
    (i, j), want = (knowing(backend, "topk")(*given, *options, selves=selves) for backend in ("cpu", "tiled"))
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == sorted(zip(*(x.tolist() for x in want), strict=True))
    assert not (j == selves[i]).any()


@pytest.mark.parametrize("policy", ["exponential", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_pieces_with_given_thresholds_make_up_the_whole(dtype: torch.dtype, policy: str) -> None:
    rows, cols, y, labels, _ = sides(400, dtype)
    params = MS[1] if policy == "exponential" else []
    run = knowing("cpu", "pair")

    def part(at: slice, **known: Tensor) -> tuple[Tensor, Tensor]:
        stats, thresholds, _ = run(
            rows, cols[at], y, labels[at], None, None, policy, params, "dot", True, 0.3, 1, 1.0, **known
        )
        return stats, thresholds

    whole, thresholds = part(slice(None))
    pieces = [part(at, mined=thresholds) for at in (slice(0, 7), slice(7, 7), slice(7, 300), slice(300, 400))]
    assert all(torch.equal(found, thresholds) for _, found in pieces)
    merged, tolerance = torch.zeros_like(whole), 1e-5 if dtype == torch.float32 else 1e-12
    for k, slot in enumerate(POLICIES[policy].slots):
        column = torch.stack([stats[:, k] for stats, _ in pieces])
        merged[:, k] = column.logsumexp(0) if isinstance(slot, LogSumExp) else column.sum(0)
    torch.testing.assert_close(merged, whole, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(part(slice(None), mined=thresholds - 0.2)[0], whole)


def test_thresholds_and_selves_of_another_size_are_refused() -> None:
    rows, cols, y, labels, selves = sides(60)
    run, options = knowing("cpu", "pair"), (None, None, *MS, "dot", True, 0.1, 1, 1.0)
    with pytest.raises(RuntimeError, match=r"mined: got \[3, 2\], wanted \[37, 2\]"):
        run(rows, cols, y, labels, *options, mined=torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match=r"selves: got shape \[2\], wanted \[37\]"):
        run(rows, cols, y, labels, *options, selves=selves[:2])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_a_memory_gives_the_same_bits_for_any_number_of_threads(
    epsilon: float | None, threads: Callable[[int], None]
) -> None:
    results = []
    for number in (1, 2, 3):
        threads(number)
        torch.manual_seed(0)
        memory = CrossBatchMemory(MultiSimilarityLoss(epsilon=epsilon), DIM, 3000)
        memory.embedding_memory.normal_()
        memory.label_memory.random_(300)
        memory.has_been_filled = True
        z = torch.randn(300, DIM, requires_grad=True)
        loss = memory(z, torch.arange(300))
        loss.backward()
        assert z.grad is not None
        results.append((loss.detach(), z.grad))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(grad, results[0][1])


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
