"""Wrong arguments: an error of ours, never a bare one of torch, that names the argument and what was wanted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CASES, DEFAULTS, Case, make_batch, over

import pydml
from pydml.losses import LOSSES, ProxyLoss

DIM, CLASSES = 6, 4
REQUIRED: dict[str, dict[str, Any]] = {
    name: {"num_classes": CLASSES, "embedding_size": DIM}
    if issubclass(cls, ProxyLoss)
    else {"k": 4}
    if name == "dro_topk"
    else {}
    for name, cls in LOSSES.items()
}
Z, LABELS = make_batch("random", 8, DIM, CLASSES, dtype=torch.float32)
REF, REF_LABELS = make_batch("random", 5, DIM, CLASSES, seed=1, dtype=torch.float32)


def says(argument: str) -> Any:
    """An error whose message starts with the argument's name and a colon."""
    return pytest.raises((ValueError, TypeError, RuntimeError), match=rf"^{argument}: ")


# Calls: embeddings and labels


@pytest.mark.parametrize(
    "z",
    [
        [[1.0, 2.0]],
        np.ones((8, DIM), dtype=np.float32),
        None,
        Z[0],
        Z[None],
        Z.sum(),
        Z.long(),
        Z.bool(),
        Z.to(torch.complex64),
        Z[:, :0],
    ],
    ids=["list", "numpy", "None", "1d", "3d", "0d", "int", "bool", "complex", "no_width"],
)
@over(DEFAULTS)
def test_wrong_embeddings(case: Case, z: Any) -> None:
    with says("embeddings"):
        case.build(CLASSES, DIM, torch.float32)(z, LABELS)


@pytest.mark.parametrize(
    "labels",
    [
        LABELS.tolist(),
        LABELS.numpy(),
        None,
        LABELS.float(),
        LABELS.bool(),
        LABELS[:, None],
        LABELS[0],
        LABELS[:-1],
        torch.cat((LABELS, LABELS)),
        LABELS.to("meta"),
    ],
    ids=["list", "numpy", "None", "float", "bool", "2d", "0d", "short", "long", "other_device"],
)
@over(DEFAULTS)
def test_wrong_labels(case: Case, labels: Any) -> None:
    with says("labels"):
        case.build(CLASSES, DIM, torch.float32)(Z, labels)


def test_messages_say_what_came_and_what_was_wanted() -> None:
    loss_fn = pydml.losses.MultiSimilarityLoss()
    for wrong, came, wanted in (
        ((Z[0], LABELS), r"\[6\]", "2 dimensions"),
        ((Z.long(), LABELS), "torch.int64", "torch.float32"),
        ((Z, LABELS[:3]), "3 labels", "8"),
        ((Z, LABELS.to("meta")), "meta", "cpu"),
        ((Z, LABELS.float()), "torch.float32", "integer"),
        ((Z, LABELS, None, REF[:, :3], REF_LABELS), "width 3", "6"),
        ((Z, LABELS, None, REF.double(), REF_LABELS), "torch.float64", "torch.float32"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"got .*{came}.*wanted .*{wanted}"):
            loss_fn(*wrong)


@over(DEFAULTS, lambda case: case.proxy)
def test_proxy_losses_name_what_does_not_fit_their_proxies(case: Case) -> None:
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    with says("embeddings"):
        loss_fn(Z[:, :3], LABELS)
    with says("embeddings"):  # the proxies are on the CPU
        loss_fn(Z.to("meta"), LABELS.to("meta"))


@pytest.mark.parametrize("bad", [-1, CLASSES, 2**40, -(2**63)])
@over(CASES, lambda case: case.per_class)
def test_labels_outside_the_classes(case: Case, bad: int) -> None:
    labels = LABELS.clone()
    labels[3] = bad
    with pytest.raises(ValueError, match=rf"^labels: .*\[0, {CLASSES}\)"):
        case.build(CLASSES, DIM, torch.float32)(Z, labels)


# Calls: reference sets


@pytest.mark.parametrize(
    "ref_emb",
    [REF.tolist(), REF[0], REF[:, :3], REF.double(), REF.long(), REF.to("meta")],
    ids=["list", "1d", "width", "dtype", "int", "other_device"],
)
@over(DEFAULTS, lambda case: case.takes_ref)
def test_wrong_reference_set(case: Case, ref_emb: Any) -> None:
    with says("ref_emb"):
        case.build(CLASSES, DIM, torch.float32)(Z, LABELS, ref_emb=ref_emb, ref_labels=REF_LABELS)


@pytest.mark.parametrize(
    "ref_labels",
    [None, REF_LABELS.tolist(), REF_LABELS.float(), REF_LABELS[:-1], LABELS, REF_LABELS[None], REF_LABELS.to("meta")],
    ids=["None", "list", "float", "short", "long", "2d", "other_device"],
)
@over(DEFAULTS, lambda case: case.takes_ref)
def test_wrong_labels_of_the_reference_set(case: Case, ref_labels: Any) -> None:
    with says("ref_labels"):
        case.build(CLASSES, DIM, torch.float32)(Z, LABELS, ref_emb=REF, ref_labels=ref_labels)


@over(DEFAULTS)
def test_labels_of_no_reference_set(case: Case) -> None:
    with says("ref_labels"):
        case.build(CLASSES, DIM, torch.float32)(Z, LABELS, ref_labels=REF_LABELS)


@pytest.mark.parametrize(
    "ref_labels", [LABELS[:3], LABELS.float(), (LABELS + 1) % CLASSES], ids=["short", "float", "other"]
)
def test_labels_that_contradict_the_batch_as_its_own_reference_set(ref_labels: Any) -> None:
    with says("ref_labels"):
        pydml.losses.MultiSimilarityLoss()(Z, LABELS, ref_emb=Z, ref_labels=ref_labels)


@over(CASES, lambda case: not case.takes_ref)
def test_reference_set_for_a_loss_that_takes_none(case: Case) -> None:
    with pytest.raises(ValueError, match=f"^ref_emb: {case.cls.__name__}"):
        case.build(CLASSES, DIM, torch.float32)(Z, LABELS, ref_emb=REF, ref_labels=REF_LABELS)


# Calls: tuples

FEW = torch.arange(3)
NOT_TUPLES = {
    "two": (FEW, FEW),
    "five": (FEW,) * 5,
    "tensor": torch.zeros(2, 3, dtype=torch.long),
    "dict": {"a": FEW, "p": FEW},
    "number": 3,
    "lists": ([0], [1], [2]),
    "numbers": (0, 1, 2),
    "floats": (FEW, FEW, FEW.float()),
    "bools": (FEW, FEW, FEW.bool()),
    "2d": (FEW[None], FEW[None], FEW[None]),
    "uneven_triplets": (FEW, FEW, FEW[:2]),
    "uneven_positives": (FEW, FEW[:2], FEW, FEW),
    "uneven_negatives": (FEW, FEW, FEW[:2], FEW),
    "other_device": (FEW, FEW, FEW.to("meta")),
    "negative_anchor": (FEW - 1, FEW, FEW),
    "anchor_too_large": (FEW + 6, FEW, FEW),
    "positive_too_large": (FEW, FEW + 6, FEW),
    "negative_too_large": (FEW, FEW, FEW + 2**40),
    "second_anchor_too_large": (FEW, FEW, FEW + 6, FEW),
}


@pytest.mark.parametrize("bad", NOT_TUPLES)
@over(DEFAULTS, lambda case: case.takes_tuple)
def test_wrong_tuple(case: Case, bad: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^indices_tuple: "):
        case.build(CLASSES, DIM, torch.float32)(Z, LABELS, NOT_TUPLES[bad])


@over(DEFAULTS, lambda case: case.takes_tuple and case.takes_ref)
def test_tuple_beyond_the_reference_set(case: Case) -> None:
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    loss_fn(Z, LABELS, (FEW + 5, FEW + 2, FEW), REF, REF_LABELS)  # rows of the batch, columns of the reference set
    with pytest.raises(ValueError, match=r"^indices_tuple: p: .*\[0, 5\)"):
        loss_fn(Z, LABELS, (FEW, FEW + 3, FEW), REF, REF_LABELS)


@over(CASES, lambda case: not case.takes_tuple)
def test_tuple_for_a_loss_that_selects_by_itself(case: Case) -> None:
    with pytest.raises(ValueError, match=r"^indices_tuple: "):
        case.build(CLASSES, DIM, torch.float32)(Z, LABELS, (FEW, FEW, FEW))


@over(CASES, lambda case: case.takes_tuple)
def test_tuple_without_labels_where_labels_are_needed(case: Case) -> None:
    """A loss may do without them; if it cannot, it says so."""
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    try:
        assert loss_fn(Z, None, (FEW, FEW + 1, FEW + 2)).isfinite()
    except ValueError as error:
        assert str(error).startswith("labels: got None")
        assert case.proxy or case.loss in ("nca", "n_pairs", "fast_ap", "margin")


# Constructors: hyper-parameters


def hyper_parameters(kind: str) -> list[tuple[str, str]]:
    """(loss, argument) of every argument of a constructor whose annotation starts with ``kind``."""
    return [
        (name, argument)
        for name, cls in LOSSES.items()
        for argument, parameter in inspect.signature(cls.__init__).parameters.items()
        if str(parameter.annotation).startswith(kind)
    ]


def over_hyper_parameters(*kinds: str) -> Any:
    found = [pair for kind in kinds for pair in hyper_parameters(kind)]
    return pytest.mark.parametrize(("name", "argument"), found, ids=["-".join(pair) for pair in found])


def build(name: str, **arguments: Any) -> Any:
    return LOSSES[name](**REQUIRED[name] | arguments)


@pytest.mark.parametrize(
    "bad",
    [float("nan"), float("inf"), float("-inf"), "1", True, 1j, [1.0], torch.ones(2)],
    ids=["nan", "inf", "-inf", "str", "bool", "complex", "list", "tensor"],
)
@over_hyper_parameters("float", "int")
def test_hyper_parameter_that_is_no_number(name: str, argument: str, bad: Any) -> None:
    with says(argument):
        build(name, **{argument: bad})


@over_hyper_parameters("float", "int")
def test_hyper_parameter_may_be_none_only_where_none_means_something(name: str, argument: str) -> None:
    optional = "None" in str(inspect.signature(LOSSES[name].__init__).parameters[argument].annotation)
    if optional:
        build(name, **{argument: None})
    else:
        with says(argument):
            build(name, **{argument: None})


@pytest.mark.parametrize("bad", [2.5, -1, 0], ids=str)
@over_hyper_parameters("int")
def test_count_that_is_no_positive_whole_number(name: str, argument: str, bad: float) -> None:
    with says(argument):
        build(name, **{argument: bad})


@pytest.mark.parametrize("bad", ["yes", 1, None], ids=str)
@over_hyper_parameters("bool")
def test_flag_that_is_no_bool(name: str, argument: str, bad: Any) -> None:
    with says(argument):
        build(name, **{argument: bad})


@pytest.mark.parametrize("bad", ["", "nonsense", 3, None, ["all"]], ids=str)
@over_hyper_parameters("str")
def test_option_that_is_none_of_its_values(name: str, argument: str, bad: Any) -> None:
    with says(argument):
        build(name, **{argument: bad})


def test_hyper_parameters_are_found() -> None:
    """The tests above go over annotations: these must be there."""
    for kind, some in {"float": ("ms", "epsilon"), "int": ("dro_topk", "k"), "str": ("triplet", "triplets")}.items():
        assert some in hyper_parameters(kind)
    assert ("proxy_nca", "include_positive") in hyper_parameters("bool")


POSITIVE = [
    ("ms", "alpha"), ("ms", "beta"), ("binomial", "alpha"), ("binomial", "beta"), ("lifted_star", "alpha"),
    ("lifted_star", "beta"), ("bin_lifted", "alpha"), ("bin_lifted", "beta"), ("nca", "softmax_scale"),
    ("extreme_triplet", "temperature"), ("histogram", "delta"), ("dro_topk", "alpha"), ("dro_topk", "beta"),
    ("dro_kl", "gamma"), ("dro_kl", "alpha"), ("dro_kl", "beta"), ("dro_kl_grouped", "gamma_pos"),
    ("dro_kl_grouped", "gamma_neg"), ("normalized_softmax", "temperature"), ("proxy_nca", "softmax_scale"),
    ("arcface", "scale"), ("soft_triple", "la"), ("soft_triple", "gamma"), ("proxy_anchor", "alpha"),
    ("proxy_repulsion", "alpha"),
]  # fmt: skip
NOT_NEGATIVE = [
    ("contrastive", "pos_margin"), ("contrastive", "neg_margin"), ("margin", "margin"), ("margin", "nu"),
    ("triplet", "margin"), ("dro_topk", "margin"), ("dro_kl", "margin"), ("dro_kl_grouped", "margin"),
    ("arcface", "margin"), ("soft_triple", "margin"), ("soft_triple", "tau"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument"), POSITIVE)
def test_scale_that_is_not_positive(name: str, argument: str) -> None:
    for bad in (0, -1, -1e-9):
        with says(argument):
            build(name, **{argument: bad})


@pytest.mark.parametrize(("name", "argument"), NOT_NEGATIVE)
def test_margin_of_the_wrong_sign(name: str, argument: str) -> None:
    with says(argument):
        build(name, **{argument: -0.1})
    build(name, **{argument: 0})


@pytest.mark.parametrize(
    ("name", "arguments", "argument"),
    [
        ("dro_topk", {"k": 5, "balanced": True}, "k"),
        ("dro_topk", {"k": 0}, "k"),
        ("dro_topk", {"k": -2}, "k"),
        ("arcface", {"margin": 181}, "margin"),
        ("histogram", {"delta": 0.3}, "delta"),
        ("histogram", {"delta": 0.1, "n_bins": 21}, "delta"),
        ("arcface", {"normalize_embeddings": False}, "normalize_embeddings"),
        ("proxy_repulsion", {"normalize_embeddings": False}, "normalize_embeddings"),
        ("triplet", {"triplets": "hard", "triplets_per_anchor": 3}, "triplets_per_anchor"),
        ("fast_ap", {"normalize_embeddings": False}, "normalize_embeddings"),
        ("proxy_nca", {"include_positive": False, "num_classes": 1}, "num_classes"),
        ("ms", {"epsilon": 0.1, "distance": "euclidean"}, "epsilon"),
        ("triplet", {"swap": True, "triplets": "semihard"}, "swap"),
        ("extreme_triplet", {"order": 3}, "order"),
        ("extreme_triplet", {"positive": "semihard"}, "positive"),
        ("soft_triple", {"tau": 0.2, "reduction": "none"}, "tau"),
        ("ms", {"reduction": "none", "embedding_regularizer": torch.mean}, "embedding_regularizer"),
        ("proxy_nca", {"reduction": "none", "weight_regularizer": torch.mean}, "weight_regularizer"),
        ("proxy_nca", {"weight_reg_weight": "1"}, "weight_reg_weight"),
        ("ms", {"embedding_reg_weight": float("nan")}, "embedding_reg_weight"),
    ],
)
def test_arguments_that_do_not_go_together(name: str, arguments: dict[str, Any], argument: str) -> None:
    with says(argument):
        build(name, **arguments)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_distance(name: str) -> None:
    for bad in ("manhattan", "", None if "cosine" in LOSSES[name].distances else "cosine", object()):
        if bad is not None:  # None is the default
            with says("distance"):
                build(name, distance=bad)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_reduction(name: str) -> None:
    for bad in ("median", "", None, 3, *(() if LOSSES[name].over_anchors else ("sum", "none"))):
        with says("reduction"):
            build(name, reduction=bad)
    with says("reducer"):
        build(name, reducer=object())


@pytest.mark.parametrize("name", LOSSES)
def test_normalisation_that_is_no_bool(name: str) -> None:
    with says("normalize_embeddings"):
        build(name, normalize_embeddings=1)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_argument(name: str) -> None:
    with pytest.raises(
        TypeError, match=f"{LOSSES[name].__name__}: got an unexpected argument 'nonsense'; it takes .*dist"
    ):
        build(name, nonsense=1)
    with pytest.raises(TypeError, match=f"{LOSSES[name].__name__}: .*'distnace'; did you mean 'distance'"):
        build(name, distnace="cosine")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pydml.losses.MultiSimilarityLoss(aplha=2), "MultiSimilarityLoss: .*'aplha'; did you mean 'alpha'"),
        (lambda: pydml.losses.ProxyAnchorLoss(3, 4, weight_regulariser=None), "did you mean 'weight_regularizer'"),
        (lambda: pydml.distances.LpDistance(pwoer=2), "LpDistance: .*'pwoer'; did you mean 'power'"),
        (lambda: pydml.reducers.ThresholdReducer(lo=2), "ThresholdReducer: .*'lo'; did you mean 'low'"),
        (lambda: pydml.regularizers.LpRegularizer(powr=2), "LpRegularizer: .*'powr'; did you mean 'power'"),
        (lambda: pydml.functional.contrastive_loss(None, neg_margn=1), "contrastive_loss: .*did you mean 'neg_margin'"),
    ],
)
def test_a_misspelt_argument_names_the_class_and_the_nearest_one(make: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda t: pydml.losses.MultiSimilarityLoss(alpha=t),
        lambda t: pydml.losses.ContrastiveLoss(denominator=t),
        lambda t: pydml.losses.ContrastiveLoss(reducer=t),
        lambda t: pydml.losses.ContrastiveLoss(distance=t),
        lambda t: pydml.losses.MarginLoss(beta=t),
        lambda t: pydml.losses.TripletMarginLoss(triplets_per_anchor=t),
        lambda t: pydml.distances.LpDistance(normalize_embeddings=t),
    ],
)
def test_a_tensor_given_to_a_constructor_is_not_printed_whole(make: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"float32 \[40, 40\]|Tensor") as wrong:
        make(torch.rand(40, 40))
    assert len(str(wrong.value)) < 200


# Backends


@pytest.mark.parametrize("bad", ["gpu", "", "CPU", None, 3], ids=str)
@over(DEFAULTS)
def test_unknown_backend(case: Case, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^backend: got .* wanted 'auto' or one of 'dense', 'tiled'"):
        case.build(CLASSES, DIM, torch.float32)(Z, LABELS, backend=bad)


def entering(name: Any) -> Callable[[], None]:
    def enter() -> None:
        with pydml.use_backend(name):
            pass

    return enter


@pytest.mark.parametrize("bad", ["gpu", "", None, 3], ids=str)
def test_unknown_backend_for_a_block(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^backend: got .* wanted"):
        entering(bad)()


@pytest.mark.parametrize("name", [name for name, why_not in pydml.backends().items() if why_not is not None])
def test_missing_backend_says_why(name: str) -> None:
    why_not = pydml.backends()[name]
    assert why_not
    for ask in (entering(name), lambda: pydml.losses.NCALoss()(Z, LABELS, backend=name)):
        with pytest.raises(RuntimeError, match=f"^backend: '{name}' is not available here: ") as caught:
            ask()
        assert why_not in str(caught.value)


def test_backend_for_another_device_says_so() -> None:
    if pydml.backends()["cpu"] is not None:
        pytest.skip("the cpu backend is not built")
    with pytest.raises(RuntimeError, match=r"^backend: 'cpu' takes tensors on the CPU, got meta"):
        pydml.losses.NCALoss()(Z.to("meta"), LABELS.to("meta"), backend="cpu")
