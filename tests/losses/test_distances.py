"""The distance objects: PML's matrices, interface, statistics, and what the engines call them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import assert_close

import pydml
from pydml import distances, records
from pydml.distances import kind

theirs = pytest.importorskip(
    "pytorch_metric_learning.distances", reason="the oracle, pytorch-metric-learning, is not installed"
)

NAMES = ("CosineSimilarity", "DotProductSimilarity", "LpDistance", "SNRDistance")
SETTINGS: list[dict[str, Any]] = [{}, {"power": 2}, {"p": 1}, {"p": 3, "power": 3}, {"normalize_embeddings": False}]


def rows(number: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(number, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_matrices_and_pairwise_values_are_pmls(name: str, settings: dict[str, Any]) -> None:
    if name == "CosineSimilarity" and "normalize_embeddings" in settings:
        pytest.skip("a cosine is of unit rows")
    mine, his = (getattr(module, name)(**settings) for module in (distances, theirs))
    x, y = rows(7, 0), rows(9, 1)
    assert_close(mine(x, y), his(x, y), 1e-12)
    assert_close(mine(x), his(x), 1e-7)  # PML's Euclidean distances of a row and itself are about 1e-8
    assert_close(mine.pairwise_distance(x, y[:7]), his.pairwise_distance(x, y[:7]), 1e-12)
    assert mine.is_inverted == his.is_inverted
    assert_close(mine.margin(x, 0.3), his.margin(x, 0.3), 0)
    assert_close(mine.smallest_dist(x, y[:7]), his.smallest_dist(x, y[:7]), 0)
    assert_close(mine.largest_dist(x, dim=1).values, his.largest_dist(x, dim=1).values, 0)
    assert_close(mine.get_norm(x), his.get_norm(x), 1e-12)
    assert_close(mine.maybe_normalize(x), his.maybe_normalize(x), 1e-12)
    assert isinstance(mine, getattr(theirs, name))


def test_half_precision_rows_have_lp_distances() -> None:
    x = rows(5, 0, torch.float16)
    assert distances.LpDistance()(x).dtype == torch.float16
    assert_close(distances.LpDistance()(x).double(), distances.LpDistance()(x.double()), 2e-3)


@pytest.mark.parametrize(
    ("distance", "called"),
    [
        (distances.CosineSimilarity(), "cosine"),
        (distances.DotProductSimilarity(normalize_embeddings=False), "cosine"),
        (distances.LpDistance(), "euclidean"),
        (distances.LpDistance(power=2), "squared"),
        (theirs.LpDistance(power=2), "squared"),
        (theirs.CosineSimilarity(), "cosine"),
        (distances.LpDistance(power=3), "other"),
        (distances.LpDistance(p=1), "other"),
        (distances.CosineSimilarity(p=1), "other"),  # cosines of rows of 1-norm 1 are no cosines
        (distances.CosineSimilarity(power=2), "other"),
        (distances.SNRDistance(), "other"),
        (type("LpDistance", (distances.LpDistance,), {"__module__": "mine"})(), "other"),
    ],
    ids=str,
)
def test_engines_have_cosines_and_euclidean_distances_only(distance: Any, called: str) -> None:
    assert kind(distance) == called
    if called != "other":
        assert kind(distances.named(called, distance.normalize_embeddings)) == called


def test_names_give_pmls_objects() -> None:
    assert type(distances.named("cosine")) is distances.CosineSimilarity
    assert type(distances.named("cosine", normalize_embeddings=False)) is distances.DotProductSimilarity
    assert distances.named("squared").power == 2


def test_norms_are_recorded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(7, 0) * 3
    quiet = distances.LpDistance()
    quiet(x)
    assert not hasattr(quiet, "initial_avg_query_norm")
    monkeypatch.setattr("pytorch_metric_learning.utils.common_functions.COLLECT_STATS", True)
    mine, his = distances.LpDistance(), theirs.LpDistance()
    mine(x)
    his(x)
    for name in his._record_these_stats:
        assert getattr(mine, name) == pytest.approx(getattr(his, name)) and getattr(mine, name) > 0, name
    assert (mine._record_these, set(mine._record_these_stats)) == (his._record_these, set(his._record_these_stats))
    monkeypatch.undo()
    monkeypatch.setattr(records, "COLLECT_STATS", True)
    assert distances.SNRDistance().collect_stats and not distances.SNRDistance(collect_stats=False).collect_stats


def test_blocks_of_rows_make_up_the_whole_matrix() -> None:
    x, y, blocks = rows(7, 0), rows(9, 1), []
    batched = distances.BatchedDistance(distances.LpDistance(), lambda mat, s, e: blocks.append((s, e, mat)), 3)
    batched(x, y)
    assert [block[:2] for block in blocks] == [(0, 3), (3, 6), (6, 9)]
    assert_close(torch.cat([block[2] for block in blocks]), distances.LpDistance()(x, y), 1e-15)
    assert batched.power == 1 and not batched.is_inverted


def test_wrong_distances_say_what_is_wrong() -> None:
    class Row(distances.BaseDistance):
        def compute_mat(self, query_emb: torch.Tensor, ref_emb: torch.Tensor) -> torch.Tensor:
            return query_emb.sum(1)

    with pytest.raises(ValueError, match=r"compute_mat: Row gave shape \[7\], wanted \[7, 7\]"):
        Row()(rows(7, 0))
    with pytest.raises(ValueError, match=r"query_emb: got shape \[7, 6, 1\]"):
        distances.LpDistance()(rows(7, 0)[..., None])
    with pytest.raises(ValueError, match="is_inverted"):
        distances.LpDistance(is_inverted=True)
    with pytest.raises(ValueError, match="iter_fn"):
        distances.BatchedDistance(distances.LpDistance())(rows(2, 0))
    with pytest.raises(TypeError, match=r"power: got 'two'"):
        pydml.distances.LpDistance(power="two")


WITHOUT_PML = """
import sys
sys.modules["pytorch_metric_learning"] = None
import torch
from pydml.distances import BaseDistance, CosineSimilarity

class Mine(BaseDistance):
    def compute_mat(self, query_emb, ref_emb):
        return torch.cdist(query_emb, ref_emb, p=1)

assert Mine(normalize_embeddings=False)(torch.eye(2)).tolist() == [[0, 2], [2, 0]]
assert CosineSimilarity()(torch.eye(2)).tolist() == [[1, 0], [0, 1]]
print("fine")
"""


def test_distances_need_no_pml() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PML], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr
