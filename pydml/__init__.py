"""pydml: deep-metric-learning losses as fused kernels that never store the B×B similarity matrix."""

import importlib.metadata

from pydml import functional, losses, metrics, miners, samplers
from pydml.backends import backends, use_backend
from pydml.presets import preset, presets

__version__ = importlib.metadata.version("pydml-kernels")
__all__ = [
    "backends",
    "functional",
    "losses",
    "metrics",
    "miners",
    "preset",
    "presets",
    "samplers",
    "use_backend",
]

backends()  # load them now: torch.compile cannot trace an import
