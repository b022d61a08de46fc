"""The losses as functions: the same value and gradients as the classes, the classes' own signatures, compilable."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import pydml
from pydml import functional
from pydml.functional import FUNCTIONS
from pydml.losses import LOSSES, MetricLoss, ProxyLoss

SIZE, CLASSES = 6, 5
#: Arguments that differ from the defaults, for some losses; ``k`` has none.
OPTIONS: dict[str, dict[str, Any]] = {
    "ms": {"alpha": 3, "beta": 20.0, "epsilon": 0.2},
    "contrastive": {"distance": "cosine", "pos_margin": 1, "neg_margin": 0.5, "denominator": "batch"},
    "generalized_lifted": {"reduction": "sum"},
    "margin": {"margin": 0.1, "beta": 1.0},
    "triplet": {"triplets": "semihard", "margin": 0.3},
    "dro_topk": {"k": 9},
    "proxy_nca": {"include_positive": False},
    "soft_triple": {"centers_per_class": 3, "tau": 0.2},
    "proxy_repulsion": {"variant": "proxy"},
}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(24, SIZE, dtype=torch.float64, requires_grad=True), torch.arange(24) % CLASSES


def build(name: str) -> MetricLoss:
    cls, options = LOSSES[name], OPTIONS.get(name, {})
    return (cls(CLASSES, SIZE, **options) if issubclass(cls, ProxyLoss) else cls(**options)).double()


def tensors(module: MetricLoss) -> list[Tensor]:
    """The proxies of a module, as a leaf of our own."""
    return (
        [getattr(module, module.parameter).detach().clone().requires_grad_()] if isinstance(module, ProxyLoss) else []
    )


def test_every_loss_has_one_function_under_its_own_name() -> None:
    assert list(FUNCTIONS) == list(LOSSES)
    for function in FUNCTIONS.values():
        assert getattr(functional, function.__name__) is function
        assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("backend", ["dense", "auto"])
@pytest.mark.parametrize("name", LOSSES)
def test_function_equals_class(name: str, backend: str) -> None:
    module, (embeddings, labels) = build(name), batch()
    given = tensors(module)
    got = FUNCTIONS[name](embeddings, labels, *given, backend=backend, **OPTIONS.get(name, {}))
    want = module(embeddings, labels, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    got_grads = torch.autograd.grad(got, [embeddings, *given])
    want_grads = torch.autograd.grad(want, [embeddings, *module.parameters()])
    torch.testing.assert_close(got_grads, want_grads, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_signature_and_docstring_are_those_of_the_class(name: str) -> None:
    cls, function = LOSSES[name], FUNCTIONS[name]
    own = {k: p.default for k, p in inspect.signature(cls).parameters.items() if k != "common"}
    shown = inspect.signature(function).parameters
    for parameter, default in own.items():
        if parameter in ("num_classes", "embedding_size", "learn_beta"):
            assert parameter not in shown
        else:
            assert shown[parameter].kind is inspect.Parameter.KEYWORD_ONLY
            assert shown[parameter].default == default or shown[parameter].default is default
    assert list(shown)[:2] == ["embeddings", "labels"]
    assert (list(shown)[2] == "proxies") == issubclass(cls, ProxyLoss)
    assert list(shown)[-1] == "backend"
    assert cls.__doc__ is not None and function.__doc__ is not None
    assert cls.__doc__ in function.__doc__


def test_shown_defaults_of_proxy_options_are_the_real_ones() -> None:
    module = pydml.losses.ProxyAnchorLoss(CLASSES, SIZE)
    for option, value in functional._PROXY_OPTIONS.items():
        assert getattr(module, option) == value


def test_reference_set_and_tuple_reach_the_loss() -> None:
    (embeddings, labels), (ref, _) = batch(), batch()
    got = functional.contrastive_loss(embeddings, labels, None, ref, labels)
    torch.testing.assert_close(got, pydml.losses.ContrastiveLoss()(embeddings, labels, ref_emb=ref, ref_labels=labels))
    triplets = tuple(torch.tensor(index) for index in ([0, 1], [5, 6], [1, 2]))
    got = functional.triplet_margin_loss(embeddings, labels, triplets)
    torch.testing.assert_close(got, pydml.losses.TripletMarginLoss()(embeddings, labels, triplets))
    proxies = torch.randn(CLASSES, SIZE, dtype=torch.float64)
    got = functional.proxy_nca_loss(embeddings, labels, proxies, triplets)
    assert got != functional.proxy_nca_loss(embeddings, labels, proxies)


@pytest.mark.parametrize("shape", [(), (1,), (CLASSES,)])
def test_margin_loss_takes_beta_as_a_tensor(shape: tuple[int, ...]) -> None:
    embeddings, labels = batch()
    beta = torch.full(shape, 1.1, dtype=torch.float64, requires_grad=True)
    got = functional.margin_loss(embeddings, labels, beta=beta, nu=0.01)
    per_class = CLASSES if shape == (CLASSES,) else None
    module = pydml.losses.MarginLoss(beta=1.1, nu=0.01, learn_beta=True, num_classes=per_class).double()
    with torch.no_grad():
        module.beta.fill_(1.1)
    want = module(embeddings, labels)
    torch.testing.assert_close(got, want)
    (got_grad,) = torch.autograd.grad(got, beta)
    (want_grad,) = torch.autograd.grad(want, module.beta)
    torch.testing.assert_close(got_grad.reshape(-1), want_grad)


@pytest.mark.parametrize("name", LOSSES)
def test_function_compiles_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    options, (embeddings, labels) = OPTIONS.get(name, {}), batch()
    given = tensors(build(name))

    def step(*arguments: Tensor) -> Tensor:
        return FUNCTIONS[name](*arguments, **options)

    want = step(embeddings, labels, *given)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(embeddings, labels, *given)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, [embeddings, *given]), torch.autograd.grad(want, [embeddings, *given])
    )


def test_a_compiled_function_follows_its_hyper_parameters() -> None:
    torch._dynamo.reset()
    embeddings, labels = batch()
    step = torch.compile(functional.multi_similarity_loss, fullgraph=True, backend="aot_eager")
    for options in ({"alpha": 2, "base": 0.5}, {"alpha": 4, "base": 0.1}, {"alpha": 5.5, "base": 1}):
        want = functional.multi_similarity_loss(embeddings, labels, **options)
        torch.testing.assert_close(step(embeddings, labels, **options), want)


def test_a_compiled_function_follows_the_number_of_proxies() -> None:
    torch._dynamo.reset()
    embeddings, labels = batch()
    step = torch.compile(functional.proxy_anchor_loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for classes in (CLASSES, CLASSES + 1, CLASSES + 2):
        proxies = torch.randn(classes, SIZE, dtype=torch.float64)
        want = functional.proxy_anchor_loss(embeddings, labels, proxies)
        torch.testing.assert_close(step(embeddings, labels, proxies), want)


def test_function_draws_no_random_numbers() -> None:
    embeddings, labels = batch()
    proxies = torch.randn(CLASSES, SIZE, dtype=torch.float64)
    state = torch.get_rng_state()
    functional.proxy_anchor_loss(embeddings, labels, proxies)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("ms", {"gamma": 1}, TypeError, "multi_similarity_loss: got an unexpected argument 'gamma'"),
        ("margin", {"learn_beta": True}, TypeError, "unexpected argument 'learn_beta'"),
        ("margin", {"beta": torch.ones(2, 2)}, ValueError, r"beta: got torch.float32 \[2, 2\]"),
        ("proxy_anchor", {"num_classes": 3}, TypeError, "unexpected argument 'num_classes'"),
        ("soft_triple", {"centers_per_class": 4}, ValueError, "wanted a multiple of centers_per_class=4"),
        ("ms", {"alpha": -1}, ValueError, "alpha: got -1"),
    ],
)
def test_wrong_arguments_are_named(name: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    embeddings, labels = batch()
    with pytest.raises(error, match=words):
        FUNCTIONS[name](embeddings, labels, *tensors(build(name)), **options)
