"""Rounding, ties and overflow: how far off fp32 may be, who wins among equals, and hyper-parameters without bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BACKENDS, CASES, FUSED, Case, Result, assert_close, assert_same, generator, make_batch, over, run
from torch import Tensor

ON = pytest.mark.parametrize("backend", BACKENDS)
ON_FUSED = pytest.mark.parametrize("backend", FUSED)
ROWS, DIM, CLASSES = 150, 33, 24


def near(apart: float) -> tuple[Tensor, Tensor]:
    """Clusters of that width, each shared by two classes: 2-2S has lost its digits where D is below 1e-3."""
    _, labels = make_batch("random", ROWS, DIM, 8)
    g = generator(1)
    centres = torch.randn(8, DIM, generator=g, dtype=torch.float64)
    return centres[labels // 2 * 2] + apart * torch.randn(ROWS, DIM, generator=g, dtype=torch.float64), labels


STATES: dict[str, Any] = {
    "random": lambda: make_batch("random", ROWS, DIM, CLASSES),
    "trained": lambda: make_batch("trained", ROWS, DIM, CLASSES),
    "collapsed": lambda: make_batch("collapsed", ROWS, DIM, CLASSES),
    "near_1e-3": lambda: near(1e-3),
    "near_1e-5": lambda: near(1e-5),
    "near_1e-7": lambda: near(1e-7),
}


def selects(case: Case) -> bool:
    """Does it choose among pairs? Whom it chooses among pairs that differ by rounding is anyone's guess."""
    by_itself = case.loss in ("ms_mining", "extreme_triplet", "dro_topk")
    return by_itself or "epsilon" in case.arguments or "triplets" in case.arguments


def parts(result: Result) -> dict[str, Tensor]:
    return {"loss": result.loss, **result.grads}


@ON_FUSED
@pytest.mark.parametrize("state", STATES)
@over(CASES)
def test_float32_is_at_most_twice_as_far_off_as_plain_pytorch(case: Case, state: str, backend: str) -> None:
    """Plus 1e-6, or 1e-5 of the largest entry where that is less. The truth is fp64 on the same numbers."""
    z, labels = STATES[state]()
    z = z.float()
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    got, plain = (parts(run(loss_fn, z, labels, backend=b)) for b in (backend, "dense"))
    truth = parts(run(case.build(CLASSES, DIM, torch.float32).double(), z.double(), labels, backend="tiled"))
    if selects(case) and state.startswith("near"):
        truth = {"loss": truth["loss"]}
    for name, exact in truth.items():
        error, plain_error = (float((t[name] - exact).abs().max()) for t in (got, plain))
        largest = float(exact.abs().max())
        assert error <= 2 * plain_error + min(1e-5 * max(largest, 1e-2), 1e-6 * max(largest, 1.0)), name


# Ties: rows of four ±1 times a power of two have exact norms and products, and many of them are equal.


def exact(rows: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = generator(rows, seed)
    z = torch.zeros(rows, 8, dtype=dtype)
    for row in z:
        row[torch.randperm(8, generator=g)[:4]] = torch.randint(0, 2, (4,), generator=g).to(dtype) * 2 - 1
    return z * 2.0 ** torch.randint(-2, 3, (rows, 1), generator=g), torch.randint(0, 5, (rows,), generator=g)


@ON_FUSED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(20, 13), (70, 90)])
@over(CASES, lambda case: not case.proxy)
def test_among_equals_the_first_is_chosen(
    case: Case, rows: int, columns: int, dtype: torch.dtype, backend: str
) -> None:
    z, labels = exact(rows, 0, dtype)
    ref_emb, ref_labels = exact(columns, 1, dtype)
    loss_fn = case.build(5, 8, dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for forward in ({}, {"ref_emb": ref_emb, "ref_labels": ref_labels}) if case.takes_ref else ({},):
        got, want = (run(loss_fn, z, labels, backend=b, **forward) for b in (backend, "dense"))
        if case.loss in ("histogram", "fast_ap"):  # many values lie on nodes, where the slope has two sides
            assert_close(got.loss, want.loss, tolerance)
        else:
            assert_same(got, want, tolerance)


@ON
def test_among_equal_columns_the_first_gets_the_gradient(backend: str) -> None:
    z = torch.tensor([[1.0, 1, 1, 1]]).double()
    ref = torch.tensor([[-1.0, 1, 1, 1], [1, -1, 1, 1], [1, 1, -1, 1], [1, -1, -1, 1], [-1, -1, 1, 1]]).double()
    labels, ref_labels = torch.tensor([0]), torch.tensor([1, 0, 0, 1, 1])  # equal positives 1, 2; equal negatives 3, 4
    loss_fn = Case("extreme", "extreme_triplet", {"positive": "easy", "negative": "easy"}).build(2, 4)
    touched = run(loss_fn, z, labels, ref_emb=ref, ref_labels=ref_labels, backend=backend).grads["ref_emb"].any(1)
    assert touched.tolist() == [False, True, False, True, False]


@ON
def test_among_equal_pairs_the_first_are_the_top(backend: str) -> None:
    z = torch.tensor([[1.0, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]).double()  # every S is 0
    labels = torch.tensor([0, 1, 2, 3])
    for k, expected in ((1, [True, True, False, False]), (2, [True, True, True, False]), (3, [True] * 4)):
        loss_fn = Case("topk", "dro_topk", {"k": k, "margin": 0.6}).build(4, 4)
        got = run(loss_fn, z, labels, backend=backend)
        assert_close(got.loss, 0.1, 1e-12)
        assert got.grads["embeddings"].any(1).tolist() == expected


# Hyper-parameters far from the usual

EXTREME = [
    Case(f"{loss}-{'-'.join(f'{k}={v}' for k, v in arguments.items())}", loss, arguments)
    for loss, variants in {
        "ms": [{"alpha": 1e4, "beta": 1e4}, {"alpha": 1e-4, "beta": 1e-4}, {"base": 100.0}, {"epsilon": 0.0}],
        "binomial": [{"alpha": 1e4, "beta": 1e4}, {"base": 50.0}],
        "lifted_star": [{"alpha": 1e4, "beta": 1e4}],
        "bin_lifted": [{"alpha": 1e4, "beta": 1e4}],
        "nca": [{"softmax_scale": 1e5}, {"softmax_scale": 1e-6}],
        "lifted": [{"neg_margin": 1e3}, {"neg_margin": -1e3}],
        "generalized_lifted": [{"neg_margin": 1e3}, {"pos_margin": -1e3}],
        "extreme_triplet": [{"temperature": 1e-5}, {"temperature": 1e5}],
        "dro_kl": [{"gamma": 1e-6}],
        "dro_kl_grouped": [{"gamma_pos": 1e-6, "gamma_neg": 1e-6}],
        "contrastive": [{"neg_margin": 1e6}],
        "margin": [{"beta": 1e5}, {"beta": -1e5}],
        "triplet": [{"margin": 1e5}, {"margin": 1e5, "smooth_loss": True}],
        "histogram": [{"n_bins": 1}, {"n_bins": 2000}],
        "fast_ap": [{"num_bins": 1}, {"num_bins": 500}],
        "dro_topk": [{"k": 10**9}, {"k": 10**9, "balanced": True}],
        "normalized_softmax": [{"temperature": 1e-5}],
        "proxy_nca": [{"softmax_scale": 1e5}, {"softmax_scale": 1e5, "include_positive": False}],
        "arcface": [{"scale": 1e5}, {"margin": 180}, {"margin": 0}],
        "soft_triple": [{"gamma": 1e-6}, {"gamma": 1e6}, {"la": 1e5}],
        "proxy_anchor": [{"alpha": 1e4}],
        "proxy_repulsion": [{"alpha": 1e4}, {"alpha": 1e4, "variant": "proxy"}],
    }.items()
    for arguments in variants
]


@ON
@pytest.mark.parametrize("regime", ["random", "collapsed"])
@over(EXTREME)
def test_exponentials_do_not_overflow(case: Case, regime: str, backend: str) -> None:
    z, labels = make_batch(regime, 30, 9, 6)
    truth = run(case.build(6, 9), z, labels, backend="dense")
    assert_same(run(case.build(6, 9), z, labels, backend=backend), truth, 1e-8)
    single = run(case.build(6, 9, torch.float32), z.float(), labels, backend=backend)
    assert all(part.isfinite().all() for part in parts(single).values())
