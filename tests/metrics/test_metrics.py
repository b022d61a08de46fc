"""Retrieval metrics against loops and PML, NMI against scikit-learn."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BACKENDS, REGIMES, generator, make_batch
from torch import Tensor

from pydml import metrics

ON = pytest.mark.parametrize("backend", BACKENDS)
KS = (1, 2, 3, 5, 8, 1000)
TIES, LONE = ("pessimistic", "optimistic"), ("miss", "skip")


def loops(
    s: list[list[float]], labels: list[int], gallery_labels: list[int], own: bool, ties: str, lone: str
) -> dict[str, float]:
    """The definitions, one query after the other, from the similarities of all pairs."""
    sums = dict.fromkeys([*(f"recall@{k}" for k in KS), "map@r", "r_precision"], 0.0)
    counted = 0
    for i, label in enumerate(labels):
        columns = [j for j in range(len(gallery_labels)) if not (own and i == j)]
        positive = [gallery_labels[j] == label for j in range(len(gallery_labels))]
        columns.sort(key=lambda j: (-s[i][j], positive[j] == (ties == "pessimistic")))
        hits = [positive[j] for j in columns]
        r = sum(hits)
        counted += r > 0 or lone == "miss"
        for k in KS:
            sums[f"recall@{k}"] += any(hits[:k])
        if r:
            sums["r_precision"] += sum(hits[:r]) / r
            sums["map@r"] += sum(sum(hits[: k + 1]) / (k + 1) for k in range(r) if hits[k]) / r
    return {name: total / max(counted, 1) for name, total in sums.items()}


def check(
    query: Tensor, labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor | None, normalize: bool, backend: str
) -> None:
    """All metrics with all options are those of the loops."""
    q, g = query.double(), (query if gallery is None else gallery).double()
    if normalize:
        q, g = torch.nn.functional.normalize(q), torch.nn.functional.normalize(g)
    s = (q @ g.T).tolist()
    columns = (labels if gallery_labels is None else gallery_labels).tolist()
    for ties in TIES:
        for lone in LONE:
            options: Any = {"ties": ties, "lone_queries": lone, "normalize_embeddings": normalize, "backend": backend}
            got = metrics.retrieval_metrics(query, labels, KS, gallery, gallery_labels, **options)
            assert got == pytest.approx(loops(s, labels.tolist(), columns, gallery is None, ties, lone), abs=1e-12)
            assert metrics.recall_at_k(query, labels, KS, gallery, gallery_labels, **options) == {
                k: got[f"recall@{k}"] for k in KS
            }
            assert metrics.map_at_r(query, labels, gallery, gallery_labels, **options) == got["map@r"]
            assert metrics.r_precision(query, labels, gallery, gallery_labels, **options) == got["r_precision"]


def whole(rows: int, dim: int, *seed: int) -> Tensor:
    """Small whole numbers: their dot products are exact, and many are equal."""
    return torch.randint(-2, 3, (rows, dim), generator=generator(rows, dim, *seed)).float()


@ON
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_queries_among_themselves(backend: str, regime: str, dtype: torch.dtype) -> None:
    z, labels = make_batch(regime, 40, 8, 9, dtype=dtype)
    check(z, labels, None, None, True, backend)
    check(z, labels, None, None, False, backend)


@ON
@pytest.mark.parametrize("classes", [1, 4, 300])
def test_queries_in_a_gallery(backend: str, classes: int) -> None:
    query, labels = make_batch("random", 21, 6, classes)
    gallery, gallery_labels = make_batch("random", 50, 6, classes, seed=1)
    check(query, labels, gallery, gallery_labels, True, backend)
    check(gallery, gallery_labels, query, labels, True, backend)


@ON
@pytest.mark.parametrize("classes", [1, 3, 12, 40])
def test_ties_go_by_the_argument(backend: str, classes: int) -> None:
    query, labels = whole(40, 3), torch.arange(40) % classes
    check(query, labels, None, None, False, backend)
    check(query, labels, whole(31, 3, 1), torch.arange(31) % classes, False, backend)


@ON
def test_bit_identical_rows_are_ties_not_the_query_itself(backend: str) -> None:
    """Every row occurs three times, once in another class: the tie decides all."""
    z = torch.randn(16, 24, generator=generator(1)).repeat(3, 1)
    labels = torch.cat((torch.arange(16), torch.arange(16), torch.full((16,), 99)))
    for ties, first in (("pessimistic", 0), ("optimistic", 2 / 3)):
        got = metrics.recall_at_k(z, labels, (1, 2), ties=ties, backend=backend)
        assert got == {1: pytest.approx(first), 2: pytest.approx(2 / 3)}


def tied(rows: int, dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that recur twice or thrice, in places far from each other, mostly with another label."""
    g = generator(rows, dim, seed)
    kinds = torch.randn((rows + 2) // 3, dim, generator=g, dtype=torch.float64).to(dtype)
    return kinds.repeat(3, 1)[:rows], torch.randint(max(2, rows // 4), (rows,), generator=g)


def check_ties(backend: str) -> None:
    """Against similarities of the different rows alone: equal rows have equal ones."""
    for dtype, rows, dim in itertools.product((torch.float32, torch.float64), (5, 7, 12, 33, 70), (3, 24, 33)):
        z, labels = tied(rows, dim, dtype, 0)
        kind = torch.arange(rows) % ((rows + 2) // 3)
        x = torch.nn.functional.normalize(z[: int(kind.max()) + 1].double())
        s = (x[:, None] * x[None]).sum(2)[kind][:, kind]
        for ties in TIES:
            want = loops(s.tolist(), labels.tolist(), labels.tolist(), True, ties, "miss")
            got = metrics.retrieval_metrics(z, labels, KS, ties=ties, backend=backend)
            assert got == pytest.approx(want, abs=1e-12), (dtype, rows, dim, ties, backend)


@ON
def test_equal_rows_tie_in_small_sets_and_in_double_precision(backend: str) -> None:
    check_ties(backend)


@pytest.mark.parametrize("code_path", ["COMPATIBLE", "AVX2"])
def test_equal_rows_tie_on_other_cpus(code_path: str) -> None:
    """MKL's code for other CPUs gives equal columns different bits, by where they stand."""
    words = "import test_metrics as t; [t.check_ties(b) for b in ('dense', 'tiled', 'cpu') if b in pydml.backends()]"
    here = Path(__file__).parent
    environment = {**os.environ, "MKL_CBWR": code_path, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    subprocess.run([sys.executable, "-c", f"import pydml; {words}"], env=environment, check=True, timeout=300)


@ON
def test_collapsed_embeddings_have_no_recall(backend: str) -> None:
    """A constant model: pessimistically nothing is found before all negatives are."""
    z, labels = torch.ones(12, 5), torch.arange(12) % 4
    assert metrics.recall_at_k(z, labels, (1, 9, 10), backend=backend) == {1: 0.0, 9: 0.0, 10: 1.0}
    assert metrics.recall_at_k(z, labels, (1,), ties="optimistic", backend=backend) == {1: 1.0}
    assert metrics.map_at_r(z, labels, backend=backend) == metrics.r_precision(z, labels, backend=backend) == 0.0


@ON
def test_lone_queries_are_missed_or_skipped(backend: str) -> None:
    z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    labels = torch.tensor([0, 0, 1, 2])
    assert metrics.recall_at_k(z, labels, [1], backend=backend) == {1: 0.5}
    assert metrics.recall_at_k(z, labels, [1], lone_queries="skip", backend=backend) == {1: 1.0}
    alone = torch.arange(4)
    for lone in LONE:
        found = metrics.retrieval_metrics(z, alone, (1, 9), lone_queries=lone, backend=backend)
        assert set(found.values()) == {0.0}


@ON
def test_the_gallery_that_is_the_query_tensor_excludes_self(backend: str) -> None:
    z, labels = make_batch("trained", 30, 8, 5)
    alone = metrics.retrieval_metrics(z, labels, KS, backend=backend)
    assert metrics.retrieval_metrics(z, labels, KS, z, labels, backend=backend) == alone
    assert metrics.recall_at_k(z, labels, (1,), z.clone(), labels, backend=backend) == {1: 1.0}  # each finds itself


@ON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_ranked_in_float32(backend: str, dtype: torch.dtype) -> None:
    z, labels = make_batch("trained", 40, 8, 9, dtype=dtype)
    got = metrics.retrieval_metrics(z, labels, KS, backend=backend)
    assert got == metrics.retrieval_metrics(z.float(), labels, KS, backend=backend)


@ON
def test_labels_beyond_float32_do_not_collide(backend: str) -> None:
    z, labels = make_batch("trained", 40, 8, 9)
    got = metrics.retrieval_metrics(z, 2**53 + labels, KS, backend=backend)
    assert got == metrics.retrieval_metrics(z, labels.to(torch.uint8), KS, backend=backend)


@ON
def test_nothing_to_look_up_or_to_look_in_gives_zero(backend: str) -> None:
    z, labels = make_batch("random", 6, 4, 2)
    for arguments in (
        (z[:0], labels[:0]),
        (z[:0], labels[:0], (1, 5), z, labels),
        (z, labels, (1, 5), z[:0], labels[:0]),
        (z[:1], labels[:1]),
    ):
        found = metrics.retrieval_metrics(*arguments, backend=backend)
        assert found and set(found.values()) == {0.0}


@ON
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_give_nan(backend: str, bad: float) -> None:
    z, labels = make_batch("random", 12, 4, 3)
    spoilt = z.clone()
    spoilt[3, 1] = bad
    for found in (
        metrics.retrieval_metrics(spoilt, labels, backend=backend),
        metrics.retrieval_metrics(z, labels, (1,), spoilt, labels, backend=backend),
    ):
        assert all(value != value for value in found.values())
    assert metrics.nmi(spoilt, labels) != metrics.nmi(spoilt, labels)


@ON
@pytest.mark.parametrize("gallery", [False, True])
def test_agrees_with_pml_where_conventions_do(backend: str, gallery: bool) -> None:
    """PML leaves out lone queries and has only Recall@1, as precision_at_1."""
    calculator = pytest.importorskip(
        "pytorch_metric_learning.utils.accuracy_calculator", reason="pytorch-metric-learning is not installed"
    )
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.inference import CustomKNN

    names = {"precision_at_1": "recall@1", "mean_average_precision_at_r": "map@r", "r_precision": "r_precision"}
    theirs = calculator.AccuracyCalculator(
        include=tuple(names), device=torch.device("cpu"), knn_func=CustomKNN(CosineSimilarity()), kmeans_func=0
    )
    for regime in ("trained", "ragged"):
        z, labels = make_batch(regime, 60, 8, 9, dtype=torch.float32)
        reference = make_batch(regime, 80, 8, 7, seed=1, dtype=torch.float32) if gallery else (None, None)
        want = theirs.get_accuracy(z, labels, *reference)
        got = metrics.retrieval_metrics(z, labels, (1,), *reference, lone_queries="skip", backend=backend)
        assert got == pytest.approx({names[name]: value for name, value in want.items()}, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"ks": ()}, ValueError, "ks: got an empty sequence"),
        ({"ks": 5}, TypeError, "ks: got int, wanted a sequence"),
        ({"ks": torch.tensor([1])}, TypeError, "ks: got Tensor"),
        ({"ks": (1, 0)}, ValueError, "ks[1]: got 0, wanted an int >= 1"),
        ({"ks": (1.0,)}, TypeError, "ks[0]: got 1.0"),
        ({"ks": (True,)}, TypeError, "ks[0]: got True"),
        ({"lone_queries": "drop"}, ValueError, "lone_queries: got 'drop', wanted one of 'miss', 'skip'"),
        ({"ties": "fair"}, ValueError, "ties: got 'fair'"),
        ({"normalize_embeddings": None}, TypeError, "normalize_embeddings: got None"),
        ({"backend": "faiss"}, ValueError, "backend: got 'faiss'"),
        ({"query": torch.ones(3)}, ValueError, "query: got shape [3]"),
        ({"query": [[1.0]]}, TypeError, "query: got list"),
        ({"labels": torch.arange(4)}, ValueError, "labels: got 4 labels, wanted 6"),
        ({"labels": torch.ones(6)}, TypeError, "labels: got dtype torch.float32"),
        ({"gallery": torch.ones(2, 4)}, ValueError, "gallery_labels: got None beside gallery"),
        ({"gallery_labels": torch.arange(6)}, ValueError, "gallery_labels: got labels without gallery"),
        ({"gallery": torch.ones(2, 3), "gallery_labels": torch.arange(2)}, ValueError, "gallery: got width 3"),
        ({"gallery": torch.ones(2, 4).double(), "gallery_labels": torch.arange(2)}, TypeError, "gallery: got dtype"),
        ({"gallery": torch.ones(2, 4), "gallery_labels": torch.arange(3)}, ValueError, "gallery_labels: got 3"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"query": torch.ones(6, 4), "labels": torch.arange(6), "ks": (1,)} | change
    with pytest.raises(error) as raised:
        metrics.recall_at_k(**arguments)
    assert str(raised.value).startswith(words)


# NMI


@functools.cache
def sklearn(name: str) -> Any:
    return pytest.importorskip(f"sklearn.{name}", reason="scikit-learn is not installed")


@pytest.mark.parametrize("classes", [1, 2, 7, 60])
@pytest.mark.parametrize("clusters", [1, 2, 5, 60])
def test_information_is_that_of_scikit_learn(classes: int, clusters: int) -> None:
    g = generator(classes, clusters)
    for rows in (1, 2, 60, 500):
        y, c = (torch.randint(n, (rows,), generator=g) * 1000 - 7 for n in (classes, clusters))
        for other in (c, y, y // 3000, torch.arange(rows), torch.zeros(rows).long()):
            want = sklearn("metrics").normalized_mutual_info_score(y.numpy(), other.numpy())
            assert metrics._normalised_information(y, other) == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("regime", ["random", "trained"])
@pytest.mark.parametrize(("rows", "clusters"), [(300, 8), (60, 25)])
def test_clusters_are_those_of_scikit_learn_from_the_same_centres(regime: str, rows: int, clusters: int) -> None:
    z, labels = make_batch(regime, rows, 6, 8)
    x = torch.nn.functional.normalize(z)
    k_means, score = sklearn("cluster").KMeans, sklearn("metrics").normalized_mutual_info_score
    for seed in range(5):
        centres = metrics._first_centres(x, clusters, torch.Generator().manual_seed(seed))
        theirs = k_means(clusters, init=centres.numpy(), n_init=1, max_iter=300, tol=0).fit(x.numpy())
        assert torch.equal(metrics._k_means(x, clusters, seed, 300), torch.from_numpy(theirs.labels_).long())
        want = score(labels.numpy(), theirs.labels_)
        assert metrics.nmi(z, labels, clusters, seed, iterations=300) == pytest.approx(want, abs=1e-9)


def test_first_centres_spread_over_separate_groups() -> None:
    """k-means++ visits ten tight groups nearly always: D² between groups outweighs D² within them a millionfold."""
    groups = torch.randn(10, 16, generator=generator(2)).double()
    x = groups.repeat(20, 1) + 1e-4 * torch.randn(200, 16, generator=generator(3)).double()
    for seed in range(20):
        centres = metrics._first_centres(x, 10, torch.Generator().manual_seed(seed))
        assert sorted(torch.cdist(centres, groups).argmin(1).tolist()) == list(range(10))


def test_separate_classes_have_full_information_and_norms_do_not_count() -> None:
    groups = torch.eye(12)
    labels = torch.arange(96) % 12
    z = (groups[labels] + 0.05 * torch.randn(96, 12)) * torch.rand(96, 1).add(0.1)
    assert metrics.nmi(z, labels) == 1.0
    assert metrics.nmi(z, labels, clusters=6) < 1.0
    assert metrics.nmi(z, torch.zeros(96).long()) == 1.0  # one class, one cluster


def test_one_seed_gives_one_value() -> None:
    z, labels = make_batch("random", 200, 4, 20)
    torch.manual_seed(1)
    values = [metrics.nmi(z, labels, seed=seed) for seed in range(6)]
    state = torch.random.get_rng_state()
    assert [metrics.nmi(z, labels, seed=seed) for seed in range(6)] == values
    assert len(set(values)) > 1
    assert torch.equal(state, torch.random.get_rng_state())  # the default generator is left alone


def test_blocks_do_not_change_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    z, _ = make_batch("random", 157, 5, 9)
    want = metrics._k_means(z, 9, 0, 20)
    for block in (1, 40, 1000):
        monkeypatch.setattr(metrics, "BLOCK", block)
        assert torch.equal(metrics._k_means(z, 9, 0, 20), want)


def test_fewer_different_rows_than_clusters() -> None:
    z = torch.eye(3).repeat(5, 1)
    assert metrics.nmi(z, torch.arange(15) % 3, clusters=10) == 1.0
    assert metrics.nmi(torch.ones(8, 4), torch.arange(8)) == 0.0
    assert metrics.nmi(torch.ones(1, 4), torch.zeros(1).long(), clusters=5) == 1.0
    assert metrics.nmi(torch.ones(0, 4), torch.zeros(0).long()) == 0.0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"embeddings": torch.ones(3)}, ValueError, "embeddings: got shape"),
        ({"labels": torch.arange(2)}, ValueError, "labels: got 2 labels"),
        ({"clusters": 0}, ValueError, "clusters: got 0"),
        ({"clusters": 2.0}, TypeError, "clusters: got 2.0"),
        ({"seed": -1}, ValueError, "seed: got -1"),
        ({"iterations": 0}, ValueError, "iterations: got 0"),
    ],
)
def test_bad_arguments_of_nmi_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"embeddings": torch.ones(6, 4), "labels": torch.arange(6)} | change
    with pytest.raises(error) as raised:
        metrics.nmi(**arguments)
    assert str(raised.value).startswith(words)
