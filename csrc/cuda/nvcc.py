"""How nvcc is found and called, for setup.py and for the tests that look at what it makes: one place for the flags.

Environment: ``PYDML_CUDA_ARCHS``, the architectures to compile for, ``80;90;100`` unless said otherwise; ``CUDA_HOME``,
the toolkit to use. The toolkit that PyPI has (requirements/cuda.txt) is found by itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "cuda"
ARCHS = ("80", "90", "100")
#: No contraction: a term of a sum of exponentials must have the same bits wherever it is computed (csrc/policy.h).
NOT_FUSED = "--fmad=false"
FLAGS = ("-O3", "-std=c++17", NOT_FUSED, "-Xcompiler=-fPIC,-Wall", "-Xptxas=-v,-warn-spills,-warn-lmem-usage")
#: The binding is written for torch's stable ABI of this version: the library loads in any torch from it on.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020d000000000000"


def toolkit() -> Path | None:
    """The folder of a CUDA toolkit, with ``bin/nvcc`` in it: the one named, this environment's, the machine's."""
    folders = [Path(named)] if (named := os.environ.get("CUDA_HOME")) else []
    folders += sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("cu[0-9]*"), reverse=True)
    folders += [Path("/usr/local/cuda")]
    if found := shutil.which("nvcc"):
        folders.append(Path(found).resolve().parents[1])
    return next((folder for folder in folders if (folder / "bin" / "nvcc").exists()), None)


def archs() -> tuple[str, ...]:
    """Architectures by number, the oldest first: ``PYDML_CUDA_ARCHS="8.0;9.0"`` is ``("80", "90")``."""
    text = os.environ.get("PYDML_CUDA_ARCHS", "")
    wanted = [word.replace(".", "") for word in re.split(r"[;, ]+", text) if word] or list(ARCHS)
    if wrong := [word for word in wanted if not re.fullmatch(r"\d{2,3}[af]?", word)]:
        raise ValueError(f"PYDML_CUDA_ARCHS: got {wrong[0]!r}, wanted numbers such as 80, 9.0 or 100a")
    if old := [word for word in wanted if int(word.rstrip("af")) < 80]:
        raise ValueError(f"PYDML_CUDA_ARCHS: got {old[0]!r}, wanted 80 or later: the kernels use cp.async")
    return tuple(sorted(set(wanted), key=lambda word: int(word.rstrip("af"))))


def gencode(wanted: Sequence[str]) -> list[str]:
    """Machine code for each architecture, and PTX of the last one for those to come."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted[:-1]]
    return [*targets, f"-gencode=arch=compute_{wanted[-1]},code=[sm_{wanted[-1]},compute_{wanted[-1]}]"]


def run(command: Sequence[str]) -> str:
    """Run a command; what it printed, or an error that shows it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\nfailed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@functools.cache
def _headers() -> str:
    """Every header that a kernel may include, as one text: a changed one recompiles all of them."""
    folders = (ROOT / "csrc", ROOT / "csrc" / "losses", SOURCES)
    return "\0".join(
        path.name + "\0" + path.read_text()
        for folder in folders
        for path in sorted([*folder.glob("*.h"), *folder.glob("*.cuh")])
    )


def _cached(source: Path, command: Sequence[str], folder: Path) -> Path:
    """The object of ``source``, compiled unless the same was compiled before; what was printed lies beside it."""
    text = "\0".join((shlex.join(command), run([command[0], "--version"]), _headers(), source.read_text()))
    output = folder / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.o"
    if not output.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_suffix(f".{os.getpid()}.o")
        printed = run([*command, "-c", str(source), "-o", str(unfinished)])
        output.with_suffix(".log").write_text(printed)
        unfinished.replace(output)
    return output


def compile_kernels(home: Path, folder: Path, jobs: int = 2) -> list[Path]:
    """Object files of all kernels, with nvcc's report of registers and spills beside each (``.log``)."""
    command = [str(home / "bin" / "nvcc"), *FLAGS, *gencode(archs()), f"-I{ROOT / 'csrc'}"]
    # The longest first, so that no core is left with it at the end.
    sources = sorted(SOURCES.glob("*.cu"), key=lambda source: -source.stat().st_size)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda source: _cached(source, command, folder), sources))


def build_library(home: Path, output: Path, folder: Path, jobs: int = 2) -> None:
    """Compile kernels and binding, and link them with torch and the static CUDA runtime."""
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shlex.split(os.environ.get("CXX", "g++"))
    system = [f"-isystem{path}" for path in include_paths()]
    flags = ["-O2", "-std=c++20", "-fPIC", "-Wall", "-Wextra", TORCH_TARGET, *system, f"-I{ROOT / 'csrc'}"]
    flags += [f"-ffile-prefix-map={ROOT}=."]
    objects = compile_kernels(home, folder, jobs)
    objects += [_cached(source, [*compiler, *flags], folder) for source in sorted(SOURCES.glob("*.cpp"))]
    libraries = [f"-L{path}" for path in (*library_paths(), home / "lib64", home / "lib")]
    libraries += ["-ltorch_cpu", "-lc10", "-lcudart_static", "-lpthread", "-ldl", "-lrt"]
    output.parent.mkdir(parents=True, exist_ok=True)
    run([*compiler, "-shared", "-Wl,--strip-debug", *map(str, objects), *libraries, "-o", str(output)])
