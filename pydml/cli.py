"""The ``pydml`` command: a table of subcommands, each imported only when it is called.

A subcommand is a function that takes its arguments as a list and returns an exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

#: Name -> (help, module, function).
COMMANDS: dict[str, tuple[str, str, str]] = {
    "bench": ("time the losses against other implementations (source tree only)", "pydml.cli", "bench"),
    "data": ("make a set of glyphs, or look at a dataset", "pydml.data.cli", "main"),
    "embed": ("write the embeddings of a checkpoint as .npy", "pydml.train.commands", "embed"),
    "eval": ("Recall@K, MAP@R and R-precision of a checkpoint", "pydml.train.commands", "evaluate_command"),
    "info": ("print versions, compile flags, CPU features, threads and backends", "pydml.info", "main"),
    "presets": ("settings of the losses by name: all, those of a word, or one whole", "pydml.preset_list", "main"),
    "report": ("figures of training runs, and one page of them", "pydml.report", "main"),
    "selftest": ("check every backend against the reference, and time them", "pydml.selftest", "main"),
    "train": ("train a retrieval model: logs, checkpoints, validation", "pydml.train.commands", "train"),
}


def bench(argv: Sequence[str]) -> int:
    """Run the benchmarks, which are never installed: they lie beside the package, or where the command is run."""
    roots = (Path(__file__).resolve().parents[1], Path.cwd())
    root = next((root for root in roots if (root / "bench" / "session.py").exists()), None)
    if root is None:
        print("pydml bench: bench/ is not part of the package; run this in the project's source tree", file=sys.stderr)
        return 2
    sys.path.insert(0, str(root))
    status: int = importlib.import_module("bench.__main__").main(argv)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="pydml", description="Fused deep-metric-learning losses.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (help_text, _, _) in COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    # Only the first word is ours; the rest, --help included, belongs to the subcommand.
    parser.parse_args(args[:1])
    _, module, function = COMMANDS[args[0]]
    status: int = getattr(importlib.import_module(module), function)(args[1:])
    return status
