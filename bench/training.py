"""Studies of training on glyphs: ``python -m bench.training``. Seeds, batch sizes, and a tournament of losses.

Every finished run is a row of docs/training.csv, and is not run again: stop it and start it as you like.
Learning rates are chosen on validation classes, never on the test classes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pydml.data import Splits
from pydml.data import open as open_data
from pydml.data.glyph_set import SOP_SHAPE, glyphs
from pydml.data.writers import save
from pydml.demo import make_glyphs
from pydml.metrics import recall_at_k
from pydml.train import Config, Trainer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "training.csv"
DATA = ROOT / "build" / "training"


def make_sop_shaped(folder: Path) -> None:
    """Draw as many characters in as many faces as Stanford Online Products has classes and images, in their places."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        save(glyphs(system=True, shape=SOP_SHAPE), folder)


def make_quarter(folder: Path) -> None:
    """The demo's glyphs with every fourth training character, so that proxies see each of theirs often enough."""
    if not folder.exists():
        make_glyphs(folder.parent / "glyphs")
        whole = open_data(folder.parent / "glyphs")
        save(dataclasses.replace(whole, train=whole.train.subset(whole.train.labels % 4 == 0)), folder)


@dataclass(frozen=True)
class Images:
    """A set of images: what makes it, and how many of its training classes validate."""

    make: Callable[[Path], None]
    val_fraction: float = 0.1


#: "sop-shaped" needs the fonts of docs/data.md; the others need matplotlib's.
SETS = {"glyphs": Images(make_glyphs), "quarter": Images(make_quarter, 0.2), "sop-shaped": Images(make_sop_shaped)}


@dataclass(frozen=True)
class Run:
    """One training, as the first columns of its row."""

    study: str
    entry: str
    data: str
    batch: int
    dim: int
    seed: int
    lr: float
    proxy_lr: float | None
    warmup: float
    amp: str
    images: int


KEY = tuple(f.name for f in dataclasses.fields(Run))
FIELDS = (
    *KEY, "validation", "recall@1", "recall@10", "map@r", "untrained", "pixels", "loss_share", "seconds",
)  # fmt: skip
Row = dict[str, str]
Rate = tuple[float, float | None]  # of the network, of the proxies


@dataclass(frozen=True)
class Entry:
    """A competitor: a loss, the rates that it may choose from, and what else it needs."""

    preset: str | None = None
    loss: str = ""
    rates: tuple[Rate, ...] = ((1e-3, None), (3e-3, None))
    more: dict[str, Any] = field(default_factory=dict)


def _proxies(preset: str | None = None, loss: str = "") -> Entry:
    """Proxies learn 100 times as fast as the network, as in Proxy-Anchor's recipe, and want more classes in a batch."""
    return Entry(preset, loss, ((3e-4, 3e-2), (1e-3, 1e-1)), {"m_per_class": 2})


MS = Entry("ms/thesis")
#: The thesis' ten, then others of the library.
TOURNAMENT = {
    "Contrastive": Entry("contrastive/thesis"),
    "Triplet": Entry("triplet/thesis"),
    "LiftedStructure": Entry("lifted-star/thesis-code"),
    "NPair": Entry("n-pairs/thesis"),
    "ProxyNCA": _proxies("proxy-nca/thesis-code"),
    "Margin": Entry("margin/thesis-code", more={"miner": "DistanceWeightedMiner"}),
    "ArcFace": _proxies("arcface/thesis"),
    "MultiSimilarity": MS,
    "SoftTriple": _proxies("soft-triple/thesis"),
    "ProxyAnchor": _proxies("proxy-anchor/thesis"),
    "FastAP": Entry("fastap/official"),
    "EPHN": Entry("ephn/official"),
    "BinomialDeviance": Entry("binomial/paper"),
    "NormalizedSoftmax": _proxies(loss="normalized_softmax"),
    "DRO-KL-G": Entry("dro-kl-g/paper-0.01"),
}
THESIS = tuple(TOURNAMENT)[:10]
#: Embedding sizes; rates are chosen at the first.
DIMS = (64, 128, 32)
SEEDS = (0, 1, 2)
#: Batch size -> learning rates to begin with, and epochs of warm-up; more rates are tried as long as the best is at an
#: end. With the short warm-up the largest batch loses its way at rates that it needs.
BATCHES = {
    64: ((2e-3, 4e-3, 8e-3), 0.2),
    512: ((8e-3, 16e-3, 32e-3), 0.2),
    2048: ((4e-3, 8e-3, 16e-3), 1.0),
}
DEMO = Run("seeds", "MultiSimilarity", "glyphs", 1024, 128, 0, 3e-3, None, 0.2, "none", 98304)
BATCH = Run("batch", "MultiSimilarity", "sop-shaped", 0, 128, 0, 0.0, None, 0.2, "bf16", 239616)
CUP = Run("tournament", "", "quarter", 256, 0, 0, 0.0, None, 0.2, "bf16", 102144)
EPOCHS = 3


class Studies:
    """The rows so far, and how to get more."""

    def __init__(self, results: Path, data: Path) -> None:
        self.results, self.data = results, data
        self.rows: list[Row] = []
        if results.exists():
            with results.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            # two processes that share the work may have done a run both: it counts once
            self.rows = list({tuple(row[k] for k in KEY): row for row in rows}.values())
        self.splits: dict[str, Splits] = {}

    def row(self, run: Run, how: Entry) -> Row:
        """The row of a run, which is run if there is none yet."""
        wanted = {k: "" if v is None else str(v) for k, v in dataclasses.asdict(run).items()}
        for row in self.rows:
            if all(row[k] == v for k, v in wanted.items()):
                return row
        row = wanted | self._run(run, how)
        self.rows.append(row)
        fresh = not self.results.exists()
        with self.results.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        print(", ".join(f"{name} {value}" for name, value in row.items() if value), flush=True)
        return row

    def _run(self, run: Run, how: Entry) -> Row:
        if run.data not in self.splits:
            SETS[run.data].make(self.data / run.data)
            self.splits[run.data] = open_data(self.data / run.data)
        splits = self.splits[run.data]
        out = Path(tempfile.mkdtemp(prefix="pydml-training-"))
        config = Config(
            data=str(self.data / run.data), out=str(out / "run"), preset=how.preset, loss=how.loss,
            batch_size=run.batch, dim=run.dim, seed=run.seed, lr=run.lr, proxy_lr=run.proxy_lr, amp=run.amp,
            epochs=EPOCHS, warmup=run.warmup, images_per_epoch=run.images // EPOCHS,
            val_fraction=SETS[run.data].val_fraction, micro_batch=128 if run.batch > 512 else None, ks=(1, 10),
            **how.more,
        )  # fmt: skip
        began = time.perf_counter()
        try:
            trainer = Trainer(config, splits, quiet=True)
            before = self._before(run, splits, trainer)
            found = trainer.fit()
            with (out / "run" / "steps.csv").open(encoding="utf-8") as file:
                share = statistics.median(float(r["loss_share"]) for r in csv.DictReader(file))
        finally:
            shutil.rmtree(out, ignore_errors=True)
        numbers = {
            "validation": found["validation"]["recall@1"],
            **{name: found["test"][name] for name in ("recall@1", "recall@10", "map@r")},
            "loss_share": share,
        }
        return (
            {name: f"{100 * n:.2f}" for name, n in numbers.items()}
            | before
            | {"seconds": f"{time.perf_counter() - began:.0f}"}
        )

    def _before(self, run: Run, splits: Splits, trainer: Trainer) -> Row:
        """Recall@1 of raw pixels and of the untrained network: from a row that knows it, or measured."""
        known = [row for row in self.rows if row["data"] == run.data]
        same = [row for row in known if (row["dim"], row["seed"], row["amp"]) == (str(run.dim), str(run.seed), run.amp)]
        if known:
            pixels = known[0]["pixels"]
        else:
            test = splits.test
            pixels = f"{100 * recall_at_k(test.pixels().flatten(1).float(), test.labels, (1,))[1]:.2f}"
        untrained = same[0]["untrained"] if same else f"{100 * trainer.evaluate(splits.test)['recall@1']:.2f}"
        return {"untrained": untrained, "pixels": pixels}

    def chosen(self, run: Run, how: Entry, rates: Sequence[float]) -> float:
        """The rate that is best on the validation classes with seed 0; others are tried until it has a neighbour on
        either side."""
        rates = sorted(rates)
        while True:
            found = [float(self.row(dataclasses.replace(run, lr=lr), how)["validation"]) for lr in rates]
            best = found.index(max(found))
            if 0 < best < len(rates) - 1:
                return rates[best]
            rates = [rates[0] / 2, *rates] if best == 0 else [*rates, 2 * rates[-1]]

    # The three studies

    def seeds(self) -> None:
        """The demo's training with three seeds."""
        for seed in SEEDS:
            self.row(dataclasses.replace(DEMO, seed=seed), MS)

    def batches(self) -> None:
        """Batch sizes at equal images seen, each with its own rate."""
        runs = {batch: dataclasses.replace(BATCH, batch=batch, warmup=warmup) for batch, (_, warmup) in BATCHES.items()}
        best = {batch: self.chosen(runs[batch], MS, rates) for batch, (rates, _) in BATCHES.items()}
        for seed in SEEDS[1:]:
            for batch, lr in best.items():
                self.row(dataclasses.replace(runs[batch], seed=seed, lr=lr), MS)

    def tournament(self, entries: Sequence[str] = tuple(TOURNAMENT)) -> None:
        """Every competitor at three embedding sizes; the rates are chosen at the first of them."""
        for dim in DIMS:
            for name in entries:
                how, run = TOURNAMENT[name], dataclasses.replace(CUP, entry=name)
                tries = [dataclasses.replace(run, dim=DIMS[0], lr=lr, proxy_lr=proxy) for lr, proxy in how.rates]
                best = max(tries, key=lambda one: float(self.row(one, how)["validation"]))
                self.row(dataclasses.replace(best, dim=dim), how)

    # What came out

    def of(self, study: str) -> dict[tuple[str, ...], list[Row]]:
        """Rows of a study that count: of each (entry, batch), those with the rates that validation chose."""
        rows = [row for row in self.rows if row["study"] == study]
        chosen = {}
        for row in sorted(
            rows, key=lambda row: (float(row["validation"]), -float(row["lr"]))
        ):  # equals: the lower rate
            if row["seed"] == "0" and (study != "tournament" or row["dim"] == str(DIMS[0])):
                chosen[row["entry"], row["batch"]] = settings(row)
        kept: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in rows:
            if chosen.get((row["entry"], row["batch"])) == settings(row):
                kept[row["entry"], row["batch"]].append(row)
        return kept


def rate(row: Row) -> str:
    """Learning rate of the network, and of proxies if it has them."""
    return shown_rate(float(row["lr"]), float(row["proxy_lr"]) if row["proxy_lr"] else None)


def shown_rate(lr: float, proxy_lr: float | None) -> str:
    return f"{lr:g}" if proxy_lr is None else f"{lr:g}, {proxy_lr:g}"


def settings(row: Row) -> tuple[str, str]:
    """What is chosen on the validation classes."""
    return rate(row), row["warmup"]


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation."""
    if not values:
        return "–"
    return f"{statistics.fmean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def seed_table(studies: Studies) -> Iterator[str]:
    rows = [row for rows in studies.of("seeds").values() for row in rows]
    yield "| seed | untrained R@1 | trained R@1 | R@10 | MAP@R | times the untrained |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        ratio = float(row["recall@1"]) / float(row["untrained"])
        cells = [row[n] for n in ("seed", "untrained", "recall@1", "recall@10", "map@r")]
        yield f"| {' | '.join(cells)} | {ratio:.2f} |"
    if rows:
        columns = [[float(row[n]) for row in rows] for n in ("untrained", "recall@1", "recall@10", "map@r")]
        yield f"| mean ± s.d. | {' | '.join(map(mean_and_spread, columns))} | |"
        yield ""
        yield f"Raw pixels of the same images: R@1 {rows[0]['pixels']}. {int(rows[0]['images']):,} images seen."


def batch_table(studies: Studies) -> Iterator[str]:
    yield "| batch | steps | warm-up, epochs | lr: validation R@1 | lr chosen | test R@1 | MAP@R | seeds |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    found = sorted(studies.of("batch").items(), key=lambda item: int(item[0][1]))
    for (_, batch), rows in found:
        tried: dict[str, list[Row]] = defaultdict(list)  # by warm-up
        for row in sorted(studies.rows, key=lambda row: (row["warmup"], float(row["lr"]))):
            if (row["study"], row["batch"], row["seed"]) == ("batch", batch, "0"):
                tried[row["warmup"]].append(row)
        steps = int(rows[0]["images"]) // int(batch)
        for warmup, ones in tried.items():
            rates = ", ".join(f"{r['lr']}: {r['validation']}" for r in ones)
            if warmup != rows[0]["warmup"]:
                yield f"| {batch} | {steps} | {warmup} | {rates} | – | – | – | – |"
                continue
            recall, precision = (mean_and_spread([float(r[n]) for r in rows]) for n in ("recall@1", "map@r"))
            yield (
                f"| {batch} | {steps} | {warmup} | {rates} | {rows[0]['lr']} | {recall} | {precision} | {len(rows)} |"
            )
    if found:
        rows = [row for _, rows in found for row in rows]
        untrained = mean_and_spread(sorted({float(row["untrained"]) for row in rows}))
        yield ""
        yield (
            f"{int(rows[0]['images']):,} images seen by each. Untrained networks have R@1 {untrained}, raw pixels "
            f"{rows[0]['pixels']}."
        )


def experiments(studies: Studies) -> dict[str, dict[str, Row]]:
    """Rows of the tournament by embedding size: competitors that have tried all their rates, sizes that all have."""
    tried = [
        (row["entry"], rate(row)) for row in studies.rows if row["study"] == "tournament" and row["dim"] == str(DIMS[0])
    ]
    ready = {
        entry: {row["dim"]: row for row in rows}
        for (entry, _), rows in studies.of("tournament").items()
        if all((entry, shown_rate(*pair)) in tried for pair in TOURNAMENT[entry].rates)
    }
    sizes = [str(dim) for dim in sorted(DIMS) if ready and all(str(dim) in rows for rows in ready.values())]
    return {entry: {size: rows[size] for size in sizes} for entry, rows in ready.items()}


def rankings(studies: Studies) -> dict[str, list[int]]:
    """Place of each competitor in each experiment; equals share the better place."""
    found = {
        e: {size: float(row["recall@1"]) for size, row in rows.items()} for e, rows in experiments(studies).items()
    }
    return {
        entry: [1 + sum(other[size] > recall for other in found.values()) for size, recall in recalls.items()]
        for entry, recalls in found.items()
    }


def tournament_table(studies: Studies) -> Iterator[str]:
    """The form of the thesis' Table 11, with the recalls that the places come from."""
    found, places = experiments(studies), rankings(studies)
    sizes = " | ".join(f"R@1 at {size}" for size in next(iter(found.values()), {}))
    yield f"| Loss Function | Total Rankings | Average Ranking | Standard Deviation | {sizes} | lr |"
    yield "| --- " * (5 + sizes.count("R@1")) + "|"
    for entry, p in sorted(places.items(), key=lambda item: sum(item[1])):
        rows = list(found[entry].values())
        recalls = " | ".join(row["recall@1"] for row in rows)
        mean, spread = statistics.fmean(p), statistics.pstdev(p)
        yield f"| {entry} | {sum(p)} | {mean:.2f} | {spread:.2f} | {recalls} | {rate(rows[0])} |"
    if found:
        row = next(iter(next(iter(found.values())).values()))
        yield ""
        yield f"{int(row['images']):,} images seen by each; R@1 of raw pixels {row['pixels']}."


TABLES = {"seeds": seed_table, "batch": batch_table, "tournament": tournament_table}


def publish(studies: Studies, page: Path = ROOT / "docs" / "training.md", images: Path = ROOT / "docs" / "img") -> None:
    """Renew the tables between the marks in docs/training.md, and the figures."""
    text = page.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        head, _, rest = text.partition(start)
        if not rest:
            raise ValueError(f"{page}: no mark {start.strip()!r}")
        text = head + start + "\n" + "\n".join(table(studies)) + "\n\n" + end + rest.partition(end)[2]
    page.write_text(text, encoding="utf-8")
    from bench import training_plots

    training_plots.draw(studies, images)


def main(argv: Sequence[str] | None = None) -> int:
    """Run studies, or publish what there is."""
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--study", choices=("seeds", "batches", "tournament"), help="one of them; default: all")
    parser.add_argument("--entries", nargs="+", choices=TOURNAMENT, help="of the tournament, only these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV of finished runs")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the image sets, made if not there")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--publish", action="store_true", help="run nothing; renew docs/training.md and its figures")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    studies = Studies(options.results, options.data)
    if options.publish:
        publish(studies)
        return 0
    for study in ("seeds", "batches", "tournament") if options.study is None else (options.study,):
        getattr(studies, study)(*([options.entries] if study == "tournament" and options.entries else []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
