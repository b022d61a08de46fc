"""The studies' bookkeeping: rates by validation, places, tables; and that a finished run is not run again."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

training = pytest.importorskip("bench.training", reason="the benchmarks are not beside the package")
FIELDS, MS, TOURNAMENT, Studies = training.FIELDS, training.MS, training.TOURNAMENT, training.Studies


def row(study: str, entry: str, **values: Any) -> dict[str, str]:
    blank: dict[str, Any] = {name: "1.00" for name in FIELDS} | {
        "study": study, "entry": entry, "batch": 256, "dim": 64, "seed": 0, "lr": 0.001, "images": 24576,
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
    assert "| 256 | 0.002 | 0.001: 60, 0.002: 70 | 32.0 ± 2.8 | 2 |" in table


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
    assert table[0].endswith("R@1 at 32, 64 | lr |")
    assert table[-1] == "| EPHN | 5 | 2.50 | 0.50 | 30, 10 | 0.003 |"


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = studies(tmp_path, [row("seeds", "MultiSimilarity", batch=1024, dim=128, lr=0.003, images=98304)])
    ran: list[int] = []

    def run(how: Any, batch: int, dim: int, seed: int, lr: float, images: int) -> dict[str, str]:
        ran.append(seed)
        return {name: "2.00" for name in FIELDS[7:]}

    monkeypatch.setattr(found, "_run", run)
    found.seeds()
    found.seeds()
    assert ran == [1, 2]
    assert len(Studies(found.results, tmp_path).rows) == 3
    assert "mean ± s.d. | 1.7 ± 0.6" in "\n".join(training.seed_table(found))


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
