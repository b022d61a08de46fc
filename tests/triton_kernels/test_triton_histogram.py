"""The histogram engine in Triton, in the interpreter, against the tiled one: values, gradients, and what it skips."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import assert_close, generator, make_batch
from torch import Tensor
from triton_cases import WHY_NOT, needs_triton, tiled, triton

import pydml
from pydml.backends import saved_size
from pydml.declared import op

pytestmark = needs_triton
if WHY_NOT is None:
    engine: Any = importlib.import_module("pydml.triton_kernels.histogram")

SPANS = {"dot": (-1.0, 1.0), "cosine": (-1.0, 1.0), "euclidean": (-2.0, 0.0), "squared": (-4.0, 0.0)}
Arguments = tuple[Any, ...]


def arguments(z: Tensor, labels: Tensor, ref: tuple[Tensor, Tensor] | None, nodes: int, view: str) -> Arguments:
    cols, col_labels = (None, None) if ref is None else ref
    return (z, cols, labels, col_labels, nodes, *SPANS[view], view, True)


def check(arguments: Arguments, rtol: float = 1e-5, flat: float = 0.0) -> tuple[Tensor, ...]:
    """Counts and gradients are those of the tiled engine; ``flat`` is the share of the tables that has no slope."""
    rows, nodes = arguments[0], arguments[4]
    got, want = triton("histogram", *arguments), tiled("histogram", *arguments)
    assert len(got[2]) == saved_size("triton", op("histogram").read(arguments))
    for mine, theirs, side in zip(got, want[:2], ("positives", "negatives"), strict=False):
        assert_close(mine, theirs, 1e-4, side)
    tables = torch.randn(2, len(rows), nodes, generator=generator(len(rows), nodes))
    tables[:, :, : int(flat * nodes)] = 1.0
    for side, mine, theirs in zip(
        ("rows", "columns"),
        triton("histogram_backward", *tables, *got, *arguments, True, True),
        tiled("histogram_backward", *tables, *want, *arguments, True, True),
        strict=True,
    ):
        assert mine.dtype == theirs.dtype
        assert_close(mine, theirs, rtol, f"gradient of {side}")
    return got


@pytest.mark.parametrize("view", SPANS)
@pytest.mark.parametrize("shape", [(1, None, 3), (33, None, 31), (70, None, 33), (33, 31, 70), (1, 70, 5), (70, 1, 16)])
def test_every_view_and_ragged_shape_is_as_in_tiled(view: str, shape: tuple[int, int | None, int]) -> None:
    rows, cols, dim = shape
    ref = None if cols is None else make_batch("trained", cols, dim, 5, 1, torch.float32)
    check(arguments(*make_batch("trained", rows, dim, 5, 0, torch.float32), ref, 11, view))


@pytest.mark.parametrize("regime", ["random", "collapsed", "ragged"])
def test_every_state_of_training_is_as_in_tiled(regime: str) -> None:
    for view in ("cosine", "squared"):
        check(arguments(*make_batch(regime, 47, 20, 9, 0, torch.float32), None, 21, view), flat=0.3)


@pytest.mark.parametrize("view", ["cosine", "squared"])
@pytest.mark.parametrize("classes", ["one", "all distinct", "duplicates"])
def test_extreme_labels_and_duplicate_rows(classes: str, view: str) -> None:
    z, labels = make_batch("trained", 40, 8, 5, 0, torch.float32)
    if classes == "one":
        labels = torch.full_like(labels, -7)
    elif classes == "all distinct":
        labels = torch.arange(40).flip(0) << 40
    else:
        z = z[torch.arange(40) // 4]
    check(arguments(z, labels, None, 11, view))


@pytest.mark.parametrize("nodes", [2, 130])
def test_any_number_of_nodes(nodes: int) -> None:
    check(arguments(*make_batch("random", 35, 8, 5, 0, torch.float32), None, nodes, "dot"))


def test_more_nodes_than_registers_are_counted_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "NODE_BLOCK", 16)
    check(arguments(*make_batch("random", 35, 8, 5, 0, torch.float32), None, 101, "dot"))


def test_similarities_outside_the_span_fall_on_its_ends() -> None:
    z, labels = make_batch("random", 33, 8, 4, 0, torch.float32)
    check((z, None, labels, None, 9, -0.2, 0.3, "dot", True))


def test_tiles_where_tables_are_flat_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    g = generator(3)
    centres = torch.eye(3, 8).repeat_interleave(32, 0)  # negatives at S = 0, positives at S = 1
    given = arguments(centres + 0.01 * torch.randn(96, 8, generator=g), torch.arange(96) // 32, None, 21, "dot")
    counts = triton("histogram", *given)
    tables = torch.zeros(2, 96, 21)
    tables[1, :, 14:] = torch.randn(96, 7, generator=g)  # flat around 0
    tables[0] = torch.randn(96, 21, generator=g)
    nowhere = torch.full_like(counts[2], 20.0)  # as if every tile lay at the upper end
    for kept, all_of_it in ((counts, False), ((*counts[:2], nowhere), True)):
        visited = []
        monkeypatch.setattr(engine, "gather", spy(engine.gather, visited))
        got, _ = triton("histogram_backward", *tables, *kept, *given, True, True)
        monkeypatch.undo()
        assert len(visited) == (9 if all_of_it else 3)  # 3×3 tiles, the mixed ones always
        assert_close(got, tiled("histogram_backward", *tables, *kept, *given, True, True)[0], 1e-5)


def spy(function: Any, calls: list[int]) -> Any:
    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return function(*arguments)

    return counted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("view", ["dot", "squared"])
def test_half_precision_rows_are_exact_operands(dtype: torch.dtype, view: str) -> None:
    """Rows that are representable give the counts of fp32; gradients are rounded, in bf16 the weights are too."""
    z, labels = make_batch("trained", 40, 20, 6, 0, torch.float32)
    z = torch.nn.functional.normalize(z).to(dtype)
    given = (z, None, labels, None, 11, *SPANS[view], view, False)
    check(given, rtol=1e-3 if dtype == torch.float16 else 1e-2)


def test_nan_gives_nan_everywhere() -> None:
    z, labels = make_batch("random", 40, 8, 4, 0, torch.float32)
    z[5, 2] = torch.nan
    given = arguments(z, labels, None, 11, "cosine")
    counts = triton("histogram", *given)
    assert counts[0].isnan().all() and counts[1].isnan().all()
    grads = [torch.zeros_like(counts[0])] * 2
    gradient, _ = triton("histogram_backward", *grads, *counts, *given, True, True)
    assert gradient.isnan().all()


@pytest.mark.parametrize("shape", [(0, None), (0, 5), (5, 0)])
def test_nothing_to_compare(shape: tuple[int, int | None]) -> None:
    rows, cols = shape
    ref = None if cols is None else (torch.randn(cols, 4), torch.arange(cols))
    check(arguments(torch.randn(rows, 4), torch.arange(rows), ref, 11, "dot"))


def test_losses_run_on_it() -> None:
    z, labels = make_batch("trained", 40, 8, 5, 0, torch.float32)
    for loss_fn in (pydml.losses.FastAPLoss(), pydml.losses.HistogramLoss(n_bins=20)):
        leaves = [z.clone().requires_grad_() for _ in range(2)]
        values = [loss_fn(leaf, labels, backend=b) for leaf, b in zip(leaves, ("triton", "dense"), strict=True)]
        torch.stack(values).sum().backward()
        assert_close(values[0], values[1], 1e-5)
        assert_close(leaves[0].grad, leaves[1].grad, 1e-5)
