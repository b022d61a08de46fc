"""Batches for the tests of selecting and ranking Triton engines, on which all backends have to take the same choice.

Embeddings are small whole numbers: their products and squared distances are exact in fp32, bf16 and fp16 operands
alike, so equals are equal bits on every backend, and ties abound.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import generator
from torch import Tensor

import pydml
from pydml.backends import kernel, run_kernel
from pydml.declared import op

WHY_NOT = pydml.backends()["triton"]
needs_triton = pytest.mark.skipif(WHY_NOT is not None, reason=f"triton: {WHY_NOT}")
if WHY_NOT is None:
    import honest

    honest.install()

REGIMES = ("random", "clusters", "duplicates", "collapsed", "one class", "no positives")
#: (rows, columns or None for a symmetric matrix, width) around the interpreter's tiles of 32.
SHAPES = ((1, None, 5), (31, None, 70), (33, None, 16), (70, None, 33), (33, 70, 31), (70, 1, 33), (1, 70, 7))

Matrix = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def lattice(regime: str, rows: int, cols: int | None, dim: int, dtype: torch.dtype = torch.float32) -> Matrix:
    """rows, cols, row_labels, col_labels: the first arguments of the ops."""
    g = generator(REGIMES.index(regime), rows, cols or 0, dim)
    classes = {"one class": 1}.get(regime, 7)

    def whole(n: int, most: int = 2) -> Tensor:
        return torch.randint(-most, most + 1, (n, dim), generator=g)

    def side(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (n,), generator=g)
        if regime == "clusters":
            z = centres[labels] + whole(n, 1)
        elif regime == "duplicates":
            z = whole(4)[torch.randint(4, (n,), generator=g)]
        elif regime == "collapsed":
            z = centres[:1].expand(n, dim)
        else:
            z = whole(n)
        return z.to(dtype), labels

    centres = whole(classes)
    (x, row_labels), other = side(rows), None if cols is None else side(cols)
    if regime == "no positives":
        row_labels = torch.randperm(rows, generator=g)
        other = None if other is None else (other[0], rows + torch.randperm(len(other[0]), generator=g))
    return (x, None, row_labels, None) if other is None else (x, other[0], row_labels, other[1])


def triton(name: str, *values: Any) -> Any:
    """Run an op by its arguments, without its checks, on Triton or on what that yields to."""
    return run_kernel(op(name).read(values), "triton")


def tiled(name: str, *values: Any) -> Any:
    """The same on the tiled engine."""
    return kernel("tiled", name)(op(name).read(values))


def assert_equal(got: Any, want: Any) -> None:
    """Equal tensors of equal types, all of them."""
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), f"{int((mine != theirs).sum())} of {mine.numel()} differ"
