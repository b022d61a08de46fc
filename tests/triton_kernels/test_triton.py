"""Every loss on the Triton kernels, run by the interpreter made honest: golden vectors, formats, tiles, memory."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    CASES,
    DEFAULTS,
    Case,
    assert_close,
    assert_same,
    check_golden,
    golden,
    golden_names,
    make_batch,
    over,
)
from helpers import run as step

import pydml
from pydml import roofline
from pydml.backends import fp32_products

WHY_NOT = pydml.backends()["triton"]
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"triton: {WHY_NOT}")

if WHY_NOT is None:
    import honest
    import triton
    import triton.language as tl

    from pydml.triton_kernels import matrix

    honest.install()


@pytest.mark.parametrize("name", golden_names())
def test_float32_is_the_golden_value_and_gradient(name: str) -> None:
    case = golden(name)
    check_golden(case, "triton", torch.float32, case.meta["rtol_float32"])


# Formats: against dense fp64 on the very numbers that the kernels multiply.


def batch(case: Case, regime: str, rows: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    z, labels = make_batch(regime, rows, dim, max(2, rows // 4), seed=len(case.id))
    return z.to(dtype), labels


def run_on(loss_fn: torch.nn.Module, z: torch.Tensor, labels: torch.Tensor, backend: str) -> tuple[torch.Tensor, ...]:
    z = z.clone().requires_grad_()
    loss = loss_fn(z, labels, backend=backend)
    loss.backward()
    assert z.grad is not None and z.grad.dtype == z.dtype
    return loss.detach(), z.grad


#: How far a loss or gradient may be off, relative to its largest entry. Rounding a cosine to 8 or 11 bits of mantissa
#: is multiplied by the loss' sharpness (β = 50 in Multi-Similarity), as in plain PyTorch in that format.
TOLERANCE = {"bf16": 0.25, "fp16": 0.03, "tf32": 0.03}


@pytest.mark.parametrize("math", TOLERANCE)
@over(DEFAULTS)
def test_other_formats_are_near_fp64(case: Case, math: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}[math]
    z, labels = batch(case, "random", 40, 24, dtype)
    classes = int(labels.max()) + 1
    with fp32_products("tf32"):
        loss_fn = case.build(classes, 24, dtype)
        got = run_on(loss_fn, z, labels, "triton")
    want = run_on(case.build(classes, 24, torch.float64), z.double(), labels, "dense")
    error = (got[0].double() - want[0]).abs().item()
    assert error <= TOLERANCE[math] * max(want[0].abs().item(), 1e-2)
    assert_close(got[1], want[1], 2 * TOLERANCE[math], "gradient", floor=1e-4)


@pytest.mark.parametrize("way", ["older", "newer"])
def test_tf32_may_be_asked_for_in_either_way(way: str) -> None:
    """After the newer one torch.get_float32_matmul_precision() raises."""
    case = DEFAULTS[0]
    z, labels = batch(case, "random", 40, 24, torch.float32)
    loss_fn = case.build(10, 24, torch.float32)
    exact = run_on(loss_fn, z, labels, "triton")[0]
    with fp32_products("ieee"):
        if way == "older":
            torch.set_float32_matmul_precision("high")
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        rounded = run_on(loss_fn, z, labels, "triton")[0]
    assert rounded != exact
    assert_close(rounded, exact, TOLERANCE["tf32"])


@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "ContrastiveLoss", "FastAPLoss", "TripletMarginLoss"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_tensor_cores_get_nothing_to_cut_off(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ignore the digits of fp32 that TF32 lacks, so everything that they multiply is rounded before."""
    z, labels = make_batch("random", 40, 24, 10, 0, torch.float32)
    loss_fn = getattr(pydml.losses, name)()
    pydml.set_deterministic(deterministic)
    try:
        with fp32_products("tf32"):
            cut = run_on(loss_fn, z, labels, "triton")
            monkeypatch.setattr(honest, "cut_tf32", lambda x: x)
            whole = run_on(loss_fn, z, labels, "triton")
    finally:
        pydml.set_deterministic(True)
    assert torch.equal(cut[0], whole[0]) and torch.equal(cut[1], whole[1])


@pytest.mark.parametrize("math", ["ieee", "tf32"])
def test_a_cosine_does_not_depend_on_its_tile(math: str) -> None:
    """A tile with near pairs is computed from differences: but 1-D²/2 is a cosine only of rows of length 1."""
    z, labels = make_batch("random", 30, 12, 5, 0, torch.float32)
    z[3], z[7] = 0, z[4]
    loss_fn = pydml.losses.ContrastiveLoss(pos_margin=1, neg_margin=0, distance="cosine")
    with fp32_products(math):
        got = run_on(loss_fn, z, labels, "triton")
    want = run_on(loss_fn, z.double(), labels, "dense")
    tolerance = 1e-5 if math == "ieee" else TOLERANCE["tf32"]
    assert_close(got[0], want[0], tolerance)
    rows = torch.arange(30) != 3  # the gradient of a row of length 0 is scaled by 1e12
    assert_close(got[1][rows], want[1][rows], tolerance)


def test_wide_equal_rows_are_seen_though_tensor_cores_cut_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """S of equal rows then falls short of 1, the more so the wider they are."""
    builder = triton.runtime.interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def short(self: object, a: object, b: object, total: object, *rest: object) -> object:
        result = create_dot(self, a, b, total, *rest)
        result.data = (total.data + (result.data - total.data) * (1 - 1.5e-5)).astype(np.float32)
        return result

    monkeypatch.setattr(builder, "create_dot", short)
    z = torch.randn(1, 2048, generator=torch.Generator().manual_seed(0)).expand(6, 2048).clone()
    assert pydml.losses.ContrastiveLoss()(z, torch.zeros(6, dtype=torch.int64), backend="triton") == 0


# Ragged tiles, with memory watched: no lane out of bounds, no two programs on one address.


@pytest.mark.parametrize("rows", [1, 31, 33, 70])
@over(CASES)
def test_ragged_batches_are_dense(case: Case, rows: int) -> None:
    z, labels = batch(case, "trained" if rows % 2 else "collapsed", rows, 19, torch.float32)
    classes = max(2, int(labels.max()) + 1)
    loss_fn = case.build(classes, 19, torch.float32)
    with honest.watched():
        got = step(loss_fn, z, labels, backend="triton")
    want = step(case.build(classes, 19, torch.float64), z.double(), labels, backend="dense")
    assert_same(got, want, 2e-4, floor=1e-2)


@over(CASES, lambda case: case.takes_ref)
def test_reference_sets_are_dense(case: Case) -> None:
    z, labels = batch(case, "random", 35, 40, torch.float32)
    ref, ref_labels = batch(case, "trained", 67, 40, torch.float32)
    ref_labels = ref_labels % (int(labels.max()) + 1)
    loss_fn = case.build(int(labels.max()) + 1, 40, torch.float32)
    with honest.watched():
        got = step(loss_fn, z, labels, ref_emb=ref, ref_labels=ref_labels, backend="triton")
    want = step(case.build(int(labels.max()) + 1, 40, torch.float64), z.double(), labels, ref_emb=ref.double(),
                ref_labels=ref_labels, backend="dense")  # fmt: skip
    assert_same(got, want, 2e-4, floor=1e-2)


def test_two_runs_give_the_same_bits() -> None:
    case = DEFAULTS[0]
    z, labels = batch(case, "random", 70, 33, torch.float32)
    first, second = (run_on(case.build(17, 33, torch.float32), z, labels, "triton") for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("rows", [1, 33, 70])
@over(CASES, lambda case: case.loss in ("ms", "binomial", "n_pairs", "proxy_anchor"))
def test_half_the_tiles_in_any_order_give_the_same_gradient(case: Case, rows: int) -> None:
    z, labels = batch(case, "trained", rows, 19, torch.float32)
    loss_fn = case.build(int(labels.max()) + 1, 19, torch.float32)
    want = step(loss_fn, z, labels, backend="triton")
    pydml.set_deterministic(False)
    try:
        with honest.watched():
            got = step(loss_fn, z, labels, backend="triton")
    finally:
        pydml.set_deterministic(True)
    assert_same(got, want, 1e-5, floor=1e-2)


# The checks themselves: each must fire on a bug of its kind.

if WHY_NOT is None:

    @triton.jit
    def row_sums(X, OUT, n, MASKED: tl.constexpr, ATOMIC: tl.constexpr, BM: tl.constexpr):
        """Sums of x by pairs of programs, or with the bug that a constant asks for."""
        at = tl.program_id(0) * BM + tl.arange(0, BM)
        x = tl.load(X + at, mask=(at < n) | (not MASKED), other=0.0)
        if ATOMIC:
            tl.atomic_add(OUT, tl.sum(x, 0))
        else:
            tl.store(OUT, tl.load(OUT) + tl.sum(x, 0))


@pytest.mark.parametrize(
    ("masked", "atomic", "programs", "fault"),
    [(True, True, 2, None), (False, True, 2, "out of bounds"), (True, False, 2, "race"), (True, False, 1, None)],
)
def test_memory_is_watched(masked: bool, atomic: bool, programs: int, fault: str | None) -> None:
    x, out = torch.ones(20 if programs == 2 else 16), torch.zeros(1)
    with honest.watched():
        if fault is None:
            row_sums[(programs,)](x, out, len(x), masked, atomic, 16)
            assert out.item() == len(x)
        else:
            with pytest.raises(Exception, match=fault):
                row_sums[(programs,)](x, out, len(x), masked, atomic, 16)


def test_a_dropped_tile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parity tests would notice a kernel that leaves out the last tile of columns."""
    case = DEFAULTS[0]
    z, labels = batch(case, "random", 70, 16, torch.float32)
    want = run_on(case.build(17, 16, torch.float64), z.double(), labels, "dense")
    original = matrix.launch

    def short(
        kernel: object, grid: tuple[int, ...], device: torch.device, *arguments: object, **constants: object
    ) -> None:
        names = kernel.arg_names  # type: ignore[attr-defined]
        given = list(arguments)
        given[names.index("n_cols")] -= 32  # type: ignore[operator]
        original(kernel, grid, device, *given, **constants)

    monkeypatch.setattr(importlib.import_module("pydml.triton_kernels.pair"), "launch", short)
    got = run_on(case.build(17, 16, torch.float32), z, labels, "triton")
    with pytest.raises(AssertionError):
        assert_close(got[1], want[1], 2e-4, "gradient", floor=1e-2)


if WHY_NOT is None:

    @triton.jit
    def products(A, B, OUT, PRECISION: tl.constexpr, N: tl.constexpr):
        i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        s = tl.dot(tl.load(A + i * N + j), tl.load(B + i * N + j), input_precision=PRECISION)
        tl.store(OUT + i * N + j, s.to(OUT.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_products_round_as_hardware_does(dtype: torch.dtype, out: torch.dtype) -> None:
    a, b, s = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype), torch.empty(16, 16, dtype=out)
    products[(1,)](a, b, s, "ieee", 16)
    assert_close(s.float(), a.double() @ b.double(), 1e-6 if out == torch.float32 else 2.0**-8)
    if dtype == torch.float32:
        products[(1,)](a, b, s, "tf32", 16)
        rounded = [torch.from_numpy(honest.cut_tf32(t.numpy())).double() for t in (a, b)]
        assert_close(s.float(), rounded[0] @ rounded[1], 1e-6 if out == torch.float32 else 2.0**-8)
        assert not np.array_equal(honest.cut_tf32(a.numpy()), a.numpy())


def test_without_triton_the_package_works_and_says_why() -> None:
    """On a machine without it: blocked here by an import that fails."""
    program = (
        "import importlib, sys; sys.modules['triton'] = None\n"
        "import torch, pydml\n"
        "assert 'triton' in pydml.backends()['triton']\n"
        "pydml.losses.MultiSimilarityLoss()(torch.randn(8, 4), torch.arange(8) // 2)\n"
        "sys.exit(importlib.import_module('pydml.cli').main(['info']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert any("triton" in line and "import" in line for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "ContrastiveLoss", "FastAPLoss", "TripletMarginLoss"])
def test_the_tiles_of_real_architectures_fit_each_other(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward tiles differ there, and each has to find the other's flags and ranges."""
    table = importlib.import_module("pydml.triton_kernels.table")
    tiles = table.tiles
    monkeypatch.setattr(table, "tiles", lambda _, math, width, kind: tiles(arch, math, width, kind))
    loss_fn = getattr(pydml.losses, name)(**({"epsilon": 0.1} if name == "MultiSimilarityLoss" else {}))
    z, labels = make_batch("trained", 150, 12, 9, 0, torch.float32)
    z[70] = z[140]  # near pairs, in a tile of their own
    leaves = [z.clone().requires_grad_() for _ in range(2)]
    values = [loss_fn(leaf, labels, backend=b) for leaf, b in zip(leaves, ("triton", "dense"), strict=True)]
    torch.stack(values).sum().backward()
    assert_close(values[0], values[1], 1e-5)
    assert_close(leaves[0].grad, leaves[1].grad, 1e-5)


def test_the_predictions_are_for_the_tables_tiles() -> None:
    table = importlib.import_module("pydml.triton_kernels.table")
    for gpu in roofline.GPUS:
        kinds = ("backward", "histogram", "triplet")
        tiles = [table.tiles(gpu.architecture, "bf16", 512, kind) for kind in kinds]
        assert [t.chunk for t in tiles] == [gpu.chunk, gpu.chunk, gpu.triplet]
        assert {t.rows for t in tiles} == {roofline.ROWS}
        entry = next(a for a in table.ARCHITECTURES if a.name == gpu.architecture)
        assert entry.processors == gpu.processors


def test_compilers_see_the_launches() -> None:
    """Without the interpreter, and without running anything: the traced graph holds Triton launches, not our op."""
    program = (
        "import importlib, torch, pydml\n"
        "backends = importlib.import_module('pydml.backends')\n"
        "backends._reasons.pop('triton', None)\n"
        "backends._tables['triton'] = importlib.import_module('pydml.triton_kernels').KERNELS\n"
        "from torch._dynamo.backends.common import aot_autograd\n"
        "seen = []\n"
        "def look(graph, _):\n"
        "    seen.extend(str(n.target) for n in graph.graph.nodes)\n"
        "    raise KeyboardInterrupt\n"
        "def loss(z, y):\n"
        "    params = [-2.0, 0.5, 50.0, 0.5]\n"
        "    fields = (z, None, y, None, None, None, 'exponential', params, 'dot', True, 0.1, 1, 1.0)\n"
        "    return torch.ops.pydml.pair(*fields, None, None, 'both', 'triton')[0].sum()\n"
        "compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=look), fullgraph=True)\n"
        "try:\n"
        "    compiled(torch.randn(40, 16), torch.arange(40) // 4)\n"
        "except BaseException:\n"
        "    pass\n"
        "print(' '.join(seen))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert "triton_kernel_wrapper_functional" in done.stdout, done.stderr[-2000:]
    assert "pydml.pair" not in done.stdout


def test_tuning_writes_a_table_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune, table = (importlib.import_module(f"pydml.triton_kernels.{name}") for name in ("tune", "table"))
    monkeypatch.setattr(tune, "candidates", lambda entry, *_: iter((entry, replace(entry, cols=16))))
    file = tmp_path / "tiles.json"
    arguments = ["--device", "cpu", "--batch", "33", "--widths", "16", "--dtypes", "float32", "--repeats", "1"]
    assert tune.main([str(file), *arguments]) == 0
    entries = json.loads(file.read_text())
    key = table.key("interpreter", "ieee", 64, "backward")
    assert set(entries) == {key, table.key("interpreter", "ieee", 64, "forward")}
    file.write_text(json.dumps({key: {**entries[key], "rows": 16}}))
    monkeypatch.setenv("PYDML_TILES", str(file))
    for cached in (table._tuned, table.tiles):
        cached.cache_clear()
    try:
        assert table.tiles("interpreter", "ieee", 64, "backward").rows == 16
        file.write_text(json.dumps({"interpreter/ieee/64/sideways": {}}))
        table._tuned.cache_clear()
        with pytest.raises(ValueError, match=r"PYDML_TILES.*sideways"):
            table._tuned()
        for wrong, what in (
            ({"rows": 256}, "rows = 256.*divisor of 128"),
            ({"height": 1}, "'height'.*wanted some of rows"),
        ):
            file.write_text(json.dumps({key: wrong}))
            with pytest.raises(ValueError, match=what):
                table._tuned()
    finally:
        monkeypatch.delenv("PYDML_TILES")
        for cached in (table._tuned, table.tiles):
            cached.cache_clear()
