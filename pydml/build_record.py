"""Why there is no C++ extension: what setup.py wrote down when it did not build it."""

from __future__ import annotations

import json
from pathlib import Path

#: Written by setup.py beside the package's modules: {"extension": "built", or why not, "chosen": by whoever built it}.
RECORD = Path(__file__).with_name("_build.json")


def why_not_built() -> tuple[str, bool]:
    """The reason in words, and whether somebody chose to go without the extension (PYDML_NO_EXT=1)."""
    try:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        outcome, chosen = str(record["extension"]), record.get("chosen") is True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "nothing says how this pydml was built", False
    if outcome == "built":
        return "it was built, and has since been removed or does not fit this Python and torch; build it again", False
    return outcome, chosen
