"""The CUDA kernels compiled for real architectures, without a GPU: no warning, no spill, the instructions meant, and a
library, built by setup.py, that loads silently. What a machine without a GPU cannot tell is on docs/gpu-cuda.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gate
import nvcc
import pytest
import torch

pytestmark = pytest.mark.skipif(
    nvcc.toolkit() is None, reason="no nvcc; `make test` installs one: pip install --no-deps -r requirements/cuda.txt"
)
#: Kernels that multiply tiles, by the start of their names.
TILED = ("sweep<", "carry<", "rank<")
#: Listed pairs of fp32 rows are always multiplied in fp32; the choice by format instantiates TF32 all the same.
NEVER_LAUNCHED = {f"{name}<Tf32Rows>" for name in ("factors", "gather", "similarities")}


def test_every_kernel_is_compiled_for_every_architecture() -> None:
    found = gate.kernels()
    assert {kernel.arch for kernel in found} == set(nvcc.ARCHS)
    of = {arch: {(k.file, k.name) for k in found if k.arch == arch} for arch in nvcc.ARCHS}
    assert len({frozenset(names) for names in of.values()}) == 1
    assert {file for file, _ in of["80"]} == {path.stem for path in nvcc.SOURCES.glob("*.cu")}


def test_nothing_is_warned_of() -> None:
    assert gate.warnings() == []


def test_nothing_is_spilled() -> None:
    assert [k for k in gate.kernels() if k.spilled or k.stack] == []


def test_no_instruction_touches_local_memory() -> None:
    local = {"LDL", "STL"}
    assert [key for key, count in gate.instructions().items() if local & set(count)] == []


def test_tiles_are_fetched_and_multiplied_by_the_instructions_meant() -> None:
    tiled = {key: count for key, count in gate.instructions().items() if key[0].startswith(TILED)}
    assert {name.split("<")[1].split(",")[0].rstrip(">") for name, _ in tiled} == {"Fp32", "Tf32Rows", "Bf16", "Fp16"}
    for (name, arch), count in tiled.items():
        wanted = {"LDGSTS"} if "<Fp32" in name else {"LDGSTS", "LDSM", "HMMA"}
        assert wanted <= set(count), f"{name} on sm_{arch} lacks {wanted - set(count)}"
        assert "<Fp32" not in name or "HMMA" not in count, f"{name} on sm_{arch} rounds fp32 products"


def test_nothing_is_contracted_but_what_says_so() -> None:
    """e^(term - statistic) is a share only if the term has the same bits in both passes (csrc/policy.h)."""
    found = gate.arithmetic()
    assert found["pair"]["mul.rn.f32"] > 100
    free = {file: [name for name in count if not re.search(r"\.r[nzmp]\.", name)] for file, count in found.items()}
    assert {file: names for file, names in free.items() if names} == {}


def test_terms_are_multiplied_and_added_one_by_one(tmp_path: Path) -> None:
    """Of policies without Fma; and nvcc does contract them unless it is told not to."""

    def multiply_adds(flags: Sequence[str]) -> int:
        ptx = tmp_path / "terms.ptx"
        source = str(gate.emulation.HERE / "terms.cu")
        nvcc.run(
            [str(gate.toolkit() / "bin" / "nvcc"), *flags, f"-I{gate.ROOT / 'csrc'}", "-ptx", source, "-o", str(ptx)]
        )
        return len(re.findall(r"\bfma\.", ptx.read_text()))

    assert multiply_adds(nvcc.FLAGS) == 0
    assert multiply_adds([flag for flag in nvcc.FLAGS if flag != nvcc.NOT_FUSED]) > 0


def test_fp32_products_are_multiply_adds() -> None:
    """Of kernels of tiles, fp32 differs from TF32 by its product alone: hundreds of FFMA, and no other products."""
    found = gate.instructions()
    for (name, arch), count in found.items():
        if name.startswith(TILED) and "<Fp32" in name:
            more = count - found[name.replace("<Fp32", "<Tf32Rows"), arch]
            assert more["FFMA"] >= 128, f"{name} on sm_{arch}"
            assert more["FMUL"] <= 16, f"{name} on sm_{arch}"


def test_every_kernel_is_run_by_the_emulator() -> None:
    """Device code that never ran is worth nothing."""
    assert {kernel.name for kernel in gate.kernels()} - set(gate.launches()) <= NEVER_LAUNCHED


def test_table_of_kernels_is_up_to_date() -> None:
    """Names and launches to the letter; registers nearly, so that a comma in a header does not ask for a new table."""
    written, wanted = (gate.rows(text) for text in (gate.PAGE.read_text(), gate.table()))
    assert [row[:4] for row in written] == [row[:4] for row in wanted], "run python tests/cuda/gate.py"
    for had, has in zip(written, wanted, strict=True):
        for a, b in zip(had[4:], has[4:], strict=True):
            assert abs(int(a.split()[0]) - int(b.split()[0])) <= 16, f"{has[:2]}: run python tests/cuda/gate.py"


# The library as setup.py builds it


def build(folder: Path, **setting: str) -> subprocess.CompletedProcess[str]:
    """``setup.py build`` into a folder, from the objects that the tests above have looked at."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(folder)]
    environment = os.environ | {"PYDML_CUDA": "1", "PYDML_REQUIRE_EXT": "1"} | setting
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=gate.ROOT)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and both of its libraries."""
    gate.objects()
    folder = tmp_path_factory.mktemp("built")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("pydml/_C.*.so"))) == 1
    return folder


@pytest.fixture(scope="module")
def library(built: Path) -> Path:
    return built / "pydml" / "_cuda.so"


def fresh(built: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process that has the built package."""
    environment = os.environ | {"PYTHONPATH": str(built)}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=built)


def test_library_loads_silently_without_a_gpu(built: Path, library: Path) -> None:
    code = f"import torch; torch.ops.load_library({str(library)!r}); print(len(dir(torch.ops.pydml_cuda)) > 0)"
    done = fresh(built, code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the backend can be used")
def test_without_a_gpu_the_reason_is_given_and_the_rest_works(built: Path) -> None:
    code = """
import torch, pydml
from pydml import cli
print(pydml.__file__)
cli.main(["info"])
batch = torch.eye(4), torch.tensor([0, 0, 1, 1])
loss = pydml.losses.NCALoss()
assert loss(*batch).isfinite()
loss(*batch, backend="cuda")
"""
    done = fresh(built, code)
    reason = "torch sees no GPU here" if torch.version.cuda else f"torch {torch.__version__} was built without CUDA"
    first, *rest = done.stdout.splitlines()
    assert Path(first).parent == built / "pydml"
    assert f"not available: {reason}" in next(line for line in rest if line.split()[:1] == ["cuda"])
    assert done.returncode == 1
    assert done.stderr.endswith(f"RuntimeError: backend: 'cuda' is not available here: {reason}\n")


def test_a_library_that_was_insisted_on_and_fails_is_an_error(tmp_path: Path) -> None:
    toolkit = tmp_path / "toolkit"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc").symlink_to(shutil.which("false") or "/bin/false")
    done = build(tmp_path / "built", CUDA_HOME=str(toolkit))
    assert done.returncode != 0
    assert "failed with status 1" in done.stderr


def test_library_asks_for_nothing_but_torch_and_the_system(library: Path) -> None:
    """It links CUDA's runtime statically, so that it loads where none is installed."""
    needed = {
        line.split("[")[1].split("]")[0].split(".so")[0]
        for line in nvcc.run(["readelf", "-d", str(library)]).splitlines()
        if "(NEEDED)" in line
    }
    system = {"libstdc++", "libm", "libgcc_s", "libc", "libpthread", "libdl", "librt", "ld-linux-x86-64"}
    assert needed <= {"libtorch_cpu", "libc10"} | system


# What setup.py decides


def decision(monkeypatch: pytest.MonkeyPatch, torch_cuda: str | None, toolkit: Path | None, **setting: str) -> bool:
    """What setup.py makes of PYDML_CUDA; its own setup() call is left out."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setenv("PYDML_NO_EXT", "1")
    spec = importlib.util.spec_from_file_location("pydml_setup", gate.ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.nvcc, "toolkit", lambda: toolkit)
    monkeypatch.delenv("PYDML_CUDA", raising=False)
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    wanted: bool = module.cuda_wanted(torch_cuda)
    return wanted


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a driver is a reason to build, and there is one")
def test_library_is_built_where_it_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path("/some/cuda")
    assert not decision(monkeypatch, None, home), "a torch without CUDA, no driver: compiling would be for nothing"
    assert decision(monkeypatch, "13.0", home)
    assert not decision(monkeypatch, "13.0", None)
    assert decision(monkeypatch, None, home, PYDML_CUDA="1")
    assert not decision(monkeypatch, "13.0", home, PYDML_CUDA="0")


def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="PYDML_CUDA: got 'yes', wanted 0, 1 or auto"):
        decision(monkeypatch, None, None, PYDML_CUDA="yes")
    with pytest.raises(RuntimeError, match="PYDML_CUDA=1, but there is no nvcc"):
        decision(monkeypatch, None, None, PYDML_CUDA="1")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", ("80", "90", "100")), ("8.0;9.0", ("80", "90")), ("100, 86", ("86", "100")), ("90a", ("90a",))],
)
def test_architectures_are_read(monkeypatch: pytest.MonkeyPatch, text: str, wanted: tuple[str, ...]) -> None:
    monkeypatch.setenv("PYDML_CUDA_ARCHS", text)
    assert nvcc.archs() == wanted


@pytest.mark.parametrize(("text", "words"), [("ampere", "got 'ampere'"), ("75", "wanted 80 or later")])
def test_wrong_architectures_are_named(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setenv("PYDML_CUDA_ARCHS", text)
    with pytest.raises(ValueError, match=f"PYDML_CUDA_ARCHS: {words}" if "got" in words else words):
        nvcc.archs()


def test_toolkit_is_the_one_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvcc.toolkit() == tmp_path
    monkeypatch.setenv("CUDA_HOME", os.devnull)
    assert nvcc.toolkit() != tmp_path
