"""Images and lists as files: every error says which file, which line, and what was wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydml.data.base import DataError

#: What Pillow may take a file for, whatever its name: it would hand EPS to Ghostscript, a program.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "GIF", "TIFF", "WEBP")
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
        if not path.is_file():
            raise _no_image(path)
        Image = pillow()
        try:
            with Image.open(path, formats=FORMATS) as image:
                return image.convert(self.mode)
        except FileNotFoundError:
            raise _no_image(path) from None
        except Image.UnidentifiedImageError:
            raise DataError(f"{path}: cannot be read as an image, wanted one of {', '.join(FORMATS)}") from None
        except Exception as error:  # broken files make Pillow raise almost anything, from SyntaxError to struct.error
            raise DataError(f"{path}: cannot be read as an image: {type(error).__name__}: {error}") from error


def _no_image(path: Path) -> Exception:
    """The error for a path without a regular file: to open a FIFO would be to wait for ever."""
    if path.exists():
        return DataError(f"{path}: got {'a folder' if path.is_dir() else 'a special file'}, wanted a regular file")
    return FileNotFoundError(f"{path}: no such image, though the dataset lists it")


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
    return [(number, line.strip()) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]


def read_text(path: Path) -> str:
    """The text of a regular file; a FIFO would wait for a writer for ever."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: got {'a folder' if path.is_dir() else 'a special file'}, wanted a regular file")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8, wanted a text file") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        content = json.loads(read_text(path))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path}: {error}, wanted JSON") from None
    except RecursionError:
        raise DataError(f"{path}: nested too deeply, wanted JSON") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: got a JSON {type(content).__name__}, wanted an object")
    return content


def broken(path: Path, line: int, got: str, wanted: str) -> DataError:
    """The error for a line of a list."""
    return DataError(f"{path}, line {line}: {got}, wanted {wanted}")
