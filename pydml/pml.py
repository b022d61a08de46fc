"""PML's classes as bases of ours, without importing PML, which takes as long to import as torch.

PML's wrappers (``DistributedLossWrapper``, ``DistributedMinerWrapper``) ask with ``isinstance`` whether they are given
a loss or a miner of PML's. Whoever has such a wrapper has imported PML, so it is early enough to join the classes then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TypeVar

from torch import nn

Ours = TypeVar("Ours", bound=type)

#: Modules of PML that are not imported yet -> class of theirs, class of ours.
_waiting: dict[str, tuple[str, type]] = {}


def joins(module: str, name: str) -> Callable[[Ours], Ours]:
    """Make PML's class ``name`` of ``pytorch_metric_learning.<module>`` a base of ours, now or once PML is imported.

    The last base, so that what ours inherits from our own classes stays as it is.
    """
    where = f"pytorch_metric_learning.{module}"

    def decorate(ours: Ours) -> Ours:
        if where in sys.modules:
            _join(ours, getattr(sys.modules[where], name))
        else:
            _waiting[where] = name, ours
        return ours

    return decorate


def _join(ours: type, theirs: type) -> None:
    ours.__bases__ = (*(base for base in ours.__bases__ if base is not nn.Module), theirs)


class _Join(MetaPathFinder):
    """Lets the other finders find PML's modules, and joins the classes when such a module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            _join_after(spec.loader, *_waiting.pop(fullname))
        return spec


def _join_after(loader: Loader, name: str, ours: type) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        _join(ours, getattr(module, name))

    loader.exec_module = exec_module  # type: ignore[method-assign]


sys.meta_path.insert(0, _Join())
