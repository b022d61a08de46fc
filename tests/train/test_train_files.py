"""What a run leaves on disk is whole, safe to open, and enough to go on from: kills, signals, full disks, commands."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_images import folders, image_set, packed, splits

from pydml.cli import main
from pydml.train import CheckpointError, Config, Trainer, TrainingError, checkpoint, logs
from pydml.train.trainer import Interrupted

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
SETTINGS = {
    "loss": "proxy_anchor", "batch_size": 32, "micro_batch": 8, "dropout": 0.3, "epochs": 4, "ks": [1, 4], "dim": 16,
    "checkpoint_every": 3, "ema": 0.9, "clip": 5.0,
}  # fmt: skip


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "pydml", "train", *map(str, arguments)]


def options(data: Path, out: Path, **changes: Any) -> list[str]:
    """SETTINGS as a command line."""
    words = ["--data", str(data), "--out", str(out)]
    for name, value in (SETTINGS | changes).items():
        words += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, list) else [value])]
    return words


def losses(run: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What the logs say, without times."""
    names = ("step", "loss", "grad_norm", "recall@1", "map@r")
    records = logs.read(run)
    return {k: [tuple(r.get(n) for n in names) for r in records if r["kind"] == k] for k in ("step", "epoch")}


def assert_same_run(got: Path, want: Path) -> None:
    """Bit for bit: every number of the logs, weights, optimizer, averages, generators; and the test's metrics."""
    assert losses(got) == losses(want)
    states = [checkpoint.load(run / "last.pt") for run in (got, want)]
    flat = [torch.utils._pytree.tree_flatten({k: v for k, v in s.items() if k != "config"}) for s in states]
    assert flat[0][1] == flat[1][1]
    for a, b in zip(flat[0][0], flat[1][0], strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert (got / "results.json").read_text() == (want / "results.json").read_text()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("data") / "packed", noise=110)


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to, with one thread, as the others: sums of two are rounded otherwise."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert main(["train", *options(data, out)]) == 0
    return out


# Killed, interrupted, resumed


@pytest.mark.parametrize("attempt", range(2))
def test_a_killed_run_goes_on_to_the_same_numbers(data: Path, unbroken: Path, tmp_path: Path, attempt: int) -> None:
    out = tmp_path / "run"
    moment = random.Random(attempt).uniform(0.0, 0.8)
    process = subprocess.Popen(command(*options(data, out)), env=ONE_THREAD, stdout=subprocess.DEVNULL)
    while not (out / "config.json").exists():  # it has begun
        assert process.poll() is None, "it ended before it began"
        time.sleep(0.01)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was to be killed while it ran"
    for path in (out / "last.pt", out / "best.pt"):
        if path.exists():
            checkpoint.load(path)
    assert main(["train", "--resume", str(out)]) == 0
    assert_same_run(out, unbroken)


def test_a_run_killed_at_every_step_goes_on_to_the_same_numbers(data: Path, tmp_path: Path) -> None:
    """In one process, for every step: what is written between two checkpoints is forgotten and done again."""
    settings = SETTINGS | {"data": str(data), "epochs": 2, "checkpoint_every": 2}
    Trainer(Config.from_dict(settings | {"out": str(tmp_path / "whole")}), quiet=True).fit()
    total = checkpoint.load(tmp_path / "whole" / "last.pt")["steps"]

    class Killed(Exception):
        pass

    out = tmp_path / "killed"
    trainer = Trainer(Config.from_dict(settings | {"out": str(out)}), quiet=True)
    for last in range(1, total):
        if trainer.steps >= last:
            continue
        step = trainer.step

        def until(*arguments: Any, step: Any = step, trainer: Trainer = trainer, last: int = last) -> dict[str, Any]:
            if trainer.steps == last:
                raise Killed
            record: dict[str, Any] = step(*arguments)
            return record

        trainer.step = until  # type: ignore[method-assign]
        with pytest.raises(Killed):
            trainer.fit()
        torch.manual_seed(last)  # what another process would have
        trainer = Trainer.resume(out, quiet=True)
    trainer.fit()
    assert_same_run(out, tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_the_run(data: Path, unbroken: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(*options(data, out), "--workers", 1),
        env=ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (out / "steps.csv").exists() or (out / "steps.csv").read_text().count("\n") < 3:
        assert process.poll() is None, "it ended before the signal"
        time.sleep(0.005)
    process.send_signal(number)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"{number.name}: saved after step" in text and "Traceback" not in errors
    saved = checkpoint.load(out / "last.pt")
    assert saved["steps"] == losses(out)["step"][-1][0]
    assert main(["train", "--resume", str(out), "--workers", "0"]) == 0
    assert_same_run(out, unbroken)


def test_a_resumed_run_has_its_memory_of_earlier_batches(tmp_path: Path) -> None:
    settings = {"data": "memory", "loss": "contrastive", "batch_size": 32, "epochs": 2, "memory": 80, "dim": 8}
    for name in ("whole", "stopped"):
        trainer = Trainer(Config.from_dict(settings | {"out": str(tmp_path / name)}), splits(), quiet=True)
        if name == "stopped":
            step = trainer.step

            def until(*arguments: Any, step: Any = step, trainer: Trainer = trainer) -> dict[str, Any]:
                record: dict[str, Any] = step(*arguments)
                trainer.stopping = "SIGINT" if trainer.steps == 4 else ""
                return record

            trainer.step = until  # type: ignore[method-assign]
            with pytest.raises(Interrupted):
                trainer.fit()
            trainer = Trainer.resume(tmp_path / name, splits=splits(), quiet=True)
            assert trainer.loss.has_been_filled and trainer.loss.embedding_memory.abs().min() > 0
        trainer.fit()
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


# Files


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_strangers_checkpoint_runs_no_code(tmp_path: Path, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    marker, path = tmp_path / "ran", tmp_path / "best.pt"
    write({"pydml_checkpoint": 1, "config": {}, "model": Malicious(marker)}, path)
    with pytest.raises(CheckpointError, match=r"best\.pt: refused: it holds more than tensors"):
        checkpoint.load(path)
    assert main(["eval", str(path)]) == 1 and "refused" in capsys.readouterr().err
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malicious(marker)))
    assert marker.exists(), "the payload is real"


def test_a_cut_off_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"model": {"w": torch.randn(1000)}})
    with pytest.raises(CheckpointError, match=r"last\.pt: lacks config and channels"):
        checkpoint.load(path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"last\.pt: not a whole checkpoint"):
            checkpoint.load(path)
    torch.save({"w": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="version None, wanted a pydml checkpoint"):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match="which is not a file"):
        checkpoint.load(tmp_path / "nothing.pt")


@contextlib.contextmanager
def disk_full_after(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``: write fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"value": torch.zeros(10)})
    before = path.read_bytes()
    with (
        disk_full_after(10_000),
        pytest.raises(CheckpointError, match=r"cannot write .*last\.pt: File too large, the"),
    ):
        checkpoint.save(path, {"value": torch.randn(10_000)})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["last.pt"]
    with disk_full_after(100), pytest.raises(CheckpointError, match=r"cannot write .*new\.pt: File too large$"):
        checkpoint.save(tmp_path / "new.pt", {"value": torch.randn(100)})


def test_a_disk_that_fills_up_in_a_run_is_an_error_and_no_damage(tmp_path: Path) -> None:
    trainer = Trainer(Config(data="memory", out=str(tmp_path / "run"), batch_size=32, epochs=2), splits(), quiet=True)
    with disk_full_after(1_000_000), pytest.raises(CheckpointError, match="cannot write"):
        trainer.fit()
    for path in (tmp_path / "run").glob("*.pt"):
        checkpoint.load(path)
    assert not list((tmp_path / "run").glob(".*"))


def test_logs_that_were_cut_off_are_mended(tmp_path: Path) -> None:
    log = logs.Log(tmp_path)
    for step in (1, 2, 3):
        log.write("step", step=step, loss=step / 2)
    log.close()
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "step", "st')
    log = logs.Log(tmp_path, 2)
    log.write("step", step=3, loss=9.0)
    log.close()
    assert (tmp_path / "steps.csv").read_text() == "step,loss\n1,0.5\n2,1.0\n3,9.0\n"
    assert [r["loss"] for r in logs.read(tmp_path)] == [0.5, 1.0, 9.0]


# Data that fails


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    root = folders(tmp_path / "data", classes=16)
    victim = next((root / "train").rglob("*.png"))
    victim.write_bytes(victim.read_bytes()[:60])
    for workers in (0, 1):
        settings = Config(
            data=str(root), out=str(tmp_path / f"run{workers}"), batch_size=64, val_fraction=0.0, transform="none",
            epochs=9, workers=workers,
        )  # fmt: skip
        with pytest.raises(TrainingError, match=rf"epoch 1, batch 1: cannot load .*{victim.name}"):
            Trainer(settings, quiet=True).fit()


class Deadly:
    """Images that kill the process that loads them, if it is not the trainer."""

    def __init__(self, images: Any) -> None:
        self.images, self.parent = images, os.getpid()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Any:
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[i]


def test_a_dead_worker_is_an_error_that_says_so(tmp_path: Path) -> None:
    data = splits()
    data.train.images = Deadly(data.train.images)
    settings = Config(
        data="memory", out=str(tmp_path / "run"), batch_size=32, val_fraction=0.0, workers=1, transform="none", epochs=1
    )
    with pytest.raises(TrainingError, match=r"epoch 1, batch 1: a data worker died .*Try fewer --workers"):
        Trainer(settings, data, quiet=True).fit()
    assert checkpoint.load(tmp_path / "run" / "last.pt")["steps"] == 0


# Commands


def test_eval_and_embed_agree_with_the_run(unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads((unbroken / "results.json").read_text())
    assert main(["eval", str(unbroken), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(results["test"])
    assert main(["eval", str(unbroken / "best.pt"), "--split", "val", "--ks", "1"]) == 0
    assert f"R@1 {100 * results['validation']['recall@1']:.2f}" in capsys.readouterr().out
    out = tmp_path / "test.npy"
    assert main(["embed", str(unbroken), "--out", str(out), "--dtype", "float16", "--normalize"]) == 0
    z, labels = np.load(out), np.load(tmp_path / "test.labels.npy")
    assert z.shape == (160, 16) and z.dtype == np.float16 and len(labels) == 160
    assert np.allclose(np.linalg.norm(z.astype(np.float32), axis=1), 1, atol=1e-3)
    assert main(["eval", str(unbroken / "last.pt"), "--split", "train"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "data: got nothing, wanted the directory of a data set"),
        (["train", "--data", "nowhere"], "'nowhere', wanted an existing folder"),
        (["train", "--config", "none.toml"], "config: got 'none.toml', which cannot be read"),
        (["train", "--resume", "nowhere"], "resume: got 'nowhere', which holds no run"),
        (["train", "--preset", "ms/papr", "--data", "x"], "near matches: 'ms/paper'"),
        (
            ["train", "--data", "DATA", "--batch-size", "4096"],
            "batch_size: got 4096, wanted at most m x number of classes",
        ),
        (["train", "--data", "DATA", "--batch-size", "32", "--backbone", "resnet0"], "backbone: got 'resnet0'"),
        (["train", "--data", "DATA", "--out", "RUN"], "which holds a run"),
        (["train", "--resume", "RUN", "--lr", "1"], "lr: a resumed run keeps its settings; only data, device"),
        (["train", "--data", "DATA", "--batch-size", "32", "--loss", "ms", "--loss-args", "gamma=2"], "gamma"),
        (["eval", "nowhere.pt"], "checkpoint: got 'nowhere.pt', which is not a file"),
        (["eval", "RUN", "--split", "gallery"], "split: got 'gallery', which this run or data set does not have"),
        (["embed", "RUN", "--out", "x.txt"], "out: got 'x.txt', wanted a file that ends in .npy"),
    ],
)
def test_a_wrong_command_is_one_line(
    arguments: list[str], message: str, data: Path, unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = [{"DATA": str(data), "RUN": str(unbroken)}.get(word, word) for word in arguments]
    assert main(words) == 1
    errors = capsys.readouterr().err
    assert message in errors and errors.startswith(f"pydml {arguments[0]}: ") and "Traceback" not in errors


@pytest.mark.parametrize("words", [["--loss-args", "gamma"], ["--lr", "fast"], ["--no-such-thing"]])
def test_a_wrong_option_is_refused_by_the_parser(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(["train", *words])
    assert status.value.code == 2 and words[0] in capsys.readouterr().err


def test_settings_of_a_file_train_from_the_command_line(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'data = "{data}"\nloss = "ms"\nbatch_size = 32\nepochs = 5\n[loss_args]\nepsilon = 0.1\n')
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "run"), "--epochs", "1"]) == 0
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["epochs"] == 1 and kept["loss_args"] == {"epsilon": 0.1} and kept["batch_size"] == 32


def test_an_interrupt_from_python_is_an_exception(tmp_path: Path) -> None:
    trainer = Trainer(Config(data="memory", out=str(tmp_path / "run"), batch_size=32), splits(), quiet=True)
    trainer.stopping = "SIGINT"
    with pytest.raises(Interrupted):
        trainer.fit()
    assert checkpoint.load(tmp_path / "run" / "last.pt")["steps"] == 1


def test_two_ranks_give_the_losses_of_one(data: Path, tmp_path: Path) -> None:
    words = options(data, tmp_path / "one", epochs=2, dropout=0.0, ema=0.5)
    assert main(["train", *words]) == 0
    words[words.index("--out") + 1] = str(tmp_path / "two")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pydml"]
    done = subprocess.run([*launcher, "train", *words], env=ONE_THREAD, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    one, two = (losses(tmp_path / name)["step"] for name in ("one", "two"))
    assert [r[1] for r in one] == pytest.approx([r[1] for r in two], rel=1e-4)
    assert len(one) == len(two) > 10
    recalls = [
        json.loads((tmp_path / name / "results.json").read_text())["test"]["recall@1"] for name in ("one", "two")
    ]
    assert recalls[0] == pytest.approx(recalls[1], abs=0.03)


def test_image_sets_of_the_tests_are_what_they_say() -> None:
    data = image_set(6, 3)
    assert len(data) == 18 and data.pixels().shape == (18, 1, 16, 16)
