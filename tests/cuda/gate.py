"""What nvcc makes of the kernels: registers, shared memory, spills, occupancy and instructions of each.

``python tests/cuda/gate.py`` compiles them for sm_80, 90 and 100 and writes the table of docs/gpu-cuda.md; nothing of
it needs a GPU. How many threads and how much shared memory a kernel is launched with comes from the emulator's log.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import emulation  # before nvcc, which it puts on the path
import nvcc

ROOT = emulation.ROOT
OBJECTS = emulation.OUTPUT / "nvcc"
PAGE = ROOT / "docs" / "gpu-cuda.md"
BEGIN, END = "<!-- generated: kernels -->", "<!-- end -->"


@dataclass(frozen=True)
class Kernel:
    """One kernel on one architecture, as ptxas reports it."""

    file: str
    name: str
    arch: str
    registers: int
    shared: int
    stack: int
    spilled: int


def toolkit() -> Path:
    home = nvcc.toolkit()
    if home is None:
        raise RuntimeError("no nvcc: pip install --no-deps -r requirements/cuda.txt")
    return home


@functools.cache
def objects() -> list[Path]:
    """The compiled kernels."""
    return nvcc.compile_kernels(toolkit(), OBJECTS, emulation.JOBS)


def demangle(names: Sequence[str]) -> list[str]:
    """Readable names, without what all of them have in common: namespace, return type, arguments."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [short(name) for name in text.splitlines()]


def short(name: str) -> str:
    """``void pydml::(anonymous namespace)::f<pydml::Bf16>(int)`` is ``f<Bf16>``.

    >>> short("void pydml::carry<pydml::Bf16, pydml::(anonymous namespace)::Weights>(pydml::Matrix, float*)")
    'carry<Bf16, Weights>'
    """
    name = re.sub(r"pydml::|\(anonymous namespace\)::|_GLOBAL__N__\w+::|^void ", "", name)
    return name.split("(")[0].strip()


_REPORT = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


def kernels() -> list[Kernel]:
    """All kernels on all architectures, from the reports beside their objects."""
    found = []
    for path in objects():
        report = _REPORT.findall(path.with_suffix(".log").read_text())
        names = demangle([entry[0] for entry in report])
        for name, (_, arch, stack, stores, loads, registers, rest) in zip(names, report, strict=True):
            shared = re.search(r"(\d+) bytes smem", rest)
            spilled, static = int(stores) + int(loads), int(shared[1]) if shared else 0
            file = path.stem.rsplit("-", 1)[0]
            found.append(Kernel(file, name, arch, int(registers), static, int(stack), spilled))
    return found


def warnings() -> list[str]:
    """Every warning of nvcc, ptxas or g++."""
    return [
        f"{path.stem}: {line}"
        for path in objects()
        for line in path.with_suffix(".log").read_text().splitlines()
        if "warning" in line.lower()
    ]


@functools.cache
def instructions() -> dict[tuple[str, str], Counter[str]]:
    """How often each kernel (name, architecture) has each instruction."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for path in objects():
        text = nvcc.run([str(toolkit() / "bin" / "cuobjdump"), "-sass", str(path)])
        arch, here = "", []
        for line in text.splitlines():
            if match := re.match(r"\s*arch = sm_(\w+)", line):
                arch = match[1]
            elif match := re.match(r"\s*Function : (\w+)", line):
                here.append((match[1], arch, Counter()))
            elif here and (match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", line)):
                here[-1][2][match[1]] += 1
        for name, (_, arch, count) in zip(demangle([entry[0] for entry in here]), here, strict=True):
            found.setdefault((name, arch), Counter()).update(count)
    return found


@functools.cache
def arithmetic() -> dict[str, Counter[str]]:
    """How often the PTX of each file has each floating-point instruction that could be a part of a multiply-add.

    PTX promises to leave those alone that say how they round (``mul.rn``), and may contract the others (``mul``), in
    ptxas and wherever a driver compiles it for a GPU to come.
    """
    pattern = re.compile(r"\b(?:mul|add|sub|fma|mad)(?:\.\w+)*\.f(?:16x2|16|32|64)\b")
    dump = str(toolkit() / "bin" / "cuobjdump")
    return {
        path.stem.rsplit("-", 1)[0]: Counter(pattern.findall(nvcc.run([dump, "-ptx", str(path)]))) for path in objects()
    }


@functools.cache
def launches() -> dict[str, list[tuple[int, int]]]:
    """How kernels are launched: name -> (threads of a block, bytes of dynamic shared memory), smallest first.

    From a run of the self-test on the emulated kernels, so a kernel that is not here was not run by it.
    """
    library = emulation.emulated()
    log = library.with_suffix(".launches")
    if not log.exists():
        unfinished = log.with_suffix(f".{os.getpid()}.tmp")
        unfinished.unlink(missing_ok=True)
        environment = os.environ | {
            "PYDML_CUDA_EMULATED": str(library),
            "PYDML_EMULATOR_LOG": str(unfinished),
            "OMP_NUM_THREADS": "1",
        }
        selftest = [sys.executable, "-m", "pydml", "selftest", "--quick", "--no-speed", "--backend", "cuda-emulated"]
        done = subprocess.run(selftest, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        unfinished.replace(log)
    symbols = {}
    for line in nvcc.run(["nm", "--defined-only", str(library)]).splitlines():
        place, kind, symbol = line.split(maxsplit=2)
        if kind in "tTwW":
            symbols[int(place, 16)] = symbol
    seen = sorted({tuple(line.split()) for line in log.read_text().splitlines()})
    found: dict[str, set[tuple[int, int]]] = {}
    for name, (_, threads, shared) in zip(demangle([symbols[int(line[0], 16)] for line in seen]), seen, strict=True):
        found.setdefault(name, set()).add((int(threads), int(shared)))
    return {name: sorted(shapes) for name, shapes in found.items()}


def occupancy(asked: Sequence[tuple[str, int, int, int, int]]) -> list[int]:
    """Share in percent of an SM's warps that can be resident: (arch, registers, static, dynamic, threads) each."""
    source = emulation.HERE / "occupancy.cpp"
    program = emulation.OUTPUT / f"occupancy-{emulation.key(source.read_text(), str(toolkit()))}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        nvcc.run([*emulation.compiler(), f"-I{toolkit() / 'include'}", str(source), "-o", str(program)])
    lines = "\n".join(" ".join(map(str, line)) for line in asked)
    done = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def table() -> str:
    """A row for each kernel: how it is launched, then registers and occupancy on each architecture."""
    by_name: dict[tuple[str, str], dict[str, Kernel]] = {}
    for kernel in kernels():
        by_name.setdefault((kernel.file, kernel.name), {})[kernel.arch] = kernel
    shapes = launches()
    asked = [
        (arch, k.registers, k.shared, shapes[name][-1][1], shapes[name][-1][0])
        for (_, name), archs in by_name.items()
        for arch, k in archs.items()
        if name in shapes
    ]
    percent = dict(zip(asked, occupancy(asked), strict=True))
    lines = [
        "| file | kernel | threads | shared, KiB | " + " | ".join(f"sm_{arch}" for arch in nvcc.ARCHS) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(nvcc.ARCHS),
    ]
    for (file, name), archs in sorted(by_name.items()):
        threads, dynamic = shapes[name][-1] if name in shapes else (0, 0)
        static = max(k.shared for k in archs.values())
        cells = [
            f"{archs[arch].registers} / {percent[arch, archs[arch].registers, archs[arch].shared, dynamic, threads]} %"
            if name in shapes
            else f"{archs[arch].registers} / –"
            for arch in nvcc.ARCHS
        ]
        lines.append(f"| {file} | `{name}` | {threads} | {(static + dynamic) / 1024:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows(text: str) -> list[list[str]]:
    """The cells of the table in a text, without its header."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if re.match(r"\| \w+ \| `", line)]
    return [[cell.strip() for cell in line] for line in lines]


def rewritten(page: str) -> str:
    """The page with the table as it should be."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
