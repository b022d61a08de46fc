"""What runs where the fast kernels are not: a policy that they do not know, an extension that was not built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import make_batch
from torch import Tensor

import pydml
from pydml import build_record
from pydml.losses.base import MetricLoss
from pydml.losses.batch import Batch, Dense
from pydml.policy import POLICIES, Policy, Sum

Z, Y = make_batch("random", 12, 6, 4, dtype=torch.float32)
HAS_EXTENSION = pydml.backends()["cpu"] is None


@dataclass(frozen=True)
class Cubes(Policy):
    """A policy of a user's own: Σ (s·u)³ over the negatives."""

    slots = (Sum("negatives"),)
    s: float

    def term(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return (self.s * u) ** 3

    def slope(self, k: int, u: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return 3 * self.s * (self.s * u) ** 2


class CubesLoss(MetricLoss):
    def dense(self, batch: Dense) -> Tensor:
        return self.reduce((batch.neg * (2 * batch.u) ** 3).sum(1))

    def fused(self, batch: Batch) -> Tensor:
        return self.reduce(batch.stats("cubes", [2.0])[:, 0])


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys.modules["pydml.backends"], "_warned", set())
    monkeypatch.setitem(POLICIES, "cubes", Cubes)
    yield


def values(loss: Tensor, z: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, z)]


@pytest.mark.skipif(not HAS_EXTENSION, reason="the C++ extension was not built")
def test_a_policy_without_kernels_runs_on_plain_pytorch_and_says_so_once() -> None:
    z, loss_fn = Z.clone().requires_grad_(), CubesLoss()
    want = values(loss_fn(z, Y, backend="dense"), z)
    with pytest.warns(UserWarning, match=r"^policy: .*not 'cubes'; backend 'auto' takes 'tiled'"):
        got = values(loss_fn(z, Y), z)
    torch.testing.assert_close(got, want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(z, Y)
        loss_fn(z, Y, backend="tiled")
        pydml.losses.MultiSimilarityLoss()(z, Y)


@pytest.mark.skipif(not HAS_EXTENSION, reason="the C++ extension was not built")
def test_a_backend_that_was_asked_for_says_what_it_lacks() -> None:
    match = r"^policy: .*not 'cubes'; got backend='cpu', wanted 'tiled'"
    with pytest.raises(RuntimeError, match=match):
        CubesLoss()(Z, Y, backend="cpu")
    with pydml.use_backend("cpu"), pytest.raises(RuntimeError, match=match):
        CubesLoss()(Z, Y)


@pytest.mark.skipif(not HAS_EXTENSION, reason="the C++ extension was not built")
def test_a_policy_without_kernels_falls_back_in_a_memory_too() -> None:
    loss_fn = pydml.memory.CrossBatchMemory(CubesLoss(), 6, memory_size=32)
    with pytest.warns(UserWarning, match="'tiled' instead of 'cpu'"):
        loss = loss_fn(Z, Y)
    torch.testing.assert_close(loss, CubesLoss()(Z, Y, backend="dense"))


# Without the extension


def without_extension(record: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Two losses in a process that has no extension, and the record of its build."""
    path = folder / "_build.json"
    path.write_text(record, encoding="utf-8")
    code = (
        "import sys, warnings; sys.modules['pydml._C'] = None\n"
        "import pathlib, torch, pydml, pydml.build_record, pydml.info\n"
        f"pydml.build_record.RECORD = pathlib.Path({str(path)!r})\n"
        "warnings.simplefilter('always')\n"
        "z, y = torch.randn(8, 4), torch.arange(8) // 2\n"
        "for _ in range(3): pydml.losses.MultiSimilarityLoss()(z, y)\n"
        "pydml.info.main([])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done


def test_a_missing_extension_is_told_once_with_the_reason_of_the_build(tmp_path: Path) -> None:
    done = without_extension(json.dumps({"extension": "it was not built: no g++", "chosen": False}), tmp_path)
    assert done.stderr.count("pydml runs on plain PyTorch") == 1
    assert "it was not built: no g++" in done.stderr
    assert "--no-build-isolation" in done.stderr
    assert done.stdout.count("it was not built: no g++") == 2  # of the extension, and of the backend


def test_an_extension_left_out_by_choice_is_only_told_by_info(tmp_path: Path) -> None:
    done = without_extension(json.dumps({"extension": "left out by choice", "chosen": True}), tmp_path)
    assert "plain PyTorch" not in done.stderr
    assert "left out by choice" in done.stdout


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"extension": "built"}'])
def test_a_record_that_says_nothing_is_no_error(record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "_build.json"
    path.write_text(record, encoding="utf-8")
    monkeypatch.setattr(build_record, "RECORD", path)
    why, chosen = build_record.why_not_built()
    assert why
    assert not chosen
