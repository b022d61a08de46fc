"""Runs cases: checks that the peers agree, times them in turns, measures memory, and writes a row for each result."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import agreement, machine, memory, timing
from bench.cases import Case
from bench.data import mined_fraction
from bench.pml_peers import Skip
from bench.registry import PEERS, Prepared, concerned
from pydml.backends import resolve

#: One row a measurement; times in milliseconds.
COLUMNS = (
    "op", "variant", "regime", "mode", "B", "d", "C", "peer", "status", "p20", "p50", "p80", "unit", "repeats",
    "peak_mib", "mined_fraction", "value_error", "gradient_error", "backend", "device", "threads", "torch", "pydml",
    "pml", "python", "commit", "date", "note",
)  # fmt: skip

Row = dict[str, str]
Key = tuple[str, ...]


def key(row: Row) -> Key:
    """What a row is a measurement of: a later row of the same key replaces it."""
    return tuple(row[name] for name in ("op", "variant", "regime", "mode", "B", "d", "C", "peer", "threads"))


class Table:
    """The rows of a run, in a CSV file to which each is appended as soon as it is known."""

    def __init__(self, file: Path, keep: bool = False) -> None:
        self.file = file
        self.rows: dict[Key, Row] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and keep:
            with file.open(newline="") as lines:
                for row in csv.DictReader(lines):
                    self._keep(row)
            return
        if file.exists():
            file.replace(file.with_suffix(".previous.csv"))
        with file.open("w", newline="") as lines:
            csv.writer(lines).writerow(COLUMNS)

    def add(self, values: dict[str, Any]) -> None:
        row = {name: "" if values.get(name) is None else str(values[name]) for name in COLUMNS}
        self._keep(row)
        with self.file.open("a", newline="") as lines:
            csv.DictWriter(lines, COLUMNS).writerow(row)

    def _keep(self, row: Row) -> None:
        """A case timed twice keeps its first time, taken in turns with its peers: a ratio is of one measurement."""
        before = self.rows.get(key(row))
        if before and before["p50"] and row["p50"]:
            row = before | {"peak_mib": row["peak_mib"] or before["peak_mib"]}
        self.rows[key(row)] = row

    def find(self, case: Case, peer: str, mode: str) -> Row | None:
        """The latest row of a measurement, whatever the number of threads."""
        wanted = identity(case) | {"mode": mode, "peer": peer}
        found = [row for row in self.rows.values() if all(row[name] == value for name, value in wanted.items())]
        return found[-1] if found else None

    @property
    def errors(self) -> list[Row]:
        return [row for row in self.rows.values() if row["status"] == "error"]


def identity(case: Case) -> Row:
    """The columns that say which case it is."""
    shape = case.shape
    return {
        "op": case.variant.op,
        "variant": case.variant.variant,
        "regime": case.regime,
        "B": str(shape.size),
        "d": str(shape.dim),
        "C": "" if shape.classes is None else str(shape.classes),
    }


@dataclass(frozen=True)
class Options:
    """How cases are run."""

    peers: tuple[str, ...] = tuple(PEERS)
    modes: tuple[str, ...] = ("full",)
    repeats: int = 9
    threads: int = 2
    backend: str = "auto"
    memory: tuple[str, ...] = ()  # peers whose peak memory is measured
    resume: bool = False


@dataclass(frozen=True)
class Task:
    """One case with its options: peers and modes may differ from case to case."""

    case: Case
    options: Options


def one_line(error: BaseException) -> str:
    """An exception as a note: its type and the first line of its message, without the paths of this machine."""
    text = (str(error).strip().splitlines() or [""])[0].replace(f"{machine.ROOT}{os.sep}", "")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


class Run:
    """Everything that one case leaves behind."""

    def __init__(self, task: Task, table: Table) -> None:
        self.case, self.options, self.table = task.case, task.options, table
        self.inputs = task.case.inputs()
        self.mined = mined_fraction(self.inputs) if task.case.variant.kind == "pair" else None
        self.differences: dict[str, agreement.Difference] = {}
        self.failed: set[str] = set()

    def add(self, peer: str, mode: str, status: str, **values: Any) -> None:
        prepared_note = values.pop("note", "")
        facts = machine.facts() | {"date": machine.now(), "threads": self.options.threads}
        found = self.differences.get(peer)
        self.table.add(
            identity(self.case)
            | facts
            | {"mode": mode, "peer": peer, "status": status, "unit": "ms", "backend": self.backend(peer)}
            | {"mined_fraction": None if self.mined is None else f"{self.mined:.5f}"}
            | {"value_error": f"{found.value:.1e}" if found else None}
            | {"gradient_error": f"{found.gradient:.1e}" if found else None}
            | values
            | {"note": prepared_note}
        )

    def backend(self, peer: str) -> str:
        return resolve(self.options.backend, torch.device("cpu")) if peer == "pydml" else ""

    def everywhere(self, peer: str, status: str, note: str) -> None:
        """The same row for every mode: a peer that cannot run."""
        self.failed.add(peer)
        for mode in modes_of(self.case, self.options):
            self.add(peer, mode, status, note=note)

    def prepare(self) -> dict[str, Prepared]:
        """The peers that can run, warmed up and checked against each other."""
        ready: dict[str, Prepared] = {}
        results: dict[str, agreement.Result] = {}
        for peer in concerned(self.options.peers, self.case):
            try:
                prepared = PEERS[peer](self.case, self.inputs, self.options.backend)
                loss = prepared.forward()
                gradients = prepared.gradients(loss)
            except Skip as reason:
                self.everywhere(peer, "skipped", str(reason))
                continue
            except Exception as error:  # torch.compile, KeOps and PML raise whatever they like
                status = "error" if peer in ("pydml", "dense") else "skipped"
                self.everywhere(peer, status, f"failed: {one_line(error)}")
                continue
            ready[peer] = prepared
            if prepared.checked:
                results[peer] = agreement.Result(loss.detach(), gradients)
        if results:
            plainest = agreement.reference(list(results))
            metric = self.case.variant.kind == "metric"
            for peer, result in results.items():
                if peer == plainest:
                    continue
                difference = agreement.compare(
                    result, results[plainest], selects=self.case.variant.selects, exact=metric
                )
                self.differences[peer] = difference
                if not difference.agrees:
                    del ready[peer]
                    self.everywhere(peer, "error", f"disagrees with {plainest}: {difference}")
        return ready

    def measure(self) -> None:
        ready = self.prepare()
        peaks: dict[str, tuple[float | None, str]] = {}
        timed: list[tuple[str, str, list[float]]] = []
        for mode in modes_of(self.case, self.options):

            def failed(peer: str, error: Exception, mode: str = mode) -> None:
                self.failed.add(peer)
                self.add(peer, mode, "error", note=f"failed while timed: {one_line(error)}")

            samples = timing.round_robin(ready, mode, self.options.repeats, failed)
            timed += [(peer, mode, times) for peer, times in samples.items()]
        for peer in self.options.memory:
            if peer in ready and peer not in self.failed and ready[peer].checked:
                peaks[peer] = memory.measure(self.case, self.inputs, peer, self.options.backend, self.options.threads)
        for peer, mode, times in timed:
            p20, p50, p80 = (f"{1e3 * t:.6g}" for t in timing.p20_p50_p80(times))
            mib, remark = peaks.get(peer, (None, ""))
            note = "; ".join(text for text in (ready[peer].note, remark) if text)
            peak = None if mib is None else f"{mib:.1f}"
            self.add(peer, mode, "ok", p20=p20, p50=p50, p80=p80, repeats=len(times), peak_mib=peak, note=note)


def modes_of(case: Case, options: Options) -> Sequence[str]:
    """A metric has no backward."""
    return ("forward",) if case.variant.kind == "metric" else options.modes


def missing(task: Task, table: Table) -> Task | None:
    """What of a task is not in the table yet; None if nothing."""
    case, options = task.case, task.options
    modes = modes_of(case, options)
    todo = []
    for peer in concerned(options.peers, case):
        found = [table.find(case, peer, mode) for mode in modes]
        done = all(row is not None and row["status"] in ("ok", "skipped") for row in found)
        wants_memory = peer in options.memory and any(
            row and row["status"] == "ok" and not row["peak_mib"] for row in found
        )
        if not done or wants_memory:
            todo.append(peer)
    if not todo:
        return None
    # times are compared with each other, so those of pydml are taken again beside those that were missing
    again = [peer for peer in options.peers if peer in todo or peer in ("pydml", "dense")]
    return replace(task, options=replace(options, peers=tuple(again)))


def run(tasks: Sequence[Task], table: Table, progress: bool = True) -> bool:
    """Run tasks in turn; False if interrupted. Whatever is in the table by then stays there."""
    bar = tqdm(tasks, disable=not progress, unit="case", dynamic_ncols=True)
    try:
        for task in bar:
            bar.set_description(task.case.name)
            left = missing(task, table) if task.options.resume else task
            if left is not None:
                torch.set_num_threads(left.options.threads)
                Run(left, table).measure()
    except KeyboardInterrupt:
        return False
    finally:
        bar.close()
    return True


def tasks_for(cases: Sequence[Case], options: Options) -> list[Task]:
    return [Task(case, options) for case in cases]
