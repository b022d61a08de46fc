"""pydml: deep-metric-learning losses as fused kernels that never store the B×B similarity matrix."""

import importlib.metadata

from pydml import losses
from pydml.backends import backends, use_backend

__version__ = importlib.metadata.version("pydml-kernels")
__all__ = ["backends", "losses", "use_backend"]

backends()  # load them now: torch.compile cannot trace an import
