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
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import emulation

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


def selftest(checker: str, *arguments: str, **options: str) -> str:
    """What the self-test prints; a report of the sanitizer, or a wrong result, fails."""
    libraries = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}[checker.split(",")[0]]
    names = [emulation.run([*emulation.compiler(), f"-print-file-name={name}"]).strip() for name in libraries]
    # Beside the sanitizer, which else does not find what throws exceptions.
    names.append(emulation.run([*emulation.compiler(), "-print-file-name=libstdc++.so"]).strip())
    environment = (
        os.environ | options | {"PYDML_CUDA_EMULATED": str(emulation.emulated(checker)), "OMP_NUM_THREADS": "1"}
    )
    command = [sys.executable, "-m", "pydml", "selftest", "--quick", "--no-speed", "--backend", "cuda-emulated"]
    done = subprocess.run(
        [*command, *arguments],
        env=environment | {"LD_PRELOAD": " ".join(names)},
        capture_output=True,
        text=True,
        check=False,
        cwd=emulation.ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def test_kernels_stay_inside_their_memory_and_alignment() -> None:
    output = selftest("address,undefined", ASAN_OPTIONS="detect_leaks=0", PYDML_EMULATOR_ORDER="random:1")
    assert " 0 failed" in output


#: One case for each engine: ThreadSanitizer is slow.
RACED = ("ms, mined", "soft_triple", "fast_ap", "triplet", "triplet, hard", "dro_topk", "mined pairs", "ranking")


@pytest.mark.slow
@pytest.mark.parametrize("case", RACED)
def test_kernels_do_not_race(case: str) -> None:
    """A process each, with short histories of accesses: ThreadSanitizer keeps memory for every fiber it ever saw."""
    formats = [word for name in ("fp32", "tf32", "bf16") for word in ("--format", name)]
    options = {"TSAN_OPTIONS": "halt_on_error=1 history_size=0", "PYDML_EMULATOR_ORDER": "reverse"}
    assert " 0 failed" in selftest("thread", "--case", case, *formats, **options)
