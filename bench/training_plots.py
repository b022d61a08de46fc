"""Figures of the training studies for docs/training.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure

from pydml.report.figures import COLOURS, STYLE

if TYPE_CHECKING:
    from bench.training import Studies


def draw(studies: Studies, folder: Path) -> None:
    """Write the figures of the studies that have results."""
    with matplotlib.rc_context(STYLE):
        for name, figure in (("batch", _batches(studies)), ("tournament", _tournament(studies))):
            if figure is not None:
                figure.savefig(folder / f"training-{name}.png", metadata={"Software": None})


def _batches(studies: Studies) -> Figure | None:
    """R@1 against the batch size: a point a seed, the line through the means."""
    found = {int(batch): [float(r["recall@1"]) for r in rows] for (_, batch), rows in studies.of("batch").items()}
    if len(found) < 2:
        return None
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    sizes = sorted(found)
    means = [statistics.fmean(found[size]) for size in sizes]
    axes.plot(sizes, means, color=COLOURS[0])
    for size, mean in zip(sizes, means, strict=True):
        axes.plot([size] * len(found[size]), found[size], "o", color=COLOURS[0], alpha=0.7)
        axes.annotate(f"{mean:.1f}", (size, mean), (0, 9), textcoords="offset points", ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.margins(x=0.12, y=0.25)
    images = int(next(row["images"] for row in studies.rows if row["study"] == "batch"))
    axes.set(
        title=f"Batch size, {images:,} images seen",
        xlabel="batch size, learning rate chosen for each",
        ylabel="test R@1, %",
    )
    return figure


def _tournament(studies: Studies) -> Figure | None:
    """R@1 of every competitor: a point an embedding size, ordered by their mean."""
    from bench.training import experiments

    found = {
        e: {size: float(row["recall@1"]) for size, row in rows.items()} for e, rows in experiments(studies).items()
    }
    found = {entry: recalls for entry, recalls in found.items() if recalls}
    if not found:
        return None
    order = sorted(found, key=lambda entry: statistics.fmean(found[entry].values()))
    figure = Figure(figsize=(6.4, 0.3 * len(order) + 1.2), layout="constrained")
    axes = figure.subplots()
    for i, size in enumerate(found[order[0]]):
        recalls = [found[entry][size] for entry in order]
        axes.plot(recalls, range(len(order)), "o", color=COLOURS[i], label=f"{size} numbers", alpha=0.85)
    axes.set_yticks(range(len(order)), order)
    axes.set(title="Tournament of losses", xlabel="test R@1, %")
    axes.legend(title="embeddings of", fontsize=8, title_fontsize=8, loc="lower right")
    return figure
