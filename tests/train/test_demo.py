"""The demo, from fonts to the report: the end-to-end training of CI."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from pydml import demo
from pydml.losses import MultiSimilarityLoss


@pytest.mark.slow
def test_the_demo_learns_to_find_characters_that_it_never_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--out", str(tmp_path), "--images", "65536", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    recall = {name: float(re.findall(rf"{name} +R@1 ([\d.]+)", text)[0]) for name in ("pixels", "untrained network")}
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    trained = 100 * results["test"]["recall@1"]
    assert f"trained network     R@1 {trained:.2f}" in text
    assert trained > 2.5 * recall["untrained network"] and trained > recall["pixels"] + 8
    table = re.findall(r"^ +(\d+) +([\d.]+) ms +([\d.]+) ms +([\d.]+)x +([\d.]+) % +([\d.]+) %$", text, re.MULTILINE)
    assert [int(row[0]) for row in table] == [1024, 4096, 8192]
    for _, ours, plain, ratio, *_ in table:
        assert float(ratio) == pytest.approx(float(plain) / float(ours), rel=0.1)
    assert re.search(r"the loss op took [\d.]+ % of a step", text)
    assert (tmp_path / "report" / "index.html").stat().st_size > 100_000


def test_the_plain_loss_of_the_race_is_the_same_loss() -> None:
    z, labels = torch.randn(64, 8, dtype=torch.float64, requires_grad=True), torch.arange(64) % 16
    plain, ours = demo.plain_multi_similarity(z, labels), MultiSimilarityLoss(epsilon=0.1)(z, labels)
    assert plain.item() == pytest.approx(ours.item(), rel=1e-12)
    fast, slow = demo.race(torch.randn(32, 8), torch.arange(32) % 8, 2)
    assert fast > 0 and slow > 0


def test_the_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert demo.main([]) == 1
    assert "needs matplotlib" in capsys.readouterr().err
