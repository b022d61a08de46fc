"""Glyphs: what is drawn and what is left out, on fonts made for the test and on matplotlib's."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTCollection, TTFont, newTable
from fontTools.ttLib.tables.ttProgram import Program

import pydml.data
from pydml.cli import main
from pydml.data import DataError, fonts, glyph_set, glyphs
from pydml.data.fonts import draw_face, find_fonts, matplotlib_fonts, open_faces
from pydml.data.glyph_set import Shape
from pydml.metrics import recall_at_k

Box = tuple[int, int, int, int]  # left, bottom, right, top, in a thousandth of an em
TOFU: list[Box] = [(100, 0, 500, 700)]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def made_font(path: Path, characters: dict[str, list[Box]]) -> Path:
    """A font whose glyphs are boxes; an empty list is a blank glyph. Equal lists are different glyphs."""
    shapes = {".notdef": TOFU} | {f"u{ord(c):04X}": boxes for c, boxes in characters.items()}
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(list(shapes))
    builder.setupCharacterMap({ord(c): f"u{ord(c):04X}" for c in characters})
    outlines = {}
    for name, boxes in shapes.items():
        pen = TTGlyphPen(None)
        for left, bottom, right, top in boxes:
            pen.moveTo((left, bottom))
            for point in ((left, top), (right, top), (right, bottom)):
                pen.lineTo(point)
            pen.closePath()
        outlines[name] = pen.glyph()
    builder.setupGlyf(outlines)
    builder.setupHorizontalMetrics({name: (600, 0) for name in shapes})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular", "fullName": path.stem})
    builder.setupOS2()
    builder.setupPost()
    # FreeType hints a font without a program by itself, and then A otherwise than a Greek Α of the same outline
    builder.font["prep"] = newTable("prep")
    builder.font["prep"].program = Program()
    builder.font["prep"].program.fromBytecode([0xB0, 0, 0x21] * 4)  # push 0, pop it
    builder.save(path)
    return path


def bars(character: str, face: int) -> list[Box]:
    """A bar code of a character; the face is its height and how wide the bars are."""
    code = ord(character) * 37 % 1021  # no two of the characters below share one
    return [(60 * k, -10 * face, 60 * k + 25 + 3 * face, 300 + 60 * face) for k in range(10) if code >> k & 1]


def made_fonts(folder: Path, faces: int = 5, characters: str = LETTERS, **special: Any) -> Path:
    """Fonts f0, f1, … that have the characters as bar codes; ``special`` is given to every one beside them."""
    folder.mkdir(exist_ok=True)
    for face in range(faces):
        made_font(folder / f"f{face}.ttf", {c: bars(c, face) for c in characters} | special)
    return folder


def classes(*sets: pydml.data.ImageSet) -> set[str]:
    """The characters of all classes."""
    return {name.split(" ", 1)[1] for data in sets for name in data.classes}


def both(splits: pydml.data.Splits) -> set[str]:
    return classes(splits.train, splits.test)


def test_classes_are_characters_and_halves_are_disjoint(tmp_path: Path) -> None:
    splits = glyphs([made_fonts(tmp_path, characters=LETTERS + "ДЖШ")])
    assert (len(splits.train.classes), len(splits.test.classes)) == (15, 14)
    assert both(splits) == set(LETTERS + "ДЖШ")
    for data in (splits.train, splits.test):
        assert data.name == "glyphs"
        assert data.labels.bincount().tolist() == [5] * len(data.classes)
        assert data.pixels().shape[1:] == (1, 32, 32) and data.load(0).mode == "L"
        assert data.super_classes == ["Cyrillic", "Latin"]
        assert data.super_labels is not None
        assert data.super_labels.tolist() == [int(data.classes[c][-1] < "Ѐ") for c in data.labels]
        assert data.classes[0].startswith("U+00")
    assert splits.about["faces"] == ["f0", "f1", "f2", "f3", "f4"]


def test_the_same_fonts_give_the_same_bytes_wherever_they_lie(tmp_path: Path) -> None:
    made_fonts(tmp_path / "here")
    (tmp_path / "there" / "deep").mkdir(parents=True)
    for path in sorted((tmp_path / "here").iterdir(), reverse=True):
        folder = tmp_path / "there" / ("deep" if path.name > "f2" else "")
        (folder / path.name).write_bytes(path.read_bytes())
    contents = []
    for fonts_folder in ("here", "there", "here"):
        out = tmp_path / f"out{len(contents)}"
        pydml.data.save(glyphs([tmp_path / fonts_folder]), out)
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert contents[0] == contents[1] == contents[2]
    assert glyphs([tmp_path / "here"], seed=1).train.classes != glyphs([tmp_path / "here"]).train.classes


# What is left out


def test_empty_missing_and_invisible_characters_are_left_out(tmp_path: Path) -> None:
    special = {"a": [], "b": TOFU, "\u00a0": bars("x", 0), "\ue000": bars("y", 0), "\u200b": bars("z", 0)}
    assert both(glyphs([made_fonts(tmp_path, **special)])) == set(LETTERS)
    assert draw(tmp_path / "f0.ttf", "Aab").keys() == {"A"}
    assert set(map(chr, open_faces([tmp_path / "f0.ttf"])[0][0].characters)) == set(LETTERS + "ab")


def test_a_face_of_placeholders_is_left_out(tmp_path: Path) -> None:
    builder = FontBuilder(font=TTFont(made_font(tmp_path / "resort.ttf", {"A": TOFU})))
    builder.setupCharacterMap({code: "u0041" for code in range(0x21, 0x250)})
    builder.save(tmp_path / "resort.ttf")
    assert open_faces([tmp_path / "resort.ttf"]) == ([], {})


def test_a_character_needs_enough_faces(tmp_path: Path) -> None:
    made_fonts(tmp_path)
    for face in (7, 8, 9):
        made_font(tmp_path / f"f{face}.ttf", {c: bars(c, face) for c in "ABCabc"})
    assert both(glyphs([tmp_path])) == set(LETTERS)
    assert both(glyphs([tmp_path], min_faces=3)) == set(LETTERS + "abc")
    assert both(glyphs([tmp_path], min_faces=8)) == set("ABC")
    sizes = Counter[str]()
    for data in (splits := glyphs([tmp_path], max_faces=6)).train, splits.test:
        sizes.update(data.classes[c] for c in data.labels)
    assert {name[-1]: n for name, n in sizes.items()} == {c: 6 if c in "ABC" else 5 for c in LETTERS}


def test_faces_with_one_picture_of_a_character_count_once(tmp_path: Path) -> None:
    for face in range(5):
        borrowed = {"a": bars("a", 0), "b": bars("b", max(face, 1))}  # in five faces: one picture of a, four of b
        made_font(tmp_path / f"f{face}.ttf", {c: bars(c, face) for c in LETTERS} | borrowed)
    assert both(glyphs([tmp_path])) == set(LETTERS + "b")


def test_a_character_that_looks_like_another_in_most_faces_is_left_out(tmp_path: Path) -> None:
    for face in range(5):
        alike = {
            "Α": bars("A", face),
            "В": bars("B" if face < 3 else "b", face),
            "С": bars("C" if face < 2 else "c", face),
        }
        made_font(tmp_path / f"f{face}.ttf", {c: bars(c, face) for c in LETTERS} | alike)
    assert both(glyphs([tmp_path])) == set(LETTERS + "С")  # alike in 5, 3 and 2 of 5 faces; the first one stays


def test_a_face_that_is_nearly_another_adds_nothing_where_they_agree(tmp_path: Path) -> None:
    made_fonts(tmp_path, faces=4)
    nearly = {c: [(left, low, right, high + 3) for left, low, right, high in bars(c, 2)] for c in LETTERS}
    made_font(tmp_path / "g.ttf", nearly | {"A": bars("A", 8)})
    splits = glyphs([tmp_path])
    for data in (splits.train, splits.test):
        for c, name in enumerate(data.classes):
            assert (data.labels == c).sum() == (5 if name.endswith("A") else 4)
    assert splits.about["pictures left out"]["like that of another face"] == 25
    assert len((every := glyphs([tmp_path], near=0)).train) + len(every.test) == 5 * 26
    assert len(glyphs([tmp_path], near=0.3, min_faces=2).train) < len(splits.train)


def test_collections_give_all_their_faces(tmp_path: Path) -> None:
    made_fonts(tmp_path, faces=4, characters="ABC")
    collection = TTCollection()
    collection.fonts = [TTFont(tmp_path / f"f{face}.ttf") for face in (2, 3)]
    collection.save(tmp_path / "f2.ttc")
    (tmp_path / "f2.ttf").unlink()
    (tmp_path / "f3.ttf").unlink()
    faces, _ = open_faces(find_fonts([tmp_path]))
    assert [(face.path.name, face.index, face.name) for face in faces] == [
        ("f0.ttf", 0, "f0"),
        ("f1.ttf", 0, "f1"),
        ("f2.ttc", 0, "f2"),
        ("f2.ttc", 1, "f3"),
    ]
    assert both(glyphs([tmp_path])) == set("ABC")


# How it is drawn


def draw(path: Path, characters: Sequence[str]) -> dict[str, np.ndarray]:
    codes, pictures = draw_face(open_faces([path])[0][0], [ord(c) for c in characters], 32)
    return {chr(c): picture for c, picture in zip(codes.tolist(), pictures, strict=True)}


def box(picture: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of what is drawn, inclusive."""
    rows, columns = picture.any(1).nonzero()[0], picture.any(0).nonzero()[0]
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


def test_size_and_height_above_the_base_line_tell_characters_apart(tmp_path: Path) -> None:
    small, large = [(0, 0, 300, 300)], [(0, 0, 600, 600)]
    high = [(0, 500, 300, 800)]
    drawn = draw(made_font(tmp_path / "f.ttf", {"c": small, "C": large, "'": high}), "cC'")
    left, top, right, bottom = box(drawn["c"])
    assert (right - left + 1, bottom - top + 1) == (8, 8) and bottom == 23  # 0.3 em of 26 pixels, on the base line
    assert box(drawn["C"])[3] == 23 and box(drawn["C"])[1] < top
    assert box(drawn["'"])[3] < top
    assert abs((left + right) / 2 - 15.5) <= 0.5


def test_what_is_too_large_or_too_high_is_whole_nevertheless(tmp_path: Path) -> None:
    wide = [(0, 0, 6000, 100), (5900, 0, 6000, 600)]
    large = [(0, 0, 1300, 100), (1200, 0, 1300, 900)]  # 34 pixels
    tall, deep = [(0, 0, 100, 2400), (0, 2300, 400, 2400)], [(0, -800, 300, -300)]
    drawn = draw(
        made_font(tmp_path / "f.ttf", {"w": wide, "l": large, "t": tall, "d": deep, "n": [(-900, 0, -600, 300)]}),
        "wltdn",
    )
    assert len(drawn) == 5
    for character, picture in drawn.items():
        assert picture[0].max() == picture[-1].max() == picture[:, 0].max() == picture[:, -1].max() == 0, character
    for character in "wl":
        left, top, right, bottom = box(drawn[character])
        assert right - left > 20 and picture_has_corner(drawn[character], right, top)
    left, top, right, bottom = box(drawn["t"])
    assert bottom - top > 25 and picture_has_corner(drawn["t"], right, top)
    assert box(drawn["d"])[3] == 30
    assert box(drawn["n"])[2] - box(drawn["n"])[0] == 7
    assert draw(made_font(tmp_path / "g.ttf", {"w": [(0, 0, 20000, 100)]}), "w") == {}  # 20 em: it would be a line


def picture_has_corner(picture: np.ndarray, right: int, top: int) -> bool:
    """The end of the shape is in the picture: its last part reaches the upper right corner of the ink."""
    return bool(picture[top : top + 2, right - 1 : right + 1].max() > 0)


# Exact shapes


def test_a_shape_is_met_exactly_or_refused(tmp_path: Path) -> None:
    made_fonts(tmp_path, faces=8, characters=LETTERS + "ДЖШЩЭ" + "ΔΘΞΠΣ")
    shape = Shape(train_classes=14, test_classes=12, train_images=79, test_images=60, scripts=2)
    splits = glyphs([tmp_path], shape=shape)
    assert (len(splits.train.classes), len(splits.test.classes)) == (14, 12)
    assert (len(splits.train), len(splits.test)) == (79, 60)
    assert splits.train.super_classes == ["Cyrillic", "Latin"]
    for data in (splits.train, splits.test):
        counts = data.labels.bincount()
        assert counts.min() >= 4 and len(counts) == len(data.classes)
    with pytest.raises(DataError, match="fonts: got 31 characters in enough faces, wanted 40; add fonts"):
        glyphs([tmp_path], shape=Shape(20, 20, 100, 100, 2))
    with pytest.raises(DataError, match="fonts: got 40 to 80 test images, wanted 81; change min_faces, or add fonts"):
        glyphs([tmp_path], shape=Shape(10, 10, 50, 81, 2))
    with pytest.raises(DataError, match="fonts: got 3 scripts, wanted 12; add fonts"):
        glyphs([tmp_path], shape=glyph_set.SOP_SHAPE)
    assert Shape(11318, 11316, 59551, 60502, 12) == glyph_set.SOP_SHAPE


def test_max_classes_and_max_scripts_choose(tmp_path: Path) -> None:
    made_fonts(tmp_path, characters=LETTERS + "ДЖШ")
    few = glyphs([tmp_path], max_classes=9)
    assert (len(few.train.classes), len(few.test.classes)) == (5, 4)
    assert both(glyphs([tmp_path], max_scripts=1)) == set(LETTERS)


# What is wrong


def test_fonts_that_are_not_there_or_broken_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match=r"fonts: got .*/none, wanted an existing folder or font file"):
        glyphs([tmp_path / "none"])
    with pytest.raises(FileNotFoundError, match=r"fonts: got .*, wanted a folder with fonts \(.ttf"):
        glyphs([tmp_path])
    (tmp_path / "fonts").mkdir()
    (tmp_path / "fonts" / "bad.ttf").write_bytes(b"no font")
    made_fonts(tmp_path / "fonts")
    assert main(["data", "glyphs", str(tmp_path / "out"), "--fonts", str(tmp_path / "fonts")]) == 0
    assert "bad.ttf cannot be used: OSError: unknown file format" in capsys.readouterr().out
    one = made_font(tmp_path / "one.ttf", {"A": bars("A", 0)})
    with pytest.raises(DataError, match="fonts: got 0 characters in enough faces, wanted 2; add fonts"):
        glyphs([one])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 4}, "size: got 4, wanted an int >= 8"),
        ({"min_faces": 1}, "min_faces: got 1, wanted an int >= 2"),
        ({"min_faces": 5, "max_faces": 4}, "max_faces: got 4, wanted at least min_faces=5"),
        ({"near": 1}, "near: got 1, wanted a number from 0 to below 1"),
        ({"max_classes": 1}, "max_classes: got 1, wanted an int >= 2"),
        ({"max_classes": 9, "shape": glyph_set.SOP_SHAPE}, "shape: got it beside max_classes"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glyphs(**settings)


def test_without_pillow_or_fonttools_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fontTools.ttLib", "PIL.ImageFont"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            package = "fonttools" if module.startswith("font") else "pillow"
            with pytest.raises(ImportError, match=rf"glyphs need {package}: pip install 'pydml-kernels\[data\]'"):
                glyphs(max_classes=10)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="fonts: none given, and matplotlib, whose fonts are the default"):
        glyphs()


# matplotlib's fonts, and the command


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The default set as ``pydml data glyphs`` writes it, and what the command printed."""
    out = tmp_path_factory.mktemp("glyphs") / "set"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["data", "glyphs", str(out)]) == 0
    return out, printed.getvalue()


def test_the_default_set_is_large_clean_and_printed(default: tuple[Path, str]) -> None:
    out, printed = default
    splits = pydml.data.open(out)
    for part in ("train", "test"):
        data = getattr(splits, part)
        assert 1500 < len(data.classes) < 3000 and len(data) > 10000  # they depend on the version of the fonts
        assert re.search(rf"{part} +{len(data):,} images, +{len(data.classes):,} classes of 4 to 12", printed)
        assert f"{len(data.super_labels.unique())} super categories: Latin " in printed
        assert {"Latin", "Greek", "Cyrillic", "Arabic", "Common"} <= set(data.super_classes)
        pixels = data.pixels()[:, 0]
        assert not pixels[:, [0, -1]].any() and not pixels[:, :, [0, -1]].any()  # nothing is cut off
        assert (pixels.amax((1, 2)) > 60).all()  # nothing is blank
        assert len(pixels.flatten(1).unique(dim=0)) > 0.98 * len(pixels)
    assert not set(splits.train.classes) & set(splits.test.classes)
    assert len(matplotlib_fonts()) > 20 and not any(path.name.startswith("cm") for path in matplotlib_fonts())


def test_characters_are_harder_to_find_than_by_chance_and_not_solved_by_pixels(default: tuple[Path, str]) -> None:
    test = pydml.data.open(default[0]).test
    some = test.subset(test.labels < 300)
    recall = recall_at_k(some.pixels().flatten(1).float() / 255, some.labels, (1,))[1]
    assert 0.1 < recall < 0.8


def test_the_command_writes_sop_format_and_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_fonts(tmp_path / "fonts")
    command = ["data", "glyphs", str(tmp_path / "out"), "--fonts", str(tmp_path / "fonts"), "--format", "sop"]
    assert main([*command, "--size", "20", "--max-classes", "12", "--seed", "3"]) == 0
    assert "20x20 grey" in capsys.readouterr().out
    splits = pydml.data.open(tmp_path / "out", mode="L")
    assert splits.train.name == "sop" and splits.train.pixels().shape == (30, 1, 20, 20)
    lines = (tmp_path / "out" / "Ebay_test.txt").read_text().splitlines()
    assert lines[0] == "image_id class_id super_class_id path" and re.fullmatch(r"31 7 1 Latin/\S+\.png", lines[1])
    assert main(command) == 1
    assert "which exists, wanted a new one, or overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert len(pydml.data.open(tmp_path / "out").train.classes) == 13
    command[2] = str(tmp_path / "other")
    assert main([*command, "--sop-shape"]) == 1
    assert capsys.readouterr().err == "pydml data glyphs: fonts: got 1 scripts, wanted 12; add fonts\n"


def test_system_fonts_are_added_to_those_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_fonts(tmp_path / "given", faces=3)
    (tmp_path / "system").mkdir()
    made_font(tmp_path / "system" / "s.ttf", {c: bars(c, 7) for c in LETTERS})
    monkeypatch.setattr(fonts, "system_folders", lambda: [tmp_path / "system"])
    assert glyphs([tmp_path / "given"], system=True).about["faces"] == ["f0", "f1", "f2", "s"]


def test_an_empty_folder_of_the_system_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fonts.sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / ".fonts").mkdir()
    (tmp_path / "data").mkdir()
    made_fonts(tmp_path / "data" / "fonts", faces=3)
    found = fonts.system_folders()
    assert tmp_path / "data" / "fonts" in found and tmp_path / ".fonts" not in found


def test_glyphs_can_be_opened_by_name_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_fonts(tmp_path / "fonts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fonts, "matplotlib_fonts", lambda: find_fonts([tmp_path / "fonts"]))
    assert both(pydml.data.open("glyphs")) == set(LETTERS)
    (tmp_path / "glyphs").mkdir()
    with pytest.raises(DataError, match="got a folder of no known format"):
        pydml.data.open("glyphs")


def test_the_document_runs_and_names_every_format_and_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    made_fonts(tmp_path / "fonts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fonts, "matplotlib_fonts", lambda: find_fonts([tmp_path / "fonts"]))
    blocks = re.findall(r"^```python\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "docs/data.md", "exec"), names)
    assert len(list(names["sampler"])) == 160
    for format in pydml.data.FORMATS:
        assert f"`{format}`" in document
    with contextlib.redirect_stdout(io.StringIO()) as help_text, pytest.raises(SystemExit):
        main(["data", "glyphs", "--help"])
    for option in set(re.findall(r"--[a-z-]+", help_text.getvalue())) - {"--help"}:
        assert f"`{option}" in document or f" {option}" in document, option
