"""Ctrl-C ends a C++ op that is at work within moments, as KeyboardInterrupt, and leaves the process usable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import FUSED

#: Ops that would each take several seconds and more, one after the other in one process.
SCRIPT = """
import torch, pydml
labels = torch.arange(60_000) // 4
z = torch.randn(60_000, 128)
wide = torch.randn(4_000, 2048)
i = torch.arange(10_000_000) % 4_000
stats, cuts, nothing = torch.ones(60_000, 4), torch.zeros(60_000, 2), torch.zeros(0, dtype=torch.uint8)
policy = ("bin_lifted", [2.0, 50.0, 0.5], "dot", True, None, 1, 1.0, None, None, "both")
loss = pydml.losses.ContrastiveLoss(neg_margin=1.9)
miner = pydml.miners.DistanceWeightedMiner(nonzero_loss_cutoff=1.9)
ops = {
    "forward": lambda: loss(z, labels, backend="cpu"),
    "backward": lambda: torch.ops.pydml.pair_backward(
        stats, 100 + stats, cuts, nothing, z, None, labels, None, None, None, *policy, True, False, "cpu"
    ),
    "dots": lambda: torch.ops.pydml.dots(wide, None, i, i.flip(0), "euclidean", True, "cpu"),
    "sample": lambda: miner(z, labels, backend="cpu"),
}
small = torch.randn(64, 16)
before = loss(small, labels[:64], backend="cpu")
for name, op in ops.items():
    try:
        print(name, flush=True)
        op()
        print("finished", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert torch.equal(loss(small, labels[:64], backend="cpu"), before)
print("usable", flush=True)
"""


@pytest.mark.skipif("cpu" not in FUSED, reason="the C++ extension was not built")
def test_an_interrupt_ends_every_op_at_once() -> None:
    command, environment = [sys.executable, "-c", SCRIPT], os.environ | {"OMP_NUM_THREADS": "2"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for name in ("forward", "backward", "dots", "sample"):
                assert process.stdout.readline() == f"{name}\n"
                time.sleep(0.3)
                process.send_signal(signal.SIGINT)
                sent = time.perf_counter()
                assert process.stdout.readline() == "interrupted\n", name
                assert time.perf_counter() - sent < 2, name
            assert process.stdout.read() == "usable\n"
            assert process.wait() == 0
        finally:
            process.kill()
