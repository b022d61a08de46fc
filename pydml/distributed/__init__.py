"""Losses and metrics of batches that are spread over the ranks of a ``torch.distributed`` group."""

from pydml.distributed.loss import ShardedLoss
from pydml.distributed.metrics import map_at_r, nmi, r_precision, recall_at_k, retrieval_metrics
from pydml.distributed.miner import ShardedMiner

__all__ = ["ShardedLoss", "ShardedMiner", "map_at_r", "nmi", "r_precision", "recall_at_k", "retrieval_metrics"]
