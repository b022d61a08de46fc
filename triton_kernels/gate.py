"""Compile every kernel for GPUs that are not here, and look at what came out: ``python -m pydml.triton_kernels.gate``.

What is compiled is what is launched: the ops run on small CPU tensors as if on each architecture, and their launches
are written down instead of made. Each variant must compile with few spills or none, fit the architecture's shared
memory, and use its matrix instructions. Runs without ``TRITON_INTERPRET``, in a process of its own.

A tenth of it takes about four minutes on two cores, so all of it is too much for every run of the tests. ``--publish``
leaves in docs/gate.json what it found for each kernel and architecture, with a digest of what was compiled, and
compiles again only what has changed since; the tests compare the digests (``--check``), which takes no compiler, and
compile a share of the variants.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pydml.backends import fp32_products, set_deterministic
from pydml.declared import op
from pydml.triton_kernels import KERNELS, table, yields

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
#: All widths of the table, and one beyond, which has more steps and chunks of the same size.
WIDTHS = (*table.WIDTHS, 2 * table.WIDTHS[-1])
#: What was compiled, and the page that shows it; in a clone.
RECORD, PAGE = (Path(__file__).resolve().parents[1] / "docs" / name for name in ("gate.json", "gpu-triton.md"))
#: The instruction that multiplies matrices, in PTX or in AMD's assembly.
INSTRUCTION = {"sm_80": "mma.sync", "sm_86": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma",
               "sm_120": "mma.sync", "gfx942": "v_mfma"}  # fmt: skip
#: Constants that do not tell variants apart.
EVERYWHERE = ("BM", "BN", "BD", "GD", "D", "K", "KP", "SPLITS", "PRECISION", "FLAG_ROWS", "FLAG_COLS", "RANGE_ROWS",
              "RANGE_COLS", "CENTRES", "LSE", "POSITIVE", "CONSTANT")  # fmt: skip
#: Triton 3.7.1 fails on some kernels for sm_100 in some runs and not in others.
ATTEMPTS = 4
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Variant:
    """One launch: a kernel, the types of its arguments, its constants, and what it is compiled for."""

    arch: str
    math: str
    width: int
    module: str
    name: str
    signature: tuple[tuple[str, str], ...]
    aligned: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int


#: Bytes of a thread's registers that may be spilled: a store and a load for each program, where the next smaller tile
#: would cost a whole pass more. What is spilled is on the page.
TOLERATED = 64


@dataclass(frozen=True)
class Outcome:
    """What the compiler made of a variant."""

    arch: str
    math: str
    width: int
    name: str
    what: str  # the constants that tell variants of a kernel apart
    registers: int
    spilled: int
    shared: int
    instruction: bool  # does it multiply matrices by the architecture's instruction?
    multiplies: bool  # has it a matrix product that is worth one?
    error: str = ""

    def faults(self) -> list[str]:
        """Why it does not pass."""
        limit = next(a.shared for a in table.ARCHITECTURES if a.name == self.arch)
        found = [self.error] if self.error else []
        if self.spilled > TOLERATED:
            found.append(f"{self.spilled} bytes of spilled registers")
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory, {limit} are there")
        if self.multiplies and self.math != "ieee" and not self.instruction:
            found.append(f"no {INSTRUCTION[self.arch]}")
        return found


def run(name: str, arguments: tuple[Any, ...]) -> Any:
    """Call an engine with the arguments of its op."""
    return KERNELS[name](op(name).read(arguments))


def calls(z: Tensor, labels: Tensor, cols: Tensor, all_policies: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Ops with arguments: each engine, forward and backward, in the variants that differ in their code."""
    n = len(z)
    field = torch.zeros(n)
    pair_losses: list[tuple[str, list[float], str, float | None]] = [
        ("exponential", [-2.0, 0.5, 40.0, 0.5], "dot", 0.1),
        ("hinge", [0.0, 0.5], "euclidean", None),
        ("bin_lifted", [2.0, 40.0, 0.5], "dot", None),
        ("exponential", [-2.0, 0.5, 40.0, 0.5], "squared", None),
        ("binomial", [2.0, 40.0, 0.5], "cosine", 0.1),
        ("mean", [], "dot", 0.1),
        ("dro_margin", [0.1, 0.5, 1.0, 1.0], "dot", None),
        ("lifted", [1.0], "euclidean", None),
        ("arcface", [0.5, 64.0], "cosine", None),
        ("dro_binomial", [2.0, 40.0, 0.5, 1.0, 1.0], "dot", None),
    ]
    selves = torch.arange(n)
    for number, (policy, params, view, epsilon) in enumerate(pair_losses if all_policies else pair_losses[:2]):
        kinds: list[tuple[Any, ...]] = [(None, None)]  # columns, and options
        kinds += [(cols, None)] if epsilon else []
        # rows among the columns, products and distances; the sides of blocks of columns: in one format, as the policies
        kinds += [(cols, selves)] if all_policies and number < 2 else []
        kinds += [(cols, selves, None, side) for side in ("positives", "negatives") if all_policies and number == 0]
        for other, *options in kinds:
            of_cols = None if other is None else labels
            rest = (other, labels, of_cols, field, field, policy, params, view, True, epsilon, 1, 0.0, *options)
            stats, thresholds, flag = run("pair", (z, *rest))
            yield "pair", (z, *rest)
            grads = (torch.ones_like(stats), stats, thresholds, flag, z, *rest, True, other is not None)
            yield "pair_backward", grads
            if other is None and view == "dot":
                set_deterministic(False)
                yield "pair_backward", grads
                set_deterministic(True)
    centres, params = torch.cat((z, z)), [20.0, 0.0, 20.0, 0.0]
    pooled = (centres, labels, labels, None, None, "exponential", params, "dot", True, None, 2, 10.0)
    yield "pair", (z, *pooled)
    stats = torch.zeros(n, 2)
    yield "pair_backward", (stats, stats, stats, torch.empty(0, dtype=torch.uint8), z, *pooled, True, True)
    matrix_of, part_of = (z, None, labels, None), (z, cols, labels, labels)
    alone, among = [(matrix_of, ())], [(part_of, (selves,))]
    for matrix, own in [*alone, *among] if all_policies else alone:  # symmetric, and rows among the columns
        wants = True, matrix is part_of
        for view in ("dot", "squared"):
            nodes = (11, -1.0, 1.0, view, True)
            yield "histogram", (*matrix, *nodes, *own)
            counts = torch.zeros(n, 11)
            kept = torch.zeros(0, 2)
            yield "histogram_backward", (counts, counts, counts, counts, kept, *matrix, *nodes, *own, *wants)
        for mode, smooth, view in (
            ("all", False, "euclidean"),
            ("all", True, "dot"),
            ("semihard", False, "euclidean"),
            ("semihard", True, "dot"),
        ):
            how = (mode, 0.2, False, smooth, view, True)
            yield "triplet", (*matrix, *how, *own)
            yield "triplet_backward", (field, *matrix, *how, *own, *wants)
        for strategy in (("easy", "hard"), ("hard", "semihard"), ("semihard", "hard")):
            yield "extremes", (*matrix, *strategy, "euclidean", True, *own)
        for view in ("dot", "euclidean"):
            yield "topk", (*matrix, "dro_margin", [0.1, 0.5, 1.0, 1.0], 64, "all", view, True, *own)
    yield "mined", (*matrix_of, 0.1, "dot", True)
    yield "sample", (*matrix_of, torch.arange(n), torch.zeros((), dtype=torch.int64), 0.5, 1.4)
    yield "rank", (*matrix_of, True)
    pairs = torch.arange(n), torch.arange(n).flip(0)
    for view in ("dot", "cosine", "euclidean"):
        yield "dots", (z, None, *pairs, view, True)
        yield "dots_backward", (torch.ones(n), z, None, *pairs, view, True, True, False)


def variants(arch: str, math: str, width: int, all_policies: bool) -> list[Variant]:
    """Every launch that the ops make on an architecture."""
    found: dict[Variant, None] = {}
    entry = next(a for a in table.ARCHITECTURES if a.name == arch)

    def record(fn: Any, grid: Any, device: torch.device, *arguments: Any, **constants: Any) -> None:
        warps, stages = constants.pop("num_warps", 4), constants.pop("num_stages", 2)
        given = dict(zip(fn.arg_names, arguments, strict=False))
        signature, aligned = [], []
        for name, value in given.items():
            if isinstance(value, Tensor):
                signature.append((name, "*" + TYPES[value.dtype]))
                aligned += [name] * (value.data_ptr() % 16 == 0)
                if not value.dtype.is_floating_point:
                    value.zero_()  # what nobody computed may be a size
            elif isinstance(value, bool) or name in constants:
                constants[name] = value
            else:
                kind = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
                signature.append((name, kind))
                aligned += [name] * (kind != "fp32" and value % 16 == 0)
        found[Variant(arch, math, width, fn.__module__, fn.__name__, tuple(signature), tuple(aligned),
                      tuple(sorted(constants.items())), warps, stages)] = None  # fmt: skip

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(math, torch.float32)
    z, cols = torch.randn(2, 256, width).to(dtype).unbind()
    modules = [m for name, m in sys.modules.items() if name.startswith("pydml.triton_kernels") and hasattr(m, "launch")]
    with ExitStack() as stack:
        stack.enter_context(fp32_products("ieee" if math == "ieee" else "tf32"))
        stack.enter_context(mock.patch.object(table, "architecture", lambda device: entry))
        for module in modules:
            stack.enter_context(mock.patch.object(module, "launch", record))
        for name, arguments in calls(z, torch.arange(256) // 4, cols, all_policies):
            received = op(name).read(arguments)
            if yields(getattr(received, "call", received)) is None:
                KERNELS[name](received)
    return list(found)


def compile_variant(v: Variant) -> Outcome:
    """Compile one variant, and read what it needs off the binary."""
    fn = getattr(importlib.import_module(v.module), v.name)
    names = list(fn.arg_names)
    signature = dict.fromkeys(names, "constexpr") | dict(v.signature)
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in v.aligned}
    constants = {name: value for name, value in v.constants if name in names}
    nvidia = v.arch.startswith("sm_")
    target = GPUTarget("cuda", int(v.arch[3:]), 32) if nvidia else GPUTarget("hip", v.arch, 64)
    telling = {name: value for name, value in constants.items() if name not in EVERYWHERE}
    what = " ".join(f"{name}={value}" for name, value in telling.items() if value)
    base = dict(arch=v.arch, math=v.math, width=v.width, name=v.name, what=what)
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs)
    for attempt in range(ATTEMPTS):
        try:
            binary = triton.compile(source, target=target, options={"num_warps": v.warps, "num_stages": v.stages})
            break
        except Exception as error:  # the compiler raises what it likes; the gate reports it
            reason = f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
            if attempt == ATTEMPTS - 1:
                nothing = dict(registers=0, spilled=0, shared=0, instruction=False, multiplies=False)
                return Outcome(**base, **nothing, error=reason)
    # Tiles of fewer rows than the newer instructions want are multiplied by the older one, and are meant to be.
    multiplies = "tt.dot" in binary.asm["ttir"] and constants["BM"] >= 64
    assembly = binary.asm["ptx"] if nvidia else binary.asm["amdgcn"]
    if nvidia:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            usage = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True,
                                   text=True, check=True).stdout  # fmt: skip
        registers, spilled = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
    else:
        registers = int(re.search(r"\.vgpr_count:\s*(\d+)", assembly)[1])  # type: ignore[index]
        spilled = 4 * int(re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)[1])  # type: ignore[index]
    return Outcome(**base, registers=registers, spilled=spilled, shared=binary.metadata.shared,
                   instruction=INSTRUCTION[v.arch] in assembly, multiplies=multiplies)  # fmt: skip


def entries(archs: Sequence[str], maths: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, str, int, bool]]:
    """What :func:`variants` takes, for each part of the table: every policy in bf16 at 256, a few elsewhere."""
    for arch, math, width in itertools.product(archs, maths, widths):
        if not (arch == "gfx942" and math == "tf32"):  # AMD's has no such instruction
            yield arch, math, width, (math, width) == ("bf16", 256)


def compile_all(todo: Sequence[Variant], jobs: int = 2) -> list[Outcome]:
    """Two at a time, since the compiler is alone on a core."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_variant, todo, chunksize=4))


def closure(fn: Any, found: dict[str, str]) -> dict[str, str]:
    """The code of a kernel and of all that it calls, by name: no comments, no docstrings, no line numbers."""
    name = f"{fn.__module__}.{fn.__name__}"
    if name not in found:
        tree = ast.parse(textwrap.dedent(fn.src))
        body = tree.body[0].body  # type: ignore[attr-defined]
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            del body[0]
        found[name] = ast.unparse(tree)
        for node in ast.walk(tree):
            value = fn.fn.__globals__.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(value, triton.JITFunction):
                closure(value, found)
            elif isinstance(value, triton.language.constexpr):
                found[f"{fn.__module__}.{node.id}"] = repr(value.value)  # type: ignore[attr-defined]
    return found


Cell = tuple[str, str]  # a kernel and an architecture


def cells(todo: Sequence[Variant]) -> dict[Cell, list[Variant]]:
    found: dict[Cell, list[Variant]] = {}
    for v in todo:
        found.setdefault((v.name, v.arch), []).append(v)
    return found


def digest(mine: Sequence[Variant]) -> str:
    """Of all that a cell's binaries depend on."""
    fn = getattr(importlib.import_module(mine[0].module), mine[0].name)
    parts = [triton.__version__, *sorted(closure(fn, {}).items()), *sorted(repr(v) for v in mine)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def summary(mine: Sequence[Variant], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is written down of a cell."""
    faults = [f"{o.math} d={o.width} ({o.what}): {'; '.join(o.faults())}" for o in outcomes if o.faults()]
    return {"digest": digest(mine), "variants": len(mine), "registers": max(o.registers for o in outcomes),
            "shared": max(o.shared for o in outcomes), "spilled": max(o.spilled for o in outcomes),
            "faults": faults}  # fmt: skip


def stale(todo: Sequence[Variant], record: dict[str, Any]) -> dict[Cell, list[Variant]]:
    """The cells that are other than what the record describes."""
    found = cells(todo)
    return {(name, arch): mine for (name, arch), mine in found.items()
            if record.get(name, {}).get(arch, {}).get("digest") != digest(mine)}  # fmt: skip


def publish(todo: Sequence[Variant]) -> list[Outcome]:
    """Compile what has changed since the record was written, and write it and the page anew."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    changed = stale(todo, record)
    outcomes = compile_all([v for mine in changed.values() for v in mine])
    for name, arch in changed:
        its = [o for o in outcomes if (o.name, o.arch) == (name, arch)]
        record.setdefault(name, {})[arch] = summary(changed[name, arch], its)
    known = cells(todo)
    record = {name: {arch: record[name][arch] for arch in ARCHS if (name, arch) in known}
              for name in sorted({name for name, _ in known})}  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    begin, end = "<!-- generated: gate -->", "<!-- end -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    PAGE.write_text(
        "\n".join((before + begin, "", *report(record), "", end)) + rest.partition(end)[2], encoding="utf-8"
    )
    return outcomes


def report(record: dict[str, Any]) -> list[str]:
    """The record as a Markdown table."""
    number = sum(cell["variants"] for row in record.values() for cell in row.values())
    lines = [
        f"Maximum registers per thread and shared memory per program over {number} variants, compiled with Triton "
        f"{triton.__version__} for rows of {', '.join(map(str, WIDTHS))} in {', '.join(table.MATHS)}. Written by "
        "`python -m pydml.triton_kernels.gate --publish`.",
        "",
        f"| kernel | {' | '.join(ARCHS)} |",
        "| --- " * (1 + len(ARCHS)) + "|",
    ]
    for name, row in record.items():
        shown = [f"{cell['registers']}, {cell['shared'] / 1024:.0f} KiB"
                 + (f", spills {cell['spilled']} B" if cell["spilled"] else "")
                 + (f", **{len(cell['faults'])} of {cell['variants']} with faults**" if cell["faults"] else "")
                 for cell in (row[arch] for arch in ARCHS)]  # fmt: skip
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return lines


def check(todo: Sequence[Variant]) -> list[str]:
    """What is wrong with the record: cells that were compiled with faults, or never, or from other code."""
    record = json.loads(RECORD.read_text())
    wrong = [f"{name} for {arch} is not what was compiled: run python -m pydml.triton_kernels.gate --publish"
             for name, arch in stale(todo, record)]  # fmt: skip
    wrong += [f"{name} for {arch} is no longer launched" for name, row in record.items() for arch in row
              if (name, arch) not in cells(todo)]  # fmt: skip
    return wrong + [f"{name} for {arch}: {fault}" for name, row in record.items() for arch, cell in row.items()
                    for fault in cell["faults"]]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pydml.triton_kernels.gate", description=__doc__.splitlines()[0])
    parser.add_argument("--archs", nargs="+", default=ARCHS, choices=ARCHS)
    parser.add_argument("--maths", nargs="+", default=table.MATHS, choices=table.MATHS)
    parser.add_argument("--widths", nargs="+", default=WIDTHS, type=int)
    parser.add_argument("--only", default="", help="only kernels whose name has this in it")
    parser.add_argument("--share", type=int, default=1, help="compile one variant of so many, spread over all of them")
    parser.add_argument("--json", help="write what was found to this file")
    whole = parser.add_mutually_exclusive_group()
    whole.add_argument(
        "--publish", action="store_true", help="compile what has changed, write docs/gate.json and gpu-triton.md"
    )
    whole.add_argument("--check", action="store_true", help="compile nothing: is docs/gate.json of these kernels?")
    options = parser.parse_args(argv)
    if options.publish or options.check:
        options.archs, options.maths, options.widths, options.only, options.share = ARCHS, table.MATHS, WIDTHS, "", 1
    todo = [v for entry in entries(options.archs, options.maths, options.widths) for v in variants(*entry)
            if options.only in v.name]  # fmt: skip
    if options.check:
        wrong = check(todo)
        print(*wrong, f"{len(todo)} variants, {len(wrong)} complaints", sep="\n")
        return 1 if wrong else 0
    todo = [v for v in todo if int(hashlib.sha256(repr(v).encode()).hexdigest(), 16) % options.share == 0]
    outcomes = publish(todo) if options.publish else compile_all(todo)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(o) for o in outcomes], file, indent=0)
    bad = [(o, o.faults()) for o in outcomes if o.faults()]
    for o, faults in bad:
        print(f"{o.arch} {o.math} d={o.width} {o.name} ({o.what}): {'; '.join(faults)}")
    print(f"{len(outcomes)} variants compiled, {len(bad)} with faults")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
