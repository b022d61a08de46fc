"""What people read: a Markdown table of a run, and docs/benchmarks.md, of which each kind of run writes its part."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.data import REGIMES
from bench.harness import Row
from bench.machine import ROOT
from bench.plots import LOOKS, name, shape
from pydml.tables import replace_part

PAGE = ROOT / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

This page compares pydml with hand-written dense PyTorch, `torch.compile` of that code, pytorch-metric-learning (PML),
KeOps and faiss. It is written by `python -m bench --publish`, `python -m bench --targets --publish` and
`python -m bench --tuples --publish`; each run replaces the text between its own markers.

Each time is the median of at least five samples of one step on the CPU, interleaved with the samples of the other
peers; `×` is the time of the peer divided by the time of pydml. Memory is the peak above the inputs, measured in a
separate process. Before anything is timed, the values and gradients of all peers are compared, to 1e-3 of the largest
entry in fp32; losses that select pairs or cut at a margin may differ in up to 2 % of the rows, where rounding decides.
Regimes of the input data:

{regimes}
"""

#: Section -> its heading and introduction. A section is added to the page when it is first published.
SECTIONS = {
    "targets": "## Targets",
    "tuples": """## Losses with a miner's tuple

A user who switches from PML by changing the imports typically has a miner and a loss. `python -m bench --tuples
--publish` measures that step, forward and backward, with pydml's miner and loss against PML's miner and loss, at
d = 128:

- **ms-miner**: the pairs of `MultiSimilarityMiner(0.1)`; early in training these are about half of all pairs;
- **batch-hard**: the triplets of `BatchHardMiner`;
- **triplets**: a tuple of all triplets, the same tensors for both libraries, so that only the loss is measured;
- **xbm**: each library's `CrossBatchMemory` of 4096 embeddings with its `MultiSimilarityMiner(0.1)`;
- **pml-xbm**: pydml's loss and miner in PML's `CrossBatchMemory`.

Losses for which PML materialises all triplets, or all positive against all negative pairs, are measured up to
B = 256.""",
    "losses": "## All losses",
}


def milliseconds(text: str) -> str:
    """Three digits, in the unit that suits."""
    value = float(text)
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms" if value >= 1 else f"{1000 * value:.3g} µs"


def summary(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: a line for each case and mode, a column for each peer."""
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((name(row), shape(row), row["regime"], row["mode"]), {})[row["peer"]] = row
    timed = [peer for peer in LOOKS if any(found.get(peer, {}).get("p50") for found in lines.values())]
    peers = [peer for peer in timed if peer not in ("pydml", "half_gemm")]
    remembered = [peer for peer in LOOKS if any(found.get(peer, {}).get("peak_mib") for found in lines.values())]
    head = ["loss", "shape", "regime", "mode", "mined", "pydml", *(f"over {LOOKS[peer][0]}" for peer in peers)]
    head += [f"pydml in {LOOKS['half_gemm'][0]}"] if "half_gemm" in timed else []
    head += [f"{LOOKS[peer][0]}, MiB" for peer in remembered]
    table = [head, ["---"] * 4 + ["--:"] * (len(head) - 4)]
    notes: dict[str, list[str]] = {}
    for (loss, at, regime, mode), found in lines.items():
        own = found.get("pydml", {}).get("p50")
        cells = [loss, at, regime, mode]
        fraction = next((row["mined_fraction"] for row in found.values() if row["mined_fraction"]), "")
        cells.append(f"{float(fraction):.2%}" if fraction else "")
        cells.append(milliseconds(own) if own else _absent(found.get("pydml")))
        for peer in peers:
            theirs = found.get(peer, {}).get("p50")
            cells.append(f"{float(theirs) / float(own):.3g}×" if theirs and own else _absent(found.get(peer)))
        if "half_gemm" in timed:
            gemm = found.get("half_gemm", {}).get("p50")
            cells.append(f"{float(own) / float(gemm):.3g}" if own and gemm else "")
        cells += [found.get(peer, {}).get("peak_mib") or "" for peer in remembered]
        table.append(cells)
        for peer, row in found.items():
            if row["note"]:
                label = LOOKS.get(peer, (peer,))[0]
                notes.setdefault(f"{label}: {row['note']}", []).append(f"{loss} {at}")
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    remarks = [
        f"- {note} ({', '.join(dict.fromkeys(where))})" for note, where in notes.items() if "half the" not in note
    ]
    return "\n\n".join([text, where_measured(rows), *(["Notes:\n\n" + "\n".join(remarks)] if remarks else [])])


def _absent(row: Row | None) -> str:
    if row is None:
        return ""
    return "**error**" if row["status"] == "error" else "–"


def where_measured(rows: Sequence[Row]) -> str:
    """Machine, versions and commits of some rows, in a sentence."""

    def of(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows if row[column])) or "none"

    dates = sorted(row["date"][:10] for row in rows)
    when = "" if not dates else dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"Measured {when} on {of('device')} with {of('threads')} threads; torch {of('torch')}, PML {of('pml')}, "
        f"Python {of('python')}; pydml {of('pydml')}, backend {of('backend')}, commit {of('commit')}."
    )


def publish(section: str, text: str, figures: Sequence[Path], page: Path = PAGE) -> None:
    """Put a section and its figures into the documentation; the figures that it had before are removed."""
    images = page.parent / "img"
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob(f"{section}-*.png"):
        old.unlink()
    shown = []
    for figure in figures:
        target = images / f"{section}-{figure.name}"
        shutil.copyfile(figure, target)
        shown.append(f"![{figure.stem.replace('-', ' ')}](img/{target.name})")
    if page.exists():
        whole = page.read_text(encoding="utf-8")
    else:
        whole = HEAD.format(regimes="\n".join(f"- **{regime}**: {meaning}" for regime, meaning in REGIMES.items()))
    if f"<!-- generated: {section} -->" not in whole:
        whole += f"\n{SECTIONS[section]}\n\n<!-- generated: {section} -->\n<!-- end -->\n"
    page.write_text(replace_part(page.name, whole, section, "\n\n".join([text, *shown])), encoding="utf-8")
