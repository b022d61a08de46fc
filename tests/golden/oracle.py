"""The program that made the golden vectors: every loss in float64, from its formula; no code is shared with pydml.

``python tests/golden/oracle.py`` computes every vector again and tells which differ; :func:`add` makes a new one.
"""

from __future__ import annotations

import json
import math
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pair_formulas
import proxy_formulas
import torch
from geometry import Geometry, Info
from torch import Tensor

HERE = Path(__file__).resolve().parent
Arrays = dict[str, np.ndarray]
#: How far a result may be from the vector, relative to its largest entry: another CPU adds in another order.
NEAR = 1e-12
#: How far from its tie every decision is: nearer, and float32 might decide otherwise.
GAP = 2e-6


def forward(cls: str, kwargs: Mapping[str, Any], geometry: Geometry, parameter: Tensor | None) -> Tensor:
    """The loss as a differentiable tensor; ``parameter``: proxies in the module's own layout, or MarginLoss' beta."""
    if cls in proxy_formulas.FORMULAS:
        geometry.zero = geometry.zero + (parameter * 0).sum()
        return proxy_formulas.FORMULAS[cls](geometry, parameter, **kwargs)
    more = {} if parameter is None else {"beta_value": parameter}
    return pair_formulas.FORMULAS[cls](geometry, **kwargs, **more)


def evaluate(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[Arrays, Info]:
    """The loss and the gradients of one vector, by their names in the file, from its inputs alone.

    ``Info.gap`` is the smallest distance, in units of S, of any decision (mining test, argmax, hinge, bin edge, top-k
    border) from its tie; ``Info.decisions`` how many there were; ``Info.d0``: a distance of exactly 0 entered.
    """
    kwargs, parameters = dict(meta["kwargs"]), list(meta["parameters"].values())
    names = ["embeddings", *(["ref_embeddings"] if "ref_embeddings" in arrays else []), *parameters]
    leaves = {name: torch.tensor(arrays[name], dtype=torch.float64, requires_grad=True) for name in names}
    indices = [arrays[key] for key in meta["forward"].get("indices_tuple", [])]
    info = Info()
    geometry = Geometry(
        leaves["embeddings"],
        arrays["labels"],
        leaves.get("ref_embeddings"),
        arrays.get("ref_labels"),
        kwargs.pop("normalize_embeddings", True),
        info,
        indices or None,
    )
    loss = forward(meta["class"], kwargs, geometry, leaves[parameters[0]] if parameters else None)
    grad_output = torch.tensor(arrays["grad_output"]) if "grad_output" in arrays else torch.ones_like(loss)
    grads = torch.autograd.grad(loss, list(leaves.values()), grad_outputs=grad_output)
    results = {f"grad_{name}": grad.numpy() for name, grad in zip(leaves, grads, strict=True)}
    return {"loss": loss.detach().numpy(), **results}, info


def read(path: Path) -> dict[str, Arrays]:
    """The vectors of one file by name, ``meta`` among their arrays."""
    vectors: dict[str, Arrays] = {}
    with np.load(path, allow_pickle=False) as file:
        for key in file.files:
            name, _, array = key.partition("/")
            vectors.setdefault(name, {})[array] = file[key]
    return vectors


def write(path: Path, vectors: Mapping[str, Arrays]) -> None:
    """The same bytes whenever the vectors are the same: numpy.savez would write down the time."""
    with zipfile.ZipFile(path, "w") as file:
        for name, arrays in sorted(vectors.items()):
            for key, array in arrays.items():
                info = zipfile.ZipInfo(f"{name}/{key}.npy")  # always dated 1980
                info.compress_type = zipfile.ZIP_DEFLATED
                with file.open(info, "w") as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def add(family: str, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray], rtol_float32: float = 1e-4) -> str:
    """Compute one vector and put it into ``<family>.npz``; gives its name.

    ``meta`` has ``class``, ``variant``, ``regime``, ``kwargs``, ``forward`` and ``parameters`` as README.md describes
    them; the rest of it, the loss and the gradients follow from ``arrays``, the inputs.
    """
    name = f"{meta['class']}__{meta['variant']}__{meta['regime']}"
    results, info = evaluate(meta, arrays)
    if info.gap < GAP:
        raise ValueError(f"arrays: got a decision ({info.kind}) {info.gap:.1g} from its tie, wanted at least {GAP:g}")
    tolerances = {"rtol": 1e-6, "rtol_float32": 1e-2} if info.d0 else {"rtol": 1e-9, "rtol_float32": rtol_float32}
    gap = float(f"{info.gap:.3g}") if info.decisions else None
    whole = {**meta, **tolerances, "zero_distance": info.d0, "gap": gap}
    path = HERE / f"{family}.npz"
    vectors = read(path) if path.exists() else {}
    vectors[name] = {**arrays, **results, "meta": np.array(json.dumps(whole))}
    write(path, vectors)
    return name


def difference(arrays: Mapping[str, np.ndarray]) -> float:
    """How far the oracle is from a vector, relative to the largest entry; infinite where it decides otherwise."""
    meta = json.loads(str(arrays["meta"]))
    results, info = evaluate(meta, arrays)
    gap = float(f"{info.gap:.3g}") if info.decisions else None
    if (info.d0, gap) != (meta["zero_distance"], meta["gap"]):
        return math.inf
    return max(
        float(np.abs(array - arrays[key]).max(initial=0) / max(np.abs(arrays[key]).max(initial=0), 1e-3))
        for key, array in results.items()
    )


def main(files: Sequence[str]) -> int:
    paths = [Path(file) for file in files] or sorted(HERE.glob("*.npz"))
    wrong = 0
    for path in paths:
        off = {name: difference(arrays) for name, arrays in read(path).items()}
        print(f"{path.stem}: {len(off)} vectors, the largest difference {max(off.values()):.1g}")
        for name in [name for name, value in off.items() if not value <= NEAR]:
            print(f"  {name} differs by {off[name]:.1g}")
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
