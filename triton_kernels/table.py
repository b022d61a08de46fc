"""Tile sizes by architecture, arithmetic and width: our own table, no autotuning at run time.

An entry is what :func:`preferred` says, unless the compiler spills registers with it: ``exceptions.json`` has the
nearest entries with which it does not, found by ``python -m pydml.triton_kernels.fit``.
``python -m pydml.triton_kernels.tune`` measures alternatives on the GPU at hand and writes what it finds to a file that
``PYDML_TILES`` names; :func:`tiles` looks there first.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch


@dataclass(frozen=True)
class Tiles:
    """How one engine is cut and launched."""

    rows: int  # BM: rows that a program owns
    cols: int  # BN: columns of a tile
    depth: int  # BD: step along d of S = X·Yᵀ
    chunk: int  # GD: columns of the gradient that a program owns; S is recomputed once for each chunk
    warps: int
    stages: int


@dataclass(frozen=True)
class Architecture:
    """What a table entry must fit in."""

    name: str
    capability: tuple[int, int]  # of CUDA; (0, 0) elsewhere
    processors: int  # of its largest part: columns are split until there are twice as many programs
    shared: int  # bytes a program may have


ARCHITECTURES = (
    Architecture("sm_80", (8, 0), 108, 166912),
    Architecture("sm_86", (8, 6), 84, 101376),
    Architecture("sm_90", (9, 0), 132, 232448),
    Architecture("sm_100", (10, 0), 148, 232448),
    Architecture("sm_120", (12, 0), 170, 101376),
    Architecture("gfx942", (0, 0), 304, 65536),
    Architecture("interpreter", (0, 0), 2, 1 << 30),
)
#: Consumers' cards have the matrix instruction of sm_80, whose entries are preferred there; they fit the shared memory.
TILED_LIKE = {"sm_86": "sm_80", "sm_120": "sm_80"}
#: ieee: fp32 on ordinary cores; tf32, bf16, fp16: tensor cores.
MATHS = ("ieee", "tf32", "bf16", "fp16")


#: What a launch does, which decides how much it keeps in registers. forward: the pair engine's pass over the columns;
#: counts: the histogram engine's; sums: the triplet engine's; hinge, thresholds: one that holds its positives, of the
#: hinge and of the other losses; backward: gradients of the pair engine, half: those of both sides by atomic additions;
#: histogram, triplet: gradients of these engines, which look up tables; exact: distances from differences; select:
#: extremes and mined pairs; topk, sample, rank: the passes of these ops.
KINDS = ("forward", "counts", "sums", "hinge", "thresholds", "backward", "half", "histogram", "triplet", "exact",
         "select", "topk", "sample", "rank")  # fmt: skip
#: Rows and columns of a tile: a power of two up to this.
LARGEST = 128
#: Rows are padded to one of these, or to a multiple of the last, whose entries serve all that are wider.
WIDTHS = (64, 128, 256)


def preferred(arch: str, math: str, width: int, kind: str) -> Tiles:
    """The entry that we want: large gradient chunks, for which S is computed anew, and enough stages to hide loads.

    Where a kernel needs a little more registers than would let two programs run at once, ptxas spills the difference;
    numbers of warps and stages are such that it rarely does.
    """
    if kind == "exact":  # no matrix product to speak of, and rarely anything to do
        return Tiles(32, 16, 32, 32, 8, 1)
    if arch == "interpreter":
        return Tiles(32, 16 if kind == "triplet" else 32, min(width, 64), min(width, 64), 4, 1)
    blackwell, small = arch == "sm_100", arch == "gfx942"
    old, short = small or arch == "sm_80", width <= 64
    depth = min(width, {"ieee": 32 if kind == "histogram" else 16, "tf32": 32}.get(math, 64))
    if kind in ("forward", "select", "topk", "sample", "rank"):
        cols = 64 if kind in ("forward", "select") else 32  # of a pair's number, counters or fp64 draws, fewer fit
        stages = 3 if arch == "sm_90" and math != "ieee" else 2
        return Tiles(64, cols, depth, depth, 4 if kind in ("forward", "topk") else 8, stages)
    if kind == "sums":
        whole = preferred(arch, math, width, "backward")
        return replace(whole, cols=16 if old and short else whole.cols, stages=2 if blackwell and math == "tf32" else 1)
    if kind == "counts":  # a program's counts take as many registers as a gradient
        return preferred(arch, math, width, "backward")
    chunk = 128 if math == "ieee" or small else 256
    # Tiles of few columns: a thread holds several numbers of each of its columns, and more of them would spill.
    narrow = {"triplet": True, "histogram": old, "half": old or (math == "tf32" and not blackwell)}
    cols = 16 if narrow.get(kind) else 32
    if (kind == "triplet" and old) or (kind == "half" and math == "ieee"):
        chunk //= 2
    if kind == "backward" and blackwell:
        depth = min(width, 2 * depth)
    if kind in ("hinge", "thresholds"):
        # Triton 3.7.1 does not always compile such a loop around a product in tensor memory; 32 rows are not put there.
        rows, cols = (32, 16 if short else cols) if kind == "thresholds" and blackwell else (64, cols)
        return Tiles(rows, cols, depth, depth, 4 if blackwell else 8, 1)
    # Rows of a single step have nothing to fetch ahead; asked to, Triton 3.7.1 fails to compile histograms for sm_90.
    single = kind == "histogram" and depth == width
    stages = 1 if kind == "triplet" or single else 3 if kind == "half" and blackwell else 2
    return Tiles(64, cols, depth, min(width, chunk), 8, stages)


@functools.cache
def exceptions() -> dict[str, dict[str, int]]:
    """Entries that differ from the preferred ones: key -> fields of :class:`Tiles`."""
    found: dict[str, dict[str, int]] = json.loads(Path(__file__).with_name("exceptions.json").read_text())
    return found


@functools.cache
def _tuned() -> dict[str, dict[str, int]]:
    """What tuning has written: key -> fields of :class:`Tiles`."""
    path = os.environ.get("PYDML_TILES")
    if not path:
        return {}
    entries: dict[str, dict[str, int]] = json.loads(Path(path).read_text())
    for name, entry in entries.items():
        if name.rpartition("/")[2] not in KINDS:
            raise ValueError(f"PYDML_TILES: {path} has an entry for {name!r}, wanted keys that end in one of {KINDS}")
        for field, value in entry.items():
            if field not in Tiles.__dataclass_fields__:
                wanted = ", ".join(Tiles.__dataclass_fields__)
                raise ValueError(f"PYDML_TILES: {path} has {field!r} in {name!r}, wanted some of {wanted}")
            if field in ("rows", "cols") and (value > LARGEST or LARGEST % value):
                raise ValueError(
                    f"PYDML_TILES: {path} has {field} = {value} in {name!r}, wanted a divisor of {LARGEST}"
                )
    return entries


def key(arch: str, math: str, width: int, kind: str) -> str:
    return f"{arch}/{math}/{width}/{kind}"


def base(arch: str, math: str, width: int, kind: str) -> Tiles:
    """What an exception is one to: the preferred entry, or that of a similar architecture."""
    return tiles(TILED_LIKE[arch], math, width, kind) if arch in TILED_LIKE else preferred(arch, math, width, kind)


@functools.cache
def tiles(arch: str, math: str, width: int, kind: str) -> Tiles:
    """The entry for one architecture, arithmetic, padded width and kind of launch."""
    entry = arch, math, min(width, WIDTHS[-1]), kind
    fields = asdict(base(*entry)) | exceptions().get(key(*entry), {})
    return Tiles(**fields | _tuned().get(key(arch, math, width, kind), {}))


def padded(d: int) -> int:
    """Width to which rows are padded."""
    return next((w for w in WIDTHS if d <= w), -(-d // WIDTHS[-1]) * WIDTHS[-1])


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """The table's architecture for a device: the newest one that is not newer."""
    if device.type == "cpu":
        return ARCHITECTURES[-1]
    if torch.version.hip:
        return next(a for a in ARCHITECTURES if a.name == "gfx942")
    capability = torch.cuda.get_device_capability(device)
    return max((a for a in ARCHITECTURES if (0, 0) < a.capability <= capability), key=lambda a: a.capability,
               default=ARCHITECTURES[0])  # fmt: skip
