"""The suite can fail: a slightly wrong kernel must not get past the golden vectors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Golden, check_golden, golden, golden_names
from torch import Tensor

from pydml.policy import POLICIES
from pydml.tiled import sides
from pydml.tiled.sides import Matrix, Tile

#: For each policy a case that goes through it.
OF_POLICY = {
    "exponential": "MultiSimilarityLoss__default__ragged",
    "binomial": "BinomialDevianceLoss__default__ragged",
    "bin_lifted": "BinLiftedLoss__default__ragged",
    "hinge": "ContrastiveLoss__default__ragged",
    "mean": "MSMiningLoss__default__ragged",
    "lifted": "LiftedStructureLoss__default__ragged",
    "arcface": "ArcFaceLoss__default__ragged",
    "dro_margin": "DROKLLoss__default__ragged",
    "dro_binomial": "DROKLGroupedLoss__binomial__ragged",
}
#: For each engine that looks at the whole matrix a case, symmetric where it can be.
OF_ENGINE = {
    "pair": "MultiSimilarityLoss__mined__ragged",
    "histogram": "FastAPLoss__default__ragged",
    "triplet": "TripletMarginLoss__default__ragged",
    "semihard": "TripletMarginLoss__semihard__ragged",
    "extremes": "ExtremeTripletLoss__default__ragged",
    "topk": "DROTopKLoss__margin__ragged",
    "rect": "MultiSimilarityLoss__default__rect",
    "proxy": "ProxyAnchorLoss__default__ragged",
}


def check(case: Golden) -> None:
    check_golden(case, "tiled", torch.float64, max(1e-8, case.meta["rtol"]))


@contextlib.contextmanager
def caught() -> Iterator[None]:
    with pytest.raises(AssertionError, match=r"off by|got no gradient"):
        yield


@pytest.mark.parametrize("name", sorted({*OF_POLICY.values(), *OF_ENGINE.values()}))
def test_unchanged_code_passes(name: str) -> None:
    check(golden(name))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slope_that_is_one_percent_off_is_caught(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = POLICIES[policy]
    right: Callable[..., Any] = cls.slope
    monkeypatch.setattr(cls, "slope", lambda self, *arguments: right(self, *arguments) * 1.01)
    with caught():
        check(golden(OF_POLICY[policy]))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_term_that_is_a_ten_thousandth_off_is_caught(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = POLICIES[policy]
    right: Callable[..., Any] = cls.term
    counts = [getattr(slot, "constant", False) for slot in cls.slots]  # scaled alike they would cancel
    monkeypatch.setattr(cls, "term", lambda self, k, *rest: right(self, k, *rest) * (1 if counts[k] else 1.0001))
    with caught():
        check(golden(OF_POLICY[policy]))


@pytest.mark.parametrize("engine", OF_ENGINE)
def test_a_dropped_tile_is_caught(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "TILE_ELEMENTS", 16)
    right = Matrix.tiles

    def all_but_one(self: Matrix) -> Iterator[Tile]:
        tiles = list(right(self))
        yield from tiles[1:] if engine == "topk" else tiles[:-1]  # it finds nothing below the diagonal

    check(golden(OF_ENGINE[engine]))  # many small tiles are fine
    monkeypatch.setattr(Matrix, "tiles", all_but_one)
    with caught():
        check(golden(OF_ENGINE[engine]))


@pytest.mark.parametrize(
    "name",
    [
        "MultiSimilarityLoss__default__ragged",
        "NCALoss__default__ragged",
        "FastAPLoss__default__ragged",
        "HistogramLoss__default__ragged",
        "TripletMarginLoss__smooth__ragged",
        "TripletMarginLoss__semihard__collapsed",
        "ExtremeTripletLoss__default__ragged",
    ],
)
def test_self_pairs_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where an anchor that is its own positive is not as good as none: a hinge on D = 0 is shut."""
    monkeypatch.setattr(Matrix, "clear_self", lambda self, mask, rows: None)
    with caught():
        check(golden(name))


@pytest.mark.parametrize("engine", OF_ENGINE)
def test_a_swapped_label_is_caught(engine: str) -> None:
    case = golden(OF_ENGINE[engine])
    labels = case.arrays["labels"].copy()
    (other,) = np.flatnonzero(labels != labels[0])[:1]
    labels[[0, other]] = labels[[other, 0]]
    with caught():
        check(Golden(case.name, case.arrays | {"labels": labels}, case.meta))


@pytest.mark.parametrize("engine", OF_ENGINE)
def test_a_gradient_that_misses_the_columns_is_caught(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine in ("extremes", "topk"):
        pytest.skip("these engines choose pairs; the gradient goes through the listed pairs")
    right = Matrix.add_weights

    def rows_only(self: Matrix, tile: Tile, w: Tensor) -> None:
        before = None if self.col.grad is None else self.col.grad.clone()
        right(self, tile, w)
        if self.col is not self.row:
            self.col.grad = before
        elif before is not None:  # of a symmetric matrix forget what went to rows outside the tile
            outside = torch.ones(len(before), dtype=torch.bool)
            outside[tile.rows[:1]] = False
            self.col.grad[outside] = before[outside]

    monkeypatch.setattr(Matrix, "add_weights", rows_only)
    with caught():
        check(golden(OF_ENGINE[engine]))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_the_comparison_does_not_let_nan_pass(broken: float) -> None:
    case = golden(OF_ENGINE["pair"])
    for key in ("loss", "grad_embeddings"):
        wrong = case.arrays[key].copy()
        wrong[...] = broken
        with caught():
            check(Golden(case.name, case.arrays | {key: wrong}, case.meta))


def test_every_golden_vector_asks_for_something() -> None:
    """Vectors of zeros are pinned too, but they must not be the rule."""
    trivial = [name for name in golden_names() if not golden(name).arrays["grad_embeddings"].any()]
    assert len(trivial) < len(golden_names()) / 5
