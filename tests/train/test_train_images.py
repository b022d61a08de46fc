"""Training from image files without torchvision or timm: crops of our own, networks of others, imports that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from toy_images import folders, patterns

from pydml.cli import main
from pydml.train import Config, Trainer, models, transforms
from pydml.train.packages import optional


def jpegs(root: Path, classes: int = 6, each: int = 4) -> Path:
    """Photographs as they come: JPEG, no two of one size, a folder a class under train and test."""
    random = np.random.default_rng(0)
    for part, seed in (("train", 0), ("test", 1)):
        for i, pixels in enumerate(patterns(classes, each, seed, noise=20)):
            folder = root / part / f"{part} {i // each}"
            folder.mkdir(parents=True, exist_ok=True)
            size = (int(random.integers(20, 60)), 24 + i)
            Image.fromarray(pixels).convert("RGB").resize(size).save(folder / f"{i}.jpg")
    return root


def test_jpegs_of_different_sizes_train_from_the_command_line(tmp_path: Path) -> None:
    """As a user does it, with no option but what the data needs, and whatever torchvision and timm are there."""
    out, packages = tmp_path / "run", tmp_path / "packages"
    packages.mkdir()
    for name in ("torchvision", "timm"):  # as a torchvision built for another torch does
        (packages / f"{name}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    words = ["--data", jpegs(tmp_path / "data"), "--out", out, "--image-size", 32, "--epochs", 2, "--batch-size", 16]
    done = subprocess.run(
        [sys.executable, "-m", "pydml", "train", *map(str, words), "--val-fraction", "0.3"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(packages)}, timeout=240,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "test (weights of epoch" in done.stdout and "Traceback" not in done.stderr
    results = json.loads((out / "results.json").read_text())
    assert 0 < results["test"]["recall@10"] <= 1
    snapshot = np.load(out / "snapshots" / "epoch-0002.npz")
    assert snapshot["gallery"].shape[2:] == (96, 96, 3), "pictures of all sizes on squares of one"


def test_files_train_through_the_papers_augmentation(tmp_path: Path) -> None:
    settings = Config(
        data=str(folders(tmp_path / "data")), out=str(tmp_path / "run"), batch_size=16, m_per_class=4, epochs=2,
        transform="papers", image_size=16, val_fraction=0.25, ks=(1, 4), dim=16,
    )  # fmt: skip
    assert Trainer(settings, quiet=True).fit()["test"]["recall@4"] > 0


# Crops


def photograph(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
@pytest.mark.parametrize("size", [(50, 80), (300, 7), (1, 1)])
def test_the_papers_crops_are_square_bytes(mode: str, channels: int, size: tuple[int, int]) -> None:
    train, test = transforms.papers(32)
    image = photograph(*size, mode)
    for transform in (train, test):
        crop = transform(image)
        assert crop.shape == (channels, 32, 32) and crop.dtype == torch.uint8 and crop.is_contiguous()
        assert torch.equal(test(transforms.to_tensor(image)), test(image)), "a tensor is as good as a PIL image"
    assert torch.equal(test(image), test(image))
    if size == (50, 80):
        torch.manual_seed(0)
        first = train(image)
        assert not torch.equal(train(image), first)
        torch.manual_seed(0)
        assert torch.equal(train(image), first), "what is random hangs on torch's generator alone"


def test_the_test_crop_is_the_centre_of_the_resized_image() -> None:
    image = photograph(300, 256)
    want = torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, 16:240, 38:262]
    assert torch.equal(transforms.CentreCrop(224)(image), want), "its shorter side is 256: nothing to resize"
    ramp = Image.fromarray(np.tile(np.arange(0, 256, dtype=np.uint8), (512, 1)).repeat(4, 1))  # [512, 1024]
    crop = transforms.CentreCrop(112)(ramp)[0].float()  # a quarter of it: shorter side 128, 256 wide, columns 72 … 184
    assert crop.std(0).max() == 0 and (crop[0] - torch.arange(72, 184)).abs().max() <= 1


def test_random_crops_have_the_papers_shares_and_ratios() -> None:
    width, height = 480, 480
    boxes = torch.tensor([transforms.random_box(width, height) for _ in range(1000)], dtype=torch.float64)
    left, top, wide, high = boxes.unbind(1)
    assert left.min() >= 0 and top.min() >= 0
    assert (left + wide).max() <= width and (top + high).max() <= height
    share, ratio = wide * high / (width * height), wide / high
    assert 0.079 < share.min() < 0.1 and 0.9 < share.max() <= 1
    assert 0.74 < ratio.min() < 0.77 and 1.3 < ratio.max() < 1.35
    assert abs(float(ratio.log().mean())) < 0.02
    assert left[wide < 300].max() > 180 and left.min() == 0, "anywhere in the image"


@pytest.mark.parametrize("size", [(1000, 10), (10, 1000)])
def test_an_image_too_long_for_any_crop_gives_its_middle(size: tuple[int, int]) -> None:
    left, top, wide, high = transforms.random_box(*size)
    assert {wide, high} == {10, 13} and max(wide, high) / min(wide, high) <= 1.34
    assert abs(2 * left + wide - size[0]) <= 1 and abs(2 * top + high - size[1]) <= 1


def test_every_second_crop_is_mirrored() -> None:
    ramp = Image.fromarray(np.tile(np.arange(0, 256, 4, dtype=np.uint8), (64, 1)))
    crops = [transforms.RandomCrop(16)(ramp)[0].int() for _ in range(200)]
    mirrored = sum(bool(crop[0, 0] > crop[0, -1]) for crop in crops)
    assert 70 < mirrored < 130


# Networks of timm


class Plain(nn.Module):
    """What timm.create_model gives, as far as we use it."""

    num_features = 5

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(channels, 5, 1)

    def forward_features(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return {"map": y, "map-last": y.permute(0, 2, 3, 1), "tokens": y.flatten(2).mT}[self.kind]

    def forward_head(self, y: Tensor, pre_logits: bool) -> Tensor:
        assert pre_logits and y.ndim == 3
        return y.mean(1)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in: timm needs a torchvision that fits this torch."""
    names = ["map", "map-last", "tokens"]

    def create_model(name: str, *, pretrained: bool, num_classes: int, in_chans: int) -> nn.Module:
        assert num_classes == 0
        if pretrained:
            raise OSError("no network\nand more of it")
        return Plain(name, in_chans)

    module = types.ModuleType("timm")
    module.__dict__.update(
        is_model=lambda name: name in names, create_model=create_model,
        list_models=lambda pattern="*": [name for name in names if name.startswith(pattern.rstrip("*"))],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


@pytest.mark.parametrize("kind", ["map", "map-last", "tokens"])
def test_feature_maps_and_tokens_of_timm_are_pooled_alike(timm: types.ModuleType, kind: str) -> None:
    torch.manual_seed(0)
    want = models.build(Config(backbone="map", pretrained=False, dim=6), 3)
    model = models.build(Config(backbone=kind, pretrained=False, dim=6), 3)
    model.load_state_dict(want.state_dict())
    x = torch.rand(2, 3, 8, 8)
    assert model(x).shape == (2, 6) and torch.allclose(model(x), want(x), atol=1e-6)


def test_a_wrong_timm_model_and_weights_that_cannot_be_fetched_are_named(timm: types.ModuleType) -> None:
    with pytest.raises(ValueError, match="got 'map-', wanted 'small' or a timm model; near matches: 'map-last', 'map"):
        models.build(Config(backbone="map-"), 3)
    with pytest.raises(ValueError, match=r"no weights of 'map' at hand \(no network\); give a file with --weights"):
        models.build(Config(backbone="map"), 3)


def test_timm_itself_has_what_we_use() -> None:
    try:
        optional("timm", "this test")
    except ValueError as error:
        pytest.skip(str(error))
    for name, channels in (("resnet18", 3), ("vit_tiny_patch16_224", 1)):
        model = models.build(Config(backbone=name, pretrained=False, dim=6, pool="avg+max"), channels).eval()
        assert model(torch.rand(2, channels, 224, 224)).shape == (2, 6)
    with pytest.raises(ValueError, match=r"wanted 'small' or a timm model; near matches: 'resnet1\d"):
        models.build(Config(backbone="resnet1"), 3)


# Imports that fail


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a package whose import raises."""

    def make(name: str, raises: str) -> None:
        (tmp_path / f"{name}.py").write_text(f"raise {raises}\n")
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.syspath_prepend(tmp_path)

    return make


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (
            "RuntimeError('operator torchvision::nms does not exist')",
            "RuntimeError: operator torchvision::nms does not",
        ),
        ("ImportError('libcudart.so.13: cannot open')", r"ImportError: libcudart\.so\.13: cannot open"),
        ("ModuleNotFoundError('No module named torchvision', name='torchvision')", "ModuleNotFoundError: No module"),
        ("AttributeError('half built\\nand more')", r"AttributeError: half built\)"),
    ],
)
def test_an_import_that_fails_says_how_and_what_to_use_instead(broken: Any, raises: str, reason: str) -> None:
    broken("timm", raises)
    want = rf"backbone: got 'resnet50', which needs timm, whose import fails here \({reason}.*take --backbone small"
    with pytest.raises(ValueError, match=want):
        models.build(Config(backbone="resnet50"), 3)


def test_so_does_the_command_line(broken: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken("timm", "RuntimeError('built for another torch')")
    data = folders(tmp_path / "data", classes=4)
    words = ["--data", str(data), "--out", str(tmp_path / "run"), "--batch-size", "8", "--image-size", "16"]
    assert main(["train", *words, "--backbone", "resnet50"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("pydml train: backbone: got 'resnet50'") and errors.count("\n") == 1
    assert "RuntimeError: built for another torch" in errors


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("timm", "safetensors", "yaml"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match="'resnet50', which needs timm: pip install timm; or take --backbone small"):
        models.build(Config(backbone="resnet50"), 3)
    for name, message in (
        ("w.safetensors", "pip install safetensors; or save it with"),
        ("c.yaml", "pip install pyyaml;"),
    ):
        (tmp_path / name).write_text("")
        with pytest.raises(ValueError, match=rf"got '.*{name}', which needs \w+: {message}"):
            Config.from_file(tmp_path / name) if name == "c.yaml" else models.build(
                Config(weights=str(tmp_path / name)), 3
            )
