"""The studies' bookkeeping: rates by validation, places, tables; and that a finished run is not run again."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from toy_images import splits

training = pytest.importorskip("bench.training", reason="the benchmarks are not beside the package")
FIELDS, MS, TOURNAMENT, Studies = training.FIELDS, training.MS, training.TOURNAMENT, training.Studies


def row(study: str, entry: str, **values: Any) -> dict[str, str]:
    blank: dict[str, Any] = {name: "1.00" for name in FIELDS} | {
        "study": study, "entry": entry, "data": "glyphs", "batch": 256, "dim": 64, "seed": 0, "lr": 0.001,
        "proxy_lr": "", "warmup": 0.2, "amp": "none", "images": 24576,
    }  # fmt: skip
    return {name: str(value) for name, value in (blank | values).items()}


def studies(tmp_path: Path, rows: list[dict[str, str]]) -> Studies:
    path = tmp_path / "training.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return Studies(path, tmp_path / "none")


def test_rates_are_chosen_by_validation_never_by_test(tmp_path: Path) -> None:
    found = studies(tmp_path, [
        row("batch", "MS", lr=0.001, validation=60, **{"recall@1": 40}),
        row("batch", "MS", lr=0.002, validation=70, **{"recall@1": 30}),
        row("batch", "MS", lr=0.002, seed=1, validation=10, **{"recall@1": 34}),
        row("batch", "MS", lr=0.001, seed=1, validation=90, **{"recall@1": 90}),
    ])  # fmt: skip
    assert [r["recall@1"] for r in found.of("batch")["MS", "256"]] == ["30", "34"]
    table = "\n".join(training.batch_table(found))
    assert "| 256 | 96 | 0.2 | 0.001: 60, 0.002: 70 | 0.002 | 32.0 ± 2.8 | 1.0 ± 0.0 | 2 |" in table


@pytest.mark.parametrize(("best", "tried"), [(2, [1, 2, 4]), (8, [1, 2, 4, 8, 16]), (0.5, [0.25, 0.5, 1, 2, 4])])
def test_rates_are_tried_until_the_best_has_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: float, tried: list[float]
) -> None:
    found = studies(tmp_path, [])

    def run(run: Any, how: Any) -> dict[str, str]:
        return {name: str(-abs(run.lr - best)) for name in FIELDS if name not in training.KEY}

    monkeypatch.setattr(found, "_run", run)
    assert found.chosen(training.BATCH, MS, (1, 2, 4)) == best
    assert sorted(float(row["lr"]) for row in found.rows) == tried


def test_places_are_summed_as_in_the_thesis(tmp_path: Path) -> None:
    recalls = {"Triplet": {64: 50, 32: 40}, "NPair": {64: 60, 32: 30}, "EPHN": {64: 10, 32: 30, 128: 99}}
    rows = [
        row("tournament", entry, dim=dim, lr=lr, validation=100 * lr, **{"recall@1": recall})
        for entry, of in recalls.items()
        for dim, recall in of.items()
        for lr in ((0.001, 0.003) if dim == 64 else (0.003,))
    ]
    rows.append(row("tournament", "FastAP", lr=0.001, **{"recall@1": 99}))  # has tried only one of its rates
    found = studies(tmp_path, rows + rows[:1])
    assert training.rankings(found) == {"Triplet": [1, 2], "NPair": [2, 1], "EPHN": [2, 3]}, (
        "128 is not finished by all"
    )
    table = list(training.tournament_table(found))
    assert table[0].endswith("| R@1 at 32 | R@1 at 64 | lr |") and table[1].count("---") == 7
    assert table[4] == "| EPHN | 5 | 2.50 | 0.50 | 30 | 10 | 0.003 |"


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = studies(tmp_path, [row("seeds", "MultiSimilarity", batch=1024, dim=128, lr=0.003, images=98304)])
    ran: list[int] = []

    def run(run: Any, how: Any) -> dict[str, str]:
        ran.append(run.seed)
        return {name: "2.00" for name in FIELDS if name not in training.KEY}

    monkeypatch.setattr(found, "_run", run)
    found.seeds()
    found.seeds()
    assert ran == [1, 2]
    assert len(Studies(found.results, tmp_path).rows) == 3
    assert "mean ± s.d. | 1.7 ± 0.6" in "\n".join(training.seed_table(found))


def test_what_pixels_and_untrained_networks_reach_is_measured_once(tmp_path: Path) -> None:
    known = row("batch", "MS", data="glyphs", dim=16, seed=1, pixels=30, untrained=12)
    found = studies(tmp_path, [known])
    run = training.Run("tournament", "MS", "glyphs", 32, 16, 1, 1e-3, None, 0.2, "none", 64)
    measured: list[Any] = []

    class Measured:
        def evaluate(self, data: Any) -> dict[str, float]:
            measured.append(data)
            return {"recall@1": 0.25}

    data = splits()
    assert found._before(run, data, Measured()) == {"untrained": "12", "pixels": "30"} and not measured
    other = dataclasses.replace(run, dim=8)
    assert found._before(other, data, Measured()) == {"untrained": "25.00", "pixels": "30"} and measured == [data.test]
    pixels = float(found._before(dataclasses.replace(run, data="quarter"), data, Measured())["pixels"])
    assert 10 < pixels <= 100, "classes of noisy patterns have something in common"


def test_every_competitor_can_be_built() -> None:
    assert len(TOURNAMENT) >= 12 and TOURNAMENT["MultiSimilarity"] is MS
    for how in TOURNAMENT.values():
        training.Config(preset=how.preset, loss=how.loss, **how.more).build_loss(10)


def test_publishing_renews_the_tables(tmp_path: Path) -> None:
    found = studies(tmp_path, [row("seeds", "MultiSimilarity", batch=1024)])
    page = tmp_path / "training.md"
    marks = "".join(f"<!-- generated: {name} -->\nold\n<!-- end -->\nkept {name}\n" for name in training.TABLES)
    page.write_text(marks, encoding="utf-8")
    training.publish(found, page, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text and all(f"kept {name}" in text for name in training.TABLES)
    assert "| 0 | 1.00 | 1.00 |" in text
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="no mark"):
        training.publish(found, page, tmp_path)
