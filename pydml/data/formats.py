"""Which reader reads what: by name, or by the files that a folder holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydml import checks
from pydml.data import packed, readers
from pydml.data.base import DataError, Splits
from pydml.data.files import EXTENSIONS
from pydml.data.glyph_set import glyphs

MODES = ("RGB", "L")


@dataclass(frozen=True)
class Format:
    """A format on disk."""

    read: Callable[[Path, str | None], Splits]
    markers: tuple[str, ...]  # a folder that has one of these files is of this format
    unpacks_to: str = ""  # the folder that its archive makes, which may be given by its parent


_LISTS = ("train_test_split/train_list.txt", "train_list.txt")
_PARTITIONS = ("list_eval_partition.txt", "Eval/list_eval_partition.txt", "Anno/list_eval_partition.txt")

#: Name -> format. The first whose marker is found is the one; several test lists of VehicleID have a name each.
FORMATS: dict[str, Format] = {
    "packed": Format(packed.read_packed, (packed.MARKER,)),
    "sop": Format(readers.read_sop, ("Ebay_train.txt", "Ebay_test.txt"), "Stanford_Online_Products"),
    "cub": Format(readers.read_cub, ("image_class_labels.txt",), "CUB_200_2011"),
    "cars": Format(readers.read_cars, ("cars_annos.mat", "devkit/cars_meta.mat", "cars_meta.mat")),
    "inshop": Format(readers.read_inshop, _PARTITIONS),
    "vehicleid": Format(readers.read_vehicleid, _LISTS, "VehicleID_V1.0"),
    **{
        f"vehicleid-{size}": Format(partial(readers.read_vehicleid, size=size), (), "VehicleID_V1.0")
        for size in readers.VEHICLEID_LISTS
    },
    "folder": Format(readers.read_folder, ()),
}


def open(source: str | Path, format: str | None = None, mode: str | None = None) -> Splits:
    """Open a dataset.

    Parameters
    ----------
    source
        Its folder, or "glyphs": characters of the fonts that matplotlib brings, drawn now (see
        :func:`pydml.data.glyphs`).
    format
        One of ``FORMATS``; None finds out from the files in the folder.
    mode
        What files are decoded to: "RGB" (None) or "L". A packed set is what it is, and takes no other.

    Returns
    -------
    Splits
        With the split of the papers.
    """
    if format is not None:
        checks.choice("format", format, tuple(FORMATS))
    if mode is not None:
        checks.choice("mode", mode, MODES)
    root = Path(source).expanduser()
    if str(source) == "glyphs" and format is None and not root.exists():
        return glyphs()
    if not root.is_dir():
        raise FileNotFoundError(f"source: got {str(source)!r}, wanted an existing folder, or 'glyphs'")
    if format is None:
        format, root = _detect(root)
    elif FORMATS[format].unpacks_to and (root / FORMATS[format].unpacks_to).is_dir():
        root = root / FORMATS[format].unpacks_to
    return FORMATS[format].read(root, mode)


def _detect(root: Path) -> tuple[str, Path]:
    """The format of a folder, and the folder in it where the files are."""
    for name, format in FORMATS.items():
        for folder in (root, root / format.unpacks_to):
            if any((folder / marker).exists() for marker in format.markers):
                return name, folder
    if any(path.suffix.lower() in EXTENSIONS for path in root.glob("*/*")) or (root / "train").is_dir():
        return "folder", root
    markers = ", ".join(format.markers[0] for format in FORMATS.values() if format.markers)
    raise DataError(
        f"{root}: got a folder of no known format, wanted one of the files {markers}, or a folder per class"
    )
