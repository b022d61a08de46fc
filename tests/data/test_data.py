"""Image sets: labels, subsets, transforms, and splits whose parts share no class."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from pydml.data import ImageSet, draw_gallery, k_folds, split_classes
from pydml.samplers import CategorySampler, MPerClassSampler

SIZES = [3, 1, 4, 2, 5, 3, 2]  # images of each class


def greys(sizes: list[int] = SIZES, **more: Any) -> ImageSet:
    """Images whose one colour is their number; classes c0, c1, …, of super categories even and odd, shuffled."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(0).shuffle(labels)
    images = [Image.new("L", (4, 3), i) for i in range(len(labels))]
    settings: dict[str, Any] = {"super_labels": labels % 2, "super_classes": ["even", "odd"]}
    return ImageSet("greys", images, labels, [f"c{c}" for c in range(len(sizes))], **(settings | more))


def colours(data: ImageSet) -> list[int]:
    return [data.load(i).getpixel((0, 0)) for i in range(len(data))]


def names(data: ImageSet) -> list[str]:
    return [data.classes[label] for label in data.labels]


def test_an_item_is_the_transformed_image_and_its_label() -> None:
    data = greys(transform=np.asarray)
    image, label = data[5]
    assert image.tolist() == [[5] * 4] * 3
    assert type(label) is int and label == data.labels[5]
    assert data.with_transform(None)[5][0].getpixel((0, 0)) == 5
    assert data.transform is np.asarray  # the original keeps its own


def test_a_subset_numbers_its_classes_anew_and_keeps_images_and_names() -> None:
    data = greys()
    keep = [i for i in range(len(data)) if data.labels[i] in (1, 2, 5)][::-1]
    part = data.subset(keep)
    assert part.classes == ["c1", "c2", "c5"]
    assert part.labels.unique().tolist() == [0, 1, 2]
    assert colours(part) == keep
    assert names(part) == [f"c{data.labels[i]}" for i in keep]
    assert part.super_labels is not None and data.super_labels is not None
    assert part.super_labels.tolist() == data.super_labels[keep].tolist()
    again = part.subset(part.labels == 2)
    assert set(names(again)) == {"c5"} and again.labels.tolist() == [0, 0, 0]
    assert colours(again) == [i for i in keep if data.labels[i] == 5]
    assert len(data.subset([])) == 0


def test_pixels_are_the_images_whatever_the_indices() -> None:
    data = greys()
    assert data.pixels().shape == (len(data), 1, 3, 4)
    assert data.subset([7, 2, 9]).pixels([2, 0])[:, 0, 0, 0].tolist() == [9, 7]
    colour = ImageSet("rgb", [Image.new("RGB", (2, 2), (1, 2, 3))], [0], ["c"])
    assert colour.pixels()[0, :, 0, 0].tolist() == [1, 2, 3]
    mixed = ImageSet("mixed", [Image.new("L", (2, 2)), Image.new("L", (2, 3))], [0, 0], ["c"])
    with pytest.raises(ValueError, match=r"pixels: got images of shapes \(2, 2\) and \(3, 2\), wanted one size"):
        mixed.pixels()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [0, 1]}, r"labels: got shape \[2\], wanted \[3\]"),
        ({"labels": [0, 1, 2]}, r"labels: got 0 … 2, wanted 0 … 1"),
        ({"labels": [-1, 1, 0]}, r"labels: got -1 … 1, wanted 0 … 1"),
        ({"super_labels": [0, -2, -1], "super_classes": ["s"]}, r"super_labels: got -2 … 0, wanted -1 … 0"),
    ],
)
def test_labels_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"labels": [0, 1, 0], "classes": ["a", "b"]} | change
    with pytest.raises(ValueError, match=message):
        ImageSet("x", range(3), **given)


def test_indices_outside_the_set_are_refused() -> None:
    with pytest.raises(IndexError, match=r"indices: got 0 … 20, wanted indices of 20 images"):
        greys().subset([0, 20])
    with pytest.raises(ValueError, match="indices: got a mask of 3 entries, wanted 20"):
        greys().subset([True, False, True])
    with pytest.raises(IndexError):
        greys()[20]


# Splits


def test_split_classes_are_disjoint_seeded_and_of_the_size_asked_for() -> None:
    data = greys([2, 3] * 50)
    train, validation = split_classes(data)
    assert (len(train.classes), len(validation.classes)) == (90, 10)
    assert not set(train.classes) & set(validation.classes)
    assert sorted(colours(train) + colours(validation)) == list(range(len(data)))
    assert split_classes(data)[1].classes == validation.classes
    assert split_classes(data, seed=1)[1].classes != validation.classes
    assert len(split_classes(greys([2, 2]), 0.01)[1].classes) == 1  # never an empty side
    assert len(split_classes(greys([2, 2]), 0.99)[0].classes) == 1


def test_the_validation_classes_of_seed_0_stay_the_same_for_ever() -> None:
    assert split_classes(greys([2] * 20), 0.2)[1].classes == ["c2", "c4", "c6", "c19"]


def test_every_class_validates_in_exactly_one_fold() -> None:
    data = greys([2, 3] * 10)
    folds = k_folds(data, 6)
    assert sorted(c for _, validation in folds for c in validation.classes) == sorted(data.classes)
    for train, validation in folds:
        assert not set(train.classes) & set(validation.classes)
        assert len(train) + len(validation) == len(data)
    assert k_folds(data, 6, seed=1)[0][1].classes != folds[0][1].classes


def test_splits_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match="data: got 7 classes, wanted at least 8 to split"):
        k_folds(greys(), 8)
    with pytest.raises(ValueError, match="fraction: got 1, wanted a number between 0 and 1"):
        split_classes(greys(), 1)
    with pytest.raises(ValueError, match="k: got 1, wanted an int >= 2"):
        k_folds(greys(), 1)


def test_a_drawn_gallery_has_one_image_of_each_class_and_keeps_their_numbers() -> None:
    data = greys()
    queries, gallery = draw_gallery(data, seed=3)
    assert sorted(gallery.labels.tolist()) == list(range(7))
    assert queries.classes == gallery.classes == data.classes
    for part in (queries, gallery):
        assert [int(data.labels[i]) for i in colours(part)] == part.labels.tolist()
    assert sorted(colours(queries) + colours(gallery)) == list(range(len(data)))
    assert colours(draw_gallery(data, seed=4)[1]) != colours(gallery)


# With loaders and samplers


def test_a_loader_with_workers_gives_what_the_set_holds() -> None:
    data = greys(transform=np.asarray).subset(range(4, 16))
    loader = DataLoader(data, batch_size=5, num_workers=1)
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert images[:, 0, 0].tolist() == list(range(4, 16))
    assert labels.tolist() == data.labels.tolist()
    assert pickle.loads(pickle.dumps(data)).labels.tolist() == data.labels.tolist()


def test_samplers_take_labels_and_super_labels() -> None:
    data = greys([4] * 12)
    batch = list(MPerClassSampler(data.labels, m=3, batch_size=12, length_before_new_iter=12, seed=0))
    assert data.labels[batch].unique(return_counts=True)[1].tolist() == [3] * 4
    assert data.super_labels is not None
    for batch in CategorySampler(data.labels, data.super_labels, batch_size=16, seed=0):
        assert data.super_labels[batch].tolist() in ([0] * 8 + [1] * 8, [1] * 8 + [0] * 8)


def test_the_package_imports_without_what_only_images_need() -> None:
    hide = "import sys; sys.modules.update(dict.fromkeys(('PIL', 'fontTools', 'matplotlib', 'scipy')))"
    subprocess.run([sys.executable, "-c", f"{hide}; import pydml.data.cli"], check=True)
