"""How much a cross-batch memory costs beside its matrix products: ``python -m bench.xbm``.

A step of a loss of B embeddings against M in the memory needs S = X·Mᵀ forward, S again and W·M backward: the bare
products are those three, each into a matrix of its own, with nothing else done. Step and products are timed in turns;
the same step by the tiled engine, which is plain PyTorch, is timed a few times beside them. Prints the table of
docs/distributed.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from bench.data import make
from pydml.losses import LOSSES
from pydml.memory import CrossBatchMemory

#: Embeddings of a class in the memory, as in SOP (11 318 classes) with 100 000 entries.
ITEMS = 9
#: Name in the table -> loss and arguments: XBM's own loss, PML's version of it, a loss whose weights are never exactly
#: 0, the same with mining, and one that holds negatives against positives.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Contrastive on cosines": ("contrastive", {"distance": "cosine", "pos_margin": 1, "neg_margin": 0.5}),
    "Contrastive": ("contrastive", {}),
    "Multi-Similarity": ("ms", {}),
    "Multi-Similarity, mined": ("ms", {"epsilon": 0.1}),
    "all triplets": ("triplet", {"margin": 0.1}),
}
#: The tiled engine is measured at most so often: it takes seconds.
FEW = 3


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(case: str, batch: int, memory: int, dim: int, repeats: int) -> dict[str, float]:
    """Medians in seconds of one step, of the three products, and of one step by the tiled engine."""
    name, arguments = CASES[case]
    module = CrossBatchMemory(LOSSES[name](**arguments), dim, memory)
    inputs = make(memory, dim, "trained", items=ITEMS)
    z, labels = inputs.z, inputs.labels
    module.embedding_memory.copy_(z)
    module.label_memory.copy_(labels)
    module.has_been_filled = True
    x, y = z[:batch].clone().requires_grad_(), labels[:batch]
    w = torch.empty(batch, memory)

    def step(backend: str) -> None:
        x.grad = None
        module(x, y, backend=backend).backward()

    def products() -> None:
        rows = x.detach()
        torch.mm(rows, z.T, out=w)
        torch.mm(rows, z.T, out=w)
        torch.mm(w, z)

    calls = {"step": lambda: step("auto"), "products": products, "tiled": lambda: step("tiled")}
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {kind: [] for kind in calls}
    for turn in range(repeats):
        for kind, call in calls.items():
            if kind != "tiled" or turn < FEW:
                samples[kind].append(seconds(call))
    return {kind: median(times) for kind, times in samples.items()}


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.xbm", description=__doc__)
    made.add_argument("--batch", type=int, default=512)
    made.add_argument("--memory", type=int, default=100_000)
    made.add_argument("--dim", type=int, default=128)
    made.add_argument("--repeats", type=int, default=15)
    made.add_argument("--threads", type=int, default=2)
    args = made.parse_args(argv)
    torch.set_num_threads(args.threads)
    print(f"B={args.batch}, memory {args.memory}, d={args.dim}, {args.threads} threads, medians of {args.repeats}\n")
    print("| loss | step, ms | three products, ms | ratio | by the tiled engine, ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for case in CASES:
        took = measure(case, args.batch, args.memory, args.dim, args.repeats)
        step, products, tiled = (took[kind] for kind in ("step", "products", "tiled"))
        print(
            f"| {case} | {1e3 * step:.0f} | {1e3 * products:.0f} | {step / products:.2f} | {1e3 * tiled:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
