"""``pydml selftest``: passes where all is well, and fails where a kernel is wrong, not repeatable, or not there."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

import pydml
from pydml import cli, selftest
from pydml.backends import Kernel

backends = importlib.import_module("pydml.backends")  # the package has a function of that name
SMALL = ["--quick", "--no-speed", "--device", "cpu"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["selftest", *SMALL, *arguments])
    return status, capsys.readouterr().out


def replace(monkeypatch: pytest.MonkeyPatch, engine: str, change: Any) -> None:
    """Let the ``tiled`` kernel of an engine return what ``change`` makes of its first output."""
    kernel: Kernel = backends.kernel("tiled", engine)

    def wrong(*arguments: Any) -> Any:
        output = kernel(*arguments)
        return (change(output[0]), *output[1:])

    monkeypatch.setitem(backends._tables["tiled"], engine, wrong)


def test_every_loss_passes_on_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    status, output = run(capsys, "--backend", "tiled")
    assert status == 0, output
    for case in selftest.cases():
        assert f"tiled          {case.name} " in output
    assert output.splitlines()[-1].startswith(f"selftest: pydml {pydml.__version__}, torch {torch.__version__}; ")
    assert output.endswith(" 0 failed\n")


def test_every_engine_is_run() -> None:
    z, labels = selftest.batch(48, 8, torch.device("cpu"))
    with backends.recording() as calls:
        for case in selftest.cases():
            case.run(z, labels, "tiled")
    assert set(backends._tables["tiled"]) - {"pair_saved", "histogram_saved"} <= {ran.op for ran in calls}


def test_speed_stands_beside_dense_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["selftest", "--quick", "--device", "cpu", "--backend", "tiled", "--case", "ms"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    (header,) = (i for i, line in enumerate(lines) if line.startswith("ms, mined"))
    assert [line.split()[0] for line in lines[header + 1 : header + 3]] == ["dense", "tiled"]
    assert all(float(line.split()[4]) > 0 for line in lines[header + 1 : header + 3])


def test_wrong_values_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, "pair", lambda stats: stats * 1.001)
    status, output = run(capsys, "--backend", "tiled", "--case", "ms")
    assert status == 1
    assert "FAILED tiled, ms: fp32:" in output


def test_wrong_gradients_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, "histogram_backward", lambda grad: grad.roll(1, 0))
    status, output = run(capsys, "--backend", "tiled", "--case", "fast_ap")
    assert status == 1
    assert "FAILED tiled, fast_ap: bf16:" in output


def test_nan_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, "pair", lambda stats: stats * torch.nan)
    status, output = run(capsys, "--backend", "tiled", "--case", "nca")
    assert status == 1
    assert "FAILED tiled, nca: fp64: inf" in output


def test_other_bits_in_a_second_run_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    replace(monkeypatch, "pair", lambda stats: stats * (1 + 1e-12 * next(calls)))
    status, output = run(capsys, "--backend", "tiled", "--case", "ms")
    assert status == 1
    assert "FAILED tiled, ms: repeats: no" in output


def test_an_exception_is_shown_and_the_rest_still_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(stats: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such device")

    replace(monkeypatch, "triplet", broken)
    status, output = run(capsys, "--backend", "tiled", "--case", "triplet", "--case", "ms")
    assert status == 1
    assert "FAILED tiled, triplet: fp32: RuntimeError: no such device" in output
    assert "FAILED tiled, ms:" not in output


def test_backends_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, output = run(capsys, "--backend", "cuda")
    assert status == 1
    assert "not examined: 'cuda' " in output


def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["selftest", "--case", "no such loss"])
    assert stopped.value.code == 2
    assert "--case: got 'no such loss', wanted one of ms, " in capsys.readouterr().err
