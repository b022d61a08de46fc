"""Where and with what a measurement was made: the columns that make a row comparable with another."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} × {len(names)}" if names else platform.machine()


def commit() -> str:
    """Of the source tree, with a + if it has changes."""
    try:
        described = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


@cache
def facts() -> dict[str, str]:
    """What stays the same for a whole run."""
    return {
        "device": cpu(),
        "torch": torch.__version__,
        "pydml": _version("pydml-kernels"),
        "pml": _version("pytorch-metric-learning"),
        "python": platform.python_version(),
        "commit": commit(),
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
