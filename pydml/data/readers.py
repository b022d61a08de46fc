"""Readers of the retrieval benchmarks, in the formats in which their authors publish them, with the papers' splits.

Each takes the folder of a dataset and the mode of its images, and returns :class:`Splits`. Images are opened only when
they are asked for; of each list only the first one is looked for, so that a wrong folder shows at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pydml.data.base import DataError, ImageSet, Splits
from pydml.data.files import EXTENSIONS, Files, broken, lines, rows

Key = TypeVar("Key", int, str)

#: VehicleID's three test lists, by the number of their vehicles.
VEHICLEID_LISTS = {"small": 800, "medium": 1600, "large": 2400}


def read_sop(root: Path, mode: str | None) -> Splits:
    """Stanford Online Products, Song et al. 2016: ``Ebay_train.txt`` and ``Ebay_test.txt``."""
    columns = {"image_id": int, "class_id": int, "super_class_id": int, "path": str}
    tables: dict[str, list[list[Any]]] = {}
    names: dict[int, str] = {}  # of super categories, from the folders of their images: bicycle_final
    of_class: dict[int, tuple[str, int]] = {}  # the split and super category in which a class came first
    for split in ("train", "test"):
        path = root / f"Ebay_{split}.txt"
        _expect_header(path, " ".join(columns))
        tables[split] = []
        for number, (_, class_id, super_id, image) in rows(path, columns, skip=1):
            first = of_class.setdefault(class_id, (split, super_id))
            if first != (split, super_id):
                was = f"class {class_id} of super class {super_id} in the {split} list"
                raise broken(path, number, f"got {was}", f"it in the {first[0]} list only, of super class {first[1]}")
            names.setdefault(super_id, image.split("/")[0].removesuffix("_final"))
            tables[split].append([image, class_id, super_id])
    supers = sorted(names)
    parts = []
    for split, table in tables.items():
        images, keys, super_keys = _columns(table, root / f"Ebay_{split}.txt")
        categories = np.searchsorted(supers, super_keys)
        parts.append(_image_set("sop", root, mode, images, keys, categories, [names[s] for s in supers]))
    return Splits(*parts)


def read_cub(root: Path, mode: str | None) -> Splits:
    """CUB-200-2011, Wah et al. 2011: the first 100 of its 200 classes train, the others test."""
    classes = dict(values for _, values in rows(root / "classes.txt", {"class_id": int, "name": str}))
    list_of_labels = root / "image_class_labels.txt"
    labels: dict[int, int] = {}
    for number, (image_id, class_id) in rows(list_of_labels, {"image_id": int, "class_id": int}):
        if class_id not in classes:
            raise broken(list_of_labels, number, f"class_id: got {class_id}", "one that classes.txt lists")
        labels[image_id] = class_id
    table = []
    for number, (image_id, image) in rows(root / "images.txt", {"image_id": int, "path": str}):
        if image_id not in labels:
            raise broken(
                root / "images.txt", number, f"image_id: got {image_id}", f"one that {list_of_labels.name} lists"
            )
        table.append([f"images/{image}", labels[image_id]])
    images, keys = _columns(table, root / "images.txt")
    return first_half_trains(_image_set("cub", root, mode, images, keys, names=classes))


def read_cars(root: Path, mode: str | None) -> Splits:
    """Cars-196, Krause et al. 2013: the first 98 of its 196 classes train, the others test.

    From ``cars_annos.mat`` beside ``car_ims/``, or from the devkit (``cars_train_annos.mat``,
    ``cars_test_annos_withlabels.mat``, ``cars_meta.mat``) beside ``cars_train/`` and ``cars_test/``. The authors' own
    split into training and test images is for classification; here, as in the papers on retrieval, it plays no part.
    """
    single = root / "cars_annos.mat"
    if single.exists():
        content = _load_mat(single)
        table = _cars_annotations(single, content, "relative_im_path", "")
        meta = single
    else:
        meta = _first_of(root, "devkit/cars_meta.mat", "cars_meta.mat")
        content = _load_mat(meta)
        train = _first_of(root, "devkit/cars_train_annos.mat", "cars_train_annos.mat")
        test = _first_of(root, "devkit/cars_test_annos_withlabels.mat", "cars_test_annos_withlabels.mat")
        table = _cars_annotations(train, _load_mat(train), "fname", "cars_train/")
        table += _cars_annotations(test, _load_mat(test), "fname", "cars_test/")
    if "class_names" not in content:
        raise DataError(f"{meta}: got {_variables(content)}, wanted a variable class_names")
    names = dict(enumerate(map(str, np.atleast_1d(content["class_names"])), 1))
    for image, class_id in table:
        if class_id not in names:
            raise DataError(f"{meta}: class of {image}: got {class_id}, wanted 1 … {len(names)}, one of class_names")
    images, keys = _columns(table, meta)
    return first_half_trains(_image_set("cars", root, mode, images, keys, names=names))


def read_inshop(root: Path, mode: str | None) -> Splits:
    """In-Shop Clothes Retrieval, Liu et al. 2016: queries and a gallery; 23 categories, the folders of the images.

    An item is in the category of its first image.
    """
    path = _first_of(root, "list_eval_partition.txt", "Eval/list_eval_partition.txt", "Anno/list_eval_partition.txt")
    top = lines(path)[:2]
    if not top or not top[0][1].isdigit():
        raise broken(path, 1, f"got {top[0][1] if top else ''!r}", "the number of images")
    columns = {"image_name": str, "item_id": str, "evaluation_status": str}
    if len(top) < 2 or top[1][1].split() != list(columns):
        raise broken(path, 2, f"got {top[1][1] if len(top) > 1 else ''!r}", f"the header {' '.join(columns)}")
    tables: dict[str, list[list[Any]]] = {"train": [], "query": [], "gallery": []}
    category: dict[str, str] = {}  # of each item
    for number, (image, item, status) in rows(path, columns, skip=2):
        if status not in tables:
            raise broken(path, number, f"evaluation_status: got {status!r}", "train, query or gallery")
        folders = image.split("/")
        if len(folders) < 4:
            raise broken(path, number, f"image_name: got {image!r}", "img/GENDER/Category/item/image.jpg")
        tables[status].append([image, item, category.setdefault(item, "/".join(folders[1:3]))])
    listed = sum(map(len, tables.values()))
    if listed != int(top[0][1]):
        raise broken(path, 1, f"got {top[0][1]} images", f"{listed}, as many as are listed below")
    folder = root if (root / "img").exists() else root / "Img"
    supers = sorted(set(category.values()))
    tested = sorted({item for split in ("query", "gallery") for _, item, _ in tables[split]})
    parts = []
    for split, table in tables.items():
        images, keys, super_keys = _columns(table, path, f"a line with the status {split}")
        classes = None if split == "train" else tested
        categories = np.searchsorted(supers, super_keys)
        parts.append(_image_set("inshop", folder, mode, images, keys, categories, supers, classes=classes))
    return Splits(*parts)


def read_vehicleid(root: Path, mode: str | None, size: str = "small") -> Splits:
    """PKU VehicleID, Liu et al. 2016: one of its three test lists, every image a query against all the others.

    Super categories are the vehicles' models (``attribute/model_attr.txt``, if it is there), -1 where none is known.
    The authors test against a gallery of one random image of each vehicle: :func:`draw_gallery`.
    """
    columns = {"image": str, "vehicle_id": int}
    attributes = root / "attribute" / "model_attr.txt"
    model: dict[int, int] | None = None
    if attributes.exists():
        model = dict(values for _, values in rows(attributes, {"vehicle_id": int, "model_id": int}))
    supers = sorted(set(model.values())) if model else []
    number_of = {m: i for i, m in enumerate(supers)}
    parts = []
    for name in ("train_list.txt", f"test_list_{VEHICLEID_LISTS[size]}.txt"):
        path = _first_of(root, f"train_test_split/{name}", name)
        images, keys = _columns([values for _, values in rows(path, columns)], path)
        images = [f"image/{image.removesuffix('.jpg')}.jpg" for image in images]
        categories = None if model is None else [number_of.get(model.get(key, -1), -1) for key in keys]
        parts.append(_image_set("vehicleid", root, mode, images, keys, categories, [f"model {m}" for m in supers]))
    return Splits(*parts)


def read_folder(root: Path, mode: str | None) -> Splits:
    """One folder for each class, as torchvision's ImageFolder has it.

    With ``train/`` and ``test/`` (or ``val/``) those are the splits; with ``train/``, ``query/`` and ``gallery/`` too.
    Otherwise the first half of the classes, by name, trains.
    """
    if not (root / "train").is_dir() or not _subfolders(root / "train"):  # train without folders is a class itself
        return first_half_trains(_folder(root, mode))
    train = _folder(root / "train", mode)
    if (root / "query").is_dir() and (root / "gallery").is_dir():
        names = sorted({*_subfolders(root / "query"), *_subfolders(root / "gallery")})
        return Splits(train, _folder(root / "query", mode, names), _folder(root / "gallery", mode, names))
    for test in ("test", "val"):
        if (root / test).is_dir():
            return Splits(train, _folder(root / test, mode))
    raise DataError(f"{root}: got train/ alone, wanted test/ or val/ beside it, or query/ and gallery/")


def first_half_trains(data: ImageSet) -> Splits:
    """The first half of the classes trains, the others test: the split of the papers for CUB and Cars."""
    if len(data.classes) < 2:
        raise DataError(
            f"{data.name}: got {len(data.classes)} classes, wanted at least 2, one to train and one to test"
        )
    train = data.labels < len(data.classes) // 2
    return Splits(data.subset(train), data.subset(~train))


def _folder(root: Path, mode: str | None, classes: Sequence[str] | None = None) -> ImageSet:
    images: list[str] = []
    keys: list[str] = []
    for name in _subfolders(root):
        files = sorted(p for p in (root / name).rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
        if not files:
            raise DataError(f"{root / name}: got no images, wanted at least one ({', '.join(EXTENSIONS)})")
        images += [file.relative_to(root).as_posix() for file in files]
        keys += [name] * len(files)
    if not images:
        raise DataError(f"{root}: got no folders, wanted one for each class")
    return _image_set("folder", root, mode, images, keys, classes=classes)


def _subfolders(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _image_set(
    name: str,
    root: Path,
    mode: str | None,
    images: Sequence[str],
    keys: Sequence[Key],
    super_labels: Any = None,
    super_classes: Sequence[str] = (),
    *,
    names: dict[Key, str] | None = None,
    classes: Sequence[Key] | None = None,
) -> ImageSet:
    """A set of files from the class key of each: classes are numbered in the order of ``classes``, or of their keys."""
    for image in images:
        if image.startswith("/") or ".." in image.split("/") or "\0" in image:
            raise DataError(f"{root}: path of an image: got {image!r}, wanted one below this folder")
    if not (root / images[0]).exists():
        raise FileNotFoundError(f"{root / images[0]}: no such image, though the dataset lists it")
    order = sorted(set(keys)) if classes is None else list(classes)
    number_of = {key: i for i, key in enumerate(order)}
    labels = [number_of[key] for key in keys]
    titles = [str(key) if names is None else names[key] for key in order]
    return ImageSet(name, Files(root, images, mode), labels, titles, super_labels, super_classes)


def _columns(table: Iterable[Sequence[Any]], path: Path, wanted: str = "at least one image") -> list[list[Any]]:
    """A list of rows as a list of columns."""
    columns = [list(column) for column in zip(*table, strict=True)]
    if not columns:
        raise DataError(f"{path}: got an empty list, wanted {wanted}")
    return columns


def _expect_header(path: Path, header: str) -> None:
    top = lines(path)[:1]
    if not top or top[0][1].split() != header.split():
        raise broken(path, 1, f"got {top[0][1] if top else ''!r}", f"the header {header!r}")


def _first_of(root: Path, *names: str) -> Path:
    """The first of these files that exists."""
    for name in names:
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(f"{root / names[0]}: no such file" + "".join(f", nor {name}" for name in names[1:]))


def _load_mat(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"{path}: reading a .mat file needs scipy: pip install 'pydml-kernels[data]'") from error
    try:
        content: dict[str, Any] = loadmat(path, squeeze_me=True)
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a MATLAB file: {type(error).__name__}: {error}") from error
    return content


def _variables(content: dict[str, Any]) -> str:
    return ", ".join(name for name in content if not name.startswith("__")) or "no variables"


def _cars_annotations(path: Path, content: dict[str, Any], field: str, folder: str) -> list[list[Any]]:
    """Path and class of each annotation."""
    if "annotations" not in content:
        raise DataError(f"{path}: got {_variables(content)}, wanted a variable annotations")
    annotations = np.atleast_1d(content["annotations"])
    fields = annotations.dtype.names or ()
    if field not in fields or "class" not in fields:
        raise DataError(f"{path}: annotations: got fields {', '.join(fields) or 'none'}, wanted {field} and class")
    return [[f"{folder}{entry[field]}", int(entry["class"])] for entry in annotations]
