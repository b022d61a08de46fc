"""Batches with little or nothing to learn from: a defined value, a graph, and never a NaN that did not come in."""

from __future__ import annotations

import pytest
import torch
from helpers import BACKENDS, CASES, FUSED, Case, Result, assert_close, assert_same, generator, make_batch, over, run
from torch import Tensor

ON = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
DIM, CLASSES = 6, 8
TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4}


def pairwise(case: Case) -> bool:
    return not case.proxy


def assert_finite(got: Result) -> None:
    assert got.loss.isfinite().all()
    for name, grad in got.grads.items():
        assert grad.isfinite().all(), name


def assert_nothing(loss_fn: object, z: Tensor, labels: Tensor, backend: str, **forward: Tensor) -> None:
    """The loss is exactly 0, and its backward gives exact zeros."""
    leaf = z.clone().requires_grad_()
    loss = loss_fn(leaf, labels, backend=backend, **forward)  # type: ignore[operator]
    assert loss == 0
    assert loss.dtype == (torch.float64 if z.dtype == torch.float64 else torch.float32)
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == z.shape
    assert not leaf.grad.any()


# Few rows


@ON
@DTYPES
@over(CASES)
def test_an_empty_batch_costs_nothing(case: Case, dtype: torch.dtype, backend: str) -> None:
    z, labels = torch.empty(0, DIM, dtype=dtype), torch.empty(0, dtype=torch.long)
    assert_nothing(case.build(CLASSES, DIM, dtype), z, labels, backend)


@ON
@over(CASES, lambda case: case.cls.over_anchors and not case.arguments.get("tau"))
def test_an_empty_batch_has_no_values(case: Case, backend: str) -> None:
    loss_fn = case.build(CLASSES, DIM, reduction="none")
    z = torch.empty(0, DIM, dtype=torch.float64, requires_grad=True)
    loss = loss_fn(z, torch.empty(0, dtype=torch.long), backend=backend)
    assert loss.shape == (0,)
    loss.sum().backward()


@ON
@DTYPES
@over(CASES, pairwise)
def test_a_single_row_costs_nothing(case: Case, dtype: torch.dtype, backend: str) -> None:
    z, labels = make_batch("random", 1, DIM, 1, dtype=dtype)
    assert_nothing(case.build(CLASSES, DIM, dtype), z, labels, backend)


@pytest.mark.parametrize("backend", FUSED)
@DTYPES
@pytest.mark.parametrize("labels", [[3], [3, 3], [3, 4]], ids=str)
@over(CASES)
def test_one_or_two_rows_give_the_dense_result(case: Case, labels: list[int], dtype: torch.dtype, backend: str) -> None:
    z, _ = make_batch("random", len(labels), DIM, 1, dtype=dtype)
    loss_fn = case.build(CLASSES, DIM, dtype)
    got = run(loss_fn, z, torch.tensor(labels), backend=backend)
    assert_finite(got)
    assert_same(got, run(loss_fn, z, torch.tensor(labels), backend="dense"), TOLERANCE[dtype], floor=0.1)


# One side missing

#: What a loss is without negatives, and without positives: «zero» where it needs both sides of an anchor.
NEEDS_BOTH = {
    "ms-mined", "ms_mining", "binomial-mined", "lifted_star-mined", "lifted", "lifted-cosine",
    "margin", "triplet", "triplet-swap", "triplet-smooth", "triplet-cosine", "triplet-hard", "triplet-semihard",
    "extreme_triplet", "extreme_triplet-semihard", "extreme_triplet-second_order", "histogram", "histogram-coarse",
}  # fmt: skip
NEEDS_POSITIVES = NEEDS_BOTH | {"nca", "nca-sharp", "n_pairs", "fast_ap"}


@ON
@DTYPES
@over(CASES, pairwise)
def test_one_class(case: Case, dtype: torch.dtype, backend: str) -> None:
    z, _ = make_batch("random", 11, DIM, 1, dtype=dtype)
    labels = torch.full((11,), 3)
    loss_fn = case.build(CLASSES, DIM, dtype)
    if case.id in NEEDS_BOTH:
        assert_nothing(loss_fn, z, labels, backend)
        return
    got = run(loss_fn, z, labels, backend=backend)
    assert_finite(got)
    assert_same(got, run(loss_fn, z, labels, backend="dense"), TOLERANCE[dtype])
    if case.id in NEEDS_POSITIVES or case.loss == "margin":  # all ranked, or all chosen, as well as can be
        assert_close(got.loss, 0.0, TOLERANCE[dtype])
    else:
        assert got.loss > 0


@ON
@DTYPES
@over(CASES, pairwise)
def test_all_classes_distinct(case: Case, dtype: torch.dtype, backend: str) -> None:
    z, _ = make_batch("collapsed", 8, DIM, 1, dtype=dtype)
    labels = torch.randperm(8)
    loss_fn = case.build(CLASSES, DIM, dtype)
    if case.id in NEEDS_POSITIVES:
        assert_nothing(loss_fn, z, labels, backend)
        return
    got = run(loss_fn, z, labels, backend=backend)
    assert_finite(got)
    assert_same(got, run(loss_fn, z, labels, backend="dense"), TOLERANCE[dtype])
    if case.loss == "margin":  # no triplet: not even ν·β
        assert got.loss == 0
        assert not any(grad.any() for grad in got.grads.values())
    else:
        assert got.loss > 0


@ON
@over(CASES, lambda case: case.proxy)
def test_proxy_losses_learn_from_any_batch(case: Case, backend: str) -> None:
    for labels in ([3], [3] * 9, list(range(8))):
        z, _ = make_batch("random", len(labels), DIM, 1)
        loss_fn = case.build(CLASSES, DIM)
        got = run(loss_fn, z, torch.tensor(labels), backend=backend)
        assert_finite(got)
        assert got.grads["embeddings"].any()
        assert_same(got, run(loss_fn, z, torch.tensor(labels), backend="dense"), 1e-8)


@ON
def test_proxy_losses_of_one_class_have_nothing_to_tell_apart(backend: str) -> None:
    z, _ = make_batch("random", 5, DIM, 1)
    labels = torch.zeros(5, dtype=torch.long)
    for case in CASES:
        if case.loss in ("normalized_softmax", "proxy_nca", "soft_triple") and "paper" not in case.id:
            loss_fn = case.build(1, DIM)
            got, want = (run(loss_fn, z, labels, backend=b) for b in (backend, "dense"))
            assert_finite(got)
            assert_close(got.grads["embeddings"], torch.zeros_like(z), 1e-9)
            assert_close(got.loss, want.loss, 1e-9)


# Rows that coincide


def identical(rows: int, dtype: torch.dtype) -> Tensor:
    """One vector again and again; its products with itself are not exact."""
    return torch.randn(1, 11, generator=generator(4), dtype=torch.float64).to(dtype).repeat(rows, 1)


@ON
@DTYPES
@pytest.mark.parametrize("rows", [5, 33])
@over(CASES)
def test_identical_rows(case: Case, rows: int, dtype: torch.dtype, backend: str) -> None:
    z, labels = identical(rows, dtype), torch.arange(rows) % 3
    loss_fn = case.build(3, 11, dtype)
    got = run(loss_fn, z, labels, backend=backend)
    assert_finite(got)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4}[dtype]
    want = run(loss_fn, z, labels, backend="dense")
    assert_close(got.loss, want.loss, tolerance)
    if not case.proxy:  # nowhere to go: S is at its maximum, and the gradient of D at 0 is 0
        assert_close(got.grads["embeddings"], torch.zeros_like(z), tolerance, floor=1)


@ON
@DTYPES
@pytest.mark.parametrize("distance", ["euclidean", "cosine", "squared"])
@pytest.mark.parametrize("rows", [5, 33, 100])
def test_identical_rows_have_no_semihard_negative(rows: int, distance: str, dtype: torch.dtype, backend: str) -> None:
    """S_an < S_ap is false for equal rows, however their products are rounded."""
    case = Case("semihard", "triplet", {"triplets": "semihard", "margin": 0.2, "distance": distance})
    assert_nothing(case.build(3, 11, dtype), identical(rows, dtype), torch.arange(rows) % 3, backend)


@ON
@DTYPES
@pytest.mark.parametrize("rows", [5, 33, 100])
def test_identical_rows_have_no_semihard_extreme(rows: int, dtype: torch.dtype, backend: str) -> None:
    case = Case("semihard", "extreme_triplet", {"negative": "semihard"})
    assert_nothing(case.build(3, 11, dtype), identical(rows, dtype), torch.arange(rows) % 3, backend)


@ON
@DTYPES
@pytest.mark.parametrize("rows", [4, 33])
def test_identical_positives_are_not_counted_as_nonzero(rows: int, dtype: torch.dtype, backend: str) -> None:
    """[D-0]₊ of equal rows is exactly 0 and stays out of the average."""
    z, labels = identical(rows, dtype), torch.zeros(rows, dtype=torch.long)
    far = -z[:1] + torch.eye(1, 11, dtype=dtype)
    mixed, mixed_labels = torch.cat((z, far)), torch.cat((labels, labels[:1]))
    x = torch.nn.functional.normalize(mixed.double())
    distance = (x[0] - x[-1]).norm()
    loss_fn = Case("contrastive", "contrastive").build(3, 11, dtype)
    assert_nothing(loss_fn, z, labels, backend)
    assert_close(loss_fn(mixed, mixed_labels, backend=backend), distance, 1e-6)  # not spread over the zeros
    cosine = Case("cosine", "contrastive", {"distance": "cosine", "pos_margin": 1, "neg_margin": 0.5})
    assert_nothing(cosine.build(3, 11, dtype), z, labels, backend)
    got = cosine.build(3, 11, dtype)(mixed, mixed_labels, backend=backend)
    assert_close(got, 1 - x[0] @ x[-1], 1e-6)


@ON
@DTYPES
@over(CASES)
def test_duplicates_in_both_classes_are_finite(case: Case, dtype: torch.dtype, backend: str) -> None:
    z, labels = make_batch("trained", 20, DIM, 4, dtype=dtype)
    z[1], z[5], z[7] = z[0], z[4], z[4]
    assert_finite(run(case.build(4, DIM, dtype), z, labels, backend=backend))


#: A zero row is at S = 0 and D = 1 from every other: exactly on a node, at a margin of 1, equally far from all.
TIED_AT_ZERO = {"contrastive", "contrastive-batch", "histogram", "triplet-swap", "triplet-hard", "triplet-semihard"}
ZERO_CASES = [
    *CASES,
    Case("contrastive-margin", "contrastive", {"neg_margin": 1.1}),
    Case("histogram-odd", "histogram", {"n_bins": 9}),
]


@ON
@DTYPES
@over(ZERO_CASES)
def test_zero_rows_stay_zero_rows(case: Case, dtype: torch.dtype, backend: str) -> None:
    z, labels = make_batch("random", 14, DIM, 4, dtype=dtype)
    z[2] = 0
    z[5] = 0
    loss_fn = case.build(4, DIM, dtype)
    got, want = (run(loss_fn, z, labels, backend=b) for b in (backend, "dense"))
    assert_finite(got)
    if case.id in TIED_AT_ZERO:
        return
    for result in (got, want):  # the rows' own scale: ‖z‖ is clamped at 1e-12
        result.grads["embeddings"] *= z.norm(dim=1, keepdim=True).clamp_min(1e-12)
    assert_same(got, want, TOLERANCE[dtype])


@ON
@DTYPES
def test_listed_zero_rows_are_alike_to_nothing(dtype: torch.dtype, backend: str) -> None:
    """Two of them are at a distance of 0 from each other, but their cosine is 0, not 1."""
    z, labels = make_batch("random", 14, DIM, 4, dtype=dtype)
    z[2] = z[5] = 0
    i, j = torch.triu_indices(14, 14, 1)
    same = labels[i] == labels[j]
    listed = (i[same], j[same], i[~same], j[~same])
    loss_fn = Case("cosine", "contrastive", {"distance": "cosine", "pos_margin": 1.0, "neg_margin": 0.0}).build(4, DIM)
    got, want = (loss_fn(z, labels, listed, backend=b) for b in (backend, "dense"))
    assert_close(got, want, TOLERANCE[dtype])


@ON
@DTYPES
@over(CASES, pairwise)
def test_a_batch_of_zero_rows_is_finite(case: Case, dtype: torch.dtype, backend: str) -> None:
    z, labels = torch.zeros(9, DIM, dtype=dtype), torch.arange(9) % 3
    loss_fn = case.build(4, DIM, dtype)
    got, want = (run(loss_fn, z, labels, backend=b) for b in (backend, "dense"))
    assert_finite(got)
    assert_close(got.loss, want.loss, TOLERANCE[dtype])
    assert not got.grads["embeddings"].any()


@ON
@pytest.mark.parametrize("scale", [1e-15, 1e15])
@over(CASES, lambda case: case.arguments.get("normalize_embeddings", True))
def test_far_scales_of_the_rows_do_not_matter(case: Case, scale: float, backend: str) -> None:
    z, labels = make_batch("random", 14, DIM, 4)
    scales = torch.where(torch.arange(14) % 3 == 0, scale * 1e3 if scale < 1 else scale, 1.0).double()[:, None]
    loss_fn = case.build(4, DIM)
    want, got = run(loss_fn, z, labels, backend="dense"), run(loss_fn, z * scales, labels, backend=backend)
    got.grads["embeddings"] *= scales
    assert_same(got, want, 1e-8)


# Labels


def awkward_labels(labels: Tensor) -> Tensor:
    """Extremes of int64, and values that meet when cast to int32 or to a float."""
    names = [2**63 - 1, -(2**63), 2**63 - 2, 2**32, 0, -1, 2**24, 2**24 + 1]
    return torch.tensor(names)[labels]


@ON
@over(CASES, lambda case: not case.per_class)
def test_huge_and_negative_labels_are_names_like_others(case: Case, backend: str) -> None:
    z, labels = make_batch("ragged", 24, DIM, CLASSES)
    loss_fn = case.build(CLASSES, DIM)
    want = run(loss_fn, z, labels, backend=backend)
    assert_same(run(loss_fn, z, awkward_labels(labels), backend=backend), want, 1e-10)
    if case.takes_ref:
        ref_emb, ref_labels = make_batch("random", 13, DIM, CLASSES, seed=1)
        want = run(loss_fn, z, labels, ref_emb=ref_emb, ref_labels=ref_labels, backend=backend)
        far = awkward_labels(ref_labels)
        got = run(loss_fn, z, awkward_labels(labels), ref_emb=ref_emb, ref_labels=far, backend=backend)
        assert_same(got, want, 1e-10)


@ON
@pytest.mark.parametrize("integer", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
@over(CASES)
def test_labels_of_every_integer_dtype(case: Case, integer: torch.dtype, backend: str) -> None:
    z, labels = make_batch("random", 14, DIM, 4)
    loss_fn = case.build(4, DIM)
    assert_same(run(loss_fn, z, labels.to(integer), backend=backend), run(loss_fn, z, labels, backend=backend), 0)


@ON
@pytest.mark.parametrize("integer", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_labels_of_every_unsigned_dtype(integer: torch.dtype, backend: str) -> None:
    z, labels = make_batch("random", 14, DIM, 4)
    loss_fn = Case("ms", "ms").build(4, DIM)
    assert_same(run(loss_fn, z, labels.to(integer), backend=backend), run(loss_fn, z, labels, backend=backend), 0)


@ON
@over(CASES, lambda case: case.takes_ref)
def test_integer_dtypes_of_batch_and_reference_may_differ(case: Case, backend: str) -> None:
    z, labels = make_batch("random", 14, DIM, 4)
    ref_emb, ref_labels = make_batch("random", 9, DIM, 4, seed=1)
    loss_fn = case.build(4, DIM)
    want = run(loss_fn, z, labels, ref_emb=ref_emb, ref_labels=ref_labels, backend=backend)
    got = run(loss_fn, z, labels.int(), ref_emb=ref_emb, ref_labels=ref_labels.to(torch.uint8), backend=backend)
    assert_same(got, want, 0)


# Reference sets


@ON
@DTYPES
@over(CASES, lambda case: case.takes_ref)
def test_an_empty_reference_set_costs_nothing(case: Case, dtype: torch.dtype, backend: str) -> None:
    z, labels = make_batch("random", 9, DIM, 3, dtype=dtype)
    reference = {"ref_emb": torch.empty(0, DIM, dtype=dtype), "ref_labels": torch.empty(0, dtype=torch.long)}
    assert_nothing(case.build(4, DIM, dtype), z, labels, backend, **reference)


@ON
@over(CASES, lambda case: case.takes_ref)
def test_an_empty_batch_against_a_reference_set_costs_nothing(case: Case, backend: str) -> None:
    ref_emb, ref_labels = make_batch("random", 9, DIM, 3)
    empty = torch.empty(0, DIM, dtype=torch.float64), torch.empty(0, dtype=torch.long)
    assert_nothing(case.build(4, DIM), *empty, backend, ref_emb=ref_emb, ref_labels=ref_labels)


@ON
@over(CASES, lambda case: case.takes_ref)
def test_a_reference_set_without_common_classes(case: Case, backend: str) -> None:
    z, labels = make_batch("random", 9, DIM, 3)
    ref_emb, ref_labels = make_batch("random", 7, DIM, 3, seed=1)
    loss_fn = case.build(6, DIM)
    forward = {"ref_emb": ref_emb, "ref_labels": ref_labels + 3}
    got, want = (run(loss_fn, z, labels, backend=b, **forward) for b in (backend, "dense"))
    assert_finite(got)
    assert_same(got, want, 1e-8)
    if case.id in NEEDS_POSITIVES:
        assert got.loss == 0


@ON
@over(CASES, lambda case: case.takes_tuple)
@pytest.mark.parametrize("length", [3, 4])
def test_an_empty_tuple_selects_nothing_or_weighs_all_alike(case: Case, length: int, backend: str) -> None:
    z, labels = make_batch("random", 9, DIM, 3)
    loss_fn = case.build(4, DIM)
    nothing = (torch.empty(0, dtype=torch.long),) * length
    if case.proxy or case.loss in ("nca", "fast_ap"):  # the tuple is only weights; an empty one says nothing
        want = run(loss_fn, z, labels, backend=backend)
        assert_same(run(loss_fn, z, labels, indices_tuple=nothing, backend=backend), want, 1e-12)
    else:
        assert_nothing(loss_fn, z, labels, backend, indices_tuple=nothing)


# NaN in, NaN out


@ON
@DTYPES
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@over(CASES)
def test_one_bad_number_makes_the_loss_nan(case: Case, bad: float, dtype: torch.dtype, backend: str) -> None:
    z, labels = make_batch("ragged", 12, DIM, 4, dtype=dtype)
    lone = int((labels[:, None] == labels).sum(1).argmin())
    loss_fn = case.build(4, DIM, dtype)
    for row in (0, lone, 11):
        broken = z.clone()
        broken[row, 2] = bad
        assert loss_fn(broken, labels, backend=backend).isnan()


@ON
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@over(CASES, lambda case: case.takes_ref)
def test_one_bad_number_in_the_reference_set_makes_the_loss_nan(case: Case, bad: float, backend: str) -> None:
    z, labels = make_batch("random", 9, DIM, 3)
    ref_emb, ref_labels = make_batch("random", 7, DIM, 3, seed=1)
    ref_emb[3, 1] = bad
    got = case.build(4, DIM)(z, labels, ref_emb=ref_emb, ref_labels=ref_labels, backend=backend)
    assert got.isnan()


@ON
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@over(CASES, lambda case: case.takes_tuple)
def test_one_bad_number_that_no_tuple_names_makes_the_loss_nan(case: Case, bad: float, backend: str) -> None:
    z, labels = make_batch("random", 9, DIM, 3)
    z[8, 0] = bad
    a, p = ((labels[:8, None] == labels[:8]) & ~torch.eye(8, dtype=torch.bool)).nonzero(as_tuple=True)
    a2, n = (labels[:8, None] != labels[:8]).nonzero(as_tuple=True)
    assert case.build(4, DIM)(z, labels, (a, p, a2, n), backend=backend).isnan()


@ON
@over(CASES, lambda case: case.cls.over_anchors and not case.arguments.get("tau"))
def test_one_bad_number_reaches_the_vector_of_values(case: Case, backend: str) -> None:
    z, labels = make_batch("random", 9, DIM, 3)
    z[4, 0] = torch.nan
    got = case.build(4, DIM, reduction="none")(z, labels, backend=backend)
    assert got.shape == (9,)
    assert got[4].isnan()


@ON
@over(CASES, lambda case: case.proxy)
def test_one_bad_number_in_the_proxies_makes_the_loss_nan(case: Case, backend: str) -> None:
    z, labels = make_batch("random", 9, DIM, 3)
    loss_fn = case.build(4, DIM)
    with torch.no_grad():
        next(iter(loss_fn.parameters()))[0, 0] = torch.nan
    assert loss_fn(z, labels, backend=backend).isnan()


@ON
@pytest.mark.parametrize("labels", [[2], [2, 2, 2, 2], [0, 1, 2, 3]], ids=str)
@over(CASES, pairwise)
def test_a_bad_number_is_not_hidden_by_a_batch_with_nothing_to_learn_from(
    case: Case, labels: list[int], backend: str
) -> None:
    z, _ = make_batch("random", len(labels), DIM, 1)
    z[-1, 1] = torch.nan
    assert case.build(4, DIM)(z, torch.tensor(labels), backend=backend).isnan()
