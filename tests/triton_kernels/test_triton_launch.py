"""How Triton kernels are started on a GPU: straight away, unless a compiler looks on.

The interpreter never goes this way, so each program runs in a process of its own without it, and Triton's launch itself
is left out: what is counted is what happens on the way there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

#: As if a GPU were here: the table of kernels is there, and a launch is written down instead of made.
PRETENDED = """
import importlib, time, torch, triton, pydml
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as kept
backends, declared, ops = (importlib.import_module(f"pydml.{name}") for name in ("backends", "declared", "ops"))
backends._reasons.pop("triton", None)
backends._tables["triton"] = importlib.import_module("pydml.triton_kernels").KERNELS
launches = []
triton.JITFunction.run = lambda self, *_, **__: launches.append(self.fn.__name__)

def step(z, y):
    params = [-2.0, 0.5, 50.0, 0.5]
    matrix = (z, None, y, None, None, None, "exponential", params, "dot", True, 0.1, 1, 1.0)
    return ops.call(declared.Pair(*matrix), "triton")[0].sum()

z, y = torch.randn(40, 16, requires_grad=True), torch.arange(40) // 4
"""


def pretend(program: str) -> list[str]:
    """What a program prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PRETENDED + program], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_eager_launches_leave_nothing_behind() -> None:
    """torch keeps what wrap_triton is given: four entries more with every step, for ever."""
    launched, constants, kernels = pretend(
        "for _ in range(5):\n"
        "    step(z, y).backward()\n"
        "print(len(launches), len(kept.constant_args), len(kept.id_to_kernel))\n"
    )
    assert int(launched) == 5 * 4  # three passes of a mining loss, and its gradient
    assert (constants, kernels) == ("0", "0")


def test_what_is_traced_is_launched_for_the_compiler() -> None:
    launched, constants = pretend(
        "from torch._dynamo.backends.common import aot_autograd\n"
        "seen = []\n"
        "def look(graph, _):\n"
        "    seen.extend(str(n.target) for n in graph.graph.nodes)\n"
        "    raise KeyboardInterrupt\n"
        "try:\n"
        "    torch.compile(step, backend=aot_autograd(fw_compiler=look), fullgraph=True)(z, y)\n"
        "except BaseException:\n"
        "    pass\n"
        "assert seen.count('triton_kernel_wrapper_functional') == 3, seen\n"
        "print(len(launches), len(kept.constant_args))\n"
    )
    assert (launched, int(constants) > 0) == ("0", True)
