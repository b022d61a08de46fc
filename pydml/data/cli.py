"""``pydml data``: make a set of glyphs, or look at a dataset."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from pydml.data import formats
from pydml.data.base import DataError, ImageSet, Splits
from pydml.data.glyph_set import SOP_SHAPE, glyphs
from pydml.data.writers import WRITERS, check_free, save


def main(argv: Sequence[str]) -> int:
    """Run ``pydml data``."""
    parser = argparse.ArgumentParser(prog="pydml data", description="Make a set of glyphs, or look at a dataset.")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)

    make = verbs.add_parser("glyphs", help="draw a retrieval set from fonts: class = character, instance = typeface")
    make.add_argument("out", help="folder to write, which must not exist")
    make.add_argument("--fonts", nargs="+", metavar="DIR", help="folders with fonts; default: those of matplotlib")
    make.add_argument("--system", action="store_true", help="take the fonts installed in this system, too")
    make.add_argument("--format", choices=WRITERS, default="packed", help="default: packed, one array on disk")
    make.add_argument("--size", type=int, default=32, help="height and width of the images; default 32")
    make.add_argument("--min-faces", type=int, default=4, help="different pictures a character needs; default 4")
    make.add_argument("--max-faces", type=int, default=12, help="pictures taken of a character; default 12")
    make.add_argument("--near", type=float, default=0.1, help="pictures that differ by less are one; default 0.1")
    make.add_argument("--max-classes", type=int, help="take at most so many characters, at random")
    make.add_argument("--max-scripts", type=int, help="take only the scripts with the most characters")
    shape = "exactly as many classes, images and scripts as Stanford Online Products; needs many fonts"
    make.add_argument("--sop-shape", action="store_true", help=shape)
    make.add_argument("--seed", type=int, default=0, help="of what is taken at random; default 0")
    make.add_argument("--overwrite", action="store_true", help="replace a set written by this command")

    look = verbs.add_parser("info", help="say what a dataset holds")
    look.add_argument("source", help="its folder")
    look.add_argument("--format", choices=formats.FORMATS, help="default: found out from the files")
    look.add_argument("--check", action="store_true", help="decode every image, and name those that are broken")

    options = parser.parse_args(argv)
    try:
        return _glyphs(options) if options.verb == "glyphs" else _info(options)
    except (DataError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"pydml data {options.verb}: {error}", file=sys.stderr)
        return 1


def _glyphs(options: argparse.Namespace) -> int:
    check_free(options.out, options.overwrite)  # before minutes of drawing
    began = time.perf_counter()
    splits = glyphs(
        options.fonts,
        system=options.system,
        size=options.size,
        min_faces=options.min_faces,
        max_faces=options.max_faces,
        near=options.near,
        max_classes=options.max_classes,
        max_scripts=options.max_scripts,
        shape=SOP_SHAPE if options.sop_shape else None,
        seed=options.seed,
    )
    save(splits, options.out, options.format, overwrite=options.overwrite)
    print(f"{options.out}: {options.format}, {options.size}x{options.size} grey, {time.perf_counter() - began:.1f} s")
    for name, reason in splits.about["fonts that cannot be used"].items():
        print(f"  {name} cannot be used: {reason}")
    for reason, count in splits.about["pictures left out"].items():
        print(f"  {count:8,} pictures {'drawn' if reason == 'drawn' else f'left out, {reason}'}")
    describe(splits)
    return 0


def _info(options: argparse.Namespace) -> int:
    splits = formats.open(options.source, options.format)
    describe(splits)
    return _check(splits) if options.check else 0


def describe(splits: Splits) -> None:
    """Print how many classes, images and super categories there are."""
    for part in ("train", "test", "gallery"):
        data: ImageSet | None = getattr(splits, part)
        if data is None:
            continue
        sizes = data.labels.bincount()
        sizes = sizes[sizes > 0]
        print(
            f"{part:<8}{len(data):8,} images, {len(sizes):6,} classes"
            + (f" of {int(sizes.min())} to {int(sizes.max())}" if len(sizes) else "")
        )
        if data.super_labels is not None:
            label_of = dict(zip(data.labels.tolist(), data.super_labels.tolist(), strict=True))
            names = Counter("none" if s < 0 else data.super_classes[s] for s in label_of.values()).most_common()
            shown = ", ".join(f"{name} {count}" for name, count in names[:12])
            print(f"{'':<8}{len(names)} super categories: {shown}{', …' if len(names) > 12 else ''}")


def _check(splits: Splits) -> int:
    broken = 0
    for data in (splits.train, splits.test, splits.gallery):
        for i in range(0 if data is None else len(data)):
            try:
                assert data is not None
                data.load(i)
            except (DataError, OSError) as error:
                broken += 1
                print(error)
    print(f"{broken} broken images")
    return 1 if broken else 0
