"""The page: figures inside one HTML file, and as PNG files beside it."""

from __future__ import annotations

import argparse
import base64
import html
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydml.report.runs import Run, read_all
from pydml.train.checkpoint import CheckpointError, write_atomically

CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .3rem; }
p { margin: .3rem 0 .8rem; color: #444; max-width: 48rem; }
img { max-width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .3rem .8rem .3rem 0; text-align: right; }
th { border-bottom: 1px solid #999; font-weight: 600; } td { border-bottom: 1px solid #eee; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
details { margin: 1rem 0; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .8rem; }
"""

#: Name of the figure, heading, and what to see in it.
TEXTS = {
    "curves": ("Loss and recall", "Pale: every step; strong: a running mean. Recall, R-precision and MAP@R are of the "
               "validation classes, which are not trained on."),
    "batch_sizes": ("Batch size", "A point a run, the line through their means. Compare only runs that saw equally "
                    "many images, each with a learning rate chosen for its batch size."),
    "triplets": ("Triplets", "A point for each validation image: how similar it is to the closest image of its class "
                 "(to the right: better) and of another class (below: better). Below the diagonal the nearest "
                 "neighbour is right. Training should carry the points to the lower right; points that gather at "
                 "(1, 1) are a network that embeds everything in one place."),
    "similarities": ("Similarities of pairs", "All pairs of a sample of the validation images, each kind with area 1. "
                     "The less the two overlap, the better a threshold could tell them apart."),
    "gallery": ("Nearest neighbours", "Validation images drawn at random, and the five most similar others. Green: the "
                "same class; orange: another."),
}  # fmt: skip


def draw(runs: Sequence[Run]) -> Iterator[tuple[str, str, bytes]]:
    """Kind, file name and PNG of every figure that the runs have something for."""
    import matplotlib

    from pydml.report import figures

    with matplotlib.rc_context(figures.STYLE):
        made = [
            ("curves", "curves", figures.curves(runs)),
            ("batch_sizes", "batch-sizes", figures.batch_sizes(runs)),
            ("triplets", "triplets", figures.triplets(runs)),
            ("similarities", "similarities", figures.similarities(runs)),
        ]
        for i, run in enumerate(runs):
            made.append(("gallery", "gallery" if len(runs) == 1 else f"gallery-{i + 1}", figures.gallery(run)))
        for kind, name, figure in made:
            if figure is not None:
                buffer = io.BytesIO()
                figure.savefig(buffer, format="png", metadata={"Software": None})
                yield kind, f"{name}.png", buffer.getvalue()


def _percent(value: Any) -> str:
    return f"{100 * value:.2f}" if isinstance(value, (int, float)) else "–"


def _table(runs: Sequence[Run]) -> str:
    """A row a run: what it was, and how good it got."""
    head = ["run", "loss", "batch", "lr", "images seen", "validation R@1", "test R@1", "MAP@R", "images/s", "loss op"]
    rows = []
    for run in runs:
        config, test = run.config, run.results.get("test") or {}
        best = max((r[run.recall] for r in run.validated), default=None)
        steps = run.steps[len(run.steps) // 10 :]  # the first ones warm up
        speed = sorted(r["images_per_second"] for r in steps)
        share = sorted(r["loss_share"] for r in steps)
        rows.append([
            run.name, config["preset"] or config["loss"], config["batch_size"], f"{config['lr']:g}",
            f"{run.steps[-1]['images'] if run.steps else 0:,}", _percent(best), _percent(test.get(run.recall)),
            _percent(test.get("map@r")), f"{speed[len(speed) // 2]:.0f}" if speed else "–",
            f"{100 * share[len(share) // 2]:.1f} %" if share else "–",
        ])  # fmt: skip
    cells = "".join(f"<th{' class=text' if i < 2 else ''}>{html.escape(h)}</th>" for i, h in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{' class=text' if i < 2 else ''}>{html.escape(str(c))}</td>" for i, c in enumerate(row))
        for row in rows
    )
    return f"<div class=scroll><table><tr>{cells}</tr>{body}</table></div>"


def write(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the figures and ``index.html`` of some runs into a directory; returns the page."""
    runs, out = read_all(paths), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    title = f"Training run «{runs[0].name}»" if len(runs) == 1 else f"{len(runs)} training runs"
    parts = [f"<h1>{html.escape(title)}</h1>", _table(runs)]
    last = ""
    galleries = iter([run for run in runs if run.snapshots])
    for kind, name, png in draw(runs):
        write_atomically(out / name, png)
        heading, text = TEXTS[kind]
        if kind != last:
            parts.append(f"<h2>{heading}</h2><p>{html.escape(text)}</p>")
        if kind == "gallery":
            run = next(galleries)
            parts.append(f"<p>{html.escape(run.name)}</p>" if len(runs) > 1 else "")
        source = base64.b64encode(png).decode()
        parts.append(f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{source}">')
        last = kind
    for run in runs:
        settings = "\n".join(f"{key} = {value!r}" for key, value in sorted(run.config.items()))
        summary = f"<summary>Settings of {html.escape(run.name)}</summary>"
        parts.append(f"<details>{summary}<pre>{html.escape(settings)}</pre></details>")
    page = (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    write_atomically(out / "index.html", page.encode())
    return out / "index.html"


def main(argv: Sequence[str]) -> int:
    """Run ``pydml report``."""
    parser = argparse.ArgumentParser(prog="pydml report", description="Figures of training runs, and one page of them.")
    parser.add_argument("run", nargs="+", help="directories of runs (--out of pydml train)")
    parser.add_argument("--out", default="report", metavar="DIR", help="where to write; default report")
    options = parser.parse_args(argv)
    try:
        print(write(options.run, options.out))
    except ImportError as error:
        print(f"pydml report: needs {error.name}: pip install {error.name}", file=sys.stderr)
        return 1
    except (ValueError, OSError, CheckpointError) as error:
        print(f"pydml report: {error}", file=sys.stderr)
        return 1
    return 0
