"""What is shipped, what happens without a compiler, and the command line: the package as its users meet it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pydml
from pydml import cli

ROOT = Path(__file__).parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__", "results", "runs")
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the project: builds leave files behind, and files of an earlier build must not leak into this one."""
    return Path(shutil.copytree(ROOT, tmp_path / "source", ignore=NOT_SOURCES))


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYDML_")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=inherited | environment,
        cwd=ROOT / "tests",  # where no pydml lies that would be imported before an installed one
        capture_output=True,
        text=True,
        check=False,
    )


def pip(verb: str, *args: str | Path, **environment: str) -> tuple[int, str]:
    done = run("pip", verb, "-v", "--no-build-isolation", "--no-deps", *args, **environment)
    return done.returncode, done.stdout + done.stderr


def test_wheel_ships_pydml_and_nothing_else(source: Path, tmp_path: Path) -> None:
    status, output = pip("wheel", "-w", tmp_path, source, PYDML_NO_EXT="1")
    assert status == 0, output
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"pydml", f"pydml_kernels-{pydml.__version__}.dist-info"}
    assert {"pydml/triton_kernels/__init__.py", "pydml/py.typed", "pydml/cli.py"} <= set(names)
    record = json.loads(zipfile.ZipFile(wheel).read("pydml/_build.json"))
    assert record == {"extension": "left out by choice: PYDML_NO_EXT was set when pydml was built", "chosen": True}
    assert not [name for name in names if {"tests", "bench"} & set(name.split("/"))]


def test_install_without_a_compiler_warns_and_the_package_says_so_too(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    status, output = pip("install", "--target", target, source, **NO_COMPILER)
    assert status == 0, output
    assert "WARNING: pydml's C++ extension was not built" in output
    assert (target / "pydml" / "cli.py").exists()
    assert not list(target.glob("pydml/_C*"))
    # pip shows its output to nobody: what runs has to tell. The finder of an editable install would lend its extension.
    (tmp_path / "use.py").write_text(
        "import sys\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'Editable' not in getattr(finder, '__name__', '')]\n"
        "import torch, pydml, pydml.info\n"
        "for _ in range(2): pydml.losses.NCALoss()(torch.eye(4), torch.arange(4) // 2)\n"
        "pydml.info.main([])\n",
        encoding="utf-8",
    )
    done = run("use", PYTHONPATH=f"{tmp_path}{os.pathsep}{target}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pydml runs on plain PyTorch") == 1
    assert "it was not built" in done.stderr
    assert "it was not built" in done.stdout


def test_install_apart_from_torch_says_what_hid_it(source: Path, tmp_path: Path) -> None:
    """As pip's build isolation does: torch cannot be imported while pydml is built."""
    hidden = tmp_path / "hidden" / "torch"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")", encoding="utf-8")
    status, output = pip("wheel", "-w", tmp_path, source, PYTHONPATH=str(hidden.parent))
    assert status == 0, output
    (wheel,) = tmp_path.glob("*.whl")
    record = json.loads(zipfile.ZipFile(wheel).read("pydml/_build.json"))
    assert "No module named 'torch'" in record["extension"]
    assert "--no-build-isolation" in record["extension"]
    assert not record["chosen"]


def test_required_extension_without_a_compiler_is_an_error(source: Path, tmp_path: Path) -> None:
    status, output = pip("wheel", "-w", tmp_path, source, PYDML_REQUIRE_EXT="1", **NO_COMPILER)
    assert status != 0
    assert "PYDML_REQUIRE_EXT is set" in output


def test_version_has_one_source() -> None:
    assert pydml.__version__ == importlib.metadata.version("pydml-kernels")


def test_info_names_every_backend() -> None:
    done = run("pydml", "info")
    assert done.returncode == 0, done.stderr
    backends = done.stdout.partition("\nbackends\n")[2]
    assert [line.split()[0] for line in backends.splitlines()] == list(pydml.backends())


def test_every_subcommand_has_help() -> None:
    for name in cli.COMMANDS:
        done = run("pydml", name, "--help")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"usage: pydml {name}")


@pytest.mark.parametrize("args", [["nonsense"], []])
def test_wrong_subcommand_fails_and_lists_the_right_ones(args: list[str]) -> None:
    done = run("pydml", *args)
    assert done.returncode == 2
    assert "usage: pydml" in done.stderr
    assert "command" in done.stderr
    if args:
        assert "'nonsense'" in done.stderr
        assert all(name in done.stderr for name in cli.COMMANDS)


@pytest.mark.sanitize
def test_extension_says_how_it_was_built() -> None:
    native = pytest.importorskip("pydml._C", reason="the C++ extension was not built")
    info = native.build_info()
    assert set(info) == {"compiler", "standard", "flags", "torch", "isa"}
    assert info["standard"] == "C++20"
    assert "portable" in info["isa"]
    # Under `make sanitize` this is what proves that the instrumented library is the one that runs.
    assert ("-fsanitize" in info["flags"]) == ("PYDML_SANITIZE" in os.environ)
    assert set(native.cpu_features()) <= {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
