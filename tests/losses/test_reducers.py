"""Reducers, regularisers and statistics as objects: PML's values, dicts and records, without PML too."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import BACKENDS, assert_close, make_batch
from torch import Tensor

import pydml
from pydml import distances, losses, reducers, regularizers
from pydml.losses import LOSSES, ProxyLoss

pml = pytest.importorskip("pytorch_metric_learning", reason="the oracle, pytorch-metric-learning, is not installed")
from pytorch_metric_learning import regularizers as their_regularizers  # noqa: E402
from pytorch_metric_learning.losses import SelfSupervisedLoss  # noqa: E402

ON = pytest.mark.parametrize("backend", BACKENDS)
SHAPE = (20, 8, 5)


def make(name: str, **arguments: Any) -> Any:
    needed = {"num_classes": SHAPE[2], "embedding_size": SHAPE[1]} if issubclass(LOSSES[name], ProxyLoss) else {}
    return LOSSES[name](**needed, **({"k": 4} if name == "dro_topk" else {}), **arguments)


# Reducers by themselves

SIZES = {"element": 1, "pos_pair": 2, "neg_pair": 2, "triplet": 3}
OBJECTS: dict[str, Any] = {
    "mean": lambda lib: lib.MeanReducer(),
    "sum": lambda lib: lib.SumReducer(),
    "nonzero": lambda lib: lib.AvgNonZeroReducer(),
    "threshold": lambda lib: lib.ThresholdReducer(low=0.2, high=0.7),
    "nothing passes": lambda lib: lib.ThresholdReducer(low=2),
    "class": lambda lib: lib.ClassWeightedReducer(torch.arange(5.0)),
    "divisor": lambda lib: lib.DivisorReducer(),
    "anchor": lambda lib: lib.PerAnchorReducer(),
    "anchor, nonzero": lambda lib: lib.PerAnchorReducer(lib.AvgNonZeroReducer()),
    "anchor, max": lambda lib: lib.PerAnchorReducer(aggregation_func=lambda x, n: x.amax(1)),
}


def part(kind: str, losses_: Any) -> dict[str, Any]:
    index = torch.arange(12)
    indices = index if kind == "element" else tuple((index * 7 + k * 3) % 20 for k in range(SIZES[kind]))
    return {"loss": {"losses": losses_, "indices": indices, "reduction_type": kind, "divisor": 4}}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("reducer", OBJECTS)
def test_a_reducer_gives_pmls_value_and_gradient(reducer: str, kind: str) -> None:
    mine, his = (OBJECTS[reducer](lib) for lib in (reducers, pml.reducers))
    if reducer.startswith("anchor") and kind == "triplet":
        with pytest.raises(NotImplementedError, match="PerAnchorReducer"):
            mine(part(kind, torch.rand(12)), torch.rand(20, 3), torch.arange(20) % 5)
        return
    z, labels = torch.rand(20, 3, dtype=torch.float64), torch.arange(20) % 5
    values = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) - 0.1
    found = []
    for one in (mine, his):
        x = values.clone().requires_grad_()
        out = one(part(kind, x), z.requires_grad_(), labels)
        found.append((out, torch.autograd.grad(out, x, allow_unused=True)[0]))
    assert_close(found[0][0], found[1][0], 1e-12)
    if found[1][1] is not None:
        assert_close(found[0][1], found[1][1], 1e-12)
    assert mine(part(kind, 0), z, labels) == 0 and mine(part(kind, values[:0]), z, labels) == 0


def test_multiple_reducers_take_each_sub_loss_by_name() -> None:
    z, labels, values = torch.rand(20, 3), torch.arange(20) % 5, torch.rand(12)
    both = part("element", values) | {"other": part("pos_pair", values * 2)["loss"]}
    results = [
        lib.MultipleReducers({"loss": lib.SumReducer()}, default_reducer=lib.ThresholdReducer(high=1.0))(
            both, z, labels
        )
        for lib in (reducers, pml.reducers)
    ]
    assert_close(results[0], results[1], 1e-6)
    assert reducers.DoNothingReducer()(both, z, labels) is both
    with pytest.raises(ValueError, match="loss_dict: got 2 sub-losses"):
        reducers.MeanReducer()(both, z, labels)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: reducers.ThresholdReducer(), "low, high"),
        (lambda: reducers.ClassWeightedReducer([1.0]), "weights: got"),
        (lambda: reducers.BaseReducer()(part("element", torch.ones(12)), torch.ones(2, 2), None), "BaseReducer has no"),
        (lambda: reducers.MeanReducer()(part("element", torch.ones(3)), torch.ones(2, 2), None), "loss_indices: got"),
        (lambda: losses.ContrastiveLoss(reducer=reducers.DivisorReducer()), "ContrastiveLoss got DivisorReducer"),
        (lambda: losses.MultiSimilarityLoss(reduction="sum", reducer=reducers.SumReducer()), "only one of the two"),
        (
            lambda: losses.DROKLLoss(reducer=reducers.SumReducer()),
            "DROKLLoss got SumReducer, wanted one of MeanReducer",
        ),
    ],
)
def test_wrong_reducers_say_what_is_wrong(wrong: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
        wrong()


# Objects of a loss


@pytest.mark.parametrize("name", [name for name, cls in LOSSES.items() if cls.pml])
def test_objects_of_a_loss_are_of_pmls_classes(name: str) -> None:
    mine = make(name)
    his = getattr(pml.losses, LOSSES[name].pml or "")(
        **({"num_classes": 5, "embedding_size": 8} if issubclass(LOSSES[name], ProxyLoss) else {})
    )
    assert type(mine.distance).__name__ == type(his.distance).__name__
    assert mine.distance.power == his.distance.power and isinstance(mine.distance, type(his.distance))
    assert type(mine.reducer).__name__ == type(his.reducer).__name__ and isinstance(mine.reducer, type(his.reducer))
    assert mine.sub_loss_names() == his.sub_loss_names()
    if isinstance(his.reducer, pml.reducers.MultipleReducers):
        kinds = [{key: type(r).__name__ for key, r in loss.reducer.reducers.items()} for loss in (mine, his)]
        assert kinds[0] == kinds[1]
    assert {*getattr(his, "_record_these", [])} <= {*mine._record_these}


@ON
def test_objects_may_be_replaced(backend: str) -> None:
    z, labels = make_batch("random", *SHAPE)
    loss_fn = losses.ContrastiveLoss()
    loss_fn.distance = distances.SNRDistance()
    loss_fn.reducer = reducers.MultipleReducers({"pos_loss": reducers.SumReducer(), "neg_loss": reducers.SumReducer()})
    want = losses.ContrastiveLoss(distance=distances.SNRDistance(), reducer=reducers.SumReducer())
    assert (loss_fn.kind, loss_fn.reduction, loss_fn.fuses) == ("other", "sum", False)
    assert_close(loss_fn(z, labels, backend=backend), want(z, labels), 1e-12)


def test_a_repr_names_distance_and_reducer() -> None:
    assert repr(losses.ContrastiveLoss()).endswith(
        "distance='euclidean', normalize_embeddings=True, reduction='nonzero')"
    )
    shown = repr(losses.ContrastiveLoss(distance=distances.SNRDistance(), reducer=reducers.ThresholdReducer(low=1)))
    assert "SNRDistance(" in shown and "ThresholdReducer(low=1" in shown


@ON
def test_every_own_loss_takes_every_reducer_of_rows(backend: str) -> None:
    """Those that PML does not have, with a reducer that no engine has: the mean of squares of what ``none`` gives."""

    class Squares(reducers.BaseReducer):
        def element_reduction(self, losses: Tensor, *_: Any) -> Tensor:
            return losses.square().sum()

    z, labels = make_batch("random", *SHAPE)
    for name in ("ms_mining", "binomial", "lifted_star", "bin_lifted", "extreme_triplet", "dro_kl_grouped"):
        rows = make(name, reduction="none")(z, labels, backend=backend)
        got = make(name, reducer=Squares())(z, labels, backend=backend)
        assert_close(got, rows.square().sum(), 1e-10)


def test_rows_of_another_distance_may_have_any_shape() -> None:
    class Sets(distances.BaseDistance):
        def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
            return torch.cdist(query_emb.mean(1), ref_emb.mean(1))

        def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
            pass

    z, labels = torch.randn(12, 3, 7, requires_grad=True), torch.arange(12) % 4
    losses.TripletMarginLoss(distance=Sets(normalize_embeddings=False), margin=1.0)(z, labels).backward()
    assert z.grad is not None and z.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="2 dimensions"):
        losses.TripletMarginLoss()(z, labels)


# What else PML's users have


@ON
@pytest.mark.parametrize("swap", [False, True])
def test_random_triplets_are_pmls_for_the_same_seed(swap: bool, backend: str) -> None:
    z, labels = make_batch("ragged", *SHAPE)
    ref = {} if swap else dict(zip(("ref_emb", "ref_labels"), make_batch("random", 17, 8, 5, seed=9), strict=True))
    for number in (1, 3):
        found = []
        for lib in (losses, pml.losses):
            torch.manual_seed(number)
            options = {"backend": backend} if lib is losses else {}
            triplet = lib.TripletMarginLoss(margin=0.3, swap=swap, triplets_per_anchor=number)(
                z, labels, **ref, **options
            )
            margin = lib.MarginLoss(triplets_per_anchor=number)(z, labels, **options)
            found.append((triplet, margin))
        assert_close(found[0][0], found[1][0], 1e-10)
        assert_close(found[0][1], found[1][1], 1e-6)  # PML's β is in fp32
    with pytest.raises(ValueError, match="triplets_per_anchor: got 0"):
        losses.TripletMarginLoss(triplets_per_anchor=0)


@ON
@pytest.mark.parametrize("symmetric", [False, True])
def test_self_supervised_lifted_structure_is_pmls(symmetric: bool, backend: str) -> None:
    z, views = make_batch("random", *SHAPE)[0], make_batch("random", *SHAPE, seed=5)[0]
    with pydml.use_backend(backend):
        got = SelfSupervisedLoss(losses.LiftedStructureLoss(), symmetric=symmetric)(z, views)
    assert_close(got, SelfSupervisedLoss(pml.losses.LiftedStructureLoss(), symmetric=symmetric)(z, views), 1e-10)


@pytest.mark.parametrize("name", [name for name, cls in LOSSES.items() if issubclass(cls, ProxyLoss) and cls.pml])
def test_logits_are_pmls(name: str) -> None:
    z, _ = make_batch("random", *SHAPE)
    for distance in (
        (None, "cosine", "squared") if name in ("proxy_nca", "proxy_anchor", "normalized_softmax") else (None,)
    ):
        mine = make(name, distance=distance).double()
        his = getattr(pml.losses, LOSSES[name].pml or "")(
            5, 8, distance=None if distance is None else distances.named(distance)
        ).double()
        his.load_state_dict(mine.state_dict())
        assert_close(mine.get_logits(z), his.get_logits(z), 1e-10)


def test_beta_is_a_tensor() -> None:
    assert losses.MarginLoss(beta=1).beta.tolist() == [1.0]
    assert losses.MarginLoss(beta=torch.tensor(1.5), num_classes=3).beta.tolist() == [1.5] * 3
    assert not list(losses.MarginLoss().parameters())
    loss_fn = losses.MarginLoss(num_classes=5)
    loss_fn.beta = torch.linspace(0.5, 1.5, 5)
    his = pml.losses.MarginLoss(num_classes=5)
    his.beta = loss_fn.beta
    z, labels = make_batch("random", *SHAPE)
    assert_close(loss_fn(z, labels), his(z, labels), 1e-6)


# Statistics


def collected(module: Any) -> dict[str, Any]:
    """Statistics of a loss and all that it has, but those that PML misspells."""
    found = {}
    for name, part_of in module.named_modules():
        if not isinstance(part_of, (their_regularizers.BaseRegularizer,)):
            for stat in getattr(part_of, "_record_these_stats", []):
                if stat != "num_below_high":
                    found[f"{name}.{stat}"] = float(getattr(part_of, stat))
    return found


@pytest.mark.parametrize("name", [name for name, cls in LOSSES.items() if cls.pml])
def test_statistics_are_pmls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytorch_metric_learning.utils.common_functions.COLLECT_STATS", True)
    z, labels = make_batch("random", *SHAPE)
    z = z * 0.7
    mine, quiet = make(name).double(), make(name, collect_stats=False)
    his = getattr(pml.losses, LOSSES[name].pml or "")(
        **({"num_classes": 5, "embedding_size": 8} if issubclass(LOSSES[name], ProxyLoss) else {})
    ).double()
    his.load_state_dict(mine.state_dict())
    value = mine(z, labels)
    his(z, labels)
    assert mine.collect_stats and not quiet.collect_stats
    want = collected(his)
    assert want and set(want) == set(collected(mine))
    for stat, number in collected(mine).items():
        assert number == pytest.approx(want[stat], rel=1e-6), stat
    monkeypatch.undo()
    plain = make(name).double()
    plain.load_state_dict(mine.state_dict())
    assert_close(plain(z, labels), value, 1e-10)


# Regularisers

REGULARIZERS: list[tuple[str, dict[str, Any]]] = [
    ("LpRegularizer", {}),
    ("LpRegularizer", {"p": 1, "power": 2}),
    ("ZeroMeanRegularizer", {}),
    ("CenterInvariantRegularizer", {}),
    ("RegularFaceRegularizer", {}),
    ("SparseCentersRegularizer", {"num_classes": 4, "centers_per_class": 3}),
]


@pytest.mark.parametrize(("name", "arguments"), REGULARIZERS)
def test_regularisers_are_pmls(name: str, arguments: dict[str, Any]) -> None:
    mine, his = (getattr(lib, name)(**arguments, collect_stats=True) for lib in (regularizers, their_regularizers))
    x = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    got, want = mine(x), his(x)
    assert_close(got, want, 1e-12)
    assert_close(torch.autograd.grad(got, x)[0], torch.autograd.grad(want, x)[0], 1e-10)
    assert isinstance(mine, type(his)) and collected(mine) == pytest.approx(collected(his))
    value = losses.ContrastiveLoss(embedding_regularizer=mine, embedding_reg_weight=0.5)(x, torch.arange(12) % 4)
    assert_close(value, losses.ContrastiveLoss()(x, torch.arange(12) % 4) + 0.5 * got, 1e-12)


def test_regularisers_are_parts_of_the_dict() -> None:
    z, labels = make_batch("random", *SHAPE)
    loss_fn = make(
        "soft_triple",
        tau=0.3,
        reducer=reducers.DoNothingReducer(),
        embedding_regularizer=regularizers.LpRegularizer(),
        weight_regularizer=regularizers.LpRegularizer(),
        weight_reg_weight=0.1,
    ).double()
    parts = loss_fn(z, labels)
    assert list(parts) == ["loss", "embedding_reg_loss", "weight_reg_loss", "merging_loss"]
    total = sum(info["losses"].mean() for info in parts.values())
    loss_fn.reducer = reducers.MeanReducer()
    assert_close(loss_fn(z, labels), total, 1e-12)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            lambda: regularizers.CenterInvariantRegularizer(distance=distances.LpDistance()),
            "normalize_embeddings=False",
        ),
        (lambda: regularizers.RegularFaceRegularizer(distance=distances.LpDistance()), "wanted a similarity"),
        (lambda: regularizers.SparseCentersRegularizer(3, 1), "centers_per_class: got 1"),
        (lambda: regularizers.SparseCentersRegularizer(3, 2)(torch.ones(5, 2)), "x: got 5 rows"),
    ],
)
def test_wrong_regularisers_say_what_is_wrong(wrong: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrong()


WITHOUT_PML = """
import sys
sys.modules["pytorch_metric_learning"] = None
import torch
from pydml import distances, losses, records, reducers, regularizers

class Mine(distances.BaseDistance):
    def compute_mat(self, query_emb, ref_emb):
        return torch.cdist(query_emb, ref_emb, p=1)

class Largest(reducers.BaseReducer):
    def triplet_reduction(self, losses, loss_indices, embeddings, labels):
        return losses.max()

z, labels = torch.randn(12, 5, requires_grad=True), torch.arange(12) % 3
records.COLLECT_STATS = True
regular = regularizers.LpRegularizer()
loss_fn = losses.TripletMarginLoss(distance=Mine(), reducer=Largest(), embedding_regularizer=regular)
loss_fn(z, labels).backward()
assert z.grad.isfinite().all() and loss_fn.distance.initial_avg_query_norm > 0
print("fine")
"""


def test_objects_need_no_pml() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PML], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr
