"""top-K on the emulated CUDA kernels, against the tiled engine: the same pairs by whichever way they are found."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch
from helpers import generator, make_batch
from torch import Tensor

from pydml import tiled

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulator switches its fibers by hand, on x86-64 only"
)
engine: Any = importlib.import_module("pydml.cuda.topk")
SIDES = ("positives", "negatives", "all")
TILED = emulation.by_position(tiled.KERNELS)["topk"]
MARGIN = ("dro_margin", [0.2, 0.5, 1.0, 1.0])


@pytest.fixture(scope="module")
def topk() -> Iterator[Any]:
    with emulation.kernels() as table:
        yield emulation.by_position(table)["topk"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """A short list and a small sample, so that a guess is made; and which steps the device then took."""
    for name, value in (("ROOM", 32), ("SAMPLE", 16), ("LEAST", 4)):
        monkeypatch.setattr(engine, name, value)
    taken: list[tuple[str, bool]] = []
    stage = engine.Search.stage

    def spy(self: Any, name: str, run: Tensor, *rest: Any, **more: Any) -> None:
        taken.append((name, bool(run)))
        stage(self, name, run, *rest, **more)

    monkeypatch.setattr(engine.Search, "stage", spy)
    return taken


def went(steps: list[tuple[str, bool]]) -> list[str]:
    return [name for name, run in steps if run]


def coarse(rows: int, dim: int, seed: int = 0) -> Tensor:
    """Embeddings of few different numbers: many ties, and equal rows."""
    return torch.randint(-1, 2, (rows, dim), generator=generator(rows, dim, seed)).float()


MATRICES = {
    "symmetric": (coarse(90, 6), None, torch.arange(90) * 7 % 13, None),
    "rectangular": (coarse(90, 6), coarse(140, 6, 1), torch.arange(90) * 7 % 13, torch.arange(140) * 5 % 11),
    "one class": (coarse(70, 6), None, torch.zeros(70, dtype=torch.long), None),
    "all different": (coarse(70, 6), None, torch.arange(70), None),
    "collapsed": (torch.ones(70, 3), None, torch.arange(70) % 9, None),
}


def check(topk: Any, matrix: Any, k: int, side: str, view: str = "dot") -> None:
    arguments = (*matrix, *MARGIN, k, side, view, False)
    for got, want in zip(topk(*arguments), TILED(*arguments), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("k", (1, 100, 3000, 20000))
def test_ties_go_as_tiled_breaks_them(matrix: str, side: str, k: int, topk: Any) -> None:
    check(topk, MATRICES[matrix], k, side)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("k", (3, 60))
def test_guessed_thresholds_lead_to_the_same_pairs(
    matrix: str, side: str, k: int, topk: Any, steps: list[tuple[str, bool]]
) -> None:
    check(topk, MATRICES[matrix], k, side)
    assert steps[0][0] == "all_losses", "there was room for all pairs"


def test_a_good_guess_takes_one_sweep(
    topk: Any, steps: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SAMPLE", 64)
    z, labels = make_batch("random", 150, 16, 9, dtype=torch.float32)
    check(topk, (z, None, labels, None), 40, "all", "euclidean")
    assert went(steps) == ["all_losses", "list_above"]


def test_equals_of_the_guess_are_taken_in_order(topk: Any, steps: list[tuple[str, bool]]) -> None:
    """20 pairs have a loss of 1, all others of 0: the guess is 0, and 10 of the 30 pairs equal it."""
    matrix = (torch.eye(40), None, torch.arange(40) // 2, None)
    i, j = topk(*matrix, "dro_margin", [0.0, 1.0, 1.0, 1.0], 30, "all", "dot", False)
    assert i[20:].tolist() == [0] * 10
    assert j[20:].tolist() == list(range(2, 12))
    assert went(steps) == ["all_losses", "list_above", "list_equal"]


@pytest.mark.parametrize("guess", (0, (1 << 32) - 1), ids=("lowest", "highest"))
@pytest.mark.parametrize("side", SIDES)
def test_any_guess_leads_to_the_same_pairs(
    side: str, guess: int, topk: Any, steps: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.Search, "guess", lambda self, *_: self.full(guess))
    check(topk, MATRICES["symmetric"], 9, side)
    assert went(steps)[:5] == ["list_above", "first_digit", "second_digit", "last_digit", "list_above"]
    check(topk, MATRICES["rectangular"], 9, side)


def test_keys_have_the_order_of_losses() -> None:
    losses = torch.tensor([-torch.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38, torch.inf])
    keys = engine.key_of(losses)
    assert keys[3] == keys[4]
    assert (keys.diff() >= 0).all()
    assert len(keys.unique()) == len(keys) - 1
    assert int(keys.min()) >= 0 and int(keys.max()) < 1 << 32
