"""Writing splits and reading them back: packed arrays, SOP's format, and what is said about broken ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import pydml.data
from pydml.data import DataError, ImageSet, Splits
from pydml.data.packed import Array


def toy(colours: int = 1, gallery: bool = False) -> Splits:
    random = np.random.default_rng(0)

    def part(name: str, count: int) -> ImageSet:
        shape = (count, 7, 5) if colours == 1 else (count, 7, 5, 3)
        labels = np.arange(count) // 2
        classes = [f"{name} {c} Ж" for c in range(count // 2)]
        pixels = Array(random.integers(0, 256, shape, dtype=np.uint8))
        return ImageSet("toy", pixels, labels, classes, labels % 2, ["even", "odd"])

    return Splits(part("train", 8), part("test", 6), part("test", 6) if gallery else None, about={"seed": 0})


@pytest.mark.parametrize("colours", [1, 3])
@pytest.mark.parametrize("gallery", [False, True])
def test_a_packed_set_comes_back_as_it_was(tmp_path: Path, colours: int, gallery: bool) -> None:
    splits = toy(colours, gallery)
    pydml.data.save(splits, tmp_path / "one")
    pydml.data.save(splits, tmp_path / "two")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["images.npy", "labels.npy", "packed.json", "splits.npy", "super_labels.npy"]
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)
    back = pydml.data.open(tmp_path / "one")
    assert back.about == {"seed": 0}
    for part in ("train", "test", "gallery"):
        a, b = getattr(splits, part), getattr(back, part)
        assert (a is None) == (b is None)
        if a is not None:
            assert b.pixels().equal(a.pixels()) and b.labels.equal(a.labels) and b.super_labels.equal(a.super_labels)
            assert (b.name, b.classes, b.super_classes) == (a.name, a.classes, a.super_classes)
            assert np.array_equal(np.asarray(b.load(3)), np.asarray(a.load(3)))
    assert isinstance(back.test.images.array, np.memmap)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"mode: got .*, wanted .*, what .* holds"):
        pydml.data.open(tmp_path / "one", mode="RGB" if colours == 1 else "L")


def test_what_is_written_as_sop_is_read_as_sop(tmp_path: Path) -> None:
    splits = toy()
    pydml.data.save(splits, tmp_path / "out", "sop")
    back = pydml.data.open(tmp_path / "out", mode="L")
    assert back.train.name == "sop" and back.train.super_classes == ["even", "odd"]
    assert back.test.classes == ["5", "6", "7"]
    for a, b in ((splits.train, back.train), (splits.test, back.test)):
        assert b.pixels().equal(a.pixels()) and b.labels.equal(a.labels)
        assert a.super_labels is not None and b.super_labels is not None and b.super_labels.equal(a.super_labels)
    with pytest.raises(ValueError, match="splits: got a gallery or no super labels"):
        pydml.data.save(toy(gallery=True), tmp_path / "other", "sop")
    assert not list(tmp_path.glob("*other*"))  # nothing half-written is left


def test_only_what_was_written_here_is_overwritten(tmp_path: Path) -> None:
    pydml.data.save(toy(), tmp_path / "out", "sop")
    with pytest.raises(FileExistsError, match=r"folder: got .*/out, which exists, wanted a new one, or overwrite"):
        pydml.data.save(toy(), tmp_path / "out")
    pydml.data.save(toy(), tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "Ebay_train.txt").exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"folder: got .*/thesis, which exists, wanted a new one$"):
        pydml.data.save(toy(), tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "thesis.tex").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "thesis"]


def spoil(root: Path, name: str, content: Any) -> None:
    if isinstance(content, np.ndarray):
        np.save(root / name, content)
    elif content is None:
        (root / name).unlink()
    else:
        (root / name).write_text(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("packed.json", "{", r"packed.json: .*, wanted JSON"),
        ("packed.json", "[]", r"packed.json: got a JSON list, wanted an object"),
        ("packed.json", '{"version": 2}', r"packed.json: version: got 2, wanted 1"),
        ("packed.json", '{"version": 1}', r"packed.json: name: got NoneType, wanted str"),
        ("labels.npy", "x", r"labels.npy: cannot be read as an array"),
        ("labels.npy", np.zeros(3, np.int64), r"labels.npy: got 3 entries, wanted 14, one for each image"),
        ("labels.npy", np.full(14, 9), r"split 'train': labels: got 9 … 9, wanted 0 … 3"),
        (
            "images.npy",
            np.zeros((14, 4, 4)),
            r"images.npy: got float64 of shape \[14, 4, 4\], wanted uint8 with 3 or 4",
        ),
        ("images.npy", np.zeros((14, 4, 4, 2), np.uint8), r"images.npy: got shape \[14, 4, 4, 2\], wanted 3 colours"),
        ("splits.npy", np.zeros(14, np.int64), r"splits.npy: got no image of the split 'test'"),
        ("splits.npy", None, r"splits.npy: no such file"),
        ("images.npy", np.array([print], dtype=object), r"images.npy: cannot be read as an array: .*Python objects"),
    ],
)
def test_a_broken_packed_set_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    pydml.data.save(toy(), tmp_path / "out")
    spoil(tmp_path / "out", name, content)
    with pytest.raises((DataError, FileNotFoundError), match=message):
        pydml.data.open(tmp_path / "out")


def test_a_mapped_set_goes_to_worker_processes_by_the_name_of_its_file(tmp_path: Path) -> None:
    pydml.data.save(toy(), tmp_path / "out")
    train = pydml.data.open(tmp_path / "out").train
    sent = pickle.dumps(train.images)
    assert len(sent) < 1000 and b"images.npy" in sent
    assert pickle.loads(pickle.dumps(train)).pixels().equal(toy().train.pixels())
    assert pickle.loads(pickle.dumps(toy().train)).pixels().equal(toy().train.pixels())
    loader = DataLoader(train.with_transform(np.asarray), batch_size=3, num_workers=1, multiprocessing_context="spawn")
    assert torch.cat([images for images, _ in loader])[:, None].equal(train.pixels())


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pydml.data.save(toy(), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(path: Path, *_: Any) -> None:
        if path.name == "splits.npy":
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        pydml.data.save(toy(3), tmp_path / "out", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
