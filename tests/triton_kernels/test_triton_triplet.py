"""The triplet engine in Triton, in the interpreter, against the tiled one: values, counts, gradients, windows."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import assert_close, generator, make_batch
from torch import Tensor
from triton_cases import WHY_NOT, needs_triton, tiled, triton

import pydml

pytestmark = needs_triton
if WHY_NOT is None:
    engine: Any = importlib.import_module("pydml.triton_kernels.triplet")

KINDS = {"hinge": ("all", False), "smooth": ("all", True), "semihard": ("semihard", False)}
over_kinds = pytest.mark.parametrize("kind", KINDS)
Arguments = tuple[Any, ...]


def arguments(
    z: Tensor,
    labels: Tensor,
    ref: tuple[Tensor, Tensor] | None,
    kind: str,
    view: str,
    margin: float = 0.2,
    normalize: bool = True,
) -> Arguments:
    cols, col_labels = (None, None) if ref is None else ref
    mode, smooth = KINDS[kind]
    return (z, cols, labels, col_labels, mode, margin, False, smooth, view, normalize)


def check(arguments: Arguments, rtol: float = 1e-5) -> None:
    """Losses, counts (exactly) and gradients are those of the tiled engine."""
    total, count = triton("triplet", *arguments)
    want_total, want_count = tiled("triplet", *arguments)
    assert_close(total, want_total, 1e-5, "losses")
    assert count.tolist() == want_count.tolist()
    grad = torch.randn(len(total), generator=generator(len(total)))
    got, want = (run("triplet_backward", grad, *arguments, True, True) for run in (triton, tiled))
    for side, mine, theirs in zip(("rows", "columns"), got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert_close(mine, theirs, rtol, f"gradient of {side}")


@over_kinds
@pytest.mark.parametrize("shape", [(1, None, 3), (70, None, 33), (33, 31, 70), (1, 70, 5), (31, 1, 16)])
def test_every_kind_and_ragged_shape_is_as_in_tiled(kind: str, shape: tuple[int, int | None, int]) -> None:
    rows, cols, dim = shape
    ref = None if cols is None else make_batch("trained", cols, dim, 16, 1, torch.float32)
    check(arguments(*make_batch("trained", rows, dim, 16, 0, torch.float32), ref, kind, "euclidean"))


@over_kinds
@pytest.mark.parametrize("view", ["dot", "cosine", "squared"])
def test_every_view_is_as_in_tiled(kind: str, view: str) -> None:
    check(arguments(*make_batch("trained", 35, 12, 9, 0, torch.float32), None, kind, view))


@over_kinds
@pytest.mark.parametrize("regime", ["collapsed", "ragged"])
def test_every_state_of_training_is_as_in_tiled(kind: str, regime: str) -> None:
    check(arguments(*make_batch(regime, 34, 12, 9, 0, torch.float32), None, kind, "euclidean"))


@over_kinds
@pytest.mark.parametrize("ref", [False, True])
def test_classes_larger_than_a_window(kind: str, ref: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WINDOW", 16)
    monkeypatch.setattr(engine, "HELD", 8)
    z, labels = make_batch("trained", 34, 8, 3, 0, torch.float32)
    labels[labels == 2] = 1  # classes of 12 and 22
    check(arguments(z, labels, (z[3:].clone(), labels[3:]) if ref else None, kind, "euclidean"))


@over_kinds
def test_a_promise_of_small_classes_spares_rounds_and_is_not_believed_blindly(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "WINDOW", 8)
    monkeypatch.setattr(engine, "HELD", 8)
    z, labels = make_batch("trained", 34, 8, 9, 0, torch.float32)
    most = int(labels.bincount().max())
    assert most <= 8
    given = arguments(z, labels, None, kind, "euclidean")
    launches: list[str] = []
    launch = engine.launch
    monkeypatch.setattr(engine, "launch", lambda fn, *rest, **c: (launches.append(fn.__name__), launch(fn, *rest, **c)))
    check(given)
    assert launches.count("positives_kernel") == 2 * 5  # forward and backward
    launches.clear()
    with pydml.largest_class(most):
        check(given)
    assert launches.count("positives_kernel") == 2
    with pydml.largest_class(most - 1):
        assert all(t.isnan().all() for t in triton("triplet", *given))
        assert triton("triplet_backward", torch.ones(34), *given, True, True)[0].isnan().all()


@over_kinds
@pytest.mark.parametrize("labels", ["one", "distinct"])
def test_anchors_without_negatives_or_without_positives(kind: str, labels: str) -> None:
    z, _ = make_batch("random", 34, 8, 4, 0, torch.float32)
    y = torch.arange(34) if labels == "distinct" else torch.zeros(34, dtype=torch.int64)
    check(arguments(z, y, None, kind, "euclidean"))


@over_kinds
@pytest.mark.parametrize("view", ["dot", "euclidean"])
def test_equal_rows_are_ties(kind: str, view: str) -> None:
    """Copies of a few rows under several labels: a negative that equals a positive neither violates nor is below it."""
    z, _ = make_batch("random", 9, 8, 4, 0, torch.float32)
    labels = torch.randint(0, 9, (36,), generator=generator(5))
    check(arguments(z[torch.arange(36) % 9], labels, None, kind, view, margin=0.0))


def test_semihard_ties_go_to_the_smallest_column() -> None:
    """Of three equal negatives, in other classes and tiles, the first by its index takes the gradient."""
    g = generator(7)
    z = torch.nn.functional.normalize(torch.randn(40, 8, generator=g))
    labels = torch.randperm(40, generator=g)
    labels[36] = labels[39]  # the one positive pair
    z[36] = z[39] + 0.01
    z[[10, 20, 30]] = 0.9 * z[39] + 0.1 * z[0]
    labels[10], labels[20], labels[30] = 500, -3, 200  # sorted by label, 20 comes first
    given = arguments(z, labels, None, "semihard", "dot", 1.0)
    gradient, _ = triton("triplet_backward", torch.ones(40), *given, True, True)
    assert gradient[10].abs().amax() > 0
    assert gradient[[20, 30]].abs().amax() == 0
    check(given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@over_kinds
def test_half_precision_rows_are_exact_operands(dtype: torch.dtype, kind: str) -> None:
    """Rows that are representable give the losses of fp32; gradients are rounded, in bf16 the weights are too."""
    z, labels = make_batch("trained", 35, 12, 9, 0, torch.float32)
    z = torch.nn.functional.normalize(z).to(dtype)
    check(arguments(z, labels, None, kind, "dot", normalize=False), rtol=1e-3 if dtype == torch.float16 else 1e-2)


def test_swapped_triplets_are_those_of_tiled() -> None:
    z, labels = make_batch("trained", 34, 8, 6, 0, torch.float32)
    given = (z, None, labels, None, "all", 0.2, True, False, "euclidean", True)
    for got, want in zip(triton("triplet", *given), tiled("triplet", *given), strict=True):
        assert_close(got, want, 1e-6)
    grad = torch.ones(34)
    got, want = (run("triplet_backward", grad, *given, True, True)[0] for run in (triton, tiled))
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("kind", ["hinge", "semihard"])
def test_nan_gives_nan_everywhere(kind: str) -> None:
    z, labels = make_batch("random", 34, 8, 4, 0, torch.float32)
    z[5, 2] = torch.nan
    given = arguments(z, labels, None, kind, "euclidean")
    total, count = triton("triplet", *given)
    assert total.isnan().all() and count.isnan().all()
    assert triton("triplet_backward", torch.zeros(34), *given, True, True)[0].isnan().all()


@over_kinds
@pytest.mark.parametrize("shape", [(0, None), (0, 5), (5, 0)])
def test_nothing_to_compare(kind: str, shape: tuple[int, int | None]) -> None:
    rows, cols = shape
    ref = None if cols is None else (torch.randn(cols, 4), torch.arange(cols))
    check(arguments(torch.randn(rows, 4), torch.arange(rows), ref, kind, "dot"))


@pytest.mark.parametrize("triplets", ["all", "semihard"])
def test_the_loss_runs_on_it(triplets: str) -> None:
    z, labels = make_batch("trained", 34, 8, 6, 0, torch.float32)
    loss_fn = pydml.losses.TripletMarginLoss(margin=0.2, triplets=triplets)
    leaves = [z.clone().requires_grad_() for _ in range(2)]
    values = [loss_fn(leaf, labels, backend=b) for leaf, b in zip(leaves, ("triton", "dense"), strict=True)]
    torch.stack(values).sum().backward()
    assert_close(values[0], values[1], 1e-5)
    assert_close(leaves[0].grad, leaves[1].grad, 1e-5)
