"""topk in Triton, in the interpreter, against the tiled engine: the same pairs by whichever way they are found."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import assert_close, make_batch
from torch import Tensor
from triton_cases import REGIMES, SHAPES, WHY_NOT, assert_equal, lattice, needs_triton, tiled, triton

import pydml

pytestmark = needs_triton
if WHY_NOT is None:
    engine: Any = importlib.import_module("pydml.triton_kernels.topk")

SIDES = ("all", "positives", "negatives")
MARGIN = ("dro_margin", [0.5, 1.0, 1.0, 1.0])
BINOMIAL = ("dro_binomial", [2.0, 0.5, 0.5, 1.0, 1.0])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A small buffer and a small sample, so that a guess is made; and which of the passes the device then took."""
    for name, value in (("ROOM", 32), ("SAMPLE", 8), ("LEAST", 4)):
        monkeypatch.setattr(engine, name, value)
    taken: list[bool] = []
    collect = engine.Search.collect

    def spy(self: Any, threshold: Tensor, keys: Tensor, pairs: Tensor, run: Tensor, *rest: Tensor) -> Any:
        taken.append(bool(run))
        return collect(self, threshold, keys, pairs, run, *rest)

    monkeypatch.setattr(engine.Search, "collect", spy)
    return taken


def check(matrix: Any, k: int, side: str, view: str = "dot") -> None:
    arguments = (*matrix, *MARGIN, k, side, view, False)
    assert_equal(triton("topk", *arguments), tiled("topk", *arguments))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("regime", REGIMES)
def test_pairs_are_those_of_tiled_in_every_regime(regime: str, side: str, steps: list[bool]) -> None:
    check(lattice(regime, 40, None, 5), 9, side)
    check(lattice(regime, 33, 40, 9), 40, side)
    assert len(steps) == 6, "the buffer had room for all pairs"


@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_of_ragged_shapes_are_those_of_tiled(shape: tuple[int, int | None, int]) -> None:
    for k in (1, 70):
        check(lattice("clusters", *shape), k, "all", "squared")


def test_a_good_guess_ends_it(steps: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SAMPLE", 70)
    z, labels = make_batch("random", 70, 16, 9, dtype=torch.float32)
    arguments = (z, None, labels, None, *MARGIN, 9, "all", "dot", True)
    assert_equal(triton("topk", *arguments), tiled("topk", *arguments))
    assert steps == [True, False, False]


def test_equals_of_the_guess_are_taken_in_order(steps: list[bool]) -> None:
    """20 pairs have a loss of 1, all others of 0: the guess is 0, and 10 of the 30 pairs equal it."""
    arguments = (
        torch.eye(40),
        None,
        torch.arange(40) // 2,
        None,
        "dro_margin",
        [0.0, 1.0, 1.0, 1.0],
        30,
        "all",
        "dot",
        False,
    )
    i, j = triton("topk", *arguments)
    assert_equal((i, j), tiled("topk", *arguments))
    assert i[20:].tolist() == [0] * 10
    assert j[20:].tolist() == list(range(2, 12))
    assert steps == [True, False, True]


def test_a_missed_guess_is_mended(steps: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """All large losses are in rows that the sample, rows 0 and 20, does not see: more pairs than there is room for."""
    monkeypatch.setattr(engine, "SAMPLE", 2)
    monkeypatch.setattr(engine, "LEAST", 1)
    z = torch.arange(40.0)[:, None].expand(40, 8) - 19
    z = z.index_fill(0, torch.tensor([0, 20]), 0.0)
    check((z, None, torch.arange(40), None), 9, "negatives")
    assert steps[:2] == [True, True]


@pytest.mark.parametrize("guess", ["lowest", "highest"])
def test_any_guess_leads_to_the_same_pairs(guess: str, steps: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    kth = engine.Search.kth

    def wrong(self: Any, rank: Tensor, rows: Tensor | None, run: Tensor) -> Tensor:
        right = kth(self, rank, rows, run)
        if rows is None:
            return right
        return torch.full_like(right, engine.LOWEST if guess == "lowest" else 2**31 - 1)

    monkeypatch.setattr(engine.Search, "kth", wrong)
    for side in SIDES:
        steps.clear()
        check(lattice("random", 40, None, 5), 9, side)
        if side != "positives":  # all of those may fit into the buffer
            assert steps[:2] == [True, True]


def test_beyond_the_last_pair_there_is_none(steps: list[bool]) -> None:
    for side in SIDES:
        for matrix in (lattice("random", 13, None, 4), lattice("no positives", 40, None, 4)):
            check(matrix, 1000, side)
    for size in ((0, None), (1, None), (0, 5), (5, 0)):
        i, j = triton("topk", *lattice("random", *size, 4), *MARGIN, 3, "all", "dot", True)
        assert i.tolist() == j.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_chooses_as_tiled_does(dtype: torch.dtype, steps: list[bool]) -> None:
    check(lattice("clusters", 40, 33, 9, dtype), 20, "all")


def test_smooth_losses_are_as_large_as_those_of_tiled(steps: list[bool]) -> None:
    z, labels = make_batch("trained", 40, 16, 5, dtype=torch.float32)
    loss = pydml.losses.DROTopKLoss(k=40, base_loss="binomial", balanced=True)
    assert_close(loss(z, labels, backend="triton"), loss(z, labels, backend="tiled"), 1e-5)


def test_nan_stays_in_sight(steps: list[bool]) -> None:
    z, labels = make_batch("random", 40, 8, 4, dtype=torch.float32)
    z[5, 3] = torch.nan
    i, j = triton("topk", z, None, labels, None, *MARGIN, 9, "all", "dot", True)
    assert bool(((i >= -1) & (i < 40) & (j >= -1) & (j < 40)).all())
    assert pydml.losses.DROTopKLoss(k=9)(z, labels, backend="triton").isnan()
