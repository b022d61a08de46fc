"""Figures from the rows of a run: an overview of speed-ups, and times, speed-ups and memory against B."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from bench.harness import Row

#: Peer -> label, colour (told apart by colour-blind eyes too), marker.
LOOKS = {
    "pydml": ("pydml", "#D55E00", "o"),
    "compile": ("torch.compile", "#0072B2", "s"),
    "dense": ("dense PyTorch", "#009E73", "^"),
    "pml": ("PML", "#CC79A7", "D"),
    "keops": ("KeOps", "#E69F00", "v"),
    "faiss": ("faiss", "#56B4E9", "P"),
    "half_gemm": ("½ X·Xᵀ", "#555555", "x"),
}
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.dpi": 150,
    "savefig.bbox": "tight",
}


def name(row: Row) -> str:
    """``ms/mined`` and the like."""
    return f"{row['op']}/{row['variant']}" if row["variant"] else row["op"]


def shape(row: Row) -> str:
    return "×".join(row[part] for part in ("B", "d", "C") if row[part])


def _timed(rows: Iterable[Row], mode: str) -> list[Row]:
    """Rows with a time; a metric has only a forward."""
    return [row for row in rows if row["p50"] and (row["mode"] == mode or row["op"] == "recall")]


def _origin(row: Row) -> str:
    """Where the numbers come from, for the small print."""
    return f"{row['device']}, {row['threads']} threads, torch {row['torch']}, commit {row['commit']}"


def _short(number: float) -> str:
    """1024 -> 1k."""
    return f"{number / 1024:g}k" if number >= 1024 and number % 1024 == 0 else f"{number:g}"


def _times(number: float, _: Any = None) -> str:
    return f"{number:.3g}×"


def plot_all(rows: Sequence[Row], folder: Path, mode: str = "full") -> list[Path]:
    """Every figure that the rows have something for."""
    folder.mkdir(parents=True, exist_ok=True)
    timed = _timed(rows, mode)
    made = []
    with plt.rc_context(STYLE):
        for regime in dict.fromkeys(row["regime"] for row in timed):
            of_regime = [row for row in timed if row["regime"] == regime or row["op"] == "recall"]
            made.append(_overview(of_regime, regime, mode, folder))
        groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        for row in timed:
            groups[name(row), row["d"], row["regime"]].append(row)
        small: dict[str, dict[str, list[Row]]] = defaultdict(dict)  # d -> title of a panel -> its rows
        for (loss, dim, regime), group in groups.items():
            own = [row for row in group if row["peer"] == "pydml"]
            if len({row["B"] for row in own if row["peak_mib"]}) > 1:
                made.append(_against_size(group, loss, dim, regime, mode, folder))
            elif len({row["B"] for row in own}) > 1 and {row["peer"] for row in group} - {"pydml", "half_gemm"}:
                small[dim][f"{loss}, {regime}"] = group
        made += [_small_multiples(panels, dim, mode, folder) for dim, panels in small.items()]
    return [path for path in made if path is not None]


def _overview(rows: Sequence[Row], regime: str, mode: str, folder: Path) -> Path | None:
    """Bars: how many times faster pydml is than each peer, for every loss at its largest shape."""
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        times[name(row), shape(row)][row["peer"]] = float(row["p50"])
    compared = {at: found for at, found in times.items() if "pydml" in found and set(found) - {"pydml", "half_gemm"}}
    if not compared:
        return None
    chosen: dict[str, str] = {}  # loss -> its largest shape
    for loss, at in compared:
        chosen[loss] = max(chosen.get(loss, at), at, key=lambda text: math.prod(map(int, text.split("×"))))
    losses = list(chosen)
    peers = [p for p in LOOKS if p not in ("pydml", "half_gemm") and any(p in compared[a] for a in chosen.items())]
    main = Counter(chosen.values()).most_common(1)[0][0]
    fig, ax = plt.subplots(layout="constrained")
    gains, middles, top = [], [], 0.0
    for loss in losses:  # each takes the room that its bars need
        found = compared[loss, chosen[loss]]
        present = [peer for peer in peers if peer in found]
        middles.append(top + (len(present) - 1) / 2)
        for i, peer in enumerate(present):
            gain = found[peer] / found["pydml"]
            gains.append(gain)
            ax.barh(top + i, gain - 1, 0.9, left=1, color=LOOKS[peer][1])
            place: dict[str, Any] = {"ha": "left", "x": gain * 1.03} if gain >= 1 else {"ha": "right", "x": gain / 1.03}
            ax.text(y=top + i, s=_times(gain), va="center", fontsize=7, color="#333333", **place)
        top += len(present) + 0.9
    fig.set_size_inches(9, 1.4 + 0.135 * top)
    ax.axvline(1, color="#333333", linewidth=1)
    ax.set_xscale("log")
    ax.set_xlim(min(min(gains) / 1.6, 0.8), max([1.5, *gains]) * 1.5)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(_times))
    ax.xaxis.set_minor_formatter(NullFormatter())
    labels = [loss if chosen[loss] == main else f"{loss}, {chosen[loss]}" for loss in losses]
    ax.set_yticks(middles, labels, fontsize=8)
    ax.set_ylim(top - 0.9, -1)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"time of the peer / time of pydml ({_step(mode)}), log scale: right of 1× pydml is faster")
    ax.set_title(f"Speed-up of pydml, {main}, regime «{regime}»", loc="left", pad=22)
    handles = [Patch(color=LOOKS[peer][1], label=f"over {LOOKS[peer][0]}") for peer in peers]
    ax.legend(handles=handles, ncols=len(peers), loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, fontsize=9)
    fig.text(0.01, -0.005, _origin(rows[0]), fontsize=7, color="#777777", va="top")
    path = folder / f"overview-{regime}.png"
    fig.savefig(path)
    plt.close(fig)
    return path


def _step(mode: str) -> str:
    return {"full": "forward + backward"}.get(mode, mode)


def _series(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Peer -> B -> row."""
    series: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        series[row["peer"]][int(row["B"])] = row
    return series


def _log_axes(ax: Any, sizes: Sequence[int], labels: Any) -> None:
    """Both axes logarithmic, with at least two numbers on the vertical one."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [_short(b) for b in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    low, high = ax.get_ylim()
    if high / low < 20:
        ax.set_ylim(low / (20 * low / high) ** 0.5, high * (20 * low / high) ** 0.5)
    if high / low < 1000:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(labels))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _finish(fig: Any, axes: Sequence[Any], title: str, row: Row, path: Path) -> Path:
    """One title and one legend for all panels; write the file."""
    handles = {text: handle for a in axes for handle, text in zip(*a.get_legend_handles_labels(), strict=True)}
    legend = fig.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), title=_origin(row)
    )
    legend.get_title().set(fontsize=7, color="#777777")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    fig.savefig(path)
    plt.close(fig)
    return path


def _small_multiples(panels: dict[str, list[Row]], dim: str, mode: str, folder: Path) -> Path:
    """A panel for each loss and regime, all with the same axes: the speed-up over each peer against B."""
    columns = min(5, len(panels))
    lines = math.ceil(len(panels) / columns)
    size = (max(2.3 * columns, 4.6), 1.9 * lines + 1.1)
    fig, axes = plt.subplots(
        lines, columns, figsize=size, squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    sizes = sorted({int(row["B"]) for rows in panels.values() for row in rows})
    for ax, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        series = _series(rows)
        for peer in (p for p in LOOKS if p in series and p not in ("pydml", "half_gemm")):
            both = sorted(set(series[peer]) & set(series["pydml"]))
            _line(ax, peer, {b: float(series[peer][b]["p50"]) / float(series["pydml"][b]["p50"]) for b in both})
        ax.axhline(1, color="#333333", linewidth=1)
        ax.set_title(title, loc="left", fontsize=9, fontweight="normal")
    used = list(axes.flat)[: len(panels)]
    for ax in list(axes.flat)[len(panels) :]:
        ax.remove()
    for i, ax in enumerate(used):
        _log_axes(ax, sizes, _times)
        lowest = i + columns >= len(panels)
        ax.tick_params(labelsize=8, labelbottom=lowest)
        ax.set_xlabel("batch size B" if lowest else "", fontsize=9)
    fig.supylabel("time of the peer / time of pydml", fontsize=9)
    title = f"Speed-up of pydml ({_step(mode)}), d = {dim}"
    return _finish(fig, used, title, next(iter(panels.values()))[0], folder / f"sizes-{dim}.png")


def _against_size(rows: Sequence[Row], loss: str, dim: str, regime: str, mode: str, folder: Path) -> Path:
    """Time, speed-up and memory against B, for a loss whose memory was measured."""
    series = _series(rows)
    sizes = sorted({int(row["B"]) for row in rows})
    others = [peer for peer in LOOKS if peer in series and peer not in ("pydml", "half_gemm")]
    panels = 2 + bool(others)
    fig, axes = plt.subplots(
        1, panels, figsize=(4.6 * panels, 3.9), squeeze=False, layout=ConstrainedLayoutEngine(w_pad=0.12)
    )
    left = list(axes[0])

    ax = left.pop(0)
    for peer in LOOKS:
        if peer in series:
            _line(ax, peer, {b: float(r["p50"]) for b, r in series[peer].items()})
            at = sorted(series[peer])
            low, high = ([float(series[peer][b][p]) for b in at] for p in ("p20", "p80"))
            ax.fill_between(at, low, high, color=LOOKS[peer][1], alpha=0.15, linewidth=0)
    ax.set_title(f"Time, {_step(mode)}", loc="left")
    ax.set_ylabel("ms (median; band p20 to p80)")

    if others:
        ax = left.pop(0)
        for peer in others:
            both = sorted(set(series[peer]) & set(series["pydml"]))
            _line(ax, peer, {b: float(series[peer][b]["p50"]) / float(series["pydml"][b]["p50"]) for b in both})
        ax.axhline(1, color="#333333", linewidth=1)
        ax.set_title("Speed-up of pydml over its peers", loc="left")
        ax.set_ylabel("time of the peer / time of pydml")

    ax = left.pop(0)
    for peer in LOOKS:
        found = {b: float(r["peak_mib"]) for b, r in series.get(peer, {}).items() if r["peak_mib"]}
        _line(ax, peer, {b: max(mib, 0.1) for b, mib in found.items()})
    ax.set_title("Peak memory above the inputs", loc="left")
    ax.set_ylabel("MiB")

    for ax in axes[0]:
        speedup = ax.get_ylabel().startswith("time of")
        _log_axes(ax, sizes, _times if speedup else lambda y, _: f"{y:g}")
        ax.set_xlabel("batch size B")
    path = folder / f"{loss.replace('/', '-')}-{dim}-{regime}.png"
    return _finish(fig, axes[0], f"{loss}, d = {dim}, regime «{regime}»", rows[0], path)


def _line(ax: Any, peer: str, points: dict[int, float]) -> None:
    if not points:
        return
    label, colour, marker = LOOKS[peer]
    at = sorted(points)
    style = {"linestyle": "--", "linewidth": 1} if peer == "half_gemm" else {"linewidth": 2}
    width = 2.6 if peer == "pydml" else style["linewidth"]
    ax.plot(
        at,
        [points[b] for b in at],
        color=colour,
        marker=marker,
        markersize=5,
        label=label,
        **style | {"linewidth": width},
    )
