"""PML's base classes as bases of ours, without importing PML, which takes as long to import as torch.

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

Ours = TypeVar("Ours", bound=type)

#: Modules of PML that are not imported yet -> class of theirs, class of ours.
_waiting: dict[str, tuple[str, type]] = {}


def joins(module: str, name: str) -> Callable[[Ours], Ours]:
    """Give a class the base ``name`` of PML's ``module`` as soon as PML is imported; now, if it is already."""

    def decorate(ours: Ours) -> Ours:
        if module in sys.modules:
            ours.__bases__ = (getattr(sys.modules[module], name),)
        else:
            _waiting[module] = name, ours
        return ours

    return decorate


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
        ours.__bases__ = (getattr(module, name),)

    loader.exec_module = exec_module  # type: ignore[method-assign]


sys.meta_path.insert(0, _Join())
