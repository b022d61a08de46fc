"""CUDA kernels under the emulator with AddressSanitizer, ThreadSanitizer and UBSan, and proof that each of them fires.

A fiber of the emulator is a thread to ThreadSanitizer, ordered with the others only by barriers, so it finds races
inside a block and between blocks. ``tests/cuda/seeded.cu`` holds one bug of each class.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

import emulation
import pytest

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulator switches its fibers by hand, on x86-64 only"
)
#: "" is the emulator itself: its poisoned memory and its own checks.
CHECKERS = ("", "address", "thread", "undefined")
#: Bug -> (the checker that must find it, what it must say).
FOUND_BY = {
    "no_barrier_after_store": ("thread", "data race"),
    "no_barrier_before_store": ("thread", "data race"),
    "no_warp_barrier": ("thread", "data race"),
    "no_barrier_after_wait": ("thread", "data race"),
    "no_barrier_before_refill": ("thread", "data race"),
    "shared_sum_not_atomic": ("thread", "data race"),
    "global_sum_not_atomic": ("thread", "data race"),
    "global_overrun": ("address", "heap-buffer-overflow"),
    "shared_overrun": ("address", "use-after-poison"),
    "dynamic_overrun": ("address", "use-after-poison"),
    "misaligned_vector": ("undefined", "misaligned address"),
    "divergent_barrier": ("", "__syncthreads: threads diverge"),
    "divergent_shuffle": ("", "deadlock: thread 0 waits in __shfl_sync"),
    "misaligned_row": ("", "ldmatrix: the address of a row is not 16-byte aligned"),
    "no_async_wait": ("", "mirror_async: wrong result: entry 0 is -nan"),
    "not_initialised": ("", "total: wrong result: entry 0 is -nan"),
}


def seeded(bug: str, checker: str) -> tuple[int, str]:
    program = emulation.link("seeded", (emulation.HERE / "seeded.cu",), sanitize=checker, executable=True)
    done = subprocess.run([program, bug], capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_every_seeded_bug_has_its_checker() -> None:
    source = (emulation.HERE / "seeded.cu").read_text()
    assert {"none", *FOUND_BY} == set(re.findall(r"^ +X\((\w+)\)", source, re.MULTILINE))


@pytest.mark.parametrize("checker", CHECKERS)
def test_kernels_without_a_bug_pass(checker: str) -> None:
    status, output = seeded("none", checker)
    assert (status, output) == (0, "")


@pytest.mark.parametrize("bug", FOUND_BY)
def test_seeded_bug_is_found(bug: str) -> None:
    checker, words = FOUND_BY[bug]
    status, output = seeded(bug, checker)
    assert status != 0
    assert words in output


# The kernels themselves: the self-test on instrumented emulated kernels, in a Python that has the sanitizer loaded.


def instrumented(checker: str, *arguments: str, **options: str) -> str:
    """What Python prints with these arguments, on instrumented kernels; a report of the sanitizer fails."""
    libraries = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}[checker.split(",")[0]]
    names = [emulation.run([*emulation.compiler(), f"-print-file-name={name}"]).strip() for name in libraries]
    # Beside the sanitizer, which else does not find what throws exceptions.
    names.append(emulation.run([*emulation.compiler(), "-print-file-name=libstdc++.so"]).strip())
    environment = (
        os.environ | options | {"PYDML_CUDA_EMULATED": str(emulation.emulated(checker)), "OMP_NUM_THREADS": "1"}
    )
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"LD_PRELOAD": " ".join(names)},
        capture_output=True,
        text=True,
        check=False,
        cwd=emulation.ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def selftest(checker: str, *arguments: str, **options: str) -> str:
    """What the self-test prints; a wrong result fails too."""
    command = ("-m", "pydml", "selftest", "--quick", "--no-speed", "--backend", "cuda-emulated")
    return instrumented(checker, *command, *arguments, **options)


def test_kernels_stay_inside_their_memory_and_alignment() -> None:
    output = selftest("address,undefined", ASAN_OPTIONS="detect_leaks=0", PYDML_EMULATOR_ORDER="random:1")
    assert " 0 failed" in output


def test_random_calls_stay_inside_their_arrays() -> None:
    """Most of them are wrong: each gives a result, or an error that names an argument, and reads nothing beyond."""
    calls = os.environ.get("PYDML_FUZZ_CALLS", "400")
    fuzz = ("tests/fuzz_ops.py", "pydml_cuda_emulated", "cuda-emulated", "0", calls)
    outcomes = instrumented("address,undefined", *fuzz, ASAN_OPTIONS="detect_leaks=0").splitlines()[-1]
    assert "result=" in outcomes
    assert "error=" in outcomes


#: One case for each engine and each of its ways: ThreadSanitizer is slow.
RACED = (
    "ms, mined",
    "soft_triple",
    "fast_ap",
    "triplet",
    "triplet, semihard",
    "triplet, hard",
    "dro_topk",
    "mined pairs",
    "ranking",
)
#: Histories of accesses are short: ThreadSanitizer keeps memory for every fiber it ever saw.
RACING = {"TSAN_OPTIONS": "halt_on_error=1 history_size=0", "PYDML_EMULATOR_ORDER": "reverse"}


@pytest.mark.slow
@pytest.mark.parametrize("case", RACED)
def test_kernels_do_not_race(case: str) -> None:
    """A process each: more fibers than these would not fit into one."""
    formats = [word for name in ("fp32", "tf32", "bf16", "fp16") for word in ("--format", name)]
    assert " 0 failed" in selftest("thread", "--case", case, *formats, **RACING)


#: What the self-test does with so many draws, or so small a batch, that ThreadSanitizer could not follow.
DIRECTLY = {
    "draws": """
found = [kernels["sample"](Sample(z, None, labels, None, torch.arange(72), torch.tensor(1), 0.5, 1.4))]
wanted = [labels[found[0]] != labels]
""",
    "guessed top-K": """
engine = importlib.import_module("pydml.cuda.topk")
engine.ROOM, engine.SAMPLE, engine.LEAST = 32, 16, 4
found = kernels["topk"](TopK(z, None, labels, None, "dro_margin", [0.2, 0.5, 1.0, 1.0], 9, "all", "dot", True))
wanted = [found[0] < found[1]]
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", DIRECTLY)
def test_engines_do_not_race(what: str) -> None:
    code = f"""
import importlib, torch
from pydml import cuda, selftest
from pydml.declared import Sample, TopK
kernels = cuda.kernels(emulated=True)
batch, labels = selftest.batch(72, 24, torch.device("cpu"))
for dtype, precision in (("float32", "highest"), ("float32", "high"), ("bfloat16", "high"), ("float16", "high")):
    torch.set_float32_matmul_precision(precision)
    z = batch.to(getattr(torch, dtype))
    {DIRECTLY[what].strip().replace(chr(10), chr(10) + "    ")}
    assert all((t >= 0).all() for t in found) and all(t.all() for t in wanted)
print("done")
"""
    assert instrumented("thread", "-c", code, **RACING) == "done\n"
