"""The trainer on two processes: the loss curve of one process with the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ranks
from toy_images import packed, splits

from pydml.data import split_classes
from pydml.distributed import ShardedLoss
from pydml.train import Config, Trainer, logs, models

#: Of the loss of the first step, and of a later one, in fp32: ranks add gradients up in another order, and AdamW's
#: first steps follow the sign of a gradient however small it is.
FIRST, LATER = 1e-6, 1e-3
SETTINGS: dict[str, Any] = {"batch_size": 32, "epochs": 2, "ks": (1,), "dim": 16, "device": "cpu"}


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in logs.read(out) if record["kind"] == "step"]


def same_curve(got: list[float], want: list[float], first: float, later: float) -> None:
    assert len(want) > 10 and want[-1] < want[0]
    assert got[0] == pytest.approx(want[0], rel=first)
    assert got == pytest.approx(want, rel=later)


def train(rank: int, size: int, out: str, settings: dict[str, Any]) -> str:
    """In fp64: a hinge that counts its nonzero pairs jumps by a percent when rounding moves one pair across it."""
    config, data = Config(data="memory", out=out, **(SETTINGS | settings)), splits()
    classes = len(split_classes(data.train, config.val_fraction, config.val_seed)[0].classes)
    torch.manual_seed(0)
    model, loss = models.build(config, 1).double(), config.build_loss(classes).double()
    trainer = Trainer(config, data, model=model, loss=loss, quiet=True)
    trainer.fit()
    return type(trainer.criterion).__name__


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "ms"},
        {"preset": "proxy-anchor/paper"},
        {"loss": "contrastive", "micro_batch": 8},
        {"loss": "triplet", "loss_args": {"smooth_loss": True}, "miner": "BatchHardMiner"},
    ],
    ids=str,
)
def test_two_processes_follow_the_loss_curve_of_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    train(0, 1, str(tmp_path / "one"), settings)
    assert ranks(2)(train, str(tmp_path / "two"), settings) == [ShardedLoss.__name__] * 2
    same_curve(losses(tmp_path / "two"), losses(tmp_path / "one"), 1e-12, 1e-9)


def test_so_does_the_command_under_torchrun(tmp_path: Path) -> None:
    data, torch_run = packed(tmp_path / "data"), [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    Trainer(Config(data=str(data), out=str(tmp_path / "one"), loss="ms", **SETTINGS), quiet=True).fit()
    options = ["--data", str(data), "--out", str(tmp_path / "two"), "--loss", "ms", "--batch-size", "32",
               "--epochs", "2", "--ks", "1", "--dim", "16", "--device", "cpu"]  # fmt: skip
    done = subprocess.run(
        [*torch_run, "--nproc-per-node", "2", "-m", "pydml", "train", *options],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=900,
        env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    same_curve(losses(tmp_path / "two"), losses(tmp_path / "one"), FIRST, LATER)
