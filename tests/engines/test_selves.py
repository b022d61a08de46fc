"""Rows that are some of the columns: the ops that take ``selves`` against the whole matrix in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_ops import DENSE
from helpers import FUSED, assert_close
from torch import Tensor

import pydml
from pydml import ops
from pydml.declared import CALLS, Positives, op

pytestmark = pytest.mark.sanitize

ON_FUSED = pytest.mark.parametrize("backend", FUSED)
ROWS, DIM = 37, 9
VIEWS = ("dot", "cosine", "euclidean", "squared")
MS = ("exponential", [-2.0, 0.5, 50.0, 0.5])
#: Op and the rest of its arguments, from behind the labels on; {view} stands for how u is made.
ENGINES: dict[str, tuple[str, list[Any]]] = {
    "pair": ("pair", [None, None, *MS, "{view}", True, None, 1, 1.0]),
    "mined": ("pair", [None, None, *MS, "{view}", True, 0.1, 1, 1.0]),
    "not normalised": ("pair", [None, None, "binomial", [2.0, 5.0, 0.5], "{view}", False, None, 1, 1.0]),
    "hinges": ("pair", [None, None, "hinge", [0.9, 0.1], "{view}", True, None, 1, 1.0]),
    "histogram": ("histogram", [11, -4.0, 1.0, "{view}", True]),
    "triplet": ("triplet", ["all", 0.2, False, False, "{view}", True]),
    "semihard": ("triplet", ["semihard", 0.2, False, True, "{view}", True]),
}
SELECTING: dict[str, tuple[str, list[Any]]] = {
    **{f"{p}, {n}": ("extremes", [p, n, "dot", True]) for p, n in
       (("easy", "hard"), ("hard", "semihard"), ("semihard", "easy"), ("none", "hard"), ("easy", "none"))},
    **{f"largest of {side}": ("topk", ["dro_margin", [0.2, 0.5, 1.0, 1.0], 100, side, "dot", True])
       for side in ("all", "positives", "negatives")},
}  # fmt: skip


def test_every_op_with_selves_is_here() -> None:
    taking = {name for name in CALLS if "selves" in op(name).names}
    assert taking == {name for name, _ in (*ENGINES.values(), *SELECTING.values())} | {"positives"}


@pytest.mark.parametrize("most", [0, 3, 200])
@pytest.mark.parametrize("cols", [37, 140])
@pytest.mark.parametrize("backend", FUSED)
def test_similarities_of_positives_are_listed_without_a_rows_own(backend: str, cols: int, most: int) -> None:
    rows, col, row_labels, col_labels, selves = sides(cols)
    made = Positives(rows, col, row_labels, col_labels, most=200, normalize=True, selves=selves)
    got = ops.call(made, backend)
    finite = got < torch.inf
    want = DENSE["positives"](made)
    assert torch.equal(finite, want < torch.inf)
    assert_close(got[finite], want[finite], 1e-12)
    fewer = ops.call(replace(made, most=most), backend)
    assert fewer.shape == (len(rows), most)
    assert torch.equal((fewer < torch.inf).sum(1), finite.sum(1).clamp_max(most))


def sides(cols: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, columns, their labels, and the columns that the rows are, -1 for every fifth; labels come in no order.

    Rows do not look like those columns: what is left out by its index must not be left out for its value.
    """
    random = torch.Generator().manual_seed(cols)
    labels = torch.randint(-3, 9, (cols,), generator=random)
    col = torch.randn(12, DIM, generator=random, dtype=torch.float64)[labels + 3]
    col = col + torch.randn(cols, DIM, generator=random, dtype=torch.float64)
    selves = torch.randperm(cols, generator=random)[:ROWS]
    row_labels = labels[selves]
    selves[::5] = -1
    return torch.randn(ROWS, DIM, generator=random, dtype=torch.float64), col, row_labels, labels, selves


def call(of: tuple[str, list[Any]], given: Any, view: str = "dot") -> Any:
    name, options = of
    *matrix, selves = given
    made = op(name).read([*matrix, *(view if x == "{view}" else x for x in options)])
    made.selves = selves
    return made


def outputs(of: tuple[str, list[Any]], view: str, given: Any, backend: str) -> list[Tensor]:
    """What an op gives that has a gradient, then the gradients of rows and columns."""
    rows, cols = (x.clone().requires_grad_() for x in given[:2])
    made = call(of, (rows, cols, *given[2:]), view)
    found = DENSE[made.op](made) if backend == "dense" else ops.call(made, backend)
    out = [x for x in found if x.requires_grad]
    weights = torch.linspace(0.5, 2.0, len(rows), dtype=rows.dtype)
    total = rows.new_zeros(())
    for x in out:
        w = weights if x.ndim == 1 else weights[:, None] * torch.linspace(1, 2, x.shape[1], dtype=rows.dtype)
        if made.op == "pair" and made.policy in ("hinge", "binomial"):
            slots = pydml.policy.POLICIES[made.policy].slots  # counts have no gradient
            w = w * torch.tensor([float(not getattr(slot, "constant", False)) for slot in slots], dtype=rows.dtype)
        total = total + (torch.where(torch.isfinite(x), x, 0) * w).sum()
    return [*out, *torch.autograd.grad(total, [rows, cols])]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) >= 3
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@ON_FUSED
@pytest.mark.parametrize("cols", [38, 140, 333], ids=["copied", "copied, larger", "gathered tile by tile"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ENGINES)
def test_an_op_leaves_out_each_rows_own_column(name: str, view: str, cols: int, backend: str) -> None:
    given = sides(cols)
    want = outputs(ENGINES[name], view, given, "dense")
    assert_equal(outputs(ENGINES[name], view, given, backend), want)
    with_itself = outputs(ENGINES[name], view, (*given[:4], None), backend)
    assert not torch.allclose(with_itself[0], want[0])  # the test would see a self pair


@ON_FUSED
@pytest.mark.parametrize("cols", [60, 333])
@pytest.mark.parametrize("name", SELECTING)
def test_a_selection_leaves_out_each_rows_own_column(name: str, cols: int, backend: str) -> None:
    given = sides(cols)
    made = call(SELECTING[name], given)
    assert all(map(torch.equal, ops.call(made, backend), DENSE[made.op](made)))


@ON_FUSED
def test_without_selves_each_row_meets_its_own_column(backend: str) -> None:
    given = sides(60)
    at = given[4] >= 0
    given[1][given[4][at]] = given[0][at]
    easiest, _ = ops.call(call(SELECTING["easy, hard"], (*given[:4], None)), backend)
    assert torch.equal(easiest[at], given[4][at])
    easiest, _ = ops.call(call(SELECTING["easy, hard"], given), backend)
    assert not (easiest == given[4])[at].any()


@ON_FUSED
@pytest.mark.parametrize("name", [*ENGINES, *SELECTING])
def test_selves_of_nothing_are_no_selves(name: str, backend: str) -> None:
    given = sides(140)
    of = (ENGINES | SELECTING)[name]
    nowhere = torch.full_like(given[4], -1)
    got, want = (ops.call(call(of, (*given[:4], selves)), backend) for selves in (nowhere, None))
    assert all(map(torch.equal, got, want))


LEAST, MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
#: Twelve labels to stand for those of the columns: far apart, and at the ends of what there is.
NAMES = {
    "huge": [10**17 * k for k in range(-5, 7)],
    "turned": [-(10**17) * k for k in range(-5, 7)],
    "at the ends": [LEAST, LEAST + 1, -1, 0, 1, MOST - 9, *range(MOST - 5, MOST + 1)],
    "all at one end": [*range(MOST - 11, MOST + 1)],
}


@ON_FUSED
@pytest.mark.parametrize("few", [False, True], ids=["all classes asked for", "few classes asked for"])
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_labels_may_be_any_integers(names: list[int], few: bool, backend: str) -> None:
    """Columns that no row asks for are of one class to the engine, whose label must not be one that a row has."""
    rows, cols, y, labels, selves = sides(333)
    if few:
        asked = y >= 6
        rows, y, selves = rows[asked], y[asked], selves[asked]
    named = torch.tensor(names)
    given = rows, cols, named[y + 3], named[labels + 3], selves
    want = outputs(ENGINES["mined"], "dot", (*given[:2], y, labels, selves), "dense")
    assert_equal(outputs(ENGINES["mined"], "dot", given, backend), want)


@pytest.mark.skipif("cpu" not in FUSED, reason="the C++ extension was not built")
def test_the_cpp_ops_refuse_bounds_and_selves_of_another_size() -> None:
    """By themselves: whoever calls them directly has passed no other check."""
    given = sides(60)
    made = call(ENGINES["mined"], given)

    def run(**other: Tensor) -> Any:
        return torch.ops.pydml_cpu.pair(*(other.get(name, getattr(made, name)) for name in op("pair").names))

    with pytest.raises(RuntimeError, match=r"bounds: got shape \[3, 2\], wanted \[37, 2\]"):
        run(bounds=torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match=r"selves: got shape \[2\], wanted \[37\]"):
        run(selves=given[4][:2])
    with pytest.raises(RuntimeError, match=r"selves: got -2, wanted entries in \[-1, 60\)"):
        run(selves=given[4] * 0 - 2)
