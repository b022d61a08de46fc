"""Metrics over rank-split queries and galleries are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_batch
from ranks import ranks
from torch import Tensor

from pydml import distributed, metrics

KS = (1, 2, 5, 1000)
SHARDS = {2: [11, 18], 3: [0, 11, 18], 4: [9, 3, 0, 17]}
GALLERIES = {2: [23, 0], 3: [4, 10, 9], 4: [0, 5, 5, 13]}


def measured(rank: int, size: int, z: Tensor, y: Tensor, gallery: Any, options: dict[str, Any]) -> dict[str, float]:
    mine = [x.split(SHARDS[size])[rank] for x in (z, y)]
    other = [None, None] if gallery is None else [x.split(GALLERIES[size])[rank] for x in gallery]
    return distributed.retrieval_metrics(*mine, KS, *other, **options)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("mode", ["ring", "gather"])
@pytest.mark.parametrize("with_gallery", [False, True], ids=["itself", "gallery"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_options_give_the_numbers_of_one_process(
    dtype: torch.dtype, with_gallery: bool, mode: str, size: int
) -> None:
    for regime in ("ragged", "trained"):
        z, labels = make_batch(regime, 29, 7, 6, dtype=dtype)
        gallery = make_batch(regime, 23, 7, 6, seed=1, dtype=dtype) if with_gallery else None
        for ties in ("pessimistic", "optimistic"):
            for lone in ("miss", "skip"):
                options: dict[str, Any] = {"ties": ties, "lone_queries": lone}
                want = metrics.retrieval_metrics(z, labels, KS, *(gallery or ()), backend="dense", **options)
                for got in ranks(size)(measured, z, labels, gallery, options | {"mode": mode}):
                    assert got == pytest.approx(want, abs=1e-12)


def shortcuts(rank: int, size: int, z: Tensor, y: Tensor) -> tuple[Any, ...]:
    z, y = (x.split(SHARDS[size])[rank] for x in (z, y))
    return (
        distributed.recall_at_k(z, y, KS),
        distributed.map_at_r(z, y),
        distributed.r_precision(z, y),
        distributed.nmi(z, y, seed=3),
    )


def test_each_metric_by_its_name() -> None:
    z, labels = make_batch("trained", 29, 7, 6)
    want = (
        metrics.recall_at_k(z, labels, KS),
        metrics.map_at_r(z, labels),
        metrics.r_precision(z, labels),
        metrics.nmi(z, labels, seed=3),
    )
    for got in ranks(3)(shortcuts, z, labels):
        assert got[0] == pytest.approx(want[0]) and got[1:] == pytest.approx(want[1:])


def degenerate(rank: int, size: int) -> list[dict[str, float]]:
    empty = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)
    hidden = torch.ones(2, 3)
    hidden[0, 0] = torch.nan if rank else 1.0
    return [
        distributed.retrieval_metrics(*empty),
        distributed.retrieval_metrics(torch.ones(2, 3), torch.arange(2), (1,), *empty),
        distributed.retrieval_metrics(hidden, torch.arange(2)),
    ]


def test_nothing_to_look_for_gives_0_and_nan_gives_nan() -> None:
    for nothing, no_gallery, hidden in ranks(2)(degenerate):
        assert set(nothing.values()) == set(no_gallery.values()) == {0.0}
        assert all(value != value for value in hidden.values())


def wrong(rank: int, size: int, which: str) -> None:
    z, y = torch.ones(4, 3 + (rank if which == "width" else 0)), torch.arange(4)
    ks = (1,) if which != "ks" or rank else (0,)
    distributed.retrieval_metrics(z, y[: 4 - (rank if which == "labels" else 0)], ks)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("width", "query: got different widths: 3 on rank 0, 4 on rank 1"),
        ("labels", "rank 1: labels: got 3 labels, wanted 4"),
        ("ks", "rank 0: ks[0]: got 0"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(which: str, message: str) -> None:
    for answer in ranks(2).answers(wrong, which):
        assert message in str(answer)
