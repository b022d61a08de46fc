"""Rows that are some of the columns, known thresholds and single sides in Triton, in the interpreter, against tiled."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import assert_close, generator, make_batch
from torch import Tensor
from triton_cases import assert_equal, lattice, needs_triton, tiled, triton

import pydml
from pydml.declared import CALLS, op

pytestmark = needs_triton

VIEWS = ("dot", "cosine", "euclidean", "squared")
#: (rows, columns): fewer rows than columns, as many, and rows of which some are no column.
SHAPES = ((33, 70), (40, 33))


@dataclass
class Part:
    """Rows, columns that hold copies of most rows among others, their labels, and where the copies are."""

    rows: Tensor
    cols: Tensor
    row_labels: Tensor
    col_labels: Tensor
    selves: Tensor

    @property
    def matrix(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("rows", "cols", "row_labels", "col_labels")}


def part(rows: int, cols: int, dim: int = 9, whole: bool = False) -> Part:
    """Every third row is no column; where there are copies of it, they are other samples."""
    if whole:
        z, other, labels, other_labels = lattice("clusters", rows, cols, dim)
    else:
        z, labels = make_batch("trained", rows, dim, 5, 0, torch.float32)
        other, other_labels = make_batch("trained", cols, dim, 5, 1, torch.float32)
    g = generator(rows, cols)
    copied = torch.arange(rows)[: min(rows, cols)]
    places = torch.randperm(cols, generator=g)[: len(copied)]
    other, other_labels = other.clone(), other_labels.clone()
    other[places], other_labels[places] = z[copied], labels[copied]
    selves = torch.full((rows,), -1).index_copy_(0, copied, places)
    selves[::3] = -1
    return Part(z, other, labels, other_labels, selves)


def assert_near(got: Tensor, want: Tensor, rtol: float, what: str) -> None:
    """Close, and infinite in the same places."""
    assert torch.equal(got.where(got.isinf(), 0), want.where(want.isinf(), 0)), what
    assert_close(got.where(got.isfinite(), 0), want.where(want.isfinite(), 0), rtol, what)


def check(name: str, rtol: float = 1e-5, **given: Any) -> Any:
    """Results and gradients of rows and columns are those of the tiled engine."""
    values = [given[argument] for argument in op(name).names]
    got, want = triton(name, *values), tiled(name, *values)
    call = CALLS[name]
    fields = [field for field in call.Out._fields if field not in ("saved", "ranges")]
    for field, mine, theirs in zip(fields, got, want, strict=False):
        assert_near(mine, theirs, rtol, field)
    if not call.grads:
        return got
    at = [call.Out._fields.index(result) for result in call.grads]
    grads = [torch.randn(want[i].shape, generator=generator(i, len(want[i]))) for i in at]
    kept = [[out[call.Out._fields.index(result)] for result in call.kept] for out in (got, want)]
    mine = triton(f"{name}_backward", *grads, *kept[0], *values, True, True)
    theirs = tiled(f"{name}_backward", *grads, *kept[1], *values, True, True)
    for side, one, other in zip(("rows", "columns"), mine, theirs, strict=True):
        assert_close(one, other, 2 * rtol, f"gradient of {side}", floor=1e-3)
        assert other.abs().amax() > 0
    return got


def pair(given: Part, **options: Any) -> dict[str, Any]:
    usual = {
        "row_field": None, "col_field": None, "policy": "exponential", "params": [-2.0, 0.5, 10.0, 0.5], "view": "dot",
        "normalize": True, "epsilon": None, "pool_size": 1, "sharpness": 0.0, "bounds": None, "side": "both",
    }  # fmt: skip
    return {**given.matrix, "selves": given.selves, **usual, **options}


@pytest.mark.parametrize("epsilon", [None, 0.1])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_pair_of_a_row_and_itself_is_counted(shape: tuple[int, int], view: str, epsilon: float | None) -> None:
    check("pair", 1e-4, **pair(part(*shape), view=view, epsilon=epsilon))


def test_pooled_columns_may_be_rows() -> None:
    given = part(33, 40)
    cols = torch.stack((given.cols, given.cols.flip(0)), 1).flatten(0, 1)
    check("pair", **{**pair(given, pool_size=2, sharpness=10.0), "cols": cols})


def test_two_rows_may_be_one_column() -> None:
    given = part(33, 70)
    given.row_labels[5], given.row_labels[7] = given.row_labels[4], given.row_labels[4]
    given.selves[5] = given.selves[7] = given.selves[4]
    check("pair", **pair(given))


@pytest.mark.parametrize("view", ["dot", "cosine", "squared"])
@pytest.mark.parametrize("shape", SHAPES)
def test_histograms_leave_rows_themselves_out(shape: tuple[int, int], view: str) -> None:
    given = part(*shape)
    low, high = (-4.0, 0.0) if view == "squared" else (-1.0, 1.0)
    usual = {"nodes": 11, "low": low, "high": high, "view": view, "normalize": True}
    check("histogram", **given.matrix, **usual, selves=given.selves)


@pytest.mark.parametrize("kind", [("all", False), ("all", True), ("semihard", False)])
@pytest.mark.parametrize("view", VIEWS)
def test_triplets_leave_rows_themselves_out(view: str, kind: tuple[str, bool]) -> None:
    given = part(33, 47)
    usual = {"mode": kind[0], "margin": 0.2, "swap": False, "smooth": kind[1], "view": view, "normalize": True}
    check("triplet", 1e-4, **given.matrix, **usual, selves=given.selves)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("positive", ["easy", "hard", "semihard", "none"])
def test_extremes_leave_rows_themselves_out_and_one_side_if_told(positive: str, view: str) -> None:
    for number, negative in enumerate(("easy", "hard", "semihard", "none")):
        if (positive, negative) == ("semihard", "semihard"):
            continue
        given = part(*SHAPES[number % 2], whole=True)
        usual = (*given.matrix.values(), positive, negative, view, False)
        for selves in (given.selves, None):
            assert_equal(triton("extremes", *usual, selves), tiled("extremes", *usual, selves))
    symmetric = (given.rows, None, given.row_labels, None, positive, "none", view, False)
    assert_equal(triton("extremes", *symmetric), tiled("extremes", *symmetric))


@pytest.mark.parametrize("side", ["all", "positives", "negatives"])
@pytest.mark.parametrize("k", [9, 3000])
def test_the_largest_losses_are_of_no_row_with_itself(k: int, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topk = importlib.import_module("pydml.triton_kernels.topk")
    for name, value in (("ROOM", 32), ("SAMPLE", 8), ("LEAST", 4)):
        monkeypatch.setattr(topk, name, value)
    for shape, view in zip(SHAPES, ("dot", "squared"), strict=True):
        given = part(*shape, whole=True)
        values = (*given.matrix.values(), "dro_margin", [0.5, 1.0, 1.0, 1.0], k, side, view, False, given.selves)
        assert_equal(triton("topk", *values), tiled("topk", *values))


# Known thresholds, and one side


@pytest.mark.parametrize("side", ["both", "positives", "negatives"])
@pytest.mark.parametrize("how", ["all", "mined", "bounded"])
@pytest.mark.parametrize("view", ["dot", "euclidean"])
def test_sides_and_known_thresholds_are_those_of_tiled(view: str, how: str, side: str) -> None:
    given = part(40, 70)
    bounds = None
    if how == "bounded":
        low, high = (-0.2, 0.6) if view == "dot" else (-1.2, -0.4)
        bounds = torch.stack((torch.linspace(high, low, 40), torch.linspace(low, high, 40)), 1)
        bounds[3], bounds[4, 0], bounds[5, 1] = torch.inf, -torch.inf, -torch.inf
    options = {"view": view, "epsilon": None if how == "all" else 0.1, "bounds": bounds, "side": side}
    values = pair(given, **options)
    if how == "mined" and side != "both":  # the other side decides, and it is not looked at: nothing is kept
        got, want = (run("pair", *(values[name] for name in op("pair").names)) for run in (triton, tiled))
        assert_equal(got[:1], want[:1])
        assert_near(got[1], want[1], 1e-5, "thresholds")
        return
    _, thresholds, _ = check("pair", 1e-4, **values)
    if bounds is not None:
        known = slice(1, 2) if side == "negatives" else slice(0, 2)
        assert torch.equal(thresholds[:, known], bounds[:, known])


@pytest.mark.parametrize("side", ["positives", "negatives"])
def test_a_side_of_a_sparse_policy_and_of_a_symmetric_matrix(side: str) -> None:
    check("pair", **pair(part(33, 70), policy="hinge", params=[0.9, 0.1], side=side))
    given = part(40, 70)
    values = {**pair(given, side=side), "cols": None, "col_labels": None, "selves": None}
    values = [values[name] for name in op("pair").names]
    got, want = triton("pair", *values), tiled("pair", *values)
    grad = torch.ones_like(want[0])
    assert_near(got[0], want[0], 1e-5, "statistics")
    mine = triton("pair_backward", grad, *got, *values, True, False)[0]
    assert_close(mine, tiled("pair_backward", grad, *want, *values, True, False)[0], 1e-5)


# A memory


MEMORY = {
    "mined ms": lambda: pydml.losses.MultiSimilarityLoss(epsilon=0.1),
    "fast_ap": lambda: pydml.losses.FastAPLoss(),
    "dro_topk": lambda: pydml.losses.DROTopKLoss(k=9),
    "dro_kl": lambda: pydml.losses.DROKLLoss(),
    "triplets": lambda: pydml.losses.TripletMarginLoss(),
    "hard triplets": lambda: pydml.losses.TripletMarginLoss(triplets="hard"),
    "semihard triplets": lambda: pydml.losses.TripletMarginLoss(triplets="semihard"),
    "extreme triplets": lambda: pydml.losses.ExtremeTripletLoss(),
    "margin": lambda: pydml.losses.MarginLoss(),
    "nca": lambda: pydml.losses.NCALoss(),
}


@pytest.mark.parametrize("name", MEMORY)
def test_a_memory_runs_on_triton_alone(name: str) -> None:
    steps = [make_batch("trained", 20, 8, 5, seed, torch.float32) for seed in range(3)]
    results = {}
    for backend in ("triton", "tiled"):
        loss_fn = pydml.memory.CrossBatchMemory(MEMORY[name](), embedding_size=8, memory_size=50)
        out = []
        with pydml.recording() as ran:
            for z, labels in steps:
                leaf = z.clone().requires_grad_()
                loss = loss_fn(leaf, labels, backend=backend)
                loss.backward()
                out += [loss.detach(), leaf.grad]
        results[backend] = out
        assert {call.backend for call in ran} == {backend}
    for mine, theirs in zip(results["triton"], results["tiled"], strict=True):
        assert_close(mine, theirs, 1e-4, floor=1e-4)
