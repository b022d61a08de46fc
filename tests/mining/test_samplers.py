"""Samplers: what is in a batch, what an epoch covers, resuming, and ranks that share a batch."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pydml.samplers import CategorySampler, MPerClassSampler

LABELS = torch.arange(100).repeat_interleave(torch.arange(100) % 7 + 1) * 3 - 50  # class sizes 1 … 7
LABELS = LABELS[torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(0))]


def in_batches(indices: list[int], size: int) -> list[list[int]]:
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def per_class(**more: Any) -> MPerClassSampler:
    return MPerClassSampler(LABELS, **({"m": 4, "batch_size": 24, "length_before_new_iter": 500, "seed": 1} | more))


def hierarchy(categories: int, classes: int, items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and categories of equal classes, shuffled; class c is in category c % categories."""
    labels = torch.arange(categories * classes).repeat_interleave(items)
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    return labels, labels % categories


def by_category(**more: Any) -> CategorySampler:
    labels, categories = hierarchy(6, 9, 5)
    return CategorySampler(labels, categories, **({"batch_size": 24, "batches_per_pair": 2, "seed": 1} | more))


MAKERS = pytest.mark.parametrize("make", [per_class, by_category], ids=["m_per_class", "category"])


# M per class


def test_each_batch_has_m_items_of_each_of_its_classes() -> None:
    sampler = per_class()
    indices = list(sampler)
    assert len(indices) == len(sampler) == 480  # 500 rounded down to whole batches
    sizes = Counter(LABELS.tolist())
    seen = set()
    for batch in in_batches(indices, 24):
        counts = Counter(LABELS[batch].tolist())
        assert sorted(counts.values()) == [4] * 6
        for label in counts:
            different = len({i for i in batch if LABELS[i] == label})
            assert different == 4 if sizes[label] >= 4 else different <= sizes[label]
        seen.update(counts)
    assert len(seen) > 60  # 120 draws of 100 classes


def test_every_class_and_item_comes_as_often_as_any_other() -> None:
    labels = torch.arange(60) // 6
    indices = torch.tensor(list(MPerClassSampler(labels, 3, 12, 60000, seed=2)))
    counts = indices.bincount(minlength=60).double()
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()


def test_without_a_batch_size_a_pass_has_every_class_in_random_order() -> None:
    sampler = MPerClassSampler(LABELS, 2, length_before_new_iter=500, seed=0)
    indices = list(sampler)
    assert len(indices) == len(sampler) == 400
    passes = [LABELS[batch].tolist() for batch in in_batches(indices, 200)]
    for labels in passes:
        assert set(Counter(labels).values()) == {2} and len(set(labels)) == 100
    assert passes[0] != passes[1]
    longer = MPerClassSampler(LABELS, 2, length_before_new_iter=50, seed=0)
    assert len(list(longer)) == len(longer) == 200  # at least one pass


@pytest.mark.parametrize(("batch_size", "length"), [(24, 500), (24, 24), (None, 500), (None, 401)])
def test_length_is_that_of_pml(batch_size: int | None, length: int) -> None:
    samplers = pytest.importorskip(
        "pytorch_metric_learning.samplers", reason="pytorch-metric-learning is not installed"
    )
    theirs = samplers.MPerClassSampler(LABELS, 4, batch_size, length)
    assert len(MPerClassSampler(LABELS, 4, batch_size, length)) == len(theirs)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor, lambda y: torch.tensor(y, dtype=torch.int16)])
def test_labels_may_be_a_list_an_array_or_a_tensor(kind: Any) -> None:
    labels = [0, 0, 1, 1, 1, 5, 5]
    got = list(MPerClassSampler(kind(labels), 2, 4, 40, seed=3))
    assert got == list(MPerClassSampler(labels, 2, 4, 40, seed=3))
    assert all(type(i) is int for i in got)


def test_without_a_seed_torch_decides() -> None:
    def draw(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return list(MPerClassSampler(LABELS, 4, 24, 240))

    assert draw(1) == draw(1) != draw(2)


# Categories


@pytest.mark.parametrize(("categories", "per_pair", "batches"), [(12, 5, 330), (23, 2, 506)], ids=["SOP", "In-Shop"])
def test_an_epoch_has_the_batches_of_the_paper(categories: int, per_pair: int, batches: int) -> None:
    labels, of = hierarchy(categories, 12, 5)
    sampler = CategorySampler(labels, of, 32, per_pair, seed=0)
    epoch = list(sampler)
    assert len(epoch) == len(sampler) == batches
    pairs = Counter(tuple(sorted(set(of[batch].tolist()))) for batch in epoch)
    assert pairs == dict.fromkeys(combinations(range(categories), 2), per_pair)
    orders = [[set(of[batch].tolist()) for batch in batches] for batches in (epoch, list(sampler))]
    assert orders[0] != orders[1]


def test_half_a_batch_comes_from_each_category_in_whole_classes() -> None:
    labels, categories = hierarchy(6, 9, 5)
    for batch in by_category():
        assert len(set(batch)) == 24
        for half in (batch[:12], batch[12:]):
            assert len(set(categories[half].tolist())) == 1
            sizes = list(Counter(labels[half].tolist()).values())
            assert sizes == [5, 5, 2]  # only the last class is cut


def test_every_item_is_drawn_in_the_long_run() -> None:
    sampler = by_category(batches_per_pair=20)
    counts = torch.tensor([i for batch in sampler for i in batch]).bincount(minlength=270).double()
    assert counts.sum() == 300 * 24
    assert (counts > 0).all() and counts.max() < 3 * counts.mean()


def test_a_small_category_starts_over() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, *range(2, 22)])
    categories = torch.tensor([0] * 5 + [1] * 20)
    sampler = CategorySampler(labels, categories, 24, 1, seed=0)
    (batch,) = sampler
    assert sorted(Counter(i for i in batch if i < 5).values()) == [2, 2, 2, 3, 3]
    assert len({i for i in batch if i >= 5}) == 12


def test_a_labelled_category_is_paired_with_unlabelled_classes() -> None:
    """As for VehicleID: category c of N_c items comes round(2·N_c/M) times."""
    sizes = [47, 33, 3, 102]
    labels = torch.arange(185 + 120) // 4 * 10  # classes of four; those across a border are parted below
    categories = torch.cat((torch.arange(4).repeat_interleave(torch.tensor(sizes)), torch.full((120,), -1)))
    labels = labels + categories + 1
    sampler = CategorySampler(labels, categories, 20, seed=0)
    times = Counter()
    for batch in sampler:
        assert len(batch) == 20
        (category,) = set(categories[batch[:10]].tolist())
        times[category] += 1
        assert set(categories[batch[10:]].tolist()) == {-1}
        assert len(set(batch[10:])) == 10
    assert times == {0: 5, 1: 3, 2: 1, 3: 10}
    assert len(sampler) == 19


# Place


@MAKERS
def test_one_seed_gives_one_sequence_of_epochs(make: Any) -> None:
    ours, same, other = make(), make(), make(seed=2)
    first, second = list(ours), list(ours)
    assert first == list(same) and second == list(same)
    assert first != second
    assert list(other) != first
    ours.set_epoch(0)
    assert list(ours) == first
    assert ours.epoch == 1


@MAKERS
@pytest.mark.parametrize("stop", [1, 5, 19])
def test_a_run_resumes_where_it_stopped(make: Any, stop: int) -> None:
    whole, run = make(), make()
    epochs = [list(whole) for _ in range(3)]
    list(run)
    going, taken = iter(run), []
    unit = 24 if make is per_class else 1
    for _ in range(stop * unit):
        taken.append(next(going))
    state = run.state_dict()
    assert state == {"seed": 1, "epoch": 1, "batch": stop}
    resumed = make(seed=7)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)  # a training loop says so too; the place is kept
    assert taken + list(resumed) == epochs[1]
    assert list(resumed) == epochs[2]


def test_a_batch_that_was_not_finished_is_repeated_whole() -> None:
    run = per_class()
    going = iter(run)
    for _ in range(24 + 23):
        next(going)
    assert run.state_dict()["batch"] == 1
    next(going)
    assert run.state_dict()["batch"] == 2


@MAKERS
def test_an_abandoned_epoch_is_not_gone_on_with(make: Any) -> None:
    ours, whole = make(), make()
    epochs = [list(whole) for _ in range(2)]
    next(iter(ours))
    assert list(ours) == epochs[1]
    for _ in range(2):  # the same epoch twice
        ours.set_epoch(0)
        going = iter(ours)
        for expected in epochs[0][:50]:
            assert next(going) == expected
    ours.set_epoch(1, batch=3)
    assert list(ours) == epochs[1][3 * (24 if make is per_class else 1) :]


@MAKERS
def test_state_says_what_it_lacks(make: Any) -> None:
    sampler = make()
    with pytest.raises(ValueError, match="state: got"):
        sampler.load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match="batch: got 1000, wanted at most"):
        sampler.set_epoch(0, 1000)
    with pytest.raises(ValueError, match="epoch: got -1"):
        sampler.set_epoch(-1)
    assert sampler.state_dict() == {"seed": 1, "epoch": 0, "batch": 0}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_goes_through_one_epoch_at_a_time(workers: int) -> None:
    data = TensorDataset(torch.arange(len(LABELS)))
    by_index, by_batch = per_class(length_before_new_iter=96), by_category(batches_per_pair=1)
    for sampler, arguments in (
        (by_index, {"sampler": by_index, "batch_size": 24}),
        (by_batch, {"batch_sampler": by_batch}),
    ):
        loader = DataLoader(data, num_workers=workers, **arguments)
        for epoch in range(2):
            got = [batch.tolist() for (batch,) in loader]
            assert got == [sampler.global_batch(epoch, number).tolist() for number in range(sampler.batches)]
            assert sampler.epoch == epoch + 1


# Ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_each_batch_in_whole_classes(world_size: int) -> None:
    ranks = [per_class(m=2, rank=r, world_size=world_size) for r in range(world_size)]
    shares = [in_batches(list(rank), 24 // world_size) for rank in ranks]
    assert [len(rank) for rank in ranks] == [480 // world_size] * world_size
    for number, parts in enumerate(zip(*shares, strict=True)):
        assert [i for part in parts for i in part] == ranks[0].global_batch(0, number).tolist()
        for part in parts:
            assert set(Counter(LABELS[part].tolist()).values()) == {2}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_rank_has_its_part_of_both_categories(world_size: int) -> None:
    _, categories = hierarchy(6, 9, 5)
    ranks = [by_category(rank=r, world_size=world_size) for r in range(world_size)]
    for number, parts in enumerate(zip(*ranks, strict=True)):
        together = [i for part in parts for i in part]
        assert sorted(together) == sorted(ranks[0].global_batch(0, number).tolist())
        assert len(set(together)) == 24  # disjoint
        for part in parts:
            assert sorted(Counter(categories[part].tolist()).values()) == [12 // world_size] * 2


@MAKERS
def test_ranks_resume_together(make: Any) -> None:
    ranks = [make(rank=r, world_size=2) for r in range(2)]
    for rank in ranks:
        rank.load_state_dict({"seed": 9, "epoch": 4, "batch": 2})
        going = iter(rank)
        part = [next(going) for _ in range(12)] if make is per_class else next(going)
        assert set(part) <= set(make(seed=9).global_batch(4, 2).tolist())


# Arguments


@pytest.mark.parametrize(
    ("make", "change", "error", "words"),
    [
        (per_class, {"m": 0}, ValueError, "m: got 0"),
        (per_class, {"m": 5}, ValueError, "batch_size: got 24, wanted a multiple of m=5"),
        (per_class, {"batch_size": 404}, ValueError, "batch_size: got 404, wanted at most m x number of classes = 4 x"),
        (per_class, {"batch_size": 24.0}, TypeError, "batch_size: got 24.0"),
        (per_class, {"length_before_new_iter": 20}, ValueError, "length_before_new_iter: got 20, wanted at least"),
        (per_class, {"world_size": 5}, ValueError, "batch_size: got 24, wanted a multiple of world_size=5"),
        (per_class, {"world_size": 2, "batch_size": None}, ValueError, "batch_size: got None"),
        (per_class, {"world_size": 2, "seed": None}, ValueError, "seed: got None, wanted the same int on all ranks"),
        (per_class, {"world_size": 2, "rank": 2}, ValueError, "rank: got 2, wanted one below world_size=2"),
        (per_class, {"seed": -1}, ValueError, "seed: got -1"),
        (by_category, {"batch_size": 25}, ValueError, "batch_size: got 25, wanted a multiple of 2 x world_size = 2"),
        (by_category, {"world_size": 8}, ValueError, "batch_size: got 24, wanted a multiple of 2 x world_size = 16"),
        (by_category, {"batches_per_pair": 0}, ValueError, "batches_per_pair: got 0"),
        (by_category, {"world_size": 0}, ValueError, "world_size: got 0"),
    ],
)
def test_bad_arguments_are_named(make: Any, change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        make(**change)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    ("labels", "categories", "error", "words"),
    [
        ([], [], ValueError, "labels: got no entries"),
        ([[1]], [0], ValueError, "labels: got shape [1, 1]"),
        ([0.5], [0], TypeError, "labels: got dtype float64"),
        ([0, 1], [0], ValueError, "categories: got 1 entries, wanted 2"),
        ([0, 1], [0, -2], ValueError, "categories: got -2"),
        ([0, 1], [0, 0], ValueError, "categories: got [0], wanted at least two different ones"),
        ([0, 1], [-1, -1], ValueError, "categories: got [-1], wanted at least two different ones, or one beside -1"),
        ([0, 7, 7], [0, 0, 1], ValueError, "categories: class 7 is in [0, 1], wanted one category a class"),
    ],
)
def test_bad_labels_are_named(labels: Any, categories: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        CategorySampler(labels, categories, 2)
    assert str(raised.value).startswith(words)
    if words.startswith("labels"):
        with pytest.raises(error) as raised:
            MPerClassSampler(labels, 1)
        assert str(raised.value).startswith(words)
