"""What a run tells: files that spreadsheets and scripts read, TensorBoard if it is installed, and a progress line."""

from __future__ import annotations

import csv
import io
import json
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pydml.train.checkpoint import CheckpointError, write_atomically

#: Columns of steps.csv and epochs.csv come from the first record of each kind.
KINDS = {"step": "steps.csv", "epoch": "epochs.csv"}


class Log:
    """``log.jsonl`` has every record; ``steps.csv`` and ``epochs.csv`` have the same as tables.

    Parameters
    ----------
    directory
        Of the run.
    records
        How many to keep: what was written after the checkpoint that a run resumes from is written again.
    """

    def __init__(self, directory: Path, records: int = 0) -> None:
        self.directory = directory
        self.path = directory / "log.jsonl"
        kept = read(directory)[:records]
        tables: dict[str, io.StringIO] = {}
        self.columns: dict[str, list[str]] = {}
        for record in kept:
            kind = record["kind"]
            if kind not in tables:
                tables[kind] = io.StringIO()
                self.columns[kind] = [name for name in record if name != "kind"]
                csv.writer(tables[kind], lineterminator="\n").writerow(self.columns[kind])
            self._row(tables[kind], record)
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        for kind, name in KINDS.items():
            write_atomically(directory / name, tables[kind].getvalue().encode() if kind in tables else b"")
        self.files = {name: (directory / name).open("a", encoding="utf-8") for name in ("log.jsonl", *KINDS.values())}
        self.board = _tensorboard(directory, kept[-1]["step"] if kept else -1)

    def _row(self, file: Any, record: dict[str, Any]) -> None:
        columns = self.columns[record["kind"]]
        csv.writer(file, lineterminator="\n").writerow([record.get(name, "") for name in columns])

    def write(self, kind: str, **record: Any) -> None:
        """Add a record; it is in the files when this returns."""
        record = {"kind": kind, **record}
        table = self.files[KINDS[kind]]
        try:
            self.files["log.jsonl"].write(json.dumps(record) + "\n")
            if kind not in self.columns:
                self.columns[kind] = [name for name in record if name != "kind"]
                csv.writer(table, lineterminator="\n").writerow(self.columns[kind])
            self._row(table, record)
            for file in (self.files["log.jsonl"], table):
                file.flush()
        except OSError as error:
            raise CheckpointError(f"cannot write the logs in {self.directory}: {error.strerror}") from error
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, float) and name != "step":
                    self.board.add_scalar(f"{kind}/{name}", value, record["step"])

    def close(self) -> None:
        for file in self.files.values():
            try:
                file.close()
            except OSError:  # what could not be flushed has been reported by write
                continue
        if self.board is not None:
            self.board.close()


def read(directory: str | Path) -> list[dict[str, Any]]:
    """The records of a run; a last line that was cut off by a kill is left out."""
    path = Path(directory) / "log.jsonl"
    records = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            record = None
        if not isinstance(record, dict) or record.get("kind") not in KINDS or "step" not in record:
            raise ValueError(f"{path}, line {number}: got {line[:80]!r}, wanted a record with kind and step")
        records.append(record)
    return records


def _tensorboard(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception:  # missing, or there and broken: logs are in the files anyway
        return None
    return SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)


def memory(device: torch.device) -> int:
    """Peak bytes: of the device's allocator on a GPU, of the process elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Progress:
    """A tqdm bar an epoch; without tqdm or away from a terminal nothing but the epoch's line."""

    def __init__(self, epochs: int, batches: int, quiet: bool) -> None:
        self.epochs, self.batches, self.quiet = epochs, batches, quiet
        self.bar: Any = None

    def epoch(self, epoch: int, batch: int) -> None:
        if self.quiet or not sys.stderr.isatty():
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        width = len(str(self.epochs))
        self.bar = tqdm(
            total=self.batches, initial=batch, leave=False, dynamic_ncols=True, unit="batch",
            desc=f"epoch {epoch + 1:>{width}}/{self.epochs}",
        )  # fmt: skip

    def step(self, record: dict[str, Any]) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"loss {record['loss']:.4f}  {record['images_per_second']:.0f} img/s  "
                f"loss op {100 * record['loss_share']:.1f} %  {record['memory'] / 2**20:.0f} MiB"
            )
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def say(self, text: str) -> None:
        """A line that stays."""
        self.close()
        if not self.quiet:
            print(text, flush=True)


def shown(metrics: dict[str, float], ks: Iterable[int], images: int) -> str:
    """Metrics as one line of percentages; Recall@K only for K below the number of images, where it can miss."""
    names = [(f"recall@{k}", f"R@{k}") for k in ks if k < images] + [("map@r", "MAP@R"), ("r_precision", "RP")]
    return "  ".join(f"{short} {100 * metrics[name]:.2f}" for name, short in names if name in metrics)
