"""Compile CUDA sources with g++ through the emulator, into libraries that are kept by a hash of all that went in.

``python tests/cuda/emulation.py`` builds the emulated kernels and prints the path of the library.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: The project; not two folders up where `make sanitize` runs a copy of the tests.
ROOT = next(folder for folder in HERE.parents if (folder / "csrc").is_dir())
sys.path.insert(0, str(ROOT / "csrc" / "cuda"))
from nvcc import TORCH_TARGET, run  # noqa: E402

OUTPUT = ROOT / "build" / "cuda"
EMULATOR = tuple(HERE / name for name in ("emulator.cpp", "block.cpp", "collectives.cpp"))
#: Files compiled at once.
JOBS = 2

# nvcc is told to unroll; g++ need not know the pragma.
FLAGS = ("-std=c++20", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-ffile-prefix-map={ROOT}=.")
INCLUDES = (f"-I{ROOT / 'csrc'}", f"-I{HERE}")


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


@functools.cache
def compiler_version() -> str:
    return run([*compiler(), "--version"])


def key(*parts: str) -> str:
    """A short name for everything that was given."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def sanitizer_flags(source: Path, sanitize: str) -> list[str]:
    """How ``source`` is instrumented: ``address``, ``thread``, ``undefined``, several with commas, or nothing."""
    binding = source.suffix == ".cpp" and source not in EMULATOR
    if not sanitize or binding:
        return ["-O2"]
    if sanitize == "thread" and source in EMULATOR:  # only the kernels' own accesses can race
        return ["-O2", "-DEMULATOR_TSAN"]
    return ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", f"-fsanitize={sanitize}"]


@contextlib.contextmanager
def made_once(output: Path) -> Iterator[Path | None]:
    """Where to write ``output``, None if it is there; whoever wants it too, in another process, waits and finds it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if output.exists():
            yield None
        else:
            unfinished = output.with_suffix(".tmp")
            yield unfinished
            unfinished.replace(output)


def compile_object(source: Path, sanitize: str = "", flags: Sequence[str] = ()) -> Path:
    """The object file of one source; from the cache, if the compiler would see the same text again."""
    command = [*compiler(), *FLAGS, *sanitizer_flags(source, sanitize), *INCLUDES, *flags, "-x", "c++"]
    text = run([*command, "-E", str(source)])
    output = OUTPUT / "objects" / f"{source.stem}-{key(compiler_version(), shlex.join(command), text)}.o"
    with made_once(output) as unfinished:
        if unfinished is not None:
            run([*command, "-c", str(source), "-o", str(unfinished)])
    return output


@functools.cache
def link(
    name: str,
    sources: tuple[Path, ...],
    *,
    sanitize: str = "",
    flags: tuple[str, ...] = (),
    link_flags: tuple[str, ...] = (),
    executable: bool = False,
) -> Path:
    """Compile ``sources`` and the emulator, and link them to a shared library or a program."""
    everything = [*sources, *EMULATOR]
    with ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(lambda source: compile_object(source, sanitize, flags), everything))
    command = [*compiler(), *([] if executable else ["-shared"]), *([f"-fsanitize={sanitize}"] if sanitize else [])]
    tail = [*link_flags, "-lpthread"]
    output = OUTPUT / f"{name}-{key(shlex.join(command), shlex.join(tail), *(o.name for o in objects))}"
    output = output if executable else output.with_suffix(".so")
    with made_once(output) as unfinished:
        if unfinished is not None:
            run([*command, *map(str, objects), *tail, "-o", str(unfinished)])
    return output


def torch_flags() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the binding on torch's stable ABI is compiled and linked with."""
    from torch.utils.cpp_extension import include_paths, library_paths

    return (
        (*(f"-isystem{path}" for path in include_paths()), TORCH_TARGET),
        (*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10"),
    )


def emulated(sanitize: str = "") -> Path:
    """The library of all kernels in csrc/cuda with their binding, which ``cuda-emulated`` loads."""
    folder = ROOT / "csrc" / "cuda"
    flags, link_flags = torch_flags()
    return link(
        "-".join(("pydml-emulated", *sanitize.split(","))) if sanitize else "pydml-emulated",
        (*sorted(folder.glob("*.cu")), *sorted(folder.glob("*.cpp"))),
        sanitize=sanitize,
        flags=("-DPYDML_EMULATED", *flags),
        link_flags=link_flags,
    )


@contextlib.contextmanager
def kernels() -> Iterator[dict[str, Any]]:
    """The engines of ``cuda-emulated`` by op; each takes what pydml/declared.py declares."""
    from pydml import cuda

    before = os.environ.get("PYDML_CUDA_EMULATED")
    os.environ["PYDML_CUDA_EMULATED"] = str(emulated())
    cuda.kernels.cache_clear()
    try:
        yield cuda.kernels(emulated=True)
    finally:
        cuda.kernels.cache_clear()
        if before is None:
            del os.environ["PYDML_CUDA_EMULATED"]
        else:
            os.environ["PYDML_CUDA_EMULATED"] = before


@contextlib.contextmanager
def backend() -> Iterator[dict[str, Any]]:
    """The same, and ``cuda-emulated`` as a backend of pydml, for as long as this lasts."""
    from pydml.backends import _reasons, _tables

    reason = _reasons.pop("cuda-emulated", None)
    with kernels() as table:
        yield table
    if reason is not None:
        _tables.pop("cuda-emulated", None)
        _reasons["cuda-emulated"] = reason


def by_position(table: dict[str, Any]) -> dict[str, Any]:
    """The kernels of a backend by op, each of which takes the op's arguments in their order."""
    from pydml.declared import CALLS, op

    def call(name: str) -> Any:
        return lambda *values: table[name](op(name).read(values))

    names = [*CALLS, *(f"{name}_backward" for name in CALLS)]
    return {name: call(name) for name in names if name in table}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the emulated CUDA kernels and print the library's path.")
    parser.add_argument("--sanitize", default="", help="address, thread, undefined, or several with commas")
    print(emulated(parser.parse_args().sanitize))
