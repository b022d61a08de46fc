"""The slopes that policies declare by hand, against difference quotients of their terms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import assert_close, generator
from torch import Tensor

from pydml.policy import POLICIES, LogSumExp, Policy, Sum, softplus

STEP = 1e-6

#: Numbers of each policy, for which u in (-1, 1) meets every branch.
NUMBERS: dict[str, list[dict[str, float]]] = {
    "exponential": [{"a_pos": -2.0, "c_pos": 0.5, "a_neg": 50.0, "c_neg": 0.5}],
    "binomial": [{"alpha": 2.0, "beta": 50.0, "base": 0.5}],
    "bin_lifted": [{"alpha": 2.0, "beta": 50.0, "base": 0.5}],
    "hinge": [{"c_pos": 0.3, "c_neg": -0.2}],
    "mean": [{}],
    "lifted": [{"c_pos": 0.1}],
    "arcface": [{"margin": 0.5, "scale": 64.0}, {"margin": 2.0, "scale": 8.0}, {"margin": 0.0, "scale": 16.0}],
    "dro_margin": [{"margin": 0.2, "threshold": 0.5, "gamma_pos": 0.1, "gamma_neg": 0.3}],
    "dro_binomial": [{"alpha": 2.0, "beta": 50.0, "threshold": 0.5, "gamma_pos": 0.1, "gamma_neg": 0.3}],
}
EACH = [(name, numbers) for name in POLICIES for numbers in NUMBERS[name]]
OVER_POLICIES = pytest.mark.parametrize(
    ("name", "numbers"), EACH, ids=[f"{name}-{'-'.join(map(str, numbers.values()))}" for name, numbers in EACH]
)


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    """u [r, c], row [r, 1] and col [1, c]; no random point is within a step of a kink."""
    g = generator(7)
    u = torch.rand(40, 50, generator=g, dtype=torch.float64) * 1.98 - 0.99
    row, col = (torch.randn(n, generator=g, dtype=torch.float64) * 0.5 for n in (40, 50))
    return u, row[:, None], col[None, :]


def carrying_gradient(policy: Policy) -> list[int]:
    return [k for k, slot in enumerate(policy.slots) if not getattr(slot, "constant", False)]


@OVER_POLICIES
def test_slopes_are_difference_quotients_of_terms(name: str, numbers: dict[str, float]) -> None:
    policy = POLICIES[name](**numbers)
    u, row, col = pairs()
    for k in carrying_gradient(policy):
        quotient = (policy.term(k, u + STEP, row, col) - policy.term(k, u - STEP, row, col)) / (2 * STEP)
        slope = policy.slope(k, u, row, col)
        assert_close(torch.as_tensor(slope, dtype=u.dtype).expand_as(u), quotient.expand_as(u), 1e-6, f"slot {k}")


@OVER_POLICIES
def test_terms_meet_all_of_their_branches(name: str, numbers: dict[str, float]) -> None:
    """The test above would say little if every hinge were open, or every one shut."""
    policy = POLICIES[name](**numbers)
    u, row, col = pairs()
    if any(isinstance(slot, Sum) and slot.constant for slot in policy.slots) and name not in ("binomial", "mean"):
        counted = [policy.term(k, u, row, col) for k, s in enumerate(policy.slots) if getattr(s, "constant", False)]
        assert all((term == 0).any() and (term > 0).any() for term in counted)
    if name == "dro_margin":
        assert all((policy.term(k, u, row, col) == 0).any() for k in range(2))


def test_lifted_gives_its_derivative_by_the_row_field() -> None:
    """Slot 1 is d(slot 0)/d(row): the loss joins it on by itself."""
    policy = POLICIES["lifted"](c_pos=0.1)
    u, row, col = pairs()
    quotient = (policy.term(0, u, row + STEP, col) - policy.term(0, u, row - STEP, col)) / (2 * STEP)
    assert_close(policy.term(1, u, row, col), quotient, 1e-6)


def test_hinge_counts_are_its_derivatives_by_the_row_field() -> None:
    policy = POLICIES["hinge"](c_pos=0.3, c_neg=-0.2)
    u, row, col = pairs()
    for k, sign in ((0, 1), (2, -1)):
        quotient = (policy.term(k, u, row + STEP, col) - policy.term(k, u, row - STEP, col)) / (2 * STEP)
        assert_close(sign * policy.term(k + 1, u, row, col), quotient, 1e-6)


def test_arcface_is_guarded_at_its_ends() -> None:
    policy = POLICIES["arcface"](margin=0.5, scale=64.0)
    ends, none = torch.tensor([[-1.0, 1.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for k in range(2):
        assert torch.as_tensor(policy.term(k, ends, none, none)).isfinite().all()
        assert torch.as_tensor(policy.slope(k, ends, none, none)).isfinite().all()
    falling = policy.term(0, torch.linspace(-1, 1, 1001, dtype=torch.float64)[None], none, none)
    assert (falling.diff() > 0).all()  # the target's logit never rises with the angle


@pytest.mark.parametrize("name", POLICIES)
def test_policies_say_what_they_need(name: str) -> None:
    policy = POLICIES[name]
    assert [field.name for field in dataclasses.fields(policy)] == list(NUMBERS[name][0])
    assert all(isinstance(slot, LogSumExp | Sum) and slot.side in ("positives", "negatives") for slot in policy.slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus_is_exact_from_end_to_end(dtype: torch.dtype) -> None:
    t = torch.linspace(-60, 60, 2001, dtype=dtype)
    want = torch.logaddexp(t.double(), torch.zeros(()).double())
    assert ((softplus(t).double() - want).abs() <= 4 * torch.finfo(dtype).eps * want.abs()).all()
    assert torch.equal(softplus(torch.tensor([-torch.inf, torch.inf])), torch.tensor([0, torch.inf]))
