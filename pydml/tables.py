"""Generated parts of the documentation: ``python -m pydml.tables`` writes them, ``--check`` lists those out of date.

A part is delimited by ``<!-- generated: NAME -->`` and ``<!-- end -->``. The parts written here are derived from the
classes, their signatures, docstrings and presets, so that nothing is written twice. Only a clone has the documents.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pydml import roofline
from pydml.functional import FUNCTIONS
from pydml.losses import LOSSES, MetricLoss, ProxyLoss
from pydml.presets import Preset, preset, presets
from pydml.reducers import REDUCTIONS

ROOT = Path(__file__).resolve().parents[1]
_CLASSES, _SIZE = 4, 8


class _Engines(TorchDispatchMode):
    """Notes which of our ops run, and with which policies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "pydml":
            names = [argument.name for argument in func._schema.arguments]
            policies = self.seen.setdefault(func._opname, [])
            if "policy" in names and args[names.index("policy")] not in policies:
                policies.append(args[names.index("policy")])
        return func(*args, **(kwargs or {}))


def engines(name: str) -> dict[str, list[str]]:
    """The engines that a loss runs, with their policies, for its default arguments and those of its presets.

    >>> engines("lifted")
    {'pair': ['exponential', 'lifted']}
    """
    cls = LOSSES[name]
    sizes = {"num_classes": _CLASSES, "embedding_size": _SIZE}
    needed = [p for p in inspect.signature(cls).parameters.values() if p.default is p.empty and p.name != "common"]
    arguments: dict[str, Any] = {p.name: sizes.get(p.name, 2) for p in needed}
    modules = [cls(**arguments)]
    if "base_loss" in inspect.signature(cls).parameters:
        arguments["base_loss"] = "binomial"
        modules.append(cls(**arguments))
    for other, chosen in presets().items():
        if chosen.loss is cls:
            modules.append(preset(other, **{argument: sizes[argument] for argument in chosen.required}))
    mode = _Engines()
    with mode:
        for module in modules:
            module(torch.arange(12.0 * _SIZE).cos().view(12, _SIZE), torch.arange(12) % _CLASSES, backend="tiled")
    return mode.seen


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(map(_cell, row)) + " |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _value(value: Any) -> str:
    return f"`{value.__name__ if callable(value) else repr(value)}`"


def _sections(cls: type[MetricLoss]) -> tuple[str, str, dict[str, str]]:
    """Summary, formulas and remarks, and the meaning of the arguments, from a class' docstring."""
    head, *rest = re.split(r"\n(Parameters|Examples)\n-+\n", inspect.getdoc(cls) or "")
    summary, _, body = head.strip().partition("\n\n")
    meaning: dict[str, str] = {}
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    for names, text in re.findall(r"^(\S.*)\n((?:    .*\n?)+)", sections.get("Parameters", ""), re.MULTILINE):
        text = " ".join(text.split()).replace("``", "`")
        symbols, dot, rest_of_text = text.partition(". ")
        each = re.split(r", (?![^(]*\))", symbols.removesuffix("."))  # "α, β, λ." says one symbol for each name
        for i, name in enumerate(names.split(", ")):
            alone = len(each) == len(names.split(", "))
            meaning[name] = f"{each[i]}.{dot and ' '}{rest_of_text}" if alone else text
    return " ".join(summary.split()).replace("``", "`"), body.strip(), meaning


def _arguments(cls: type[MetricLoss]) -> Iterator[str]:
    meaning = _sections(cls)[2]
    own = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    rows = [
        [f"`{p.name}`", "required" if p.default is p.empty else _value(p.default), meaning.get(p.name, "")] for p in own
    ]
    if any(row[2] for row in rows):
        yield from _table(("argument", "default", "meaning"), rows)
    elif rows:
        yield from _table(("argument", "default"), [row[:2] for row in rows])
    else:
        yield "No specific arguments."


def _reductions(cls: type[MetricLoss]) -> str:
    named = "`mean`, `sum`, `none`" if cls.over_anchors else "only `mean`, which the formula prescribes"
    theirs = {"anchor": "PerAnchorReducer"} | {kind: name for name, kind in REDUCTIONS.items()}
    fused = ", ".join(f"`{theirs[kind]}`" for kind in cls.reductions if kind != "none")
    if cls.pml is None and not cls.over_anchors:
        return f"{named}; the only reducer is {fused}"
    return f"{named}; fused {f'with {fused}' if cls.lists else 'with any reducer'}"


def losses_short() -> Iterator[str]:
    """For README.md: class, formula, paper, PML's name."""
    rows = [
        [f"`{cls.__name__}`", f"`{cls.formula}`", cls.paper, f"`{cls.pml}`" if cls.pml else "–"]
        for cls in LOSSES.values()
    ]
    yield from _table(("class", "formula", "paper", "PML"), rows)


def losses_long() -> Iterator[str]:
    """For docs/losses.md: everything that the classes say of themselves."""
    named = presets()
    for name, cls in LOSSES.items():
        summary, body, _ = _sections(cls)
        yield from (f"## {cls.__name__}", "", summary, "")
        family = cls.__mro__[1]
        if family.__name__.startswith("_"):  # what a family shares stands in its own docstring
            body = f"{body}\n\n{(inspect.getdoc(family) or '').partition(chr(10) * 2)[2]}".strip()
        if body:
            yield from ("```text", body.replace("``", ""), "```", "")
        yield from (*_arguments(cls), "")
        if issubclass(cls, ProxyLoss):
            yield "- Also takes `weight_init_func`, `weight_regularizer` and `weight_reg_weight`."
        yield f"- Distance: {', or '.join(f'`{d}`' for d in cls.distances)}."
        yield f"- Reductions: {_reductions(cls)}."
        mines = "epsilon" in inspect.signature(cls).parameters and cls.takes_tuple
        yield (
            f"- Takes `ref_emb`: {_yes(cls.takes_ref)}; `indices_tuple`: {_yes(cls.takes_tuple)}"
            f"{', without `epsilon`' if mines else ''}."
        )
        used = (f"`{op}` ({', '.join(policies)})" if policies else f"`{op}`" for op, policies in engines(name).items())
        yield f"- Engines: {', '.join(used)}."
        yield f"- Function: `pydml.functional.{FUNCTIONS[name].__name__}`."
        yield f"- Presets: {', '.join(f'`{other}`' for other, chosen in named.items() if chosen.loss is cls)}."
        yield ""


def _preset_row(name: str, chosen: Preset) -> list[str]:
    arguments = ", ".join(f"{argument}={_value(value)}" for argument, value in chosen.kwargs.items())
    needs = "".join(f"; requires {argument}" for argument in chosen.required)
    recipe = "; ".join(f"{what}: {how}" for what, how in chosen.recipe.items())
    return [f"`{name}`", (arguments or "defaults") + needs, chosen.source, chosen.note, recipe]


def presets_table() -> Iterator[str]:
    """For docs/presets.md: one table for each loss."""
    named = presets()
    for cls in LOSSES.values():
        yield from (f"## {cls.__name__}", "")
        rows = [_preset_row(name, chosen) for name, chosen in named.items() if chosen.loss is cls]
        yield from _table(("preset", "arguments", "source", "note", "recipe"), rows)
        yield ""


#: Document -> name of the part -> what makes it.
PARTS: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "README.md": {"losses": losses_short},
    "docs/losses.md": {"losses": losses_long},
    "docs/presets.md": {"presets": presets_table},
    "docs/gpu-triton.md": {"roofline": lambda: iter(roofline.table())},
}


def replace_part(document: str, text: str, name: str, content: str) -> str:
    """The text of a document with the content of one generated part replaced."""
    start, end = f"<!-- generated: {name} -->", "<!-- end -->"
    before, opened, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"{document}: no part between {start} and {end}")
    return f"{before}{start}\n\n{content}\n\n{end}{after}"


def fill(document: str, text: str) -> str:
    """The text of a document with its generated parts renewed."""
    for name, make in PARTS[document].items():
        text = replace_part(document, text, name, "\n".join(make()).strip())
    return text


def stale(root: Path = ROOT) -> list[str]:
    """Documents whose generated parts are out of date."""
    return [name for name in PARTS if (old := (root / name).read_text(encoding="utf-8")) != fill(name, old)]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the generated parts, or with ``--check`` only say which are out of date."""
    parser = argparse.ArgumentParser(prog="python -m pydml.tables", description="Renew the documents' generated parts.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a part is out of date")
    options = parser.parse_args(argv)
    if not (ROOT / "README.md").exists():
        print("pydml.tables: the documents are not here; run it in a clone of the project", file=sys.stderr)
        return 2
    old = stale()
    for name in old:
        if options.check:
            print(f"{name}: out of date; run python -m pydml.tables", file=sys.stderr)
        else:
            path = ROOT / name
            path.write_text(fill(name, path.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"{name}: renewed")
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
