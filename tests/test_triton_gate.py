"""Every Triton kernel compiles for GPUs that are not here: no spills, shared memory within limits, matrix
instructions.

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


@pytest.mark.parametrize("math", ["bf16"])
def test_every_launch_compiles(math: str, tmp_path: Path) -> None:
    found = tmp_path / "gate.json"
    command = [
        sys.executable,
        "-m",
        "pydml.triton_kernels.gate",
        "--maths",
        math,
        "--widths",
        "256",
        "--json",
        str(found),
    ]
    command += ["--archs", "sm_80", "sm_90", "sm_100"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] or done.stderr[-4000:]
    outcomes = json.loads(found.read_text())
    assert {o["arch"] for o in outcomes} == {"sm_80", "sm_90", "sm_100"}
    assert {o["name"] for o in outcomes} >= {"pair_forward_kernel", "pair_backward_kernel"}
