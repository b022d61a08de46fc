"""What a step of a sharded loss moves and holds on each rank: ``python -m bench.distributed``.

Measured on real gloo ranks of this machine (peak memory of a process above its inputs, bytes that came to it), and from
the same formulas for more ranks than it has.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.data import make
from bench.memory import MIB, _give_back, _peak, _reset_peak, _status
from pydml.distributed import ShardedLoss
from pydml.losses import MultiSimilarityLoss

STATISTICS = 2  # of a row, for Multi-Similarity
BYTES = 4  # of a number in fp32


def moved(mode: str, ranks: int, rows: int, dim: int) -> int:
    """Bytes that come to a rank in one step, forward and backward."""
    block, few = rows * dim * BYTES, rows * STATISTICS * BYTES
    small = (ranks - 1) * (rows * 8 + few)  # labels and row statistics of all
    if mode == "gather":
        return small + 2 * (ranks - 1) * block  # columns, and parts of this rank's gradient
    sent_home = (ranks - 1) // 2 * few  # statistics that others have computed for this rank
    return small + sent_home + 2 * (ranks - 1) * few + 3 * (ranks // 2) * block  # columns twice, gradients once


def held(mode: str, ranks: int, rows: int, dim: int) -> int:
    """Bytes of the larger tensors that a rank holds at once beside its embeddings, in the backward pass.

    An engine holds normalised copies of rows and columns, gradients of these copies, and gradients to return.
    """
    block = rows * dim * BYTES
    few = ranks * rows * (8 + 4 * STATISTICS * BYTES)  # labels, statistics and their gradients, of all
    if mode == "gather":
        engine = 3 * ranks * block
        return few + engine + 3 * ranks * block  # all columns, their gradients, and the parts that come back
    engine = (6 if ranks > 1 else 3) * block
    # two blocks, two gradients on their way, those of both ways of a block, this rank's, its sum, the next addend
    return few + engine + (9 if ranks > 2 else 5) * block


def _rank(rank: int, ranks: int, store: str, mode: str, rows: int, dim: int, answer: mp.SimpleQueue) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    module = ShardedLoss(MultiSimilarityLoss(), mode=mode)
    tiny = make(64, dim, "trained", seed=rank)
    module(tiny.z.requires_grad_(), tiny.labels).backward()  # connections, thread pools and libraries
    inputs = make(rows, dim, "trained", seed=rank)
    z = inputs.z.requires_grad_()
    _give_back()
    dist.barrier()
    before, received = _status("VmRSS"), module.group.received
    _reset_peak()
    module(z, inputs.labels).backward()
    answer.put((_peak() - before, module.group.received - received))
    dist.barrier()
    dist.destroy_process_group()


def measure(mode: str, ranks: int, rows: int, dim: int) -> tuple[float, int]:
    """The largest peak of a rank in MiB, and the bytes that came to the rank that got most."""
    os.environ |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the process
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, str(Path(folder) / "store"), mode, rows, dim, answers), nprocs=ranks)
        found = [answers.get() for _ in range(ranks)]
    return max(peak for peak, _ in found) / MIB, max(got for _, got in found)


def table(columns: Sequence[str]) -> None:
    print(f"| {' | '.join(columns)} |\n|{' ---: |' * len(columns)}")


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.distributed", description=__doc__)
    made.add_argument("--rows", type=int, default=2048, help="of each rank in the measurements")
    made.add_argument("--dim", type=int, default=512)
    made.add_argument("--ranks", type=int, default=4, help="measure 1 to so many")
    made.add_argument("--gpu-rows", type=int, default=1024, help="of each rank in the derived table")
    args = made.parse_args(argv)
    print(f"Measured, Multi-Similarity, {args.rows} rows of {args.dim} numbers in fp32 a rank; MiB of one rank:\n")
    table(["ranks", "mode", "came in", "by the formula", "peak", "by the formula"])
    for ranks in range(1, args.ranks + 1):
        for mode in ("ring", "gather"):
            peak, got = measure(mode, ranks, args.rows, args.dim)
            shape = mode, ranks, args.rows, args.dim
            numbers = got / MIB, moved(*shape) / MIB, peak, held(*shape) / MIB
            print(f"| {ranks} | {mode} | {' | '.join(f'{x:.1f}' for x in numbers)} |", flush=True)
    print(f"\nDerived, {args.gpu_rows} rows of {args.dim} numbers in fp32 a rank; MiB of one rank and step:\n")
    table(["ranks", "batch", "ring: comes in", "holds", "gather: comes in", "holds"])
    for ranks in (8, 16, 32, 64, 128, 256, 512, 1024):
        cells = [
            f"{formula(mode, ranks, args.gpu_rows, args.dim) / MIB:,.0f}"
            for mode in ("ring", "gather")
            for formula in (moved, held)
        ]
        print(f"| {ranks} | {ranks * args.gpu_rows:,} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
