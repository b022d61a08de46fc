"""Datasets from strangers: nothing is read or written outside of their folder, nothing is started, nothing hangs."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from toy_images import packed

import pydml.data
from pydml.cli import main
from pydml.data import DataError, ImageSet, Splits
from pydml.data.files import Files, read_json

HEADER = "image_id class_id super_class_id path\n"


def sop(root: Path, first: str = "a/1.png") -> Path:
    """A set in SOP's format, the first training image of which has a path of the test's choice."""
    for name in ("a/1.png", "a/2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name)
    (root / "Ebay_train.txt").write_text(HEADER + f"1 1 1 a/2.png\n2 1 1 {first}\n")
    (root / "Ebay_test.txt").write_text(HEADER + "3 2 1 a/2.png\n")
    return root


# Lists


@pytest.mark.parametrize("path", ["../outside.png", "/etc/passwd", "a/../../outside.png", "..", "a/\0.png"])
def test_a_list_names_only_images_below_its_folder(tmp_path: Path, path: str) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "outside.png")
    with pytest.raises(DataError, match=r"set: path of an image: got .*, wanted one below this folder"):
        pydml.data.open(sop(tmp_path / "set", path))


def test_every_reader_of_lists_refuses_paths_that_lead_out(tmp_path: Path) -> None:
    cub = tmp_path / "cub"
    cub.mkdir()
    (cub / "classes.txt").write_text("1 a\n2 b\n")
    (cub / "image_class_labels.txt").write_text("1 1\n2 2\n")
    (cub / "images.txt").write_text("1 a/1.jpg\n2 ../../outside.jpg\n")
    vehicles = tmp_path / "vehicles"
    vehicles.mkdir()
    for name in ("train_list.txt", "test_list_800.txt"):
        (vehicles / name).write_text("../../outside 1\n")
    shop = tmp_path / "shop"
    shop.mkdir()
    rows = [f"img/../../../{status}.jpg item {status}\n" for status in ("train", "query", "gallery")]
    (shop / "list_eval_partition.txt").write_text("3\nimage_name item_id evaluation_status\n" + "".join(rows))
    for root in (cub, vehicles, shop):
        with pytest.raises(DataError, match=r"path of an image: got '.*\.\..*', wanted one below"):
            pydml.data.open(root)


def test_an_image_that_is_a_fifo_does_not_hang(tmp_path: Path) -> None:
    root = sop(tmp_path / "set", "a/pipe.png")
    os.mkfifo(root / "a" / "pipe.png")
    data = pydml.data.open(root).train
    with pytest.raises(DataError, match=r"pipe\.png: got a special file, wanted a regular file"):
        data.load(1)
    (root / "a" / "pipe.png").unlink()
    (root / "a" / "pipe.png").mkdir()
    with pytest.raises(DataError, match=r"pipe\.png: got a folder, wanted a regular file"):
        data.load(1)


def test_a_list_that_is_a_fifo_does_not_hang(tmp_path: Path) -> None:
    root = sop(tmp_path / "set")
    (root / "Ebay_test.txt").unlink()
    os.mkfifo(root / "Ebay_test.txt")
    with pytest.raises(DataError, match=r"Ebay_test\.txt: got a special file, wanted a regular file"):
        pydml.data.open(root)


def test_links_are_followed(tmp_path: Path) -> None:
    """Who keeps images on another disk links to them."""
    Image.new("RGB", (4, 4), "red").save(tmp_path / "elsewhere.png")
    root = sop(tmp_path / "set", "a/link.png")
    (root / "a" / "link.png").symlink_to(tmp_path / "elsewhere.png")
    assert pydml.data.open(root).train.load(1).getpixel((0, 0)) == (255, 0, 0)


# Images


def test_postscript_named_png_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, program = tmp_path / "started", tmp_path / "gs"
    program.write_text(f"#!/bin/sh\necho 10.0\necho $* >> {marker}\n")
    program.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(program))
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.eps")
    (tmp_path / "picture.eps").rename(tmp_path / "picture.png")
    with pytest.raises(DataError, match=r"picture\.png: cannot be read as an image, wanted one of JPEG, PNG"):
        Files(tmp_path, ["picture.png"])[0]
    assert not marker.exists()
    with Image.open(tmp_path / "picture.png") as image, pytest.raises(OSError):
        image.load()
    assert marker.exists(), "the trap is real"


def test_every_format_that_folders_are_searched_for_is_read(tmp_path: Path) -> None:
    for suffix in pydml.data.files.EXTENSIONS:
        Image.new("RGB" if suffix != ".pgm" else "L", (5, 4), "white").save(tmp_path / f"x{suffix}")
        assert Files(tmp_path, [f"x{suffix}"])[0].size == (5, 4)
    (tmp_path / "x.jpg").write_bytes((tmp_path / "x.png").read_bytes())
    assert Files(tmp_path, ["x.jpg"])[0].size == (5, 4), "whatever the name says"


# Writing


def set_of(super_classes: list[str], super_labels: list[int] | None = None) -> ImageSet:
    images = [Image.new("L", (4, 4)) for _ in range(2)]
    return ImageSet("set", images, [0, 1], ["a", "b"], super_labels or [0, 1], super_classes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "/tmp/x", "a/b", "a\nb", "a\0b", " a", "a\\b"])
def test_a_super_category_is_a_folder_of_the_set_or_refused(tmp_path: Path, name: str) -> None:
    splits = Splits(set_of(["fine", name]), set_of(["fine", name]))
    with pytest.raises(ValueError, match=r"super_classes: got .*, wanted a name that can be one folder's"):
        pydml.data.save(splits, tmp_path / "deep" / "set", "sop")
    assert [p.name for p in tmp_path.rglob("*")] == ["deep"], "nothing is left, inside or outside"


def test_names_with_blanks_and_of_other_scripts_are_kept(tmp_path: Path) -> None:
    names = ["Canadian Aboriginal", "日本語"]
    pydml.data.save(Splits(set_of(names), set_of(names)), tmp_path / "set", "sop")
    assert pydml.data.open(tmp_path / "set").train.super_classes == names


def test_an_image_of_no_super_category_is_not_written_as_one_of_the_last(tmp_path: Path) -> None:
    for test in (set_of(["a", "b"], [0, -1]), set_of(["b", "a"])):
        with pytest.raises(ValueError, match="test has images without a super category, or other ones"):
            pydml.data.save(Splits(set_of(["a", "b"]), test), tmp_path / "set", "sop")


# Packed sets


def archive(path: Path) -> None:
    array = np.load(path)
    with zipfile.ZipFile(path, "w") as file, file.open("array.npy", "w") as entry:
        np.lib.format.write_array(entry, array)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("labels.npy", archive, "cannot be read as an array"),
        ("images.npy", archive, "cannot be read as an array"),
        ("images.npy", lambda path: path.write_bytes(path.read_bytes()[:200]), r"cannot be read as an array"),
        ("labels.npy", lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': [[[[}\n"), "cannot be read"),
        ("labels.npy", lambda path: np.save(path, np.array([{}], dtype=object)), "cannot be read as an array"),
        ("splits.npy", fifo, "not a regular file"),
        ("packed.json", lambda path: path.write_text("[" * 100_000), "nested too deeply, wanted JSON"),
        ("packed.json", lambda path: path.write_text('{"a":' * 100_000), "nested too deeply, wanted JSON"),
        ("packed.json", lambda path: path.write_text("[]"), "got a JSON list, wanted an object"),
        ("packed.json", lambda path: path.write_bytes(b"\xff{}"), "byte 0 is not UTF-8"),
        ("packed.json", fifo, "got a special file, wanted a regular file"),
    ],
)
def test_a_damaged_packed_set_is_one_line_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, spoil: Callable[[Path], Any], message: str
) -> None:
    root = packed(tmp_path / "set", classes=4, each=2)
    spoil(root / name)
    with pytest.raises(DataError, match=rf"{name}: .*{message}"):
        pydml.data.open(root, "packed")
    assert main(["data", "info", str(root), "--format", "packed"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"pydml data info: {root / name}: ") and errors.count("\n") == 1


def test_json_is_read_as_an_object(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1]}')
    assert read_json(tmp_path / "x.json") == {"a": [1]}
    with pytest.raises(FileNotFoundError, match=r"y\.json: no such file"):
        read_json(tmp_path / "y.json")
