"""What is done to images before the network sees them; normalisation is the network's own first step.

Images stay uint8 as long as they can: a large batch waits for its second pass in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pydml import checks
from pydml.data.base import ImageSet
from pydml.data.files import pillow
from pydml.data.packed import Array

#: The papers' random crops: at least this share of the image, sides of at most this ratio.
LEAST_SHARE, LARGEST_RATIO = 0.08, 4 / 3
#: The papers' test images: resized so that the crop leaves out this border.
BEYOND_CROP = 256 / 224


def to_tensor(image: Any) -> Tensor:
    """A PIL image, array or tensor as a tensor [C, H, W], uint8 if it was."""
    if isinstance(image, Tensor):
        return image if image.ndim == 3 else image[None]
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1)))


def to_picture(image: Any) -> Any:
    """A PIL image, array or tensor as a PIL image of mode RGB or L."""
    if isinstance(image, pillow().Image):
        return image
    pixels = to_tensor(image)
    return pillow().fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).contiguous().numpy())


class Jitter:
    """Random small affine maps of whole batches, in plain torch: shift, scale, rotation, shear.

    The border is continued outwards. For small grey images, whose class does not change by them.
    """

    #: Random numbers that an image needs.
    NUMBERS = 5

    def __init__(self, shift: float = 0.06, scale: float = 0.1, rotation: float = 0.1, shear: float = 0.1) -> None:
        self.amounts = (shift, scale, rotation, shear)

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Images [n, C, H, W], and numbers in [0, 1) [n, 5]; uint8 stays uint8."""
        shift, scale, rotation, shear = self.amounts
        u = 2 * uniform - 1
        zoom, angle, slant = 1 + scale * u[:, 0], rotation * u[:, 1], shear * u[:, 2]
        cos, sin = angle.cos() * zoom, angle.sin() * zoom
        maps = torch.stack((cos, slant - sin, 2 * shift * u[:, 3], sin, cos, 2 * shift * u[:, 4]), 1).view(-1, 2, 3)
        grid = torch.nn.functional.affine_grid(maps, list(images.shape), align_corners=False)
        out = torch.nn.functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
        return out.round_().to(torch.uint8) if images.dtype == torch.uint8 else out


def build(name: str, data: Any, image_size: int) -> tuple[Any, Callable[[Any], Any] | None]:
    """The transforms of training and of evaluation."""
    packed = hasattr(data.images, "pixels")
    name = checks.choice("transform", name, ("auto", "none", "jitter", "papers"))
    if name == "auto":
        name = "jitter" if packed else "papers"
    if name == "papers":
        return papers(image_size)
    return (Jitter() if name == "jitter" else None), None


def papers(size: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The papers': a random resized crop and a flip; in evaluation the centre of the image, resized to 256/224."""
    return RandomCrop(size), CentreCrop(size)


@dataclass(frozen=True)
class RandomCrop:
    """A random part of the image, resized to a square, every second time mirrored: uint8 [C, size, size].

    Draws from torch's default generator. Resizing is Pillow's, which averages over all pixels that a new one covers.
    """

    size: int

    def __call__(self, image: Any) -> Tensor:
        picture = to_picture(image)
        left, top, width, height = random_box(*picture.size)
        box = (left, top, left + width, top + height)
        pixels = to_tensor(picture.resize((self.size, self.size), pillow().Resampling.BILINEAR, box))
        return pixels.flip(2) if torch.rand(()) < 0.5 else pixels


@dataclass(frozen=True)
class CentreCrop:
    """The central square of the image whose shorter side was resized to 256/224 of it: uint8 [C, size, size]."""

    size: int

    def __call__(self, image: Any) -> Tensor:
        picture = to_picture(image)
        shorter = round(self.size * BEYOND_CROP)
        width, height = (shorter * side // min(picture.size) for side in picture.size)
        resized = to_tensor(picture.resize((width, height), pillow().Resampling.BILINEAR))
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return resized[:, top : top + self.size, left : left + self.size].contiguous()


def random_box(width: int, height: int, tries: int = 10) -> tuple[int, int, int, int]:
    """Left, top, width and height of a random crop (Szegedy et al. 2015, section 6).

    Its share of the area and the logarithm of its ratio are uniform; the first of some tries that fits into the image
    is taken, and the largest central part of an allowed ratio where none does.
    """
    share = LEAST_SHARE + (1 - LEAST_SHARE) * torch.rand(tries, dtype=torch.float64)
    ratio = (math.log(LARGEST_RATIO) * (2 * torch.rand(tries, dtype=torch.float64) - 1)).exp()
    area = share * (width * height)
    wide, high = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = ((wide >= 1) & (wide <= width) & (high >= 1) & (high <= height)).nonzero()[:, 0]
    if not len(fits):
        w, h = min(width, round(height * LARGEST_RATIO)), min(height, round(width * LARGEST_RATIO))
        return (width - w) // 2, (height - h) // 2, w, h
    w, h = int(wide[fits[0]]), int(high[fits[0]])
    return int(torch.randint(width - w + 1, ())), int(torch.randint(height - h + 1, ())), w, h


def moved(data: ImageSet, seed: int = 0, jitter: Jitter | None = None) -> ImageSet:
    """The same images, each moved once by its own random map: what is drawn in place is then found anywhere."""
    pixels = data.pixels()
    uniform = torch.rand(len(pixels), Jitter.NUMBERS, generator=torch.Generator().manual_seed(seed))
    placed = (jitter or Jitter())(pixels, uniform)
    array = placed[:, 0] if placed.shape[1] == 1 else placed.permute(0, 2, 3, 1).contiguous()
    return ImageSet(data.name, Array(array.numpy()), data.labels, data.classes, data.super_labels, data.super_classes)
