"""pydml: deep-metric-learning losses as fused kernels that never store the B×B similarity matrix."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from pydml import distances, functional, losses, memory, metrics, miners, reducers, regularizers, samplers
from pydml.backends import backends, largest_class, recording, set_deterministic, use_backend
from pydml.presets import preset, presets

if TYPE_CHECKING:
    from pydml import data, distributed

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
    "recording",
    "reducers",
    "regularizers",
    "samplers",
    "set_deterministic",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    """Import ``data`` and ``distributed`` when they are asked for: most programs need neither."""
    if name in ("data", "distributed"):
        return importlib.import_module(f"pydml.{name}")
    raise AttributeError(f"module 'pydml' has no attribute {name!r}")
