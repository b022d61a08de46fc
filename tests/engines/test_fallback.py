"""What runs where the fast kernels are not, and how that is told: a policy that they do not know, calls that they hand
on, an extension that was not built.
"""

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
from pydml.backends import Ran
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


# What ran


def step(loss_fn: MetricLoss, z: Tensor, labels: Tensor, backend: str) -> None:
    loss_fn(z.clone().requires_grad_(), labels, backend=backend).backward()


@pytest.mark.parametrize("backend", [name for name in ("tiled", "cpu") if name == "tiled" or HAS_EXTENSION])
def test_a_recording_lists_forward_and_backward_kernels_with_their_shape(backend: str) -> None:
    proxies = pydml.losses.NormalizedSoftmaxLoss(4, 6)
    with pydml.recording() as calls:
        step(pydml.losses.MultiSimilarityLoss(), Z, Y, backend)
        step(proxies, Z, Y, backend)
        pydml.metrics.recall_at_k(Z, Y, (1,), backend=backend)
    assert calls == [
        Ran("pair", backend, (12, 12), backend, None),
        Ran("pair_backward", backend, (12, 12), backend, None),
        Ran("pair", backend, (12, 4), backend, None),
        Ran("pair_backward", backend, (12, 4), backend, None),
        Ran("rank", backend, (12, 12), backend, None),
    ]


def test_a_recording_lists_what_ran_inside_its_block_alone() -> None:
    loss_fn = pydml.losses.NCALoss()
    with pydml.recording() as outer:
        loss_fn(Z, Y, backend="dense")
        assert outer == []
        loss_fn(Z, Y, backend="tiled")
        with pydml.recording() as inner:
            loss_fn(Z, Y, backend="tiled")
        loss_fn(Z, Y, backend="tiled")
    loss_fn(Z, Y, backend="tiled")
    assert (len(outer), len(inner)) == (3, 1)
    with pytest.raises(KeyError), pydml.recording() as broken:
        raise KeyError
    loss_fn(Z, Y, backend="tiled")
    assert broken == []


def test_a_compiled_step_is_recorded_too() -> None:
    torch._dynamo.reset()
    loss_fn = torch.compile(pydml.losses.NCALoss(), backend="aot_eager")
    with pydml.recording() as calls:
        step(loss_fn, Z, Y, "tiled")
    assert [(ran.op, ran.backend) for ran in calls] == [("pair", "tiled"), ("pair_backward", "tiled")]


#: Calls that the C++ kernels leave to the tiled ones, and why.
HANDED_ON = {
    "large classes": (pydml.losses.TripletMarginLoss(), torch.arange(140) % 2, "hold up to 64 positives"),
    "swap": (pydml.losses.TripletMarginLoss(swap=True), torch.arange(140) % 20, "no anchor-swapped triplets"),
}


@pytest.mark.skipif(not HAS_EXTENSION, reason="the C++ extension was not built")
@pytest.mark.parametrize(("loss_fn", "labels", "why"), HANDED_ON.values(), ids=HANDED_ON)
def test_a_call_that_is_handed_on_is_recorded_with_the_reason_and_told_once(
    loss_fn: MetricLoss, labels: Tensor, why: str
) -> None:
    z, _ = make_batch("random", 140, 6, 4, dtype=torch.float32)
    with pydml.recording() as calls, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            step(loss_fn, z, labels, "cpu")
    assert [ran.op for ran in calls] == ["triplet", "triplet_backward"] * 2
    for ran in calls:
        assert (ran.backend, ran.chosen, ran.shape) == ("tiled", "cpu", (140, 140))
        assert ran.why is not None and why in ran.why
    (message,) = (str(warning.message) for warning in told)
    assert message.startswith("triplet: the C++ kernels ") and why in message
    assert message.endswith("; it runs on 'tiled' instead of 'cpu', which is slower")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(loss_fn, z, labels, "tiled")  # was asked for


@pytest.mark.skipif(not HAS_EXTENSION, reason="the C++ extension was not built")
def test_rankings_that_are_handed_on_say_so() -> None:
    """Equal columns of different labels: fp64 has products of our own, whose bits do not hang on the place."""
    z = Z.clone()
    z[1] = z[0]
    assert Y[0] != Y[1]
    with pydml.recording() as calls, pytest.warns(UserWarning, match=r"^rank: equal columns have different labels"):
        pydml.metrics.recall_at_k(z, Y, (1,), backend="cpu")
        pydml.metrics.recall_at_k(z.double(), Y, (1,), backend="cpu")
        pydml.metrics.recall_at_k(Z, torch.arange(12) % 3, (1,), backend="cpu")
    assert [ran.backend for ran in calls] == ["tiled", "cpu", "cpu"]


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
