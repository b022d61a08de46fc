"""Packed sets: all images of one size in one memory-mapped array. Nothing is decoded, and processes share the pages.

A folder holds ``images.npy`` (uint8 [N, H, W] grey or [N, H, W, 3]), ``labels.npy``, ``super_labels.npy`` and
``splits.npy`` (int64 [N]), and ``packed.json`` with the names. The same set gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pydml.data.base import DataError, ImageSet, Splits
from pydml.data.files import pillow, read_json

MARKER = "packed.json"
VERSION = 1
PARTS = ("train", "test", "gallery")  # what the numbers in splits.npy mean


class Array:
    """Images of one size in an array [N, H, W] or [N, H, W, 3], in memory or mapped from a file."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, i: int) -> Any:
        return pillow().fromarray(np.array(self.array[i]))

    def pixels(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """Images at indices, uint8 [n, C, H, W]."""
        chosen = torch.from_numpy(np.ascontiguousarray(self.array[indices]))
        return chosen[:, None] if chosen.ndim == 3 else chosen.permute(0, 3, 1, 2).contiguous()

    def __getstate__(self) -> dict[str, Any]:
        """A mapped array goes to another process by the name of its file, not by its content."""
        if isinstance(self.array, np.memmap) and self.array.filename is not None:
            return {"mapped": str(self.array.filename)}
        return {"array": self.array}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.array = state["array"] if "array" in state else np.load(state["mapped"], mmap_mode="r")


def write_packed(splits: Splits, folder: Path) -> None:
    """Write splits into an existing folder; all images must be of one size and mode."""
    sets = [(name, data) for name in PARTS if (data := getattr(splits, name)) is not None]
    pixels = torch.cat([data.pixels() for _, data in sets])  # [N, C, H, W]
    array = pixels[:, 0] if pixels.shape[1] == 1 else pixels.permute(0, 2, 3, 1)
    first = splits.train
    columns = {
        "images": np.ascontiguousarray(array.numpy()),
        "labels": torch.cat([data.labels for _, data in sets]).numpy(),
        "splits": np.repeat([PARTS.index(name) for name, _ in sets], [len(data) for _, data in sets]),
    }
    if first.super_labels is not None:
        columns["super_labels"] = torch.cat([_super_labels(data) for _, data in sets]).numpy()
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    index = {
        "format": "pydml packed images",
        "version": VERSION,
        "name": first.name,
        "super_classes": first.super_classes,
        "classes": {name: data.classes for name, data in sets},
        "about": splits.about,
    }
    (folder / MARKER).write_text(json.dumps(index, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def read_packed(root: Path, mode: str | None = None) -> Splits:
    """Open what :func:`write_packed` wrote; images stay on the disk until they are asked for."""
    path = root / MARKER
    index = read_json(path)
    if index.get("version") != VERSION:
        raise DataError(f"{path}: version: got {index.get('version')!r}, wanted {VERSION}")
    for key, kind in {"name": str, "super_classes": list, "classes": dict}.items():
        if not isinstance(index.get(key), kind):
            raise DataError(f"{path}: {key}: got {type(index.get(key)).__name__}, wanted {kind.__name__}")
    images = _load(root / "images.npy", np.uint8, (3, 4), None)
    stored = "L" if images.ndim == 3 else "RGB"
    if mode not in (None, stored):
        raise ValueError(f"mode: got {mode!r}, wanted {stored!r}, what {root} holds; convert in the transform")
    part = _load(root / "splits.npy", np.int64, (1,), len(images))
    labels = _load(root / "labels.npy", np.int64, (1,), len(images))
    super_labels = _load(root / "super_labels.npy", np.int64, (1,), len(images)) if index["super_classes"] else None
    sets: dict[str, ImageSet] = {}
    for name, classes in index["classes"].items():
        rows = np.flatnonzero(part == PARTS.index(name)) if name in PARTS else np.empty(0, np.int64)
        if not len(rows):
            raise DataError(f"{root / 'splits.npy'}: got no image of the split {name!r}, which {MARKER} names")
        try:
            sets[name] = ImageSet(
                index["name"],
                Array(images),
                labels[rows],
                classes,
                None if super_labels is None else super_labels[rows],
                index["super_classes"],
                items=rows,
            )
        except (TypeError, ValueError) as error:
            raise DataError(f"{root}: split {name!r}: {error}") from error
    if not {"train", "test"} <= sets.keys():
        raise DataError(f"{path}: classes: got the splits {', '.join(sets)}, wanted train and test")
    return Splits(**sets, about=index.get("about", {}))


def _load(path: Path, kind: type, dimensions: tuple[int, ...], length: int | None) -> npt.NDArray[Any]:
    if not path.is_file():
        raise DataError(f"{path}: not a regular file") if path.exists() else FileNotFoundError(f"{path}: no such file")
    try:
        array: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r")  # an .npy alone: no archive, no pickle
    except Exception as error:  # what a broken header makes of itself: ValueError, SyntaxError, struct.error, …
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: cannot be read as an array: {reason}") from error
    wanted = f"{np.dtype(kind)} with {' or '.join(map(str, dimensions))} dimensions"
    if array.dtype != kind or array.ndim not in dimensions:
        raise DataError(f"{path}: got {array.dtype} of shape {list(array.shape)}, wanted {wanted}")
    if array.ndim == 4 and array.shape[3] != 3:
        raise DataError(f"{path}: got shape {list(array.shape)}, wanted 3 colours")
    if length is not None and len(array) != length:
        raise DataError(f"{path}: got {len(array)} entries, wanted {length}, one for each image")
    return array


def _super_labels(data: ImageSet) -> Tensor:
    if data.super_labels is None:
        raise ValueError("splits: got super labels in train but not in all splits, wanted them in all or none")
    return data.super_labels
