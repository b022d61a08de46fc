"""Small image sets for the tests of training: noisy patterns, a class each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from pydml.data import ImageSet, Splits
from pydml.data.packed import Array, write_packed


def patterns(classes: int, each: int, seed: int, noise: float = 60, size: int = 16) -> np.ndarray:
    """Images [classes·each, size, size] uint8: a random 4×4 pattern a class, enlarged, under noise."""
    random = np.random.default_rng(seed)
    base = random.integers(0, 256, (classes, 1, 4, 4)).repeat(size // 4, 2).repeat(size // 4, 3)
    noisy = base + random.normal(0, noise, (classes, each, size, size))
    return noisy.clip(0, 255).astype(np.uint8).reshape(-1, size, size)


def image_set(classes: int = 40, each: int = 8, seed: int = 0, noise: float = 60) -> ImageSet:
    """A packed set in memory, with classes in four super categories."""
    images = Array(patterns(classes, each, seed, noise))
    labels = np.arange(classes).repeat(each)
    return ImageSet(
        "patterns", images, labels, [f"class {c}" for c in range(classes)], labels % 4, [f"kind {k}" for k in range(4)]
    )


def splits(classes: int = 40, each: int = 8, noise: float = 60) -> Splits:
    return Splits(image_set(classes, each, 0, noise), image_set(classes // 2, each, 1, noise))


def packed(folder: Path, **options: int) -> Path:
    """The same on disk."""
    folder.mkdir()
    write_packed(splits(**options), folder)
    return folder


def folders(root: Path, classes: int = 8, each: int = 4) -> Path:
    """PNG files, a folder a class, under train and test."""
    for part, seed in (("train", 0), ("test", 1)):
        pixels = patterns(classes, each, seed)
        for i, image in enumerate(pixels):
            folder = root / part / f"{part}{i // each}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{i}.png")
    return root
