"""What ``import pydml`` loads, and that PML's wrappers accept our classes whichever package is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_import_loads_nothing_that_takes_as_long_as_torch() -> None:
    heavy = ("torch._dynamo", "triton", "pytorch_metric_learning", "scipy", "pydml.distributed", "pydml.data")
    program = f"import torch, sys; before = set(sys.modules); import pydml; print(*[m for m in {heavy} if m in "
    assert python(program + "set(sys.modules) - before])").split() == []


def test_a_first_call_inside_torch_compile_finds_its_backend() -> None:
    program = """
import pydml, torch
loss_fn = pydml.losses.MultiSimilarityLoss(epsilon=0.1)
z, y = torch.randn(16, 8), torch.arange(16) // 4
compiled = torch.compile(loss_fn, fullgraph=True, backend="eager")(z, y)
torch.testing.assert_close(compiled, loss_fn(z, y, backend="dense"))
"""
    python(program)


@pytest.mark.parametrize("first", ["pydml", "pytorch_metric_learning.losses"])
def test_pml_sees_its_own_base_classes(first: str) -> None:
    pytest.importorskip("pytorch_metric_learning", reason="make installs PML; without it there is nothing to ask")
    program = f"""
import {first}
import pydml
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.miners import BaseMiner
assert all(issubclass(loss, BaseMetricLossFunction) for loss in pydml.losses.LOSSES.values())
assert isinstance(pydml.miners.MultiSimilarityMiner(), BaseMiner)
from pytorch_metric_learning import distances
assert all(issubclass(getattr(pydml.distances, n), getattr(distances, n)) for n in ("LpDistance", "CosineSimilarity"))
"""
    python(program)
