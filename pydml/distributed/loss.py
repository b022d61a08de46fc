"""A loss over the batches of all ranks: the value, and each rank's gradient, of one process on all of them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from pydml import checks
from pydml.backends import named, resolve
from pydml.distributed.batch import ShardedBatch, Shards
from pydml.distributed.functions import gather_rows, scale_gradient
from pydml.distributed.group import Group, Rules, compare, same_parameters, same_shapes
from pydml.distributed.proxies import split_classes
from pydml.losses.base import MetricLoss
from pydml.losses.batch import Batch
from pydml.memory import CrossBatchMemory

Indices = tuple[Tensor, ...]


class ShardedLoss(nn.Module):
    """A loss of the batch that all ranks have together, in the order of the ranks.

    Every rank passes its own embeddings and labels, as many as it has (also none). The value on every rank, and each
    rank's gradient, are those of one process on the concatenated batch. All ranks must call it, and call ``backward``
    if one of them does. Parameters of the loss (proxies, β) are copied from the first rank when it is wrapped and get
    the whole gradient on every rank, so one optimiser a rank keeps them equal, whether or not DDP averages them too.

    Parameters
    ----------
    loss
        A loss of :mod:`pydml.losses`, or a :class:`~pydml.memory.CrossBatchMemory` of one: every rank then keeps the
        memory of its own batches, and each batch is compared with the memories of all ranks.
    group
        The process group, None is the default one; without ``init_process_group`` there is one rank.
    mode
        ``"ring"``: columns go round the ranks, so that none holds those of all. ``"gather"``: every rank gets all
        columns at once.
    ddp
        Multiply the gradient of the embeddings by the number of ranks, for models whose gradients are averaged over
        the ranks (DDP, FSDP): the parameters then get the gradient of one process.
    shard_proxies
        Keep only a part of the classes on each rank: the loss' parameter becomes the slice of its own classes
        (softmax-type losses and Proxy-Anchor). Its gradient is whole too, but must not be averaged by DDP.

    Examples
    --------
    >>> loss_fn = pydml.distributed.ShardedLoss(pydml.losses.MultiSimilarityLoss(), ddp=True)
    >>> embeddings = torch.randn(32, 16, requires_grad=True)  # this rank's
    >>> loss_fn(embeddings, torch.arange(32) % 8).backward()
    """

    def __init__(
        self, loss: Any, group: Any = None, mode: str = "ring", ddp: bool = False, shard_proxies: bool = False
    ) -> None:
        super().__init__()
        self.memory = loss if isinstance(loss, CrossBatchMemory) else None
        if self.memory is not None:
            loss = self.memory.loss
            if self.memory.miner is not None:
                raise ValueError("loss: got a memory with a miner, wanted one without: it would see one rank only")
        if not isinstance(loss, MetricLoss):
            raise TypeError(
                f"loss: got {type(loss).__name__}, wanted a loss of pydml.losses, or a CrossBatchMemory of one"
            )
        self.loss = loss
        self.mode = checks.choice("mode", mode, ("ring", "gather"))
        self.ddp = checks.flag("ddp", ddp)
        self.group = Group(group)
        same_parameters(self.group, dict(loss.named_parameters()))
        for name, parameter in loss.named_parameters():
            self.group.broadcast(parameter.data, name)
        self.class_sizes = split_classes(loss, self.group) if checks.flag("shard_proxies", shard_proxies) else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Indices | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> Tensor:
        """The loss of all ranks' batches.

        Parameters
        ----------
        embeddings, labels
            This rank's [b, d] and [b], b ≥ 0.
        indices_tuple
            This rank's part of the tuple; its numbers are places in the concatenated batch (and reference set).
        ref_emb, ref_labels
            This rank's part of the reference set.
        backend
            As for the loss itself; ``"dense"`` computes the whole matrix on every rank.
        """
        if self.memory is not None and (indices_tuple is not None or ref_emb is not None):
            raise ValueError("indices_tuple, ref_emb: got one beside a memory, wanted embeddings and labels only")
        if self.group.size == 1:
            given = () if self.memory is not None else (indices_tuple, ref_emb, ref_labels)
            whole: Tensor = (self.loss if self.memory is None else self.memory)(
                embeddings, labels, *given, backend=backend
            )
            return whole
        batch = self._sharded(embeddings, labels, indices_tuple, ref_emb, ref_labels, backend)
        if self.loss.triplets_per_anchor != "all":
            batch.draw_triplets(int(self.loss.triplets_per_anchor))
        if batch.backend == "dense" or not self.loss.fuses:
            return self._dense(batch)
        return self.loss.evaluate(batch)

    def _sharded(
        self, embeddings: Any, labels: Any, indices: Any, ref_emb: Any, ref_labels: Any, backend: str
    ) -> ShardedBatch:
        """Check this rank's arguments, and that the ranks' arguments fit together, before any of them travels."""
        group, error, batch, facts, asked_for = self.group, None, None, [0] * 8, True
        try:
            if labels is None:
                raise ValueError("labels: got None, wanted a tensor of integers")
            z = checks.embeddings("embeddings", embeddings)
            nowhere = torch.empty(0, dtype=torch.int64, device=z.device)  # what a tuple lists is looked at later
            if self.memory is not None:
                ref_emb, ref_labels = self._remember(z, labels)
            batch = self.loss._batch(
                z, labels, None if indices is None else tuple(nowhere for _ in indices), ref_emb, ref_labels
            )
            asked_for, backend = named(backend), resolve(backend, z.device)
            facts = _facts(batch, indices)
        except (TypeError, ValueError, RuntimeError) as wrong:
            error = wrong
        settings = f"{type(self.loss)} {self.loss.extra_repr()} {self.mode} {self.ddp} {backend}"
        facts.append(zlib.crc32(settings.encode()))
        table = group.facts(facts, error)
        assert batch is not None
        compare(table, _MUST_AGREE)
        sizes, ref_sizes = [row[0] for row in table], [row[4] for row in table]
        ref_grad = any(row[5] for row in table)
        z = _take_part(batch.embeddings, any(row[3] for row in table) or ref_grad)
        ref = None if batch.ref is None else _take_part(batch.ref, ref_grad)
        y = group.all_gather(batch.known_labels(), sizes, "labels")
        assert batch.ref_labels is not None
        ref_y = y if ref is None else group.all_gather(batch.ref_labels, ref_sizes, "labels")
        shards = Shards(group, sizes, None if ref is None else ref_sizes, self.mode, ref_grad, self.class_sizes)
        if self.memory is not None and not self.loss.sees_copies:
            first = sum(ref_sizes[: group.rank])
            shards.selves = group.all_gather(self.memory.curr_batch_idx + first, sizes, "places in the memories")
        if self.ddp:
            z = scale_gradient(z, group.size)
            ref = None if ref is None else scale_gradient(ref, group.size)
        columns = sum(sizes if ref is None else ref_sizes)
        listed = None if indices is None else _joined(group, indices, sum(sizes), columns, z.device)
        return ShardedBatch(z, y, ref, ref_y, listed, batch.view, batch.normalize, backend, asked_for, shards=shards)

    def _remember(self, z: Tensor, labels: Any) -> tuple[Tensor, Tensor]:
        """Enqueue this rank's batch; what its memory then holds."""
        assert self.memory is not None
        if z.shape[1] != self.memory.embedding_size:
            raise ValueError(f"embeddings: got width {z.shape[1]}, wanted embedding_size={self.memory.embedding_size}")
        memory, kept = self.memory.remember(z, checks.labels("labels", labels, z))
        return memory.to(z.dtype), kept

    def _dense(self, batch: ShardedBatch) -> Tensor:
        """The textbook formula, on every rank for everything."""
        shards, ref = batch.shards, batch.ref
        assert shards is not None
        if shards.class_sizes is not None:
            raise ValueError("backend: got 'dense' with shard_proxies=True, wanted another")
        if shards.selves is not None:
            raise ValueError("backend: got 'dense' with a memory on several ranks, wanted another")
        if ref is not None and shards.ref_sizes is not None:
            ref = gather_rows(ref, self.group, shards.ref_sizes, "embeddings")
        whole = Batch(
            batch.everything(), batch.labels, ref, batch.ref_labels, batch.indices, batch.view, batch.normalize, "dense"
        )
        return self.loss.evaluate(whole)


def _facts(batch: Batch, indices: Any) -> list[int]:
    """What the ranks have to know of each other: see :data:`_MUST_AGREE`."""
    z, ref = batch.embeddings, batch.ref
    dtype = checks.FLOATS.index(z.dtype)
    if ref is None:
        return [len(z), z.shape[1], dtype, int(z.requires_grad), 0, 0, 0, 0 if indices is None else len(indices)]
    grads = int(z.requires_grad), len(ref), int(ref.requires_grad)
    return [len(z), z.shape[1], dtype, *grads, 1, 0 if indices is None else len(indices)]


#: Place among the facts -> argument, what it is, and how to say it.
_MUST_AGREE: Rules = {
    **same_shapes("embeddings"),
    6: ("ref_emb", "reference sets", lambda given: "one" if given else "none"),
    7: ("indices_tuple", "tuples", lambda length: f"{length} tensors" if length else "none"),
    8: ("loss", "settings or backends (as a checksum)", str),
}


def _take_part(z: Tensor, anybody: bool) -> Tensor:
    """A rank that wants no gradient still has a part in those of the others: its backward pass must run."""
    return z.detach().requires_grad_() if anybody and not z.requires_grad and torch.is_grad_enabled() else z


def _joined(group: Group, indices: Any, rows: int, cols: int, device: torch.device) -> Indices:
    """The tuples of all ranks, one after the other."""
    error, mine = None, tuple[Tensor, ...]()
    try:
        mine = checks.indices_tuple(indices, rows, cols, device)
    except (TypeError, ValueError) as wrong:
        error = wrong
    table = group.facts([len(index) for index in mine] or [0] * len(indices), error)
    return tuple(group.all_gather(index, [row[k] for row in table], "tuples") for k, index in enumerate(mine))
