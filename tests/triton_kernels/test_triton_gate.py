"""Every Triton kernel compiles for GPUs that are not here: no spills, shared memory within limits, matrix products.

docs/gate.json says so of all variants, with digests of what was compiled; here the digests are compared, and one
variant in :data:`SHARE` is compiled again. In processes of their own, without the interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

RECORD = Path(__file__).resolve().parents[2] / "docs" / "gate.json"
ARCHS = {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942"}
SHARE = 10


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=1800
    )


def gate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "pydml.triton_kernels.gate", *arguments)


def test_all_variants_were_compiled_as_they_are_and_hardly_any_spills() -> None:
    done = gate("--check")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads(RECORD.read_text())
    assert all(set(row) == ARCHS for row in record.values())
    assert not [cell["faults"] for row in record.values() for cell in row.values() if cell["faults"]]
    spilling = [cell["spilled"] for row in record.values() for cell in row.values() if cell["spilled"]]
    assert len(spilling) <= 8 and max(spilling, default=0) <= 64


def test_a_share_of_the_variants_compiles_here_too(tmp_path: Path) -> None:
    found = tmp_path / "gate.json"
    done = gate("--share", str(SHARE), "--json", str(found))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    outcomes, record = json.loads(found.read_text()), json.loads(RECORD.read_text())
    for what, wanted in (("arch", ARCHS), ("math", {"ieee", "tf32", "bf16", "fp16"}), ("width", {64, 128, 256, 512})):
        assert {o[what] for o in outcomes} == wanted
    total = sum(cell["variants"] for row in record.values() for cell in row.values())
    assert len(outcomes) > total / SHARE / 2
    for o in outcomes:
        for what in ("registers", "shared"):
            assert o[what] <= record[o["name"]][o["arch"]][what], f"{o}: docs/gate.json says less"


def test_the_gate_sees_what_it_looks_for() -> None:
    """A tile that is too large spills, one too deep does not fit the shared memory, and both are called faults."""
    program = (
        "from pydml.triton_kernels import gate, table\n"
        "large, deep = {'rows': 128, 'cols': 128, 'warps': 4}, {'depth': 256, 'stages': 4}\n"
        "for arch, fields in (('sm_80', large), ('sm_86', deep)):\n"
        "    table.exceptions()[f'{arch}/bf16/256/forward'] = fields\n"
        "    found = [v for v in gate.variants(arch, 'bf16', 256, False) if v.name == 'pair_forward_kernel']\n"
        "    print(gate.compile_variant(found[0]).faults())\n"
    )
    done = python("-c", program)
    spills, memory = done.stdout.splitlines()
    assert "bytes of spilled registers" in spills, done.stdout + done.stderr
    assert "bytes of shared memory" in memory, done.stdout + done.stderr


def test_no_compiler_adds_to_a_product_before_it_is_rounded(tmp_path: Path) -> None:
    """What is taken from :func:`product` is taken by an instruction of its own; from x·y it is not."""
    program = tmp_path / "products.py"
    program.write_text(
        "import re, subprocess, sys, tempfile\n"
        "import triton, triton.language as tl\n"
        "from triton import knobs\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource\n"
        "from pydml.triton_kernels.functions import product, relu\n"
        "@triton.jit\n"
        "def kernel(X, Y, Z, OUT, ROUNDED: tl.constexpr, RELU: tl.constexpr):\n"
        "    at = tl.arange(0, 128)\n"
        "    x, y, z = tl.load(X + at), tl.load(Y + at), tl.load(Z + at)\n"
        "    if RELU:\n"
        "        x = relu(x)\n"
        "    if ROUNDED:\n"
        "        t = product(x, y)\n"
        "    else:\n"
        "        t = x * y\n"
        "    tl.store(OUT + at, t - z)\n"
        "def additions(arch, **constants):\n"
        "    signature = dict.fromkeys(('X', 'Y', 'Z', 'OUT'), '*fp32') | dict.fromkeys(constants, 'constexpr')\n"
        "    nvidia = arch.startswith('sm_')\n"
        "    target = GPUTarget('cuda', int(arch[3:]), 32) if nvidia else GPUTarget('hip', arch, 64)\n"
        "    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)\n"
        "    binary = triton.compile(source, target=target)\n"
        "    if not nvidia:\n"
        "        return len(re.findall(r'v_(?:pk_)?(?:add|sub|subrev)_f32', binary.asm['amdgcn']))\n"
        "    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:\n"
        "        file.write(binary.asm['cubin'])\n"
        "        file.flush()\n"
        "        command = [knobs.nvidia.cuobjdump.path, '-sass', file.name]\n"
        "        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count('FADD')\n"
        "for arch in sys.argv[1:]:\n"
        "    print(arch, *(additions(arch, ROUNDED=a, RELU=b) for a in (True, False) for b in (True, False)))\n"
    )
    done = python(str(program), *sorted(ARCHS))
    assert done.stdout.splitlines() == [f"{arch} 1 1 0 0" for arch in sorted(ARCHS)], done.stdout + done.stderr


def test_a_digest_is_of_the_code_and_not_of_its_comments() -> None:
    program = (
        "from pydml.triton_kernels import gate\n"
        "import importlib\n"
        "found = [v for v in gate.variants('sm_90', 'tf32', 64, False) if v.name == 'rank_kernel']\n"
        "tile = importlib.import_module('pydml.triton_kernels.tile')\n"
        "print(gate.digest(found))\n"
        "source = tile.dot_tile.src\n"
        "tile.dot_tile._unsafe_update_src(source.replace('return s', '# the sum\\n    return s'))\n"
        "print(gate.digest(found))\n"
        "tile.dot_tile._unsafe_update_src(source.replace('return s', 'return 2 * s'))\n"
        "print(gate.digest(found))\n"
        "print(gate.digest(found[:-1] or found * 2))\n"
    )
    done = python("-c", program)
    written, commented, changed, fewer = done.stdout.split()
    assert written == commented and len({written, changed, fewer}) == 3, done.stdout + done.stderr


def test_fitting_takes_the_cheapest_entry_without_faults() -> None:
    """With a compiler that spills where a forward pass has four warps, or 64 columns."""
    program = (
        "from dataclasses import replace\n"
        "from pydml.triton_kernels import fit, table\n"
        "def compile_variant(v):\n"
        "    is_forward = v.name == 'pair_forward_kernel' and not dict(v.constants)['EXACT']\n"
        "    bad = is_forward and (v.warps == 4 or dict(v.constants)['BN'] == 64)\n"
        "    what = str(dict(v.constants).get('EXACT'))\n"
        "    return fit.Outcome(v.arch, v.math, v.width, v.name, what, 99, 80 * bad, 0, True, True)\n"
        "fit.compile_variant = compile_variant\n"
        "table.exceptions().clear()\n"
        "print(fit.fit('sm_90', 'bf16', 64))\n"
    )
    done = python("-c", program)
    wanted = {"sm_90/bf16/64/forward": {"cols": 32, "warps": 8}}
    assert done.stdout.splitlines()[-1] == str(wanted), done.stdout + done.stderr
