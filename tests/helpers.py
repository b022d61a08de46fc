"""What several test files share: backends, losses with arguments, batches, and how results are compared."""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pydml
from pydml import declared
from pydml.losses import LOSSES, MetricLoss, ProxyLoss

#: Device code that an interpreter or an emulator runs, too slowly for every test; its own tests hold it to the same.
SIMULATED = ("triton", "cuda-emulated")
BACKENDS = [name for name, why_not in pydml.backends().items() if why_not is None and name not in SIMULATED]
FUSED = [name for name in BACKENDS if name != "dense"]
GOLDEN = Path(__file__).parent / "golden"


# Golden vectors


@dataclass(frozen=True)
class Golden:
    """One vector of ``golden/``; its README says what the keys mean."""

    name: str
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


@functools.cache
def _golden() -> dict[str, Path]:
    """Which file has a vector, by the vector's name."""
    files = {path: zipfile.ZipFile(path).namelist() for path in sorted(GOLDEN.glob("*.npz"))}
    return {key.partition("/")[0]: path for path, keys in files.items() for key in keys}


def golden_names() -> list[str]:
    return sorted(_golden())


@functools.cache
def golden_file(path: Path) -> dict[str, Golden]:
    """All vectors of one file, by name: a file is read once and closed."""
    arrays: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path, allow_pickle=False) as file:
        for key in file.files:
            name, _, array = key.partition("/")
            arrays.setdefault(name, {})[array] = file[key]
    return {name: Golden(name, of, json.loads(str(of.pop("meta")))) for name, of in arrays.items()}


def golden(name: str) -> Golden:
    return golden_file(_golden()[name])[name]


def check_golden(case: Golden, backend: str, dtype: torch.dtype, rtol: float) -> None:
    """Assert that loss and every gradient are those of the file, relative to the largest entry of each array."""
    f, meta = case.arrays, case.meta

    def tensor(key: str) -> Tensor:
        t = torch.tensor(f[key])
        return t.to(dtype) if t.is_floating_point() else t

    loss_fn = getattr(pydml.losses, meta["class"])(**meta["kwargs"]).to(dtype)
    leaves = {key: tensor(key).requires_grad_() for key in ("embeddings", "ref_embeddings") if key in f}
    for attribute, key in meta["parameters"].items():
        leaves[key] = getattr(loss_fn, attribute)
        leaves[key].data = tensor(key)

    def argument(key: str | list[str]) -> Any:
        if isinstance(key, list):
            return tuple(tensor(k) for k in key)
        return leaves[key] if key in leaves else tensor(key)

    forward = {name: argument(key) for name, key in meta["forward"].items()}
    loss = loss_fn(leaves["embeddings"], tensor("labels"), **forward, backend=backend)
    loss.backward(tensor("grad_output") if "grad_output" in f else None)
    assert_close(loss, f["loss"], rtol, "loss")
    for key, leaf in leaves.items():
        assert leaf.grad is not None, f"{key} got no gradient"
        assert leaf.grad.dtype == dtype
        assert_close(leaf.grad, f[f"grad_{key}"], rtol, f"gradient of {key}")


def assert_close(got: Any, want: Any, rtol: float, what: str = "value", floor: float = 1e-3) -> None:
    """|got - want| <= rtol · max(largest |want|, floor), everywhere; NaN and infinity are never close."""
    got, want = (np.asarray(t.detach().double() if isinstance(t, Tensor) else t, dtype=np.float64) for t in (got, want))
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    if not want.size:
        return
    error, scale = np.abs(got - want).max(), max(np.abs(want).max(), floor)
    assert error <= rtol * scale < np.inf, (
        f"{what}: off by {error:.3g} where the largest entry is {scale:.3g}, rtol {rtol:g}"
    )


# Ops by position


def arguments(op: str, *values: Any) -> dict[str, Any]:
    """All arguments of an op by name, without the backend; those at the end that are left out have their defaults."""
    made = declared.op(op).read(values)
    return {f.name: getattr(made, f.name) for f in fields(made)}


def backward_arguments(op: str, given: Iterable[Any], outputs: Any, grads: Iterable[Tensor], wants: Any) -> list[Any]:
    """Arguments of an op's backward: of gradients, of what the forward gave, of the forward's own arguments."""
    call = declared.CALLS[op]
    results = dict(zip(call.Out._fields, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    return [*grads, *(results[name] for name in call.kept), *given, *wants]


def with_gradients(op: str, outputs: Any) -> list[Tensor]:
    """Those of an op's results that have gradients."""
    call = declared.CALLS[op]
    results = dict(zip(call.Out._fields, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    return [results[name] for name in call.grads]


# Losses with arguments, for the tests that go over all of them


@dataclass(frozen=True)
class Case:
    """A loss of the registry with its arguments; ``num_classes`` and the like are filled in by :meth:`build`."""

    id: str
    loss: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def cls(self) -> type[MetricLoss]:
        return LOSSES[self.loss]

    @property
    def proxy(self) -> bool:
        return issubclass(self.cls, ProxyLoss)

    @property
    def takes_ref(self) -> bool:
        return self.cls.takes_ref and not self.arguments.get("swap", False)

    @property
    def takes_tuple(self) -> bool:
        return self.cls.takes_tuple and "epsilon" not in self.arguments and "triplets" not in self.arguments

    @property
    def per_class(self) -> bool:
        """Do labels have to be classes 0 … C-1?"""
        return self.proxy or "num_classes" in self.arguments

    def build(self, num_classes: int, dim: int, dtype: torch.dtype = torch.float64, **more: Any) -> MetricLoss:
        """The module, its parameters drawn from a fixed seed."""
        arguments = self.arguments | more
        if self.proxy:
            arguments |= {"num_classes": num_classes, "embedding_size": dim}
        elif "num_classes" in arguments:
            arguments["num_classes"] = num_classes
        loss_fn = self.cls(**arguments).to(dtype)
        g = generator(num_classes, dim)
        with torch.no_grad():
            for parameter in loss_fn.parameters():
                if self.proxy:
                    parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64))
                else:  # the boundary of the margin loss
                    parameter.add_(0.1 * torch.rand(parameter.shape, generator=g, dtype=torch.float64))
        return loss_fn


def _cases() -> list[Case]:
    table: dict[str, dict[str, dict[str, Any]]] = {
        "ms": {"": {}, "mined": {"epsilon": 0.1}, "euclidean": {"distance": "euclidean", "base": 1.0, "beta": 10}},
        "ms_mining": {"": {}},
        "contrastive": {
            "": {},
            "cosine": {"distance": "cosine", "pos_margin": 0.9, "neg_margin": 0.1},
            "batch": {"denominator": "batch"},
            "raw": {"normalize_embeddings": False, "neg_margin": 6},
        },
        "binomial": {"": {}, "mined": {"epsilon": 0.1}},
        "lifted": {"": {}, "cosine": {"distance": "cosine", "neg_margin": 0, "pos_margin": 0.5}},
        "generalized_lifted": {"": {}, "cosine": {"distance": "cosine", "neg_margin": 0, "pos_margin": 0.5}},
        "lifted_star": {"": {}, "mined": {"epsilon": 0.1}},
        "bin_lifted": {"": {}},
        "nca": {"": {}, "sharp": {"softmax_scale": 8}},
        "n_pairs": {"": {}},
        "margin": {
            "": {},
            "learned": {"learn_beta": True, "nu": 0.2},
            "per_class": {"learn_beta": True, "nu": 0.2, "num_classes": 0},
        },
        "triplet": {
            "": {},
            "swap": {"swap": True, "margin": 0.2},
            "smooth": {"smooth_loss": True},
            "cosine": {"distance": "cosine", "margin": 0.1},
            "hard": {"triplets": "hard", "margin": 0.2},
            "semihard": {"triplets": "semihard", "margin": 0.2},
        },
        "extreme_triplet": {
            "": {},
            "semihard": {"negative": "semihard"},
            "second_order": {"positive": "hard", "negative": "easy", "order": 2},
        },
        "histogram": {"": {}, "coarse": {"n_bins": 7}},
        "fast_ap": {"": {}},
        "dro_topk": {
            "": {"k": 9},
            "binomial": {"k": 9, "base_loss": "binomial"},
            "balanced": {"k": 8, "balanced": True},
        },
        "dro_kl": {"": {}, "binomial": {"base_loss": "binomial"}},
        "dro_kl_grouped": {"": {}, "binomial": {"base_loss": "binomial", "gamma_pos": 0.3}},
        "normalized_softmax": {"": {}},
        "proxy_nca": {"": {}, "paper": {"include_positive": False, "softmax_scale": 3}},
        "arcface": {"": {"scale": 16}, "wide": {"margin": 100, "scale": 8}},
        "soft_triple": {"": {"centers_per_class": 3}, "merging": {"centers_per_class": 2, "tau": 0.2}},
        "proxy_anchor": {"": {}},
        "proxy_repulsion": {"": {"alpha": 4}, "proxy": {"variant": "proxy"}, "mean": {"aggregate": "mean"}},
    }
    return [
        Case(f"{loss}-{variant}" if variant else loss, loss, arguments)
        for loss, variants in table.items()
        for variant, arguments in variants.items()
    ]


CASES = _cases()
#: Variants that the authors' code has, where they are another path: for the tests of such paths.
OFFICIAL = [
    Case("extreme_triplet-official", "extreme_triplet", {"negative": "semihard", "official": True}),
    Case("dro_topk-matched", "dro_topk", {"k": 160, "balanced": True, "matched": True}),
]
DEFAULTS = [case for case in CASES if case.id == case.loss]
assert [case.loss for case in DEFAULTS] == list(LOSSES), "a loss of the registry has no case here"


def over(cases: Iterable[Case], which: Callable[[Case], bool] = lambda case: True) -> Any:
    """Parametrise a test over cases."""
    return pytest.mark.parametrize("case", [case for case in cases if which(case)], ids=lambda case: case.id)


# Batches


def generator(*seeds: int) -> torch.Generator:
    """Its numbers hang on the seeds alone, not on what other tests have drawn."""
    return torch.Generator().manual_seed(
        functools.reduce(lambda total, seed: (1000003 * total + seed) % 2**61, seeds, 12345)
    )


REGIMES = ("random", "trained", "collapsed", "ragged")


def make_batch(
    regime: str, rows: int, dim: int, classes: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Embeddings of uneven norms and labels 0 … classes-1, in one of the states that training goes through."""
    g = generator(REGIMES.index(regime), rows, dim, classes, seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    labels = torch.arange(rows) % classes
    labels = labels[torch.randperm(rows, generator=g)]
    if regime == "random":
        z = normal(rows, dim)
    elif regime == "trained":
        z = torch.nn.functional.normalize(normal(classes, dim))[labels] + normal(rows, dim) * 0.8 / dim**0.5
    elif regime == "collapsed":
        z = torch.nn.functional.normalize(normal(1, dim)) + normal(rows, dim) * 0.3 / dim**0.5
    else:  # half of the classes have one item, the others 1, 2, 4, …
        lone = classes // 2
        doubling = torch.arange(1.0, max(rows - lone, 0) + 1).log2().long().clamp_max(classes - lone - 1)
        labels = torch.cat((torch.arange(lone), lone + doubling))[:rows][torch.randperm(rows, generator=g)]
        z = normal(classes, dim)[labels] + normal(rows, dim)
    return (z * torch.rand(rows, 1, generator=g, dtype=torch.float64).mul(1.5).add(0.5)).to(dtype), labels


# Running


@dataclass
class Result:
    """A loss and its gradients by name: embeddings, ref_emb, the module's parameters."""

    loss: Tensor
    grads: dict[str, Tensor]


def run(loss_fn: Any, z: Tensor, labels: Tensor | None, *, ref_emb: Tensor | None = None, **forward: Any) -> Result:
    """Forward and backward on fresh leaves; a vector of losses is summed with uneven weights."""
    leaves = {"embeddings": z.detach().clone().requires_grad_()}
    if ref_emb is not None:
        leaves["ref_emb"] = ref_emb.detach().clone().requires_grad_()
        forward["ref_emb"] = leaves["ref_emb"]
    loss_fn.zero_grad(set_to_none=True)
    loss = loss_fn(leaves["embeddings"], labels, **forward)
    loss.backward(torch.linspace(0.5, 1.5, len(loss), dtype=loss.dtype) if loss.ndim else None)
    leaves.update(loss_fn.named_parameters())
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return Result(loss.detach(), grads)


def assert_as_good_as_dense(loss_fn: MetricLoss, z: Tensor, labels: Tensor, backend: str) -> None:
    """fp32 is at most twice as far from fp64 as plain PyTorch, and 3e-6 of the largest entry."""
    truth = run(loss_fn, z.double(), labels, backend="dense")
    got, plain = (run(loss_fn, z, labels, backend=b) for b in (backend, "dense"))
    assert_close(got.loss, truth.loss, 1e-6, "loss")
    exact = truth.grads["embeddings"]
    error, plain_error = (float((r.grads["embeddings"] - exact).abs().max()) for r in (got, plain))
    assert error <= 2 * plain_error + 3e-6 * float(exact.abs().max())


def assert_same(got: Result, want: Result, rtol: float, floor: float = 1e-3) -> None:
    """Equal values and gradients, each relative to its largest entry."""
    assert got.grads.keys() == want.grads.keys()
    assert_close(got.loss, want.loss, rtol, "loss", floor)
    for name, grad in want.grads.items():
        assert_close(got.grads[name], grad, rtol, f"gradient of {name}", floor)
