"""Images and lists as files: every error says which file, which line, and what was wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydml.data.base import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def pillow() -> Any:
    """``PIL.Image``, which nothing else in pydml needs."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("pydml.data needs Pillow to read images: pip install 'pydml-kernels[data]'") from error
    return Image


class Files:
    """Image files, decoded when they are asked for.

    Parameters
    ----------
    root
        Folder that the paths start from.
    paths
        One for each image.
    mode
        What every image is converted to, so that one grey photograph among coloured ones does not break a batch:
        "RGB" (None) or "L".
    """

    def __init__(self, root: Path, paths: Sequence[str], mode: str | None = None) -> None:
        self.root, self.paths, self.mode = root, list(paths), mode or "RGB"

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        path = self.root / self.paths[i]
        try:
            with pillow().open(path) as image:
                return image.convert(self.mode)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: no such image, though the dataset lists it") from None
        except ImportError:
            raise
        except Exception as error:  # broken files make Pillow raise almost anything, from SyntaxError to struct.error
            raise DataError(f"{path}: cannot be read as an image: {type(error).__name__}: {error}") from error


def rows(path: Path, columns: Mapping[str, type], skip: int = 0) -> Iterator[tuple[int, list[Any]]]:
    """Number and values of every line of a list, after the first ``skip`` lines.

    Columns are separated by white space; the last one is the rest of its line.
    """
    for number, line in lines(path)[skip:]:
        words = line.split(None, len(columns) - 1)
        if len(words) != len(columns):
            raise broken(path, number, f"got {line!r}", f"{len(columns)} columns: {' '.join(columns)}")
        values = []
        for (name, kind), word in zip(columns.items(), words, strict=True):
            try:
                values.append(kind(word))
            except ValueError:
                raise broken(path, number, f"{name}: got {word!r}", "a whole number") from None
        yield number, values


def lines(path: Path) -> list[tuple[int, str]]:
    """Numbers and texts of the lines of a file that are not blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8, wanted a text file") from error
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def broken(path: Path, line: int, got: str, wanted: str) -> DataError:
    """The error for a line of a list."""
    return DataError(f"{path}, line {line}: {got}, wanted {wanted}")
