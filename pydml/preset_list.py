"""``pydml presets``: the settings by name on the command line; apart from the presets, which must not need argparse."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from pydml.presets import Preset, near_presets, presets


def main(argv: Sequence[str]) -> int:
    """List the presets whose name or loss holds a word; show the one whose name it is whole."""
    parser = argparse.ArgumentParser(
        prog="pydml presets", description="Settings of losses by name: all of them, those of a word, or one whole."
    )
    parser.add_argument("name", nargs="?", default="", help="a preset (ms/paper), or part of a name or of a class")
    name: str = parser.parse_args(argv).name
    every = presets()
    if name in every:
        print(*_whole(name, every[name]), sep="\n")
        return 0
    word = name.lower()
    found = {key: one for key, one in every.items() if word in key or word in one.loss.__name__.lower()}
    if not found:
        near = ", ".join(near_presets(name))
        print(f"pydml presets: got {name!r}, wanted a preset or a part of one; near matches: {near}", file=sys.stderr)
        return 2
    wide = max(map(len, found))
    wide_loss = max(len(one.loss.__name__) for one in found.values())
    for key, one in found.items():
        print(f"{key:{wide}}  {one.loss.__name__:{wide_loss}}  {one.note}")
    return 0


def _whole(name: str, one: Preset) -> Iterator[str]:
    """All that is known of one preset."""
    yield name
    yield f"  loss     {one.loss.__name__}: {one.loss.formula} ({one.loss.paper})"
    yield f"  source   {one.source}"
    yield f"  note     {one.note}"
    needed = "".join(f", {argument}=…" for argument in one.required)
    yield f"  call     pydml.preset({name!r}{needed})"
    arguments = {key: getattr(value, "__name__", repr(value)) for key, value in one.kwargs.items()}
    yield "  settings " + (", ".join(f"{key}={value}" for key, value in arguments.items()) or "the defaults")
    for what, words in one.recipe.items():
        yield f"  {what}: {words}"
