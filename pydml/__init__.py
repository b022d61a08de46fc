"""pydml: deep-metric-learning losses as fused kernels that never store the B×B similarity matrix."""

import importlib
import importlib.metadata
from types import ModuleType

from pydml import losses
from pydml.backends import backends, use_backend

__version__ = importlib.metadata.version("pydml-kernels")
__all__ = ["backends", "losses", "use_backend"]

backends()  # load them now: torch.compile cannot trace an import


def __getattr__(name: str) -> ModuleType:
    if name in ("functional", "miners", "metrics", "samplers"):
        return importlib.import_module(f"pydml.{name}")
    raise AttributeError(f"module 'pydml' has no attribute {name!r}")
