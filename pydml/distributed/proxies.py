"""Proxies whose classes are split over the ranks, as in partial-FC: no rank holds, or averages, all of them."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from pydml.distributed.group import Group
from pydml.losses import ProxyLoss
from pydml.losses.base import MetricLoss


def split_classes(loss: MetricLoss, group: Group) -> list[int]:
    """Cut the parameter of a proxy loss down to this rank's classes; how many proxies each rank has."""
    if not isinstance(loss, ProxyLoss) or not loss.splits:
        raise TypeError(
            f"shard_proxies: got True with {type(loss).__name__}, wanted a softmax-type loss or ProxyAnchorLoss"
        )
    if loss.weight_regularizer is not None:
        raise ValueError("shard_proxies: got True with a weight_regularizer, which sees all proxies; wanted none")
    if loss.class_range != range(loss.num_classes):
        raise ValueError("shard_proxies: got a loss whose proxies are sharded already")
    if loss.num_classes < group.size:
        raise ValueError(f"shard_proxies: got {loss.num_classes} classes, wanted one for each of {group.size} ranks")
    ends = [loss.num_classes * rank // group.size for rank in range(group.size + 1)]
    loss.class_range = range(ends[group.rank], ends[group.rank + 1])
    w = getattr(loss, loss.parameter)
    dim = 1 if loss.transposed else 0
    centers = w.shape[dim] // loss.num_classes
    part = w.detach().narrow(dim, loss.class_range.start * centers, len(loss.class_range) * centers)
    setattr(loss, loss.parameter, nn.Parameter(part.clone(memory_format=torch.contiguous_format), w.requires_grad))
    return [end - start for start, end in itertools.pairwise(ends)]
