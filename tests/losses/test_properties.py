"""What must hold for every loss on every batch: order, names of classes and lengths of rows do not matter."""

from __future__ import annotations

import pytest
import torch
from helpers import BACKENDS, CASES, FUSED, REGIMES, Case, assert_close, assert_same, generator, make_batch, over, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pydml.losses import MetricLoss

ON = pytest.mark.parametrize("backend", BACKENDS)
TOLERANCE = 1e-8
CLASSES = 7
few = settings(deadline=None, max_examples=5, derandomize=True, database=None)
batches = st.builds(
    make_batch,
    st.sampled_from(REGIMES),
    rows=st.integers(2, 21),
    dim=st.integers(3, 9),
    classes=st.integers(1, CLASSES),
    seed=st.integers(0, 10**6),
)
seeds = st.integers(0, 10**6)


def build(case: Case, z: Tensor, **more: object) -> MetricLoss:
    return case.build(CLASSES, z.shape[1], **more)


def normalises(case: Case) -> bool:
    return bool(case.arguments.get("normalize_embeddings", True))


def shuffled(labels: Tensor, seed: int, keep_order_in_classes: bool) -> Tensor:
    """Where each row of the new batch comes from."""
    order = torch.randperm(len(labels), generator=generator(seed))
    if keep_order_in_classes:
        for c in labels.unique():
            places = (labels[order] == c).nonzero()[:, 0]
            order[places] = order[places].sort().values
    return order


@ON
@over(CASES)
@few
@given(batch=batches, seed=seeds)
def test_order_of_the_batch_does_not_matter(case: Case, backend: str, batch: tuple[Tensor, Tensor], seed: int) -> None:
    z, labels = batch
    order = shuffled(labels, seed, keep_order_in_classes=case.loss == "n_pairs")  # it takes the first two of each class
    loss_fn = build(case, z)
    want = run(loss_fn, z, labels, backend=backend)
    want.grads["embeddings"] = want.grads["embeddings"][order]
    assert_same(run(loss_fn, z[order], labels[order], backend=backend), want, TOLERANCE)


@ON
@over(CASES, lambda case: case.cls.over_anchors and not case.arguments.get("tau"))
@few
@given(batch=batches, seed=seeds)
def test_one_value_an_anchor_follows_its_anchor(
    case: Case, backend: str, batch: tuple[Tensor, Tensor], seed: int
) -> None:
    z, labels = batch
    order = shuffled(labels, seed, keep_order_in_classes=case.loss == "n_pairs")
    loss_fn = build(case, z, reduction="none")
    want = loss_fn(z, labels, backend=backend)
    assert want.shape == (len(z),)
    assert_close(loss_fn(z[order], labels[order], backend=backend), want[order], TOLERANCE)


@ON
@over(CASES)
@few
@given(batch=batches, seed=seeds)
def test_names_of_classes_do_not_matter(case: Case, backend: str, batch: tuple[Tensor, Tensor], seed: int) -> None:
    z, labels = batch
    g, loss_fn, renamed = generator(seed), build(case, z), build(case, z)
    new = torch.randperm(CLASSES, generator=g)
    if not case.per_class:
        new = new * torch.randint(1, 2**60, (1,), generator=g) - 2**61
    else:  # a class keeps its proxies, or its β, under its new name
        axis = 1 if getattr(loss_fn, "transposed", False) else 0
        with torch.no_grad():
            for old, parameter in zip(loss_fn.parameters(), renamed.parameters(), strict=True):
                of_class = old.unflatten(axis, (CLASSES, -1)).index_select(axis, new.argsort())
                parameter.copy_(of_class.flatten(axis, axis + 1))
    want = run(loss_fn, z, labels, backend=backend)
    got = run(renamed, z, new[labels], backend=backend)
    assert_close(got.loss, want.loss, TOLERANCE)
    assert_close(got.grads["embeddings"], want.grads["embeddings"], TOLERANCE)


@ON
@over(CASES, normalises)
@few
@given(batch=batches, seed=seeds)
def test_lengths_of_normalised_rows_do_not_matter(
    case: Case, backend: str, batch: tuple[Tensor, Tensor], seed: int
) -> None:
    z, labels = batch
    length = torch.exp(3 * torch.randn(len(z), 1, generator=generator(seed), dtype=z.dtype))
    loss_fn = build(case, z)
    want = run(loss_fn, z, labels, backend=backend)
    got = run(loss_fn, z * length, labels, backend=backend)
    got.grads["embeddings"] = got.grads["embeddings"] * length
    assert_same(got, want, TOLERANCE)


@ON
@over(CASES, normalises)
@few
@given(batch=batches)
def test_gradients_of_normalised_rows_are_orthogonal_to_them(
    case: Case, backend: str, batch: tuple[Tensor, Tensor]
) -> None:
    z, labels = batch
    loss_fn = build(case, z)
    got = run(loss_fn, z, labels, backend=backend)
    sides = [(z, got.grads["embeddings"])]
    if case.proxy:
        for name, parameter in loss_fn.named_parameters():
            grad = got.grads[name]
            sides.append((parameter.T, grad.T) if getattr(loss_fn, "transposed", False) else (parameter, grad))
    for rows, grad in sides:
        radial = (rows * grad).sum(1) / rows.norm(dim=1)
        assert_close(radial, torch.zeros_like(radial), TOLERANCE, "radial part", max(1e-3, float(grad.abs().max())))


@ON
@over(CASES)
@few
@given(batch=batches)
def test_the_batch_as_its_own_reference_set_is_no_reference_set(
    case: Case, backend: str, batch: tuple[Tensor, Tensor]
) -> None:
    z, labels = batch
    loss_fn = build(case, z)
    want = run(loss_fn, z, labels, backend=backend)
    leaf = z.clone().requires_grad_()
    loss = loss_fn(leaf, labels, ref_emb=leaf, ref_labels=labels, backend=backend)
    loss.backward()
    assert_close(loss, want.loss, 0)
    assert_close(leaf.grad, want.grads["embeddings"], 0)


@pytest.mark.parametrize("backend", FUSED)
@over(CASES)
@few
@given(batch=batches, reference=batches)
def test_every_backend_gives_the_dense_result(
    case: Case, backend: str, batch: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]
) -> None:
    z, labels = batch
    loss_fn = build(case, z)
    assert_same(run(loss_fn, z, labels, backend=backend), run(loss_fn, z, labels, backend="dense"), TOLERANCE)
    if case.takes_ref:
        ref_emb, ref_labels = reference
        ref_emb = torch.cat((ref_emb, ref_emb.flip(0), ref_emb), 1)[:, : z.shape[1]]
        forward = {"ref_emb": ref_emb, "ref_labels": ref_labels}
        want = run(loss_fn, z, labels, backend="dense", **forward)
        assert_same(run(loss_fn, z, labels, backend=backend, **forward), want, TOLERANCE)
