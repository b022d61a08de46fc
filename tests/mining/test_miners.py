"""Miners: PML's as oracle, what a tuple may be used for, and the distribution of what is drawn."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from helpers import BACKENDS, FUSED, REGIMES, generator, make_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pydml
from pydml.miners import BatchEasyHardMiner, BatchHardMiner, DistanceWeightedMiner, MultiSimilarityMiner

ON = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
ALL = [MultiSimilarityMiner, BatchHardMiner, BatchEasyHardMiner, DistanceWeightedMiner]
LENGTH = {MultiSimilarityMiner: 4, BatchHardMiner: 3, BatchEasyHardMiner: 4, DistanceWeightedMiner: 3}
STRATEGIES = [
    pair
    for pair in itertools.product(("easy", "hard", "semihard", "all"), repeat=2)
    if set(pair) not in ({"semihard"}, {"semihard", "all"})
]
OVER_STRATEGIES = pytest.mark.parametrize("strategies", STRATEGIES, ids="-".join)


def oracle() -> Any:
    """PML's miners and distances."""
    for part in ("distances", "losses", "miners"):
        pytest.importorskip(f"pytorch_metric_learning.{part}", reason="pytorch-metric-learning is not installed")
    return sys.modules["pytorch_metric_learning"]


def batch(regime: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Embeddings, labels and, in regime "rect", a reference set that lacks a class of the batch and has one more."""
    if regime in REGIMES:
        return *make_batch(regime, 34, 12, 7, dtype=dtype), None, None
    z, labels = make_batch("random", 23, 12, 5, dtype=dtype)
    if regime == "oneclass":
        return z, torch.zeros_like(labels), None, None
    if regime == "nopos":
        return z, torch.arange(len(labels)), None, None
    if regime == "single":
        return z[:1], labels[:1], None, None
    if regime == "pair":
        return z[:2], torch.tensor([3, 3]), None, None
    ref, ref_labels = make_batch("random", 41, 12, 6, seed=1, dtype=dtype)
    ref_labels = ref_labels.masked_fill(ref_labels == 2, 9)
    return z, labels, ref, ref_labels


BATCHES = [*REGIMES, "oneclass", "nopos", "single", "pair", "rect"]
OVER_BATCHES = pytest.mark.parametrize("regime", BATCHES)


def pairs(indices: tuple[Tensor, ...]) -> tuple[set[Any], set[Any]]:
    """Positive and negative pairs of a tuple; triplets stay whole."""
    if len(indices) == 3:
        return set(zip(*(index.tolist() for index in indices), strict=True)), set()
    a1, p, a2, n = (index.tolist() for index in indices)
    assert len(set(zip(a1, p, strict=True))) == len(a1), "a positive pair is listed twice"
    assert len(set(zip(a2, n, strict=True))) == len(a2), "a negative pair is listed twice"
    return set(zip(a1, p, strict=True)), set(zip(a2, n, strict=True))


def plain(indices: tuple[Tensor, ...]) -> None:
    for index in indices:
        assert index.dtype == torch.int64 and index.ndim == 1 and not index.requires_grad


# PML as oracle


@ON
@DTYPES
@OVER_BATCHES
@pytest.mark.parametrize("epsilon", [0.1, 0.0, -0.3, 0.7])
def test_multi_similarity_finds_the_pairs_that_pml_finds(
    backend: str, dtype: torch.dtype, regime: str, epsilon: float
) -> None:
    arguments = batch(regime, dtype)
    got = MultiSimilarityMiner(epsilon)(*arguments, backend=backend)
    plain(got)
    assert pairs(got) == pairs(oracle().miners.MultiSimilarityMiner(epsilon)(*arguments))


@ON
@DTYPES
@pytest.mark.parametrize("regime", ["random", "trained", "rect"])
@pytest.mark.parametrize("name", ["euclidean", "squared", "raw"])
def test_multi_similarity_mines_distances_as_pml_does(backend: str, dtype: torch.dtype, regime: str, name: str) -> None:
    arguments = batch(regime, dtype)
    distance = oracle().distances.LpDistance(
        power=2 if name == "squared" else 1, normalize_embeddings=name != "raw"
    )  # fmt: skip
    want = pairs(oracle().miners.MultiSimilarityMiner(0.1, distance=distance)(*arguments))
    assert pairs(MultiSimilarityMiner(0.1, distance=distance)(*arguments, backend=backend)) == want
    if name != "raw":
        assert pairs(MultiSimilarityMiner(0.1, distance=name)(*arguments, backend=backend)) == want


@ON
@DTYPES
@OVER_BATCHES
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_batch_hard_finds_the_triplets_that_pml_finds(
    backend: str, dtype: torch.dtype, regime: str, distance: str
) -> None:
    arguments = batch(regime, dtype)
    theirs = {"euclidean": oracle().distances.LpDistance, "cosine": oracle().distances.CosineSimilarity}[distance]()
    got = BatchHardMiner(distance=distance)(*arguments, backend=backend)
    plain(got)
    assert len(got) == 3
    assert pairs(got) == pairs(oracle().miners.BatchHardMiner(distance=theirs)(*arguments))


@ON
@OVER_STRATEGIES
def test_every_strategy_finds_the_pairs_that_pml_finds(backend: str, strategies: tuple[str, str]) -> None:
    for regime, dtype in [*((r, torch.float64) for r in BATCHES), ("trained", torch.float32), ("rect", torch.float32)]:
        arguments = batch(regime, dtype)
        got = BatchEasyHardMiner(*strategies)(*arguments, backend=backend)
        plain(got)
        assert pairs(got) == pairs(oracle().miners.BatchEasyHardMiner(*strategies)(*arguments)), (regime, dtype)


@ON
@OVER_STRATEGIES
@pytest.mark.parametrize("distance", ["cosine", "squared"])
def test_every_strategy_takes_other_distances(backend: str, strategies: tuple[str, str], distance: str) -> None:
    arguments = batch("ragged")
    d = oracle().distances
    theirs = {"cosine": d.CosineSimilarity(), "squared": d.LpDistance(power=2)}[distance]
    want = pairs(oracle().miners.BatchEasyHardMiner(*strategies, distance=theirs)(*arguments))
    for given in (distance, theirs):
        assert pairs(BatchEasyHardMiner(*strategies, distance=given)(*arguments, backend=backend)) == want


@ON
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@OVER_STRATEGIES
def test_of_bit_identical_rows_the_first_is_taken_and_none_is_semihard_to_another(
    backend: str, strategies: tuple[str, str], distance: str
) -> None:
    """Rows 0 … 3 recur as 4 … 7 and 8 … 11, the last time with another label: S = 1 among positives and negatives."""
    z = torch.randn(4, 24, generator=generator(3)).repeat(3, 1)
    labels = torch.tensor([0, 0, 1, 1] * 2 + [2, 2, 3, 3])
    got = BatchEasyHardMiner(*strategies, distance=distance)(z, labels, backend=backend)
    s = torch.nn.functional.normalize(z[:4].double()) @ torch.nn.functional.normalize(z[:4].double()).T
    s = s.fill_diagonal_(1)[:, torch.arange(12) % 4][torch.arange(12) % 4].tolist()  # equal to the last bit where equal
    y = labels.tolist()
    want: tuple[set[Any], set[Any]] = set(), set()
    for a in range(12):
        positives = [j for j in range(12) if j != a and y[j] == y[a]]
        negatives = [j for j in range(12) if y[j] != y[a]]
        p = n = None
        if strategies[0] in ("easy", "hard"):
            p = max(positives, key=lambda j: s[a][j] if strategies[0] == "easy" else -s[a][j])
        if strategies[1] == "semihard":
            negatives = [j for j in negatives if s[a][j] < s[a][p]]
        if strategies[1] != "all" and negatives:
            n = max(negatives, key=lambda j: -s[a][j] if strategies[1] == "easy" else s[a][j])
        if strategies[0] == "semihard":
            positives = [j for j in positives if s[a][j] > s[a][n]]
            p = max(positives, key=lambda j: -s[a][j], default=None)
        both = "all" in strategies or (p is not None and n is not None)
        want[0].update((a, j) for j in ([*positives] if strategies[0] == "all" else [p]) if both and j is not None)
        want[1].update((a, j) for j in ([*negatives] if strategies[1] == "all" else [n]) if both and j is not None)
    assert pairs(got) == want


# What a tuple is used for


@ON
@pytest.mark.parametrize("regime", ["trained", "ragged", "rect"])
@pytest.mark.parametrize("miner", ALL)
def test_a_tuple_gives_our_loss_and_pmls_the_same_value(backend: str, regime: str, miner: Any) -> None:
    z, labels, ref, ref_labels = batch(regime)
    indices = miner()(z, labels, ref, ref_labels, backend=backend)
    for name in ("ContrastiveLoss", "MultiSimilarityLoss", "TripletMarginLoss"):
        got = getattr(pydml.losses, name)()(z, labels, indices, ref, ref_labels, backend=backend)
        torch.testing.assert_close(got, getattr(oracle().losses, name)()(z, labels, indices, ref, ref_labels))


@ON
def test_mining_and_loss_are_the_loss_that_mines_by_itself(backend: str) -> None:
    for regime in ("trained", "ragged", "rect"):
        z, labels, ref, ref_labels = batch(regime)
        for miner, alone in (
            (MultiSimilarityMiner(0.2), pydml.losses.MultiSimilarityLoss(epsilon=0.2)),
            (BatchHardMiner(), pydml.losses.TripletMarginLoss(margin=0.3, triplets="hard")),
        ):
            indices = miner(z, labels, ref, ref_labels, backend=backend)
            loss = {3: pydml.losses.TripletMarginLoss(margin=0.3), 4: pydml.losses.MultiSimilarityLoss()}[len(indices)]
            got = loss(z, labels, indices, ref, ref_labels, backend=backend)
            torch.testing.assert_close(got, alone(z, labels, ref_emb=ref, ref_labels=ref_labels, backend=backend))


@ON
@pytest.mark.parametrize("miner", ALL)
def test_self_pairs_are_excluded_where_the_reference_is_the_batch_itself(backend: str, miner: Any) -> None:
    z, labels, _, _ = batch("random")
    torch.manual_seed(1)
    alone = miner()(z, labels, backend=backend)
    torch.manual_seed(1)
    itself = miner()(z, labels, z, labels, backend=backend)
    assert all(torch.equal(i, j) for i, j in zip(alone, itself, strict=True))
    assert (alone[0] != alone[1]).all()


@ON
def test_a_copy_of_the_batch_is_a_reference_set_like_any_other(backend: str) -> None:
    z, labels, _, _ = batch("random")
    a, p, _, _ = BatchEasyHardMiner("easy", "hard")(z, labels, z.clone(), labels.clone(), backend=backend)
    assert torch.equal(a, p)


@ON
@pytest.mark.parametrize("miner", ALL)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_labels_may_have_any_integer_dtype(backend: str, miner: Any, dtype: torch.dtype) -> None:
    z, labels, _, _ = batch("ragged")
    torch.manual_seed(1)
    want = miner()(z, labels, backend=backend)
    torch.manual_seed(1)
    got = miner()(z, labels.to(dtype), backend=backend)
    assert all(torch.equal(i, j) for i, j in zip(got, want, strict=True))
    plain(got)


@ON
def test_far_apart_and_negative_labels_do_not_collide(backend: str) -> None:
    z, labels, _, _ = batch("ragged")
    far = torch.tensor([-(2**62), 2**24, 2**24 + 1, 2**32, 0, 2**53, 2**53 + 1])[labels]
    for miner in (MultiSimilarityMiner(), BatchEasyHardMiner("all", "hard"), BatchEasyHardMiner("easy", "all")):
        assert pairs(miner(z, far, backend=backend)) == pairs(miner(z, labels, backend=backend))


@ON
@pytest.mark.parametrize("miner", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_mined_in_float32(backend: str, miner: Any, dtype: torch.dtype) -> None:
    z, labels, _, _ = batch("trained", dtype)
    torch.manual_seed(1)
    got = miner()(z, labels, backend=backend)
    torch.manual_seed(1)
    want = miner()(z.float(), labels, backend=backend)
    assert all(torch.equal(i, j) for i, j in zip(got, want, strict=True))


@ON
@pytest.mark.parametrize("miner", ALL)
def test_empty_batches_and_empty_references_give_empty_tuples(backend: str, miner: Any) -> None:
    z, labels, _, _ = batch("random")
    for arguments in ((z[:0], labels[:0]), (z, labels, z[:0], labels[:0]), (z[:0], labels[:0], z, labels)):
        got = miner()(*arguments, backend=backend)
        plain(got)
        assert [len(index) for index in got] == [0] * LENGTH[miner]


@ON
@pytest.mark.parametrize("miner", ALL)
def test_nan_in_the_embeddings_still_gives_indices_within_the_batch(backend: str, miner: Any) -> None:
    z, labels, _, _ = batch("random")
    z[3, 0], z[5] = torch.nan, torch.inf
    for index in miner()(z, labels, backend=backend):
        assert ((index >= 0) & (index < len(z))).all()


@ON
def test_gradients_and_autocast_do_not_reach_a_miner(backend: str) -> None:
    z, labels, _, _ = batch("random", torch.float32)
    want = pairs(MultiSimilarityMiner()(z, labels, backend=backend))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = MultiSimilarityMiner()(z.requires_grad_(), labels, backend=backend)
    plain(got)
    assert pairs(got) == want


class Largest(TorchDispatchMode):
    """The largest number of elements that any op has returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize(
    "miner",
    [BatchHardMiner(), BatchEasyHardMiner(), BatchEasyHardMiner("all", "hard"), DistanceWeightedMiner()],
    ids=repr,
)
def test_nothing_as_large_as_the_matrix_is_made(backend: str, miner: Any) -> None:
    z, labels = make_batch("random", 600, 8, 150, dtype=torch.float32)
    with Largest() as largest:
        miner(z, labels, backend=backend)
    assert largest.elements <= 4 * 600 * 4 + 600 * 8


def test_pml_takes_our_miners_for_its_own() -> None:
    oracle()
    from pytorch_metric_learning.miners import BaseMiner
    from pytorch_metric_learning.utils.distributed import DistributedMinerWrapper, get_indices_tuple

    z, labels, _, _ = batch("ragged")
    others, other_labels = make_batch("ragged", 20, 12, 7, seed=1)
    everything, all_labels = torch.cat((z, others)), torch.cat((labels, other_labels))
    for ours, theirs in (
        (MultiSimilarityMiner(), oracle().miners.MultiSimilarityMiner()),
        (BatchHardMiner(), oracle().miners.BatchHardMiner()),
        (BatchEasyHardMiner("hard", "semihard"), oracle().miners.BatchEasyHardMiner("hard", "semihard")),
    ):
        assert isinstance(ours, BaseMiner)
        DistributedMinerWrapper(ours, efficient=True)
        got, want = (get_indices_tuple(labels, all_labels, z, everything, miner) for miner in (ours, theirs))
        assert pairs(got) == pairs(want)


# Arguments


@pytest.mark.parametrize("strategies", [("semihard", "semihard"), ("all", "semihard"), ("semihard", "all")])
def test_semihard_needs_one_item_on_the_other_side(strategies: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"pos_strategy, neg_strategy: got .*semihard"):
        BatchEasyHardMiner(*strategies)
    with pytest.raises(ValueError):
        oracle().miners.BatchEasyHardMiner(*strategies)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MultiSimilarityMiner("0.1"), TypeError, "epsilon: got '0.1'"),
        (lambda: MultiSimilarityMiner(float("nan")), ValueError, "epsilon: got nan"),
        (lambda: BatchEasyHardMiner("hardest"), ValueError, "pos_strategy: got 'hardest', wanted one of 'easy'"),
        (lambda: BatchEasyHardMiner("easy", "no"), ValueError, "neg_strategy: got 'no'"),
        (lambda: BatchHardMiner(distance="manhattan"), ValueError, "distance: got 'manhattan'"),
        (lambda: BatchHardMiner(normalize_embeddings=1), TypeError, "normalize_embeddings: got 1"),
        (lambda: DistanceWeightedMiner(-0.1), ValueError, "cutoff: got -0.1"),
        (lambda: DistanceWeightedMiner(1.0, "0.9"), TypeError, "nonzero_loss_cutoff: got '0.9'"),
        (lambda: DistanceWeightedMiner(distance="cosine"), ValueError, "distance: got 'cosine'"),
        (lambda: DistanceWeightedMiner(normalize_embeddings=False), ValueError, "normalize_embeddings: got False"),
    ],
)
def test_bad_arguments_are_named(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value).startswith(words)


def test_distances_that_a_miner_cannot_have_are_named() -> None:
    for distance in (oracle().distances.LpDistance(p=1), oracle().distances.CosineSimilarity()):
        with pytest.raises(ValueError, match=rf"distance: got {type(distance).__name__}.*wanted one of 'euclidean'"):
            DistanceWeightedMiner(distance=distance)


@pytest.mark.parametrize("miner", ALL)
def test_bad_inputs_are_named_as_the_losses_name_them(miner: Any) -> None:
    z, labels, ref, ref_labels = batch("rect")
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((z[0], labels), ValueError, "embeddings: got shape"),
        ((z.long(), labels), TypeError, "embeddings: got dtype"),
        ((z, labels[:-1]), ValueError, "labels: got 22 labels, wanted 23"),
        ((z, labels.double()), TypeError, "labels: got dtype"),
        ((z, None), TypeError, "labels: got NoneType"),
        ((z, labels, ref), ValueError, "ref_labels: got None"),
        ((z, labels, None, ref_labels), ValueError, "ref_labels: got labels without ref_emb"),
        ((z, labels, ref[:, :3], ref_labels), ValueError, "ref_emb: got width 3"),
        ((z, labels, ref.float(), ref_labels), TypeError, "ref_emb: got dtype"),
        ((z, labels, ref, ref_labels[:-1]), ValueError, "ref_labels: got 40 labels"),
    ]
    for arguments, error, words in cases:
        with pytest.raises(error) as raised:
            miner()(*arguments)
        assert str(raised.value).startswith(words)
    with pytest.raises(ValueError, match="backend: got 'fast'"):
        miner()(z, labels, backend="fast")


def test_repr_shows_every_argument() -> None:
    assert all(words in repr(MultiSimilarityMiner()) for words in ("epsilon=0.1", "CosineSimilarity(normalize_emb"))
    assert "LpDistance(normalize_embeddings=True, p=2, power=1)" in repr(BatchHardMiner())
    assert "pos_strategy='easy', neg_strategy='semihard'" in repr(BatchEasyHardMiner())
    assert "cutoff=0.5, nonzero_loss_cutoff=1.4" in repr(DistanceWeightedMiner())


@ON
def test_a_miner_remembers_how_many_it_has_found(backend: str) -> None:
    z, labels, _, _ = batch("random")
    hard, similar = BatchHardMiner(), MultiSimilarityMiner()
    assert (hard.num_triplets, similar.num_pos_pairs, similar.num_neg_pairs) == (0, 0, 0)
    a, _, _ = hard(z, labels, backend=backend)
    a1, _, a2, _ = similar(z, labels, backend=backend)
    assert (hard.num_triplets, similar.num_pos_pairs, similar.num_neg_pairs) == (len(a), len(a1), len(a2))


# Distance-weighted sampling


def not_surprising(seen: Tensor, expected: Tensor) -> None:
    """χ² within five standard deviations of its mean; what is not expected is not seen."""
    assert not seen[expected == 0].any()
    seen, expected = seen[expected > 0].double(), expected[expected > 0].double()
    freedom = len(expected) - 1
    chi2 = ((seen - expected).square() / expected).sum().item()
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5 + 5, f"χ² = {chi2:.1f} with {freedom} degrees of freedom"


@ON
@pytest.mark.parametrize("dim", [2, 3, 5, 16])
def test_negatives_are_drawn_with_the_weights_of_the_paper(backend: str, dim: int) -> None:
    """Three anchors, each listed 30 times, of a class with 100 items: 3000 draws from 14 negatives each."""
    g = generator(dim)
    anchors, negatives = (torch.randn(n, dim, generator=g, dtype=torch.float64) for n in (3, 14))
    negatives[:2] = anchors[0] + 0.1 * negatives[:2]  # nearer than the cutoff
    ref = torch.cat((torch.randn(100, dim, generator=g, dtype=torch.float64), negatives))
    ref_labels = torch.cat((torch.zeros(100), torch.arange(1, 15))).long()
    torch.manual_seed(5)
    miner = DistanceWeightedMiner()
    a, _, n = miner(anchors.repeat(30, 1), torch.zeros(90).long(), ref, ref_labels, backend=backend)
    d = torch.cdist(torch.nn.functional.normalize(anchors), torch.nn.functional.normalize(negatives))
    weights = d.clamp_min(0.5) ** (2 - dim) * (1 - d.clamp_min(0.5) ** 2 / 4) ** ((3 - dim) / 2) * (d < 1.4)
    assert weights.any(1).all()
    for anchor in range(3):
        seen = (n[a % 3 == anchor] - 100).bincount(minlength=14)
        assert seen.sum() == 3000
        not_surprising(seen, 3000 * weights[anchor] / weights[anchor].sum())


@ON
def test_positives_are_drawn_uniformly_and_never_the_anchor(backend: str) -> None:
    z = torch.randn(61, 4, generator=generator(1))
    labels = (torch.arange(61) == 60).long()
    torch.manual_seed(5)
    a, p, _ = DistanceWeightedMiner(nonzero_loss_cutoff=2)(z, labels, backend=backend)
    assert torch.equal(a.bincount(minlength=61), torch.tensor([60] * 60 + [0]))
    expected = torch.full((60,), 60 * 60 / 59)
    expected[0] = 0
    not_surprising(((p - a) % 60).bincount(minlength=60), expected)


@ON
@pytest.mark.parametrize("regime", [*REGIMES, "oneclass", "nopos", "single", "pair", "rect"])
def test_anchors_and_their_numbers_are_those_of_pml(backend: str, regime: str) -> None:
    z, labels, ref, ref_labels = batch(regime)
    a, p, n = DistanceWeightedMiner()(z, labels, ref, ref_labels, backend=backend)
    plain((a, p, n))
    columns, column_labels = (z, labels) if ref is None or ref_labels is None else (ref, ref_labels)
    x, y = torch.nn.functional.normalize(z), torch.nn.functional.normalize(columns)
    assert torch.equal(labels[a], column_labels[p]) and not (labels[a] == column_labels[n]).any()
    assert ((x[a] - y[n]).norm(dim=1) < 1.4).all()
    if regime in ("random", "trained", "ragged", "rect"):  # PML takes the maximum of an empty set elsewhere
        theirs = oracle().miners.DistanceWeightedMiner()(z, labels, ref, ref_labels)[0]
        assert torch.equal(a.bincount(minlength=len(z)), theirs.bincount(minlength=len(z)))
    if regime in ("oneclass", "nopos", "single", "pair"):
        assert len(a) == 0


@ON
def test_anchors_with_only_far_negatives_are_dropped(backend: str) -> None:
    z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [-1.0, 0.1], [-0.9, 0.5]])
    labels = torch.tensor([0, 0, 1, 1, 2])
    a, _, n = DistanceWeightedMiner()(z, labels, backend=backend)
    assert a.unique().tolist() == [2, 3] and n.unique().tolist() == [4]


@ON
def test_many_dimensions_do_not_underflow(backend: str) -> None:
    """In 512 dimensions PML's weights underflow; ours are compared as logarithms."""
    z, labels = make_batch("trained", 40, 512, 8, dtype=torch.float32)
    z[0] = z[labels == labels[0]][-1] + 0.01 * z[0]
    a, _, n = DistanceWeightedMiner(nonzero_loss_cutoff=1.9)(z, labels, backend=backend)
    assert torch.equal(a.bincount(minlength=40), torch.full((40,), 5))
    assert (labels[a] != labels[n]).all()


@ON
@pytest.mark.parametrize("dim", [512, 1024, 4096])
def test_negatives_of_wide_rows_are_drawn_with_the_weights_of_the_paper(backend: str, dim: int) -> None:
    """12 negatives so little farther than each other that each weighs 2/3 of the one before; a hundred far ones."""
    g = generator(dim)
    axes = torch.linalg.qr(torch.randn(dim, 13, generator=g, dtype=torch.float64)).Q.T
    d = 0.9 + torch.arange(12) * 0.9 * 0.4 / dim
    cosine = (1 - d.square() / 2)[:, None]
    near = cosine * axes[:1] + (1 - cosine.square()).sqrt() * axes[1:]
    others = torch.randn(200, dim, generator=g, dtype=torch.float64)
    ref = torch.cat((others[:100], near, others[100:]))
    ref_labels = torch.cat((torch.zeros(100), torch.arange(1, 113))).long()
    torch.manual_seed(5)
    a, _, n = DistanceWeightedMiner()(axes[:1].repeat(30, 1), torch.zeros(30).long(), ref, ref_labels, backend=backend)
    log_w = (2 - dim) * d.log() - (dim - 3) / 2 * torch.log1p(-d.square() / 4)
    assert len(a) == 3000
    not_surprising((n - 100).bincount(minlength=12), 3000 * log_w.softmax(0))


@ON
@pytest.mark.parametrize(
    ("dim", "cutoffs"),
    [(992, (0.5, 1.4)), (1024, (0.5, 1.4)), (4096, (0.5, 1.4)), (512, (0.1, 1.4)), (2, (0, 1.4)), (8, (0, 1.4))],
)
def test_no_width_and_no_cutoff_loses_triplets(backend: str, dim: int, cutoffs: tuple[float, float]) -> None:
    """As many of each anchor as its class has items, if it has a negative in reach."""
    z = torch.randn(128, dim, generator=generator(dim))
    labels = torch.arange(128) // 4
    a, p, n = DistanceWeightedMiner(*cutoffs)(z, labels, backend=backend)
    x = torch.nn.functional.normalize(z.double())
    in_reach = ((torch.cdist(x, x) < cutoffs[1]) & (labels[:, None] != labels)).any(1)
    assert torch.equal(a.bincount(minlength=128), 4 * in_reach)
    assert len(a) > 300 and (labels[a] == labels[p]).all() and (labels[a] != labels[n]).all()


@ON
def test_the_seed_of_torch_repeats_the_draws(backend: str) -> None:
    z, labels, _, _ = batch("random")

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.stack(DistanceWeightedMiner()(z, labels, backend=backend))

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    torch.manual_seed(3)
    assert not torch.equal(draw(3), torch.stack(DistanceWeightedMiner()(z, labels, backend=backend)))
