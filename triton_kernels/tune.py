"""Find better tile sizes for the GPU at hand: ``python -m pydml.triton_kernels.tune tiles.json``.

Times Multi-Similarity with mining, forward and backward, for each candidate and writes the best of every arithmetic and
width to a file; ``PYDML_TILES=tiles.json`` then makes :mod:`.table` use it. Nothing is tuned unless asked for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import torch

from pydml.losses import MultiSimilarityLoss
from pydml.triton_kernels import table
from pydml.triton_kernels.matrix import arithmetic


def candidates(entry: table.Tiles, backward: bool, width: int) -> Iterator[table.Tiles]:
    """The entry itself, and its neighbours. Forward tiles stay multiples of backward ones, whose flags they write."""
    yield entry
    for cols in (32, 64) if backward else (64, 128):
        for warps in (4, 8):
            for stages in (2, 3):
                for chunk in sorted({min(width, c) for c in (64, 128, 256)}) if backward else (entry.chunk,):
                    yield replace(entry, cols=cols, warps=warps, stages=stages, chunk=chunk)


def seconds(z: torch.Tensor, labels: torch.Tensor, repeats: int) -> float:
    """The median time of a step."""
    loss_fn = MultiSimilarityLoss(epsilon=0.1)

    def step() -> None:
        leaf = z.detach().requires_grad_()
        loss_fn(leaf, labels, backend="triton").backward()
        if z.device.type == "cuda":
            torch.cuda.synchronize(z.device)

    times = []
    for _ in range(repeats + 1):  # the first one compiles
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def tune(device: torch.device, batch: int, width: int, dtype: torch.dtype, repeats: int) -> dict[str, dict[str, int]]:
    """The best entries for one dtype and width, by key; forward first, then backward with that."""
    z = torch.randn(batch, width, device=device).to(dtype)
    labels = torch.arange(batch, device=device) // 4
    arch, math, padded = table.architecture(device).name, arithmetic(z), table.padded(width)
    best = {kind: table.tiles(arch, math, padded, kind) for kind in ("forward", "backward")}
    for kind in best:
        timed = []
        for tiles in dict.fromkeys(candidates(best[kind], kind == "backward", padded)):
            chosen = {**best, kind: tiles}
            with mock.patch.object(table, "tiles", lambda a, m, w, k, chosen=chosen: chosen[k]):
                try:
                    timed.append((seconds(z, labels, repeats), tiles))
                except Exception as error:  # too much shared memory, say: not a candidate
                    print(f"{tiles}: {type(error).__name__}")
        best[kind] = min(timed, key=lambda pair: pair[0])[1]
        print(f"{table.key(arch, math, padded, kind)}: {best[kind]}, {min(timed)[0] * 1e3:.2f} ms a step")
    return {table.key(arch, math, padded, kind): asdict(tiles) for kind, tiles in best.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pydml.triton_kernels.tune", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where to write the entries; those that are there already stay")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--widths", type=int, nargs="+", default=(128, 256, 512))
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    entries = json.loads(options.file.read_text()) if options.file.exists() else {}
    for name in options.dtypes:
        for width in options.widths:
            entries |= tune(options.device, options.batch, width, getattr(torch, name), options.repeats)
            options.file.write_text(json.dumps(entries, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
