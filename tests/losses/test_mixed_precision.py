"""Mixed precision as users have it: half-precision embeddings beside fp32 proxies, references and boundaries.

Every tensor keeps its own dtype, and nothing in fp32 is rounded to half on its way: neither a proxy nor a gradient.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from helpers import CASES, FUSED, Case, assert_close, make_batch, over, run
from torch import Tensor, nn

import pydml
from pydml.memory import CrossBatchMemory

DIM, CLASSES = 12, 5
LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
HERE = [*FUSED, *(["triton"] if pydml.backends()["triton"] is None else [])]
ON = pytest.mark.parametrize("backend", HERE)
if "triton" in HERE:
    importlib.import_module("honest").install()


def exact(loss_fn: nn.Module, z: Tensor, labels: Tensor) -> Any:
    """What dense fp64 makes of the very same numbers."""
    return run(copy.deepcopy(loss_fn).double(), z.double(), labels, backend="dense")


def rounded(case: Case, loss_fn: nn.Module, z: Tensor, labels: Tensor) -> Any:
    """What it costs to round the operands of the product alone, as autocast does: unit rows in half precision."""
    twin = copy.deepcopy(loss_fn).double()
    with torch.no_grad():
        for w in twin.parameters():
            if case.proxy:
                dim = 0 if getattr(loss_fn, "transposed", False) else 1
                w.copy_(torch.nn.functional.normalize(w, dim=dim).to(z.dtype).double() * w.norm(dim=dim, keepdim=True))
    x = torch.nn.functional.normalize(z.double())
    return run(twin, x.to(z.dtype).double() * z.double().norm(dim=1, keepdim=True), labels, backend="dense")


@ON
@LOW
@over(CASES, lambda case: case.proxy or case.id in ("margin_learned", "margin_per_class"))
def test_parameters_and_their_gradients_are_not_rounded(case: Case, low: torch.dtype, backend: str) -> None:
    """Inside autocast, as users call it. Engines that multiply in fp32 are right to fp32; Triton multiplies in half."""
    z, labels = make_batch("trained", 24, DIM, CLASSES, seed=3, dtype=low)
    loss_fn = case.build(CLASSES, DIM, torch.float32)

    def under_autocast(*arguments: Any, **keywords: Any) -> Tensor:
        with torch.autocast("cpu", dtype=low):
            loss: Tensor = loss_fn(*arguments, **keywords)
        return loss

    module = nn.Module()
    module.forward = under_autocast  # type: ignore[method-assign]
    module.loss = loss_fn
    got, truth = run(module, z, labels, backend=backend), exact(loss_fn, z, labels)
    assert got.loss.dtype == torch.float32
    grads = {name.removeprefix("loss."): grad for name, grad in got.grads.items()}
    assert grads.pop("embeddings").dtype == low
    rough = rounded(case, loss_fn, z, labels).grads if backend == "triton" else {}
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        want = truth.grads[name]
        off = float((rough[name] - want).abs().max()) if rough else 0.0
        assert float((grad.double() - want).abs().max()) <= 2 * off + 2e-5 * float(want.abs().max()), name
        assert torch.equal(grad == 0, want.float() == 0), name


@ON
def test_loss_scaling_reaches_proxies_in_fp32(backend: str) -> None:
    """Gradients of a loss that weighs little vanish in fp16, and those of a scaled one overflow it; not so in fp32."""
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(7, DIM), pydml.losses.NormalizedSoftmaxLoss(CLASSES, DIM)
    x, labels = torch.randn(24, 7), torch.arange(24) % CLASSES
    grads = []
    for scale in (2.0**-16, 1.0, 2.0**24):
        with torch.autocast("cpu", dtype=torch.float16):
            embeddings = model(x)
            loss = loss_fn(embeddings, labels, backend=backend)
        assert embeddings.dtype == torch.float16
        (grad,) = torch.autograd.grad(loss * scale, [loss_fn.W])
        grads.append(grad / scale)
    assert grads[1].dtype == torch.float32 and not (grads[1] == 0).any()
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[2], grads[1])  # a power of two changes no bit


def test_mixed_precision_compiles() -> None:
    torch.compiler.reset()
    z, labels = make_batch("trained", 24, DIM, CLASSES, dtype=torch.bfloat16)
    loss_fn = pydml.losses.ProxyAnchorLoss(CLASSES, DIM)
    want = run(loss_fn, z, labels)
    got = run(torch.compile(loss_fn, backend="aot_eager", fullgraph=True), z, labels)
    for name, grad in want.grads.items():
        found = got.grads.get(name, got.grads.get(f"_orig_mod.{name}"))
        assert found is not None and found.dtype == grad.dtype
        assert_close(found, grad, 1e-6, name)


@ON
@LOW
@over(CASES, lambda case: case.takes_ref and case.id in ("ms", "contrastive", "nca", "triplet", "fast_ap"))
def test_references_may_be_of_another_dtype(case: Case, low: torch.dtype, backend: str) -> None:
    z, labels = make_batch("trained", 20, DIM, CLASSES, dtype=low)
    ref, ref_labels = make_batch("random", 15, DIM, CLASSES, seed=1, dtype=torch.float32)
    got = run(case.build(CLASSES, DIM, torch.float32), z, labels, ref_emb=ref, ref_labels=ref_labels, backend=backend)
    want = run(case.build(CLASSES, DIM), z.double(), labels, ref_emb=ref.double(), ref_labels=ref_labels,
               backend="dense")  # fmt: skip
    assert [got.grads[name].dtype for name in ("embeddings", "ref_emb")] == [low, torch.float32]
    tolerance = 2e-5 if backend != "triton" else 0.06 if low == torch.bfloat16 else 0.01
    assert_close(got.loss, want.loss, tolerance)
    assert_close(got.grads["ref_emb"], want.grads["ref_emb"], tolerance)


def test_a_memory_does_not_round_what_it_holds() -> None:
    memory = CrossBatchMemory(pydml.losses.ContrastiveLoss(), DIM, 32)
    z, labels = make_batch("random", 12, DIM, CLASSES, dtype=torch.float32)
    memory(z, labels)
    half = z.bfloat16().requires_grad_()
    memory(half, labels).backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    assert torch.equal(memory.embedding_memory[:12], z)
    assert torch.equal(memory.embedding_memory[12:24], z.bfloat16().float())


# torch.func


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("name", ["ms", "normalized_softmax", "triplet", "dro_topk"])
def test_torch_func_is_refused_by_name(name: str, backend: str) -> None:
    (case,) = [case for case in CASES if case.id == name]
    z, labels = make_batch("trained", 12, DIM, CLASSES, dtype=torch.float32)
    loss_fn = case.build(CLASSES, DIM, torch.float32)

    def loss(x: Tensor) -> Tensor:
        out: Tensor = loss_fn(x, labels, backend=backend)
        return out

    for transform in (torch.func.grad, torch.func.vmap, torch.func.jacrev):
        given = torch.stack((z, z)) if transform is torch.func.vmap else z
        with pytest.raises(RuntimeError, match=r"^pydml: torch\.func .*backend='dense'"):
            transform(loss)(given)
    with pytest.raises(RuntimeError, match=r"^pydml: torch\.func .*backend='dense'"):
        torch.func.jvp(loss, (z,), (z,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="pydml: forward-mode"):
        loss(torch.autograd.forward_ad.make_dual(z, z))


def test_dense_takes_torch_func() -> None:
    z, labels = make_batch("trained", 12, DIM, CLASSES, dtype=torch.float64)
    loss_fn = pydml.losses.NormalizedSoftmaxLoss(CLASSES, DIM).double()

    def loss(x: Tensor) -> Tensor:
        out: Tensor = loss_fn(x, labels, backend="dense")
        return out

    want = run(loss_fn, z, labels, backend="dense").grads["embeddings"]
    assert_close(torch.func.grad(loss)(z), want, 1e-12)
    assert_close(torch.func.vmap(torch.func.grad(loss))(torch.stack((z, z)))[1], want, 1e-12)
    assert_close(torch.func.jvp(loss, (z,), (want,))[1], want.square().sum(), 1e-12)
