"""Glyphs: a retrieval set from fonts. Class = Unicode character, instance = typeface, super category = script.

Real images that anyone has: matplotlib's wheel brings the fonts. The same fonts give the same bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydml import checks
from pydml.data import fonts as _fonts
from pydml.data.base import DataError, ImageSet, Splits
from pydml.data.fonts import Face, Pictures
from pydml.data.packed import Array

Index = npt.NDArray[np.int64]
LOOK = np.dtype([("face", np.int64), ("code", np.int64), ("hash", np.uint64)])

#: Two characters that are the same, pixel by pixel, in at least this share of the faces that have both are one class.
#: Not in all of them: in some fonts the hinting of one outline depends on the script of its character.
ALIKE = 0.5


@dataclass(frozen=True)
class Shape:
    """Numbers of classes, images and super categories to choose from what the fonts offer."""

    train_classes: int
    test_classes: int
    train_images: int
    test_images: int
    scripts: int


#: The shape of Stanford Online Products.
SOP_SHAPE = Shape(train_classes=11318, test_classes=11316, train_images=59551, test_images=60502, scripts=12)


@dataclass
class _Drawn:
    """Pictures: code point, face and pixels of each, ordered by code point, then face."""

    code: Index
    face: Index
    picture: Pictures

    def keep(self, which: Any) -> int:
        """Keep these pictures; the number of the others."""
        before = len(self.code)
        self.code, self.face, self.picture = self.code[which], self.face[which], self.picture[which]
        return before - len(self.code)


def glyphs(
    fonts: Iterable[str | Path] | None = None,
    *,
    system: bool = False,
    size: int = 32,
    min_faces: int = 4,
    max_faces: int = 12,
    near: float = 0.1,
    max_classes: int | None = None,
    max_scripts: int | None = None,
    shape: Shape | None = None,
    seed: int = 0,
) -> Splits:
    """Draw the characters of fonts: grey images, half of the classes to train and half to test.

    Left out are empty and missing glyphs, pictures that a face shares with an earlier one (nearly), and characters that
    look like an earlier one. ``about`` of the result says how many, and which faces are used.

    Parameters
    ----------
    fonts
        Font files and folders. None: the DejaVu and STIX fonts in matplotlib's wheel, unless ``system``.
    system
        Take the fonts that are installed in this system, too.
    size
        Height and width of an image.
    min_faces, max_faces
        A character needs at least so many different pictures; of more than so many, some are drawn at random.
    near
        Two pictures of a character that differ in at most this share of their ink are one: faces borrow from each
        other. More makes the set harder and smaller: at 0.4 most upright and slanted faces of a family are one.
    max_classes
        At most so many classes, drawn at random.
    max_scripts
        Only the scripts with the most classes.
    shape
        Exactly these numbers, such as ``SOP_SHAPE``; an error if the fonts do not suffice.
    seed
        Of all that is drawn at random.
    """
    checks.integer("size", size, least=8)
    checks.integer("min_faces", min_faces, least=2)
    if checks.integer("max_faces", max_faces, least=2) < min_faces:
        raise ValueError(f"max_faces: got {max_faces}, wanted at least min_faces={min_faces}")
    if not 0 <= checks.number("near", near) < 1:
        raise ValueError(f"near: got {near!r}, wanted a number from 0 to below 1")
    for name, value in (("max_classes", max_classes), ("max_scripts", max_scripts)):
        if value is not None:
            checks.integer(name, value, least=2 if name == "max_classes" else 1)
    if shape is not None and (max_classes, max_scripts) != (None, None):
        raise ValueError("shape: got it beside max_classes or max_scripts, wanted one or the other")
    random = np.random.default_rng(checks.integer("seed", seed, least=0))

    faces, refused = _fonts.open_faces(_sources(fonts, system))
    drawn, looks = _draw(faces, min_faces, size, near)
    counts = {"drawn": len(looks), "like that of another face": len(looks) - len(drawn.code)}
    counts["of characters that look like another"] = drawn.keep(~np.isin(drawn.code, _look_alikes(looks)))
    characters, pictures = np.unique(drawn.code, return_counts=True)
    counts["of characters in too few faces"] = drawn.keep(np.isin(drawn.code, characters[pictures >= min_faces]))

    names = {code: _script(code) for code in np.unique(drawn.code).tolist()}
    _keep_scripts(drawn, names, shape.scripts if shape else max_scripts)
    noise = random.random(len(drawn.code))  # the order in which the pictures of a class are taken
    order = np.lexsort((noise, drawn.code))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.searchsorted(drawn.code, drawn.code)  # code points ascend
    within = rank < max_faces
    drawn.keep(within)
    rank = rank[within]
    train, test = _choose_classes(np.unique(drawn.code), max_classes, shape, random)
    scripts = sorted({names[code] for code in np.concatenate((train, test)).tolist()})
    parts: list[ImageSet] = []
    used: set[int] = set()  # faces
    for part, codes in (("train", train), ("test", test)):
        chosen = np.isin(drawn.code, codes)
        if shape is not None:
            chosen &= _exactly(getattr(shape, f"{part}_images"), chosen, rank < min_faces, random, part)
        parts.append(_image_set(drawn, chosen, names, scripts))
        used.update(drawn.face[chosen].tolist())
    about = {
        "faces": [faces[i].name for i in sorted(used)],
        "fonts that cannot be used": refused,
        "settings": {"size": size, "min_faces": min_faces, "max_faces": max_faces, "near": near, "seed": seed},
        "pictures left out": counts,
    }
    return Splits(*parts, about=about)


def _sources(fonts: Iterable[str | Path] | None, system: bool) -> list[Path]:
    sources = [*(fonts or ()), *(_fonts.system_folders() if system else ())]
    return _fonts.find_fonts(sources) if sources else _fonts.matplotlib_fonts()


def _draw(faces: Sequence[Face], min_faces: int, size: int, near: float) -> tuple[_Drawn, npt.NDArray[Any]]:
    """Pictures of every character that enough faces have, and the looks of all: face, code point and hash.

    A picture that is nearly that of an earlier face of its character is not kept: faces borrow from each other, and
    hundreds of them are more than need to be in memory.
    """
    having = Counter(code for face in faces for code in face.characters)
    kept: dict[int, list[tuple[int, int, Pictures]]] = defaultdict(list)  # face, ink and picture, by character
    looks = [np.empty(0, LOOK)]
    for number, face in enumerate(faces):
        codes, pictures = _fonts.draw_face(face, [c for c in face.characters if having[c] >= min_faces], size)
        look = np.empty(len(codes), LOOK)
        look["face"], look["code"], look["hash"] = number, codes, _fonts.digests(pictures)
        looks.append(look)
        inks = pictures.sum((1, 2), dtype=np.int64)
        for code, ink, picture in zip(codes.tolist(), inks.tolist(), pictures, strict=True):
            # Pictures cannot be near if their inks are not; few pairs are left to compare.
            others = [other for _, its_ink, other in kept[code] if abs(its_ink - ink) <= near * max(its_ink, ink)]
            if not _nearly_one_of(picture, others, near):
                kept[code].append((number, ink, picture.copy()))
    codes = np.array([code for code in sorted(kept) for _ in kept[code]], dtype=np.int64)
    numbers = np.array([number for code in sorted(kept) for number, _, _ in kept[code]], dtype=np.int64)
    pictures = np.array([picture for code in sorted(kept) for _, _, picture in kept[code]], dtype=np.uint8)
    return _Drawn(codes, numbers, pictures.reshape(-1, size, size)), np.concatenate(looks)


def _nearly_one_of(picture: Pictures, others: Sequence[Pictures], near: float) -> bool:
    """Whether the difference to one of the others is at most the share ``near`` of what both cover."""
    if not others:
        return False
    stacked = np.stack(others).astype(np.int16)
    difference = np.abs(stacked - picture).sum((1, 2), dtype=np.int64)
    union = np.maximum(stacked, picture).sum((1, 2), dtype=np.int64)
    return bool((difference <= near * union).any())


def _look_alikes(looks: npt.NDArray[Any]) -> list[int]:
    """Characters that are the same, pixel by pixel, as an earlier one in most faces: Α and А are A."""
    looks = np.sort(looks, order=("face", "hash", "code"))
    first = np.flatnonzero(np.r_[True, (np.diff(looks["face"]) != 0) | (np.diff(looks["hash"]) != 0)])
    last = np.r_[first[1:], len(looks)]
    times: Counter[tuple[int, int]] = Counter()  # how often two characters have one picture in one face
    for i, j in zip(first[last - first > 1].tolist(), last[last - first > 1].tolist(), strict=True):
        times.update(combinations(looks["code"][i:j].tolist(), 2))
    of_pairs = looks[np.isin(looks["code"], list({c for pair in times for c in pair}))]
    faces_of: dict[int, set[int]] = defaultdict(set)
    for code, face in zip(of_pairs["code"].tolist(), of_pairs["face"].tolist(), strict=True):
        faces_of[code].add(face)
    dropped: set[int] = set()
    for (a, b), count in sorted(times.items()):  # a < b: the first character stays
        if a not in dropped and count >= ALIKE * len(faces_of[a] & faces_of[b]):
            dropped.add(b)
    return sorted(dropped)


def _script(code: int) -> str:
    names = _fonts.need("fonttools", "fontTools.unicodedata")
    return str(names.script_name(names.script(chr(code)))).replace(" ", "_")


def _keep_scripts(drawn: _Drawn, names: dict[int, str], count: int | None) -> None:
    """Leave the ``count`` scripts with the most characters."""
    if count is None:
        return
    by_size = sorted(Counter(names.values()).items(), key=lambda item: (-item[1], item[0]))
    if len(by_size) < count:
        raise DataError(f"fonts: got {len(by_size)} scripts, wanted {count}; add fonts")
    kept = {name for name, _ in by_size[:count]}
    drawn.keep(np.isin(drawn.code, [code for code, name in names.items() if name in kept]))


def _choose_classes(
    characters: Index, max_classes: int | None, shape: Shape | None, random: np.random.Generator
) -> tuple[Index, Index]:
    """Characters to train and to test on, ascending."""
    offered = len(characters)
    if shape is not None:
        train, wanted = shape.train_classes, shape.train_classes + shape.test_classes
    else:
        wanted = offered if max_classes is None else min(offered, max_classes)
        train = (wanted + 1) // 2
        wanted = max(wanted, 2)
    if offered < wanted:
        raise DataError(f"fonts: got {offered} characters in enough faces, wanted {wanted}; add fonts")
    order = random.permutation(characters)[:wanted]
    return np.sort(order[:train]), np.sort(order[train:])


def _exactly(count: int, chosen: Any, needed: Any, random: np.random.Generator, part: str) -> Any:
    """``count`` of the chosen pictures: the needed ones of each class, then others at random."""
    least, most = int((chosen & needed).sum()), int(chosen.sum())
    if not least <= count <= most:
        raise DataError(f"fonts: got {least} to {most} {part} images, wanted {count}; change min_faces, or add fonts")
    # new random numbers: those that ranked the pictures of a class are small where it has many
    order = np.where(chosen, np.where(needed, -1.0, random.random(len(chosen))), 2.0).argsort(kind="stable")
    mask = np.zeros(len(chosen), dtype=bool)
    mask[order[:count]] = True
    return mask


def _image_set(drawn: _Drawn, chosen: Any, names: dict[int, str], scripts: list[str]) -> ImageSet:
    codes, labels = np.unique(drawn.code[chosen], return_inverse=True)
    super_labels = np.array([scripts.index(names[code]) for code in codes.tolist()], dtype=np.int64)[labels]
    classes = [f"U+{code:04X} {chr(code)}" for code in codes.tolist()]
    return ImageSet("glyphs", Array(drawn.picture[chosen]), labels, classes, super_labels, scripts)
