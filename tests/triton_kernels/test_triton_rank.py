"""rank in Triton, in the interpreter, against the tiled engine: the same counts under both rules of ties."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import make_batch
from triton_cases import REGIMES, SHAPES, WHY_NOT, assert_equal, lattice, needs_triton, tiled, triton

import pydml

pytestmark = needs_triton
if WHY_NOT is None:
    engine: Any = importlib.import_module("pydml.triton_kernels.rank")


@pytest.fixture(autouse=True)
def _few_positives_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of these sizes then take several walks over the columns."""
    monkeypatch.setattr(engine, "POSITIVES", 4)


def check(*arguments: Any) -> None:
    got, want = triton("rank", *arguments), tiled("rank", *arguments)
    assert_equal(got[:3], want[:3])
    torch.testing.assert_close(got[3], want[3], rtol=1e-14, atol=0)


@pytest.mark.parametrize("cols", [None, 33])
@pytest.mark.parametrize("regime", REGIMES)
def test_counts_are_those_of_tiled_in_every_regime(regime: str, cols: int | None) -> None:
    check(*lattice(regime, 40, cols, 5), False)


@pytest.mark.parametrize("shape", SHAPES)
def test_counts_of_ragged_shapes_are_those_of_tiled(shape: tuple[int, int | None, int]) -> None:
    check(*lattice("clusters", *shape), False)


def test_one_walk_over_the_columns_is_enough_for_small_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "POSITIVES", 16)
    check(*lattice("random", 70, None, 9), False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_counts_as_tiled_does(dtype: torch.dtype) -> None:
    check(*lattice("duplicates", 33, 40, 8, dtype), False)


@pytest.mark.parametrize("size", [(0, None), (0, 5), (5, 0)])
def test_without_queries_or_gallery_all_counts_are_0(size: tuple[int, int | None]) -> None:
    check(*lattice("random", *size, 4), True)


def test_metrics_are_those_of_tiled_on_normalised_embeddings() -> None:
    z, labels = make_batch("trained", 70, 16, 6, dtype=torch.float32)
    z[40:] = z[:30]  # equal rows under equal and under other labels
    for ties in ("optimistic", "pessimistic"):
        got, want = (
            pydml.metrics.retrieval_metrics(z, labels, (1, 4), ties=ties, backend=backend)
            for backend in ("triton", "tiled")
        )
        assert got == pytest.approx(want, rel=1e-12)
