"""Fonts: where they are, which characters they have, and pictures of those characters."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Pictures = npt.NDArray[np.uint8]  # [n, size, size]
SUFFIXES = (".ttf", ".otf", ".ttc", ".otc")
#: matplotlib's other fonts are no use here: Computer Modern has TeX's symbols where Unicode has letters, and Last
#: Resort has a box for everything.
MATPLOTLIB_FAMILIES = ("DejaVu", "STIX")
#: A face that has this many characters for each glyph shows placeholders.
PLACEHOLDERS = 2
#: Unicode's general categories without a picture: controls, formats, surrogates, private, unassigned, separators.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp")


@dataclass(frozen=True)
class Face:
    """One typeface: a font file, or one of the faces of a collection."""

    path: Path
    index: int
    name: str
    characters: tuple[int, ...]  # code points with a glyph of their own, ascending


def need(package: str, module: str) -> Any:
    """An optional module; the error says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"glyphs need {package}: pip install 'pydml-kernels[data]'") from error


def matplotlib_fonts() -> list[Path]:
    """The fonts in matplotlib's wheel: the same for everybody who has that version."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise ImportError("fonts: none given, and matplotlib, whose fonts are the default, is not installed")
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    found = sorted(path for path in folder.glob("*.ttf") if path.name.startswith(MATPLOTLIB_FAMILIES))
    if not found:
        raise FileNotFoundError(
            f"{folder}: no DejaVu or STIX fonts, wanted those of matplotlib; name folders with fonts"
        )
    return found


def system_folders() -> list[Path]:
    """Where this system keeps its fonts: those of the usual folders that hold any."""
    home = Path.home()
    if sys.platform == "darwin":
        folders = [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
    elif sys.platform == "win32":
        folders = [Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts"]
    else:
        data = Path(os.environ.get("XDG_DATA_HOME", home / ".local/share"))
        folders = [Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), data / "fonts", home / ".fonts"]
    return [folder for folder in folders if _inside(folder)]


def find_fonts(sources: Iterable[str | Path]) -> list[Path]:
    """Font files among files and in folders, however deep; in the order of their names, wherever they lie."""
    found: set[Path] = set()
    for source in map(Path, sources):
        if source.is_dir():
            inside = _inside(source)
            if not inside:
                raise FileNotFoundError(f"fonts: got {source}, wanted a folder with fonts ({', '.join(SUFFIXES)})")
            found |= inside
        elif source.is_file():
            found.add(source)
        else:
            raise FileNotFoundError(f"fonts: got {source}, wanted an existing folder or font file")
    return sorted(found, key=lambda path: (path.name, path))


def _inside(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()}


def open_faces(paths: Sequence[Path]) -> tuple[list[Face], dict[str, str]]:
    """The faces in font files, and why a file is not used: one bad font among hundreds must not stop the others.

    A face without Unicode characters, or that shows only placeholders, is left out silently.
    """
    library = need("fonttools", "fontTools.ttLib")
    sized = need("pillow", "PIL.ImageFont").truetype
    faces: list[Face] = []
    refused: dict[str, str] = {}
    for path in paths:
        try:
            sized(str(path), 97)  # FreeType must be able to scale it: no bitmaps are of this size
            with path.open("rb") as file:
                several = file.read(4) == b"ttcf"
                file.seek(0)
                fonts = library.TTCollection(file, lazy=True).fonts if several else [library.TTFont(file, lazy=True)]
                faces += [face for i, font in enumerate(fonts) if (face := _open_face(path, i, font)) is not None]
        except Exception as error:  # a broken table may raise anything
            refused[path.name] = f"{type(error).__name__}: {error}"
    return faces, refused


def _open_face(path: Path, index: int, font: Any) -> Face | None:
    cmap: dict[int, str] = font.getBestCmap() or {}
    missing = font.getGlyphOrder()[0]  # .notdef, whatever it is called
    if len(cmap) >= PLACEHOLDERS * len(set(cmap.values())):
        return None
    characters = sorted(c for c, g in cmap.items() if g != missing and unicodedata.category(chr(c)) not in INVISIBLE)
    name = font["name"].getDebugName(4) or path.stem
    return Face(path, index, name, tuple(characters)) if characters else None


class Pen:
    """Draws characters of one face, white on black, in squares of ``size`` pixels.

    All are drawn at one scale and on one base line, so that ``c`` differs from ``C`` and ``'`` from ``,``. What would
    touch the border is moved, and what would not fit is drawn smaller, down to 4 pixels an em. Nothing is shaped: a
    picture depends on the face and the character alone.
    """

    def __init__(self, face: Face, size: int) -> None:
        self._image = need("pillow", "PIL.Image")
        self._draw = need("pillow", "PIL.ImageDraw")
        self._fonts = need("pillow", "PIL.ImageFont")
        self.face, self.size = face, size
        self.base = round(0.75 * size)
        self._sized: dict[int, Any] = {}

    def draw(self, character: int) -> Pictures | None:
        """The picture of a code point, uint8 [size, size]; None if it is empty, broken or too large."""
        em, room = round(0.8 * self.size), self.size - 2
        while em >= 4:
            ink, top = self._ink(character, em)
            if ink is None:
                return None
            longest = max(ink.size)
            if longest <= room:
                picture = self._image.new("L", (self.size, self.size))
                top = min(max(self.base + top, 1), self.size - 1 - ink.height)
                picture.paste(ink, ((self.size - ink.width) // 2, top))
                return np.array(picture)
            em = min(em - 1, em * room // longest)
        return None

    def missing(self) -> Pictures | None:
        """The picture of a character that the face does not have."""
        return self.draw(0x10FFFF)

    def _ink(self, character: int, em: int) -> tuple[Any, int]:
        """The smallest image that holds the character, and where its top is relative to the base line."""
        font = self._sized.get(em)
        if font is None:
            basic = self._fonts.Layout.BASIC
            font = self._fonts.truetype(str(self.face.path), em, self.face.index, layout_engine=basic)
            self._sized[em] = font
        side = 6 * self.size
        base = side // 2
        canvas = self._image.new("L", (side, side))
        try:
            self._draw.Draw(canvas).text((base, base), chr(character), fill=255, font=font, anchor="ls")
        except OSError:  # FreeType cannot draw this one glyph; others may be fine
            return None, 0
        box = canvas.getbbox()
        if box is None:
            return None, 0
        return canvas.crop(box), box[1] - base


def draw_face(face: Face, characters: Sequence[int], size: int) -> tuple[npt.NDArray[np.int64], Pictures]:
    """Code points and pictures of those characters that the face draws: not empty, not the picture of a missing one."""
    pen = Pen(face, size)
    missing = pen.missing()
    tofu = None if missing is None else missing.tobytes()
    drawn = [(c, picture) for c in characters if (picture := pen.draw(c)) is not None and picture.tobytes() != tofu]
    codes = np.array([c for c, _ in drawn], dtype=np.int64)
    return codes, np.stack([p for _, p in drawn]) if drawn else np.empty((0, size, size), np.uint8)


def digests(pictures: Pictures) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each picture."""
    hashes = [hashlib.blake2b(picture.tobytes(), digest_size=8).digest() for picture in pictures]
    return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)
