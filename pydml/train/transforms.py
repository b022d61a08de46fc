"""What is done to images before the network sees them; normalisation is the network's own first step.

Images stay uint8 as long as they can: a large batch waits for its second pass in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pydml import checks
from pydml.data.base import ImageSet
from pydml.data.packed import Array


def to_tensor(image: Any) -> Tensor:
    """A PIL image, array or tensor as a tensor [C, H, W], uint8 if it was."""
    if isinstance(image, Tensor):
        return image if image.ndim == 3 else image[None]
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1)))


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
    try:
        from torchvision.transforms import v2
    except ImportError:
        raise ValueError(
            "transform: 'papers' needs torchvision: pip install torchvision; small images of one size do without: "
            "--transform jitter"
        ) from None
    train = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
    test = v2.Compose([v2.ToImage(), v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size)])
    return train, test


def moved(data: ImageSet, seed: int = 0, jitter: Jitter | None = None) -> ImageSet:
    """The same images, each moved once by its own random map: what is drawn in place is then found anywhere."""
    pixels = data.pixels()
    uniform = torch.rand(len(pixels), Jitter.NUMBERS, generator=torch.Generator().manual_seed(seed))
    placed = (jitter or Jitter())(pixels, uniform)
    array = placed[:, 0] if placed.shape[1] == 1 else placed.permute(0, 2, 3, 1).contiguous()
    return ImageSet(data.name, Array(array.numpy()), data.labels, data.classes, data.super_labels, data.super_classes)
