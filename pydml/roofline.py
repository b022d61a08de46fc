"""How fast the GPU kernels should be, on paper: ``python -m pydml.roofline``.

Nothing here was measured. u is one B×B×d matrix product, 2B²d floating-point operations. A launch takes as long as the
slowest of three: its matrix products at the tensor cores' peak, its other instructions at the ordinary cores' peak, its
bytes at the memory's bandwidth. Whoever has such a GPU can hold `pydml selftest` against it; real kernels reach half to
three quarters of such a bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Peaks from the vendor's data sheets, dense."""

    name: str
    matrix: float  # bf16 operations/s of the tensor cores
    vector: float  # fp32 instructions/s of the ordinary cores (a fused multiply-add is one)
    bandwidth: float  # bytes/s
    processors: int
    architecture: str
    chunk: int  # columns of dL/dx that a program of the pair or histogram engine owns (triton_kernels/table.py)
    triplet: int  # and one of the triplet engine


GPUS = (
    GPU("A100", 312e12, 9.7e12, 2.0e12, 108, "sm_80", 256, 128),
    GPU("H100", 989e12, 33.5e12, 3.35e12, 132, "sm_90", 256, 256),
    GPU("B200", 2250e12, 37.5e12, 8.0e12, 148, "sm_100", 256, 256),
)
SIZES = (4096, 32768, 1 << 20)
WIDTH = 512
#: Rows that a program owns (triton_kernels/table.py).
ROWS = 64


@dataclass(frozen=True)
class Cost:
    """What one step of one method costs."""

    name: str
    products: float  # in u
    instructions: float  # per pair: masks, exponentials, sums; counted by hand, to a factor of about 1.5
    passes: float  # how often something of size B×B goes to or from memory, in fp32
    streams: float  # how often every program reads all embeddings

    def flops(self, batch: int, width: int) -> float:
        return self.products * 2.0 * batch * batch * width

    def bytes(self, batch: int, width: int, gpu: GPU) -> float:
        """Embeddings come from memory once for each wave of programs, from the cache within it."""
        waves = max(1.0, batch / ROWS / gpu.processors)
        return self.streams * waves * batch * width * 2.0 + self.passes * 4.0 * batch * batch

    def intensity(self, batch: int, width: int, gpu: GPU) -> float:
        """Operations per byte."""
        return self.flops(batch, width) / self.bytes(batch, width, gpu)

    def seconds(self, batch: int, width: int, gpu: GPU) -> float:
        return max(
            self.flops(batch, width) / gpu.matrix,
            self.instructions * batch * batch / gpu.vector,
            self.bytes(batch, width, gpu) / gpu.bandwidth,
        )


def costs(width: int, gpu: GPU) -> tuple[Cost, ...]:
    """Forward and backward of every engine, and of the ways that others go."""
    chunks, narrow = -(-width // gpu.chunk), -(-width // gpu.triplet)
    return (
        Cost("pair, forward", 1, 20, 0, 1),
        Cost("pair, backward", chunks + 1, 30 * chunks, 0, chunks + 1),
        Cost("pair, both", chunks + 2, 20 + 30 * chunks, 0, chunks + 2),
        Cost(
            "pair, both, 95 % of the tiles dead", 1 + 0.05 * (chunks + 1), 20 + 1.5 * chunks, 0, 1 + 0.05 * (chunks + 1)
        ),
        Cost("histogram (11 nodes), both", chunks + 2, 60 + 25 * chunks, 0, chunks + 2),
        Cost("triplet (3 positives a row), both", narrow + 4, 60 + 40 * narrow, 0, narrow + 4),
        Cost("select: extremes", 1, 15, 0, 1),
        Cost("select: top-K", 1, 15, 0, 1),
        Cost("rank (3 positives a row)", 1, 25, 0, 1),
        Cost("Inf-CL, both", 5, 50, 0, 5),
        Cost("Cut Cross-Entropy, both", 4, 50, 0, 4),
        Cost("chunked cuBLAS and PyTorch, both", 3, 30, 10, 3),
    )


def table(width: int = WIDTH, sizes: Sequence[int] = SIZES) -> list[str]:
    """The predictions as a Markdown table."""
    head = [f"{gpu.name}, B = {spaced(size)}" for gpu in GPUS for size in sizes]
    lines = ["| | u | FLOPs per byte (H100, B = 32 768) | " + " | ".join(head) + " |", "| --- " * (3 + len(head)) + "|"]
    for row in zip(*(costs(width, gpu) for gpu in GPUS), strict=True):
        times = [cost.seconds(size, width, gpu) for cost, gpu in zip(row, GPUS, strict=True) for size in sizes]
        work = " / ".join(dict.fromkeys(f"{cost.products:.3g}" for cost in row))
        cells = [work, spaced(round(row[1].intensity(32768, width, GPUS[1]))), *(readable(t) for t in times)]
        lines.append(f"| {row[0].name} | " + " | ".join(cells) + " |")
    return lines


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def readable(seconds: float) -> str:
    """
    >>> readable(0.00321), readable(0.59)
    ('3.2 ms', '590 ms')
    """
    unit, scale = next((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 0.0)) if seconds >= scale)
    value = seconds / (scale or 1e-6)
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print :func:`table`."""
    parser = argparse.ArgumentParser(prog="python -m pydml.roofline", description="Predicted times of the GPU kernels.")
    parser.add_argument("--width", type=int, default=WIDTH, help="d, the width of the embeddings")
    parser.add_argument("--batch", type=int, nargs="+", default=SIZES, help="B")
    options = parser.parse_args(argv)
    print("\n".join(table(options.width, options.batch)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
