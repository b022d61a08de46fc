"""The CUDA kernels, run by the emulator: every loss and every engine, in each of the formats of their products."""

from __future__ import annotations

import functools
import itertools
import platform
import sys
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch
from helpers import (
    CASES,
    Case,
    Golden,
    assert_as_good_as_dense,
    assert_close,
    assert_same,
    check_golden,
    generator,
    golden,
    golden_names,
    make_batch,
    over,
    run,
)
from torch import Tensor

import pydml
from pydml import cuda, tiled
from pydml.backends import resolve
from pydml.cuda.matrix import VIEWS
from pydml.declared import Dots
from pydml.policy import POLICIES

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulator switches its fibers by hand, on x86-64 only"
)
BACKEND = "cuda-emulated"
#: Format of the products -> dtype of the embeddings, and how far losses and gradients may be from fp64's on the very
#: same embeddings. 16-bit gradients are rounded once, at the end; TF32 rounds the rows themselves, and hinges may flip.
FORMATS = {
    "fp32": (torch.float32, 3e-5),
    "tf32": (torch.float32, 3e-2),
    "bf16": (torch.bfloat16, 6e-3),
    "fp16": (torch.float16, 1.5e-3),
}
#: The emulated kernels and the tiled ones, by op; each takes the arguments in their order.
KERNELS: dict[str, Any] = {}
TILED = emulation.by_position(tiled.KERNELS)


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    """Build the kernels for the emulator, and let pydml find them, in this file only."""
    with emulation.backend() as table:
        KERNELS.update(emulation.by_position(table))
        yield


@pytest.fixture
def precision() -> Iterator[None]:
    """Leave torch's precision of products as it was."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def use(math: str) -> tuple[torch.dtype, float]:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if math == "tf32" else "ieee"
    return FORMATS[math]


def in_double(loss_fn: torch.nn.Module, case: Case, classes: int, dim: int) -> Any:
    """The same loss in fp64, with the very same parameters."""
    reference = case.build(classes, dim, torch.float64)
    for mine, given in zip(reference.parameters(), loss_fn.parameters(), strict=True):
        mine.data = given.data.double()
    return reference


# Losses


@pytest.mark.parametrize("name", golden_names())
def test_golden_values_and_gradients_in_fp32(name: str) -> None:
    case = golden(name)
    check_golden(case, BACKEND, torch.float32, case.meta["rtol_float32"])


@pytest.mark.parametrize("name", golden_names())
def test_golden_batches_in_bf16_are_fp64_on_the_rounded_batch(name: str) -> None:
    case = golden(name)
    check_golden(rounded(case), BACKEND, torch.bfloat16, 8e-3)


def rounded(case: Golden) -> Golden:
    """The case with every array rounded to bf16, and what the textbook formula makes of it in fp64."""
    arrays = {
        key: torch.tensor(value).bfloat16().double().numpy() if value.dtype.kind == "f" else value
        for key, value in case.arrays.items()
    }
    loss_fn = getattr(pydml.losses, case.meta["class"])(**case.meta["kwargs"]).double()
    leaves = {k: torch.tensor(arrays[k]).requires_grad_() for k in ("embeddings", "ref_embeddings") if k in arrays}
    for attribute, key in case.meta["parameters"].items():
        leaves[key] = getattr(loss_fn, attribute)
        leaves[key].data = torch.tensor(arrays[key])

    def argument(key: str | list[str]) -> Any:
        if isinstance(key, list):
            return tuple(torch.tensor(arrays[k]) for k in key)
        return leaves[key] if key in leaves else torch.tensor(arrays[key])

    forward = {name: argument(key) for name, key in case.meta["forward"].items()}
    loss = loss_fn(leaves["embeddings"], torch.tensor(arrays["labels"]), **forward, backend="dense")
    loss.backward(torch.tensor(arrays["grad_output"]) if "grad_output" in arrays else None)
    arrays["loss"] = loss.detach().numpy()
    for key, leaf in leaves.items():
        assert leaf.grad is not None
        arrays[f"grad_{key}"] = leaf.grad.numpy()
    return Golden(case.name, arrays, case.meta)


@pytest.mark.parametrize("math", FORMATS)
@over(CASES)
def test_every_loss_is_that_of_fp64(case: Case, math: str, precision: None) -> None:
    """Two tiles of rows, more than one slab and one group of gradient columns."""
    dtype, tolerance = use(math)
    z, labels = make_batch("ragged", 75, 140, 12, dtype=dtype)
    loss_fn = case.build(12, 140, dtype)
    want = run(in_double(loss_fn, case, 12, 140), z.double(), labels, backend="dense")
    assert_same(run(loss_fn, z, labels, backend=BACKEND), want, tolerance)


@pytest.mark.parametrize("math", ("fp32", "bf16"))
@over(CASES, lambda case: case.takes_ref)
def test_every_loss_with_references_is_that_of_fp64(case: Case, math: str, precision: None) -> None:
    dtype, tolerance = use(math)
    z, labels = make_batch("random", 20, 33, 6, dtype=dtype)
    ref_emb, ref_labels = make_batch("random", 70, 33, 7, seed=1, dtype=dtype)
    loss_fn = case.build(7, 33, dtype)
    want = run(
        in_double(loss_fn, case, 7, 33), z.double(), labels,
        ref_emb=ref_emb.double(), ref_labels=ref_labels, backend="dense",
    )  # fmt: skip
    got = run(loss_fn, z, labels, ref_emb=ref_emb, ref_labels=ref_labels, backend=BACKEND)
    assert_same(got, want, tolerance)


@pytest.mark.parametrize("rows", (1, 2, 63, 64, 65, 199))
@pytest.mark.parametrize("dim", (1, 31, 129, 257))
def test_sizes_around_the_borders_of_tiles(rows: int, dim: int) -> None:
    case = next(case for case in CASES if case.id == "ms-mined")
    z, labels = make_batch("random", rows, dim, max(1, rows // 3), dtype=torch.float32)
    want = run(case.build(1, dim), z.double(), labels, backend="dense")
    assert_same(run(case.build(1, dim, torch.float32), z, labels, backend=BACKEND), want, 1e-5)


@pytest.mark.parametrize("math", FORMATS)
@pytest.mark.parametrize("case", ("ms-mined", "nca", "margin", "fast_ap", "triplet", "soft_triple"))
def test_rows_wider_than_a_block_of_the_gradient(case: str, math: str, precision: None) -> None:
    dtype, tolerance = use(math)
    z, labels = make_batch("ragged", 70, 300, 9, dtype=dtype)
    found = next(c for c in CASES if c.id == case)
    loss_fn = found.build(9, 300, dtype)
    want = run(in_double(loss_fn, found, 9, 300), z.double(), labels, backend="dense")
    assert_same(run(loss_fn, z, labels, backend=BACKEND), want, tolerance)


@pytest.mark.parametrize("math", FORMATS)
@pytest.mark.parametrize("case", ("ms-euclidean", "nca", "margin"))
def test_duplicates_have_distance_zero_and_near_pairs_keep_their_digits(case: str, math: str, precision: None) -> None:
    dtype, tolerance = use(math)
    z, labels = make_batch("trained", 70, 40, 10, dtype=torch.float64)
    z[1], z[3] = z[0], z[2]
    z[5:9] = z[4] + 1e-4 * torch.randn(4, 40, generator=generator(1), dtype=torch.float64)
    if math == "tf32":  # its rounding of the rows moves near pairs by more than their distance
        z[5:9] = z[4]
    z = z.to(dtype)
    found = next(c for c in CASES if c.id == case)
    loss_fn = found.build(10, 40, dtype)
    want = run(in_double(loss_fn, found, 10, 40), z.double(), labels, backend="dense")
    # the direction of a pair at distance D has lost 1/D of the digits of its rows
    assert_same(run(loss_fn, z, labels, backend=BACKEND), want, max(tolerance, 2e-4))


@pytest.mark.parametrize("apart", [0.05, 0.01, 0.005])
@pytest.mark.parametrize("name", ["contrastive", "nca", "triplet", "lifted", "generalized_lifted"])
def test_nearly_collapsed_rows_keep_their_digits(name: str, apart: float) -> None:
    """D² = 2-2S has three digits left at D = 0.01; of rows less their centre it has them all."""
    z, labels = make_batch("random", 150, 33, 24)
    z = torch.nn.functional.normalize(z)
    assert_as_good_as_dense(pydml.losses.LOSSES[name](), (z[:1] + apart * z).float(), labels, BACKEND)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_collapsed_batch_against_a_reference_set_elsewhere(normalize: bool) -> None:
    z, labels = make_batch("random", 150, 33, 24)
    z = torch.nn.functional.normalize(z)
    rows = (3 * z[:1] + 0.03 * z).float()
    loss_fn = pydml.losses.ContrastiveLoss(normalize_embeddings=normalize, neg_margin=6.0)
    for ref_emb in (rows.flip(0)[:90], z[1:].float()):
        ref_labels = torch.arange(len(ref_emb)) % 24
        truth = run(loss_fn, rows.double(), labels, ref_emb=ref_emb.double(), ref_labels=ref_labels, backend="dense")
        got = run(loss_fn, rows, labels, ref_emb=ref_emb, ref_labels=ref_labels, backend=BACKEND)
        assert_close(got.loss, truth.loss, 1e-6, "loss")
        for key, grad in truth.grads.items():
            assert_close(got.grads[key], grad, 3e-5, f"gradient of {key}")


@pytest.mark.parametrize("math", ["tf32", "bf16", "fp16"])
def test_nearly_collapsed_rows_in_other_formats(math: str, precision: None) -> None:
    """TF32 rounds what is left of the rows without their centre; 16-bit rows are exact, and their gradients short."""
    dtype, _ = use(math)
    z, labels = make_batch("random", 150, 33, 24)
    z = torch.nn.functional.normalize(z)
    z = (z[:1] + 0.03 * z).to(dtype)
    got, truth = (run(pydml.losses.NCALoss(), t, labels, backend=b) for t, b in ((z, BACKEND), (z.double(), "dense")))
    assert_same(got, truth, {"tf32": 1e-3, "bf16": 4e-3, "fp16": 1e-3}[math], floor=0)


# Engines: the same answers as the tiled ones


def coarse(rows: int, dim: int, seed: int = 0) -> Tensor:
    """Embeddings of few different numbers, exact in every format: many ties, and equal rows."""
    return torch.randint(-1, 2, (rows, dim), generator=generator(rows, dim, seed)).float()


LABELS = (torch.arange(90) * 7 % 13) * 1000003 - 5
REF_LABELS = (torch.arange(140) * 5 % 11) * 1000003 - 5
MATRICES = {
    "symmetric": (coarse(90, 6), None, LABELS, None),
    "rectangular": (coarse(90, 6), coarse(140, 6, 1), LABELS, REF_LABELS),
    "one class": (coarse(70, 6), None, torch.zeros(70, dtype=torch.long), None),
    "all different": (coarse(70, 6), None, torch.arange(70), None),
}


def assert_equal(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(
    ("positive", "negative"),
    (
        *itertools.product(("easy", "hard"), ("easy", "hard", "semihard")),
        ("semihard", "easy"),
        ("semihard", "hard"),
    ),
)
def test_extremes_break_ties_as_tiled_does(matrix: str, positive: str, negative: str) -> None:
    arguments = (*MATRICES[matrix], positive, negative, "dot", False)
    assert_equal(KERNELS["extremes"](*arguments), TILED["extremes"](*arguments))


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("epsilon", (None, 0.5, -2.0))
def test_mined_pairs_come_in_the_order_of_tiled(matrix: str, epsilon: float | None) -> None:
    arguments = (*MATRICES[matrix], epsilon, "dot", False)
    assert_equal(KERNELS["mined"](*arguments), TILED["mined"](*arguments))


@pytest.mark.parametrize("matrix", MATRICES)
def test_ranks_count_ties_as_tiled_does(matrix: str) -> None:
    """One class of 70 also takes several chunks of positives."""
    *counts, precision = KERNELS["rank"](*MATRICES[matrix], False)
    *wanted, share = TILED["rank"](*MATRICES[matrix], False)
    assert_equal(counts, wanted)
    assert_close(precision, share, 1e-12)


def test_ranks_of_large_classes_count_positives_of_all_chunks() -> None:
    z, labels = coarse(150, 5), torch.arange(150) % 2
    *counts, precision = KERNELS["rank"](z, None, labels, None, False)
    *wanted, share = TILED["rank"](z, None, labels, None, False)
    assert_equal(counts, wanted)
    assert_close(precision, share, 1e-12)


@pytest.mark.parametrize("matrix", ("symmetric", "rectangular"))
def test_draws_are_those_of_tiled(matrix: str) -> None:
    rows, cols, labels, col_labels = MATRICES[matrix]
    g = generator(3)
    rows, cols = (None if t is None else t + torch.randn(t.shape, generator=g) for t in (rows, cols))
    anchors = torch.arange(len(labels)).repeat(3)[:200]
    arguments = (rows, cols, labels, col_labels, anchors, torch.tensor(7), 0.5, 1.4)
    got = KERNELS["sample"](*arguments)
    assert torch.equal(got, TILED["sample"](*arguments))
    assert len(got.unique()) > 20


@pytest.mark.parametrize("nodes", (2, 11, 300))
@pytest.mark.parametrize("matrix", MATRICES)
def test_histograms_are_those_of_tiled(matrix: str, nodes: int) -> None:
    """300 nodes are more than one block counts."""
    rows, cols, *labels = MATRICES[matrix]
    rows, cols = (None if t is None else t + torch.randn(t.shape, generator=generator(3)) for t in (rows, cols))
    arguments = (rows, cols, *labels, nodes, -1.0, 1.0, "dot", True)
    got, want = KERNELS["histogram"](*arguments), TILED["histogram"](*arguments)
    for a, b in zip(got[:2], want[:2], strict=True):
        assert_close(a, b, 3e-7 * nodes + 1e-6)  # a share is the error of u in units of a bin
    grads = [torch.randn(len(got[0]), nodes, generator=generator(nodes)) for _ in range(2)]
    wanted = (True, matrix == "rectangular")
    back = [k["histogram_backward"](*grads, *got, *arguments, *wanted) for k in (KERNELS, TILED)]
    for a, b in zip(*back, strict=True):
        assert_close(a, b, 2e-5)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("matrix", ("symmetric", "rectangular"))
def test_listed_pairs_are_those_of_tiled(matrix: str, view: str) -> None:
    rows, cols = MATRICES[matrix][:2]
    i = torch.randint(len(rows), (500,), generator=generator(1))
    j = torch.randint(len(rows if cols is None else cols), (500,), generator=generator(2))
    arguments = (rows, cols, i, j, view, True)
    assert_close(KERNELS["dots"](*arguments), TILED["dots"](*arguments), 1e-6)
    grad, wanted = torch.randn(500, generator=generator(3)), (True, cols is not None)
    back = [k["dots_backward"](grad, *arguments, *wanted) for k in (KERNELS, TILED)]
    for a, b in zip(*back, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("mode", ("all", "semihard"))
def test_a_promise_of_small_classes_is_not_believed_blindly(mode: str) -> None:
    z, labels = coarse(40, 5), torch.arange(40) // 4
    arguments = (z, None, labels, None, mode, 0.2, False, False, "euclidean", True)
    want = KERNELS["triplet"](*arguments), KERNELS["triplet_backward"](torch.ones(40), *arguments, True, False)
    with pydml.largest_class(4):
        got = KERNELS["triplet"](*arguments), KERNELS["triplet_backward"](torch.ones(40), *arguments, True, False)
    assert_equal([*got[0], got[1][0]], [*want[0], want[1][0]])
    with pydml.largest_class(3):
        assert all(t.isnan().all() for t in KERNELS["triplet"](*arguments))
        assert KERNELS["triplet_backward"](torch.ones(40), *arguments, True, False)[0].isnan().all()


def test_listed_zero_rows_have_a_cosine_of_0() -> None:
    z = torch.zeros(3, 20)
    z[2] = 1
    pairs = torch.tensor([0, 0, 2]), torch.tensor([1, 2, 2])
    assert KERNELS["dots"](z, None, *pairs, "cosine", True).tolist() == [0, 0, 1]


def test_listed_short_rows_have_the_cosine_of_what_they_are_clamped_to() -> None:
    """‖z‖ is clamped at 1e-12: a shorter row is no unit row, and its S with itself is ‖x‖²."""
    z = torch.tensor([[0.6e-12, 0.0], [0.0, 2.0]])
    both = torch.tensor([0, 1])
    assert_close(KERNELS["dots"](z, None, both, both, "cosine", True), [0.36, 1.0], 1e-6)


@pytest.mark.parametrize("smooth", (False, True))
@pytest.mark.parametrize("mode", ("all", "semihard"))
@pytest.mark.parametrize("matrix", MATRICES)
def test_triplets_are_those_of_tiled(matrix: str, mode: str, smooth: bool) -> None:
    """One class takes several chunks of positives; ties go to the smallest column."""
    arguments = (*MATRICES[matrix], mode, 0.25, False, smooth, "dot", False)
    got, want = KERNELS["triplet"](*arguments), TILED["triplet"](*arguments)
    assert_close(got[0], want[0], 1e-5)
    assert torch.equal(got[1], want[1])
    grad, wanted = torch.randn(len(got[0]), generator=generator(3)), (True, matrix == "rectangular")
    back = [k["triplet_backward"](grad, *arguments, *wanted) for k in (KERNELS, TILED)]
    for a, b in zip(*back, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("smooth", (False, True))
@pytest.mark.parametrize("mode", ("all", "semihard"))
@pytest.mark.parametrize("rectangular", (False, True))
def test_triplets_of_classes_beyond_a_window(
    rectangular: bool, mode: str, smooth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 90 positives the tables hold 32 at a time, and some classes end before others."""
    monkeypatch.setattr(sys.modules["pydml.cuda.triplet"], "WINDOW", 32)
    labels = (torch.arange(150) % 5 // 3) * 9 - 4
    cols = (coarse(110, 6, 1), labels[:110]) if rectangular else (None, None)
    arguments = (coarse(150, 6), cols[0], labels, cols[1], mode, 0.25, False, smooth, "dot", False)
    got, want = KERNELS["triplet"](*arguments), TILED["triplet"](*arguments)
    assert_close(got[0], want[0], 1e-5)
    assert torch.equal(got[1], want[1])
    grad = torch.randn(150, generator=generator(3))
    back = [k["triplet_backward"](grad, *arguments, True, rectangular) for k in (KERNELS, TILED)]
    for a, b in zip(*back, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("pool", (3, 64))
def test_pools_of_any_size_that_a_tile_holds(pool: int, view: str) -> None:
    rows, cols = make_batch("random", 20, 9, 5)[0].float(), make_batch("random", 5 * pool, 9, 5)[0].float()
    labels = torch.arange(20) % 5
    arguments = (
        rows, cols, labels, torch.arange(5), None, None, "exponential", [-2.0, 0.1, 3.0, 0.2],
        view, True, None, pool, 4.0,
    )  # fmt: skip
    got, want = KERNELS["pair"](*arguments), TILED["pair"](*arguments)
    assert_close(got[0], want[0], 1e-5)
    grad = torch.randn(got[0].shape, generator=generator(3))
    back = [k["pair_backward"](grad, *want, *arguments, True, True) for k in (KERNELS, TILED)]
    for a, b in zip(*back, strict=True):
        assert_close(a, b, 2e-5)


# Promises


def everything(z: Tensor, labels: Tensor) -> list[Tensor]:
    """Results of every engine, as one list."""
    pairs = torch.arange(len(z)), torch.arange(len(z)).flip(0)
    matrix = (z, None, labels, None)
    found: list[Any] = [
        *KERNELS["extremes"](*matrix, "hard", "semihard", "dot", True),
        *KERNELS["topk"](*matrix, "dro_margin", [0.2, 0.5, 1.0, 1.0], 50, "all", "dot", True),
        *KERNELS["mined"](*matrix, 0.1, "dot", True),
        *KERNELS["rank"](*matrix, True),
        KERNELS["sample"](*matrix, torch.arange(len(z)), torch.tensor(1), 0.5, 1.4),
    ]
    for loss in ("ms-mined", "lifted", "histogram", "fast_ap", "margin", "triplet", "triplet-semihard"):
        result = run(next(c for c in CASES if c.id == loss).build(9, z.shape[1], z.dtype), z, labels, backend=BACKEND)
        found += [result.loss, *result.grads.values()]
    leaf = z.clone().requires_grad_()
    pydml.ops.call(Dots(leaf, None, *pairs, "euclidean", True), BACKEND).sum().backward()
    return [*found, leaf.grad]


@pytest.mark.parametrize("math", ("fp32", "bf16"))
@pytest.mark.parametrize("order", ("reverse", "random:3"))
def test_bits_do_not_hang_on_the_order_of_threads_and_blocks(
    math: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    z, labels = make_batch("random", 130, 20, 9, dtype=FORMATS[math][0])
    want = everything(z, labels)
    monkeypatch.setenv("PYDML_EMULATOR_ORDER", order)
    monkeypatch.setenv("PYDML_EMULATOR_WORKERS", "2")
    assert_equal(everything(z, labels), want)


@pytest.mark.parametrize("blocks", (1, 2, 10**6))
def test_blocks_that_share_a_walk_agree(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = make_batch("random", 200, 20, 9, dtype=torch.float32)
    want = everything(z, labels)
    monkeypatch.setattr(cuda.matrix, "BLOCKS", blocks)
    for got, wanted in zip(everything(z, labels), want, strict=True):
        if got.is_floating_point():
            assert_close(got, wanted, 1e-5)
        else:
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_nan_in_is_nan_out(bad: float, dtype: torch.dtype) -> None:
    z, labels = make_batch("random", 70, 20, 9, dtype=dtype)
    z[66, 3] = bad
    for loss in ("ms-mined", "contrastive", "lifted", "fast_ap", "normalized_softmax"):
        result = run(next(c for c in CASES if c.id == loss).build(9, 20, dtype), z, labels, backend=BACKEND)
        assert result.loss.isnan().all()
        assert all(grad.isnan().all() for grad in result.grads.values())


@pytest.mark.parametrize(("rows", "cols"), ((0, None), (0, 3), (3, 0)))
def test_sides_without_rows(rows: int, cols: int | None) -> None:
    z, c = torch.randn(rows, 5), None if cols is None else torch.randn(cols, 5)
    matrix = (z, c, torch.zeros(rows, dtype=torch.long), None if cols is None else torch.zeros(cols, dtype=torch.long))
    calls: dict[str, tuple[Any, ...]] = {
        "pair": (*matrix, None, None, "mean", [], "dot", True, 0.1, 1, 1.0),
        "histogram": (*matrix, 5, -1.0, 1.0, "dot", True),
        "extremes": (*matrix, "hard", "semihard", "dot", True),
        "topk": (*matrix, "dro_margin", [0.2, 0.5, 1.0, 1.0], 4, "all", "dot", True),
        "mined": (*matrix, 0.1, "dot", True),
        "rank": (*matrix, True),
        "triplet": (*matrix, "all", 0.1, False, False, "dot", True),
    }
    for name, arguments in calls.items():
        for got, want in zip(KERNELS[name](*arguments), TILED[name](*arguments), strict=True):
            if name != "pair" or got.shape[-1:] != (2,):  # thresholds of rows without columns are nobody's
                assert torch.equal(got, want), name
    grads = torch.ones(rows, 4)
    back = KERNELS["pair_backward"](grads, *KERNELS["pair"](*calls["pair"]), *calls["pair"], True, c is not None)
    assert all(not g.numel() or not g.any() for g in back)


def test_rows_and_columns_of_two_dtypes_meet_in_the_wider() -> None:
    z, labels = make_batch("random", 30, 12, 5, dtype=torch.bfloat16)
    proxies = make_batch("random", 5, 12, 5, seed=1)[0].float()
    rest = (labels, torch.arange(5), None, None, "exponential", [-2.0, 0.1, 3.0, 0.2], "dot", True, None, 1, 1.0)
    got, want = KERNELS["pair"](z, proxies, *rest), TILED["pair"](z, proxies, *rest)
    assert_close(got[0], want[0], 1e-5)
    grad = torch.randn(got[0].shape, generator=generator(3))
    back = [k["pair_backward"](grad, *want, z, proxies, *rest, True, True) for k in (KERNELS, TILED)]
    for a, b, dtype, tolerance in zip(*back, (torch.bfloat16, torch.float32), (8e-3, 1e-5), strict=True):
        assert a.dtype == dtype
        assert_close(a, b, tolerance)


# The C++ ops themselves


class Shortened:
    """The kernels' ops as an engine calls them, each called before with every one of its arrays cut short."""

    def __init__(self) -> None:
        self.ops, self.refused = torch.ops.pydml_cuda_emulated, set[tuple[str, str]]()

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name).default

        def run(*arguments: Any) -> None:
            for at, (argument, value) in enumerate(zip(op._schema.arguments, arguments, strict=True)):
                for k, t in enumerate(value if isinstance(value, list) else [value]):
                    if not isinstance(t, Tensor) or not t.numel() or (name, argument.name, k) in ANY_LENGTH:
                        continue
                    short = t[:-1] if t.ndim else t[None][:-1]
                    cut = [*value[:k], short, *value[k + 1 :]] if isinstance(value, list) else short
                    with pytest.raises(RuntimeError, match=r"^[a-z_]+(\[\d\])?: got .+, wanted ") as raised:
                        op(*arguments[:at], cut, *arguments[at + 1 :])
                    self.refused.add((name, str(raised.value).split(":")[0].split("[")[0]))
            op(*arguments)

        return run


#: Lists of mined pairs, of which what does not fit is left out, and the ranges of classes where nobody looks at them.
ANY_LENGTH = {("mined", "positives", 0), ("mined", "negatives", 0)}
ANY_LENGTH |= {(name, "matrix", 6) for name in ("finish", "dots", "gather")}


@pytest.mark.parametrize("rectangular", (False, True), ids=("symmetric", "rectangular"))
def test_every_array_that_is_too_short_is_named(rectangular: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROOM", 32), ("SAMPLE", 90), ("LEAST", 4)):  # so that every stage of top-K is called
        monkeypatch.setattr(sys.modules["pydml.cuda.topk"], name, value)
    rows, cols, labels, col_labels = MATRICES["rectangular" if rectangular else "symmetric"]
    matrix, sides = (rows, cols, labels, col_labels), (True, rectangular)
    ops, pairs = Shortened(), (torch.arange(20), torch.arange(20).flip(0))
    run_engine = emulation.by_position({name: functools.partial(f, ops) for name, f in cuda.ENGINES.items()})
    fields = torch.rand(len(rows)), torch.rand(len(rows if cols is None else cols))
    selves = torch.arange(90) - 1 if rectangular else None
    calls = (*matrix, *fields, "exponential", [-2.0, 0.1, 3.0, 0.2], "euclidean", True, 0.1, 1, 1.0, selves)
    run_engine["pair_backward"](torch.ones(90, 2), *run_engine["pair"](*calls), *calls, *sides)
    calls = (*matrix, 5, -1.0, 1.0, "dot", True)
    counts = run_engine["histogram"](*calls)
    run_engine["histogram_backward"](*counts[:2], *counts, *calls, *sides)
    run_engine["dots_backward"](
        run_engine["dots"](*matrix[:2], *pairs, "dot", True), *matrix[:2], *pairs, "dot", True, *sides
    )
    for mode in ("all", "semihard"):
        calls = (*matrix, mode, 0.1, False, False, "dot", True)
        run_engine["triplet_backward"](run_engine["triplet"](*calls)[0], *calls, *sides)
    for positive, negative in (("semihard", "hard"), ("easy", "semihard")):
        run_engine["extremes"](*matrix, positive, negative, "dot", True)
    run_engine["topk"](*matrix, "dro_margin", [0.2, 0.5, 1.0, 1.0], 4, "all", "dot", True)
    run_engine["mined"](*matrix, 0.1, "dot", True)
    run_engine["sample"](*matrix, torch.arange(90), torch.tensor([7]), 0.5, 1.4)
    run_engine["rank"](*matrix, True)
    assert {name for name, _ in ops.refused} == set(cuda.ENGINES) - {"dots_backward"} | {"prepare", "finish", "gather"}
    assert len(ops.refused) > 60


@pytest.mark.parametrize("wrong", (-2, 140))
def test_selves_lead_nowhere_beyond_the_columns(wrong: int) -> None:
    m = cuda.matrix.Matrix(torch.ops.pydml_cuda_emulated, *MATRICES["rectangular"], "dot", False)
    m.selves = torch.full((90,), wrong, dtype=torch.int32)
    message = rf"^matrix\[8\]: got {wrong}, wanted entries in \[-1, 140\)"
    with pytest.raises(RuntimeError, match=message):
        m.ops.histogram(*m.arguments(1), 5, -1.0, 2.0, True, torch.zeros(1, 90, 5))


def test_lists_of_mined_pairs_are_never_overrun() -> None:
    """Counts that belong to other pairs lead nowhere else."""
    m = cuda.matrix.Matrix(torch.ops.pydml_cuda_emulated, *MATRICES["symmetric"], "dot", False)
    counts = torch.full((2, 90 * m.splits() * cuda.matrix.HALVES), 5)
    lists = torch.full((3, 8), -7)
    counts[:, ::2] = -3
    m.ops.mined(*m.arguments(m.splits()), None, counts, lists[1], lists[1].clone())
    assert (lists[::2] == -7).all()


def test_a_launch_that_fails_is_named_in_the_words_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = make_batch("random", 30, 12, 5, dtype=torch.float32)
    monkeypatch.setenv("PYDML_EMULATOR_ARCH", "7")
    with pytest.raises(RuntimeError, match=r"the launch of prepare failed with CUDA error 1: .*unknown architecture 7"):
        KERNELS["rank"](z, None, labels, None, True)


def test_fp64_is_left_to_the_tiled_engines() -> None:
    z, labels = make_batch("random", 30, 12, 5)
    got, want = (run(pydml.losses.NCALoss(), z, labels, backend=name) for name in (BACKEND, "tiled"))
    assert_same(got, want, 0.0)


def test_policies_have_the_numbers_of_the_sources() -> None:
    listed = (emulation.ROOT / "csrc" / "losses.h").read_text().split("PYDML_POLICIES(X)")[1]
    assert [line.split("(")[1].split(",")[0] for line in listed.splitlines() if "X(" in line] == list(POLICIES)


def test_the_emulated_kernels_are_never_chosen_by_themselves() -> None:
    assert resolve("auto", torch.device("cpu")) != BACKEND
    with pytest.raises(RuntimeError, match=r"takes tensors on a GPU|not available"):
        pydml.losses.NCALoss()(torch.eye(3), torch.arange(3), backend="cuda")


def test_memory_is_linear_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that a loss allocates has rows × columns elements."""
    z, labels = make_batch("random", 700, 8, 100, dtype=torch.float32)
    largest = 0
    for name in ("new_empty", "new_zeros", "new_full"):
        original = getattr(Tensor, name)

        def watched(self: Tensor, *size: Any, _original: Any = original, **keywords: Any) -> Tensor:
            nonlocal largest
            made: Tensor = _original(self, *size, **keywords)
            largest = max(largest, made.numel())
            return made

        monkeypatch.setattr(Tensor, name, watched)
    for loss in ("ms-mined", "fast_ap", "dro_topk"):
        run(next(c for c in CASES if c.id == loss).build(100, 8, torch.float32), z, labels, backend=BACKEND)
    assert 0 < largest < 700 * 700 / 2
