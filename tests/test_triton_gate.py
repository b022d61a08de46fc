"""Every Triton kernel compiles for GPUs that are not here: no spills, shared memory within limits, matrix products.

A process of its own, without the interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


EVERY = ("sm_80", "sm_90", "sm_100")


@pytest.mark.parametrize(
    ("math", "width", "archs"),
    [("bf16", 256, EVERY), ("tf32", 256, EVERY), ("fp16", 256, EVERY), ("bf16", 64, ("sm_80", "sm_90"))],
    ids=["bf16", "tf32", "fp16", "bf16-narrow"],
)
def test_every_launch_compiles(math: str, width: int, archs: tuple[str, ...], tmp_path: Path) -> None:
    found = tmp_path / "gate.json"
    command = [sys.executable, "-m", "pydml.triton_kernels.gate", "--json", str(found)]
    command += ["--maths", math, "--widths", str(width), "--archs", *archs]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] or done.stderr[-4000:]
    outcomes = json.loads(found.read_text())
    assert {o["arch"] for o in outcomes} == set(archs)
    assert {o["name"] for o in outcomes} >= {"pair_forward_kernel", "pair_backward_kernel"}
