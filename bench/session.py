"""One run of the command: which tasks, into which files, with which report at the end."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench import cases, harness, plots, report
from bench.data import REGIMES
from bench.harness import Options, Table, Task
from bench.machine import ROOT
from bench.registry import PEERS
from bench.targets import Target, markdown, targets, tuple_targets, verdicts
from pydml.backends import resolve

RESULTS = ROOT / "bench" / "results"
QUICK_PEERS = ("pydml", "dense", "pml", "faiss", "half_gemm")


def _known(what: str, given: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    if unknown := [name for name in given if name not in options]:
        raise ValueError(f"{what}: got {', '.join(unknown)}, wanted some of {', '.join(options)}")
    return tuple(given)


def options_from(args: argparse.Namespace) -> Options:
    """Checked options of a run."""
    for name, least in (("repeats", 5), ("threads", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}: got {getattr(args, name)}, wanted at least {least}")
    try:
        resolve(args.backend, torch.device("cpu"))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    peers = _known("peers", args.peers or (QUICK_PEERS if args.quick else tuple(PEERS)), tuple(PEERS))
    return Options(
        peers=peers,
        modes=_known("modes", args.modes, cases.MODES),
        repeats=args.repeats,
        threads=args.threads,
        backend=args.backend,
        memory=() if args.no_memory else tuple(peer for peer in peers if peer != "half_gemm"),
        resume=args.resume,
    )


def tasks_from(args: argparse.Namespace, options: Options) -> list[Task]:
    """The cases that the arguments ask for."""
    regimes = _known("regimes", args.regimes, tuple(REGIMES))
    if args.shapes:
        chosen = cases.select(args.loss, args.shapes, regimes)
    elif args.quick:
        chosen = cases.quick_cases()
        if args.loss:
            chosen = [case for case in chosen if case.variant.op in args.loss or case.variant.name in args.loss]
    else:
        chosen = cases.default_cases(args.loss, regimes)
    if not chosen:
        raise ValueError("loss, shapes: got no case to run; proxy losses take shapes BxDxC, all others BxD")
    without = replace(options, memory=())  # a quick run has no time to start a process for each of them
    spared = {
        case.name for case in chosen if args.quick and (case.variant.name, case.regime) != ("ms/mined", "trained")
    }
    return [Task(case, without if case.name in spared else options) for case in chosen]


def overview() -> str:
    """What there is to choose from."""
    lines = ["losses:", *(f"  {name}" for name in (*cases.VARIANTS, *cases.TUPLES))]
    lines += ["regimes:", *(f"  {name:<10} {meaning}" for name, meaning in REGIMES.items())]
    lines += ["modes:", *(f"  {name}" for name in cases.MODES), "peers:", *(f"  {name}" for name in PEERS)]
    lines += ["targets:"]
    for target in targets().values():
        names = [case.name for case in target.cases]
        lines.append(f"  {target.name:<24} {', '.join(names[:3])}{', …' if len(names) > 3 else ''}")
    return "\n".join(lines)


def start(args: argparse.Namespace) -> int:
    """Run what the arguments ask for, and return the exit status."""
    if args.list:
        print(overview())
        return 0
    options = options_from(args)
    torch.set_num_threads(options.threads)
    folder: Path = args.output or RESULTS
    if args.only and not args.targets:
        raise ValueError("only: got it without --targets, wanted both")
    if args.targets:
        return _run_targets(args, options, folder)
    if args.tuples:
        return _run_tuples(args, options, folder)
    kind = "quick" if args.quick else "losses"
    table = Table(folder / f"{kind}.csv", keep=args.resume)
    finished = harness.run(tasks_from(args, options), table)
    return _finish(table, finished, report.summary(list(table.rows.values())), kind, folder, args.publish)


def _run_targets(args: argparse.Namespace, options: Options, folder: Path) -> int:
    every = targets()
    chosen: list[Target] = [every[name] for name in _known("only", args.only or tuple(every), tuple(every))]
    table = Table(folder / "targets.csv", keep=args.resume or bool(args.only))
    tasks = [task for target in chosen for task in target.tasks(options)]
    finished = harness.run(tasks, table)
    text = markdown(verdicts(list(every.values()) if args.publish else chosen, table))
    text += "\n\n" + report.where_measured(list(table.rows.values()))
    status = _finish(table, finished, text, "targets", folder, args.publish)
    return status or int(any(verdict.met is False for verdict in verdicts(chosen, table)))


def _run_tuples(args: argparse.Namespace, options: Options, folder: Path) -> int:
    """A part of the targets by itself: it has a table and a section of its own, so that no other is touched."""
    chosen = tuple_targets()
    table = Table(folder / "tuples.csv", keep=args.resume)
    finished = harness.run([task for target in chosen for task in target.tasks(options)], table)
    judged = verdicts(chosen, table)
    text = "\n\n".join((markdown(judged), report.summary(list(table.rows.values()))))
    status = _finish(table, finished, text, "tuples", folder, args.publish)
    return status or int(any(verdict.met is False for verdict in judged))


def _finish(table: Table, finished: bool, text: str, kind: str, folder: Path, publish: bool) -> int:
    """Write table and figures, also of a run that was interrupted."""
    rows = list(table.rows.values())
    (folder / f"{kind}.md").write_text(text + "\n", encoding="utf-8")
    figures = [] if kind == "tuples" else plots.plot_all(rows, folder / kind)
    print(text)
    print(f"\n{table.file.name}, {kind}.md and {len(figures)} figures are in {_shown(folder)}")
    if publish:
        report.publish(kind if kind in ("targets", "tuples") else "losses", text, figures)
        print(f"published to {_shown(report.PAGE)}")
    for row in table.errors:
        print(f"error: {plots.name(row)} {plots.shape(row)} {row['regime']} {row['mode']} {row['peer']}: {row['note']}")
    if not finished:
        print("interrupted: go on with --resume")
        return 130
    return int(bool(table.errors))


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
