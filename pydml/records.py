"""PML's records: which attributes of a module a logger is to show, and whether statistics are collected for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

#: Do modules collect statistics where ``collect_stats`` does not say? PML's own flag of this name counts too.
COLLECT_STATS = False


def collects(collect_stats: bool | None) -> bool:
    """Does a module made now collect statistics?"""
    if collect_stats is not None:
        return bool(collect_stats)
    theirs = sys.modules.get("pytorch_metric_learning.utils.common_functions")
    return COLLECT_STATS or bool(getattr(theirs, "COLLECT_STATS", False))


class WithRecords(nn.Module):
    """A module whose settings (``_record_these``) and statistics (``_record_these_stats``) loggers of PML find."""

    def __init__(self, collect_stats: bool | None = None) -> None:
        nn.Module.__init__(self)  # not super(): PML's classes may follow
        self.collect_stats = collects(collect_stats)

    def add_to_recordable_attributes(
        self, name: str | None = None, list_of_names: Sequence[str] | None = None, is_stat: bool = False
    ) -> None:
        """Record attributes by name; those that are not there yet are 0."""
        if is_stat and not self.collect_stats:
            return
        key = "_record_these_stats" if is_stat else "_record_these"
        recorded: list[str] = self.__dict__.setdefault(key, [])
        for one in [*([] if name is None else [name]), *(list_of_names or [])]:
            if one not in recorded:
                recorded.append(one)
            if not hasattr(self, one):
                setattr(self, one, 0)

    def reset_stats(self) -> None:
        """Statistics are those of one call."""
        for name in self.__dict__.get("_record_these_stats", []):
            setattr(self, name, 0)
