"""What several test files share: backends, losses with arguments, batches, and how results are compared."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pydml
from pydml.losses import LOSSES, MetricLoss, ProxyLoss

BACKENDS = [name for name, why_not in pydml.backends().items() if why_not is None]
FUSED = [name for name in BACKENDS if name != "dense"]
GOLDEN = Path(__file__).parent / "golden"


# Golden vectors


@dataclass(frozen=True)
class Golden:
    """One file of ``golden/``; its README says what the keys mean."""

    name: str
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


def golden_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.npz"))


@functools.cache
def golden(name: str) -> Golden:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files if key != "meta"}
        return Golden(name, arrays, json.loads(str(file["meta"])))


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
    """|got - want| <= rtol · max(largest |want|, floor), everywhere; NaN is never close."""
    got, want = (np.asarray(t.detach().double() if isinstance(t, Tensor) else t, dtype=np.float64) for t in (got, want))
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    if not want.size:
        return
    error, scale = np.abs(got - want).max(), max(np.abs(want).max(), floor)
    assert error <= rtol * scale, f"{what}: off by {error:.3g} where the largest entry is {scale:.3g}, rtol {rtol:g}"
