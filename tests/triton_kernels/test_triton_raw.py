"""Rows that are not normalised, backend ``triton``: shares e^{term - stat} of terms up to 5e9, and terms that overflow.

A term of 5e7 has a last digit of 4, so that the two must come from the same bits.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import generator, make_batch, run
from torch import Tensor
from triton_cases import WHY_NOT, needs_triton, tiled, triton

import pydml
from pydml.losses import LOSSES
from pydml.policy import POLICIES, LogSumExp

pytestmark = needs_triton
if WHY_NOT is None:
    engine: Any = importlib.import_module("pydml.triton_kernels.pair")

NORMS = (1, 30, 100, 300, 1000, 10_000)
#: Losses on log-sum-exps, of each policy that has some.
SHARING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ms": ("ms", "exponential", {}),
    "ms, mined": ("ms", "exponential", {"epsilon": 0.1}),
    "ms, euclidean": ("ms", "exponential", {"distance": "euclidean"}),
    "lifted_star": ("lifted_star", "exponential", {}),
    "n_pairs": ("n_pairs", "exponential", {}),
    "nca": ("nca", "exponential", {}),
    "bin_lifted": ("bin_lifted", "bin_lifted", {}),
    "dro_kl": ("dro_kl", "dro_margin", {}),
    "dro_kl, binomial": ("dro_kl", "dro_binomial", {"base_loss": "binomial"}),
    "dro_kl_grouped": ("dro_kl_grouped", "dro_margin", {}),
    "dro_kl_grouped, binomial": ("dro_kl_grouped", "dro_binomial", {"base_loss": "binomial"}),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Kernels that the pair engine has launched, and for which policy."""
    seen: list[tuple[str, str]] = []
    launch = engine.launch

    def spy(kernel: Any, *arguments: Any, **constants: Any) -> None:
        seen.append((kernel.__name__, constants["POLICY"]))
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(engine, "launch", spy)
    return seen


def check(loss_fn: torch.nn.Module, z: Tensor, labels: Tensor) -> None:
    """At most twice as far off as dense PyTorch in the same dtype, plus rounding of the result itself."""
    want = run(loss_fn, z.double(), labels, backend="dense")
    results = [run(loss_fn, z, labels, backend=backend) for backend in ("triton", "dense")]
    for name, exact in {"loss": want.loss, **want.grads}.items():
        mine, plain = (result.loss if name == "loss" else result.grads[name] for result in results)
        error, usual = (float((x.double() - exact).abs().max()) for x in (mine, plain))
        rounding = (3e-6 if mine.dtype == torch.float32 else 1e-3) * float(exact.abs().max())
        assert rounding > 0
        assert error <= 2 * usual + rounding, (name, error, usual)


@pytest.mark.parametrize("low", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", SHARING)
def test_long_rows_lose_no_digits(case: str, norm: int, low: torch.dtype, launched: list[tuple[str, str]]) -> None:
    name, policy, options = SHARING[case]
    z, labels = make_batch("random", 40, 24, 20 if name == "n_pairs" else 10, seed=norm)
    check(
        LOSSES[name](normalize_embeddings=False, **options), (torch.nn.functional.normalize(z) * norm).to(low), labels
    )
    assert set(launched) == {("pair_forward_kernel", policy), ("pair_backward_kernel", policy)}


def test_every_policy_with_log_sum_exps_of_any_size_is_tried() -> None:
    """The angular margin is of unit rows only."""
    sharing = {name for name, policy in POLICIES.items() if any(isinstance(s, LogSumExp) for s in policy.slots)}
    assert {policy for _, policy, _ in SHARING.values()} == sharing - {"arcface"}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["proxy_anchor", "proxy_nca", "soft_triple", "normalized_softmax"])
def test_long_rows_lose_no_digits_beside_proxies(name: str, norm: int, launched: list[tuple[str, str]]) -> None:
    z, labels = make_batch("random", 40, 24, 5, seed=norm, dtype=torch.float32)
    torch.manual_seed(norm)
    loss_fn = LOSSES[name](num_classes=5, embedding_size=24, normalize_embeddings=False)
    check(loss_fn, torch.nn.functional.normalize(z) * norm, labels)
    assert {kernel for kernel, _ in launched} == {"pair_forward_kernel", "pair_backward_kernel"}


@pytest.mark.parametrize("norm", [100, 1000])
def test_long_rows_lose_no_digits_by_atomic_additions(norm: int, launched: list[tuple[str, str]]) -> None:
    z, labels = make_batch("random", 70, 24, 10, seed=norm, dtype=torch.float32)
    pydml.set_deterministic(False)
    try:
        loss_fn = pydml.losses.MultiSimilarityLoss(normalize_embeddings=False)
        check(loss_fn, torch.nn.functional.normalize(z) * norm, labels)
    finally:
        pydml.set_deterministic(True)
    assert launched


# Overflow: S of rows of 1e30 is infinite, D² is inf - inf, and fields may be anything

PARAMS: dict[str, list[float]] = {
    "exponential": [-2.0, 0.5, 40.0, 0.5],
    "binomial": [2.0, 40.0, 0.5],
    "bin_lifted": [2.0, 40.0, 0.5],
    "hinge": [0.0, 0.5],
    "mean": [],
    "lifted": [1.0],
    "arcface": [0.5, 64.0],
    "dro_margin": [0.1, 0.5, 1.0, 1.0],
    "dro_binomial": [2.0, 40.0, 0.5, 1.0, 1.0],
}
LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 4])


def kinds(x: Tensor) -> str:
    """N for NaN, + and - for infinities, a point for any other number."""
    return "".join("N" if v != v else "+" if v == torch.inf else "-" if v == -torch.inf else "." for v in x.flatten())


def overflows_as_tiled(z: Tensor, row: Tensor | None, col: Tensor | None, policy: str, view: str) -> str:
    """What kinds of statistics there are."""
    arguments = (z, None, LABELS, None, row, col, policy, PARAMS[policy], view, False, None, 1, 0.0)
    got, want = triton("pair", *arguments), tiled("pair", *arguments)
    assert kinds(got[0]) == kinds(want[0])
    grad = torch.ones_like(want[0])
    mine = triton("pair_backward", grad, *got, *arguments, True, False)[0]
    theirs = tiled("pair_backward", grad, *want, *arguments, True, False)[0]
    assert kinds(mine) == kinds(theirs)
    return kinds(want[0])


@pytest.mark.parametrize("view", ["dot", "squared", "euclidean"])
@pytest.mark.parametrize("policy", PARAMS)
def test_infinite_terms_are_infinite_or_nan_as_on_tiled(policy: str, view: str) -> None:
    z = torch.randn(12, 8, generator=generator(12))
    z[:4] = 0
    z[0, 0], z[1, 0], z[2, 0], z[3, 1:3] = 1e30, 1e30, -1e30, 1e30
    found = set(overflows_as_tiled(z, None, None, policy, view))
    assert policy == "arcface" or found & set("N+")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("policy", "side"), [("exponential", "col"), ("hinge", "row"), ("lifted", "row"), ("lifted", "col")]
)
def test_fields_that_are_no_numbers_are_not_dropped(policy: str, side: str, value: float) -> None:
    z = torch.randn(12, 8, generator=generator(12))
    field = torch.zeros(12)
    field[5] = field[9] = value
    row, col = (field, None) if side == "row" else (None, field)
    found = overflows_as_tiled(z, row, col, policy, "dot")
    assert "N" in found or value == value


def test_rows_whose_terms_are_all_minus_infinity_are_empty() -> None:
    z = torch.randn(12, 8, generator=generator(12))
    assert overflows_as_tiled(z, None, torch.full((12,), -torch.inf), "exponential", "dot") == "-" * 24
