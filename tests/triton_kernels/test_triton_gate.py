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


def test_all_variants_were_compiled_as_they_are_and_none_spills() -> None:
    done = gate("--check")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads(RECORD.read_text())
    assert all(set(row) == ARCHS for row in record.values())
    assert not [cell["faults"] for row in record.values() for cell in row.values() if cell["faults"]]


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
        "    return fit.Outcome(v.arch, v.math, v.width, v.name, what, 99, 8 * bad, 0, True, True)\n"
        "fit.compile_variant = compile_variant\n"
        "table.exceptions().clear()\n"
        "print(fit.fit('sm_90', 'bf16', 64))\n"
    )
    done = python("-c", program)
    wanted = {"sm_90/bf16/64/forward": {"cols": 32, "warps": 8}}
    assert done.stdout.splitlines()[-1] == str(wanted), done.stdout + done.stderr
