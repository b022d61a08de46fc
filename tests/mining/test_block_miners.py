"""PML's other miners, ranges and records: PML as oracle, on random and degenerate batches and any distance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import BACKENDS, make_batch
from test_miners import BATCHES, Largest, batch, pairs, plain
from torch import Tensor

import pydml
from pydml.miners import (
    AngularMiner,
    BatchEasyHardMiner,
    BatchHardMiner,
    DistanceWeightedMiner,
    EmbeddingsAlreadyPackagedAsTriplets,
    HDCMiner,
    MultiSimilarityMiner,
    PairMarginMiner,
    TripletMarginMiner,
    UniformHistogramMiner,
)

pml = pytest.importorskip("pytorch_metric_learning", reason="pytorch-metric-learning is not installed")
from pytorch_metric_learning import distances as theirs  # noqa: E402
from pytorch_metric_learning import miners as pml_miners  # noqa: E402

ON = pytest.mark.parametrize("backend", BACKENDS)
MINERS: dict[str, list[dict[str, Any]]] = {
    "TripletMarginMiner": [
        *({"margin": 0.1, "type_of_triplets": kind} for kind in ("all", "hard", "semihard", "easy")),
        {},
    ],
    "PairMarginMiner": [{}, {"pos_margin": 0.9, "neg_margin": 1.2}],
    "AngularMiner": [{}, {"angle": 35}],
    "HDCMiner": [{}, {"filter_percentage": 0.13}],
    "BatchEasyHardMiner": [
        {"allowed_pos_range": (0.5, 1.3)},
        {"pos_strategy": "hard", "neg_strategy": "hard", "allowed_neg_range": (0.9, 1.2)},
        {
            "pos_strategy": "semihard",
            "neg_strategy": "easy",
            "allowed_pos_range": (0, 1.2),
            "allowed_neg_range": (0.3, 1.4),
        },
        {"pos_strategy": "all", "neg_strategy": "hard", "allowed_pos_range": (0, 0.1), "allowed_neg_range": (1.0, 9)},
    ],
}
SETTINGS = [(name, arguments) for name, all_arguments in MINERS.items() for arguments in all_arguments]
OVER = pytest.mark.parametrize(("name", "arguments"), SETTINGS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(SETTINGS)])


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches here are so small that they would not be cut into blocks of rows."""
    monkeypatch.setattr("pydml.miners.SMALL", 0)


def test_small_batches_are_mined_as_large_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch("trained")
    miners = [getattr(pydml.miners, name)(**arguments) for name, arguments in SETTINGS]
    by_blocks = [pairs(miner(*given)) for miner in miners]
    monkeypatch.setattr("pydml.miners.SMALL", 1 << 20)
    assert [pairs(miner(*given)) for miner in miners] == by_blocks


class Taxicab(theirs.BaseDistance):  # type: ignore[misc]
    """A distance of the user's own."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return torch.cdist(query_emb, ref_emb, p=1)


def number(found: tuple[Tensor, ...]) -> int:
    return sum(map(len, found))


@ON
@OVER
def test_the_pairs_and_triplets_are_pmls(backend: str, name: str, arguments: dict[str, Any]) -> None:
    seen = 0
    for regime in BATCHES:
        given = batch(regime)
        got = getattr(pydml.miners, name)(**arguments)(*given, backend=backend)
        want = getattr(pml_miners, name)(**arguments)(*given)
        plain(got)
        assert pairs(got) == pairs(want), regime
        seen += number(want)
    assert seen > 100


@ON
@pytest.mark.parametrize(
    "name", ["TripletMarginMiner", "PairMarginMiner", "HDCMiner", "MultiSimilarityMiner", "BatchHardMiner"]
)
@pytest.mark.parametrize(
    "distance",
    [
        theirs.CosineSimilarity(),
        theirs.DotProductSimilarity(normalize_embeddings=False),
        theirs.LpDistance(power=2),
        theirs.LpDistance(p=1),
        theirs.SNRDistance(),
        theirs.CosineSimilarity(power=2),
        Taxicab(),
        pydml.distances.LpDistance(p=3),
    ],
    ids=lambda d: type(d).__name__ + str(d.p) + str(d.power),
)
def test_any_distance_object_is_taken_and_kept(backend: str, name: str, distance: Any) -> None:
    arguments = {"pos_margin": 0.4, "neg_margin": 0.4} if name == "PairMarginMiner" else {}
    for regime in ("ragged", "rect"):
        given = batch(regime)
        miner = getattr(pydml.miners, name)(distance=distance, **arguments)
        assert miner.distance is distance
        want = getattr(pml_miners, name)(distance=distance, **arguments)(*given)
        assert pairs(miner(*given, backend=backend)) == pairs(want)


@ON
def test_hdc_takes_the_share_of_what_it_was_given_again_and_again(backend: str) -> None:
    z, labels, _, _ = batch("trained")
    ours, oracle = HDCMiner(0.5), pml_miners.HDCMiner(0.5)
    everything = pml_miners.BatchEasyHardMiner("all", "all")(z, labels)
    for tuple_ in (everything, TripletMarginMiner()(z, labels)):
        for miner in (ours, oracle):
            miner.set_idx_externally(tuple_, labels)
        for _ in range(3):
            got, want = ours(z, labels, backend=backend), oracle(z, labels)
            assert list(map(len, got)) == list(map(len, want))
            if len(tuple_) == 4:
                assert pairs(got) == pairs(want)
        ours.reset_idx(), oracle.reset_idx()
        assert not ours.was_set_externally and pairs(ours(z, labels, backend=backend)) == pairs(oracle(z, labels))


@ON
@pytest.mark.parametrize("distance", [None, theirs.CosineSimilarity(), theirs.LpDistance(p=1)], ids=repr)
def test_uniform_histogram_draws_from_every_bin_that_pml_draws_from(backend: str, distance: Any) -> None:
    options = {"num_bins": 12, "pos_per_bin": 40, "neg_per_bin": 60}
    for regime in (*BATCHES, "random"):
        given = batch(regime)
        miner = UniformHistogramMiner(**options, distance=distance)
        got = miner(*given, backend=backend)
        want = pml_miners.UniformHistogramMiner(**options, distance=distance)(*given)
        plain(got)
        assert list(map(len, got)) == list(map(len, want)), regime
        mat = miner.distance(given[0], given[2])
        y, ref = given[1], given[1] if given[3] is None else given[3]
        for a, b, same in ((*got[:2], True), (*got[2:], False)):
            assert ((y[a] == ref[b]) == same).all()
            assert given[2] is not None or not same or (a != b).all()
            if len(a) and len(set(zip(a.tolist(), b.tolist(), strict=True))) > 12:
                d = mat[a, b]
                edges = torch.linspace(float(d.min()), float(d.max()), 13)
                assert (torch.histc(d.float(), 12, float(d.min()), float(d.max())) > 0).sum() >= 6, edges


def test_uniform_histogram_draws_each_pair_of_a_bin_as_often() -> None:
    z, labels, _, _ = batch("random")
    torch.manual_seed(0)
    a1, p, _, _ = UniformHistogramMiner(num_bins=1, pos_per_bin=20000, neg_per_bin=1)(z, labels)
    counts = torch.bincount(a1 * len(z) + p)
    counts = counts[counts > 0]
    all_pairs = int((labels[:, None] == labels).sum()) - len(z)
    assert len(counts) == all_pairs
    chi2 = float(((counts - 20000 / all_pairs) ** 2 / (20000 / all_pairs)).sum())
    assert chi2 < all_pairs + 5 * math.sqrt(2 * all_pairs)


def test_already_packaged_triplets() -> None:
    z, labels = torch.randn(9, 4), torch.arange(9)
    want = pml_miners.EmbeddingsAlreadyPackagedAsTriplets()(z, labels)
    for backend in BACKENDS:
        got = EmbeddingsAlreadyPackagedAsTriplets()(z, labels, backend=backend)
        assert all(torch.equal(i, j) for i, j in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="embeddings: got 8 rows, wanted triplets of them"):
        EmbeddingsAlreadyPackagedAsTriplets()(z[:8], labels[:8])


@ON
@OVER
def test_collected_statistics_and_recorded_names_are_pmls(backend: str, name: str, arguments: dict[str, Any]) -> None:
    for regime in ("trained", "rect", "nopos"):
        given = batch(regime)
        ours = getattr(pydml.miners, name)(**arguments, collect_stats=True)
        oracle = getattr(pml_miners, name)(**arguments, collect_stats=True)
        assert set(oracle._record_these_stats) <= set(ours._record_these_stats)
        assert set(getattr(oracle, "_record_these", [])) <= set(getattr(ours, "_record_these", []))
        for miner, more in ((ours, {"backend": backend}), (oracle, {})):
            miner(*given, **more)
        for attribute in (*oracle._record_these_stats, *getattr(oracle, "_record_these", [])):
            want = pytest.approx(getattr(oracle, attribute), rel=1e-6, abs=1e-9, nan_ok=True)
            assert getattr(ours, attribute) == want, (attribute, regime)


def test_statistics_are_collected_only_if_asked_for() -> None:
    assert not hasattr(TripletMarginMiner(), "pos_pair_dist")
    from pytorch_metric_learning.utils import common_functions

    common_functions.COLLECT_STATS = True
    try:
        assert TripletMarginMiner().collect_stats and hasattr(TripletMarginMiner(), "pos_pair_dist")
    finally:
        common_functions.COLLECT_STATS = False


def test_the_constants_of_batch_easy_hard() -> None:
    for name in ("HARD", "SEMIHARD", "EASY", "ALL", "all_batch_mining_strategies"):
        assert getattr(BatchEasyHardMiner, name) == getattr(pml_miners.BatchEasyHardMiner, name)
    miner = BatchEasyHardMiner(pos_strategy=BatchEasyHardMiner.HARD, neg_strategy=BatchEasyHardMiner.EASY)
    assert (miner.pos_strategy, miner.neg_strategy) == ("hard", "easy")


@ON
@pytest.mark.parametrize("cutoffs", [(0.5, 0.5), (1.4, 0.5), (0.5, 0), (0.5, -1)])
def test_cutoffs_that_leave_no_distance_draw_nothing_as_in_pml(backend: str, cutoffs: tuple[float, float]) -> None:
    z, labels, _, _ = batch("random")
    assert [len(index) for index in pml_miners.DistanceWeightedMiner(*cutoffs)(z, labels)] == [0, 0, 0]
    assert [len(index) for index in DistanceWeightedMiner(*cutoffs)(z, labels, backend=backend)] == [0, 0, 0]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "dense"])
def test_no_block_is_as_large_as_the_matrix(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pydml.tiled.sides.TILE_ELEMENTS", 1 << 14)
    monkeypatch.setattr("pydml.miners.TILE_ELEMENTS", 1 << 14)
    monkeypatch.setattr("pydml.block_miners.TILE_ELEMENTS", 1 << 14)
    z, labels = make_batch("trained", 512, 8, 256, dtype=torch.float32)
    for miner in (
        TripletMarginMiner(0.0),
        PairMarginMiner(1.0, 0.1),
        AngularMiner(85),
        HDCMiner(0.01),
        UniformHistogramMiner(10),
        BatchEasyHardMiner(allowed_pos_range=(0, 1)),
        BatchHardMiner(distance=theirs.LpDistance(p=1)),
        MultiSimilarityMiner(-0.5, distance=theirs.LpDistance(p=1)),
    ):
        with Largest() as largest:
            miner(z, labels, backend=backend)
        assert largest.elements <= 1 << 15, miner


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: TripletMarginMiner(type_of_triplets="soft"), ValueError, "type_of_triplets: got 'soft'"),
        (lambda: PairMarginMiner("0.1"), TypeError, "pos_margin: got '0.1'"),
        (lambda: AngularMiner(distance=theirs.CosineSimilarity()), ValueError, "distance: got CosineSimilarity"),
        (lambda: AngularMiner(distance=theirs.LpDistance(p=1)), ValueError, "distance: got LpDistance"),
        (lambda: HDCMiner(-0.1), ValueError, "filter_percentage: got -0.1"),
        (lambda: UniformHistogramMiner(num_bins=0), ValueError, "num_bins: got 0"),
        (lambda: BatchEasyHardMiner(allowed_pos_range=0.5), TypeError, "allowed_pos_range: got 0.5"),
        (lambda: PairMarginMiner(distance=3), ValueError, "distance: got int"),
    ],
)
def test_wrong_arguments_are_named(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


EVERY = [
    TripletMarginMiner(),
    PairMarginMiner(),
    AngularMiner(),
    HDCMiner(),
    UniformHistogramMiner(),
    BatchEasyHardMiner(allowed_neg_range=(0.5, 1.5)),
    MultiSimilarityMiner(distance=pydml.distances.LpDistance(p=1)),
]


@ON
@pytest.mark.parametrize("miner", EVERY, ids=lambda miner: type(miner).__name__)
def test_batches_that_are_empty_wrong_or_of_other_dtypes(backend: str, miner: Any) -> None:
    z, labels, ref, ref_labels = batch("rect")
    for given in ((z[:0], labels[:0]), (z, labels, z[:0], labels[:0]), (z[:0], labels[:0], z, labels)):
        assert number(miner(*given, backend=backend)) == 0
    bad = z.clone()
    bad[3, 0], bad[5] = torch.nan, torch.inf
    for index in miner(bad, labels, backend=backend):
        assert ((index >= 0) & (index < len(z))).all()
    torch.manual_seed(1)
    want = miner(z.bfloat16().float(), labels, ref.bfloat16().float(), ref_labels, backend=backend)  # type: ignore[union-attr]
    torch.manual_seed(1)
    got = miner(z.bfloat16().requires_grad_(), labels.int(), ref.bfloat16(), ref_labels.int(), backend=backend)  # type: ignore[union-attr]
    plain(got)
    assert all(torch.equal(i, j) for i, j in zip(got, want, strict=True))


@ON
@pytest.mark.parametrize("miner", EVERY, ids=lambda miner: type(miner).__name__)
def test_our_losses_and_pmls_take_the_tuples(backend: str, miner: Any) -> None:
    from pytorch_metric_learning import losses

    z, labels, ref, ref_labels = batch("rect")
    indices = miner(z, labels, ref, ref_labels, backend=backend)
    got = pydml.losses.ContrastiveLoss()(z, labels, indices, ref, ref_labels, backend=backend)
    torch.testing.assert_close(got, losses.ContrastiveLoss()(z, labels, indices, ref, ref_labels))
