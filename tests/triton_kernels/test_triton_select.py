"""extremes, mined and sample in Triton, in the interpreter, against the tiled engines: the same pairs, with ties."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import generator, make_batch
from triton_cases import REGIMES, SHAPES, assert_equal, lattice, needs_triton, tiled, triton

import pydml

pytestmark = needs_triton

STRATEGIES = [pair for pair in itertools.product(("easy", "hard", "semihard"), repeat=2) if pair != ("semihard",) * 2]
VIEWS = ("dot", "cosine", "euclidean", "squared")


@pytest.mark.parametrize("shape", [(70, None, 5), (33, 70, 9)])
@pytest.mark.parametrize("regime", REGIMES)
def test_extremes_are_those_of_tiled_in_every_regime(regime: str, shape: tuple[int, int | None, int]) -> None:
    for number, strategy in enumerate(STRATEGIES):
        arguments = (*lattice(regime, *shape), *strategy, VIEWS[number % 4], False)
        assert_equal(triton("extremes", *arguments), tiled("extremes", *arguments))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("view", VIEWS)
def test_extremes_and_mined_pairs_of_ragged_shapes_are_those_of_tiled(
    view: str, shape: tuple[int, int | None, int]
) -> None:
    matrix = lattice("random", *shape)
    arguments = (*matrix, "hard", "semihard", view, False)
    assert_equal(triton("extremes", *arguments), tiled("extremes", *arguments))
    assert_equal(triton("mined", *matrix, 1.0, view, False), tiled("mined", *matrix, 1.0, view, False))


@pytest.mark.parametrize("epsilon", [None, 0.0, 2.5])
@pytest.mark.parametrize("regime", REGIMES)
def test_mined_pairs_are_those_of_tiled_in_order(regime: str, epsilon: float | None) -> None:
    for cols in (None, 33):
        arguments = (*lattice(regime, 70, cols, 16), epsilon, "dot", False)
        assert_equal(triton("mined", *arguments), tiled("mined", *arguments))


def test_normalised_clusters_choose_as_tiled_does() -> None:
    z, labels = make_batch("trained", 70, 33, 9, dtype=torch.float32)
    for strategy in STRATEGIES:
        arguments = (z, None, labels, None, *strategy, "euclidean", True)
        assert_equal(triton("extremes", *arguments), tiled("extremes", *arguments))
    assert_equal(
        triton("mined", z, None, labels, None, 0.1, "dot", True),
        tiled("mined", z, None, labels, None, 0.1, "dot", True),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_chooses_as_tiled_does(dtype: torch.dtype) -> None:
    matrix = lattice("clusters", 70, 33, 31, dtype)
    arguments = (*matrix, "easy", "hard", "dot", False)
    assert_equal(triton("extremes", *arguments), tiled("extremes", *arguments))
    assert_equal(triton("mined", *matrix, 1.0, "dot", False), tiled("mined", *matrix, 1.0, "dot", False))


@pytest.mark.parametrize("view", ["cosine", "euclidean", "squared"])
def test_equal_columns_are_equals_whatever_else_is_in_their_tiles(view: str) -> None:
    """Sorted, columns 0 and 69 stand in different tiles; one of these has pairs too near for 2-2S, the other not."""
    z = torch.randn(70, 33, generator=generator(3))
    z[69] = z[0]
    z[66] = z[65] * (1 + 1e-6)
    labels = torch.arange(70)
    labels[1:65] = 1  # 64 rows of one class, between the two
    arguments = (z, None, labels, None, "hard", "hard", view, True)
    _, n = triton("extremes", *arguments)
    assert not (n == 69)[1:65].any()
    arguments = (z[65:66], z, labels[65:66], labels.index_fill(0, torch.arange(1, 69), 65), "hard", "hard", view, True)
    assert triton("extremes", *arguments)[1].tolist() == [0]


@pytest.mark.parametrize("size", [(0, None), (0, 5), (5, 0)])
def test_without_rows_or_columns_there_is_nothing_to_choose(size: tuple[int, int | None]) -> None:
    matrix = lattice("random", *size, 4)
    for name, rest in (("extremes", ("easy", "hard", "dot", True)), ("mined", (0.1, "dot", True))):
        assert_equal(triton(name, *matrix, *rest), tiled(name, *matrix, *rest))
    anchors, seed = torch.arange(size[0]), torch.tensor([1])
    assert triton("sample", *matrix, anchors, seed, 0.5, 1.4).tolist() == [-1] * size[0]


def test_nan_stays_in_sight() -> None:
    z, labels = make_batch("random", 33, 8, 4, dtype=torch.float32)
    z[5, 3] = torch.nan
    p, n = triton("extremes", z, None, labels, None, "easy", "hard", "dot", True)
    assert bool(((p >= -1) & (p < 33) & (n >= -1) & (n < 33)).all())
    assert pydml.losses.ExtremeTripletLoss()(z, labels, backend="triton").isnan()


# Distance-weighted sampling


@pytest.mark.parametrize("shape", [(70, None, 5), (33, 70, 16), (1, 70, 33), (70, None, 3), (40, None, 2)])
def test_draws_are_those_of_tiled(shape: tuple[int, int | None, int]) -> None:
    rows, cols, dim = shape
    z, labels = make_batch("random", rows, dim, 5, dtype=torch.float32)
    ref, ref_labels = (None, None) if cols is None else make_batch("random", cols, dim, 5, 1, torch.float32)
    anchors = torch.randint(rows, (45,), generator=generator(*(n or 0 for n in shape)))
    for seed in (0, -1, 123456789012345678):
        arguments = (z, ref, labels, ref_labels, anchors, torch.tensor([seed]), 0.5, 1.4)
        drawn = triton("sample", *arguments)
        assert torch.equal(drawn, tiled("sample", *arguments))
        assert bool((drawn >= 0).any())


def test_only_negatives_within_reach_are_drawn() -> None:
    z = torch.eye(40)  # all distances are √2
    labels = torch.arange(40) % 2
    anchors, seed = torch.arange(40).repeat(3), torch.tensor([7])
    drawn = triton("sample", z, None, labels, None, anchors, seed, 0.5, 1.42)
    assert bool((labels[drawn] != labels[anchors]).all())
    assert len(drawn.unique()) > 20
    assert triton("sample", z, None, labels, None, anchors, seed, 0.5, 1.41).eq(-1).all()
    assert triton("sample", z, None, labels * 0, None, anchors, seed, 0.5, 1.42).eq(-1).all()


def test_uniforms_are_bit_for_bit_those_of_tiled() -> None:
    """Equal weights, so that the draw is the argmax of the noise alone."""
    z, labels = torch.eye(64), torch.arange(64)
    anchors = torch.arange(64)
    seed = torch.tensor([2**62 + 12345])
    u = pydml.tiled.select.uniform(seed, torch.arange(64 * 64)).reshape(64, 64)
    u.fill_diagonal_(0)
    assert torch.equal(triton("sample", z, None, labels, None, anchors, seed, 0.5, 1.5), u.argmax(1))
