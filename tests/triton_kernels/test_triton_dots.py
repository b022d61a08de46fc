"""dots in Triton, in the interpreter, against the tiled engine: values, gradients, and who gets one."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, generator, make_batch
from torch import Tensor
from triton_cases import needs_triton, tiled, triton

import pydml

pytestmark = needs_triton

VIEWS = ("dot", "cosine", "euclidean", "squared")


def listed(rows: int, cols: int | None, number: int) -> tuple[Tensor, Tensor]:
    """Pairs, some of them more than once, and row 0 in a third of them."""
    g = generator(rows, cols or 0, number)
    i, j = torch.randint(rows, (number,), generator=g), torch.randint(cols or rows, (number,), generator=g)
    return i.masked_fill(torch.arange(number) % 3 == 0, 0), j


def check(rows: Tensor, cols: Tensor | None, i: Tensor, j: Tensor, view: str, normalize: bool, rtol: float) -> None:
    arguments = (rows, cols, i, j, view, normalize)
    assert_close(triton("dots", *arguments), tiled("dots", *arguments), rtol)
    grad = torch.randn(len(i), generator=generator(len(i)))
    for side, mine, theirs in zip(
        ("rows", "columns"),
        triton("dots_backward", grad, *arguments, True, True),
        tiled("dots_backward", grad, *arguments, True, True),
        strict=True,
    ):
        assert mine.dtype == theirs.dtype
        assert_close(mine, theirs, rtol, f"gradient of {side}", floor=0.5)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "shape", [(1, None, 5), (33, None, 31), (40, None, 130), (31, 70, 33), (70, 1, 1), (1, 33, 16)]
)
def test_values_and_gradients_are_those_of_tiled(view: str, shape: tuple[int, int | None, int]) -> None:
    rows, cols, dim = shape
    z, _ = make_batch("random", rows, dim, 3, dtype=torch.float32)
    ref = None if cols is None else make_batch("trained", cols, dim, 3, 1, torch.float32)[0]
    for number in (1, 70):
        check(z, ref, *listed(rows, cols, number), view, normalize=number == 70, rtol=1e-5)


@pytest.mark.parametrize("view", VIEWS)
def test_near_and_equal_rows_are_exact(view: str) -> None:
    z, _ = make_batch("random", 33, 40, 3, dtype=torch.float32)
    z[1], z[3] = z[0], z[2] * (1 + 1e-6) + 1e-6
    i, j = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 0, 3, 2, 4])
    check(z, None, i, j, view, True, 1e-5)
    u = triton("dots", z, None, i, j, view, True)
    if view != "dot":
        assert u[:2].tolist() == ([1.0, 1.0] if view == "cosine" else [0.0, 0.0])


def test_zero_rows_have_a_cosine_of_0() -> None:
    z = torch.zeros(3, 20)
    z[2] = 1
    pairs = torch.tensor([0, 0, 2]), torch.tensor([1, 2, 2])
    assert triton("dots", z, None, *pairs, "cosine", True).tolist() == [0, 0, 1]


@pytest.mark.parametrize("rectangular", [False, True])
def test_short_rows_have_the_cosine_of_what_they_are_clamped_to(rectangular: bool) -> None:
    """‖z‖ is clamped at 1e-12: a shorter row is no unit row, and its S with itself is ‖x‖²."""
    z = torch.tensor([[0.6e-12, 0.0], [0.0, 2.0], [0.0, 0.999e-12]])
    cols, both = z.clone() if rectangular else None, torch.arange(3)
    assert_close(triton("dots", z, cols, both, both, "cosine", True), [0.36, 1.0, 0.998001], 1e-6)
    check(z[:2], None if cols is None else cols[:2], both[:2], both[:2], "cosine", True, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    z, _ = make_batch("trained", 33, 31, 3, dtype=dtype)
    i, j = listed(33, None, 50)
    assert_close(
        triton("dots", z, None, i, j, "euclidean", True), tiled("dots", z, None, i, j, "euclidean", True), 1e-6
    )
    grad = torch.ones(50)
    mine, _ = triton("dots_backward", grad, z, None, i, j, "dot", True, True, False)
    theirs, _ = tiled("dots_backward", grad, z, None, i, j, "dot", True, True, False)
    assert mine.dtype == dtype
    assert_close(mine, theirs, 1e-2)


def test_only_wanted_gradients_and_only_rows_with_pairs() -> None:
    z, ref = torch.randn(5, 8), torch.randn(6, 8)
    i, j, grad = torch.tensor([1, 1]), torch.tensor([2, 2]), torch.ones(2)
    rows, cols = triton("dots_backward", grad, z, ref, i, j, "dot", True, True, False)
    assert rows.abs().sum(1).nonzero()[:, 0].tolist() == [1]
    assert cols.numel() == 0
    rows, cols = triton("dots_backward", grad, z, ref, i, j, "dot", True, False, True)
    assert cols.abs().sum(1).nonzero()[:, 0].tolist() == [2]
    assert rows.numel() == 0


def test_no_pairs_give_no_values_and_zero_gradients() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for rows, cols in ((torch.randn(3, 4), None), (torch.randn(3, 4), torch.randn(2, 4)), (torch.empty(0, 4), None)):
        assert triton("dots", rows, cols, none, none, "euclidean", True).shape == (0,)
        d_rows, d_cols = triton("dots_backward", torch.empty(0), rows, cols, none, none, "euclidean", True, True, True)
        assert d_rows.shape == rows.shape
        assert not d_rows.any()
        assert cols is None or (d_cols.shape == cols.shape and not d_cols.any())


@pytest.mark.parametrize("view", VIEWS)
def test_nan_anywhere_is_nan_everywhere(view: str) -> None:
    z = torch.randn(6, 8)
    z[5, 0] = torch.inf
    i, j = torch.tensor([0, 1]), torch.tensor([0, 2])
    assert triton("dots", z, None, i, j, view, True).isnan().all()
    rows, _ = triton("dots_backward", torch.ones(2), z, None, i, j, view, True, True, False)
    assert rows[:3].isnan().all()


def test_a_loss_on_listed_pairs_runs_on_it() -> None:
    z, labels = make_batch("trained", 20, 16, 5, dtype=torch.float32)
    tuple_ = pydml.miners.MultiSimilarityMiner()(z, labels, backend="tiled")
    got, want = (pydml.losses.ContrastiveLoss()(z, labels, tuple_, backend=backend) for backend in ("triton", "tiled"))
    assert_close(got, want, 1e-5)
