"""What people read: a Markdown table of a run, and docs/benchmarks.md, of which each kind of run writes its part."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.data import REGIMES
from bench.harness import Row
from bench.machine import ROOT
from bench.plots import LOOKS, name, shape

PAGE = ROOT / "docs" / "benchmarks.md"

SKELETON = """# Benchmarks

What pydml gains over the dense code that people write by hand, `torch.compile` of that code,
pytorch-metric-learning (PML), KeOps and faiss. This page is written by `python -m bench --publish`,
`python -m bench --targets --publish` and `python -m bench --tuples --publish`; the text between markers is replaced by
the next run.

A time is the median of at least five samples, taken in turns with the other peers, of one step on the CPU; `×` is the
time of the peer divided by the time of pydml. Memory is the peak above the inputs, in a process of its own. Before
anything is timed, values and gradients of all peers are compared, to 1e-3 of the largest entry in fp32; losses that
select pairs or cut at a margin may differ in up to 2 % of the rows, where rounding decides. Regimes:

{regimes}

## Targets

<!-- begin targets -->
Not measured yet.
<!-- end targets -->

## Losses with a miner's tuple

Somebody who swaps the imports has a miner and a loss. `python -m bench --tuples --publish` measures that step, forward
and backward, with our miner and our loss against PML's miner and PML's loss, at d = 128:

- **ms-miner**: the pairs of `MultiSimilarityMiner(0.1)`; early in training they are about half of all pairs;
- **batch-hard**: the triplets of `BatchHardMiner`;
- **triplets**: a tuple of all triplets, the same tensors for both, so that only the loss is measured;
- **xbm**: each library's `CrossBatchMemory` of 4096 embeddings with its `MultiSimilarityMiner(0.1)`;
- **pml-xbm**: our loss and miner in PML's `CrossBatchMemory`.

Losses for which PML holds all triplets, or all positive against all negative pairs, are measured up to B = 256.

<!-- begin tuples -->
Not measured yet.
<!-- end tuples -->

## All losses

<!-- begin losses -->
Not measured yet.
<!-- end losses -->
"""


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
    """Put a section and its figures into the documentation."""
    images = page.parent / "img"
    images.mkdir(parents=True, exist_ok=True)
    shown = []
    for figure in figures:
        target = images / f"{section}-{figure.name}"
        shutil.copyfile(figure, target)
        shown.append(f"![{figure.stem.replace('-', ' ')}](img/{target.name})")
    if not page.exists():
        regimes = "\n".join(f"- **{regime}**: {meaning}" for regime, meaning in REGIMES.items())
        page.write_text(SKELETON.format(regimes=regimes), encoding="utf-8")
    begin, end = f"<!-- begin {section} -->", f"<!-- end {section} -->"
    old = page.read_text(encoding="utf-8")
    body = "\n\n".join([text, *shown])
    new, number = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{body}\n{end}", old, flags=re.DOTALL
    )
    if not number:
        raise ValueError(f"{page.name}: got no markers {begin} … {end}, wanted them around the section to replace")
    page.write_text(new, encoding="utf-8")
