"""The report's figures, each a function from runs to a matplotlib figure (or None where there is nothing to draw)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from pydml.report.runs import Run

#: Okabe and Ito's colours, which colour-blind eyes can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
RIGHT, WRONG, INK, FAINT = "#009E73", "#D55E00", "#222222", "#B8B8B8"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.parse_math": False,  # a $ in the name of a class or a run is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.edgecolor": "#888888",
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "savefig.facecolor": "white",
}


def _figure(width: float, height: float, between: float = 0.02) -> Figure:
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=between))


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def curves(runs: Sequence[Run]) -> Figure | None:
    """Loss of every step, smoothed, and validation metrics of every epoch, against images seen."""
    if not any(run.steps for run in runs):
        return None
    figure = _figure(10, 3.8)
    left, right = figure.subplots(1, 2)
    for i, run in enumerate(runs):
        x = np.array([r["images"] for r in run.steps])
        y = np.array([r["loss"] for r in run.steps])
        if len(y):
            window = max(1, len(y) // 20)
            smooth = np.convolve(np.pad(y, (window - 1, 0), mode="edge"), np.ones(window) / window, mode="valid")
            left.plot(x, y, color=_colour(i), alpha=0.25, linewidth=0.8)
            left.plot(x, smooth, color=_colour(i), label=run.name)
        seen = run.validated
        images = [r["images"] for r in seen]
        label = f"R@{run.config['ks'][0]}" if len(runs) == 1 else run.name
        right.plot(images, [100 * r[run.recall] for r in seen], color=_colour(i), marker="o", markersize=4, label=label)
        if len(runs) == 1 and seen:
            for colour, key, name in ((COLOURS[4], "r_precision", "R-precision"), (COLOURS[2], "map@r", "MAP@R")):
                right.plot(images, [100 * r[key] for r in seen], color=colour, marker="o", markersize=3, label=name)
    left.set(title="Training loss", xlabel="images seen", ylabel="loss")
    right.set(title="Validation classes", xlabel="images seen", ylabel="%")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    if len(runs) > 1 or any(run.validated for run in runs):
        right.legend(fontsize=8)
    return figure


def batch_sizes(runs: Sequence[Run]) -> Figure | None:
    """Recall against batch size: the figure of the Multi-Similarity supplement's Table 2."""
    points: dict[int, list[tuple[float, float]]] = {}
    kinds = set()
    for run in runs:
        score = run.score()
        if score is not None:
            kinds.add(score[1])
            points.setdefault(run.config["batch_size"], []).append((100 * score[0], run.config["lr"]))
    if len(points) < 2:
        return None
    figure = _figure(6, 3.8)
    axes = figure.subplots()
    sizes = sorted(points)
    means = [float(np.mean([recall for recall, _ in points[size]])) for size in sizes]
    axes.plot(sizes, means, color=COLOURS[0], linewidth=1.5)
    for size, mean in zip(sizes, means, strict=True):
        axes.plot([size] * len(points[size]), [r for r, _ in points[size]], "o", color=COLOURS[0], alpha=0.7)
        rates = ", ".join(f"{lr:g}" for lr in sorted({lr for _, lr in points[size]}))
        axes.annotate(
            f"{mean:.1f}\nlr {rates}", (size, mean), (0, 9), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.margins(x=0.12, y=0.25)
    axes.set(title="Batch size", xlabel="batch size", ylabel=f"R@1 on {' or '.join(sorted(kinds))} classes, %")
    return figure


def triplets(runs: Sequence[Run]) -> Figure | None:
    """Triplet scatter diagrams (Extreme Triplet Learning, figure 6): closest positive and negative of every image."""
    shown = [run for run in runs if run.snapshots]
    if not shown:
        return None
    columns = max(len(run.snapshots) for run in shown)
    figure = _figure(max(2.9 * columns, 4), 3.1 * len(shown))
    grid = figure.subplots(len(shown), columns, squeeze=False, sharex=True, sharey=True)
    low = min(float(min(s["s_ap"].min(), s["s_an"].min())) for run in shown for s in run.snapshots)
    low = max(-1.0, np.floor(10 * low) / 10 - 0.02)
    for row, run in zip(grid, shown, strict=True):
        for axes in row[len(run.snapshots) :]:
            axes.set_axis_off()
        for axes, snapshot in zip(row, run.snapshots, strict=False):
            right = snapshot["s_ap"] > snapshot["s_an"]
            axes.fill_between([low, 1], [low, 1], [1, 1], color=WRONG, alpha=0.05, linewidth=0)
            for chosen, colour in ((right, RIGHT), (~right, WRONG)):
                axes.scatter(
                    snapshot["s_ap"][chosen], snapshot["s_an"][chosen], s=4, color=colour, alpha=0.35, linewidth=0,
                    rasterized=True,
                )  # fmt: skip
            axes.plot([low, 1], [low, 1], color=INK, linewidth=0.8)
            axes.set(xlim=(low, 1.02), ylim=(low, 1.02), aspect="equal")
            axes.set_title(f"epoch {int(snapshot['epoch'])}: {100 * right.mean():.1f} % right", fontsize=10)
        row[0].set_ylabel("S with closest negative" + ("" if len(shown) == 1 else f"\n{run.name}"))
    for axes in grid[-1]:
        axes.set_xlabel("S with closest positive")
    return figure


def similarities(runs: Sequence[Run]) -> Figure | None:
    """Histograms of the similarities of positive and negative pairs, first and last snapshot of each run."""
    shown = [run for run in runs if run.snapshots]
    if not shown:
        return None
    columns = min(2, max(len(run.snapshots) for run in shown))
    figure = _figure(4.6 * columns, 2.8 * len(shown), between=0.06)  # ticks of neighbours meet there
    grid = figure.subplots(len(shown), columns, squeeze=False, sharex=True)
    filled = [np.flatnonzero(s["positives"] + s["negatives"]) for run in shown for s in run.snapshots]
    bins = len(shown[0].snapshots[0]["positives"])
    low = max(-1.0, 2 * min(int(f[0]) if len(f) else 0 for f in filled) / bins - 1.05)
    for row, run in zip(grid, shown, strict=True):
        for axes, snapshot in zip(row, [run.snapshots[0], run.snapshots[-1]][:columns], strict=True):
            edges = np.linspace(-1, 1, len(snapshot["positives"]) + 1)
            for key, colour in (("negatives", WRONG), ("positives", RIGHT)):
                density = snapshot[key] / max(snapshot[key].sum(), 1) / (edges[1] - edges[0])
                axes.stairs(density, edges, color=colour, fill=True, alpha=0.35)
                axes.stairs(density, edges, color=colour, linewidth=1.2, label=key)
            title = f"epoch {int(snapshot['epoch'])}" + ("" if len(shown) == 1 else f", {run.name}")
            axes.set(title=title, xlim=(low, 1), yticks=[])
            axes.grid(axis="y", visible=False)
            axes.spines["left"].set_visible(False)
    grid[0][0].legend(loc="upper left")
    for axes in grid[-1]:
        axes.set_xlabel("similarity of a pair")
    return figure


def gallery(run: Run) -> Figure | None:
    """Queries and their five nearest neighbours after the last epoch; the border says whether the class is right."""
    if not run.snapshots:
        return None
    images, right = run.snapshots[-1]["gallery"], run.snapshots[-1]["gallery_right"]
    names = run.snapshots[-1]["gallery_names"]
    rows, columns = images.shape[:2]
    half = -(-rows // 2)
    figure = Figure(figsize=(2 * columns * 0.78 + 0.6, half * 0.95))
    for block in range(2):
        for i in range(half):
            at = block * half + i
            for j in range(columns if at < rows else 0):
                width = 0.92 / (2 * columns + 1.2)
                x = 0.02 + (block * (columns + 0.8) + j + (0.25 if j else 0)) * width
                axes = figure.add_axes((x, 1 - (i + 0.92) / half, 0.9 * width, 0.72 / half))
                axes.imshow(images[at, j], interpolation="nearest" if images.shape[2] <= 48 else "antialiased")
                axes.set(xticks=[], yticks=[])
                axes.grid(visible=False)
                colour = FAINT if j == 0 else RIGHT if right[at, j - 1] else WRONG
                for spine in axes.spines.values():
                    spine.set(visible=True, color=colour, linewidth=1 if j == 0 else 2.6)
                if j == 0:
                    axes.set_title(_short(str(names[at, 0])), fontsize=8, fontweight="normal", pad=3, loc="left")
    return figure


def _short(name: str) -> str:
    """A class name as a label: what the font can draw of it, a Han character or an emoji it cannot."""
    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    name = "".join(c for c in name if font.get_char_index(ord(c))).strip()
    return name if len(name) <= 24 else name[:23] + "…"
