"""What is installed and what it can do here: the first thing to read when something is slow or missing."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata

import torch

import pydml
from pydml.build_record import why_not_built


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _triton() -> str:
    # Imported, not just looked up: it may be installed and still not load.
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError as error:
        return f"not available: {error}"


def _extension() -> dict[str, str]:
    try:
        native = importlib.import_module("pydml._C")
    except ImportError as error:
        return {"pydml._C": f"not available: {error}", "why": why_not_built()[0]}
    entries = {**native.build_info(), "losses": native.losses(), "cpu features": native.cpu_features()}
    return {name: value if isinstance(value, str) else " ".join(value) or "none" for name, value in entries.items()}


def info() -> dict[str, dict[str, str]]:
    """Versions, the compiled extension, threads and backends, as section -> name -> text.

    >>> info()["backends"]["dense"]
    'available'
    """
    return {
        "versions": {
            "pydml": _version("pydml-kernels"),
            "torch": torch.__version__,
            "numpy": _version("numpy"),
            "python": platform.python_version(),
            "triton": _triton(),
            "pytorch-metric-learning": _version("pytorch-metric-learning"),
        },
        "extension": _extension(),
        "threads": {
            "intra-op": str(torch.get_num_threads()),
            "inter-op": str(torch.get_num_interop_threads()),
            "cores": str(os.cpu_count()),
        },
        "backends": {
            name: "available" if reason is None else f"not available: {reason}"
            for name, reason in pydml.backends().items()
        },
    }


def main(argv: Sequence[str]) -> int:
    """Print :func:`info` as aligned lines."""
    argparse.ArgumentParser(prog="pydml info", description="Say what is installed and what it can do.").parse_args(argv)
    sections = info()
    width = max(len(name) for entries in sections.values() for name in entries)
    for section, entries in sections.items():
        print(section)
        for name, text in entries.items():
            print(f"  {name:<{width}}  {text}")
    return 0
