"""The benchmarks of losses with a miner's tuple: both libraries do the same, and the run has a section of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bench", reason="the benchmarks are not beside the package")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("pytorch_metric_learning", reason="PML is not installed")

from pytorch_metric_learning.utils import loss_and_miner_utils as lmu

from bench import agreement, cases, registry, report, targets, timing, tuples
from bench.__main__ import main
from bench.data import REGIMES


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHORTEST", 0.0)
    monkeypatch.setattr(tuples, "MEMORY", 96)


def result(prepared: registry.Prepared) -> agreement.Result:
    value = prepared.forward()
    return agreement.Result(value.detach(), prepared.gradients(value))


@pytest.mark.parametrize("regime", ["early", "trained"])
@pytest.mark.parametrize("name", cases.TUPLES)
def test_both_libraries_compute_the_same_twice(name: str, regime: str) -> None:
    case = cases.case(name, "60x16", regime)
    inputs = case.inputs()
    inputs.z = inputs.z.double()
    ours, theirs = (registry.PEERS[peer](case, inputs, "auto") for peer in ("pydml", "pml"))
    for _ in range(2):  # a memory must not be another one the next time
        mine, other = result(ours), result(theirs)
        assert agreement.compare(mine, other, selects=True).agrees
        assert other.gradients[0].abs().max() > 0


def test_the_list_of_all_triplets_is_pmls() -> None:
    labels = torch.tensor([2, 0, 1, 1, 0, 2, 2])
    assert all(map(torch.equal, tuples.all_triplets(labels), lmu.get_all_triplets_indices(labels)))


def test_every_size_is_promised_and_large_ones_more() -> None:
    wanted = {target.name: target.wants[0] for target in targets.tuple_targets()}
    assert list(wanted) == [f"tuples-{size}" for size in (64, 128, 256, 512, 1024, 2048, 4096)]
    assert [getattr(want, "factor", None) for want in wanted.values()] == [1, 1, 1, 3, 3, 3, 3]
    assert set(wanted) <= set(targets.targets())
    for target in targets.tuple_targets():
        ways = {at.variant.variant for at in target.cases}
        assert {"ms-miner", "batch-hard"} <= ways
        assert {at.regime for at in target.cases} == {"early", "trained"} <= set(REGIMES)


def test_the_run_has_a_table_and_a_section_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published: dict[str, Any] = {}
    at = (cases.case("ms/ms-miner", "32x8", "early"), cases.case("triplet/batch-hard", "32x8", "trained"))
    some = [targets.Target("tuples-32", at, ("pydml", "pml"), (targets.InEach("two losses", at, "pml", 0.01),))]
    monkeypatch.setattr("bench.session.tuple_targets", lambda: some)
    monkeypatch.setattr(report, "publish", lambda section, text, figures: published.update({section: text}))
    assert main(["--tuples", "--threads", "1", "--output", str(tmp_path), "--publish"]) == 0
    assert list(published) == ["tuples"]
    assert "| two losses | ≥ 0.01× PML in each | less in 0 of 2; worst" in published["tuples"]
    assert "| ms/ms-miner | 32×8 | early | full |" in published["tuples"]
    assert (tmp_path / "tuples.csv").exists()


def test_the_page_has_a_place_for_it(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    report.publish("tuples", "measured", [], page)
    assert "<!-- generated: tuples -->\n\nmeasured\n\n<!-- end -->" in page.read_text(encoding="utf-8")
    assert "<!-- generated: tuples -->" in report.PAGE.read_text(encoding="utf-8")
