"""Every loss as a function: ``pydml.functional.multi_similarity_loss(embeddings, labels, alpha=2)``.

One factory makes them from the classes of :data:`pydml.losses.LOSSES`: signature, docstring and defaults are the class'
own. Proxies, and the margin loss' β, are arguments here, so that gradients flow to whatever tensor they come from.

>>> embeddings, labels = torch.randn(32, 16, requires_grad=True), torch.arange(32) % 8
>>> pydml.functional.multi_similarity_loss(embeddings, labels, epsilon=0.1).backward()
>>> proxies = torch.randn(8, 16, requires_grad=True)
>>> pydml.functional.proxy_anchor_loss(embeddings, labels, proxies, alpha=16).backward()
>>> proxies.grad.shape
torch.Size([8, 16])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from inspect import Parameter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pydml import checks
from pydml.backends import constant
from pydml.losses import LOSSES, MetricLoss, ProxyLoss

Loss = Callable[..., Tensor]
#: Short name of :data:`pydml.losses.LOSSES` -> the loss as a function.
FUNCTIONS: dict[str, Loss] = {}

#: Arguments of the classes that a function takes from the shapes of its tensors.
_FROM_TENSORS = ("num_classes", "embedding_size", "learn_beta")
#: What proxy losses take beside their hyper-parameters; how to make the proxies is no question here.
_PROXY_OPTIONS = {"weight_regularizer": None, "weight_reg_weight": 1}


def _options(cls: type[MetricLoss]) -> list[Parameter]:
    """The class' hyper-parameters, then what all losses share, as keyword-only parameters."""
    own = inspect.signature(cls).parameters.values()
    shared = inspect.signature(MetricLoss).parameters.values()
    options = [p for p in (*own, *shared) if p.name not in _FROM_TENSORS and p.kind is not Parameter.VAR_KEYWORD]
    options = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in options]
    if issubclass(cls, ProxyLoss):
        options += [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in _PROXY_OPTIONS.items()]
    return options


def _build(cls: type[MetricLoss], arguments: dict[str, Any]) -> MetricLoss:
    """The module of one call. Proxies in it are placeholders without storage: the call brings its own."""
    if not issubclass(cls, ProxyLoss):
        return cls(**arguments)
    with torch.device("meta"):  # and no initialisation: a function must not draw random numbers
        return cls(**arguments, weight_init_func=lambda w: None)  # type: ignore[call-arg]


_traced = SimpleNamespace()
_keys: dict[Any, str] = {}


@constant
def _remember(cls: type[MetricLoss], arguments: tuple[tuple[str, Any], ...]) -> str:
    """Build a module outside the trace, once; the name of the attribute of ``_traced`` that keeps it."""
    types = tuple(type(value) for _, value in arguments)  # 1, 1.0 and True are different arguments
    key = _keys.setdefault((cls, arguments, types), f"module_{len(_keys)}")
    if not hasattr(_traced, key):
        setattr(_traced, key, _build(cls, dict(arguments)))
    return key


def _fixed(value: Any) -> Any:
    """A number as a constant of the trace: torch.compile makes symbols of those that changed between two calls."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    numerator, denominator = float(value).as_integer_ratio()
    return numerator if isinstance(value, int) else numerator / denominator


@lru_cache(maxsize=64)
def _kept(cls: Any, arguments: tuple[Any, ...]) -> MetricLoss:
    """A module that has no parameters and only numbers for settings serves many calls."""
    return _build(cls, {name: value for name, _, value in arguments})


def _call(
    cls: type[MetricLoss], arguments: dict[str, Any], tensors: dict[str, Tensor], batch: tuple[Any, ...], backend: str
) -> Tensor:
    """Call a module made for this call, with ``tensors`` in the place of its parameters."""
    # torch.compile cannot trace the making of a module, but it can trace a call of one that is there
    if torch.compiler.is_compiling():
        fixed = tuple([(name, _fixed(value)) for name, value in arguments.items()])
        module: MetricLoss = getattr(_traced, _remember(cls, fixed))
    elif tensors or not all(value is None or isinstance(value, (int, float, str)) for value in arguments.values()):
        module = _build(cls, arguments)
    else:
        kind: Any = cls
        module = _kept(kind, tuple((name, type(value), value) for name, value in arguments.items()))
    if not tensors:
        loss: Tensor = module(*batch, backend=backend)
        return loss
    loss = torch.func.functional_call(module, tensors, batch, {"backend": backend})
    return loss


def _check_options(name: str, options: dict[str, Any], allowed: tuple[str, ...]) -> None:
    for option in options:
        if option not in allowed:
            raise checks.unexpected(name, option, allowed)


def _pair_function(name: str, cls: type[MetricLoss], allowed: tuple[str, ...]) -> Loss:
    takes_beta = "learn_beta" in inspect.signature(cls).parameters

    def loss(
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        backend: str = "auto",
        **options: Any,
    ) -> Tensor:
        _check_options(name, options, allowed)
        tensors = {}
        beta = options.get("beta")
        if takes_beta and isinstance(beta, Tensor):
            if beta.ndim > 1 or not beta.numel() or not beta.is_floating_point():
                got = f"{beta.dtype} {list(beta.shape)}"
                raise ValueError(f"beta: got {got}, wanted a number, or floats of shape [], [1] or [classes]")
            tensors["beta"] = beta.reshape(-1)
            del options["beta"]
            options.update(learn_beta=True, num_classes=beta.numel())
        batch = (embeddings, labels, indices_tuple, ref_emb, ref_labels)
        return _call(cls, options, tensors, batch, backend)

    return loss


def _proxy_function(name: str, cls: type[ProxyLoss], allowed: tuple[str, ...]) -> Loss:
    one_center = Parameter("centers_per_class", Parameter.KEYWORD_ONLY, default=1)
    default_centers = inspect.signature(cls).parameters.get("centers_per_class", one_center).default

    def loss(
        embeddings: Tensor,
        labels: Tensor,
        proxies: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
        *,
        backend: str = "auto",
        **options: Any,
    ) -> Tensor:
        _check_options(name, options, allowed)
        checks.embeddings("proxies", proxies)
        rows, size = (proxies.T if cls.transposed else proxies).shape
        centers = checks.integer("centers_per_class", options.get("centers_per_class", default_centers), least=1)
        if rows % centers:
            raise ValueError(f"proxies: got {rows} of them, wanted a multiple of centers_per_class={centers}")
        options.update(num_classes=rows // centers, embedding_size=size)
        return _call(cls, options, {cls.parameter: proxies}, (embeddings, labels, indices_tuple), backend)

    return loss


def _function(name: str, short: str) -> Loss:
    """Make and register the function ``name`` of ``LOSSES[short]``, with the class' own signature and docstring."""
    cls = LOSSES[short]
    options = _options(cls)
    allowed = tuple(p.name for p in options)
    doc = f"Functional form of :class:`pydml.losses.{cls.__name__}`"
    if issubclass(cls, ProxyLoss):
        loss = _proxy_function(name, cls, allowed)
        doc += f": ``proxies`` is laid out as its parameter ``{cls.parameter}``"
    else:
        loss = _pair_function(name, cls, allowed)
    if "learn_beta" in inspect.signature(cls).parameters:
        doc += ": ``beta`` is a number, or a tensor with one β or one a class, and counts as learned then"
        options = [p.replace(annotation="float | Tensor") if p.name == "beta" else p for p in options]
    given = inspect.signature(loss).parameters
    batch = [p for p in given.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    loss.__name__ = loss.__qualname__ = name
    loss.__doc__ = f"{doc}.\n\n    {cls.__doc__}"
    signature = inspect.Signature([*batch, *options, given["backend"]], return_annotation="Tensor")
    setattr(loss, "__signature__", signature)  # noqa: B010 - no attribute of Callable, for mypy
    FUNCTIONS[short] = loss
    return loss


multi_similarity_loss = _function("multi_similarity_loss", "ms")
ms_mining_loss = _function("ms_mining_loss", "ms_mining")
contrastive_loss = _function("contrastive_loss", "contrastive")
binomial_deviance_loss = _function("binomial_deviance_loss", "binomial")
lifted_structure_loss = _function("lifted_structure_loss", "lifted")
generalized_lifted_structure_loss = _function("generalized_lifted_structure_loss", "generalized_lifted")
lifted_star_loss = _function("lifted_star_loss", "lifted_star")
bin_lifted_loss = _function("bin_lifted_loss", "bin_lifted")
nca_loss = _function("nca_loss", "nca")
n_pairs_loss = _function("n_pairs_loss", "n_pairs")
margin_loss = _function("margin_loss", "margin")
triplet_margin_loss = _function("triplet_margin_loss", "triplet")
extreme_triplet_loss = _function("extreme_triplet_loss", "extreme_triplet")
histogram_loss = _function("histogram_loss", "histogram")
fast_ap_loss = _function("fast_ap_loss", "fast_ap")
dro_topk_loss = _function("dro_topk_loss", "dro_topk")
dro_kl_loss = _function("dro_kl_loss", "dro_kl")
dro_kl_grouped_loss = _function("dro_kl_grouped_loss", "dro_kl_grouped")
normalized_softmax_loss = _function("normalized_softmax_loss", "normalized_softmax")
proxy_nca_loss = _function("proxy_nca_loss", "proxy_nca")
arcface_loss = _function("arcface_loss", "arcface")
soft_triple_loss = _function("soft_triple_loss", "soft_triple")
proxy_anchor_loss = _function("proxy_anchor_loss", "proxy_anchor")
proxy_repulsion_loss = _function("proxy_repulsion_loss", "proxy_repulsion")
