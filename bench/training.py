"""Studies of training on glyphs: ``python -m bench.training``. Seeds, batch sizes, and a tournament of losses.

Every finished run is a row of docs/training.csv, and is not run again: stop it and start it as you like.
Learning rates are chosen on validation classes, never on the test classes.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pydml.data import Splits
from pydml.data import open as open_data
from pydml.demo import make_glyphs
from pydml.metrics import recall_at_k
from pydml.train import Config, Trainer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "training.csv"
DATA = ROOT / "build" / "training" / "glyphs"
FIELDS = (
    "study", "entry", "batch", "dim", "seed", "lr", "images", "validation", "recall@1", "recall@10", "map@r",
    "untrained", "pixels", "loss_share", "seconds",
)  # fmt: skip
KEY = FIELDS[:7]
Row = dict[str, str]


@dataclass(frozen=True)
class Entry:
    """A competitor: a loss, the rates that it may choose from, and what else it needs."""

    preset: str | None = None
    loss: str = ""
    rates: tuple[float, ...] = (1e-3, 3e-3)
    more: dict[str, Any] = field(default_factory=dict)
    proxies: bool = False


#: Proxies learn faster than the network, as in Proxy-Anchor's recipe.
PROXY_FACTOR = 30
MS = Entry("ms/thesis")
#: The thesis' ten, then others of the library.
TOURNAMENT = {
    "Contrastive": Entry("contrastive/thesis"),
    "Triplet": Entry("triplet/thesis"),
    "LiftedStructure": Entry("lifted-star/thesis-code"),
    "NPair": Entry("n-pairs/thesis"),
    "ProxyNCA": Entry("proxy-nca/thesis-code", proxies=True),
    "Margin": Entry("margin/thesis-code", more={"miner": "DistanceWeightedMiner"}),
    "ArcFace": Entry("arcface/thesis", proxies=True),
    "MultiSimilarity": MS,
    "SoftTriple": Entry("soft-triple/thesis", proxies=True),
    "ProxyAnchor": Entry("proxy-anchor/thesis", proxies=True),
    "FastAP": Entry("fastap/official"),
    "EPHN": Entry("ephn/official"),
    "BinomialDeviance": Entry("binomial/paper"),
    "NormalizedSoftmax": Entry(loss="normalized_softmax", proxies=True),
    "DRO-KL-G": Entry("dro-kl-g/paper-0.01"),
}
THESIS = tuple(TOURNAMENT)[:10]
DIMS = (32, 64, 128)
TOURNAMENT_BATCH, TOURNAMENT_IMAGES = 256, 24576
#: Batch size -> learning rates to choose from.
BATCHES = {64: (5e-4, 1e-3, 2e-3), 512: (1e-3, 2e-3, 4e-3), 2048: (2e-3, 4e-3, 8e-3)}
SEEDS = (0, 1, 2)


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
        self.splits: Splits | None = None
        self.reference: dict[str, float] = {}  # Recall@1 of raw pixels, and of untrained networks by size and seed

    def row(self, study: str, entry: str, how: Entry, batch: int, dim: int, seed: int, lr: float, images: int) -> Row:
        """The row of a run, which is run if there is none yet."""
        key = {"study": study, "entry": entry, "batch": batch, "dim": dim, "seed": seed, "lr": lr, "images": images}
        wanted = {k: str(v) for k, v in key.items()}
        for row in self.rows:
            if all(row[k] == v for k, v in wanted.items()):
                return row
        row = wanted | self._run(how, batch, dim, seed, lr, images)
        self.rows.append(row)
        fresh = not self.results.exists()
        with self.results.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        print(
            f"{study:<10} {entry:<18} batch {batch:<5} dim {dim:<4} seed {seed} lr {lr:<6g} "
            f"validation {row['validation']}  test {row['recall@1']}  ({row['seconds']} s)",
            flush=True,
        )
        return row

    def _run(self, how: Entry, batch: int, dim: int, seed: int, lr: float, images: int) -> Row:
        if self.splits is None:
            make_glyphs(self.data)
            self.splits = open_data(self.data)
            pixels = self.splits.test.pixels().flatten(1).float()
            self.reference["pixels"] = recall_at_k(pixels, self.splits.test.labels, (1,))[1]
        out = Path(tempfile.mkdtemp(prefix="pydml-training-"))
        config = Config(
            data=str(self.data), out=str(out / "run"), preset=how.preset, loss=how.loss, batch_size=batch, dim=dim,
            seed=seed, lr=lr, proxy_lr=PROXY_FACTOR * lr if how.proxies else None, epochs=3, warmup=0.2,
            images_per_epoch=images // 3, micro_batch=128 if batch > 512 else None, ks=(1, 10), **how.more,
        )  # fmt: skip
        began = time.perf_counter()
        try:
            trainer = Trainer(config, self.splits, quiet=True)
            if f"{dim} {seed}" not in self.reference:  # the same for every loss
                self.reference[f"{dim} {seed}"] = trainer.evaluate(self.splits.test)["recall@1"]
            found = trainer.fit()
            with (out / "run" / "steps.csv").open(encoding="utf-8") as file:
                share = statistics.median(float(r["loss_share"]) for r in csv.DictReader(file))
        finally:
            shutil.rmtree(out, ignore_errors=True)
        numbers = {
            "validation": found["validation"]["recall@1"],
            **{name: found["test"][name] for name in ("recall@1", "recall@10", "map@r")},
            "untrained": self.reference[f"{dim} {seed}"], "pixels": self.reference["pixels"], "loss_share": share,
        }  # fmt: skip
        return {name: f"{100 * n:.2f}" for name, n in numbers.items()} | {
            "seconds": f"{time.perf_counter() - began:.0f}"
        }

    def chosen(
        self, study: str, entry: str, how: Entry, batch: int, dim: int, rates: Sequence[float], images: int
    ) -> Row:
        """The run of seed 0 whose rate is best on the validation classes."""
        rows = [self.row(study, entry, how, batch, dim, 0, lr, images) for lr in rates]
        return max(rows, key=lambda row: float(row["validation"]))

    # The three studies

    def seeds(self) -> None:
        """The demo's training with three seeds."""
        for seed in SEEDS:
            self.row("seeds", "MultiSimilarity", MS, 1024, 128, seed, 3e-3, 98304)

    def batches(self) -> None:
        """Batch sizes at equal images seen, each with its own rate."""
        best = {
            b: self.chosen("batch", "MultiSimilarity", MS, b, 128, rates, 49152)["lr"] for b, rates in BATCHES.items()
        }
        for seed in SEEDS[1:]:
            for batch, lr in best.items():
                self.row("batch", "MultiSimilarity", MS, batch, 128, seed, float(lr), 49152)

    def tournament(self, entries: Sequence[str] = tuple(TOURNAMENT)) -> None:
        """Every competitor at three embedding sizes; the rate is chosen at one of them."""
        shape = (TOURNAMENT_BATCH, TOURNAMENT_IMAGES)
        for dim in (DIMS[1], DIMS[0], DIMS[2]):
            for name in entries:
                how = TOURNAMENT[name]
                best = self.chosen("tournament", name, how, shape[0], DIMS[1], how.rates, shape[1])
                self.row("tournament", name, how, shape[0], dim, 0, float(best["lr"]), shape[1])

    # What came out

    def of(self, study: str) -> dict[tuple[str, ...], list[Row]]:
        """Rows of a study that count: of each (entry, batch), those with the rate that validation chose."""
        rows = [row for row in self.rows if row["study"] == study]
        rates = {}
        for row in sorted(rows, key=lambda row: float(row["validation"])):
            if row["seed"] == "0" and (study != "tournament" or row["dim"] == str(DIMS[1])):
                rates[row["entry"], row["batch"]] = row["lr"]
        kept: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in rows:
            if rates.get((row["entry"], row["batch"])) == row["lr"]:
                kept[row["entry"], row["batch"]].append(row)
        return kept


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
    yield "| batch | learning rate | validation R@1 of every rate tried | test R@1 | seeds | loss op, share of step |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for (_, batch), rows in sorted(studies.of("batch").items(), key=lambda item: int(item[0][1])):
        tried = [r for r in studies.rows if r["study"] == "batch" and r["batch"] == batch and r["seed"] == "0"]
        rates = ", ".join(f"{r['lr']}: {r['validation']}" for r in sorted(tried, key=lambda r: float(r["lr"])))
        recall = mean_and_spread([float(r["recall@1"]) for r in rows])
        share = statistics.median(float(r["loss_share"]) for r in rows)
        yield f"| {batch} | {rows[0]['lr']} | {rates} | {recall} | {len(rows)} | {share:.1f} % |"


def experiments(studies: Studies) -> dict[str, dict[str, Row]]:
    """Rows of the tournament by embedding size: competitors that have tried all their rates, sizes that all have."""
    tried = [
        (row["entry"], row["lr"]) for row in studies.rows if row["study"] == "tournament" and row["dim"] == str(DIMS[1])
    ]
    ready = {
        entry: {row["dim"]: row for row in rows}
        for (entry, _), rows in studies.of("tournament").items()
        if all((entry, str(lr)) in tried for lr in TOURNAMENT[entry].rates)
    }
    sizes = [str(dim) for dim in DIMS if ready and all(str(dim) in rows for rows in ready.values())]
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
    sizes = ", ".join(next(iter(found.values()), {}))
    yield f"| Loss Function | Total Rankings | Average Ranking | Standard Deviation | R@1 at {sizes} | lr |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for entry, p in sorted(places.items(), key=lambda item: sum(item[1])):
        rows = found[entry].values()
        recalls, rate = ", ".join(row["recall@1"] for row in rows), next(iter(rows))["lr"]
        mean, spread = statistics.fmean(p), statistics.pstdev(p)
        yield f"| {entry} | {sum(p)} | {mean:.2f} | {spread:.2f} | {recalls} | {rate} |"


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
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the glyphs, made if it is not there")
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
