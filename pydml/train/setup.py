"""What a run or a command starts from: data, the network of a checkpoint, and the place among the ranks."""

from __future__ import annotations

import atexit
import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import pydml.data
from pydml.data import Splits
from pydml.train import checkpoint, models
from pydml.train.checkpoint import CheckpointError
from pydml.train.config import Config


def open_data(config: Config) -> Splits:
    """The splits of ``config.data``."""
    if not config.data:
        raise ValueError("data: got nothing, wanted the directory of a data set (--data)")
    return pydml.data.open(config.data, config.data_format)


def load_model(path: str | Path) -> tuple[nn.Module, Config]:
    """The network of a checkpoint, and the settings that it was trained with."""
    state = checkpoint.load(path)
    try:
        config = Config.from_dict(state["config"])
        model = models.build(dataclasses.replace(config, pretrained=False, weights=None), state["channels"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    weights = state["model"]
    if state.get("ema") is not None:
        weights = {k.removeprefix("module."): v for k, v in state["ema"].items() if k.startswith("module.")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{path}: its weights are not those of the network in its settings ({reason})") from None
    return model, config


def place(device: str) -> tuple[int, int, torch.device]:
    """Rank, number of ranks and device; joins the group that torchrun has prepared."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and not dist.is_initialized():
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        # A group whose threads still run when the interpreter is taken down can abort the process.
        atexit.register(_leave)
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), torch.device(device)
    return 0, 1, torch.device(device)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
