"""Every loss and gradient against vectors that were computed outside this code base."""

from __future__ import annotations

import pytest
import torch
from helpers import BACKENDS, check_golden, golden, golden_names

from pydml.losses import LOSSES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", golden_names())
def test_float64_is_the_golden_value_and_gradient(name: str, backend: str) -> None:
    case = golden(name)
    check_golden(case, backend, torch.float64, max(case.meta["rtol"], 1e-9 if backend == "dense" else 1e-8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", golden_names())
def test_float32_is_the_golden_value_and_gradient(name: str, backend: str) -> None:
    case = golden(name)
    check_golden(case, backend, torch.float32, case.meta["rtol_float32"])


def test_every_loss_has_golden_vectors() -> None:
    assert {cls.__name__ for cls in LOSSES.values()} == {golden(name).meta["class"] for name in golden_names()}
