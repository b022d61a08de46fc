"""Cross-batch memory (XBM): a loss of each batch against the embeddings of earlier batches, Wang et al., CVPR 2020.

The batch is one side of the matrix and the memory the other; neither B×M similarities nor lists of pairs are stored.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pydml import checks, ops
from pydml.backends import kernel
from pydml.declared import Mined
from pydml.losses.base import MetricLoss
from pydml.losses.batch import Batch
from pydml.records import WithRecords
from pydml.tuples import Distinct, is_distinct

__all__ = ["CrossBatchMemory"]

Indices = tuple[Tensor, ...]


class CrossBatchMemory(WithRecords):
    """Compare a batch with a memory of the last ``memory_size`` embeddings, its own among them; as PML's.

    The batch enters the memory first, without its graph; an embedding is not compared with its own copy there.
    Gradients flow to the batch alone. Embeddings, labels and the place of the next one are in the ``state_dict``. PML's
    loads too: it does not say where its queue ends, so that is taken to be after the last row that is not 0. PML's own
    class loads ours with ``strict=False``, and begins at the first place, as it does with its own.

    Parameters
    ----------
    loss
        A loss of :mod:`pydml.losses` that takes ``ref_emb``; or one of PML's, or your own with its signature, which is
        called with the memory as ``ref_emb`` and the list of all pairs, so it is not fused.
    embedding_size, memory_size
        Width and number of the embeddings kept.
    miner
        Gives the pairs to use, as (embeddings, labels, memory, its labels) → tuple; None: all of them, without a tuple.
        For Multi-Similarity's mining the losses' ``epsilon`` needs no list.

    Examples
    --------
    >>> loss_fn = pydml.memory.CrossBatchMemory(pydml.losses.ContrastiveLoss(), embedding_size=16, memory_size=1024)
    >>> embeddings = torch.randn(32, 16, requires_grad=True)
    >>> loss_fn(embeddings, torch.arange(32) % 8).backward()
    """

    embedding_memory: Tensor
    label_memory: Tensor
    #: Places of the last batch in the memory.
    curr_batch_idx: Tensor

    def __init__(
        self,
        loss: Any,
        embedding_size: int,
        memory_size: int = 1024,
        miner: Any = None,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(collect_stats)
        self.check_loss(loss, miner)
        self.loss, self.miner = loss, miner
        self.embedding_size = checks.integer("embedding_size", embedding_size, least=1)
        self.memory_size = checks.integer("memory_size", memory_size, least=1)
        self.reset_queue()
        self.add_to_recordable_attributes(list_of_names=["embedding_size", "memory_size", "queue_idx"])

    @staticmethod
    def supported_losses() -> list[str]:
        """Losses of PML that can be here, by name; of ours all can that take ``ref_emb``."""
        return [
            "AngularLoss",
            "CircleLoss",
            "ContrastiveLoss",
            "GeneralizedLiftedStructureLoss",
            "IntraPairVarianceLoss",
            "LiftedStructureLoss",
            "MarginLoss",
            "MultiSimilarityLoss",
            "NCALoss",
            "NTXentLoss",
            "SignalToNoiseRatioContrastiveLoss",
            "SupConLoss",
            "TripletMarginLoss",
            "TupletMarginLoss",
        ]

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Raise if a loss of PML of this name cannot be here."""
        if loss_name not in cls.supported_losses():
            raise ValueError(f"loss: got {loss_name}, wanted one of {', '.join(cls.supported_losses())}")

    @classmethod
    def check_loss(cls, loss: Any, miner: Any) -> None:
        """Raise if a loss cannot be here, or not with a miner."""
        name = type(loss).__name__
        if not isinstance(loss, MetricLoss):
            call = getattr(loss, "forward", loss)
            if not callable(call) or not {"indices_tuple", "ref_emb"} <= inspect.signature(call).parameters.keys():
                raise TypeError(f"loss: got {name}, wanted a loss of pydml.losses, or one with the signature of PML's")
            if type(loss).__module__.startswith("pytorch_metric_learning."):
                cls.check_loss_support(name)
            return
        if not loss.takes_ref or getattr(loss, "swap", False):
            raise ValueError(f"loss: got {name}, which takes no reference set; wanted one that does")
        if miner is not None and (not loss.takes_tuple or loss.epsilon is not None):
            raise ValueError(f"miner: got one, but {name} selects its pairs by itself; wanted None")

    def reset_queue(self) -> None:
        """Forget everything."""
        self.register_buffer("embedding_memory", torch.zeros(self.memory_size, self.embedding_size))
        self.register_buffer("label_memory", torch.zeros(self.memory_size, dtype=torch.int64))
        self.queue_idx, self.has_been_filled = 0, False
        self.curr_batch_idx = torch.empty(0, dtype=torch.int64)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.queue_idx, int(self.has_been_filled)])

    def set_extra_state(self, state: Tensor) -> None:
        self.queue_idx, self.has_been_filled = int(state[0]), bool(state[1])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        kept = state_dict.get(f"{prefix}embedding_memory")
        if kept is not None:  # the queue has the dtype of the embeddings; loading must not round it
            self.embedding_memory = self.embedding_memory.to(kept.dtype)
            if self._extra_state_key(prefix) not in state_dict:  # PML's
                used = kept.detach().cpu().any(1).nonzero()
                end = int(used[-1]) + 1 if len(used) else 0
                state = torch.tensor([end % self.memory_size, int(end == self.memory_size)])
                state_dict = state_dict | {self._extra_state_key(prefix): state}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @staticmethod
    def _extra_state_key(prefix: str) -> str:
        return f"{prefix}_extra_state"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Indices | None = None,
        enqueue_mask: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> Tensor:
        """Enqueue a batch, then its loss against the memory.

        Parameters
        ----------
        embeddings, labels
            [B, d] and [B], B ≤ ``memory_size``.
        indices_tuple
            Further pairs (rows of the batch, rows of the memory) that count beside the others, as in PML.
        enqueue_mask
            [B] bool: these enter the memory, and the others are compared with it. Not beside ``indices_tuple``.
        backend
            As for the loss itself.
        """
        z = checks.embeddings("embeddings", embeddings)
        y = checks.labels("labels", labels, z)
        if z.shape[1] != self.embedding_size:
            raise ValueError(f"embeddings: got width {z.shape[1]}, wanted embedding_size={self.embedding_size}")
        kept_z, kept_y = z, y
        if enqueue_mask is not None:
            if indices_tuple is not None:
                raise ValueError("enqueue_mask: got one beside indices_tuple, wanted only one of the two")
            mask = _checked_mask(enqueue_mask, z)
            kept_z, kept_y, z, y = z[mask], y[mask], z[~mask], y[~mask]
        start = self.queue_idx
        memory, memory_labels = self.remember(kept_z, kept_y)
        selves = self.curr_batch_idx if enqueue_mask is None else None
        listed = None
        ours = isinstance(self.loss, MetricLoss)
        if self.miner is not None or indices_tuple is not None or not ours:
            listed = self.create_indices_tuple(z, y, memory, memory_labels, indices_tuple, selves is not None)
        if not ours:
            loss: Tensor = self.loss(z, y, listed, memory, memory_labels)
            return loss
        if listed is not None or selves is None or self.loss.sees_copies:
            loss = self.loss(z, y, listed, memory, memory_labels, backend=backend)
            return loss
        given = self.loss._batch(z, y, None, memory, memory_labels)
        batch = MemoryBatch(z, y, memory, memory_labels, None, given.view, given.normalize, start=start)
        batch.choose(backend)
        loss = self.loss.evaluate(batch)
        return loss

    def remember(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Enqueue a batch (its places are ``curr_batch_idx``); what the memory then holds, and its labels."""
        number = len(embeddings)
        if number > self.memory_size:
            raise ValueError(f"embeddings: got {number} to keep, wanted at most memory_size={self.memory_size}")
        self.reset_stats()
        self.add_to_memory(embeddings, labels, number)
        held = self.memory_size if self.has_been_filled else self.queue_idx
        return self.embedding_memory[:held], self.label_memory[:held]

    def add_to_memory(self, embeddings: Tensor, labels: Tensor, batch_size: int) -> None:
        """Write embeddings to the next places (``curr_batch_idx``), the oldest ones."""
        z, device = embeddings.detach(), embeddings.device
        dtype, filled = z.dtype, self.queue_idx or self.has_been_filled
        if filled and ops.compute_dtype(self.embedding_memory) == ops.compute_dtype(z):
            dtype = torch.promote_types(self.embedding_memory.dtype, z.dtype)  # what is there already is not rounded
        self.embedding_memory = self.embedding_memory.to(device, dtype)
        self.label_memory = self.label_memory.to(device)
        places = torch.arange(self.queue_idx, self.queue_idx + batch_size, device=device) % self.memory_size
        self.embedding_memory[places] = z.to(dtype)
        self.label_memory[places] = labels.to(self.label_memory.dtype)
        self.has_been_filled = self.has_been_filled or self.queue_idx + batch_size >= self.memory_size
        self.queue_idx = (self.queue_idx + batch_size) % self.memory_size
        self.curr_batch_idx = places

    def create_indices_tuple(
        self,
        embeddings: Tensor,
        labels: Tensor,
        E_mem: Tensor,
        L_mem: Tensor,
        input_indices_tuple: Indices | None,
        do_remove_self_comparisons: bool,
    ) -> Indices:
        """The miner's pairs, or all, without those of an embedding and its copy; then those given beside them."""
        if self.miner is not None:
            found: Indices = self.miner(embeddings, labels, E_mem, L_mem)
        else:
            matrix = {"rows": embeddings.detach(), "cols": E_mem, "row_labels": labels, "col_labels": L_mem}
            found = kernel("tiled", "mined")(Mined(**matrix, epsilon=None, view="dot", normalize=True))
        if do_remove_self_comparisons:
            size = len(embeddings), len(E_mem)
            known = is_distinct(found, size)
            found = _without_selves(found, self.curr_batch_idx)
            found = Distinct.of(found, size) if known else found  # a part of distinct pairs
        if input_indices_tuple is None:
            return found
        more = input_indices_tuple
        sides = [Batch(embeddings, labels, E_mem, L_mem, tuple(part), "dot", True) for part in (found, more)]
        if len(found) == 3 or len(more) == 3:  # triplets and pairs: PML makes the given ones like the others
            given = sides[1].triplets if len(found) == 3 else sides[1].pairs
            assert given is not None
            more = tuple(given)
        return tuple(torch.cat(both) for both in zip(found, more, strict=True))


def _checked_mask(mask: Any, z: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != z.shape[:1]:
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"enqueue_mask: got {got}, wanted a bool tensor [{len(z)}]")
    return mask.to(z.device)


def _without_selves(found: Indices, selves: Tensor) -> Indices:
    """A tuple without the pairs of a row and its own copy."""
    a, p = found[:2]
    other = p != selves[a]
    if len(found) == 3:
        return tuple(index[other] for index in found)
    return a[other], p[other], *found[2:]  # a copy has the label of its row: it is no negative


@dataclass
class MemoryBatch(Batch):
    """A batch against a memory that holds it, among others, from the place ``start`` on (and on from the first one)."""

    start: int = 0

    @property
    def has_selves(self) -> bool:
        return True

    def self_columns(self) -> Tensor:
        return (super().self_columns() + self.start) % self.size[1]
