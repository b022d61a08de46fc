"""pytorch-metric-learning (PML) as an oracle: same arguments, same batch, same value and gradients.

Where we differ from it on purpose there is a test that says so.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import BACKENDS, REGIMES, Result, assert_close, assert_same, generator, make_batch, run
from torch import Tensor

import pydml
from pydml.losses import LOSSES, ProxyLoss

pml = pytest.importorskip("pytorch_metric_learning", reason="the oracle, pytorch-metric-learning, is not installed")
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers  # noqa: E402
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper  # noqa: E402

CLASSES, DIM = 7, 12
SHAPES = ((34, DIM, CLASSES), (19, DIM, CLASSES))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
ON = pytest.mark.parametrize("backend", BACKENDS)

#: Arguments that both libraries take, by our name of the loss.
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "ms": [{}, {"alpha": 18.0, "beta": 76.0, "base": 0.8}],
    "contrastive": [{}, {"pos_margin": 0.3, "neg_margin": 1.3}],
    "lifted": [{}, {"neg_margin": 0.5, "pos_margin": 0.2}],
    "generalized_lifted": [{}, {"neg_margin": 0.5, "pos_margin": 0.3}],
    "nca": [{}, {"softmax_scale": 8}],
    "n_pairs": [{}],
    "margin": [{}, {"learn_beta": True, "nu": 0.3}, {"learn_beta": True, "nu": 0.3, "num_classes": CLASSES}],
    "triplet": [{}, {"margin": 0.2, "swap": True}, {"smooth_loss": True}],
    "histogram": [{}, {"n_bins": 9}, {"delta": 0.1}],
    "fast_ap": [{}, {"num_bins": 6}],
    "normalized_softmax": [{}, {"temperature": 0.5}],
    "proxy_nca": [{}, {"softmax_scale": 8}],
    "arcface": [{}, {"margin": 100, "scale": 8}],
    "soft_triple": [{}, {"centers_per_class": 2, "la": 5, "gamma": 0.4, "margin": 0.2}],
    "proxy_anchor": [{}, {"margin": 0.3, "alpha": 8}],
}
TWINS = [(name, arguments) for name, variants in ARGUMENTS.items() for arguments in variants]
OVER_TWINS = pytest.mark.parametrize(
    ("name", "arguments"), TWINS, ids=[f"{name}-{'-'.join(arguments) or 'default'}" for name, arguments in TWINS]
)
OVER_NAMES = pytest.mark.parametrize("name", ARGUMENTS)

#: Miners whose tuples go into both libraries.
MINERS = {
    "pairs": lambda: miners.MultiSimilarityMiner(),
    "triplets": lambda: miners.TripletMarginMiner(margin=0.1, type_of_triplets="semihard"),
    "hard": lambda: miners.BatchHardMiner(),
}


def test_every_loss_that_pml_has_is_compared_with_it() -> None:
    assert {name for name, cls in LOSSES.items() if cls.pml is not None} == set(ARGUMENTS)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """PML keeps some constants in torch's default dtype: parity in fp64 needs it to be fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def twins(name: str, dtype: torch.dtype, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any]:
    """Our loss and PML's with the same parameters."""
    cls = LOSSES[name]
    shape = {"num_classes": CLASSES, "embedding_size": DIM} if issubclass(cls, ProxyLoss) else {}
    with default_dtype(dtype):
        torch.manual_seed(1)
        pair = cls(**ours, **shape), getattr(losses, cls.pml or "")(**theirs, **shape)
    for parameter in pair[0].parameters():
        parameter.data += 0.1 * torch.rand(parameter.shape, generator=generator(5), dtype=torch.float64).to(dtype)
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


def run_pml(loss_fn: Any, dtype: torch.dtype, *arguments: Any, **forward: Any) -> Result:
    with default_dtype(dtype):
        return run(loss_fn, *arguments, **forward)


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def compare(
    name: str,
    backend: str,
    dtype: torch.dtype,
    batch: tuple[Tensor, Tensor],
    ours: dict[str, Any],
    theirs: dict[str, Any] | None = None,
    **forward: Any,
) -> None:
    """Equal values and gradients, and a value that is not trivially 0.

    In fp32 PML's result in fp64 is the truth, and we may be off by 1e-5 beside twice what PML itself is off in fp32.
    """
    mine, his = twins(name, dtype, ours, ours if theirs is None else theirs)
    want = run_pml(his, dtype, *batch, **forward)
    got = run(mine, *batch, backend=backend, **forward)
    if dtype == torch.float64:
        assert want.loss > 0
        assert_same(got, want, TOLERANCE[dtype])
        return
    forward = {key: double(value) for key, value in forward.items()}
    truth = run_pml(his.double(), torch.float64, *map(double, batch), **forward)
    for name, exact in {"loss": truth.loss, **truth.grads}.items():
        rounded, value = (r.loss if name == "loss" else r.grads[name] for r in (want, got))
        scale = max(float(exact.abs().max()), 1e-2)
        allowed = TOLERANCE[dtype] * scale + 2 * float((rounded - exact).abs().max())
        assert float((value - exact).abs().max()) <= allowed, name


@ON
@DTYPES
@pytest.mark.parametrize("regime", REGIMES)
@OVER_TWINS
def test_value_and_gradients_are_pmls(
    name: str, arguments: dict[str, Any], regime: str, dtype: torch.dtype, backend: str
) -> None:
    for shape in SHAPES if dtype == torch.float64 else SHAPES[:1]:
        compare(name, backend, dtype, make_batch(regime, *shape, dtype=dtype), arguments)


def reference(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A reference set of other size; one class of the batch has no positive there."""
    z, labels = make_batch("random", 23, DIM, CLASSES, seed=9, dtype=dtype)
    return z, torch.where(labels == 0, 1, labels)


@ON
@DTYPES
@pytest.mark.parametrize("name", [name for name in ARGUMENTS if LOSSES[name].takes_ref and name != "fast_ap"])
def test_a_reference_set_gives_pmls_value_and_gradients(name: str, dtype: torch.dtype, backend: str) -> None:
    ref_emb, ref_labels = reference(dtype)
    for arguments in ARGUMENTS[name]:
        if "swap" not in arguments:
            batch = make_batch("trained", *SHAPES[0], dtype=dtype)
            compare(name, backend, dtype, batch, arguments, ref_emb=ref_emb, ref_labels=ref_labels)


@ON
@DTYPES
@pytest.mark.parametrize("miner", MINERS)
@OVER_TWINS
def test_mined_tuples_give_pmls_value_and_gradients(
    name: str, arguments: dict[str, Any], miner: str, dtype: torch.dtype, backend: str
) -> None:
    z, labels = make_batch("random", *SHAPES[0], dtype=dtype)
    compare(name, backend, dtype, (z, labels), arguments, indices_tuple=MINERS[miner]()(z, labels))


@ON
@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("name", [name for name in ARGUMENTS if LOSSES[name].takes_ref and name != "fast_ap"])
def test_tuples_mined_in_a_reference_set_give_pmls_value_and_gradients(name: str, miner: str, backend: str) -> None:
    ref_emb, ref_labels = reference(torch.float64)
    z, labels = make_batch("random", *SHAPES[0])
    mined = MINERS[miner]()(z, labels, ref_emb, ref_labels)
    forward = {"indices_tuple": mined, "ref_emb": ref_emb, "ref_labels": ref_labels}
    compare(name, backend, torch.float64, (z, labels), {}, **forward)


@ON
@pytest.mark.parametrize("name", ["ms", "contrastive", "triplet", "margin", "histogram"])
def test_a_tuple_needs_no_labels(name: str, backend: str) -> None:
    z, labels = make_batch("random", *SHAPES[0])
    compare(name, backend, torch.float64, (z, None), {}, indices_tuple=MINERS["pairs"]()(z, labels))


@ON
@DTYPES
@pytest.mark.parametrize("regime", REGIMES)
def test_mining_inside_the_ms_loss_is_pmls_miner(regime: str, dtype: torch.dtype, backend: str) -> None:
    z, labels = make_batch(regime, *SHAPES[0], dtype=dtype)
    mined = miners.MultiSimilarityMiner(epsilon=0.1)(z, labels)
    theirs = run_pml(losses.MultiSimilarityLoss(), dtype, z, labels, indices_tuple=mined)
    ours = run(pydml.losses.MultiSimilarityLoss(epsilon=0.1), z, labels, backend=backend)
    assert_same(ours, theirs, TOLERANCE[dtype])


@ON
@pytest.mark.parametrize("regime", REGIMES)
def test_hard_triplets_are_pmls_batch_hard_miner(regime: str, backend: str) -> None:
    z, labels = make_batch(regime, *SHAPES[0])
    mined = miners.BatchHardMiner()(z, labels)
    theirs = run_pml(losses.TripletMarginLoss(margin=0.2), torch.float64, z, labels, indices_tuple=mined)
    ours = run(pydml.losses.TripletMarginLoss(margin=0.2, triplets="hard"), z, labels, backend=backend)
    assert_same(ours, theirs, 1e-10)


@ON
@pytest.mark.parametrize("positive", ["easy", "hard"])
@pytest.mark.parametrize("negative", ["hard", "semihard", "easy"])
def test_extreme_triplets_are_pmls_easy_hard_miner_with_ntxent(positive: str, negative: str, backend: str) -> None:
    z, labels = make_batch("random", *SHAPES[0])
    a, p, _, n = miners.BatchEasyHardMiner(positive, negative, distance=distances.CosineSimilarity())(z, labels)
    theirs = run_pml(losses.NTXentLoss(temperature=0.1), torch.float64, z, labels, indices_tuple=(a, p, n))
    ours = pydml.losses.ExtremeTripletLoss(positive, negative, temperature=0.1)
    assert_same(run(ours, z, labels, backend=backend), theirs, 1e-10)


# Distances and reducers of PML

DISTANCES = {
    "cosine": (lambda: distances.CosineSimilarity(), "cosine"),
    "dot": (lambda: distances.DotProductSimilarity(), "cosine"),
    "raw_dot": (lambda: distances.DotProductSimilarity(normalize_embeddings=False), "cosine"),
    "euclidean": (lambda: distances.LpDistance(), "euclidean"),
    "squared": (lambda: distances.LpDistance(power=2), "squared"),
    "raw_euclidean": (lambda: distances.LpDistance(normalize_embeddings=False), "euclidean"),
    "raw_squared": (lambda: distances.LpDistance(normalize_embeddings=False, power=2), "squared"),
}
#: Arguments for which the loss is not trivial whatever the distance.
SENSIBLE = {
    "ms": {"beta": 4, "base": 0.7},
    "contrastive": {"pos_margin": 0.8, "neg_margin": 0.9},
    "margin": {"beta": 0.8},
    "triplet": {"margin": 0.3},
}
#: Losses for which a distance means nothing, to PML either.
MEANINGLESS = {
    "fast_ap": {"cosine", "dot", "raw_dot", "raw_euclidean", "raw_squared"},
    "arcface": {"raw_dot", "euclidean", "squared", "raw_euclidean", "raw_squared"},
    "soft_triple": {"euclidean", "squared", "raw_euclidean", "raw_squared"},
    "histogram": {"raw_dot", "euclidean", "squared", "raw_euclidean", "raw_squared"},  # values beyond 1
}


def pml_takes(name: str, distance: str) -> bool:
    return (name, distance) != ("arcface", "dot")  # only by the name CosineSimilarity


@ON
@pytest.mark.parametrize("distance", DISTANCES)
@OVER_NAMES
def test_distance_objects_mean_what_they_mean_to_pml(name: str, distance: str, backend: str) -> None:
    make = DISTANCES[distance][0]
    arguments = SENSIBLE.get(name, {})
    batch = make_batch("random", *SHAPES[0])
    if distance in MEANINGLESS.get(name, ()):
        with pytest.raises(ValueError, match=r"distance: |normalize_embeddings: "):
            twins(name, torch.float64, arguments | {"distance": make()}, arguments)[0](*batch, backend=backend)
        return
    if not pml_takes(name, distance):
        pytest.skip("PML's loss does not take this distance")
    distant = arguments | {"distance": make()}
    compare(name, backend, torch.float64, batch, distant)
    mined = MINERS["pairs"]()(*batch)
    compare(name, backend, torch.float64, batch, distant, indices_tuple=mined)
    if LOSSES[name].takes_ref and name != "fast_ap":
        ref_emb, ref_labels = reference(torch.float64)
        compare(name, backend, torch.float64, batch, distant, ref_emb=ref_emb, ref_labels=ref_labels)


REDUCERS = {
    "mean": lambda: reducers.MeanReducer(),
    "sum": lambda: reducers.SumReducer(),
    "nonzero": lambda: reducers.AvgNonZeroReducer(),
    "anchor": lambda: reducers.PerAnchorReducer(),
    "divisor": lambda: reducers.DivisorReducer(),
}


@ON
@pytest.mark.parametrize("reducer", REDUCERS)
@OVER_NAMES
def test_reducer_objects_mean_what_they_mean_to_pml(name: str, reducer: str, backend: str) -> None:
    arguments = SENSIBLE.get(name, {}) | {"reducer": REDUCERS[reducer]()}
    if reducer == "divisor" and reducer not in LOSSES[name].reductions:
        with pytest.raises(ValueError, match="DivisorReducer"):
            twins(name, torch.float64, arguments, {})
        return
    if (name, reducer) == ("lifted", "anchor"):
        pytest.skip("PML fails on this combination: its losses are [n, 1] where its reducer expects [n]")
    if reducer == "anchor" and name in ("margin", "triplet"):
        with pytest.raises(NotImplementedError, match=r"PerAnchorReducer with triplets|Triplet reduction"):
            twins(name, torch.float64, arguments, {})[0](*make_batch("random", *SHAPES[0]), backend=backend)
        return
    for regime in ("random", "ragged"):
        batch = make_batch(regime, *SHAPES[0])
        compare(name, backend, torch.float64, batch, arguments)
        compare(name, backend, torch.float64, batch, arguments, indices_tuple=MINERS["pairs"]()(*batch))


@ON
@pytest.mark.parametrize("reducer", ["mean", "sum", "nonzero", "anchor"])
@pytest.mark.parametrize("name", ["contrastive", "ms", "triplet", "lifted", "n_pairs"])
def test_reducers_count_repeated_pairs_as_pml_does(name: str, reducer: str, backend: str) -> None:
    """Triplets repeat their pairs."""
    if (name, reducer) in {("lifted", "anchor"), ("triplet", "anchor")}:
        pytest.skip("PML fails on this combination")
    batch = make_batch("random", *SHAPES[0])
    mined = MINERS["triplets"]()(*batch)
    if (name, reducer) == ("contrastive", "anchor"):
        # PML writes repeated pairs into one place: its value counts them once, its gradient as often as they are listed
        mine, his = twins(name, torch.float64, *[{"reducer": REDUCERS[reducer]()} for _ in "12"])
        assert_close(mine(*batch, mined, backend=backend), his(*batch, mined), 1e-10)
        z = batch[0][:8].clone().requires_grad_()
        few = tuple(
            index[index.new_tensor([0, 0, 1])] for index in (torch.arange(8), torch.arange(8) + 1, torch.arange(8) + 2)
        )
        few = tuple(index % 8 for index in few)
        assert torch.autograd.gradcheck(lambda rows: mine(rows, batch[1][:8], few, backend=backend), (z,))
        return
    compare(name, backend, torch.float64, batch, {"reducer": REDUCERS[reducer]()}, indices_tuple=mined)


@ON
@OVER_NAMES
def test_do_nothing_reducer_gives_pmls_dict(name: str, backend: str) -> None:
    mine, his = twins(name, torch.float64, *[{"reducer": reducers.DoNothingReducer()}] * 2)
    z, labels = make_batch("random", *SHAPES[0])
    with default_dtype(torch.float64):
        got, want = mine(z, labels, backend=backend), his(z, labels)
    assert list(got) == list(want)
    for ours, theirs in zip(got.values(), want.values(), strict=True):
        assert (ours["reduction_type"], set(ours)) == (theirs["reduction_type"], set(theirs))
        if isinstance(theirs["losses"], Tensor):
            assert_close(ours["losses"].flatten(), theirs["losses"].flatten(), 1e-10)
        else:
            assert ours["losses"] == theirs["losses"] == 0
        if theirs["indices"] is not None:
            assert torch.equal(torch.stack((*ours["indices"],)), torch.stack((*theirs["indices"],)))


@pytest.mark.parametrize(
    ("distance", "says"),
    [
        (lambda: distances.BatchedDistance(distances.LpDistance()), "BatchedDistance"),
        (lambda: "manhattan", "manhattan"),
        (lambda: 3, "int"),
    ],
)
@OVER_NAMES
def test_what_is_no_distance_is_refused_by_name(name: str, distance: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"distance.*{says}"):
        twins(name, torch.float64, {"distance": distance()}, {})


@ON
@OVER_NAMES
def test_regularizers_of_pml_are_added(name: str, backend: str) -> None:
    arguments: dict[str, Any] = {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 0.3}
    if issubclass(LOSSES[name], ProxyLoss):
        arguments |= {"weight_regularizer": regularizers.LpRegularizer(p=2, power=2), "weight_reg_weight": 0.2}
        if name == "proxy_nca":
            arguments["weight_regularizer"] = regularizers.RegularFaceRegularizer()
    compare(name, backend, torch.float64, make_batch("random", *SHAPES[0]), arguments)


# Where we differ on purpose


@ON
def test_constants_are_kept_in_the_dtype_of_the_embeddings(backend: str) -> None:
    """PML rounds β = 1.2 to fp32 unless torch's default dtype is fp64."""
    z, labels = make_batch("random", *SHAPES[0])
    ours, theirs = pydml.losses.MarginLoss(), losses.MarginLoss()
    gap = float(ours(z, labels, backend=backend) - theirs(z, labels))
    assert 1e-9 < abs(gap) < 1e-7
    with default_dtype(torch.float64):
        assert_close(ours(z, labels, backend=backend), losses.MarginLoss()(z, labels), 1e-12)


ONE_PAIR = tuple(torch.tensor([i]) for i in (0, 1, 0, 2))


@ON
def test_one_mined_pair_a_side_gives_the_formula(backend: str) -> None:
    """PML gives 0 as soon as every index of the tuple has at most one entry."""
    z, labels = make_batch("random", 6, DIM, 2)
    x = torch.nn.functional.normalize(z)
    s_ap, s_an = x[0] @ x[1], x[0] @ x[2]
    assert losses.MultiSimilarityLoss()(z, labels, ONE_PAIR) == 0
    ms = torch.log1p(torch.exp(-2 * (s_ap - 0.5))) / 2 + torch.log1p(torch.exp(50 * (s_an - 0.5))) / 50
    assert_close(pydml.losses.MultiSimilarityLoss()(z, labels, ONE_PAIR, backend=backend), ms / 6, 1e-12)
    d_ap, d_an = (x[0] - x[1]).norm(), (x[0] - x[2]).norm()
    assert losses.ContrastiveLoss(neg_margin=3)(z, labels, ONE_PAIR) == 0
    got = pydml.losses.ContrastiveLoss(neg_margin=3)(z, labels, ONE_PAIR, backend=backend)
    assert_close(got, d_ap + 3 - d_an, 1e-12)
    assert losses.GeneralizedLiftedStructureLoss()(z, labels, ONE_PAIR) == 0
    got = pydml.losses.GeneralizedLiftedStructureLoss()(z, labels, ONE_PAIR, backend=backend)
    assert_close(got, torch.relu(d_ap + 1 - d_an) / 6, 1e-12)


@ON
def test_nca_without_positives_is_zero(backend: str) -> None:
    z, labels = make_batch("random", 6, DIM, 6)
    assert losses.NCALoss()(z, labels).isnan()
    got = run(pydml.losses.NCALoss(), z, labels, backend=backend)
    assert got.loss == 0
    assert not got.grads["embeddings"].any()


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nca_counts_anchors_whose_positive_mass_underflows(dtype: torch.dtype, backend: str) -> None:
    z = torch.tensor([[1.0, 0.0], [-1.0, 1e-3], [1.0, 1e-3], [-1.0, 0.0]], dtype=dtype)
    labels, scale = torch.tensor([0, 0, 1, 1]), 1000.0  # everyone's positive is at D² ≈ 4, a negative at D² ≈ 0
    theirs = losses.NCALoss(softmax_scale=scale)(z, labels)
    assert theirs.isnan() or theirs == 0
    got = run(pydml.losses.NCALoss(softmax_scale=scale), z, labels, backend=backend)
    assert_close(got.loss, scale * 4, 1e-5)
    assert got.grads["embeddings"].isfinite().all()
    assert got.grads["embeddings"].any()


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histogram_of_duplicates_falls_on_the_last_node(dtype: torch.dtype, backend: str) -> None:
    z = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0], [0, 1.0]], dtype=dtype)
    labels = torch.tensor([0, 0, 1, 1])
    with pytest.raises(RuntimeError, match="index"):
        losses.HistogramLoss()(z, labels)
    got = run(pydml.losses.HistogramLoss(), z, labels, backend=backend)
    assert got.loss == 0  # positives all at S = 1, negatives all at S = 0
    assert got.grads["embeddings"].isfinite().all()
    swapped = pydml.losses.HistogramLoss()(z, torch.tensor([0, 1, 0, 1]), backend=backend)
    assert_close(swapped, 1.0, 1e-5)  # positives all at S = 0; half of the negatives at S = 0, half at S = 1


@ON
def test_soft_triple_keeps_its_authors_constant_under_the_root(backend: str) -> None:
    """Two equal centres cost √1e-5 each pair; PML's regulariser has the smallest number of the dtype there."""
    loss_fn = pydml.losses.SoftTripleLoss(CLASSES, DIM, centers_per_class=2, tau=1.0).double()
    with torch.no_grad():
        loss_fn.fc[:, 1::2] = loss_fn.fc[:, ::2]
    z, labels = make_batch("random", *SHAPES[0])
    plain = pydml.losses.SoftTripleLoss(CLASSES, DIM, centers_per_class=2).double()
    plain.load_state_dict(loss_fn.state_dict())
    merging = loss_fn(z, labels, backend=backend) - plain(z, labels, backend=backend)
    assert_close(merging, 1e-5**0.5 / 2, 1e-6)
    theirs = regularizers.SparseCentersRegularizer(CLASSES, 2)(loss_fn.fc.T)
    assert theirs < 1e-6
    apart = pydml.losses.SoftTripleLoss(CLASSES, DIM, centers_per_class=2, tau=1.0).double()
    plain.load_state_dict(apart.state_dict())
    merging = apart(z, labels, backend=backend) - plain(z, labels, backend=backend)
    assert_close(merging, regularizers.SparseCentersRegularizer(CLASSES, 2)(apart.fc.T), 1e-4)


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arcface_has_a_finite_gradient_on_its_own_centre(dtype: torch.dtype, backend: str) -> None:
    mine, his = (module.ArcFaceLoss(num_classes=2, embedding_size=2).to(dtype) for module in (pydml.losses, losses))
    for loss_fn in (mine, his):
        loss_fn.W.data = torch.eye(2, dtype=dtype)
    z, labels = torch.tensor([[2.0, 0.0], [0.0, -3.0]], dtype=dtype), torch.tensor([0, 1])  # c = 1 and c = -1
    assert run_pml(his, dtype, z, labels).grads["embeddings"].isnan().any()
    got = run(mine, z, labels, backend=backend)
    assert all(grad.isfinite().all() for grad in got.grads.values())


@ON
@pytest.mark.parametrize("name", ["contrastive", "triplet", "ms"])
def test_nan_is_not_hidden(name: str, backend: str) -> None:
    z, labels = make_batch("random", *SHAPES[0])
    z[3, 4] = torch.nan
    theirs = getattr(losses, LOSSES[name].pml or "")()
    mined = miners.MultiSimilarityMiner()(z, labels) if name == "ms" else None
    assert theirs(z, labels, mined).isfinite()
    ours = LOSSES[name](epsilon=0.1) if name == "ms" else LOSSES[name]()
    assert ours(z, labels, backend=backend).isnan()


@ON
def test_fast_ap_takes_a_reference_set(backend: str) -> None:
    """PML's does not. Against a copy of the batch every row is its own positive at distance 0."""
    z, labels = make_batch("random", *SHAPES[0])
    ref_emb, ref_labels = reference(torch.float64)
    with pytest.raises(ValueError, match="ref_emb"):
        losses.FastAPLoss()(z, labels, ref_emb=ref_emb, ref_labels=ref_labels)
    x, y = torch.nn.functional.normalize(z), torch.nn.functional.normalize(ref_emb)
    same = labels[:, None] == ref_labels[None, :]
    pulse = (1 - ((2 - 2 * x @ y.T)[..., None] - torch.linspace(0, 4, 11, dtype=z.dtype)).abs() / 0.4).clamp_min(0)
    h_pos, h = (pulse * same[..., None]).sum(1), pulse.sum(1)
    terms = (h_pos * h_pos.cumsum(1) / h.cumsum(1).clamp_min(1e-30)).sum(1)
    want = 1 - (terms / same.sum(1))[same.any(1)].mean()
    got = pydml.losses.FastAPLoss()(z, labels, ref_emb=ref_emb, ref_labels=ref_labels, backend=backend)
    assert_close(got, want, 1e-10)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, {}) for name in ARGUMENTS if not LOSSES[name].takes_ref] + [("triplet", {"swap": True})],
)
def test_a_reference_set_without_a_meaning_is_refused(name: str, arguments: dict[str, Any]) -> None:
    loss_fn, _ = twins(name, torch.float64, arguments, arguments)
    ref_emb, ref_labels = reference(torch.float64)
    with pytest.raises(ValueError, match="ref_emb"):
        loss_fn(*make_batch("random", *SHAPES[0]), ref_emb=ref_emb, ref_labels=ref_labels)


# PML's wrappers around our losses


@ON
@pytest.mark.parametrize("miner", [None, "pairs"])
@pytest.mark.parametrize("name", ["contrastive", "generalized_lifted", "lifted", "margin", "ms", "nca", "triplet"])
def test_cross_batch_memory_gives_the_same_with_our_loss(name: str, miner: str | None, backend: str) -> None:
    mine, his = twins(name, torch.float64, {}, {})
    memories = [
        losses.CrossBatchMemory(loss, embedding_size=DIM, memory_size=40, miner=MINERS[miner]() if miner else None)
        for loss in (mine, his)
    ]
    for step in range(4):  # the third batch makes the queue wrap around
        batch = make_batch("random", 17, DIM, CLASSES, seed=step)
        with pydml.use_backend(backend):
            got = run(memories[0], *batch)
        assert_same(got, run_pml(memories[1], torch.float64, *batch), 1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_one_of_pmls(name: str) -> None:
    cls = LOSSES[name]
    needed: dict[str, Any] = {"num_classes": CLASSES, "embedding_size": DIM} if issubclass(cls, ProxyLoss) else {}
    loss_fn = cls(**needed, **({"k": 4} if name == "dro_topk" else {}))
    assert isinstance(loss_fn, losses.BaseMetricLossFunction)
    z, labels = make_batch("random", *SHAPES[0], dtype=torch.float32)
    with pytest.warns(UserWarning, match="non-distributed"):
        wrapped = DistributedLossWrapper(loss_fn)(z, labels)
    assert_close(wrapped, loss_fn(z, labels), 1e-6)


WITHOUT_PML = """
import sys
sys.modules["pytorch_metric_learning"] = None
import torch, pydml
z = torch.randn(12, 5, requires_grad=True)
labels = torch.arange(12) % 3
for name, cls in pydml.losses.LOSSES.items():
    proxy = issubclass(cls, pydml.losses.ProxyLoss)
    arguments = {"num_classes": 3, "embedding_size": 5} if proxy else {"k": 4} if name == "dro_topk" else {}
    loss = cls(**arguments)(z, labels)
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all(), name
assert not any(name.startswith("pytorch_metric_learning.") for name in sys.modules)
print("fine")
"""


def test_every_loss_works_without_pml() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PML], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr
