"""Data: readers of the retrieval benchmarks, real images that anyone has (glyphs), and class-disjoint splits."""

from pydml.data.base import DataError, ImageSet, Splits, draw_gallery, k_folds, split_classes
from pydml.data.formats import FORMATS, open
from pydml.data.glyph_set import SOP_SHAPE, glyphs
from pydml.data.writers import save

__all__ = [
    "FORMATS",
    "SOP_SHAPE",
    "DataError",
    "ImageSet",
    "Splits",
    "draw_gallery",
    "glyphs",
    "k_folds",
    "open",
    "save",
    "split_classes",
]
