"""The ops as PyTorch meets them: schemas, fakes, autograd, torch.compile, autocast, dtypes, modules, backends."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    BACKENDS,
    CASES,
    FUSED,
    Case,
    Result,
    arguments,
    assert_close,
    assert_same,
    backward_arguments,
    generator,
    make_batch,
    over,
    run,
    with_gradients,
)
from torch import Tensor

import pydml
from pydml import declared
from pydml.backends import recording
from pydml.losses.batch import Dense

DIM, CLASSES = 6, 4
ON = pytest.mark.parametrize("backend", BACKENDS)
ON_FUSED = pytest.mark.parametrize("backend", FUSED)


def batch(rows: int = 12, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return make_batch("random", rows, DIM, CLASSES, seed, dtype)


# Schemas, fakes and autograd of every op


def matrices(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """First arguments of an op on the whole matrix: symmetric, and against a reference set, rows or columns leading."""
    z, labels = batch(9, dtype=dtype)
    ref, ref_labels = batch(5, seed=1, dtype=dtype)

    def leaf(t: Tensor) -> Tensor:
        return t.clone().requires_grad_()

    yield "symmetric", (leaf(z), None, labels, None)
    yield "rect", (leaf(z), leaf(ref), labels, ref_labels)
    yield "rows_only", (leaf(z), ref, labels, ref_labels)
    yield "columns_only", (z, leaf(ref), labels, ref_labels)


def forward_samples(dtype: torch.dtype) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(op, what is special, arguments without the backend) of every differentiable op."""
    for shape, matrix in matrices(dtype):
        rows, cols, *_ = matrix
        none = (None, None)
        yield "pair", shape, (*matrix, *none, "exponential", [-2.0, 0.5, 50.0, 0.5], "dot", True, None, 1, 1.0)
        if shape in ("symmetric", "rect"):
            columns = len(rows) if cols is None else len(cols)
            fields = torch.rand(len(rows), dtype=dtype), torch.rand(columns, dtype=dtype)
            yield "pair", f"{shape}_fields", (*matrix, *fields, "lifted", [0.1], "euclidean", True, None, 1, 1.0)
            yield "pair", f"{shape}_mined", (*matrix, *none, "mean", [], "dot", True, 0.1, 1, 1.0)
            hinge = ("hinge", [0.2, -0.2], "cosine", True, None, 1, 1.0)
            yield "pair", f"{shape}_hinge", (*matrix, *none, *hinge)
            raw = ("hinge", [-0.5, -3.0], "squared", False, None, 1, 1.0)
            yield "pair", f"{shape}_raw", (*matrix, *none, *raw)
            bounds = torch.tensor([[0.4, -0.3]], dtype=dtype).expand(len(rows), 2).contiguous()
            mined = "exponential", [-2.0, 0.5, 5.0, 0.5], "dot", True, 0.1, 1, 1.0
            for side in ("both", "positives", "negatives"):
                yield "pair", f"{shape}_bounds_{side}", (*matrix, *none, *mined, None, bounds, side)
            positives = torch.rand(len(rows), 3, generator=generator(5), dtype=torch.float64).to(dtype) - 0.5
            positives[::2, 1] = torch.inf
            yield "against", f"{shape}_hinge", (*matrix, positives.requires_grad_(), 0.2, False, "dot", True)
        i, j = torch.tensor([0, 3, 3, 4]), torch.tensor([1, 0, 0, 4])
        for view in ("dot", "cosine", "euclidean", "squared"):
            yield "dots", f"{shape}_{view}", (rows, cols, i, j, view, True)
        yield "listed_triplets", shape, (rows, cols, i, j, j.flip(0), 0.2, True, "euclidean", True)
        yield "histogram", shape, (*matrix, 5, -1.0, 1.0, "cosine", True)
        yield "triplet", f"{shape}_hinge", (*matrix, "all", 0.2, False, False, "euclidean", True)
        yield "triplet", f"{shape}_smooth", (*matrix, "all", 0.2, False, True, "dot", True)
        yield "triplet", f"{shape}_semihard", (*matrix, "semihard", 0.2, False, False, "euclidean", True)
        if cols is not None:
            selves = torch.tensor([4, -1, 0, 1, -1, 3, 2, 0, 4])
            exponential = "exponential", [-2.0, 0.5, 5.0, 0.5], "euclidean", True, None, 1, 1.0
            yield "pair", f"{shape}_selves", (*matrix, *none, *exponential, selves)
            yield "histogram", f"{shape}_selves", (*matrix, 5, -1.0, 1.0, "cosine", True, selves)
            yield "triplet", f"{shape}_selves", (*matrix, "all", 0.2, False, True, "dot", True, selves)
            known = torch.rand(len(rows), 2, generator=generator(6), dtype=torch.float64).to(dtype) - 1
            yield "against", shape, (*matrix, known, 0.2, True, "euclidean", True)
    u = [torch.rand(n, generator=generator(n), dtype=torch.float64).to(dtype).requires_grad_() for n in (3, 4)]
    anchors = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 0, 1])
    yield "listed", "exponential", (*u, *anchors, None, "exponential", [-2.0, 0.5, 5.0, 0.5], 2)
    yield "listed", "hinge_field", (*u, *anchors, torch.rand(2).to(dtype), "hinge", [0.2, -0.2], 2)
    (_, symmetric), *_ = matrices(dtype)
    yield "triplet", "symmetric_swap", (*symmetric, "all", 0.2, True, False, "euclidean", True)
    z, labels = batch(9, dtype=dtype)
    centres = torch.randn(3 * CLASSES, DIM, generator=generator(3), dtype=torch.float64).to(dtype).requires_grad_()
    pooled = ("exponential", [20.0, 0.01, 20.0, 0.0], "dot", True, None, 3, 10.0)
    yield "pair", "pooled", (z.requires_grad_(), centres, labels, torch.arange(CLASSES), None, None, *pooled)
    transposed = centres.detach().T.contiguous().T.requires_grad_()  # as proxies of shape [d, C] are
    yield "pair", "transposed", (z, transposed, labels, torch.arange(CLASSES), None, None, *pooled)


def selecting_samples() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """The same of the ops that only choose or count."""
    for shape, with_grad in matrices(torch.float32):
        if shape not in ("symmetric", "rect"):
            continue
        matrix = tuple(t.detach() if isinstance(t, Tensor) else t for t in with_grad)
        yield "extremes", shape, (*matrix, "easy", "semihard", "dot", True)
        yield "extremes", f"{shape}_none", (*matrix, "none", "hard", "dot", True)
        bounds = torch.rand(len(matrix[0]), 3, generator=generator(8)) - 0.5
        yield "below", shape, (*matrix, bounds, "cosine", True)
        yield "above", shape, (*matrix, bounds, True)
        yield "positives", shape, (*matrix, 4, True)
        yield "topk", shape, (*matrix, "dro_margin", [0.2, 0.5, 1.0, 1.0], 6, "all", "dot", True)
        yield "topk", f"{shape}_side", (*matrix, "dro_margin", [0.2, 0.5, 1.0, 1.0], 50, "positives", "dot", True)
        yield "mined", shape, (*matrix, 0.1, "dot", True)
        yield "mined", f"{shape}_all", (*matrix, None, "dot", True)
        yield "sample", shape, (*matrix, torch.tensor([0, 0, 3]), torch.tensor(7), 0.5, 1.4)
        yield "rank", shape, (*matrix, True)


def samples(kind: str, dtype: torch.dtype = torch.float32) -> list[tuple[str, str, tuple[Any, ...]]]:
    found = forward_samples(dtype) if kind == "forward" else selecting_samples()
    return [(op, shape, tuple(arguments(op, *given).values())) for op, shape, given in found]


def over_samples(kind: str, dtype: torch.dtype = torch.float32, without: str = "nothing") -> Any:
    found = [sample for sample in samples(kind, dtype) if without not in sample[1]]
    return pytest.mark.parametrize(("op", "shape", "given"), found, ids=[f"{o}-{s}" for o, s, _ in found])


def the_op(name: str) -> Any:
    return getattr(torch.ops.pydml, name).default


@ON_FUSED
@over_samples("forward")
def test_differentiable_op_passes_opcheck(op: str, shape: str, given: tuple[Any, ...], backend: str) -> None:
    torch.library.opcheck(the_op(op), (*given, backend))


@ON_FUSED
@over_samples("selecting")
def test_selecting_op_passes_opcheck(op: str, shape: str, given: tuple[Any, ...], backend: str) -> None:
    torch.library.opcheck(the_op(op), (*given, backend))


@ON_FUSED
@over_samples("forward")
def test_backward_op_passes_opcheck(op: str, shape: str, given: tuple[Any, ...], backend: str) -> None:
    given = tuple(t.detach() if isinstance(t, Tensor) else t for t in given)
    outputs = the_op(op)(*given, backend)
    grads = [torch.rand_like(output) for output in with_gradients(op, outputs)]
    sides = [given[declared.op(op).names.index(side)] is not None for side in declared.CALLS[op].sides]
    for wants in ([side and wanted for side in sides] for wanted in (True, False)):
        wants[0] = True
        values = backward_arguments(op, given, outputs, grads, wants)
        torch.library.opcheck(the_op(f"{op}_backward"), (*values, backend))


def test_every_op_has_samples() -> None:
    assert set(declared.CALLS) == {op for kind in ("forward", "selecting") for op, *_ in samples(kind)}


@ON_FUSED
@over_samples("forward", torch.float64, without="raw")
def test_op_passes_gradcheck(op: str, shape: str, given: tuple[Any, ...], backend: str) -> None:
    leaves = [i for i, a in enumerate(given) if isinstance(a, Tensor) and a.requires_grad]
    moving = slice(None)
    if op == "pair":
        slots = pydml.policy.POLICIES[given[6]].slots
        moving = [k for k, slot in enumerate(slots) if not getattr(slot, "constant", False)]

    def of_leaves(*values: Tensor) -> Any:
        full = list(given)
        for i, leaf in zip(leaves, values, strict=True):
            full[i] = leaf
        return tuple(t[..., moving].nan_to_num(neginf=0) for t in with_gradients(op, the_op(op)(*full, backend)))

    real = [given[i].isfinite() for i in leaves]  # a positive of +inf is none, and has no difference quotient

    def of_finite(*values: Tensor) -> Any:
        return of_leaves(*(torch.where(at, v, given[i]) for at, v, i in zip(real, values, leaves, strict=True)))

    finite = [given[i].detach().nan_to_num(posinf=0).requires_grad_() for i in leaves]
    assert torch.autograd.gradcheck(of_finite, finite, fast_mode=True)


# Gradients through losses


@ON
@over(CASES)
def test_loss_passes_gradcheck(case: Case, backend: str) -> None:
    z, labels = batch(10)
    loss_fn = case.build(CLASSES, DIM)
    names = [name for name, _ in loss_fn.named_parameters()]

    def of_leaves(rows: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(loss_fn, given, (rows, labels), {"backend": backend})

    leaves = [z.requires_grad_(), *(p.detach().clone().requires_grad_() for p in loss_fn.parameters())]
    assert torch.autograd.gradcheck(of_leaves, leaves, fast_mode=True)


@ON
@over(CASES, lambda case: case.takes_ref)
def test_loss_against_a_reference_set_passes_gradcheck(case: Case, backend: str) -> None:
    z, labels = batch(8)
    ref, ref_labels = batch(6, seed=1)
    loss_fn = case.build(CLASSES, DIM)

    def of_leaves(rows: Tensor, columns: Tensor) -> Tensor:
        return loss_fn(rows, labels, ref_emb=columns, ref_labels=ref_labels, backend=backend)

    assert torch.autograd.gradcheck(of_leaves, [z.requires_grad_(), ref.requires_grad_()], fast_mode=True)


@ON
@over(CASES)
def test_gradients_scale_with_the_gradient_of_the_output(case: Case, backend: str) -> None:
    z, labels = batch()
    loss_fn = case.build(CLASSES, DIM)
    want = run(loss_fn, z, labels, backend=backend)
    got = run(lambda_module(lambda *a, **k: -3 * loss_fn(*a, **k), loss_fn), z, labels, backend=backend)
    assert_same(got, Result(-3 * want.loss, {name: -3 * grad for name, grad in want.grads.items()}), 1e-12)


def lambda_module(function: Any, parent: torch.nn.Module) -> Any:
    """A callable with the parameters of ``parent``."""

    class Wrapped:
        zero_grad = parent.zero_grad
        named_parameters = parent.named_parameters

        def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
            result: Tensor = function(*arguments, **keywords)
            return result

    return Wrapped()


@ON
@over(CASES, lambda case: case.takes_ref)
def test_one_side_alone_may_want_a_gradient(case: Case, backend: str) -> None:
    z, labels = batch()
    ref, ref_labels = batch(9, seed=1)
    loss_fn = case.build(CLASSES, DIM)
    want = run(loss_fn, z, labels, ref_emb=ref, ref_labels=ref_labels, backend=backend)
    for wanted in ("embeddings", "ref_emb"):
        sides = {"embeddings": z.clone(), "ref_emb": ref.clone()}
        sides[wanted].requires_grad_()
        loss = loss_fn(sides["embeddings"], labels, ref_emb=sides["ref_emb"], ref_labels=ref_labels, backend=backend)
        loss.backward()
        assert_close(sides[wanted].grad, want.grads[wanted], 1e-12)
        assert all(side.grad is None for name, side in sides.items() if name != wanted)


@ON
@over(CASES, lambda case: case.proxy)
def test_proxies_alone_or_embeddings_alone_may_want_a_gradient(case: Case, backend: str) -> None:
    z, labels = batch()
    loss_fn = case.build(CLASSES, DIM)
    want = run(loss_fn, z, labels, backend=backend)
    loss_fn.zero_grad()
    loss_fn(z, labels, backend=backend).backward()
    for name, parameter in loss_fn.named_parameters():
        assert_close(parameter.grad, want.grads[name], 1e-12)
    loss_fn.requires_grad_(False)
    leaf = z.clone().requires_grad_()
    loss_fn(leaf, labels, backend=backend).backward()
    assert_close(leaf.grad, want.grads["embeddings"], 1e-12)


@ON_FUSED
@over(CASES)
def test_double_backward_says_what_to_do(case: Case, backend: str) -> None:
    z, labels = batch()
    leaf = z.requires_grad_()
    (grad,) = torch.autograd.grad(case.build(CLASSES, DIM)(leaf, labels, backend=backend), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.*dense"):
        grad.square().sum().backward()


@over(CASES, lambda case: case.id in ("ms", "bin_lifted", "lifted_star", "normalized_softmax", "proxy_anchor"))
def test_dense_backend_has_second_derivatives_on_cosines(case: Case) -> None:
    """As the message of the test above promises."""
    z, labels = batch(8)
    loss_fn = case.build(CLASSES, DIM)
    assert torch.autograd.gradgradcheck(lambda rows: loss_fn(rows, labels, backend="dense"), z.requires_grad_())


# torch.compile


@ON_FUSED
@over(CASES)
def test_compiled_loss_is_the_eager_one(case: Case, backend: str) -> None:
    torch._dynamo.reset()
    z, labels = batch(dtype=torch.float32)
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    want = run(loss_fn, z, labels, backend=backend)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    got = run(lambda_module(compiled, loss_fn), z, labels, backend=backend)
    assert_same(got, want, 1e-6)


@ON_FUSED
@over(CASES, lambda case: case.takes_ref and case.id == case.loss)
def test_compiled_loss_against_a_reference_set_is_the_eager_one(case: Case, backend: str) -> None:
    torch._dynamo.reset()
    z, labels = batch(dtype=torch.float32)
    ref, ref_labels = batch(9, seed=1, dtype=torch.float32)
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    forward = {"ref_emb": ref, "ref_labels": ref_labels, "backend": backend}
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    assert_same(run(lambda_module(compiled, loss_fn), z, labels, **forward), run(loss_fn, z, labels, **forward), 1e-6)


@ON_FUSED
@over(CASES, lambda case: case.takes_tuple and case.id == case.loss)
def test_compiled_loss_of_a_tuple_is_the_eager_one(case: Case, backend: str) -> None:
    torch._dynamo.reset()
    z, labels = batch(dtype=torch.float32)
    a, p = ((labels[:, None] == labels) & ~torch.eye(12, dtype=torch.bool)).nonzero(as_tuple=True)
    a2, n = (labels[:, None] != labels).nonzero(as_tuple=True)
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    forward = {"indices_tuple": (a[1::2], p[1::2], a2[::3], n[::3]), "backend": backend}
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    assert_same(run(lambda_module(compiled, loss_fn), z, labels, **forward), run(loss_fn, z, labels, **forward), 1e-6)


@ON_FUSED
def test_compiled_loss_takes_batches_of_other_sizes(backend: str) -> None:
    torch._dynamo.reset()
    loss_fn = pydml.losses.MultiSimilarityLoss(epsilon=0.1)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (12, 17, 64, 65):
        z, labels = batch(rows, dtype=torch.float32)
        want = run(loss_fn, z, labels, backend=backend)
        assert_same(run(lambda_module(compiled, loss_fn), z, labels, backend=backend), want, 1e-6)


@pytest.mark.slow
@ON_FUSED
@over(CASES, lambda case: case.id in ("ms-mined", "soft_triple", "triplet"))
def test_inductor_compiles_a_model_with_the_loss(case: Case, backend: str) -> None:
    torch._dynamo.reset()
    z, labels = batch(32, dtype=torch.float32)
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(DIM, 16), torch.nn.ReLU(), torch.nn.Linear(16, DIM))

    def step(rows: Tensor) -> Tensor:
        loss: Tensor = loss_fn(model(rows), labels, backend=backend)
        return loss

    want = step(z)
    expected = torch.autograd.grad(want, list(model.parameters()))
    got = torch.compile(step, fullgraph=True)(z)
    assert_close(got, want, 1e-5)
    for grad, exact in zip(torch.autograd.grad(got, list(model.parameters())), expected, strict=True):
        assert_close(grad, exact, 1e-4)


# Modes and layouts


LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)


@ON
@LOW
@over(CASES)
def test_autocast_does_not_touch_the_loss(case: Case, low: torch.dtype, backend: str) -> None:
    z, labels = batch(dtype=torch.float32)
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    want = run(loss_fn, z, labels, backend=backend)

    def under_autocast(*arguments: Any, **keywords: Any) -> Tensor:
        with torch.autocast("cpu", dtype=low):
            loss: Tensor = loss_fn(*arguments, **keywords)
        return loss

    got = run(lambda_module(under_autocast, loss_fn), z, labels, backend=backend)
    assert got.loss.dtype == torch.float32
    assert_same(got, want, 0)


@ON
@over(CASES)
def test_a_backward_inside_autocast_is_no_other(case: Case, backend: str) -> None:
    """PyTorch advises against it, and code that does it is common."""
    z, labels = batch(dtype=torch.float32)
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    want = run(loss_fn, z, labels, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(loss_fn, z, labels, backend=backend)
    assert_same(got, want, 0)


@ON
@over(CASES)
def test_no_grad_and_inference_mode_give_the_value(case: Case, backend: str) -> None:
    z, labels = batch()
    loss_fn = case.build(CLASSES, DIM)
    want = loss_fn(z.clone().requires_grad_(), labels, backend=backend)
    assert want.requires_grad
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            got = loss_fn(z.clone().requires_grad_(), labels, backend=backend)
        assert not got.requires_grad
        assert torch.equal(got, want)


def strided(t: Tensor) -> Tensor:
    """The same numbers, every second one of a larger tensor."""
    wide = torch.full([2 * n for n in t.shape], 77, dtype=t.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in t.shape)]
    return view.copy_(t)


@ON
@over(CASES)
def test_layout_does_not_matter(case: Case, backend: str) -> None:
    z, labels = batch()
    loss_fn = case.build(CLASSES, DIM)
    want = run(loss_fn, z, labels, backend=backend)
    for rows in (strided(z), z.T.contiguous().T):
        assert not rows.is_contiguous()
        leaf = rows.detach().requires_grad_()
        loss = loss_fn(leaf, strided(labels), backend=backend)
        loss.backward()
        assert_close(loss, want.loss, 1e-12)
        assert_close(leaf.grad, want.grads["embeddings"], 1e-12)
    if case.takes_ref:
        ref, ref_labels = batch(9, seed=1)
        want = run(loss_fn, z, labels, ref_emb=ref, ref_labels=ref_labels, backend=backend)
        forward = {"ref_emb": strided(ref), "ref_labels": strided(ref_labels)}
        assert_close(loss_fn(strided(z), labels, **forward, backend=backend), want.loss, 1e-12)


@ON
@over(CASES)
def test_inputs_are_left_as_they_were(case: Case, backend: str) -> None:
    z, labels = batch()
    leaf = z.clone().requires_grad_()
    before = labels.clone()
    loss = case.build(CLASSES, DIM)(leaf, labels, backend=backend)
    loss.backward()
    assert leaf._version == 0
    assert torch.equal(leaf, z)
    assert torch.equal(labels, before)


@ON
@over(CASES)
def test_expanded_rows_and_a_graph_behind_the_embeddings(case: Case, backend: str) -> None:
    """Rows of a stride 0, and a gradient that goes on into a model."""
    loss_fn = case.build(CLASSES, DIM)
    z, labels = batch(6)
    first = z[:1].clone().requires_grad_()
    rest = z[1:].clone().requires_grad_()
    rows = torch.cat((first.expand(2, DIM), rest[1:]))
    got = loss_fn(rows, labels, backend=backend)
    want = run(loss_fn, rows.detach(), labels, backend=backend)
    got.backward()
    assert_close(first.grad, want.grads["embeddings"][:2].sum(0, keepdim=True), 1e-11)


def test_shapes_are_known_on_the_meta_device() -> None:
    z, labels = batch(dtype=torch.float32)
    leaf = z.to("meta").requires_grad_()
    loss = pydml.losses.MultiSimilarityLoss()(leaf, labels.to("meta"))
    assert loss.device.type == "meta"
    assert loss.shape == ()


# Low precision


@ON
@LOW
@over(CASES)
def test_low_precision_costs_no_more_than_its_rounding(case: Case, low: torch.dtype, backend: str) -> None:
    """Sums are in fp32: the loss is exact to 1e-5, a gradient to 1e-5 and a few roundings to the input's dtype.

    A few, because autograd adds in that dtype what comes from several ops.
    """
    z, labels = make_batch("trained", 24, DIM, CLASSES, seed=3, dtype=low)
    loss_fn = case.build(CLASSES, DIM, low)
    got = run(loss_fn, z, labels, backend=backend)
    truth = run(copy.deepcopy(loss_fn).double(), z.double(), labels, backend="dense")
    assert got.loss.dtype == torch.float32
    assert_close(got.loss, truth.loss, 1e-5, floor=0.1)
    for name, exact in truth.grads.items():
        grad = got.grads[name]
        assert grad.dtype == low
        rounding = float((exact.to(low).double() - exact).abs().max())
        scale = max(float(exact.abs().max()), 0.1)
        assert float((grad.double() - exact).abs().max()) <= 4 * rounding + 1e-5 * scale, name


def plain_distances(self: Dense) -> Tensor:
    """torch.cdist does not take these dtypes."""
    square = (self.x[:, None] - self.y[None]).square().sum(2)
    return torch.where(square > 0, torch.where(square > 0, square, 1).sqrt(), 0)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The dense formulas with every intermediate result in the dtype of the embeddings: plain PyTorch."""

    def run_plain(*arguments: Any) -> Result:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module("pydml.ops"), "compute_dtype", lambda z: z.dtype)
            patch.setattr(Dense, "D", property(plain_distances))
            return run(*arguments, backend="dense")

    return run_plain


@ON_FUSED
@LOW
@over(CASES, lambda case: case.loss != "proxy_nca")
def test_low_precision_is_at_most_twice_as_far_off_as_plain_pytorch(
    case: Case, low: torch.dtype, backend: str, plain: Any
) -> None:
    """Plus 1e-4 of the largest entry. Proxy-NCA's own formula needs torch.cdist, which these dtypes lack."""
    z, labels = make_batch("trained", 24, DIM, CLASSES, seed=3, dtype=low)
    loss_fn = case.build(CLASSES, DIM, low)
    got, rough = run(loss_fn, z, labels, backend=backend), plain(loss_fn, z, labels)
    truth = run(copy.deepcopy(loss_fn).double(), z.double(), labels, backend="dense")
    assert rough.loss.dtype == low
    for name, exact in {"loss": truth.loss, **truth.grads}.items():
        ours, theirs = (result.loss if name == "loss" else result.grads[name] for result in (got, rough))
        error, plain_error = (float((t.double() - exact).abs().max()) for t in (ours, theirs))
        assert error <= 2 * plain_error + 1e-4 * max(float(exact.abs().max()), 0.1), name


@ON
@over(CASES, lambda case: case.takes_ref)
def test_low_precision_reference_set_gets_its_own_dtype(case: Case, backend: str) -> None:
    z, labels = batch(dtype=torch.bfloat16)
    ref, ref_labels = batch(9, seed=1, dtype=torch.bfloat16)
    got = run(case.build(CLASSES, DIM, torch.bfloat16), z, labels, ref_emb=ref, ref_labels=ref_labels, backend=backend)
    assert got.grads["ref_emb"].dtype == got.grads["embeddings"].dtype == torch.bfloat16
    assert got.loss.isfinite()


# Modules


def hyper_parameters(case: Case) -> dict[str, Any]:
    return {k: v for k, v in case.arguments.items() if isinstance(v, int | float | str) and k != "num_classes"}


@over(CASES)
def test_copies_give_the_same_loss(case: Case) -> None:
    z, labels = batch(dtype=torch.float32)
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    want = run(loss_fn, z, labels)
    file = io.BytesIO()
    torch.save(loss_fn, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(loss_fn),
        "pickle": pickle.loads(pickle.dumps(loss_fn)),
        "save": torch.load(file, weights_only=False),
    }
    for how, other in copies.items():
        assert_same(run(other, z, labels), want, 0)
        assert repr(other) == repr(loss_fn), how
        assert not {id(p) for p in other.parameters()} & {id(p) for p in loss_fn.parameters()}


@over(CASES)
def test_state_dict_carries_the_parameters(case: Case) -> None:
    z, labels = batch(dtype=torch.float32)
    loss_fn, other = case.build(CLASSES, DIM, torch.float32), case.build(CLASSES, DIM, torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert loss_fn.state_dict().keys() == {name for name, _ in loss_fn.named_parameters()}
    other.load_state_dict(loss_fn.state_dict())
    assert_same(run(other, z, labels), run(loss_fn, z, labels), 0)


@over(CASES)
def test_modules_change_dtype(case: Case) -> None:
    z, labels = batch()
    loss_fn = case.build(CLASSES, DIM, torch.float32)
    want = run(case.build(CLASSES, DIM).float().double(), z, labels)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        loss_fn = loss_fn.to(dtype)
        assert all(parameter.dtype == dtype for parameter in loss_fn.parameters())
        assert loss_fn(z.to(dtype), labels).isfinite()
    loss_fn = case.build(CLASSES, DIM, torch.float32).double()
    assert_same(run(loss_fn, z, labels), want, 1e-12)
    assert loss_fn.train() is loss_fn
    assert loss_fn.eval() is loss_fn


@over(CASES)
def test_repr_says_what_the_loss_is(case: Case) -> None:
    text = repr(case.build(CLASSES, DIM))
    assert text.startswith(f"{case.cls.__name__}(")
    for name, value in hyper_parameters(case).items():
        assert f"{name}={value!r}" in text
    for name, parameter in inspect.signature(case.cls.__init__).parameters.items():
        if isinstance(parameter.default, int | float) and name not in ("beta", "nu", "triplets_per_anchor"):
            assert f"{name}=" in text


# What it costs


@ON_FUSED
def test_n_pairs_of_a_long_tuple_needs_no_more_rows_than_the_batch_has(backend: str) -> None:
    z, labels = batch()
    a, p = ((labels[:, None] == labels) & ~torch.eye(12, dtype=torch.bool)).nonzero(as_tuple=True)
    repeated = tuple(index.repeat(10) for index in (a, p, a, p))
    with recording() as calls:
        pydml.losses.NPairsLoss()(z, labels, repeated, backend=backend)
    assert 0 < max(max(ran.shape) for ran in calls if ran.op == "pair") <= len(z)


# Which backend runs


@pytest.fixture
def chosen() -> Any:
    """What a call would use now."""
    resolve = importlib.import_module("pydml.backends").resolve
    return lambda: resolve("auto", torch.device("cpu"))


def test_use_backend_nests_and_restores(chosen: Any) -> None:
    usual = chosen()
    with pydml.use_backend("dense"):
        assert chosen() == "dense"
        with pydml.use_backend("tiled"):
            assert chosen() == "tiled"
            with pydml.use_backend("auto"):
                assert chosen() == usual
            assert chosen() == "tiled"
        assert chosen() == "dense"
    assert chosen() == usual


def test_use_backend_restores_after_an_error(chosen: Any) -> None:
    usual = chosen()
    with pytest.raises(KeyError), pydml.use_backend("dense"):
        raise KeyError
    assert chosen() == usual
    with pytest.raises(ValueError, match="backend"), pydml.use_backend("dense"), pydml.use_backend("nonsense"):
        pass
    assert chosen() == usual


def test_use_backend_is_of_one_thread(chosen: Any) -> None:
    usual, seen = chosen(), []

    def other() -> None:
        seen.append(chosen())
        with pydml.use_backend("dense"):
            inside.set()
            leave.wait(10)
            seen.append(chosen())

    inside, leave = threading.Event(), threading.Event()
    with pydml.use_backend("tiled"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        assert chosen() == "tiled"
        leave.set()
        thread.join()
    assert seen == [usual, "dense"]


def test_the_argument_of_a_call_comes_first() -> None:
    z, labels = batch()
    with pydml.use_backend("dense"), recording() as calls:
        pydml.losses.NCALoss()(z, labels)
        assert not calls
        pydml.losses.NCALoss()(z, labels, backend="tiled")
        assert {ran.backend for ran in calls} == {"tiled"}


def test_auto_is_the_best_that_is_there(chosen: Any) -> None:
    assert chosen() == ("cpu" if pydml.backends()["cpu"] is None else "tiled")
