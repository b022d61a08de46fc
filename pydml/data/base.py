"""Image sets: images with class labels, whatever they are stored in, and their class-disjoint splits.

Readers make them (``pydml/data/readers.py``), trainers and samplers use them; neither has to know the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pydml import checks


class DataError(ValueError):
    """A file of a dataset is broken; the message names the file, the line if it has lines, and what was wanted."""


class Images(Protocol):
    """Where the images of a set are stored: ``images[i]`` is a PIL image of mode RGB or L.

    A store that holds pixels may also have ``pixels(indices)``, a uint8 tensor [n, C, H, W], made at once.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


class ImageSet(Dataset[tuple[Any, int]]):
    """Images with class labels: what every reader returns.

    Parameters
    ----------
    name
        Of the set: "sop", "glyphs".
    images
        Where they are stored; a list of PIL images will do.
    labels
        One integer in [0, C) for each image.
    classes
        C names.
    super_labels
        The super category of each image, an index into ``super_classes``; -1 where none is known. None: there are none.
    super_classes
        Their names.
    transform
        Applied to an image by ``set[i]``; None leaves the PIL image.
    items
        Where the images of this set are in the store, if it has others too.

    Examples
    --------
    >>> from PIL import Image
    >>> images = [Image.new("L", (8, 8), 10 * i) for i in range(6)]
    >>> data = pydml.data.ImageSet("greys", images, [0, 0, 1, 1, 2, 2], ["black", "dark", "grey"])
    >>> data.subset([2, 3, 4]).labels
    tensor([0, 0, 1])
    >>> data.with_transform(lambda image: image.getpixel((0, 0)))[5]
    (50, 2)
    """

    def __init__(
        self,
        name: str,
        images: Images,
        labels: Any,
        classes: Sequence[str],
        super_labels: Any = None,
        super_classes: Sequence[str] = (),
        transform: Callable[[Any], Any] | None = None,
        items: Any = None,
    ) -> None:
        self.name = name
        self.images = images
        self.items = np.arange(len(images)) if items is None else np.asarray(items)
        self.classes = list(classes)
        self.labels = _indices("labels", labels, len(self), len(self.classes), least=0)
        self.super_classes = list(super_classes)
        self.super_labels: Tensor | None = None
        if super_labels is not None:
            self.super_labels = _indices("super_labels", super_labels, len(self), len(self.super_classes), least=-1)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = self.load(i)
        return (image if self.transform is None else self.transform(image)), int(self.labels[i])

    def __repr__(self) -> str:
        kinds = f", {len(self.super_classes)} super categories" if self.super_classes else ""
        return f"ImageSet({self.name!r}: {len(self)} images, {len(self.classes)} classes{kinds})"

    def load(self, i: int) -> Any:
        """Image i as it is stored: a PIL image of mode RGB or L, without the transform."""
        return self.images[int(self.items[i])]

    def pixels(self, indices: Any = None) -> Tensor:
        """Images as one uint8 tensor [n, C, H, W], without the transform; None: all of them. They must be of one size.

        From a packed set this is one copy, much faster than image by image.
        """
        items = self.items if indices is None else self.items[np.asarray(indices)]
        at_once = getattr(self.images, "pixels", None)
        if at_once is not None:
            pixels: Tensor = at_once(items)
            return pixels
        arrays = [np.asarray(self.images[int(item)]) for item in items]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            raise ValueError(f"pixels: got images of shapes {shapes[0]} and {shapes[1]}, wanted one size and mode")
        stacked = torch.from_numpy(np.stack(arrays)) if arrays else torch.empty(0, 1, 1, dtype=torch.uint8)
        return stacked[:, None] if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2).contiguous()

    def subset(self, indices: Any) -> ImageSet:
        """The images at ``indices``; classes without an image are left out, and the others numbered anew, in order.

        Super categories keep their numbers.
        """
        index = torch.as_tensor(np.asarray(indices))
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise ValueError(f"indices: got a mask of {len(index)} entries, wanted {len(self)}")
            index = index.nonzero()[:, 0]
        index = index.long()
        if len(index) and not -len(self) <= int(index.min()) <= int(index.max()) < len(self):
            raise IndexError(
                f"indices: got {int(index.min())} … {int(index.max())}, wanted indices of {len(self)} images"
            )
        part = copy.copy(self)
        present, part.labels = self.labels[index].unique(return_inverse=True)
        part.classes = [self.classes[c] for c in present.tolist()]
        part.items = self.items[index.numpy()]
        if self.super_labels is not None:
            part.super_labels = self.super_labels[index]
        return part

    def with_transform(self, transform: Callable[[Any], Any] | None) -> ImageSet:
        """The same images under another transform."""
        other = copy.copy(self)
        other.transform = transform
        return other


@dataclass(frozen=True)
class Splits:
    """What to train and what to test on.

    Without a gallery every test image is a query against all the others (leave-one-out). With one, ``test`` are the
    queries, and both have the same classes with the same numbers.
    """

    train: ImageSet
    test: ImageSet
    gallery: ImageSet | None = None
    about: dict[str, Any] = field(
        default_factory=dict, repr=False, kw_only=True
    )  # where it comes from; writers keep it


def split_classes(data: ImageSet, fraction: float = 0.1, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Training and validation images of different classes: ``fraction`` of the classes, drawn at random, validate.

    >>> data = pydml.data.ImageSet("none", range(40), torch.arange(40) // 2, [str(c) for c in range(20)])
    >>> train, validation = pydml.data.split_classes(data, 0.1)
    >>> len(train.classes), len(validation.classes)
    (18, 2)
    """
    if not 0 < checks.number("fraction", fraction) < 1:
        raise ValueError(f"fraction: got {fraction!r}, wanted a number between 0 and 1")
    order = _shuffled_classes(data, seed, least=2)
    count = min(max(round(fraction * len(order)), 1), len(order) - 1)
    return _part(data, order[count:]), _part(data, order[:count])


def k_folds(data: ImageSet, k: int, seed: int = 0) -> list[tuple[ImageSet, ImageSet]]:
    """k pairs of training and validation images; every class validates once, and never trains beside itself.

    >>> data = pydml.data.ImageSet("none", range(40), torch.arange(40) // 2, [str(c) for c in range(20)])
    >>> [len(validation.classes) for _, validation in pydml.data.k_folds(data, 3)]
    [7, 7, 6]
    """
    folds = np.array_split(_shuffled_classes(data, seed, least=checks.integer("k", k, least=2)), k)
    return [(_part(data, np.concatenate(folds[:i] + folds[i + 1 :])), _part(data, folds[i])) for i in range(k)]


def draw_gallery(data: ImageSet, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Queries and a gallery of one image of each class, drawn at random: the protocol of VehicleID's authors.

    Classes keep their numbers in both. A class of one image is in the gallery only.
    """
    random = np.random.default_rng(checks.integer("seed", seed, least=0))
    order = random.permutation(len(data))
    _, first = np.unique(data.labels.numpy()[order], return_index=True)
    chosen = np.zeros(len(data), dtype=bool)
    chosen[order[first]] = True
    return _keep_classes(data, ~chosen), _keep_classes(data, chosen)


def _keep_classes(data: ImageSet, mask: Any) -> ImageSet:
    """A subset whose classes keep their numbers."""
    part = data.subset(mask)
    part.labels, part.classes = data.labels[torch.from_numpy(mask)], list(data.classes)
    return part


def _part(data: ImageSet, classes: Any) -> ImageSet:
    return data.subset(torch.isin(data.labels, torch.as_tensor(classes)))


def _shuffled_classes(data: ImageSet, seed: int, least: int) -> Any:
    if len(data.classes) < least:
        raise ValueError(f"data: got {len(data.classes)} classes, wanted at least {least} to split")
    return np.random.default_rng(checks.integer("seed", seed, least=0)).permutation(len(data.classes))


def _indices(name: str, values: Any, count: int, below: int, least: int) -> Tensor:
    """One index in [least, below) for each image."""
    index = torch.as_tensor(values).detach().cpu()
    if index.ndim != 1 or len(index) != count:
        raise ValueError(f"{name}: got shape {list(index.shape)}, wanted [{count}], one for each image")
    if not count:
        return index.long()
    if index.dtype not in checks.INTEGERS:
        raise TypeError(f"{name}: got dtype {index.dtype}, wanted an integer dtype")
    low, high = int(index.min()), int(index.max())
    if low < least or high >= below:
        raise ValueError(f"{name}: got {low} … {high}, wanted {least} … {below - 1}, as there are {below} names")
    return index.long()
