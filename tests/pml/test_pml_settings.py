"""Every setting that PML accepts: its losses × distances × reducers × references × tuples, value and gradients in fp64.

What we refuse must be in the docs, and little of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import generator, make_batch
from test_pml_parity import ARGUMENTS, CLASSES, DIM, default_dtype, losses, miners
from torch import Tensor

import pydml
from pydml.losses import LOSSES, ProxyLoss

pml = pytest.importorskip("pytorch_metric_learning", reason="the oracle, pytorch-metric-learning, is not installed")
MINE, THEIRS = pydml, pml

#: Settings by name, made from a library's module. None is the loss' own.
DISTANCES: dict[str, Callable[[Any], Any]] = {
    "own": lambda lib: None,
    "cosine": lambda lib: lib.distances.CosineSimilarity(),
    "dot": lambda lib: lib.distances.DotProductSimilarity(),
    "raw dot": lambda lib: lib.distances.DotProductSimilarity(normalize_embeddings=False),
    "cosine²": lambda lib: lib.distances.CosineSimilarity(power=2),
    "L2": lambda lib: lib.distances.LpDistance(),
    "L2²": lambda lib: lib.distances.LpDistance(power=2),
    "raw L2": lambda lib: lib.distances.LpDistance(normalize_embeddings=False),
    "raw L2²": lambda lib: lib.distances.LpDistance(normalize_embeddings=False, power=2),
    "L2³": lambda lib: lib.distances.LpDistance(power=3),
    "L1": lambda lib: lib.distances.LpDistance(p=1),
    "L3": lambda lib: lib.distances.LpDistance(p=3, normalize_embeddings=False),
    "SNR": lambda lib: lib.distances.SNRDistance(),
    "a subclass": lambda lib: type("Mine", (lib.distances.LpDistance,), {"compute_mat": _bent})(),
}
REDUCERS: dict[str, Callable[[Any], Any]] = {
    "own": lambda lib: None,
    "Mean": lambda lib: lib.reducers.MeanReducer(),
    "Sum": lambda lib: lib.reducers.SumReducer(),
    "AvgNonZero": lambda lib: lib.reducers.AvgNonZeroReducer(),
    "Divisor": lambda lib: lib.reducers.DivisorReducer(),
    "DoNothing": lambda lib: lib.reducers.DoNothingReducer(),
    "Threshold": lambda lib: lib.reducers.ThresholdReducer(low=0.2, high=1.5),
    "ClassWeighted": lambda lib: lib.reducers.ClassWeightedReducer(torch.arange(1.0, CLASSES + 1)),
    "PerAnchor": lambda lib: lib.reducers.PerAnchorReducer(),
    "PerAnchor(Sum)": lambda lib: lib.reducers.PerAnchorReducer(lib.reducers.SumReducer()),
    "PerAnchor(max)": lambda lib: lib.reducers.PerAnchorReducer(aggregation_func=lambda x, n: x.amax(1)),
    "Multiple": lambda lib: lib.reducers.MultipleReducers(
        {"loss": lib.reducers.SumReducer(), "pos_loss": lib.reducers.ThresholdReducer(low=0.3)}
    ),
    "a subclass": lambda lib: type(
        "Mine", (lib.reducers.BaseReducer,), {f"{kind}_reduction": _power for kind in KINDS}
    )(),
}
KINDS = ("element", "pos_pair", "neg_pair", "triplet")
CALLS = ("plain", "ref", "tuple", "ref, tuple")

#: PML computes something else than it says, by its own fault: losses [n, 1] times weights [n] are a matrix.
FAULTS = {(name, "ClassWeighted") for name in ("ms", "generalized_lifted", "lifted")}


def _bent(self: Any, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
    return (query_emb[:, None] - ref_emb[None]).abs().pow(1.5).sum(2)


def _power(self: Any, losses: Tensor, *_: Any) -> Tensor:
    return losses.square().mean()


def settings() -> Iterator[tuple[str, str, str, str]]:
    """Every distance with the loss' own reducer, and every reducer with two distances."""
    for name in ARGUMENTS:
        for call in CALLS:
            for distance in DISTANCES:
                yield name, distance, "own", call
            for reducer in list(REDUCERS)[1:]:
                yield name, "own", reducer, call
                yield name, "cosine²", reducer, call


def batch_of(call: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    z, labels = make_batch("random", 20, DIM, CLASSES, dtype=dtype)
    forward: dict[str, Any] = {"embeddings": z, "labels": labels}
    ref, ref_labels = make_batch("random", 17, DIM, CLASSES, seed=9, dtype=dtype)
    columns = (ref, ref_labels) if "ref" in call else (None, None)
    if "ref" in call:
        forward |= {"ref_emb": ref, "ref_labels": ref_labels}
    if "tuple" in call:
        forward["indices_tuple"] = miners.MultiSimilarityMiner(epsilon=0.3)(z, labels, *columns)
    return forward


def outcome(library: Any, name: str, distance: str, reducer: str, forward: dict[str, Any]) -> list[Tensor] | Exception:
    """Value and gradients, or what was raised."""
    cls: Any = LOSSES[name] if library is pydml else getattr(losses, LOSSES[name].pml or "")
    shape = {"num_classes": CLASSES, "embedding_size": DIM} if issubclass(LOSSES[name], ProxyLoss) else {}
    z = (forward["embeddings"] * 0.3).requires_grad_()
    try:
        with default_dtype(torch.float64):
            torch.manual_seed(0)
            loss_fn = cls(**shape, distance=DISTANCES[distance](library), reducer=REDUCERS[reducer](library))
            for parameter in loss_fn.parameters():
                parameter.data = torch.rand(parameter.shape, generator=generator(3), dtype=torch.float64)
            found = loss_fn(**{**forward, "embeddings": z})
        if reducer == "DoNothing":
            parts = [part["losses"] for part in found.values()]
            found = sum(part.sum() for part in parts if isinstance(part, Tensor))
        grads = torch.autograd.grad(found.sum(), [z, *loss_fn.parameters()], allow_unused=True)
    except Exception as wrong:
        return wrong
    return [found, *(torch.zeros(()) if grad is None else grad for grad in grads)]


def accepted(found: list[Tensor] | Exception) -> bool:
    return not isinstance(found, Exception) and all(bool(part.isfinite().all()) for part in found)


def differ(got: list[Tensor], want: list[Tensor]) -> bool:
    return any(
        float((a.detach().reshape(-1) - b.detach().reshape(-1)).abs().max())
        > 1e-9 * max(1.0, float(b.detach().abs().max()))
        for a, b in zip(got, want, strict=True)
    )


def documented() -> set[str]:
    """The settings that the docs say are refused."""
    text = (Path(__file__).parents[2] / "docs" / "pml.md").read_text(encoding="utf-8")
    part = text.partition("<!-- refused -->")[2].partition("<!-- end -->")[0]
    return {line.removeprefix("- ") for line in part.splitlines() if line.startswith("- ")}


def sweep(every: Any = None) -> tuple[int, list[str], list[str]]:
    calls = {call: batch_of(call) for call in CALLS}
    number, refused, wrong = 0, [], []
    for name, distance, reducer, call in every or settings():
        if (name, reducer) in FAULTS:
            continue
        want = outcome(THEIRS, name, distance, reducer, calls[call])
        if isinstance(want, Exception) or not accepted(want):
            continue
        number += 1
        got = outcome(MINE, name, distance, reducer, calls[call])
        setting = f"{LOSSES[name].__name__}, {distance}, {reducer}, {call}"
        if isinstance(got, Exception):
            refused.append(f"{setting}: {got}")
        elif differ(got, want):
            wrong.append(f"{setting}: {float(got[0]):.9g} where PML has {float(want[0]):.9g}")
    return number, refused, wrong


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_settings_that_pml_accepts_give_its_values_and_gradients() -> None:
    number, refused, wrong = sweep()
    assert not wrong, "\n".join(wrong)
    assert len(refused) <= 50
    assert {line.partition(":")[0] for line in refused} == documented()
    assert number > 900
