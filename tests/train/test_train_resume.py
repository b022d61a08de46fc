"""Stopped anywhere and resumed, a run gives the numbers of one that was not; a good checkpoint is never lost."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ranks
from torch import Tensor, nn
from toy_images import packed, splits

from pydml.cli import main
from pydml.data import Splits
from pydml.train import CheckpointError, Config, Trainer, TrainingError, checkpoint, lock, logs, models
from pydml.train.trainer import Interrupted

#: Epochs of three batches.
SETTINGS: dict[str, Any] = {
    "data": "memory", "batch_size": 16, "images_per_epoch": 48, "epochs": 2, "ks": (1, 4), "dim": 8, "dropout": 0.2,
    "snapshots": (9,),
}  # fmt: skip


def images() -> Splits:
    """Of two super categories."""
    data = splits(12, 4)
    for part in (data.train, data.test):
        assert part.super_labels is not None
        part.super_labels %= 2
    return data


def trainer(out: Path, criterion: nn.Module | None = None, **changes: Any) -> Trainer:
    return Trainer(Config(**(SETTINGS | {"out": str(out)} | changes)), images(), loss=criterion, quiet=True)


def numbers(run: Path) -> list[tuple[Any, ...]]:
    """What the logs say, without times."""
    names = ("kind", "step", "loss", "grad_norm", "recall@1", "map@r")
    return [tuple(record.get(name) for name in names) for record in logs.read(run)]


def assert_same_run(got: Path, want: Path) -> None:
    """Bit for bit: logs, weights, optimizer, memory, generators, results."""
    assert numbers(got) == numbers(want)
    states = [checkpoint.load(run / "last.pt") for run in (got, want)]
    flat = [torch.utils._pytree.tree_flatten({k: v for k, v in s.items() if k != "config"}) for s in states]
    assert flat[0][1] == flat[1][1]
    for a, b in zip(flat[0][0], flat[1][0], strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert (got / "results.json").read_text() == (want / "results.json").read_text()


def stop_after(run: Trainer, steps: int) -> Trainer:
    """Ctrl-C in that step."""
    step = run.step

    def until(*arguments: Any) -> dict[str, Any]:
        record = step(*arguments)
        run.stopping = "SIGINT" if run.steps == steps else ""
        return record

    run.step = until  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        run.fit()
    return run


# Every step of an epoch


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "ms"},
        {"loss": "fast_ap", "sampler": "category"},
        {"loss": "contrastive", "memory": 40},
        {"loss": "margin", "miner": "DistanceWeightedMiner"},
        {"loss": "proxy_anchor", "proxy_lr": 0.1, "micro_batch": 6, "ema": 0.9},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_run_stopped_at_any_step_of_an_epoch_goes_on_to_the_same_numbers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The checkpoint of every step is what Ctrl-C there would have left, the last step of the epoch included."""
    whole = trainer(tmp_path / "whole", checkpoint_every=1, **changes)
    last = whole.sampler.batches
    save = whole._save

    def save_and_keep() -> None:
        save()
        if whole.steps <= last + 1:
            shutil.copytree(tmp_path / "whole", tmp_path / f"{whole.steps}-{whole.batch}")

    whole._save = save_and_keep  # type: ignore[method-assign]
    whole.fit()
    stops = {path.name for path in tmp_path.glob("*-*")}
    assert stops == {f"{step}-{step}" for step in range(last + 1)} | {f"{last}-0", f"{last + 1}-1"}
    for stop in stops:
        torch.manual_seed(len(stop))  # what another process would have
        resumed = Trainer.resume(tmp_path / stop, images(), quiet=True)
        assert f"{resumed.steps}-{resumed.batch}" == stop
        resumed.fit()
        assert_same_run(tmp_path / stop, tmp_path / "whole")


def test_so_does_one_that_was_interrupted_there(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").fit()
    last = stop_after(trainer(tmp_path / "run"), 3).sampler.batches
    assert last == 3, "the last step of an epoch"
    Trainer.resume(tmp_path / "run", images(), quiet=True).fit()
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# Other numbers of ranks


def on_ranks(rank: int, size: int, out: str, stop: int) -> list[str]:
    """Train in fp64, from the beginning or on from a checkpoint; stop after some steps, or at the end."""
    run, data = Path(out), images()
    config = Config(**(SETTINGS | {"out": out, "loss": "contrastive", "dropout": 0.0}))
    torch.manual_seed(0)
    model = models.build(config, 1).double()
    make = Trainer.resume if (run / "last.pt").exists() else Trainer
    made = make(run if make is not Trainer else config, data, model=model, quiet=True)
    stop_after(made, stop) if stop else made.fit()
    return made.notes


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    def launch(size: int, out: Path, stop: int = 0) -> list[str]:
        notes: list[str] = on_ranks(0, 1, str(out), stop) if size == 1 else ranks(size)(on_ranks, str(out), stop)[0]
        return notes

    assert launch(1, tmp_path / "whole") == []
    launch(before, tmp_path / "run", stop=2)
    (note,) = launch(after, tmp_path / "run")
    assert note.startswith(f"resumed on {after} ranks, was on {before}: the same batches; dropout draws other numbers")
    got, want = ([row[2] for row in numbers(tmp_path / name)][1:] for name in ("run", "whole"))  # 0 is untrained
    assert len(want) == 8 and got == pytest.approx(want, rel=1e-9)


# A good checkpoint is never replaced by a bad one


class InfiniteGradient(nn.Module):
    """A finite loss whose gradient is not, in its third call."""

    calls = 0

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        power = z.abs().sum() * 0 if self.calls == 3 else z.square().sum()
        return power.sqrt()  # d√x = ∞ at 0, and ∞·0 is NaN


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(
    tmp_path: Path, clip: float | None
) -> None:
    run = trainer(tmp_path / "run", criterion=InfiniteGradient(), checkpoint_every=1, clip=clip)
    with pytest.raises(
        TrainingError, match=r"step 3: the loss is 0, the norm of its gradient nan; the last checkpoint"
    ):
        run.fit()
    state = checkpoint.load(tmp_path / "run" / "last.pt")
    assert state["steps"] == 2 and not checkpoint.not_finite(run.model)
    assert all(bool(v.isfinite().all()) for v in state["model"].values())


@pytest.mark.parametrize("val_fraction", [0.0, 0.1])
def test_weights_that_are_not_finite_never_replace_good_ones(tmp_path: Path, val_fraction: float) -> None:
    run = trainer(tmp_path / "run", val_fraction=val_fraction, epochs=1)
    step = run.step

    def overflow(*arguments: Any) -> dict[str, Any]:
        record = step(*arguments)
        if run.batch == run.sampler.batches:
            with torch.no_grad():
                run.model.embedding.weight[0, 0] = torch.inf  # type: ignore[union-attr, index]
        return record

    run.step = overflow  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"step 3: embedding\.weight is not finite, nor are 0 others; the last"):
        run.fit()
    for name in ("last.pt", "best.pt"):
        kept = checkpoint.load(tmp_path / "run" / name)["model"]
        assert all(bool(v.isfinite().all()) for v in kept.values())


def test_half_precision_leaves_a_step_with_an_infinite_gradient_out(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", criterion=InfiniteGradient(), amp="fp16", epochs=2)
    run.fit()
    assert not checkpoint.not_finite(run.model) and run.steps == 6


def test_infinities_in_a_mask_are_no_damage() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert checkpoint.not_finite(model) == []
    model.register_buffer("mean", torch.tensor([torch.nan]))
    model.weight.data[0, 0] = torch.inf
    assert checkpoint.not_finite(model, model) == ["weight", "mean"]


# One process at a time


def test_what_a_kill_left_half_written_is_swept(tmp_path: Path) -> None:
    stop_after(trainer(tmp_path / "run", snapshots=(0,)), 1)
    stale = [tmp_path / "run" / ".last.pt.123.tmp", tmp_path / "run" / "snapshots" / ".epoch-0000.npz.9.tmp"]
    for path in stale:
        path.write_bytes(b"half")
    Trainer.resume(tmp_path / "run", images(), quiet=True).fit()
    assert not [path for path in stale if path.exists()]
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_two_runs_in_one_folder_refuse_each_other(tmp_path: Path) -> None:
    run, out = trainer(tmp_path / "run"), tmp_path / "run"
    second, met = trainer(out), []
    step = run.step

    def meet(*arguments: Any) -> dict[str, Any]:
        for other in (second, Trainer.resume(out, images(), quiet=True)):
            with pytest.raises(CheckpointError, match=rf"in which process {os.getpid()} on \S+ is training; wait"):
                other.fit()
            met.append(other)
        return step(*arguments)

    run.step = meet  # type: ignore[method-assign]
    results = run.fit()
    assert len(met) == 2 * run.steps, "and it was not disturbed"
    with pytest.raises(CheckpointError, match=r"where another process has trained since .* resume it \(--resume"):
        second.fit()
    assert Trainer.resume(out, images(), quiet=True).fit() == results


def test_all_ranks_are_refused_together(tmp_path: Path) -> None:
    with lock.alone(tmp_path / "run", None):
        answers = ranks(2).answers(on_ranks, str(tmp_path / "run"), 0)
    assert [f"in which process {os.getpid()} on " in str(answer) for answer in answers] == [True, True]


def test_a_killed_run_leaves_no_lock_though_its_workers_live_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a second command in the same folder ends with one line."""
    data, out = packed(tmp_path / "data", classes=12, each=4), tmp_path / "run"
    words = ["--data", str(data), "--batch-size", "16", "--epochs", "5000", "--dim", "8", "--eval-every", "5000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pydml", "train", *words, "--out", str(out), "--workers", "1"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not (out / "steps.csv").exists() or (out / "steps.csv").read_text().count("\n") < 3:
            assert process.poll() is None, "it ended before it began"
            time.sleep(0.02)
        assert main(["train", "--resume", str(out)]) == 1
        errors = capsys.readouterr().err
        assert re.fullmatch(
            rf"pydml train: out: got .*, in which process {process.pid} on \S+ is training; .*\n", errors
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with lock.alone(out, lock.identity(out / "last.pt")):
        pass


# Checkpoints that were damaged


def state(path: Path) -> dict[str, Any]:
    saved = {"config": {"a": 1}, "channels": 3, "model": {"w": torch.randn(40, 25), "n": torch.arange(9)}}
    checkpoint.save(path, saved)
    return saved


@pytest.mark.parametrize("old", [False, True], ids=["with checksum", "before there were checksums"])
@pytest.mark.parametrize("kind", ["bit", "zeros"])
def test_a_damaged_checkpoint_is_never_read_as_other_weights(tmp_path: Path, kind: str, old: bool) -> None:
    path = tmp_path / "last.pt"
    saved, damaged, numbers = state(path), 0, random.Random(0)
    if old:
        torch.save({"pydml_checkpoint": 1, **saved}, path)
    whole = path.read_bytes()
    for _ in range(200):
        content = bytearray(whole)
        at = numbers.randrange(len(content))
        if kind == "bit":
            content[at] ^= 1 << numbers.randrange(8)
        else:
            content[at : at + 64] = bytes(len(content[at : at + 64]))
        if content == whole:
            continue
        path.write_bytes(content)
        try:
            got = checkpoint.load(path)
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: not a whole checkpoint (") and "\n" not in str(error)
            damaged += 1
        else:
            assert old, "a checksum sees every bit"
            assert all(torch.equal(got["model"][name], saved["model"][name]) for name in ("w", "n"))
    assert damaged > (100 if old else 150)


def test_a_checkpoint_is_still_an_archive_of_torch(tmp_path: Path) -> None:
    saved = state(tmp_path / "last.pt")
    plain = torch.load(tmp_path / "last.pt", weights_only=True)
    assert torch.equal(plain["model"]["w"], saved["model"]["w"])
    assert torch.equal(checkpoint.load(tmp_path / "last.pt")["model"]["w"], saved["model"]["w"])


def test_one_from_before_there_were_checksums_still_loads(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    saved = state(path)
    torch.save({"pydml_checkpoint": 1, **saved}, path)
    assert torch.equal(checkpoint.load(path)["model"]["w"], saved["model"]["w"])


def test_a_damaged_checkpoint_is_one_line_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop_after(trainer(tmp_path / "run"), 1)
    for name in ("last.pt", "best.pt"):
        path = tmp_path / "run" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        words = ["train", "--resume", str(tmp_path / "run")] if name == "last.pt" else ["eval", str(tmp_path / "run")]
        assert main(words) == 1
        want = rf"pydml {words[0]}: {path}: not a whole checkpoint \(its checksum is another\).*\n"
        assert re.fullmatch(want, capsys.readouterr().err)


def test_what_is_no_last_checkpoint_is_named(tmp_path: Path) -> None:
    stop_after(trainer(tmp_path / "run"), 1)
    path = tmp_path / "run" / "last.pt"
    whole = checkpoint.load(path)
    checkpoint.save(path, whole | {"model": {}})
    with pytest.raises(CheckpointError, match=r"last\.pt: does not fit this run's network"):
        Trainer.resume(tmp_path / "run", images(), quiet=True)
    shutil.copy(tmp_path / "run" / "best.pt", path)
    with pytest.raises(CheckpointError, match=r"last\.pt: lacks '\w+', without which a run cannot go on"):
        Trainer.resume(tmp_path / "run", images(), quiet=True)
    path.unlink()
    for text, message in (("[" * 100_000, "nested too deeply"), ("[1]", "wanted an object"), ("{", "wanted JSON")):
        (tmp_path / "run" / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
            Trainer.resume(tmp_path / "run", images(), quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": [1]}, "config: got list, wanted dict"),
        ({"config": {"lr": "x"}}, "lr: got 'x', wanted a number"),
        ({"config": {"mind": 1}}, "setting: got 'mind', wanted one of"),
        ({"channels": None}, "channels: got NoneType, wanted int"),
        ({"model": [1]}, "model: got list, wanted dict"),
        ({"model": {}}, "its weights are not those of the network in its settings"),
    ],
)
def test_a_checkpoint_of_something_else_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "best.pt"
    checkpoint.save(path, {"config": {}, "channels": 1, "model": {}} | changes)
    assert main(["eval", str(path)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"pydml eval: {path}: ") and message in errors and errors.count("\n") == 1


# BatchNorm, Recall@K


def test_batchnorm_is_synchronised_on_gpus() -> None:
    for device, want in (("cuda", nn.SyncBatchNorm), ("cpu", nn.BatchNorm2d)):
        model = models.Embedder(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), 4, 2)
        weight = model.backbone[1].weight  # type: ignore[index]
        made = models.synchronised(model, torch.device(device))
        assert type(made.backbone[1]) is want and made.backbone[1].weight is weight  # type: ignore[index, union-attr]
    assert models.has_batchnorm(made) and not models.has_batchnorm(models.SmallCNN())


def with_batchnorm(rank: int, size: int, out: str, freeze: bool) -> list[str]:
    config = Config(**(SETTINGS | {"out": out, "freeze_bn": freeze}))
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    return Trainer(config, images(), model=models.Embedder(net, 4, 8, freeze_bn=freeze), quiet=True).notes


def test_where_batchnorm_cannot_be_synchronised_the_run_says_so(tmp_path: Path) -> None:
    (note,) = ranks(2)(with_batchnorm, str(tmp_path), False)[1]
    assert note.startswith("BatchNorm: each rank normalises its own images")
    assert ranks(2)(with_batchnorm, str(tmp_path), True) == [[], []]


def test_recall_is_shown_where_it_can_miss() -> None:
    found = {"recall@1": 0.5, "recall@10": 1.0, "recall@100": 1.0, "map@r": 0.25, "r_precision": 0.3}
    assert logs.shown(found, (1, 10, 100), images=100) == "R@1 50.00  R@10 100.00  MAP@R 25.00  RP 30.00"
    assert "R@100 100.00" in logs.shown(found, (1, 10, 100), images=101)
