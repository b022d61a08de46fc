"""The demo: ``make demo``, or ``python -m pydml.demo``. Glyphs, a training with a large batch, a report.

A network that has seen half of the characters in matplotlib's fonts must find other typefaces of the other half.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import pydml
from pydml import metrics
from pydml.backends import resolve
from pydml.data import open as open_data
from pydml.losses.multi_similarity import MultiSimilarityLoss
from pydml.train import Config, Trainer, logs
from pydml.train.transforms import moved


def make_glyphs(folder: Path) -> None:
    """Draw the default glyphs, move each picture once by a small random map, and write them as a packed set.

    Fonts draw every character in the same place, where pixels alone find half of the neighbours.
    """
    if folder.exists():
        return
    from pydml.data.glyph_set import glyphs
    from pydml.data.writers import save

    drawn = glyphs()
    folder.parent.mkdir(parents=True, exist_ok=True)
    save(dataclasses.replace(drawn, train=moved(drawn.train, 1), test=moved(drawn.test, 2)), folder)


def plain_multi_similarity(z: Tensor, labels: Tensor) -> Tensor:
    """The demo's loss (Wang et al. 2019, eq. 11-15) as one would write it: on the whole B×B matrix."""
    x = nn.functional.normalize(z)
    s = x @ x.T
    same = labels[:, None] == labels[None, :]
    positive, negative = same & ~torch.eye(len(z), dtype=torch.bool), ~same
    hardest_positive = s.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    hardest_negative = s.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    positive = positive & (s < hardest_negative + 0.1)
    negative = negative & (s > hardest_positive - 0.1)
    pull = (-2 * (s - 0.5)).masked_fill(~positive, -torch.inf).logsumexp(1)
    push = (50 * (s - 0.5)).masked_fill(~negative, -torch.inf).logsumexp(1)
    return (nn.functional.softplus(pull) / 2 + nn.functional.softplus(push) / 50).mean()


def race(embeddings: Tensor, labels: Tensor, repeats: int) -> tuple[float, float]:
    """Milliseconds of the loss' forward and backward pass, ours and plain PyTorch's in turn, medians."""
    z = embeddings.clone().requires_grad_()
    runners: list[Callable[[Tensor, Tensor], Tensor]] = [MultiSimilarityLoss(epsilon=0.1), plain_multi_similarity]
    times: list[list[float]] = [[], []]
    values = [0.0, 0.0]
    for repeat in range(repeats + 1):  # the first warms up
        for i, loss_fn in enumerate(runners):
            z.grad = None
            began = time.perf_counter()
            loss = loss_fn(z, labels)
            loss.backward()
            if repeat:
                times[i].append(1e3 * (time.perf_counter() - began))
            values[i] = loss.item()
    if abs(values[0] - values[1]) > 1e-4 * abs(values[1]):
        raise AssertionError(f"the two losses differ: {values}")
    return median(times[0]), median(times[1])


def show_shares(trainer: Trainer, batch: int, repeats: int) -> None:
    """The loss at growing batches beside what the rest of a step would take there, measured in this run."""
    steps = [r for r in logs.read(trainer.out) if r["kind"] == "step"][2:]  # the first ones warm up
    rest = median((r["seconds"] - r["loss_seconds"]) / batch for r in steps)  # seconds an image, without the loss
    measured = 100 * median(r["loss_share"] for r in steps)
    print(f"In this training, at a batch of {batch}, the loss op took {measured:.1f} % of a step (median).")
    z, labels = trainer.embed(trainer.train_set), trainer.train_set.labels
    order = labels.argsort(stable=True)  # whole classes
    name = resolve("auto", z.device)
    print(f"\nThe loss alone, forward and backward, trained embeddings of {z.shape[1]} numbers, backend {name}:\n")
    print("  batch    pydml     plain PyTorch   speed-up   share of a step: pydml   plain")
    for size in (batch, 4 * batch, 8 * batch):
        chosen = order[: min(size, len(order))]
        ours, plain = race(z[chosen], labels[chosen], max(1, repeats * batch // size))
        step = 1e3 * rest * len(chosen)
        shares = [100 * ms / (step + ms) for ms in (ours, plain)]
        print(
            f"  {len(chosen):>5}  {ours:>7.1f} ms  {plain:>9.1f} ms  {plain / ours:>9.1f}x"
            f"  {shares[0]:>21.1f} %  {shares[1]:>5.1f} %"
        )
    print(
        "\nThis network costs so much for an image that at the smallest batch the loss hardly counts, dense or not."
        "\nThe dense loss grows with the square of the batch, in time and in memory: that is where it matters."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="python -m pydml.demo", description="Train on glyphs and write a report.")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder to write; default build/demo")
    parser.add_argument("--images", type=int, default=98304, help="images seen in training; default 98304")
    parser.add_argument("--batch", type=int, default=1024, help="images in a batch; default 1024")
    parser.add_argument("--repeats", type=int, default=8, help="timings of the loss; default 8")
    options = parser.parse_args(argv)
    try:
        import matplotlib  # noqa: F401
        import PIL  # noqa: F401
    except ImportError as error:
        print(f"pydml.demo: needs {error.name}: pip install 'pydml-kernels[train]'", file=sys.stderr)
        return 1
    began = time.perf_counter()
    run = options.out / "run"
    shutil.rmtree(run, ignore_errors=True)
    print(f"pydml {pydml.__version__}: characters of matplotlib's fonts, each picture moved a little", flush=True)
    make_glyphs(options.out / "glyphs")
    splits = open_data(options.out / "glyphs")
    print(
        f"  train  {len(splits.train):>6} images of {len(splits.train.classes)} characters, 1 in 10 of them to validate"
    )
    print(f"  test   {len(splits.test):>6} images of {len(splits.test.classes)} others", flush=True)

    epochs = 4
    config = Config(
        data=str(options.out / "glyphs"), out=str(run), preset="ms/thesis", batch_size=options.batch, m_per_class=4,
        micro_batch=128, epochs=epochs, images_per_epoch=max(options.images // epochs, options.batch), lr=3e-3,
        warmup=0.2, ks=(1, 10),
    )  # fmt: skip
    trainer = Trainer(config, splits)
    pixels = splits.test.pixels().flatten(1).float()
    before = {
        "raw pixels": metrics.retrieval_metrics(pixels, splits.test.labels, config.ks),
        "untrained network": trainer.evaluate(splits.test),
    }
    print(
        f"\nTraining MultiSimilarityLoss(epsilon=0.1), batches of {options.batch} through the network 128 at a time "
        "(gradient caching).\nValidation after every epoch:\n",
        flush=True,
    )
    results = trainer.fit()
    print("\nOn the test characters, none of which was seen in training:\n")
    rows: dict[str, Any] = {**before, "trained network": results["test"]}
    for name, found in rows.items():
        print(f"  {name:<18}  {logs.shown(found, config.ks, len(splits.test))}")
    gain = results["test"]["recall@1"] / max(before["untrained network"]["recall@1"], 1e-9)
    print(f"\nRecall@1 is {gain:.1f} times that of the untrained network.\n", flush=True)
    show_shares(trainer, options.batch, options.repeats)
    from pydml.report import write

    page = write([run], options.out / "report")
    print(f"\nReport: {page}   ({time.perf_counter() - began:.0f} s in all)")
    print("Next: pydml train --help, docs/training.md (your own data), docs/losses.md, make bench (real measurements)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
