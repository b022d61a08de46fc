"""Rows that are some of the columns, and parts of a row's pairs, on the emulated CUDA kernels: as the tiled engines."""

from __future__ import annotations

import importlib
import itertools
import platform
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch
from helpers import assert_close, generator, make_batch
from torch import Tensor

from pydml import losses, tiled
from pydml.backends import recording
from pydml.cuda.matrix import VIEWS

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulator switches its fibers by hand, on x86-64 only"
)
BACKEND = "cuda-emulated"
SIDES = ("both", "positives", "negatives")
EXPONENTIAL = ("exponential", [-2.0, 0.1, 3.0, 0.2])
KERNELS: dict[str, Any] = {}
TILED = emulation.by_position(tiled.KERNELS)


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    with emulation.backend() as table:
        KERNELS.update(emulation.by_position(table))
        yield


def among(rows: int, cols: int, classes: int, coarse: bool = False) -> tuple[tuple[Tensor, ...], Tensor]:
    """A matrix whose rows are columns in any order, two of them the same one; every 7th row is none of them."""
    g = generator(rows, cols, classes)
    z = torch.randint(-1, 2, (cols, 6), generator=g).float() if coarse else torch.randn(cols, 6, generator=g)
    labels = torch.randint(classes, (cols,), generator=g) * 1000003 - 5
    selves = torch.randperm(cols, generator=g)[:rows]
    selves[1] = selves[2]
    given, row_labels = z[selves], labels[selves]
    strangers = torch.arange(rows) % 7 == 3
    given[strangers] = given[strangers].flip(1)
    selves[strangers] = -1
    return (given, z, row_labels, labels), selves


MATRICES = {
    "tiles": among(75, 140, 9),
    "ties": among(75, 140, 9, coarse=True),
    "one class": among(66, 70, 1),
    "few rows": among(3, 200, 4),
    "all columns": among(64, 64, 5),
}
#: Exact in every order of sums, with many ties.
EXACT = {
    "tiles": among(75, 140, 9, coarse=True),
    "one class": among(66, 70, 1, coarse=True),
    "few rows": among(3, 200, 4, coarse=True),
    "all columns": among(64, 64, 5, coarse=True),
}


def assert_alike(got: Any, want: Any, tolerance: float) -> None:
    """Close, and infinite in the same places."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        infinite = b.isinf()
        assert torch.equal(a[infinite], b[infinite])
        assert_close(a[~infinite], b[~infinite], tolerance)


def assert_gradients(name: str, left: tuple[Any, ...], arguments: tuple[Any, ...], tolerance: float) -> None:
    """Of rows, of columns, and of both at once."""
    for wanted in ((True, True), (True, False), (False, True)):
        back = [k[f"{name}_backward"](*left, *arguments, *wanted) for k in (KERNELS, TILED)]
        assert_alike(*back, tolerance)
        assert [bool(g.numel()) for g in back[0]] == list(wanted)


def assert_pairs(arguments: tuple[Any, ...], tolerance: float = 2e-5) -> None:
    got, want = KERNELS["pair"](*arguments), TILED["pair"](*arguments)
    assert_alike(got, want, 1e-5)
    grad = torch.randn(got[0].shape, generator=generator(3))
    assert_gradients("pair", (grad, *want), arguments, tolerance)


# Selves


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("epsilon", (None, 0.1))
@pytest.mark.parametrize("matrix", MATRICES)
def test_a_row_makes_no_pair_with_itself(matrix: str, epsilon: float | None, view: str) -> None:
    given, selves = MATRICES[matrix]
    assert_pairs((*given, None, None, *EXPONENTIAL, view, True, epsilon, 1, 1.0, selves), 1e-4)


@pytest.mark.parametrize("policy", (("mean", []), ("lifted", [0.5]), ("hinge", [0.3, 0.1])), ids=lambda p: p[0])
def test_nor_in_sums_with_fields(policy: tuple[str, list[float]]) -> None:
    given, selves = MATRICES["tiles"]
    fields = torch.rand(75, generator=generator(1)), torch.rand(140, generator=generator(2))
    assert_pairs((*given, *fields, *policy, "euclidean", True, None, 1, 1.0, selves), 1e-4)


def test_a_self_of_another_class_is_a_negative() -> None:
    """As the tiled engines have it: nobody checks on a GPU what selves say."""
    (rows, cols, labels, col_labels), selves = MATRICES["ties"]
    turned = rows, cols, labels.flip(0), col_labels
    assert_pairs((*turned, None, None, "mean", [], "dot", False, None, 1, 1.0, selves))
    for name, rest in (
        ("extremes", ("hard", "hard", "dot", False)),
        ("triplet", ("all", 0.2, False, False, "dot", False)),
    ):
        assert_alike(KERNELS[name](*turned, *rest, selves), TILED[name](*turned, *rest, selves), 1e-5)


@pytest.mark.parametrize("nodes", (5, 300))
@pytest.mark.parametrize("matrix", MATRICES)
def test_nor_in_histograms(matrix: str, nodes: int) -> None:
    given, selves = MATRICES[matrix]
    arguments = (*given, nodes, -1.0, 1.0, "cosine", True, selves)
    got, want = KERNELS["histogram"](*arguments), TILED["histogram"](*arguments)
    if matrix == "ties":  # u on a node, or a bit beside it
        got, want = (tuple(h.sum(1) for h in found[:2]) for found in (got, want))
        assert_alike(got, want, 1e-5)
        return
    assert_alike(got, want, 3e-7 * nodes + 1e-6)
    grads = tuple(torch.randn(want[0].shape, generator=generator(nodes, k)) for k in range(2))
    assert_gradients("histogram", (*grads, *want), arguments, 1e-4)


@pytest.mark.parametrize("smooth", (False, True))
@pytest.mark.parametrize("mode", ("all", "semihard"))
@pytest.mark.parametrize("matrix", MATRICES)
def test_nor_in_triplets(matrix: str, mode: str, smooth: bool) -> None:
    given, selves = MATRICES[matrix]
    for view, normalize in (("dot", False), ("euclidean", True)):
        if matrix == "ties" and normalize:  # what ties without rounding does not tie with it
            continue
        arguments = (*given, mode, 0.25, False, smooth, view, normalize, selves)
        got, want = KERNELS["triplet"](*arguments), TILED["triplet"](*arguments)
        assert_alike(got, want, 1e-5)
        grad = torch.randn(want[0].shape, generator=generator(3))
        assert_gradients("triplet", (grad,), arguments, 1e-4)


@pytest.mark.parametrize("matrix", EXACT)
def test_nobody_is_an_extreme_of_its_own(matrix: str) -> None:
    given, selves = EXACT[matrix]
    kinds = ("easy", "hard", "none")
    for positive, negative in (
        *itertools.product(kinds, (*kinds, "semihard")),
        ("semihard", "hard"),
        ("semihard", "none"),
    ):
        arguments = (*given, positive, negative, "dot", False, selves)
        for got, want in zip(KERNELS["extremes"](*arguments), TILED["extremes"](*arguments), strict=True):
            assert torch.equal(got, want)
        assert not ((KERNELS["extremes"](*arguments)[0] == selves) & (selves >= 0)).any()


@pytest.mark.parametrize("guess", (False, True), ids=("all", "guessed"))
@pytest.mark.parametrize("side", ("all", "positives", "negatives"))
@pytest.mark.parametrize("matrix", EXACT)
def test_nor_among_the_largest_losses(matrix: str, side: str, guess: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pairs than there are, too: -1 begins where the tiled engine says so."""
    engine = importlib.import_module("pydml.cuda.topk")
    for name, value in (("ROOM", 32), ("SAMPLE", 16), ("LEAST", 4)) if guess else ():
        monkeypatch.setattr(engine, name, value)
    given, selves = EXACT[matrix]
    for k in (9, 400, 20000):
        arguments = (*given, "dro_margin", [0.2, 0.5, 1.0, 1.0], k, side, "dot", False, selves)
        for got, want in zip(KERNELS["topk"](*arguments), TILED["topk"](*arguments), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_selves_in_other_formats(dtype: torch.dtype) -> None:
    (rows, cols, *labels), selves = MATRICES["tiles"]
    given = (rows.to(dtype), cols.to(dtype), *labels)
    arguments = (*given, None, None, *EXPONENTIAL, "euclidean", True, None, 1, 1.0, selves)
    assert_alike(KERNELS["pair"](*arguments), TILED["pair"](*arguments), 1e-3)
    grad, want = torch.randn(75, 2, generator=generator(3)), TILED["pair"](*arguments)
    assert_gradients("pair", (grad, *want), arguments, 8e-3)


def test_no_columns_hold_nobody() -> None:
    given = torch.randn(3, 5), torch.randn(0, 5), torch.zeros(3, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    nobody = torch.full((3,), -1)
    arguments = (*given, None, None, *EXPONENTIAL, "dot", True, None, 1, 1.0, nobody)
    assert_alike(KERNELS["pair"](*arguments), TILED["pair"](*arguments), 0.0)


# Bounds and sides


@pytest.mark.parametrize("view", ("dot", "euclidean"))
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("mining", ("no", "found", "given"))
@pytest.mark.parametrize("policy", (EXPONENTIAL, ("mean", [])), ids=lambda p: p[0])
@pytest.mark.parametrize("square", (False, True), ids=("among", "symmetric"))
def test_one_side_and_known_thresholds(
    square: bool, policy: tuple[str, list[float]], mining: str, side: str, view: str
) -> None:
    given, selves = MATRICES["tiles"]
    if square:
        given, selves = (given[1], None, given[3], None), None
    bounds = None
    if mining == "given":
        lowest = 0.3 * torch.randn(len(given[0]), generator=generator(5)) - (1.2 if view == "euclidean" else 0.0)
        bounds = torch.stack((lowest + 0.5, lowest), 1)
    epsilon = None if mining == "no" else 0.1
    arguments = (*given, None, None, *policy, view, True, epsilon, 1, 1.0, selves, bounds, side)
    got, want = KERNELS["pair"](*arguments), TILED["pair"](*arguments)
    assert_alike(got, want, 1e-5)
    if bounds is not None:
        known = slice(1, 2) if side == "negatives" else slice(0, 2)
        assert torch.equal(got[1][:, known], bounds[:, known])
    grad = torch.randn(want[0].shape, generator=generator(3))
    for wanted in ((True, False),) if square else ((True, True), (False, True)):
        back = [k["pair_backward"](grad, *want, *arguments, *wanted) for k in (KERNELS, TILED)]
        assert_alike(*back, 1e-4)


def test_parts_of_the_columns_make_the_whole() -> None:
    """Thresholds of negatives from a first look, then both sides apart: the statistics of one call."""
    given, selves = MATRICES["tiles"]
    how = (*given, None, None, *EXPONENTIAL, "dot", True, 0.1, 1, 1.0, selves)
    stats, thresholds, _ = KERNELS["pair"](*how)
    for side, slot in (("positives", 0), ("negatives", 1)):
        part, found, _ = KERNELS["pair"](*how, thresholds, side)
        assert_alike([part[:, slot], found], [stats[:, slot], thresholds], 1e-6)
        assert part[:, 1 - slot].isneginf().all()


# A memory


@pytest.mark.parametrize(
    "loss",
    (
        losses.MultiSimilarityLoss(epsilon=0.1),
        losses.FastAPLoss(),
        losses.DROTopKLoss(k=50),
        losses.DROKLLoss(),
        losses.TripletMarginLoss(),
        losses.TripletMarginLoss(triplets="hard"),
        losses.TripletMarginLoss(triplets="semihard"),
        losses.ExtremeTripletLoss(),
        losses.MarginLoss(),
        losses.NCALoss(),
    ),
    ids=lambda loss: type(loss).__name__,
)
def test_a_memory_runs_on_the_kernels(loss: torch.nn.Module) -> None:
    memories = {name: losses.CrossBatchMemory(loss, 16, memory_size=90) for name in (BACKEND, "tiled")}
    for seed in range(3):  # the third batch wraps around
        z, labels = make_batch("random", 40, 16, 6, seed=seed, dtype=torch.float32)
        found = {}
        for name, memory in memories.items():
            leaf = z.clone().requires_grad_()
            with recording() as calls:
                value = memory(leaf, labels, backend=name)
                value.backward()
            assert calls
            assert {ran.backend for ran in calls} == {name}
            found[name] = value, leaf.grad
        for got, want in zip(*found.values(), strict=True):
            assert_close(got, want, 3e-5)
