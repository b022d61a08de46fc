"""What a run left in its directory, read for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pydml.data.files import read_json
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
        names = (self.recall, "map@r", "r_precision")
        return [record for record in self.epochs if all(name in record for name in names)]

    def score(self) -> tuple[float, str] | None:
        """Recall on test, or else the best on validation, and which of them it is."""
        if self.results.get("test"):
            return self.results["test"][self.recall], "test"
        if self.validated:
            return max(record[self.recall] for record in self.validated), "validation"
        return None


#: What the report reads of a run's settings, of a step's record and of a snapshot.
SETTINGS: dict[str, Any] = {
    "ks": list, "batch_size": int, "lr": (int, float), "loss": str, "preset": (str, type(None))
}  # fmt: skip
STEP = ("images", "loss", "images_per_second", "loss_share")
SNAPSHOT = ("epoch", "s_ap", "s_an", "positives", "negatives", "gallery", "gallery_right", "gallery_names")


def read(path: str | Path, name: str) -> Run:
    """The run of a directory; an error names the file that is damaged."""
    path = Path(path)
    if not (path / "config.json").exists():
        raise ValueError(f"run: got {str(path)!r}, which holds no run (no config.json)")
    config = read_json(path / "config.json")
    for key, kind in SETTINGS.items():
        if not isinstance(config.get(key), kind) or config[key] == []:
            got = repr(config[key])[:80] if key in config else "nothing"
            raise ValueError(f"{path / 'config.json'}: {key}: got {got}, wanted the setting of a run")
    results = path / "results.json"
    run = Run(
        name, path, config,
        _records(path, "step", STEP),
        _records(path, "epoch", ("images",)),
        read_json(results) if results.exists() else {},
        [_snapshot(file) for file in sorted((path / "snapshots").glob("epoch-*.npz"))],
    )  # fmt: skip
    test = run.results.get("test") or {run.recall: 0.0}
    if not isinstance(test, dict) or not isinstance(test.get(run.recall), (int, float)):
        raise ValueError(f"{results}: test: got {repr(test)[:80]}, wanted {run.recall} and others")
    return run


def _records(path: Path, kind: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The log's records of a kind, each with these numbers."""
    records = [record for record in logs.read(path) if record["kind"] == kind]
    for record in records:
        wrong = [name for name in columns if not isinstance(record.get(name), (int, float))]
        if wrong:
            step = record["step"]
            raise ValueError(f"{path / 'log.jsonl'}: {kind} record of step {step}: lacks a number {wrong[0]!r}")
    return records


def _snapshot(file: Path) -> dict[str, Any]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in SNAPSHOT}
    except Exception as error:  # zip, zlib and numpy each have their own
        reason = (str(error).splitlines() or [""])[0][:160]
        raise ValueError(f"{file}: not a whole snapshot ({type(error).__name__}: {reason})") from None


def read_all(paths: Sequence[str | Path]) -> list[Run]:
    """Runs under the shortest ends of their paths that tell them apart."""
    parts = [Path(path).resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise ValueError("run: got a directory twice")
    length = next(n for n in range(1, 99) if len({p[-n:] for p in parts}) == len(parts))
    return [read(path, "/".join(p[-length:])) for path, p in zip(paths, parts, strict=True)]
