"""The benchmarks: do the peers compute the same, are the batches what they claim to be, does a run leave what it says?

Nothing here asserts a time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bench", reason="the benchmarks are not beside the package")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("pytorch_metric_learning", reason="PML is not installed")

from bench import agreement, cases, harness, memory, plots, pml_peers, registry, report, targets, timing
from bench.__main__ import main
from bench.data import REGIMES, Inputs, make, mined_fraction, similarities
from pydml import cli
from pydml.losses import LOSSES


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(timing, "SHORTEST", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(name: str, regime: str = "trained") -> cases.Case:
    return cases.case(name, "60x16x40" if cases.VARIANTS[name].kind == "proxy" else "60x16", regime)


def in_double(inputs: Inputs) -> Inputs:
    proxies = None if inputs.proxies is None else inputs.proxies.double()
    return Inputs(inputs.z.double(), inputs.labels, proxies)


def result(prepared: registry.Prepared) -> agreement.Result:
    value = prepared.forward()
    return agreement.Result(value.detach(), prepared.gradients(value))


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_every_loss_is_measured() -> None:
    assert set(LOSSES) | {"recall"} == {variant.op for variant in cases.VARIANTS.values()}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", cases.VARIANTS)
def test_dense_code_agrees_with_pydml_in_fp64(name: str, regime: str) -> None:
    case = small(name, regime)
    inputs = in_double(case.inputs())
    ours, dense = (result(registry.PEERS[peer](case, inputs, "auto")) for peer in ("pydml", "dense"))
    assert torch.allclose(ours.value, dense.value, rtol=1e-8, atol=1e-12)
    assert len(ours.gradients) == len(dense.gradients) == {"metric": 0, "pair": 1, "proxy": 2}[case.variant.kind]
    for mine, other in zip(ours.gradients, dense.gradients, strict=True):
        assert other.abs().max() > 0
        assert (mine - other).abs().max() <= 1e-8 * other.abs().max()


@pytest.mark.parametrize("name", cases.VARIANTS)
def test_pml_computes_the_same_or_is_skipped_with_a_reason(name: str) -> None:
    case = small(name)
    inputs = case.inputs()
    if "pml" not in registry.concerned(["pml"], case):
        return
    try:
        theirs = result(registry.PEERS["pml"](case, inputs, "auto"))
    except pml_peers.Skip as reason:
        assert "PML" in str(reason)
        return
    dense = result(registry.PEERS["dense"](case, inputs, "auto"))
    assert agreement.compare(theirs, dense, selects=case.variant.selects).agrees


def test_faiss_finds_the_same_recalls() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    case = cases.case("recall", "1200x16", "early")
    inputs = case.inputs()
    found = [registry.PEERS[peer](case, inputs, "auto").forward() for peer in ("pydml", "dense", "faiss")]
    assert 0 < found[0][0] < found[0][-1] <= 1
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(("size", "dim"), [(256, 128), (1024, 128), (600, 512)])
def test_regimes_are_what_they_claim(size: int, dim: int) -> None:
    batches = {regime: make(size, dim, regime) for regime in REGIMES}
    pos, neg = similarities(batches["trained"])
    assert 0.8 < pos.mean() < 0.9
    assert neg.mean().abs() < 0.01
    assert neg.std() == pytest.approx(1 / math.sqrt(dim), rel=0.15)
    assert 0 < mined_fraction(batches["trained"]) < 0.01
    assert 0.4 < mined_fraction(batches["early"]) < 0.7
    for s in similarities(batches["collapsed"]):
        assert (s - 0.99).abs().max() < 0.015
    assert mined_fraction(batches["collapsed"]) == 1


def test_batches_are_deterministic_shuffled_and_of_four_a_class() -> None:
    first, again, other = (make(64, 8, "early", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.z, again.z)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.z, other.z)
    assert first.labels.bincount().tolist() == [4] * 16
    assert not torch.equal(first.labels, first.labels.sort().values)


RUN = ["--threads", "1", "--repeats", "5", "--no-memory", "--regimes", "trained"]


def test_a_run_leaves_measurements_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = ["--loss", "ms/mined,lifted_star,proxy_anchor,recall", "--shapes", "32x8,64x8,32x8x12"]
    peers = ["--peers", "pydml,dense,pml,half_gemm,faiss", "--modes", "forward,backward,full"]
    assert main([*RUN, *losses, *peers, "--output", str(tmp_path)]) == 0
    rows = rows_of(tmp_path / "losses.csv")
    assert tuple(rows[0]) == harness.COLUMNS
    assert {row["status"] for row in rows} == {"ok", "skipped"}
    timed = [row for row in rows if row["status"] == "ok"]
    assert all(0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) for row in timed)
    assert all(int(row["repeats"]) >= 5 and row["unit"] == "ms" for row in timed)
    constant = ("device", "torch", "pydml", "pml", "python", "commit", "date", "threads")
    assert all(row[column] for row in rows for column in constant)
    measured = {(row["op"], row["peer"]) for row in timed}
    assert {("ms", "half_gemm"), ("proxy_anchor", "pml"), ("recall", "faiss"), ("recall", "pydml")} <= measured
    assert {row["mode"] for row in timed if row["op"] == "ms"} == set(cases.MODES)
    assert all(row["mined_fraction"] for row in timed if row["op"] == "ms")
    (reason,) = {row["note"] for row in rows if row["status"] == "skipped"}
    assert reason == "PML does not have it"

    table = (tmp_path / "losses.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out + "\n"
    assert "| ms/mined | 64×8 | trained | backward |" in table
    figures = {path.name: path.read_bytes() for path in (tmp_path / "losses").glob("*.png")}
    assert {"overview-trained.png", "sizes-8.png"} == set(figures)
    assert all(content.startswith(b"\x89PNG") and len(content) > 10_000 for content in figures.values())


def drawn(tmp_path: Path, losses: str, peers: str, peak_mib: str = "") -> set[str]:
    """Names of the figures of a made-up run over two batch sizes."""
    rows = [
        dict.fromkeys(harness.COLUMNS, "") | {"op": loss, "peer": peer, "B": size, "d": "8", "regime": "trained"}
        | {"mode": "full", "p20": "1", "p50": "2", "p80": "3", "peak_mib": peak_mib}
        for loss in losses.split() for peer in peers.split() for size in ("32", "64")
    ]  # fmt: skip
    return {path.name for path in plots.plot_all(rows, tmp_path)}


def test_losses_over_batch_sizes_share_a_figure_unless_memory_was_measured(tmp_path: Path) -> None:
    assert drawn(tmp_path, "ms nca lifted", "pydml dense") == {"overview-trained.png", "sizes-8.png"}
    each = {"overview-trained.png", "ms-8-trained.png", "nca-8-trained.png"}
    assert drawn(tmp_path, "ms nca", "pydml dense", peak_mib="1.5") == each
    assert drawn(tmp_path, "ms", "pydml half_gemm") == set()


def change_peer(monkeypatch: pytest.MonkeyPatch, peer: str, change: Any) -> None:
    """Let ``change`` alter a prepared peer."""
    original = registry.PEERS[peer]

    def changed(case: cases.Case, inputs: Inputs, backend: str) -> registry.Prepared:
        prepared = original(case, inputs, backend)
        change(case, prepared)
        return prepared

    monkeypatch.setitem(registry.PEERS, peer, changed)


def wrong_value(case: cases.Case, prepared: registry.Prepared) -> None:
    forward = prepared.forward
    prepared.forward = lambda: forward() * 1.01


def wrong_gradient(case: cases.Case, prepared: registry.Prepared) -> None:
    forward = prepared.forward
    prepared.forward = lambda: (loss := forward()).detach() * 0.9 + loss * 0.1


def nan_gradient(case: cases.Case, prepared: registry.Prepared) -> None:
    gradients = prepared.gradients
    prepared.gradients = lambda loss: tuple(g * torch.nan for g in gradients(loss))  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [wrong_value, wrong_gradient, nan_gradient])
def test_a_peer_that_disagrees_is_an_error_and_is_not_timed(
    mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_peer(monkeypatch, "pml", mistake)
    peers = ["--loss", "ms/mined", "--shapes", "32x8", "--peers", "pydml,dense,pml"]
    assert main([*RUN, *peers, "--output", str(tmp_path)]) == 1
    rows = {row["peer"]: row for row in rows_of(tmp_path / "losses.csv")}
    assert rows["pml"]["status"] == "error"
    assert rows["pml"]["note"].startswith("disagrees with dense")
    assert not rows["pml"]["p50"]
    assert rows["pydml"]["status"] == rows["dense"]["status"] == "ok"


def test_near_ties_are_forgiven_only_where_a_loss_selects() -> None:
    gradient = torch.ones(400, 3)
    flipped = gradient.clone()
    flipped[:2] = 2
    wanted, found = (agreement.Result(torch.tensor(1.0), (g,)) for g in (gradient, flipped))
    assert agreement.compare(found, wanted, selects=True).agrees
    assert not agreement.compare(found, wanted).agrees
    flipped[:9] = 2
    assert not agreement.compare(found, wanted, selects=True).agrees


def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(case: cases.Case, prepared: registry.Prepared) -> None:
        if case.variant.name == "nca" and case.shape.size == 64:
            raise KeyboardInterrupt

    arguments = [*RUN, "--loss", "ms/mined,nca", "--shapes", "32x8,64x8", "--peers", "pydml,dense"]
    arguments += ["--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        change_peer(patch, "dense", interrupt)
        assert main(arguments) == 130
    done = rows_of(tmp_path / "losses.csv")
    assert [(row["op"], row["B"]) for row in done] == [("ms", "32")] * 2 + [("ms", "64")] * 2 + [("nca", "32")] * 2
    assert (tmp_path / "losses.md").stat().st_size
    assert (tmp_path / "losses" / "sizes-8.png").exists()

    assert main([*arguments, "--resume"]) == 0
    rows = rows_of(tmp_path / "losses.csv")
    assert rows[: len(done)] == done
    assert {(row["op"], row["B"]) for row in rows[len(done) :]} == {("nca", "64")}


def test_failures_of_compile_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", refuse)
    table = harness.Table(tmp_path / "rows.csv")
    options = harness.Options(peers=("dense", "compile"), threads=1, repeats=5)
    assert harness.run([harness.Task(small("nca"), options)], table, progress=False)
    row = table.find(small("nca"), "compile", "full")
    assert row is not None
    assert (row["status"], row["note"]) == ("skipped", "failed: RuntimeError: no compiler")


def test_a_peer_that_would_not_fit_is_skipped_with_its_size(tmp_path: Path) -> None:
    case = cases.case("triplet/all", "4096x512")
    with pytest.raises(pml_peers.Skip, match=r"would need about 6\d GiB"):
        pml_peers.build(case, LOSSES["triplet"]())
    with pytest.raises(pml_peers.Skip, match="would need about 640 GiB"):
        registry.PEERS["dense"](cases.case("ms", "131072x8"), case.inputs(), "auto")


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    case = cases.case("ms/mined", "1024x16", "early")
    mib, note = memory.measure(case, case.inputs(), "dense", "auto", threads=1)
    assert mib is not None, note
    assert 8 < mib < 200  # a matrix has 4 MiB
    nothing, reason = memory.measure(case, case.inputs(), "nobody", "auto", threads=1)
    assert nothing is None
    assert "nobody" in reason


def test_percentiles_and_peers_that_fail_while_timed() -> None:
    assert timing.p20_p50_p80([float(n) for n in range(11)]) == (2, 5, 8)
    calls = iter(range(100))

    def forward() -> torch.Tensor:
        if next(calls) > 3:
            raise RuntimeError("late")
        return torch.zeros(())

    failures: list[str] = []
    peers = {"late": registry.Prepared(forward), "fine": registry.Prepared(lambda: torch.zeros(()))}
    samples = timing.round_robin(peers, "forward", 6, lambda peer, error: failures.append(f"{peer}: {error}"))
    assert failures == ["late: late"]
    assert set(samples) == {"fine"}
    assert len(samples["fine"]) == 6


def filled(case: cases.Case, table: harness.Table, **milliseconds: float) -> None:
    """Rows as a run would leave them."""
    for peer, time in milliseconds.items():
        mode = harness.modes_of(case, harness.Options())[0]
        table.add(
            harness.identity(case)
            | {"mode": mode, "peer": peer, "status": "ok", "p50": time, "peak_mib": case.shape.size}
        )


def test_targets_are_judged_by_what_was_measured(tmp_path: Path) -> None:
    table = harness.Table(tmp_path / "targets.csv")
    every = targets.targets()
    assert all(verdict.met is None for verdict in targets.verdicts(list(every.values()), table))
    at = cases.case("ms/mined", "4096x512")
    filled(at, table, pydml=100, compile=399, dense=1200, pml=5000, half_gemm=80)
    met = {v.wanted: v.met for v in targets.verdicts([every["ms-mined-4096-trained"]], table)}
    assert met == {
        "≥ 4× torch.compile": False,
        "≥ 12× dense PyTorch": True,
        "≥ 12× PML": True,
        "≤ 1.5 × ½ X·Xᵀ": True,
        "≤ 64 MiB above the inputs": False,
    }
    for growing in every["growth"].cases:
        filled(growing, table, pydml=growing.shape.size**2.2)
    assert [v.met for v in targets.verdicts([every["growth"]], table)] == [False, True]
    for i, one in enumerate(every["small-64"].cases):
        filled(one, table, pydml=1, dense=0.5 if i == 3 else 2)
    (small_batches,) = targets.verdicts([every["small-64"]], table)
    assert not small_batches.met
    assert "slower in 1 of" in small_batches.measured
    text = targets.markdown(targets.verdicts(list(every.values()), table))
    assert text.startswith("| case | wanted | measured | met? |")
    assert "| ms/mined 4096×512 trained | ≥ 4× torch.compile | 3.99× (100 ms against 399 ms) | **no** |" in text


def test_only_one_target_can_be_run_and_a_missed_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = small("nca")
    kept = targets.Target("kept", (at,), ("pydml", "dense"), (targets.Faster(at, "dense", 0),))
    missed = targets.Target("missed", (at,), ("pydml", "dense"), (targets.Faster(at, "dense", 1e9),))
    monkeypatch.setattr("bench.session.targets", lambda: {"kept": kept, "missed": missed})
    run = ["--targets", "--threads", "1", "--output", str(tmp_path)]
    assert main([*run, "--only", "kept"]) == 0
    assert "| yes |" in (tmp_path / "targets.md").read_text(encoding="utf-8")
    assert main(run) == 1
    with pytest.raises(SystemExit, match="2"):
        main([*run, "--only", "nonsense"])


def test_publishing_replaces_one_section_with_its_figures_and_keeps_the_other(tmp_path: Path) -> None:
    page, figure = tmp_path / "docs" / "benchmarks.md", tmp_path / "overview.png"
    for path in (figure, tmp_path / "stale.png"):
        path.write_bytes(b"\x89PNG")
    report.publish("losses", "first \\1", [figure, tmp_path / "stale.png"], page)
    report.publish("targets", "promises", [], page)
    report.publish("losses", "second \\1", [figure], page)
    text = page.read_text(encoding="utf-8")
    assert "second \\1" in text
    assert "promises" in text
    assert "first" not in text
    assert "![overview](img/losses-overview.png)" in text
    assert [path.name for path in (page.parent / "img").iterdir()] == ["losses-overview.png"]
    assert "## Targets" in text and "## Losses with" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "nonsense"], "nonsense"),
        (["--shapes", "12"], "BxD"),
        (["--peers", "nobody"], "nobody"),
        (["--regimes", "late"], "late"),
        (["--repeats", "3"], "at least 5"),
        (["--backend", "nonsense"], "nonsense"),
        (["--only", "growth"], "--targets"),
        (["--loss", "arcface", "--shapes", "32x8"], "BxDxC"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_list_and_the_pydml_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out.split()
    assert {*cases.VARIANTS, *REGIMES, *registry.PEERS, *targets.targets()} <= set(listed)


def test_the_command_without_a_source_tree_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site" / "pydml" / "cli.py"))
    assert cli.main(["bench", "--list"]) == 2
    assert "source tree" in capsys.readouterr().err


def test_a_case_timed_twice_keeps_the_time_taken_with_its_peers(tmp_path: Path) -> None:
    """The second time comes from a sweep of its own: set against the peers of the first it would be no ratio."""
    table = harness.Table(tmp_path / "rows.csv")
    one = {name: "" for name in harness.COLUMNS} | {"op": "ms", "peer": "pydml", "mode": "full"}
    table.add(one | {"p50": 2.5})
    table.add(one | {"p50": 1.5, "peak_mib": 7})
    for read in (table, harness.Table(tmp_path / "rows.csv", keep=True)):
        (row,) = read.rows.values()
        assert (row["p50"], row["peak_mib"]) == ("2.5", "7")
