"""The report: figures of what runs left, and a page that a browser shows without any other file."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from toy_images import image_set, splits

from pydml.cli import main
from pydml.report import Run, figures, write
from pydml.report.runs import read_all
from pydml.train import Config, Trainer, snapshot

FIGURES = ["curves.png", "gallery.png", "similarities.png", "triplets.png"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with different batches."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("runs")
    for batch in (32, 64):
        config = Config(data="memory", out=str(root / f"batch{batch}"), batch_size=batch, epochs=2, ks=(1, 4), dim=16)
        Trainer(config, splits(), quiet=True).fit()
    return [root / "batch32", root / "batch64"]


def test_a_report_is_one_page_with_its_figures_inside(runs: list[Path], tmp_path: Path) -> None:
    page = write(runs[:1], tmp_path / "report")
    text = page.read_text(encoding="utf-8")
    assert sorted(p.name for p in page.parent.glob("*.png")) == FIGURES
    assert text.count('src="data:image/png;base64,') == 4
    assert not re.search(r'(src|href)="(?!data:)', text), "it needs another file"
    for heading in (
        "Loss and recall",
        "Triplets",
        "Similarities of pairs",
        "Nearest neighbours",
        "Settings of batch32",
    ):
        assert heading in text
    for name in FIGURES:
        with Image.open(page.parent / name) as image:
            assert min(image.size) > 300 and np.asarray(image.convert("L")).std() > 5, f"{name} is blank"


def test_several_runs_are_compared(runs: list[Path], tmp_path: Path) -> None:
    page = write(runs, tmp_path / "report")
    names = sorted(p.name for p in page.parent.glob("*.png"))
    assert names == [
        "batch-sizes.png",
        "curves.png",
        "gallery-1.png",
        "gallery-2.png",
        "similarities.png",
        "triplets.png",
    ]
    assert "2 training runs" in page.read_text(encoding="utf-8")


def test_figures_say_what_the_logs_say(runs: list[Path]) -> None:
    from pydml.report import figures

    first, second = read_all(runs)
    curves = figures.curves([first])
    assert curves is not None
    recall = curves.axes[1].lines[0].get_ydata()
    assert list(recall) == pytest.approx([100 * r["recall@1"] for r in first.validated])
    sizes = figures.batch_sizes([first, second])
    assert sizes is not None and list(sizes.axes[0].lines[0].get_xdata()) == [32, 64]
    triplets = figures.triplets([first])
    assert triplets is not None
    for axes, taken, epoch in zip(triplets.axes, first.snapshots, (0, 1, 2), strict=True):
        right = 100 * np.mean(taken["s_ap"] > taken["s_an"])
        assert axes.get_title() == f"epoch {epoch}: {right:.1f} % right"
        assert right == pytest.approx(100 * first.epochs[epoch]["recall@1"]), "all validation images are in the sample"


def test_snapshots_hold_the_closest_of_each_kind() -> None:
    data = image_set(5, 4)
    x = torch.nn.functional.normalize(torch.randn(20, 3))
    found = snapshot.compare(x, data.labels, torch.arange(20), block=7)
    s = x @ x.T
    for i in range(20):
        same = data.labels == data.labels[i]
        others = same.clone()
        others[i] = False
        assert found["s_ap"][i] == pytest.approx(float(s[i][others].max()), abs=1e-6)
        assert found["s_an"][i] == pytest.approx(float(s[i][~same].max()), abs=1e-6)
    assert int(found["positives"].sum()) == 20 * 3 and int(found["negatives"].sum()) == 20 * 16
    lone = snapshot.compare(x[:3], torch.tensor([0, 0, 1]), torch.arange(3))
    assert len(lone["s_ap"]) == 2, "an image without a positive is no triplet"


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = Config(data="memory", out=str(run), batch_size=32, epochs=0, val_fraction=0.0, ks=(1,), test=False)
    Trainer(config, splits(), quiet=True).fit()
    assert not read_all([run])[0].steps
    assert "Training run «run»" in write([run], tmp_path / "report").read_text(encoding="utf-8")


def test_runs_are_named_by_what_tells_them_apart(runs: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other" / "batch32"
    shutil.copytree(runs[0], other)
    names = [run.name for run in read_all([runs[0], other])]
    assert names == [f"{runs[0].parent.name}/batch32", "other/batch32"]
    assert isinstance(read_all([other])[0], Run)


@pytest.mark.parametrize("words", [["nowhere"], ["RUN", "RUN"]])
def test_a_wrong_run_is_named(words: list[str], runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *(str(runs[0]) if word == "RUN" else word for word in words), "--out", "unused"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("pydml report: run: got ") and not Path("unused").exists()


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("config.json", lambda text: text.replace(b'"ks"', b'"no"'), "ks: got nothing, wanted the setting of a run"),
        ("config.json", lambda text: text.replace(b'"batch_size": 32', b'"batch_size": "x"'), "batch_size: got 'x'"),
        ("config.json", lambda text: b"[" * 100_000, "nested too deeply, wanted JSON"),
        ("config.json", lambda text: b"[]", "got a JSON list, wanted an object"),
        ("results.json", lambda text: b'{"test": [1]}', r"test: got \[1\], wanted recall@1"),
        ("results.json", lambda text: text[:20], "wanted JSON"),
        ("log.jsonl", lambda text: text.replace(b'"kind"', b'"mind"', 1), "line 1: got .*, wanted a record with kind"),
        ("log.jsonl", lambda text: b"[" * 100_000 + b"\n" + text, "line 1: got .*, wanted a record with kind"),
        ("log.jsonl", lambda text: text.replace(b'"loss_share"', b'"loss"'), "step 1: lacks a number 'loss_share'"),
        ("snapshots/epoch-0001.npz", lambda text: text[: len(text) // 2], "not a whole snapshot"),
        ("snapshots/epoch-0001.npz", lambda text: b"", "not a whole snapshot"),
        ("snapshots/epoch-0001.npz", lambda text: text[:300] + bytes(200) + text[500:], "not a whole snapshot"),
    ],
)
def test_a_damaged_run_is_one_line_that_names_the_file(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, spoil: Any, message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    (run / name).write_bytes(spoil((run / name).read_bytes()))
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 1
    errors = capsys.readouterr().err
    assert re.fullmatch(rf"pydml report: {run / name}[,:] .*{message}.*\n", errors), errors
    assert not (tmp_path / "report").exists()


def test_dollars_in_names_are_dollars(runs: list[Path], tmp_path: Path) -> None:
    """Not mathematics, which matplotlib would fail to read."""
    names = ["a$_{$", "b$^$"]
    for source, name in zip(runs, names, strict=True):
        shutil.copytree(source, tmp_path / name)
    shown = read_all([tmp_path / name for name in names])
    for taken in shown[0].snapshots:
        taken["gallery_names"] = np.full_like(taken["gallery_names"], "c$_{$", dtype="U8")
    with matplotlib.rc_context(figures.STYLE):
        for figure in (figures.curves(shown), figures.gallery(shown[0])):
            assert figure is not None
            figure.savefig(tmp_path / "figure.png", dpi=30)
            texts = {text.get_text() for text in figure.findobj(matplotlib.text.Text)}
            assert {*names} <= texts or "c$_{$" in texts


def test_the_page_opens_in_a_browser(runs: list[Path], tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "report")]) == 0
    page, shot = tmp_path / "report" / "index.html", tmp_path / "page.png"
    # the page counts its own pictures, and says so in its title: a broken one has no width
    count = "[...document.images].filter(i => i.naturalWidth > 300).length"
    probe = f"<script>onload = () => {{ document.title = 'pictures ' + {count} }}</script>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", probe + "</body>"), encoding="utf-8")
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags = ["--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={tmp_path / 'profile'}"]
    dom = subprocess.run(
        [browser, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "<title>pictures 6</title>" in dom.stdout
    subprocess.run(
        [browser, *flags, "--window-size=1000,3000", f"--screenshot={shot}", page.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    with Image.open(shot) as image:
        pixels = np.asarray(image.convert("L"))
    assert pixels.shape == (3000, 1000) and (pixels < 128).mean() > 0.005 and (pixels > 250).mean() > 0.3


def test_labels_leave_out_what_the_font_cannot_draw() -> None:
    assert figures._short("U+4E2D 中") == "U+4E2D"
    assert figures._short("U+03CB ϋ") == "U+03CB ϋ"
    assert figures._short("x" * 30) == "x" * 23 + "…"
