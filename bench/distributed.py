"""What a step of a sharded loss moves and holds on each rank, and how long it takes: ``python -m bench.distributed``.

Measured on real gloo ranks of this machine (peak memory of a process above its inputs, bytes that came to it), and from
the same formulas for more ranks than it has. ``--speed`` compares steps: the plain loss on two threads, wrapped on one
rank, and on two ranks of one thread each, in turns.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.data import make
from bench.memory import MIB, _give_back, _peak, _reset_peak, _status
from pydml import losses, metrics
from pydml.distributed import ShardedLoss
from pydml.distributed import retrieval_metrics as sharded_metrics
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


#: Losses whose steps are timed.
LOSSES: dict[str, Any] = {
    "Multi-Similarity, mined": lambda: losses.MultiSimilarityLoss(epsilon=0.1),
    "Multi-Similarity": losses.MultiSimilarityLoss,
    "Contrastive": losses.ContrastiveLoss,
    "FastAP": losses.FastAPLoss,
    "DRO-TopK": lambda: losses.DROTopKLoss(k=1024),
    "all triplets": losses.TripletMarginLoss,
    "hard triplets": lambda: losses.TripletMarginLoss(triplets="hard"),
    "semi-hard triplets": lambda: losses.TripletMarginLoss(triplets="semihard"),
    "Extreme Triplet": losses.ExtremeTripletLoss,
    "NCA": losses.NCALoss,
    "Margin": losses.MarginLoss,
    "recall@K": None,
}


def _step(name: str, module: Any, z: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds of one step; recall has no backward pass."""
    began = time.perf_counter()
    if LOSSES[name] is None:
        module(z, labels, (1, 10))
    else:
        module(z.detach().requires_grad_(), labels).backward()
    return time.perf_counter() - began


def _wrapped(name: str, mode: str) -> Any:
    made = LOSSES[name]
    return functools.partial(sharded_metrics, mode=mode) if made is None else ShardedLoss(made(), mode=mode)


def _ring(rank: int, ranks: int, store: str, name: str, rows: int, dim: int, steps: int, answer: Any, go: Any) -> None:
    """Steps of one rank, each begun together with those of the plain loss in turns."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    inputs = make(rows, dim, "trained")
    z, labels = (t.split(rows // ranks)[rank] for t in (inputs.z, inputs.labels))
    modules = {mode: _wrapped(name, mode) for mode in ("ring", "gather")}
    for _ in range(steps + 1):
        for mode, module in modules.items():
            go[rank].get()
            dist.barrier()
            seconds = _step(name, module, z, labels)
            if rank == 0:
                answer.put((mode, seconds))
    dist.destroy_process_group()


def speed(name: str, rows: int, dim: int, steps: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of the plain step on two threads, and ratios to it, wrapped: medians of steps in turns."""
    context = mp.get_context("spawn")
    answer, go = context.SimpleQueue(), [context.SimpleQueue() for _ in range(2)]
    torch.set_num_threads(2)
    inputs, made = make(rows, dim, "trained"), LOSSES[name]
    plain = metrics.retrieval_metrics if made is None else made()
    alone = {
        f"one rank, {mode}": functools.partial(sharded_metrics, mode=mode)
        if made is None
        else ShardedLoss(made(), mode=mode)
        for mode in ("ring", "gather")
    }
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = 2, str(Path(folder) / "store"), name, rows, dim, steps, answer, go
        ranks = mp.spawn(_ring, given, nprocs=2, join=False)
        for step in range(steps + 1):
            for key, module in {"plain": plain, **alone}.items():
                seconds = _step(name, module, inputs.z, inputs.labels)
                if step:
                    found.setdefault(key, []).append(seconds)
            for _ in range(2):
                for rank in go:
                    rank.put(None)
                mode, seconds = answer.get()
                if step:
                    found.setdefault(f"two ranks, {mode}", []).append(seconds)
        while not ranks.join():
            pass
    middle = {key: statistics.median(times) for key, times in found.items()}
    base = middle.pop("plain")
    return 1e3 * base, {key: value / base for key, value in middle.items()}


def speeds(rows: int, dim: int, steps: int, names: Sequence[str]) -> None:
    print(
        f"\n{rows} rows of {dim} numbers in fp32; ratios to the plain loss on two threads, medians of {steps} steps:\n"
    )
    columns = [f"{ranks}, {mode}" for ranks in ("one rank", "two ranks") for mode in ("ring", "gather")]
    table(["loss", "plain, ms", *columns])
    for name in names:
        base, ratios = speed(name, rows, dim, steps)
        print(f"| {name} | {base:.1f} | {' | '.join(f'{ratios[column]:.2f}' for column in columns)} |", flush=True)


def table(columns: Sequence[str]) -> None:
    print(f"| {' | '.join(columns)} |\n|{' ---: |' * len(columns)}")


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.distributed", description=__doc__)
    made.add_argument("--rows", type=int, default=2048, help="of each rank in the measurements")
    made.add_argument("--dim", type=int, default=512)
    made.add_argument("--ranks", type=int, default=4, help="measure 1 to so many")
    made.add_argument("--gpu-rows", type=int, default=1024, help="of each rank in the derived table")
    made.add_argument("--speed", action="store_true", help="time steps instead")
    made.add_argument("--batch", type=int, nargs="+", default=[2048, 4096], help="with --speed: rows of all ranks")
    made.add_argument("--steps", type=int, default=9, help="with --speed")
    made.add_argument("--loss", nargs="+", choices=LOSSES, default=list(LOSSES), help="with --speed: only these")
    args = made.parse_args(argv)
    if args.speed:
        for rows in args.batch:
            speeds(rows, 128, args.steps, args.loss)
        return 0
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
