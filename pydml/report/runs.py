"""What a run left in its directory, read for the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pydml.train import logs


@dataclass(frozen=True)
class Run:
    """The logs, settings and snapshots of a run."""

    name: str
    path: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    results: dict[str, Any]
    snapshots: list[dict[str, Any]]

    @property
    def recall(self) -> str:
        """The metric that counts: Recall@K of the first K."""
        return f"recall@{self.config['ks'][0]}"

    @property
    def validated(self) -> list[dict[str, Any]]:
        """Epochs with metrics."""
        return [record for record in self.epochs if self.recall in record]

    def score(self) -> tuple[float, str] | None:
        """Recall on test, or else the best on validation, and which of them it is."""
        if self.results.get("test"):
            return self.results["test"][self.recall], "test"
        if self.validated:
            return max(record[self.recall] for record in self.validated), "validation"
        return None


def read(path: str | Path, name: str) -> Run:
    path = Path(path)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"run: got {str(path)!r}, which holds no run (no config.json)") from None
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: not valid JSON: {error}") from None
    records = logs.read(path)
    results = path / "results.json"
    snapshots = []
    for file in sorted((path / "snapshots").glob("epoch-*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            snapshots.append({key: arrays[key] for key in arrays.files})
    return Run(
        name, path, config,
        [r for r in records if r["kind"] == "step"],
        [r for r in records if r["kind"] == "epoch"],
        json.loads(results.read_text(encoding="utf-8")) if results.exists() else {},
        snapshots,
    )  # fmt: skip


def read_all(paths: Sequence[str | Path]) -> list[Run]:
    """Runs under the shortest ends of their paths that tell them apart."""
    parts = [Path(path).resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise ValueError("run: got a directory twice")
    length = next(n for n in range(1, 99) if len({p[-n:] for p in parts}) == len(parts))
    return [read(path, "/".join(p[-length:])) for path, p in zip(paths, parts, strict=True)]
