"""pydml: deep-metric-learning losses as fused kernels that never store the B×B similarity matrix."""

import importlib.metadata

from pydml import data, distances, distributed, functional, losses, memory, metrics, miners, samplers
from pydml.backends import backends, largest_class, set_deterministic, use_backend
from pydml.presets import preset, presets

__version__ = importlib.metadata.version("pydml-kernels")
__all__ = [
    "backends",
    "data",
    "distances",
    "distributed",
    "functional",
    "largest_class",
    "losses",
    "memory",
    "metrics",
    "miners",
    "preset",
    "presets",
    "samplers",
    "set_deterministic",
    "use_backend",
]

backends()  # load them now: torch.compile cannot trace an import
