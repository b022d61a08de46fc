"""What only the C++ backend has: threads, instruction sets, live pairs, tiles, memory."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import arguments

import pydml
from pydml.losses import LOSSES, MetricLoss, ProxyLoss
from pydml.losses.batch import pair_stats

pytestmark = [
    pytest.mark.sanitize,
    pytest.mark.skipif(pydml.backends()["cpu"] is not None, reason="the extension is not built"),
]


def batch(b: int, d: int, classes: int, noise: float, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Items around class centres: the smaller the noise, the fewer negatives are mined."""
    centres = torch.randn(classes, d, dtype=dtype)
    labels = torch.arange(b) % classes
    return centres[labels] + noise * torch.randn(b, d, dtype=dtype), labels


def build(name: str, classes: int, d: int, **options: Any) -> MetricLoss:
    cls = LOSSES[name]
    if issubclass(cls, ProxyLoss):
        options = {"num_classes": classes, "embedding_size": d, **options}
    if name == "dro_topk":
        options = {"k": 50, **options}
    return cls(**options)


def run(loss: MetricLoss, z: torch.Tensor, labels: torch.Tensor, backend: str = "cpu") -> tuple[Any, Any]:
    x = z.clone().requires_grad_()
    value = loss(x, labels, backend=backend)
    value.backward()
    return value.detach(), x.grad


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


#: ProxyRepulsion's default multiplies XᵀX by PyTorch's own product, whose bits hang on the threads on some CPUs.
BY_ENGINES_ALONE = {"proxy_repulsion": {"variant": "proxy"}}


@pytest.mark.parametrize("name", LOSSES)
def test_any_number_of_threads_and_any_run_gives_the_same_bits(name: str, threads: Callable[[int], None]) -> None:
    z, labels = batch(300, 24, 70, 1.0)
    torch.manual_seed(0)
    loss = build(name, 70, 24, **BY_ENGINES_ALONE.get(name, {}))
    results = []
    for n in (1, 2, 3, 2):
        threads(n)
        results.append(run(loss, z, labels))
    for value, grad in results[1:]:
        assert torch.equal(value, results[0][0]) and torch.equal(grad, results[0][1])


@pytest.mark.parametrize("name", BY_ENGINES_ALONE)
def test_pytorchs_products_differ_between_threads_by_rounding_alone(name: str, threads: Callable[[int], None]) -> None:
    z, labels = batch(300, 24, 70, 1.0)
    torch.manual_seed(0)
    loss = build(name, 70, 24)
    threads(1)
    value, grad = run(loss, z, labels)
    for n in (2, 3):
        threads(n)
        again, grad_again = run(loss, z, labels)
        assert abs(again - value) <= 1e-6 * abs(value)
        assert (grad_again - grad).abs().max() <= 1e-5 * grad.abs().max()


@pytest.mark.parametrize("noise", [0.05, 0.6, 3.0], ids=["trained", "between", "early"])
@pytest.mark.parametrize("name, options", [("ms", {"epsilon": 0.1}), ("contrastive", {}), ("ms_mining", {})])
def test_listed_and_recomputed_tiles_give_the_same_gradient(name: str, options: Any, noise: float) -> None:
    """Few live pairs: all in lists; many: tiles recomputed; between: both in one batch."""
    z, labels = batch(600, 32, 150, noise, torch.float64)
    loss = build(name, 150, 32, **options)
    value, grad = run(loss, z, labels)
    want, want_grad = run(loss, z, labels, "tiled")
    torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, want_grad, rtol=1e-8, atol=1e-12)


def test_a_list_that_is_full_leaves_the_other_tiles_to_be_recomputed() -> None:
    """1 in 20 negatives of every tile is live: each tile alone would be listed, but all together do not fit."""
    torch.manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(3000, 8, dtype=torch.float64))
    labels = torch.arange(3000)
    loss = pydml.losses.ContrastiveLoss(distance="cosine", pos_margin=1, neg_margin=0.58)
    live = ((z @ z.T).triu(1) > 0.58).double().mean() * 2
    assert 0.03 < live < 1 / 16, live
    assert live * 3000 * 3000 / 2 > 64 * 3000
    value, grad = run(loss, z, labels)
    want, want_grad = run(loss, z, labels, "tiled")
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(grad, want_grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("rows, cols", [(1, 1), (64, 65), (130, 700), (700, 130)])
def test_what_the_forward_pass_keeps_has_the_size_that_the_fake_says(rows: int, cols: int) -> None:
    z, y = torch.randn(rows, 8), torch.randint(0, 5, (rows,))
    r, ry = torch.randn(cols, 8), torch.randint(0, 5, (cols,))
    for other, other_labels in ((None, None), (r, ry)):
        policy = ("exponential", [-2.0, 0.5, 50.0, 0.5], "dot", True, 0.1, 1, 1.0)
        args = arguments("pair", z, other, y, other_labels, None, None, *policy).values()
        stats, thresholds, saved = torch.ops.pydml.pair(*args, "cpu")
        fake = [torch.empty_like(t, device="meta") if isinstance(t, torch.Tensor) else t for t in args]
        meta = torch.ops.pydml.pair(*fake, "cpu")
        assert [t.shape for t in meta] == [stats.shape, thresholds.shape, saved.shape]


@pytest.mark.parametrize("name", ["triplet", "ms", "histogram", "extreme_triplet"])
def test_few_huge_classes_are_computed_in_linear_memory(name: str) -> None:
    z, labels = batch(300, 16, 2, 1.0, torch.float64)
    loss = build(name, 2, 16)
    for got, want in zip(run(loss, z, labels), run(loss, z, labels, "tiled"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_exponents_too_far_apart_for_one_shift_keep_their_precision() -> None:
    """Rows whose largest terms differ by more than e^60 in one tile."""
    torch.manual_seed(0)
    z = torch.randn(90, 6, dtype=torch.float64) * torch.logspace(-2, 1, 90, dtype=torch.float64)[:, None]
    labels = torch.arange(90) % 30
    args = ("exponential", [-3.0, 0.1, 40.0, 0.2])
    want = pair_stats(z, None, labels, None, *args, normalize=False, backend="tiled")
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        got = pair_stats(z.to(dtype), None, labels, None, *args, normalize=False, backend="cpu")
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=rtol * 10)


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    z, labels = batch(200, 16, 50, 1.0)
    loss = build("ms", 50, 16, epsilon=0.1)
    want = run(loss, z, labels)
    results: list[Any] = []
    workers = [threading.Thread(target=lambda: results.append(run(loss, z, labels))) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(results) == 4
    for value, grad in results:
        torch.testing.assert_close(value, want[0])
        torch.testing.assert_close(grad, want[1])


ISA_SCRIPT = """
import sys, torch, pydml, pydml._C
assert pydml._C.isa() == sys.argv[1], pydml._C.isa()
torch.manual_seed(0)
labels = torch.arange(150) % 40
for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 5e-4)):
    z = torch.randn(150, 12, dtype=dtype) + 2 * torch.randn(40, 12, dtype=dtype)[labels]
    for name, cls in pydml.losses.LOSSES.items():
        options = {"k": 50} if name == "dro_topk" else {}
        if issubclass(cls, pydml.losses.ProxyLoss):
            options = dict(num_classes=40, embedding_size=12)
        loss, out = cls(**options).to(dtype), []
        for backend in ("cpu", "tiled"):
            x = z.clone().requires_grad_()
            value = loss(x, labels, backend=backend)
            value.backward()
            out.append((value.detach(), x.grad))
        for got, want in zip(*out):
            assert (got - want).abs().max() <= rtol * max(want.abs().max(), 1e-3), (name, dtype)
print("same")
rows = torch.nn.functional.normalize(torch.randn(150, 12))
for name in ("bin_lifted", "ms", "dro_kl_grouped"):  # shares of huge exponents: terms must be contracted nowhere
    loss = pydml.losses.LOSSES[name](normalize_embeddings=False)
    for norm in (30, 100, 1000, 10000):
        grads = []
        for backend in ("cpu", "tiled"):
            z = (norm * rows).requires_grad_()
            loss(z, labels, backend=backend).backward()
            grads.append(z.grad)
        assert (grads[0] - grads[1]).abs().max() < 2e-5 * grads[1].abs().max(), (name, norm)
print("shares")
"""


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_values(isa: str) -> None:
    features = pydml.native.pydml._C.cpu_features()
    needs = {"portable": [], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512dq", "avx512vl"]}[isa]
    if not set(needs) <= set(features):
        pytest.skip(f"this CPU has no {isa}")
    done = subprocess.run(
        [sys.executable, "-c", ISA_SCRIPT, isa],
        env={**os.environ, "PYDML_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "same\nshares\n", done.stderr


def test_the_compiler_contracts_nothing() -> None:
    """A term must have the same bits wherever it is computed; csrc/policy.h says where products are fused."""
    assert "-ffp-contract=off" in pydml.native.pydml._C.build_info()["flags"].split()


def test_an_unknown_instruction_set_is_refused_in_words() -> None:
    script = "import pydml._C; pydml._C.isa()"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYDML_ISA": "mmx"}, capture_output=True, text=True
    )
    assert done.returncode != 0 and "PYDML_ISA" in done.stderr


def test_the_policies_of_cpp_and_python_are_the_same_list() -> None:
    assert pydml.native.pydml._C.losses() == list(pydml.policy.POLICIES)


def test_transposed_proxies_get_their_gradient_in_their_own_layout() -> None:
    loss = pydml.losses.NormalizedSoftmaxLoss(300, 16)
    loss(torch.randn(64, 16), torch.randint(0, 300, (64,)), backend="cpu").backward()
    assert loss.W.grad is not None and loss.W.grad.stride() == loss.W.stride()
