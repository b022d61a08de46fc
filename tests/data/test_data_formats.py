"""Readers: small trees in the exact format of each dataset, and what is said about broken ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import pydml.data
from pydml.cli import main
from pydml.data import DataError, ImageSet
from pydml.samplers import CategorySampler


def picture(path: Path, colour: tuple[int, int, int] = (10, 20, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 5), colour).save(path, quality=100, subsampling=0)


def text(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def made_sop(root: Path) -> None:
    """Two super categories; classes 1-3 train, 4-6 test; class c has c images."""
    image_id = 0
    for split, classes in (("train", (1, 2, 3)), ("test", (4, 5, 6))):
        lines = ["image_id class_id super_class_id path"]
        for c in classes:
            kind, number = ("bicycle", 1) if c % 2 else ("cabinet", 2)
            for k in range(c):
                image_id += 1
                path = f"{kind}_final/11{c:04d}_{k}.JPG"
                picture(root / path, (40 * c, 0, 0))
                lines.append(f"{image_id} {c} {number} {path}")
        text(root / f"Ebay_{split}.txt", *lines)


def made_cub(root: Path) -> None:
    """Four classes of two images, whose numbers are not in the order of the classes."""
    names = [f"{c:03d}.Bird_{c}" for c in range(1, 5)]
    text(root / "classes.txt", *(f"{c} {name}" for c, name in enumerate(names, 1)))
    order = [(c, k) for k in range(2) for c in (4, 1, 3, 2)]
    images = {i: f"{names[c - 1]}/Bird_{c}_{k}.jpg" for i, (c, k) in enumerate(order, 1)}
    for path, (c, _) in zip(images.values(), order, strict=True):
        picture(root / "images" / path, (40 * c, 0, 0))
    text(root / "images.txt", *(f"{i} {path}" for i, path in images.items()))
    text(root / "image_class_labels.txt", *(f"{i} {c}" for i, (c, _) in enumerate(order, 1)))
    text(root / "train_test_split.txt", *(f"{i} {i % 2}" for i in images))  # for classification: not to be used
    text(root / "bounding_boxes.txt", *(f"{i} 60.0 27.0 325.0 304.0" for i in images))


CARS = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Acura TL Sedan 2012", "Audi S4 Sedan 2007"]


def cell(strings: list[str]) -> np.ndarray:
    """A MATLAB cell array [1, n] of strings."""
    array = np.empty((1, len(strings)), dtype=object)
    array[0] = strings
    return array


def annotations(names: list[str], rows: list[tuple[Any, ...]]) -> np.ndarray:
    """A MATLAB struct array [1, n], as in the devkit."""
    array = np.empty((1, len(rows)), dtype=[(name, object) for name in names])
    array[0] = rows
    return array


BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def made_cars(root: Path) -> None:
    """``cars_annos.mat``: eight images, classes 4, 3, 2, 1, 4, …"""
    rows = []
    for i in range(8):
        path = f"car_ims/{i + 1:06d}.jpg"
        picture(root / path, (40 * (4 - i % 4), 0, 0))
        rows.append((path, 1, 2, 3, 4, 4 - i % 4, i % 2))
    names = ["relative_im_path", *BOX, "class", "test"]
    savemat(root / "cars_annos.mat", {"annotations": annotations(names, rows), "class_names": cell(CARS)})


def made_cars_devkit(root: Path) -> None:
    """The same images as ``made_cars``, half in each folder of the devkit's form."""
    (root / "devkit").mkdir()
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": cell(CARS)})
    for folder, first, file in (
        ("cars_train", 0, "devkit/cars_train_annos.mat"),
        ("cars_test", 4, "cars_test_annos_withlabels.mat"),
    ):
        rows = []
        for i in range(4):
            picture(root / folder / f"{i + 1:05d}.jpg", (40 * (4 - i % 4), 0, 0))
            rows.append((1, 2, 3, 4, 4 - (first + i) % 4, f"{i + 1:05d}.jpg"))
        savemat(root / file, {"annotations": annotations([*BOX, "class", "fname"], rows)})


def made_inshop(root: Path, images: str = "") -> None:
    """Items 1, 2 train; items 3, 4, 5 are queries and gallery; item 5 is in the gallery only."""
    rows = []
    for item, category, status in (
        (1, "WOMEN/Dresses", ("train", "train")),
        (4, "MEN/Denim", ("gallery", "query", "gallery")),
        (2, "MEN/Denim", ("train", "train", "train")),
        (3, "WOMEN/Dresses", ("query", "query", "gallery")),
        (5, "WOMEN/Dresses", ("gallery",)),
    ):
        for k, which in enumerate(status):
            path = f"img/{category}/id_{item:08d}/0{k}_1_front.jpg"
            picture(root / images / path, (40 * item, 0, 0))
            rows.append(f"{path:<70} id_{item:08d} {which}")
    list_folder = root / "Eval" if images else root
    text(list_folder / "list_eval_partition.txt", str(len(rows)), "image_name item_id evaluation_status", *rows)


def made_vehicleid(root: Path) -> None:
    """Vehicles 7, 30, 200 train, 4 and 12 (and 13 in larger lists) test; models are known of 7, 200 and 12."""
    lists = {
        "train_list": (200, 7, 30),
        "test_list_800": (12, 4),
        "test_list_1600": (12, 4, 13),
        "test_list_2400": (4,),
    }
    for name, vehicles in lists.items():
        text(
            root / "train_test_split" / f"{name}.txt",
            *(f"{v * 10 + k:07d} {v}" for v in vehicles for k in range(3)),
        )
        for v in vehicles:
            for k in range(3):
                picture(root / "image" / f"{v * 10 + k:07d}.jpg", (v, 0, 0))
    text(root / "attribute" / "model_attr.txt", "7 104", "200 3", "12 104")


def made_folder(root: Path) -> None:
    for name in ("lion", "ape", "bear", "wolf"):
        for k in range(2):
            picture(root / name / f"{k}.png", (len(name), 0, 0))
    picture(root / "ape" / "more" / "9.PPM")
    text(root / "ape" / "notes.txt", "not an image")
    (root / ".cache").mkdir()


MAKERS: dict[str, Callable[[Path], None]] = {
    "sop": made_sop,
    "cub": made_cub,
    "cars": made_cars,
    "inshop": made_inshop,
    "vehicleid": made_vehicleid,
    "folder": made_folder,
}


def tree(tmp_path: Path, format: str) -> Path:
    MAKERS[format](tmp_path)
    return tmp_path


def red(data: ImageSet) -> list[int]:
    """The red of each image, which says its class in the trees above, rounded as JPEG is lossy."""
    return [round(data.load(i).getpixel((2, 2))[0] / 10) * 10 for i in range(len(data))]


def sizes(data: ImageSet) -> dict[str, int]:
    counts = data.labels.bincount(minlength=len(data.classes)).tolist()
    return dict(zip(data.classes, counts, strict=True))


@pytest.mark.parametrize("format", MAKERS)
def test_a_tree_is_recognised_and_reads_as_by_its_name(tmp_path: Path, format: str) -> None:
    root = tree(tmp_path, format)
    found, named = pydml.data.open(root), pydml.data.open(str(root), format)
    for part in ("train", "test", "gallery"):
        a, b = getattr(found, part), getattr(named, part)
        assert (a is None) == (b is None) == (part == "gallery" and format != "inshop")
        if a is not None:
            assert a.name == b.name == format
            assert sizes(a) == sizes(b)
            assert a.load(0).mode == "RGB" and a.load(0).size == (6, 5)
    assert not set(found.train.classes) & set(found.test.classes)
    assert pydml.data.open(root, mode="L").train.load(0).mode == "L"


def test_sop_has_the_lists_of_its_authors_and_super_categories_by_name(tmp_path: Path) -> None:
    splits = pydml.data.open(tree(tmp_path, "sop"))
    assert sizes(splits.train) == {"1": 1, "2": 2, "3": 3}
    assert sizes(splits.test) == {"4": 4, "5": 5, "6": 6}
    assert red(splits.test) == [160] * 4 + [200] * 5 + [240] * 6
    for data in (splits.train, splits.test):
        assert data.super_classes == ["bicycle", "cabinet"]
        assert data.super_labels is not None
        assert data.super_labels.tolist() == [1 - int(data.classes[c]) % 2 for c in data.labels]
    batches = CategorySampler(splits.test.labels, splits.test.super_labels, batch_size=8, seed=0)
    assert len(next(iter(batches))) == 8


def test_an_archive_may_be_given_by_the_folder_it_was_unpacked_in(tmp_path: Path) -> None:
    made_sop(tmp_path / "Stanford_Online_Products")
    assert len(pydml.data.open(tmp_path).train) == len(pydml.data.open(tmp_path, "sop").train) == 6


def test_cub_trains_on_the_first_half_of_the_classes_whatever_the_order_of_images(tmp_path: Path) -> None:
    splits = pydml.data.open(tree(tmp_path, "cub"))
    assert sizes(splits.train) == {"001.Bird_1": 2, "002.Bird_2": 2}
    assert sizes(splits.test) == {"003.Bird_3": 2, "004.Bird_4": 2}
    assert red(splits.test) == [[120, 160][label] for label in splits.test.labels]
    assert splits.train.super_labels is None


def test_cars_in_both_forms_give_the_same_classes(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    made_cars(tmp_path / "one")
    made_cars_devkit(tmp_path / "two")
    for root in (tmp_path / "one", tmp_path / "two"):
        splits = pydml.data.open(root)
        assert sizes(splits.train) == {CARS[0]: 2, CARS[1]: 2}
        assert sizes(splits.test) == {CARS[2]: 2, CARS[3]: 2}
        assert red(splits.train) == [[40, 80][label] for label in splits.train.labels]


def test_inshop_has_queries_and_a_gallery_with_the_same_classes(tmp_path: Path) -> None:
    splits = pydml.data.open(tree(tmp_path, "inshop"))
    assert splits.gallery is not None
    assert sizes(splits.train) == {"id_00000001": 2, "id_00000002": 3}
    assert sizes(splits.test) == {"id_00000003": 2, "id_00000004": 1, "id_00000005": 0}
    assert sizes(splits.gallery) == {"id_00000003": 1, "id_00000004": 2, "id_00000005": 1}
    assert red(splits.gallery) == [120 + 40 * label for label in splits.gallery.labels.tolist()]
    assert splits.train.super_classes == ["MEN/Denim", "WOMEN/Dresses"]
    assert splits.gallery.super_labels is not None and splits.gallery.super_labels.tolist() == [0, 0, 1, 1]


def test_inshop_as_it_is_unpacked_has_its_list_and_images_in_folders(tmp_path: Path) -> None:
    made_inshop(tmp_path, images="Img")
    assert len(pydml.data.open(tmp_path).train) == 5


def test_vehicleid_has_three_test_lists_and_models_where_they_are_known(tmp_path: Path) -> None:
    root = tree(tmp_path, "vehicleid")
    assert (
        sizes(pydml.data.open(root).test) == sizes(pydml.data.open(root, "vehicleid-small").test) == {"4": 3, "12": 3}
    )
    assert list(sizes(pydml.data.open(root, "vehicleid-medium").test)) == ["4", "12", "13"]
    assert list(sizes(pydml.data.open(root, "vehicleid-large").test)) == ["4"]
    train = pydml.data.open(root).train
    assert train.classes == ["7", "30", "200"]
    assert train.super_classes == ["model 3", "model 104"]
    assert train.super_labels is not None and train.super_labels.tolist() == [0] * 3 + [1] * 3 + [-1] * 3
    assert len(CategorySampler(train.labels, train.super_labels, batch_size=4, seed=0)) == 4  # 3 items each: round(6/4)
    (root / "attribute" / "model_attr.txt").unlink()
    assert pydml.data.open(root).train.super_labels is None


def test_folders_are_classes_and_the_first_half_by_name_trains(tmp_path: Path) -> None:
    splits = pydml.data.open(tree(tmp_path, "folder"))
    assert sizes(splits.train) == {"ape": 3, "bear": 2}  # files deeper down count
    assert sizes(splits.test) == {"lion": 2, "wolf": 2}


def test_folders_named_for_splits_are_the_splits(tmp_path: Path) -> None:
    for part, classes in (("train", "ab"), ("val", "cd")):
        for name in classes:
            picture(tmp_path / part / name / "0.png")
    assert list(sizes(pydml.data.open(tmp_path).test)) == ["c", "d"]
    for part, classes in (("query", "ef"), ("gallery", "fg")):
        for name in classes:
            picture(tmp_path / part / name / "0.png")
    splits = pydml.data.open(tmp_path)
    assert splits.gallery is not None
    assert sizes(splits.test) == {"e": 1, "f": 1, "g": 0}
    assert sizes(splits.gallery) == {"e": 0, "f": 1, "g": 1}


# What is broken, and where


def change(path: Path, line: int, to: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[line - 1] = to
    text(path, *lines)


BROKEN = [
    ("sop", "Ebay_train.txt", 1, "1 1 1 a.JPG", "the header 'image_id class_id super_class_id path'"),
    ("sop", "Ebay_test.txt", 3, "8 4 2", "4 columns: image_id class_id super_class_id path"),
    ("sop", "Ebay_test.txt", 3, "8 four 2 a.JPG", "class_id: got 'four', wanted a whole number"),
    ("sop", "Ebay_test.txt", 4, "9 1 1 bicycle_final/a.JPG", "wanted it in the train list only"),
    ("sop", "Ebay_train.txt", 4, "3 2 1 bicycle_final/a.JPG", "of super class 2"),
    ("cub", "classes.txt", 2, "two", "2 columns: class_id name"),
    ("cub", "image_class_labels.txt", 3, "3 9", "class_id: got 9, wanted one that classes.txt lists"),
    ("cub", "images.txt", 8, "88 a.jpg", "image_id: got 88, wanted one that image_class_labels.txt lists"),
    ("inshop", "list_eval_partition.txt", 1, "many", "the number of images"),
    ("inshop", "list_eval_partition.txt", 1, "13", "wanted 12, as many as are listed below"),
    ("inshop", "list_eval_partition.txt", 2, "image item status", "the header image_name item_id evaluation_status"),
    ("inshop", "list_eval_partition.txt", 5, "img/a/b/c/d.jpg id_1 test", "wanted train, query or gallery"),
    ("inshop", "list_eval_partition.txt", 5, "d.jpg id_1 train", "wanted img/GENDER/Category/item/image.jpg"),
    ("vehicleid", "train_test_split/test_list_800.txt", 2, "0000121", "2 columns: image vehicle_id"),
    ("vehicleid", "attribute/model_attr.txt", 2, "200 bus", "model_id: got 'bus', wanted a whole number"),
]


@pytest.mark.parametrize(("format", "file", "line", "content", "wanted"), BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, format: str, file: str, line: int, content: str, wanted: str) -> None:
    root = tree(tmp_path, format)
    change(root / file, line, content)
    with pytest.raises(DataError, match=re.escape(f"{root / file}, line {line}: ") + ".*" + re.escape(wanted)):
        pydml.data.open(root)


@pytest.mark.parametrize(
    ("format", "file"),
    [
        ("sop", "Ebay_test.txt"),
        ("sop", "bicycle_final/110001_0.JPG"),
        ("cub", "images.txt"),
        ("cub", "classes.txt"),
        ("cub", "images/004.Bird_4/Bird_4_0.jpg"),
        ("cars", "car_ims/000001.jpg"),
        ("inshop", "img/WOMEN/Dresses/id_00000001/00_1_front.jpg"),
        ("vehicleid", "train_test_split/test_list_800.txt"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, format: str, file: str) -> None:
    root = tree(tmp_path, format)
    (root / file).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(root / file)) + ": no such"):
        pydml.data.open(root, format)


def test_files_that_are_not_what_their_names_say_are_named(tmp_path: Path) -> None:
    root = tree(tmp_path, "sop")
    (root / "Ebay_test.txt").write_bytes(b"image_id class_id super_class_id path\n\xff\xfe")
    with pytest.raises(DataError, match=r"Ebay_test.txt: byte 38 is not UTF-8, wanted a text file"):
        pydml.data.open(root)
    text(root / "Ebay_test.txt", "image_id class_id super_class_id path")
    with pytest.raises(DataError, match=r"Ebay_test.txt: got an empty list, wanted at least one image"):
        pydml.data.open(root)


def test_broken_annotations_of_cars_are_named(tmp_path: Path) -> None:
    root = tree(tmp_path, "cars")
    path = root / "cars_annos.mat"
    savemat(path, {"annotations": annotations(["fname", "class"], [("a.jpg", 1)]), "class_names": cell(CARS)})
    with pytest.raises(
        DataError, match=r"cars_annos.mat: annotations: got fields fname, class, wanted relative_im_path"
    ):
        pydml.data.open(root)
    rows = [("a.jpg", 5), ("b.jpg", 1)]
    savemat(path, {"annotations": annotations(["relative_im_path", "class"], rows), "class_names": cell(CARS)})
    with pytest.raises(DataError, match=r"class of a.jpg: got 5, wanted 1 … 4"):
        pydml.data.open(root)
    savemat(path, {"class_names": cell(CARS)})
    with pytest.raises(DataError, match=r"cars_annos.mat: got class_names, wanted a variable annotations"):
        pydml.data.open(root)
    path.write_bytes(b"no matrix")
    with pytest.raises(DataError, match=r"cars_annos.mat: cannot be read as a MATLAB file"):
        pydml.data.open(root)
    path.unlink()
    made_cars_devkit(root)
    (root / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(FileNotFoundError, match=r"devkit/cars_test_annos_withlabels.mat: no such file, nor cars_test"):
        pydml.data.open(root)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"got a folder of no known format, wanted one of the files packed.json, Ebay_"):
        pydml.data.open(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"source: got '.*/nowhere', wanted an existing folder, or 'glyphs'"):
        pydml.data.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="format: got 'imagenet', wanted one of 'packed', 'sop'"):
        pydml.data.open(tmp_path, "imagenet")
    (tmp_path / "train" / "empty").mkdir(parents=True)
    with pytest.raises(DataError, match=r"train/empty: got no images, wanted at least one \(.jpg"):
        pydml.data.open(tmp_path, "folder")
    picture(tmp_path / "train" / "empty" / "a.png")
    with pytest.raises(DataError, match=r"got train/ alone, wanted test/ or val/ beside it, or query/ and gallery/"):
        pydml.data.open(tmp_path)
    with pytest.raises(DataError, match="folder: got 1 classes, wanted at least 2"):
        pydml.data.open(tmp_path / "train")


def test_an_image_that_cannot_be_decoded_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    root = tree(tmp_path, "sop")
    good = root / "bicycle_final" / "110003_0.JPG"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(good)
    whole = good.read_bytes()
    train = pydml.data.open(root).train
    for content in (b"", b"no image", whole[: len(whole) // 2], b"\x89PNG\r\n\x1a\n" + whole):
        good.write_bytes(content)
        with pytest.raises(DataError, match=re.escape(f"{good}: cannot be read as an image")):
            train[3]
    good.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{good}: no such image")):
        train.load(3)


def test_grey_palette_and_transparent_files_become_rgb(tmp_path: Path) -> None:
    for k, mode in enumerate(("L", "P", "RGBA", "LA", "1", "CMYK")):
        suffix = ".jpg" if mode == "CMYK" else ".png"
        (tmp_path / f"c{k}").mkdir()
        Image.new(mode, (3, 3)).save(tmp_path / f"c{k}" / f"0{suffix}")
    splits = pydml.data.open(tmp_path)
    assert {data.load(i).mode for data in (splits.train, splits.test) for i in range(3)} == {"RGB"}


# The command


def test_info_prints_what_there_is_and_check_names_broken_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path, "inshop")
    assert main(["data", "info", str(root)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"train +5 images, +2 classes of 2 to 3\n +2 super categories: ", out)
    assert re.search(r"test +3 images, +2 classes of 1 to 2\n", out)
    assert re.search(r"gallery +4 images, +3 classes of 1 to 2\n", out)
    assert main(["data", "info", str(root), "--check"]) == 0
    bad = root / "img/MEN/Denim/id_00000004/01_1_front.jpg"
    bad.write_bytes(b"")
    capsys.readouterr()
    assert main(["data", "info", str(root), "--check"]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: cannot be read as an image" in out and out.endswith("1 broken images\n")


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"pydml data info: {tmp_path}: got a folder of no known format")
