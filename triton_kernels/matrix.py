"""Rows and columns as the kernels want them: sorted by label, unit, rounded to the arithmetic, padded to whole tiles.

All of it is O(n·d) PyTorch on the device, without a host sync; torch.compile fuses it. What a kernel leaves in sorted
order is put back here, and dL/dx is carried through the normalisation by :class:`pydml.tiled.sides.Side`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton
from torch.nn.functional import pad
from typing_extensions import Self

from pydml.backends import tf32
from pydml.ops import traced
from pydml.tiled import sides
from pydml.triton_kernels import table


def whole(n: int) -> int:
    """Everything in the order of rows is padded to so many."""
    return -(-max(n, 1) // table.LARGEST) * table.LARGEST


def arithmetic(rows: Tensor, cols: Tensor | None = None) -> str:
    """How S is computed for embeddings of these dtypes: the table's ``math``.

    Half precision on one side alone, embeddings beside fp32 proxies, say, is multiplied in that: S has no more digits.
    """
    halves = {z.dtype for z in (rows, cols) if z is not None} & {torch.bfloat16, torch.float16}
    if len(halves) == 1:
        return "bf16" if torch.bfloat16 in halves else "fp16"
    return "tf32" if tf32() and not torch.version.hip else "ieee"


def rounded(x: Tensor, math: str) -> Tensor:
    """fp32 rows as operands of the arithmetic: S is the exact product of what is stored, and D² agrees with it."""
    if math == "tf32":  # 10 bits of mantissa, ties away from 0: what the tensor core would do by itself
        return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return x.to({"ieee": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[math])


def tiles_for(rows: Tensor, cols: Tensor | None, kind: str) -> table.Tiles:
    """The table's entry for embeddings like these, and a kind of launch."""
    arch = table.architecture(rows.device).name
    return table.tiles(arch, arithmetic(rows, cols), table.padded(rows.shape[1]), kind)


class Side(sides.Side):
    """One set of embeddings [n·pool, d], packed as [pool, padded n, D]: centre c of class i is row i of slice c."""

    def __init__(self, z: Tensor, labels: Tensor, normalize: bool, math: str, view: str, pool: int = 1,
                 centre: Tensor | None = None) -> None:  # fmt: skip
        super().__init__(z, normalize, centre)
        self.pool, self.size = pool, labels.shape[0]
        self.labels, self.order = labels.sort(stable=True)
        self.width = table.padded(z.shape[1])
        x = rounded(self.x, math).unflatten(0, (self.size, pool))[self.order].transpose(0, 1)
        self.packed = pad(x, (0, self.width - z.shape[1], 0, whole(self.size) - self.size)).contiguous()
        self.squares = self.packed.float().square().sum(2).flatten()
        if view == "cosine":  # S of rows that are not of length 1 is their product, however near they are
            longest = sides.TINY if normalize else torch.inf
            short = (self.norm[:, 0] <= longest).unflatten(0, (self.size, pool))[self.order].T
            short = pad(short, (0, whole(self.size) - self.size)).flatten()
            self.squares = torch.where(short, torch.inf, self.squares)

    @property
    def slice(self) -> int:
        """Elements from a centre to the next of its class; 0 where there is one."""
        return self.packed[0].numel() if self.pool > 1 else 0

    def sort(self, values: Tensor | None, empty: float = 0.0) -> Tensor:
        """[n] or [n, K] in sorted order, fp32 and contiguous; ``empty`` where there are none."""
        if values is None:
            return self.x.new_full((self.size,), empty)
        return values.to(torch.float32)[self.order].contiguous()

    def unsort(self, values: Tensor) -> Tensor:
        """What a kernel left in sorted order, in the order of the rows."""
        return torch.empty_like(values).index_copy_(0, self.order, values)

    def take_gradient(self, g: Tensor) -> None:
        """dL/dx from a kernel's [splits, pool, padded n, D]."""
        g = g.sum(0)[:, : self.size, : self.x.shape[1]].transpose(0, 1)
        self.grad = self.unsort(g).flatten(0, 1)


class Matrix:
    """The R×N matrix of oriented similarities that no kernel stores."""

    def __init__(self, rows: Tensor, cols: Tensor | None, row_labels: Tensor, col_labels: Tensor | None, view: str,
                 normalize: bool, pool: int = 1, selves: Tensor | None = None) -> None:  # fmt: skip
        self.symmetric, self.view = cols is None, view
        self.math = arithmetic(rows, cols)
        centre = sides.centre_of(rows, view, normalize)
        self.row = Side(rows, row_labels, normalize, self.math, view, 1, centre)
        other = row_labels if col_labels is None else col_labels
        self.col = self.row if cols is None else Side(cols, other, normalize, self.math, view, pool, centre)
        self.finite = self.row.finite & self.col.finite
        #: Is a row of a rectangular matrix one of its columns? Its place among the sorted ones, in the order of rows.
        self.has_selves = selves is not None
        self.selves = self.row.order if selves is None else self.places(selves)
        self.arch = table.architecture(rows.device)
        self.device = rows.device

    @classmethod
    def of(cls, a: Any) -> Self:
        """The matrix of a call of an op; metrics have no view, and most have no pools."""
        view, pool, selves = getattr(a, "view", "dot"), getattr(a, "pool_size", 1), getattr(a, "selves", None)
        return cls(a.rows, a.cols, a.row_labels, a.col_labels, view, a.normalize, pool, selves)

    @property
    def shape(self) -> tuple[int, int]:
        return self.row.size, self.col.size

    def ranges(self, own: Side, other: Side) -> tuple[Tensor, Tensor]:
        """[first, last) of every own row's positives among the other side's rows, self included."""
        first = torch.searchsorted(other.labels, own.labels, out_int32=True)
        return first, torch.searchsorted(other.labels, own.labels, out_int32=True, right=True)

    def places(self, selves: Tensor) -> Tensor:
        """Sorted rows' own columns among the sorted ones, -1 for none, from numbers of columns."""
        back = self.col.unsort(torch.arange(self.col.size, dtype=torch.int32, device=selves.device))
        return torch.where(selves < 0, -1, back[selves.clamp_min(0)])[self.row.order]

    def self_of(self, is_row: bool = True) -> int:
        """Where the kernels look for a row's own column: see :func:`.tile.without_selves`."""
        return (1 if is_row else 2) if self.has_selves else 0

    def tiles(self, kind: str) -> table.Tiles:
        return tiles_for(self.row.given, self.col.given, kind)

    def splits(self, programs: int, most: int) -> int:
        """Into how many parts the columns are split, so that few rows still fill the device."""
        return max(1, min(2 * self.arch.processors // max(programs, 1), most))

    def constants(self, tiles: table.Tiles) -> dict[str, Any]:
        """What every kernel is compiled for."""
        return {
            "D": self.row.width,
            "VIEW": self.view,
            "SYMMETRIC": self.symmetric,
            "BM": tiles.rows,
            "BN": tiles.cols,
            "BD": tiles.depth,
            "PRECISION": "ieee" if self.math == "ieee" else "tf32",
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }

    def poison(self, *values: Tensor) -> tuple[Tensor, ...]:
        """NaN in, NaN out: no comparison may hide a NaN or an infinity of the embeddings."""
        return tuple(torch.where(self.finite, v, torch.nan) for v in values)

    def gradients(self) -> tuple[Tensor, Tensor]:
        g = self.row.gradient()
        return g, g.new_empty(0) if self.symmetric else self.col.gradient()


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the current stream of the tensors' device, in a way that torch.compile sees.

    Only while somebody looks on: ``wrap_triton`` keeps the constants of every launch in a table of torch's, for ever.
    """
    seen = any(traced(t) for t in arguments if isinstance(t, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        (wrap_triton(kernel) if seen else kernel)[grid](*arguments, **constants)
