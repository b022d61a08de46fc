"""Optimizers by name, a learning rate for each part of the model, and its course over the run."""

from __future__ import annotations

import math

import torch
from torch import nn

from pydml.train.config import Config


def build(config: Config, model: nn.Module, loss: nn.Module) -> torch.optim.Optimizer:
    """Groups: backbone and embedding layer, each with matrices (decayed) and vectors (not); the loss' parameters."""
    embedding = {id(p) for p in getattr(model, "embedding", nn.Module()).parameters()}
    groups = []
    for name, lr in (("backbone", config.lr), ("embedding", config.embedding_lr)):
        of = [p for p in model.parameters() if p.requires_grad and (id(p) in embedding) == (name == "embedding")]
        for decay in (True, False):
            chosen = [p for p in of if (p.ndim > 1) == decay]
            rate = config.lr if lr is None else lr
            groups.append({"params": chosen, "part": name, "lr": rate, "decay": config.weight_decay * decay})
    proxy_lr = config.lr if config.proxy_lr is None else config.proxy_lr
    groups.append({"params": list(loss.parameters()), "part": "loss", "lr": proxy_lr, "decay": 0.0})
    kept = [
        {"params": g["params"], "part": g["part"], "lr": g["lr"], "base_lr": g["lr"], "weight_decay": g["decay"]}
        for g in groups
        if g["params"]
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(kept, lr=config.lr, momentum=config.momentum)
    return (torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam)(kept, lr=config.lr)


def factor(config: Config, epoch: float, part: str = "embedding") -> float:
    """By what the learning rates are multiplied at a moment of the run, in epochs."""
    if part == "backbone" and epoch < config.freeze_backbone:
        return 0.0
    rise = min(1.0, epoch / config.warmup) if config.warmup else 1.0
    if config.schedule == "step":
        done = sum(epoch >= at for at in config.milestones)
        return rise * config.step_gamma ** (done if config.milestones else math.floor(epoch / config.step_epochs))
    if config.schedule == "cosine":
        left = max(config.epochs - config.warmup, 1e-9)
        return rise * 0.5 * (1 + math.cos(math.pi * min(max(epoch - config.warmup, 0.0) / left, 1.0)))
    return rise


def set_rates(optimizer: torch.optim.Optimizer, config: Config, epoch: float) -> float:
    """Set every group's learning rate; returns the backbone's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor(config, epoch, group["part"])
    return factor(config, epoch, "backbone")
