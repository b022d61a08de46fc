"""Find tiles with which every kernel compiles without spills: ``python -m pydml.triton_kernels.fit``.

Writes the entries that differ from the preferred ones to ``exceptions.json``, which :mod:`.table` reads. To be run
after a change of a kernel or of Triton's version with which :mod:`.gate` finds faults; entries without faults stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from pydml.triton_kernels import table
from pydml.triton_kernels.gate import ARCHS, WIDTHS, Outcome, Variant, compile_variant, entries, variants

FILE = Path(table.__file__).with_name("exceptions.json")
Fields = dict[str, int]
#: What a step away from the preferred entry costs, roughly: a halved chunk is one more product of all pairs, halved
#: tiles load their rows twice as often; warps, stages and steps along d only change how well loads are hidden.
PRICE = {"chunk": 8.0, "rows": 4.0, "cols": 2.0, "depth": 1.0, "stages": 0.7, "warps": 0.5}


def alternatives(arch: str, math: str, width: int, kind: str) -> Iterator[Fields]:
    """Other entries, the cheapest first, as the fields in which they differ from the preferred one."""
    entry = asdict(table.base(arch, math, width, kind))
    choices = {
        "chunk": [entry["chunk"] >> k for k in range(3) if entry["chunk"] >> k >= 32 or not k],
        "rows": [entry["rows"], entry["rows"] // 2],
        "cols": [entry["cols"] >> k for k in range(3) if entry["cols"] >> k >= 16],
        "depth": [d for d in (entry["depth"], entry["depth"] // 2, 2 * entry["depth"]) if 16 <= d <= width],
        "stages": sorted((1, 2, 3), key=lambda n: abs(n - entry["stages"])),
        "warps": [entry["warps"], 12 - entry["warps"]],
    }
    if entry["chunk"] == entry["depth"]:  # no gradient
        choices["chunk"] = choices["chunk"][:1]
    found = []
    for values in itertools.product(*choices.values()):
        steps = {name: choices[name].index(value) for name, value in zip(choices, values, strict=True)}
        fields = {name: value for name, value in zip(choices, values, strict=True) if steps[name]}
        found.append((sum(PRICE[name] * step for name, step in steps.items()), fields))
    yield from (fields for _, fields in sorted(found, key=lambda pair: pair[0])[1:])


class Entries:
    """The entries of one architecture, arithmetic and width, all kinds of launches, and what is compiled with them."""

    def __init__(self, arch: str, math: str, width: int) -> None:
        self.place = arch, math, width
        self.outcomes: dict[Variant, Outcome] = {}
        self.kinds: dict[tuple[str, str], str] = {}
        self.widths = [w for w in WIDTHS if min(w, table.WIDTHS[-1]) == width]

    def fields(self, kind: str) -> Fields:
        return table.exceptions().get(table.key(*self.place, kind), {})

    def choose(self, kind: str, fields: Fields) -> None:
        """Put an exception into the table, or take it out."""
        table.exceptions().pop(table.key(*self.place, kind), None)
        if fields:
            table.exceptions()[table.key(*self.place, kind)] = fields
        table.tiles.cache_clear()

    def variants(self) -> list[Variant]:
        arch, math, _ = self.place
        return [v for entry in entries([arch], [math], self.widths) for v in variants(*entry)]

    def faulty(self, first: Variant | None = None) -> Variant | None:
        """A variant with faults, looking first where one was before; None if there is none."""
        todo = self.variants()
        todo.sort(key=lambda v: first is None or v.name != first.name)
        for v in todo:
            if v not in self.outcomes:
                self.outcomes[v] = compile_variant(v)
            if self.outcomes[v].faults():
                return v
        return None

    def kind_of(self, variant: Variant) -> str:
        """The kind of launch that a variant is: it is another one with another entry."""
        launch = variant.name, self.outcomes[variant].what
        for kind in table.KINDS if launch not in self.kinds else ():
            before = self.fields(kind)
            self.choose(kind, {**before, "warps": 1})
            if variant not in self.variants():
                self.kinds[launch] = kind
            self.choose(kind, before)
        return self.kinds[launch]

    def fit(self) -> dict[str, Fields]:
        """The exceptions with which nothing has faults."""
        while (fault := self.faulty()) is not None:
            kind = self.kind_of(fault)
            print(table.key(*self.place, kind), self.outcomes[fault].what, self.outcomes[fault].faults(), flush=True)
            known = fault
            for fields in alternatives(*self.place, kind):
                self.choose(kind, fields)
                others = self.faulty(known)
                if others is None or self.kind_of(others) != kind:
                    print(f"{table.key(*self.place, kind)}: {fields}", flush=True)
                    break
                known = others
            else:
                raise SystemExit(f"{table.key(*self.place, kind)}: every entry that was tried has faults")
        return {table.key(*self.place, kind): self.fields(kind) for kind in table.KINDS if self.fields(kind)}


def fit(arch: str, math: str, width: int) -> dict[str, Fields]:
    return Entries(arch, math, width).fit()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pydml.triton_kernels.fit", description=__doc__.splitlines()[0])
    parser.add_argument("--archs", nargs="+", default=ARCHS, choices=ARCHS)
    parser.add_argument("--maths", nargs="+", default=table.MATHS, choices=table.MATHS)
    parser.add_argument("--widths", nargs="+", default=table.WIDTHS, type=int)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    todo = [entry[:3] for entry in entries(options.archs, options.maths, options.widths)]
    for similar in (False, True):  # to others: those have to be settled, and read by new processes
        part = [entry for entry in todo if (entry[0] in table.TILED_LIKE) == similar]
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            for found in pool.map(fit, *zip(*part, strict=True)) if part else ():
                kept = json.loads(FILE.read_text()) | found
                FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
