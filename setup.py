"""The C++ extension, the CUDA library and the package layout; everything that is plain data is in pyproject.toml.

Both are optional: where one cannot be built the install still succeeds, with a warning, and pydml runs without it. The
reason is left in the package, as pydml/_build.json, because pip shows warnings to nobody; ``pydml info`` tells it.
Environment variables:

PYDML_REQUIRE_EXT=1   fail where the extension cannot be built
PYDML_NO_EXT=1        build neither
PYDML_CUDA=auto       the CUDA library: 1 to build it or fail, 0 to leave it out, auto (the default) to build it where
                      there are nvcc and a use for it: a torch that was built for CUDA, or an NVIDIA driver
PYDML_CUDA_ARCHS=...  architectures to compile it for, such as "80;90"; see csrc/cuda/nvcc.py
PYDML_SANITIZE=...    instrument it: ``address,undefined`` or ``thread``
MAX_JOBS=2            files compiled at once
"""

import json
import os
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc" / "cuda"))
import nvcc  # noqa: E402

CUDA_LIBRARY = "pydml._cuda"
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", "-fno-trapping-math"]
# A term of a sum of exponentials must have the same bits wherever it is computed (csrc/policy.h).
FLAGS += ["-ffp-contract=off"]
# Python's own -fwrapv makes every `int` index one that may wrap: loops would gather and scatter what lies side by side.
FLAGS += ["-fno-wrapv"]
# Without it at::parallel_for, a template in torch's headers, silently runs on one thread.
FLAGS += ["-fopenmp"]
LINK_FLAGS = ["-fopenmp"]
if sanitizers := os.environ.get("PYDML_SANITIZE"):
    LINK_FLAGS += [f"-fsanitize={sanitizers}"]
    FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", f"-fsanitize={sanitizers}"]
else:
    # No -march: kernels choose their instruction set at run time. -g0 undoes Python's own -g.
    FLAGS += ["-O3", "-g0"]


#: What becomes of the extension; pydml/build_record.py reads it.
OUTCOME = {"extension": "the build ended before it", "chosen": False}


def leave_word(build_lib, in_place):
    """Write down what became of the extension, beside the modules that will look for it."""
    folder = ROOT / "pydml" if in_place else Path(build_lib, "pydml")
    if folder.is_dir():
        (folder / "_build.json").write_text(json.dumps(OUTCOME) + "\n", encoding="utf-8")


class BuildModules(build_py):
    def run(self):
        super().run()
        leave_word(self.build_lib, self.editable_mode)


def wanted(variable):
    return os.environ.get(variable, "0") not in ("", "0")


def give_up(error):
    """Warn that there will be no extension, or raise if it was asked for."""
    OUTCOME["extension"] = "it was not built: " + " ".join(str(error).split())[:500].rstrip(".")
    if isinstance(error, ImportError):
        OUTCOME["extension"] += " (pip builds apart from what is installed: pip install --no-build-isolation)"
    if wanted("PYDML_REQUIRE_EXT"):
        raise RuntimeError(f"PYDML_REQUIRE_EXT is set, but the C++ extension was not built: {error}") from error
    print(
        f"WARNING: pydml's C++ extension was not built: {error}\n"
        "WARNING: pydml works without it, on plain PyTorch, only slower. To get it, install torch and a C++20 compiler "
        "(g++ 11 or newer), then run pip install --no-build-isolation again.",
        file=sys.stderr,
    )


def cuda_wanted(torch_cuda):
    """Is the CUDA library to be built? Compiling it takes minutes, so ``auto`` does not do it for nothing."""
    setting = os.environ.get("PYDML_CUDA") or "auto"
    if setting not in ("0", "1", "auto"):
        raise ValueError(f"PYDML_CUDA: got {setting!r}, wanted 0, 1 or auto")
    if setting == "1" and nvcc.toolkit() is None:
        raise RuntimeError("PYDML_CUDA=1, but there is no nvcc: install a CUDA toolkit, or requirements/cuda.txt")
    useful = torch_cuda is not None or Path("/dev/nvidiactl").exists()
    return setting == "1" or (setting == "auto" and useful and nvcc.toolkit() is not None)


def extension():
    """Arguments for ``setup`` that build ``pydml._C``; none where it is not wanted or torch is not there."""
    if wanted("PYDML_NO_EXT"):
        OUTCOME.update(extension="left out by choice: PYDML_NO_EXT was set when pydml was built", chosen=True)
        return {}
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
    except ImportError as error:
        give_up(error)
        return {}

    class OptionalBuild(BuildExtension):
        def get_ext_filename(self, name):
            # On torch's stable ABI and without Python's, so no version of either is in its name.
            parts = name.split(".")
            return f"{os.path.join(*parts)}.so" if parts[-1] == "_cuda" else super().get_ext_filename(name)

        def build_extensions(self):
            cuda = [ext for ext in self.extensions if ext.name == CUDA_LIBRARY]
            self.extensions = [ext for ext in self.extensions if ext.name != CUDA_LIBRARY]
            try:
                super().build_extensions()
                OUTCOME["extension"] = "built"
            except Exception as error:  # torch, ninja and setuptools each raise their own
                give_up(error)
                for ext in self.extensions:
                    self.remove(ext.name)
                self.extensions = []
            leave_word(self.build_lib, self.in_place or self.editable_mode)
            self.remove(CUDA_LIBRARY)
            for ext in cuda:
                self.build_cuda(ext)

        def build_cuda(self, ext):
            output, folder = Path(self.get_ext_fullpath(ext.name)), ROOT / "build" / "cuda" / "nvcc"
            try:
                nvcc.build_library(nvcc.toolkit(), output, folder, int(os.environ["MAX_JOBS"]))
            except (RuntimeError, OSError) as error:
                if os.environ.get("PYDML_CUDA") == "1":
                    raise
                print(f"WARNING: pydml's CUDA library was not built: {error}", file=sys.stderr)
            else:
                self.extensions.append(ext)

        def remove(self, name):
            """A library left from an earlier build must not be taken for this one."""
            for root in [self.build_lib] + ["."] * (self.in_place or self.editable_mode):
                Path(root, self.get_ext_filename(name)).unlink(missing_ok=True)

        def run(self):
            self.in_place = bool(self.inplace)  # setuptools builds elsewhere, and copies afterwards
            super().run()

    os.environ.setdefault("MAX_JOBS", "2")
    # torch looks for ninja on PATH, where pip does not put this environment's scripts.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    # The headers of torch and Python do not pass -Wextra; as system headers they need not.
    system_headers = [*include_paths(), sysconfig.get_path("include")]
    ext = CppExtension(
        "pydml._C",
        sources=["csrc/module.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
        depends=sorted(glob("csrc/**/*.h", recursive=True)),
        include_dirs=[str(ROOT / "csrc")],  # absolute, because ninja compiles in its own directory
        define_macros=[("PYDML_FLAGS", '"' + " ".join(FLAGS) + '"')],
        # The prefix map keeps this machine's paths out of the library.
        extra_compile_args=[*FLAGS, f"-ffile-prefix-map={ROOT}=.", *(f"-isystem{path}" for path in system_headers)],
        extra_link_args=LINK_FLAGS,
    )
    extensions = [ext]
    if cuda_wanted(torch.version.cuda):
        # No sources: torch's build would take .cu files for its own, and look for its own toolkit.
        extensions.append(Extension(CUDA_LIBRARY, sources=[], depends=sorted(glob("csrc/cuda/*"))))
    return {"ext_modules": extensions, "build_ext": OptionalBuild}


arguments = extension()
commands = {"build_py": BuildModules}
if "build_ext" in arguments:
    commands["build_ext"] = arguments.pop("build_ext")
setup(
    cmdclass=commands,
    packages=find_packages(include=["pydml*"])
    + [f"pydml.{name}" for name in find_packages(include=["triton_kernels*"])],
    package_dir={"pydml.triton_kernels": "triton_kernels"},
    **arguments,
)
