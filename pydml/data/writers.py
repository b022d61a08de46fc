"""Writing splits to a folder: whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydml import checks
from pydml.data import packed
from pydml.data.base import Splits

ABOUT = "about.json"  # beside a set in SOP's format: what it was made from


def write_sop(splits: Splits, folder: Path) -> None:
    """Write splits into an existing folder in the format of Stanford Online Products, images as PNG.

    Classes are numbered through, train first; a super category has a folder of its own.
    """
    image_id = class_id = 0
    if splits.gallery is not None or splits.train.super_labels is None:
        raise ValueError(
            "splits: got a gallery or no super labels, which SOP's format cannot say; wanted format='packed'"
        )
    for name in splits.train.super_classes:  # a folder each, and a word of the lists
        if name in ("", ".", "..") or name != name.strip() or any(c in "/\\" or not c.isprintable() for c in name):
            raise ValueError(f"super_classes: got {name!r}, wanted a name that can be one folder's")
    for split, data in (("train", splits.train), ("test", splits.test)):
        if (
            data.super_labels is None
            or data.super_classes != splits.train.super_classes
            or (data.super_labels < 0).any()
        ):
            raise ValueError(
                f"splits: {split} has images without a super category, or other ones; wanted format='packed'"
            )
        lines = ["image_id class_id super_class_id path"]
        supers = data.super_labels.tolist()
        for i, label in enumerate(data.labels.tolist()):
            image_id += 1
            path = Path(data.super_classes[supers[i]]) / f"{class_id + label + 1:06d}_{image_id:06d}.png"
            (folder / path.parent).mkdir(exist_ok=True)
            data.load(i).save(folder / path)
            lines.append(f"{image_id} {class_id + label + 1} {supers[i] + 1} {path.as_posix()}")
        class_id += len(data.classes)
        (folder / f"Ebay_{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = json.dumps({"name": splits.train.name, "about": splits.about}, ensure_ascii=False, indent=1)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")


#: Format -> (writer, a file that shows that a folder was written by it).
WRITERS = {"packed": (packed.write_packed, packed.MARKER), "sop": (write_sop, ABOUT)}


def save(splits: Splits, folder: str | Path, format: str = "packed", *, overwrite: bool = False) -> None:
    """Write splits to a new folder.

    Parameters
    ----------
    splits
        Training and test images.
    folder
        Where to; it appears when all is written.
    format
        "packed": one array, all images of one size; read without decoding. "sop": image files and lists in the format
        of Stanford Online Products.
    overwrite
        Replace a folder that was written by this function.
    """
    write, _ = WRITERS[checks.choice("format", format, tuple(WRITERS))]
    with _new_folder(check_free(folder, overwrite)) as new:
        write(splits, new)


def check_free(folder: str | Path, overwrite: bool = False) -> Path:
    """The folder, if :func:`save` may write it."""
    folder = Path(folder).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        ours = any((folder / marker).is_file() for _, marker in WRITERS.values())
        if not (overwrite and ours):
            wanted = "a new one" if not ours else "a new one, or overwrite"
            raise FileExistsError(f"folder: got {folder}, which exists, wanted {wanted}")
    return folder


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of ``folder`` in the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{part}") for part in ("new", "old"))
    try:
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for rest in (new, old):
            shutil.rmtree(rest, ignore_errors=True)
