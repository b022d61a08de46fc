"""Training of retrieval models: ``pydml train``, and the same from Python.

>>> config = pydml.train.Config(data="glyphs", preset="ms/paper", batch_size=1024, micro_batch=128)
>>> config.loss, config.epochs
('ms', 10)

``pydml.train.Trainer(config).fit()`` then trains, evaluates every epoch, and writes logs and checkpoints.
"""

from pydml.train.checkpoint import CheckpointError
from pydml.train.config import Config
from pydml.train.evaluate import embed, evaluate
from pydml.train.gradcache import cached_backward
from pydml.train.models import Embedder
from pydml.train.trainer import Trainer, TrainingError

__all__ = ["CheckpointError", "Config", "Embedder", "Trainer", "TrainingError", "cached_backward", "embed", "evaluate"]
