"""Columns that are seen piece by piece, as ranks and long memories do: what the pieces give makes up the whole.

``pair`` by sides and with bounds, and the ops that know positives by their similarity: against, below, above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from dense_ops import DENSE
from helpers import FUSED, generator
from torch import Tensor

from pydml import ops
from pydml.declared import Above, Against, Below, Pair
from pydml.losses.batch import logaddexp
from pydml.policy import POLICIES, LogSumExp

pytestmark = pytest.mark.sanitize

ON_FUSED = pytest.mark.parametrize("backend", FUSED)
EPSILON = 0.3
PARAMS = {"exponential": [-2.0, 0.5, 20.0, 0.5], "binomial": [2.0, 20.0, 0.5], "mean": []}
ON_MINING = pytest.mark.parametrize("policy", PARAMS)
HOW: dict[str, Any] = {"row_field": None, "col_field": None, "normalize": True, "pool_size": 1, "sharpness": 1.0}
#: Pieces of 400 columns: of some, of none, of most, of the rest.
PIECES = (slice(0, 7), slice(7, 7), slice(7, 300), slice(300, 400))


def whole(policy: str, epsilon: float | None, dtype: torch.dtype = torch.float64, **other: Any) -> Pair:
    """A call on 37 rows that are some of 400 columns; some classes are in one piece only, and some rows' in none."""
    g = generator(3)
    labels = torch.randint(12, (400,), generator=g).sort().values
    labels[200:] = torch.randint(12, (200,), generator=g)
    cols = torch.randn(12, 9, generator=g, dtype=torch.float64)[labels]
    cols = (cols + torch.randn(400, 9, generator=g, dtype=torch.float64)).to(dtype)
    selves = torch.randperm(400, generator=g)[:37]
    rows, row_labels = cols[selves] + 0.1, labels[selves]
    row_labels[3] = 99
    selves[3] = -1
    return Pair(
        rows.requires_grad_(), cols.requires_grad_(), row_labels, labels, policy=policy, params=PARAMS[policy],
        view="dot", epsilon=epsilon, selves=selves, **(HOW | other),
    )  # fmt: skip


def piece(a: Pair, at: slice, **other: Any) -> Pair:
    """The same rows and some of the columns."""
    assert a.cols is not None and a.col_labels is not None and a.selves is not None
    here = (a.selves >= at.start) & (a.selves < at.stop)
    selves = torch.where(here, a.selves - at.start, -1)
    return replace(a, cols=a.cols[at], col_labels=a.col_labels[at], selves=selves, **other)


def merged(policy: str, parts: Sequence[Tensor]) -> Tensor:
    """Statistics [R, K] of all pieces from those of each."""
    columns = []
    for k, slot in enumerate(POLICIES[policy].slots):
        of_parts = [part[:, k] for part in parts]
        columns.append(reduce(logaddexp if isinstance(slot, LogSumExp) else torch.add, of_parts))
    return torch.stack(columns, 1)


def gradients(a: Pair, stats: Tensor) -> list[Tensor]:
    """Of rows and columns, from uneven weights of the finite statistics that have any."""
    moving = [float(not getattr(slot, "constant", False)) for slot in POLICIES[a.policy].slots]
    weights = torch.linspace(0.5, 2, len(stats), dtype=stats.dtype)[:, None] * torch.tensor(moving, dtype=stats.dtype)
    assert a.cols is not None
    return list(torch.autograd.grad((torch.where(stats.isfinite(), stats, 0) * weights).sum(), [a.rows, a.cols]))


def assert_same(a: Pair, got: Tensor, want: Tensor) -> None:
    """Values and gradients."""
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    for mine, other in zip(gradients(a, got), gradients(a, want), strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


# Pairs by sides and bounds


@ON_FUSED
@pytest.mark.parametrize("side", ["both", "positives", "negatives"])
@ON_MINING
def test_pieces_make_up_the_whole(policy: str, side: str, backend: str) -> None:
    a = whole(policy, None, side=side)
    parts = [ops.call(piece(a, at), backend)[0] for at in PIECES]
    assert_same(a, merged(policy, parts), DENSE["pair"](a)[0])


@ON_FUSED
@ON_MINING
def test_both_sides_one_after_the_other_make_up_the_whole(policy: str, backend: str) -> None:
    """Statistics of a side that is not visited are those of nothing."""
    a = whole(policy, None)
    parts = [ops.call(replace(a, side=side), backend)[0] for side in ("positives", "negatives")]
    for part, side in zip(parts, ("positives", "negatives"), strict=True):
        for k, slot in enumerate(POLICIES[policy].slots):
            if slot.side != side:
                assert (part[:, k] == (-torch.inf if isinstance(slot, LogSumExp) else 0)).all()
    assert_same(a, merged(policy, parts), DENSE["pair"](a)[0])


@ON_FUSED
@pytest.mark.parametrize("side", ["both", "positives", "negatives"])
@ON_MINING
def test_pieces_with_known_thresholds_make_up_the_mined_whole(policy: str, side: str, backend: str) -> None:
    a = whole(policy, EPSILON)
    _, thresholds = DENSE["pair"](a)
    a = replace(a, side=side, bounds=thresholds)
    found = [ops.call(piece(a, at), backend) for at in PIECES]
    assert_same(a, merged(policy, [stats for stats, *_ in found]), DENSE["pair"](a)[0])
    for at, (_, kept, _) in zip(PIECES, found, strict=True):
        want = DENSE["pair"](piece(a, at))[1]
        torch.testing.assert_close(kept, want, rtol=1e-12, atol=1e-12)
        assert torch.equal(kept[:, 1], thresholds[:, 1])
        assert side == "negatives" or torch.equal(kept, thresholds)
    moved = ops.call(replace(a, bounds=thresholds + torch.tensor([-0.5, 0.5])), backend)[0]  # fewer pairs
    assert not torch.allclose(moved, DENSE["pair"](a)[0])  # the test would see other thresholds


@ON_FUSED
@ON_MINING
def test_three_phases_over_pieces_mine_the_whole(policy: str, backend: str) -> None:
    """Least similar positives; negatives above them, and the most similar negative; positives below that."""
    a = whole(policy, EPSILON)
    want, thresholds = DENSE["pair"](a)

    first = [ops.call(piece(a, at, side="positives"), backend) for at in PIECES]
    for at, (stats, found, _) in zip(PIECES, first, strict=True):
        torch.testing.assert_close(found[:, 1], DENSE["pair"](piece(a, at, side="positives"))[1][:, 1])
        assert torch.equal(merged(policy, [stats]), DENSE["pair"](piece(a, PIECES[1]))[0])  # nothing is kept yet
    least = torch.stack([found[:, 1] for _, found, _ in first]).amin(0)
    torch.testing.assert_close(least, thresholds[:, 1], rtol=1e-12, atol=1e-12)

    bounds = torch.stack((torch.full_like(least, torch.nan), least), 1)  # the first is not looked at
    second = [ops.call(piece(a, at, side="negatives", bounds=bounds), backend) for at in PIECES]
    for at, (_, found, _) in zip(PIECES, second, strict=True):
        highest = DENSE["pair"](piece(a, at, side="negatives"))[1][:, 0]
        torch.testing.assert_close(found[:, 0], highest, rtol=1e-12, atol=1e-12)
        assert torch.equal(found[:, 1], least)
    most = torch.stack([found[:, 0] for _, found, _ in second]).amax(0)
    torch.testing.assert_close(most, thresholds[:, 0], rtol=1e-12, atol=1e-12)

    bounds = torch.stack((most, least), 1)
    third = [ops.call(piece(a, at, side="positives", bounds=bounds), backend) for at in PIECES]
    assert all(torch.equal(found, bounds) for _, found, _ in third)
    assert_same(a, merged(policy, [stats for stats, *_ in (*second, *third)]), want)


@ON_FUSED
@pytest.mark.parametrize("epsilon", [None, EPSILON])
@pytest.mark.parametrize("view", ["dot", "cosine", "euclidean", "squared"])
def test_sides_and_bounds_where_the_columns_are_the_rows(view: str, epsilon: float | None, backend: str) -> None:
    """Half of the tiles stand for all of them."""
    given = whole("exponential", epsilon)
    a = replace(given, cols=None, col_labels=None, selves=None, view=view)
    want, thresholds = DENSE["pair"](a)
    bounds = thresholds.detach() if epsilon is not None else None
    parts = [ops.call(replace(a, side=side, bounds=bounds), backend)[0] for side in ("positives", "negatives")]
    got = merged(a.policy, parts)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    (mine,), (other,) = (
        torch.autograd.grad(torch.where(stats.isfinite(), stats, 0).sum(), [a.rows]) for stats in (got, want)
    )
    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@ON_FUSED
@ON_MINING
def test_pieces_in_single_precision(policy: str, backend: str) -> None:
    a = whole(policy, EPSILON, torch.float32)
    want, thresholds, _ = ops.call(a, backend)
    parts = [ops.call(piece(a, at, bounds=thresholds), backend)[0] for at in PIECES]
    torch.testing.assert_close(merged(policy, parts), want, rtol=1e-5, atol=1e-5)


# Positives that are known by their similarity


def matrix(rows: int, cols: int | None, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Rows, columns and labels; of five classes, of which one is in the rows only."""
    g = generator(rows, cols or 0)
    z, y = torch.randn(rows, 6, generator=g, dtype=torch.float64), torch.randint(5, (rows,), generator=g)
    if cols is None:
        return z.to(dtype), None, y, None
    return z.to(dtype), torch.randn(cols, 6, generator=g, dtype=torch.float64).to(dtype), y, torch.randint(
        4, (cols,), generator=g
    )  # fmt: skip


def known(rows: int, most: int, low: float, high: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Similarities of up to ``most`` positives of each row in no order, +inf where there are fewer; some have none."""
    g = generator(rows, most)
    u = torch.rand(rows, most, generator=g, dtype=torch.float64) * (high - low) + low
    u[torch.rand(rows, most, generator=g) < 0.3] = torch.inf
    u[::7] = torch.inf
    return u.to(dtype)


SHAPES = [(1, 1), (3, 5), (37, 140), (130, 65), (70, 333), (9, None), (70, None), (150, None), (4, 0), (0, 4)]
ON_SHAPES = pytest.mark.parametrize(("rows", "cols"), SHAPES, ids=str)
ON_NUMBERS = pytest.mark.parametrize("most", [0, 1, 5])
RANGES = {"dot": (-1.0, 1.0), "cosine": (-1.0, 1.0), "euclidean": (-2.0, 0.0), "squared": (-4.0, 0.0)}
ON_VIEWS = pytest.mark.parametrize("view", RANGES)


@ON_FUSED
@ON_SHAPES
@ON_NUMBERS
@ON_VIEWS
@pytest.mark.parametrize("smooth", [True, False], ids=["smooth", "hinge"])
def test_negatives_against_known_positives(
    rows: int, cols: int | None, most: int, view: str, smooth: bool, backend: str
) -> None:
    """Values and all three gradients."""
    z, w, *labels = matrix(rows, cols)
    positives = known(rows, most, *RANGES[view]).requires_grad_()
    leaves = [z.requires_grad_(), *([] if w is None else [w.requires_grad_()]), positives]
    a = Against(z, w, *labels, positives, margin=0.2, smooth=smooth, view=view, normalize=True)
    weights = torch.linspace(0.5, 2, rows, dtype=z.dtype)
    found = []
    for total, above in (ops.call(a, backend), DENSE["against"](a)):
        found.append((total, above, *torch.autograd.grad((total * weights).sum(), leaves, allow_unused=True)))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other, rtol=1e-9, atol=1e-10)


@ON_FUSED
def test_only_the_gradients_that_are_asked_for_are_there(backend: str) -> None:
    z, w, *labels = matrix(37, 140)
    positives = known(37, 3, -1, 1)
    for wanted in (0, 1, 2):
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((z, w, positives))]
        a = Against(*leaves[:2], *labels, leaves[2], margin=0.2, smooth=False, view="dot", normalize=True)
        ops.call(a, backend)[0].sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(3)]


@ON_FUSED
@pytest.mark.parametrize("pieces", [2, 5])
@pytest.mark.parametrize("smooth", [True, False], ids=["smooth", "hinge"])
def test_triplets_over_pieces_of_negatives_make_up_the_whole(pieces: int, smooth: bool, backend: str) -> None:
    z, w, y, v = matrix(37, 140)
    how = {"margin": 0.2, "smooth": smooth, "view": "dot", "normalize": True}
    positives = known(37, 3, -1, 1)
    want = DENSE["against"](Against(z, w, y, v, positives, **how))
    parts = [
        ops.call(Against(z, cols, y, labels, positives, **how), backend)
        for cols, labels in zip(w.chunk(pieces), v.chunk(pieces), strict=True)
    ]
    for whole_of, of_parts in zip(want, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(sum(of_parts), whole_of)


@ON_FUSED
@pytest.mark.parametrize("smooth", [True, False], ids=["smooth", "hinge"])
@pytest.mark.parametrize(
    ("where", "bad"),
    [("rows", torch.nan), ("rows", torch.inf), ("cols", torch.nan), ("cols", -torch.inf), ("positives", torch.nan)],
)
def test_nan_in_known_triplets_comes_out(where: str, bad: float, smooth: bool, backend: str) -> None:
    """No comparison hides it, forward or backward. A positive of +inf is none."""
    z, w, *labels = matrix(9, 20)
    sides = {"rows": z, "cols": w, "positives": known(9, 3, -1, 1)}
    sides[where][2, 1] = bad
    for side in sides.values():
        side.requires_grad_()
    a = Against(sides["rows"], sides["cols"], *labels, sides["positives"], 0.2, smooth, "dot", True)
    total, above = ops.call(a, backend)
    assert total.isnan().all()
    assert above.isnan().all()
    for grad in torch.autograd.grad(total.sum(), list(sides.values())):
        assert grad.isnan().all()


@ON_FUSED
@ON_SHAPES
@ON_NUMBERS
@ON_VIEWS
def test_the_most_similar_negative_below_each_bound(
    rows: int, cols: int | None, most: int, view: str, backend: str
) -> None:
    a = Below(*matrix(rows, cols), known(rows, most, *RANGES[view]), view=view, normalize=True)
    (n, u), (want_n, want_u) = ops.call(a, backend), DENSE["below"](a)
    assert torch.equal(n, want_n)
    torch.testing.assert_close(u, want_u, rtol=1e-12, atol=1e-12)
    assert rows < 9 or not cols or most == 0 or ((n >= 0).any() and (n < 0).any())


@ON_FUSED
@ON_SHAPES
@ON_NUMBERS
@pytest.mark.parametrize("normalize", [True, False])
def test_negatives_above_each_bound_are_counted(
    rows: int, cols: int | None, most: int, normalize: bool, backend: str
) -> None:
    a = Above(*matrix(rows, cols), known(rows, most, -1, 1), normalize=normalize)
    number = ops.call(a, backend)
    assert number.shape == (2, rows, most)
    assert torch.equal(number, DENSE["above"](a))


def whole_numbers(rows: int, cols: int | None) -> tuple[Any, ...]:
    """Vectors of small whole numbers, whose products are exact: many of them are equal."""
    z, w, *labels = matrix(rows, cols)
    return z.round(), None if w is None else w.round(), *labels


@ON_FUSED
@pytest.mark.parametrize(("rows", "cols"), [(37, 140), (70, 333), (70, None)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_ties_with_a_bound_are_neither_below_nor_above_it(
    rows: int, cols: int | None, dtype: torch.dtype, backend: str
) -> None:
    """Ties of negatives go to the smallest column; of bounds, each is its own."""
    given = tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
                  for t in whole_numbers(rows, cols))  # fmt: skip
    bounds = known(rows, 4, -5, 5, dtype).round()
    bounds[:, 1] = bounds[:, 0]
    below, above = Below(*given, bounds, view="dot", normalize=False), Above(*given, bounds, normalize=False)
    assert all(map(torch.equal, ops.call(below, backend), DENSE["below"](below)))
    over, reach = ops.call(above, backend)
    assert torch.equal(torch.stack((over, reach)), DENSE["above"](above))
    assert (over < reach).any()  # there are ties
    against = Against(*given, bounds, margin=1.0, smooth=False, view="dot", normalize=False)
    assert all(map(torch.equal, ops.call(against, backend), DENSE["against"](against)))  # no loss of exactly 0 counts


@ON_FUSED
def test_a_bound_of_nan_has_nothing_below_or_above_it(backend: str) -> None:
    given = matrix(9, 20)
    bounds = known(9, 3, -1, 1)
    bounds[:, 1] = torch.nan
    n, u = ops.call(Below(*given, bounds, view="dot", normalize=True), backend)
    assert (n[:, 1] == -1).all() and (u[:, 1] == -torch.inf).all()
    assert (ops.call(Above(*given, bounds, normalize=True), backend)[:, :, 1] == 0).all()
    others = bounds[:, ::2].contiguous()
    want = DENSE["above"](Above(*given, others, normalize=True))
    assert torch.equal(ops.call(Above(*given, bounds, normalize=True), backend)[:, :, ::2], want)
