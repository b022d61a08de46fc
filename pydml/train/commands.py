"""``pydml train``, ``pydml eval`` and ``pydml embed``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pydml.train import transforms
from pydml.train.checkpoint import CheckpointError, write_atomically
from pydml.train.config import Config, add_options, read_settings
from pydml.train.evaluate import embed as embed_set
from pydml.train.evaluate import evaluate
from pydml.train.logs import shown
from pydml.train.setup import load_model, open_data
from pydml.train.trainer import Interrupted, Trainer, TrainingError

ERRORS = (ValueError, TypeError, OSError, ImportError, CheckpointError, TrainingError)


def _run(name: str, work: Callable[[], int]) -> int:
    """Errors of the user's making are one line, not a traceback."""
    try:
        return work()
    except ERRORS as error:
        print(f"pydml {name}: {error}", file=sys.stderr)
        return 1


def train(argv: Sequence[str]) -> int:
    """Train a network, evaluate it every epoch, write checkpoints and logs."""
    parser = argparse.ArgumentParser(
        prog="pydml train",
        description="Train a retrieval model: pydml train --data DIR --preset ms/paper --batch-size 4096 "
        "--micro-batch 128. On several GPUs: torchrun --nproc-per-node 8 -m pydml train …",
    )
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML or YAML file; options override them")
    parser.add_argument("--resume", metavar="RUN", help="go on with the run of this directory")
    add_options(parser)
    given = vars(parser.parse_args(argv))
    file, resume = given.pop("config"), given.pop("resume")

    def work() -> int:
        if resume is not None:
            if file is not None:
                raise ValueError("config: got a file beside --resume; a resumed run keeps its settings")
            trainer = Trainer.resume(resume, **given)
        else:
            settings = {} if file is None else read_settings(file)
            trainer = Trainer(Config.from_dict({**settings, **given}, "--config" if file is None else file))
        try:
            trainer.fit()
        except Interrupted:
            return 130
        return 0

    return _run("train", work)


def _checkpoint_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"pydml {name}", description=description)
    parser.add_argument("checkpoint", help="best.pt or last.pt of a run, or the run's directory (its best.pt)")
    parser.add_argument("--data", metavar="DIR", help="data set; default: the one it was trained on")
    parser.add_argument("--data-format", metavar="TEXT", help="its format; default: found out from its files")
    parser.add_argument(
        "--split", choices=("train", "val", "test", "gallery"), default="test", help="which images; default test"
    )
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="images at once; default 256")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load images")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, …")
    return parser


def _open(options: argparse.Namespace) -> tuple[torch.nn.Module, Config, Any, Any, Any]:
    """Network, settings, the chosen images, the gallery they are looked up in (or None), and the transform."""
    from pydml.data import split_classes

    path = Path(options.checkpoint)
    path = path / "best.pt" if path.is_dir() else path
    moved: dict[str, Any] = {"data": options.data} if options.data else {}
    if options.data:
        moved["data_format"] = options.data_format
    model, config = load_model(path)
    config = dataclasses.replace(config, **moved)
    splits = open_data(config)
    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device
    data: Any = {"test": splits.test, "gallery": splits.gallery}.get(options.split, splits.train)
    if options.split in ("train", "val") and config.val_fraction:
        data = split_classes(splits.train, config.val_fraction, config.val_seed)[options.split == "val"]
    if data is None or (options.split == "val" and not config.val_fraction):
        raise ValueError(f"split: got {options.split!r}, which this run or data set does not have")
    _, transform = transforms.build(config.transform, data, config.image_size)
    gallery = splits.gallery if options.split == "test" else None
    return model.to("cpu" if device == "auto" else device), config, data, gallery, transform


def evaluate_command(argv: Sequence[str]) -> int:
    """Recall@K, MAP@R and R-precision of a checkpoint."""
    parser = _checkpoint_parser("eval", "Recall@K, MAP@R and R-precision of a checkpoint.")
    parser.add_argument("--ks", type=int, nargs="+", metavar="K", help="the K of Recall@K; default: the run's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)

    def work() -> int:
        model, config, data, gallery, transform = _open(options)
        ks = tuple(options.ks or config.ks)
        try:
            found = evaluate(
                model, data, gallery, transform, ks=ks, batch=options.batch, workers=options.workers, amp=config.amp
            )
        except RuntimeError as error:
            raise TrainingError(str(error)) from error
        line = shown(found, ks, len(data if gallery is None else gallery))
        print(json.dumps(found) if options.json else f"{options.split}: {len(data)} images  {line}")
        return 0

    return _run("eval", work)


def embed(argv: Sequence[str]) -> int:
    """Write the embeddings of a split as a .npy file, and its labels beside it."""
    parser = _checkpoint_parser("embed", "Write embeddings [N, d] as .npy, and the labels [N] beside them.")
    parser.add_argument("--out", required=True, metavar="FILE", help="such as test.npy; labels go to test.labels.npy")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="default float32")
    parser.add_argument("--normalize", action="store_true", help="divide each embedding by its norm")
    options = parser.parse_args(argv)

    def work() -> int:
        import io

        out = Path(options.out)
        if out.suffix != ".npy":
            raise ValueError(f"out: got {options.out!r}, wanted a file that ends in .npy")
        model, config, data, _, transform = _open(options)
        try:
            z = embed_set(model, data, transform, batch=options.batch, workers=options.workers, amp=config.amp)
        except RuntimeError as error:
            raise TrainingError(str(error)) from error
        if options.normalize:
            z = torch.nn.functional.normalize(z)
        for path, array in (
            (out, z.numpy().astype(options.dtype)),
            (out.with_suffix(".labels.npy"), data.labels.numpy()),
        ):
            buffer = io.BytesIO()
            np.save(buffer, array)
            write_atomically(path, buffer.getvalue())
        print(f"{out}: {z.shape[0]} embeddings of {z.shape[1]} numbers, {options.dtype}")
        return 0

    return _run("embed", work)
