"""Peak memory of one peer on one case, in a process of its own: MiB above the inputs.

``python -m bench.memory FILE`` is that process; FILE holds the inputs, so that making them leaves no high-water mark.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from bench.cases import VARIANTS, Case, Shape
from bench.data import Inputs
from bench.machine import ROOT
from bench.registry import PEERS, Prepared

MIB = 2**20
#: These compile at run time, for this very shape: they warm up on the case itself, the others on a tiny one.
COMPILED = ("compile", "keops")
TIMEOUT = 900  # seconds


def _status(field: str) -> int:
    """Bytes from the kernel's account of this process; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _reset_peak() -> bool:
    """Start the high-water mark anew, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _give_back() -> None:
    """Return freed memory to the system, so that it is not taken for memory in use."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def _step(prepared: Prepared) -> None:
    prepared.gradients(prepared.forward())


def above_inputs(case: Case, inputs: Inputs, peer: str, backend: str) -> tuple[float, str]:
    """Peak MiB of one full step above what there was before it, and a remark; for a fresh process."""
    if peer not in COMPILED:  # libraries and thread pools start here and not in the measured step
        classes = 64 if case.shape.classes else None
        tiny = replace(case, shape=Shape(64, case.shape.dim, classes))
        _step(PEERS[peer](tiny, tiny.inputs(), backend))
    prepared = PEERS[peer](case, inputs, backend)
    if peer in COMPILED:
        _step(prepared)
    _give_back()
    before, fresh = _status("VmRSS"), _reset_peak()
    mark = _peak()
    _step(prepared)
    after = _peak()
    note = "" if fresh or after > mark else "at most: loading the inputs took more"
    return (max(after, mark if not fresh else 0) - (before or mark)) / MIB, note


def measure(case: Case, inputs: Inputs, peer: str, backend: str, threads: int) -> tuple[float | None, str]:
    """Run :func:`above_inputs` in a new process; no number and the reason where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.pt"
        torch.save(
            {
                "variant": case.variant.name,
                "shape": (case.shape.size, case.shape.dim, case.shape.classes),
                "rest": (case.regime, case.centers, case.items),
                "inputs": (inputs.z, inputs.labels, inputs.proxies),
                "peer": peer,
                "backend": backend,
                "threads": threads,
            },
            file,
        )
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bench.memory", str(file)],
                cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, f"memory: not done within {TIMEOUT} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"memory: {last}" if done.returncode > 0 else f"memory: killed by signal {-done.returncode}"
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["mib"], answer["note"]


def main(file: str) -> int:
    """The child: load one case, measure it, print the answer as JSON."""
    given = torch.load(file, weights_only=True)
    torch.set_num_threads(given["threads"])
    case = Case(VARIANTS[given["variant"]], Shape(*given["shape"]), *given["rest"])
    mib, note = above_inputs(case, Inputs(*given["inputs"]), given["peer"], given["backend"])
    print(json.dumps({"mib": mib, "note": note}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
