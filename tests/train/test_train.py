"""Training: settings, networks, rates, batches, and runs that learn."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toy_images import image_set, packed, splits

from pydml.losses import LOSSES, MarginLoss, ProxyAnchorLoss
from pydml.samplers import MPerClassSampler
from pydml.train import Config, Embedder, Trainer, TrainingError, checkpoint, embed, evaluate, logs, models, optim
from pydml.train.batches import Images, Part, stream
from pydml.train.transforms import Jitter


def config(out: Path, **changes: Any) -> Config:
    """A run of seconds."""
    settings: dict[str, Any] = {
        "data": "memory", "out": str(out / "run"), "loss": "ms", "batch_size": 64, "epochs": 2, "ks": (1, 4), "dim": 16,
    }  # fmt: skip
    return Config(**(settings | changes))


# Settings


def test_settings_come_from_toml_yaml_and_python_alike(tmp_path: Path) -> None:
    want = Config(data="d", preset="ms/paper", batch_size=128, lr=0.01, ks=(1, 2), loss_args={"epsilon": 0.2})
    toml, yaml = tmp_path / "run.toml", tmp_path / "run.yaml"
    toml.write_text(
        'data = "d"\npreset = "ms/paper"\nbatch-size = 128\nlr = 1e-2\nks = [1, 2]\n[loss-args]\nepsilon = 0.2\n'
    )
    yaml.write_text("data: d\npreset: ms/paper\nbatch_size: 128\nlr: 1e-2\nks: [1, 2]\nloss_args:\n  epsilon: 0.2\n")
    assert Config.from_file(toml) == Config.from_file(yaml) == want
    assert Config.from_file(toml, lr=0.5).lr == 0.5
    assert Config.from_dict(json.loads(json.dumps(want.as_dict()))) == want
    assert want.loss == "ms"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 10, "m_per_class": 4}, "batch_size: got 10, wanted a multiple of m_per_class=4"),
        ({"loss": "contrastive", "preset": "ms/paper"}, "preset: got 'ms/paper' beside loss='contrastive'"),
        ({"preset": "ms/papr"}, "near matches: 'ms/paper'"),
        ({"loss": "nothing"}, "loss: got 'nothing', wanted one of 'ms'"),
        ({"optimizer": "rmsprop"}, "optimizer: got 'rmsprop', wanted one of 'adamw'"),
        ({"lr": -1.0}, "lr: got -1.0, wanted a number >= 0"),
        ({"lr": "fast"}, "lr: got 'fast' of type str"),
        ({"epochs": True}, "epochs: got True"),
        ({"ks": (0,)}, r"ks\[0\]: got 0"),
        ({"ema": 1.0}, "ema: got 1.0, wanted a number < 1"),
        ({"val_fraction": 1.0}, "val_fraction: got 1.0"),
        ({"miner": "BestMiner"}, "miner: got 'BestMiner', wanted one of"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Config(**settings)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.toml", "batch_sise = 4", "run.toml: setting: got 'batch_sise', wanted one of 'amp', 'backbone'"),
        ("run.toml", "lr = ", "run.toml: not valid TOML"),
        ("run.yaml", "- 1", "run.yaml: got a list, wanted a table"),
        ("run.yaml", "lr: [", "run.yaml: not valid YAML"),
        ("run.yaml", "lr: fast", "run.yaml: lr: got 'fast', wanted a number"),
        ("run.toml", "a = " + "[" * 5000, "run.toml: not valid TOML"),
        ("run.yaml", "[" * 900, "run.yaml: not valid YAML"),
        ("run.ini", "", "wanted a file that ends in .toml"),
    ],
)
def test_a_broken_file_of_settings_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        Config.from_file(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Config.from_file(tmp_path / "other.toml")


def test_losses_are_told_the_number_of_classes() -> None:
    anchor = Config(preset="proxy-anchor/paper", dim=24).build_loss(50)
    assert isinstance(anchor, ProxyAnchorLoss) and anchor.proxies.shape == (50, 24)
    margin = Config(preset="margin/official").build_loss(7)
    assert isinstance(margin, MarginLoss) and len(margin.beta) == 7
    with pytest.raises(ValueError, match="loss_args: dro_topk needs k"):
        Config(loss="dro_topk").build_loss(7)
    assert Config(loss="dro_topk", loss_args={"k": 5}).build_loss(7).k == 5


# Networks, rates


def test_the_small_network_has_the_size_that_docs_say() -> None:
    model = models.build(Config(dim=128), channels=1)
    assert sum(p.numel() for p in model.parameters()) == 421_216
    assert model(torch.zeros(3, 1, 32, 32, dtype=torch.uint8)).shape == (3, 128)


def test_bytes_and_floats_of_the_same_image_embed_alike() -> None:
    model = models.build(Config(dim=8), channels=3).eval()
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(model(images), model(images.float() / 255))


@pytest.mark.parametrize("pool", ["avg", "max", "avg+max"])
def test_pooling(pool: str) -> None:
    model = Embedder(nn.Identity(), 3, 3, pool=pool, normalize=((0,), (1,)))
    nn.init.eye_(model.embedding.weight), nn.init.zeros_(model.embedding.bias)
    x = torch.rand(2, 3, 4, 5)
    average, largest = x.mean((2, 3)), x.amax((2, 3))
    want = {"avg": average, "max": largest, "avg+max": average + largest}[pool]
    assert torch.allclose(model(x), want, atol=1e-6)


def test_frozen_batchnorm_keeps_its_statistics() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    for freeze in (True, False):
        model = Embedder(net, 4, 2, freeze_bn=freeze).train()
        before = net[1].running_mean.clone()
        model(torch.rand(8, 1, 6, 6))
        assert torch.equal(net[1].running_mean, before) == freeze
        assert model.training and net[0].training


def test_weights_of_a_file_start_a_backbone(tmp_path: Path) -> None:
    source, path = models.SmallCNN(1), tmp_path / "weights.pt"
    torch.save(source.state_dict() | {"classifier.weight": torch.zeros(3)}, path)
    model = models.build(Config(weights=str(path)), 1)
    assert torch.equal(model.backbone.layers[0].weight, source.layers[0].weight)  # type: ignore[union-attr, index]
    torch.save({"something": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"lacks 12 parameters of the backbone, such as layers\.0\.weight"):
        models.build(Config(weights=str(path)), 1)
    with pytest.raises(ValueError, match=r"weights: got 'nowhere\.pt', which is not a file"):
        models.build(Config(weights="nowhere.pt"), 1)


def test_rates_follow_their_schedule() -> None:
    cosine = Config(schedule="cosine", warmup=2.0, epochs=10)
    assert [optim.factor(cosine, e) for e in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    step = Config(schedule="step", step_epochs=4.0, step_gamma=0.1)
    assert [optim.factor(step, e) for e in (0, 3.9, 4, 8)] == pytest.approx([1, 1, 0.1, 0.01])
    steps = Config(schedule="step", milestones=(20, 30), step_gamma=0.1)
    assert [optim.factor(steps, e) for e in (19, 20, 29, 30, 39)] == pytest.approx([1, 0.1, 0.1, 0.01, 0.01])
    frozen = Config(schedule="constant", freeze_backbone=1)
    assert [optim.factor(frozen, e, "backbone") for e in (0.5, 1)] == [0, 1]
    assert optim.factor(frozen, 0.5, "loss") == 1


def test_each_part_has_its_rate_and_only_matrices_decay() -> None:
    settings = Config(lr=1.0, embedding_lr=2.0, proxy_lr=100.0, weight_decay=0.5, schedule="constant")
    model = models.build(settings, 1)
    optimizer = optim.build(settings, model, ProxyAnchorLoss(5, 128))
    optim.set_rates(optimizer, settings, 3.0)
    found = {(g["part"], g["lr"], g["weight_decay"]): len(g["params"]) for g in optimizer.param_groups}
    assert found == {
        ("backbone", 1.0, 0.5): 4, ("backbone", 1.0, 0.0): 8, ("embedding", 2.0, 0.5): 1, ("embedding", 2.0, 0.0): 1,
        ("loss", 100.0, 0.0): 1,
    }  # fmt: skip


# Batches


def test_augmentation_hangs_on_the_place_in_the_run_alone() -> None:
    """Neither micro-batches, nor workers, ranks or a resumed run change what the network sees."""
    data = image_set()
    images, sampler = Images(data, Jitter(), seed=5), MPerClassSampler(data.labels, 4, 64, 128, seed=5)

    def seen(start: tuple[int, int] = (0, 0), **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        batches = stream(images, data.labels, sampler, start, 2, **{"micro_batch": 16, **options})
        return [(torch.cat(parts), labels) for parts, labels in batches]

    want = seen()
    assert len(want) == 4 and not torch.equal(want[0][0], want[2][0])
    for got in (seen(micro_batch=24), seen(micro_batch=None), seen(workers=2), seen((0, 1)), seen((1, 0))):
        for (x, y), (want_x, want_y) in zip(reversed(got), reversed(want), strict=False):
            assert torch.equal(x, want_x) and torch.equal(y, want_y)
    halves = [seen(rank=rank, world_size=2) for rank in (0, 1)]
    for (left, right), (x, y) in zip(zip(*halves, strict=True), want, strict=True):
        assert torch.equal(torch.cat((left[0], right[0])), x) and torch.equal(torch.cat((left[1], right[1])), y)


def test_transforms_of_single_images_leave_the_networks_generator_alone() -> None:
    data = image_set()
    drawn: list[float] = []

    def noisy(image: Any) -> Any:
        drawn.append(float(torch.rand(())))
        return image

    sampler = MPerClassSampler(data.labels, 4, 32, 64, seed=0)
    before = torch.get_rng_state()
    for _ in range(2):
        list(stream(Images(data, noisy, 0), data.labels, sampler, (0, 0), 1, micro_batch=None))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(drawn)) == 64 and drawn[:64] == drawn[64:], "a number an image, the same each time"


def test_jitter_moves_a_little_and_keeps_bytes() -> None:
    images = image_set().pixels(range(6))
    still = Jitter()(images, torch.full((6, 5), 0.5))
    assert still.dtype == torch.uint8 and (still.int() - images.int()).abs().max() <= 1
    moved = Jitter()(images, torch.rand(6, 5))
    change = (moved.float() - images.float()).abs().mean()
    assert 1 < change < 60


def test_images_of_different_sizes_are_an_error_that_says_so() -> None:
    from PIL import Image

    data = image_set(4, 2)
    data.images = [Image.new("L", (8 + i, 8)) for i in range(8)]  # type: ignore[assignment]
    failure = Images(data, lambda image: image, 0)[Part(0, 0, 0, (0, 1))]
    assert "images of different shapes" in failure.reason  # type: ignore[union-attr]


# Runs


def test_a_run_learns_and_leaves_its_logs(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=4, micro_batch=16, lr=2e-3, snapshots=(0, 4))
    data = splits(noise=110)
    trainer = Trainer(settings, data, quiet=True)
    untrained = trainer.evaluate(data.test)["recall@1"]
    results = trainer.fit()
    assert results["test"]["recall@1"] > untrained + 0.1
    run = Path(settings.out)
    assert json.loads((run / "results.json").read_text()) == results
    records = logs.read(run)
    steps, epochs = ([r for r in records if r["kind"] == kind] for kind in ("step", "epoch"))
    assert [r["step"] for r in steps] == list(range(1, 4 * 4 + 1))
    assert [r["epoch"] for r in epochs] == [0, 1, 2, 3, 4]
    assert epochs[-1]["loss"] == pytest.approx(np.mean([r["loss"] for r in steps[-4:]]))
    assert all(0 < r["loss_share"] < 1 and r["images_per_second"] > 0 and r["memory"] > 0 for r in steps)
    with open(run / "steps.csv", encoding="utf-8") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [r["loss"] for r in steps]
    best = max(epochs, key=lambda r: r["recall@1"])
    assert results["validation"] == {k: best[k] for k in ("recall@1", "recall@4", "map@r", "r_precision")}
    assert sorted(p.name for p in (run / "snapshots").iterdir()) == ["epoch-0000.npz", "epoch-0004.npz"]


def test_the_progress_line_shows_loss_speed_share_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    record = {"loss": 0.5, "images_per_second": 1234.0, "loss_share": 0.021, "memory": 300 * 2**20}
    for quiet in (False, True):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = logs.Progress(epochs=12, batches=5, quiet=quiet)
        progress.epoch(3, 2)
        progress.step(record)
        progress.close()
        line = "loss 0.5000  1234 img/s  loss op 2.1 %  300 MiB"
        assert (line in terminal.getvalue() and "epoch  4/12" in terminal.getvalue()) != quiet


def test_micro_batches_do_not_change_a_run(tmp_path: Path) -> None:
    losses = []
    for micro in (None, 24):
        settings = config(tmp_path / str(micro), micro_batch=micro, dropout=0.0, epochs=1)
        Trainer(settings, splits(), quiet=True).fit()
        losses.append([r["loss"] for r in logs.read(settings.out) if r["kind"] == "step"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "proxy-anchor/paper", "loss": "proxy_anchor", "proxy_lr": 0.1},
        {"preset": "margin/official", "loss": "margin", "miner": "DistanceWeightedMiner"},
        {"sampler": "category", "loss": "fast_ap"},
        {"amp": "bf16", "ema": 0.9, "clip": 1.0, "optimizer": "sgd", "lr": 0.1},
        {"amp": "fp16", "micro_batch": 16, "schedule": "step", "warmup": 1.0},
        {"val_fraction": 0.0, "transform": "none", "optimizer": "adam", "dropout": 0.2, "deterministic": True},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_settings_train(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = config(tmp_path, **changes)
    try:
        results = Trainer(settings, splits(), quiet=True).fit()
    finally:
        torch.use_deterministic_algorithms(False)
    assert 0 <= results["test"]["recall@1"] <= 1
    rows = [r["loss"] for r in logs.read(settings.out) if r["kind"] == "step"]
    assert len(rows) > 4 and np.isfinite(rows).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(tmp_path: Path, loss: str) -> None:
    arguments = {"dro_topk": {"k": 64}, "soft_triple": {"centers_per_class": 2}}.get(loss, {})
    settings = config(tmp_path, loss=loss, loss_args=arguments, epochs=1, micro_batch=32, test=False)
    trainer = Trainer(settings, splits(), quiet=True)
    before = [p.detach().clone() for p in (*trainer.model.parameters(), *trainer.loss.parameters())]
    trainer.fit()
    after = [*trainer.model.parameters(), *trainer.loss.parameters()]
    assert all(not torch.equal(b, a) for b, a in zip(before, after, strict=True)), "a parameter did not learn"


def test_the_average_of_the_weights_is_what_counts(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, ema=0.5, epochs=1), splits(), quiet=True)
    trainer.fit()
    assert trainer.ema is not None and trainer.evaluated is trainer.ema.module
    best = checkpoint.load(Path(trainer.config.out) / "best.pt")["model"]
    assert not torch.equal(best["embedding.weight"], trainer.model.state_dict()["embedding.weight"])


def test_a_gallery_is_searched_instead_of_the_queries() -> None:
    data, model = image_set(10, 4), models.build(Config(dim=8), 1)
    own = evaluate(model, data, ks=(1,))
    other = evaluate(model, data, gallery=data, ks=(1,))
    assert other["recall@1"] == 1.0 > own["recall@1"], "each finds itself in a gallery that holds it"
    assert embed(model, data).shape == (40, 8) and model.training


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    class Broken(nn.Module):
        calls = 0

        def forward(self, z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return z.sum() * (float("nan") if self.calls == 3 else 1)

    settings = config(tmp_path, checkpoint_every=1)
    trainer = Trainer(settings, splits(), loss=Broken(), quiet=True)
    with pytest.raises(TrainingError, match="step 3: the loss is nan"):
        trainer.fit()
    state = checkpoint.load(Path(settings.out) / "last.pt")
    assert state["steps"] == 2
    assert all(bool(v.isfinite().all()) for v in state["model"].values())


def test_data_is_found_out_from_its_files(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, data=str(packed(tmp_path / "data"))), quiet=True)
    assert len(trainer.train_set.classes) == 36 and trainer.val_set is not None
    with pytest.raises(ValueError, match="data: got nothing"):
        Trainer(dataclasses.replace(trainer.config, data=""))
