"""Make Triton's interpreter honest: bf16 and TF32 round as on a GPU, and memory is watched.

As it comes (3.7.1), the interpreter holds bf16 as raw bits, so that products and sums of it are garbage; it truncates
fp32 to bf16 where hardware rounds; it does not round TF32; its products are numpy's, which on some CPUs give equal
columns different bits, where a GPU adds every element's products in one order; its larger of NaN and x is NaN, where a
GPU's is x unless told otherwise; and reads or writes outside of a tensor pass silently. Here all but the last are
mended, and :class:`Memory` raises on that one, and on what one program writes and another touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded).astype(np.uint16)


def cut_tf32(x: np.ndarray) -> np.ndarray:
    """10 bits of mantissa: a tensor core does not look at the others, and Triton does not round them. NaN stays."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    finite = (bits & 0x7F800000) != 0x7F800000
    return np.where(finite, bits & np.uint32(0xFFFFE000), bits).astype(np.uint32).view(np.float32)


def install() -> None:
    """Mend the arithmetic, once, for the whole process."""
    if getattr(InterpreterBuilder, "honest", False):
        return
    InterpreterBuilder.honest = True
    cast_impl = InterpreterBuilder.cast_impl
    binary_op, unary_op = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op

    def operand(handle: TensorHandle, precision: Any) -> np.ndarray:
        """As the product reads it, in fp64: what is rounded from there has the same bits in every column."""
        data = handle.data
        if handle.dtype.scalar == tl.bfloat16:
            data = bf16_to_fp32(data)
        name = str(precision).upper()
        if handle.dtype.scalar == tl.float32 and "TF32" in name and "X3" not in name:
            data = cut_tf32(data)
        return data.astype(np.float64)

    def dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, *rest: Any) -> Any:
        product = np.matmul(operand(a, precision), operand(b, precision)).astype(d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    def cast(self: Any, source: TensorHandle, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if before == tl.float32 and after == tl.bfloat16:
            return TensorHandle(fp32_to_bf16(source.data), after)
        if before == tl.bfloat16 and after != tl.float32:
            return cast(self, TensorHandle(bf16_to_fp32(source.data), tl.float32), target)
        if after == tl.bfloat16 and before != tl.bfloat16:
            return cast(self, cast_impl(self, source, tl.float32), target)
        return cast_impl(self, source, target)

    def no_bf16(*handles: TensorHandle) -> None:
        if any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
            raise TypeError("bf16 arithmetic is done on raw bits here: cast to fp32 first")

    def binary(self: Any, a: TensorHandle, b: TensorHandle, op: Any) -> Any:
        no_bf16(a, b)
        return binary_op(self, a, b, op)

    def unary(self: Any, a: TensorHandle, op: Any) -> Any:
        no_bf16(a)
        return unary_op(self, a, op)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot, cast
    InterpreterBuilder.binary_op, InterpreterBuilder.unary_op = binary, unary
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


class MemoryFault(AssertionError):
    """A kernel touched what it must not."""


class Region:
    """One tensor of a launch, and for each element which program has written and read it."""

    def __init__(self, tensor: Any) -> None:
        extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.base, self.item = tensor.data_ptr(), tensor.element_size()
        self.end = self.base + extent * self.item
        self.stored, self.added, self.read = (np.zeros(extent, np.int64) for _ in range(3))


class Memory:
    """Watches the loads, stores and atomics of one launch. Programs are numbered from 1; -1 stands for several."""

    def __init__(self, tensors: list[Any]) -> None:
        self.regions = [Region(t) for t in tensors]

    def check(self, kind: str, program: int, pointers: np.ndarray, mask: np.ndarray | None) -> None:
        at = np.atleast_1d(pointers).astype(np.int64)
        if mask is not None:
            at = at[np.broadcast_to(np.atleast_1d(mask).astype(bool), at.shape)]
        at = at.ravel()
        known = np.zeros(at.shape, bool)
        for region in self.regions:
            inside = (at >= region.base) & (at < region.end)
            if inside.any():
                known |= inside
                self.touch(kind, program, region, (at[inside] - region.base) // region.item)
        if not known.all():
            raise MemoryFault(f"{kind}: {np.count_nonzero(~known)} lanes of program {program} are out of bounds")

    def touch(self, kind: str, program: int, region: Region, at: np.ndarray) -> None:
        def foreign(marks: np.ndarray) -> bool:
            return bool(((marks[at] != 0) & (marks[at] != program)).any())

        if kind == "store":
            if len(np.unique(at)) != len(at):
                raise MemoryFault(f"store: program {program} writes one address twice at once")
            if foreign(region.stored) or foreign(region.added):
                raise MemoryFault(f"race: program {program} stores where another has written")
            if foreign(region.read):
                raise MemoryFault(f"race: program {program} stores what another has read")
            region.stored[at] = program
        elif kind == "atomic":
            if foreign(region.stored) or foreign(region.read):
                raise MemoryFault(f"race: program {program} adds atomically to what another has stored or read")
            region.added[at] = np.where((region.added[at] == 0) | (region.added[at] == program), program, -1)
        else:
            if foreign(region.stored) or foreign(region.added):
                raise MemoryFault(f"race: program {program} reads what another has written")
            region.read[at] = np.where((region.read[at] == 0) | (region.read[at] == program), program, -1)


@contextmanager
def watched() -> Iterator[None]:
    """Raise :class:`MemoryFault` on any launch in the block that leaves its tensors or races with itself."""
    memory: list[Memory] = []
    init = GridExecutor._init_args_hst

    def init_args(self: Any, *given: Any) -> Any:
        arguments, keywords = init(self, *given)
        tensors = [getattr(t, "base", t) for t in [*arguments, *keywords.values()]]
        memory[:] = [Memory([t for t in tensors if hasattr(t, "data_ptr") and t.numel()])]
        return arguments, keywords

    def watch(name: str, kind: str, pointer: int, mask: int) -> Any:
        plain = getattr(InterpreterBuilder, name)

        def call(self: Any, *given: Any) -> Any:
            x, y, z = self.grid_idx
            program = 1 + x + self.grid_dim[0] * (y + self.grid_dim[1] * z)
            masked = given[mask] if len(given) > mask else None
            memory[0].check(kind, program, given[pointer].data, None if masked is None else masked.data)
            return plain(self, *given)

        return mock.patch.object(InterpreterBuilder, name, call)

    with (
        mock.patch.object(GridExecutor, "_init_args_hst", init_args),
        watch("create_masked_load", "load", 0, 1),
        watch("create_masked_store", "store", 0, 2),
        watch("create_atomic_rmw", "atomic", 1, 3),
        watch("create_atomic_cas", "atomic", 0, 99),
    ):
        yield
