"""Random direct calls of the ops, most of them wrong: what test_op_arguments.py runs in a process of its own.

``python tests/fuzz_ops.py <namespace> <backend> <first> <calls>`` names every call before it makes it, so that the last
line says which one ended the process. Call number n is the same in every run.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from helpers import arguments, backward_arguments, with_gradients

import pydml
from pydml.declared import CALLS
from pydml.policy import POLICIES

DIFFERENTIABLE = tuple(name for name, made in CALLS.items() if made.grads)
VIEWS = ("dot", "cosine", "euclidean", "squared")
PARAMS = {"exponential": 4, "binomial": 3, "bin_lifted": 3, "hinge": 2, "mean": 0, "lifted": 1, "arcface": 2}
PARAMS |= {"dro_margin": 4, "dro_binomial": 5}
NAMES = (*POLICIES, *VIEWS, "all", "semihard", "easy", "hard", "none", "both", "positives", "negatives")
NAMES = (*NAMES, "", "nonsense")


class Caller:
    """Makes call number ``seed``: arguments that fit, of which none, one or a few are then spoilt."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)

    def matrix(self) -> list[Any]:
        n, d = self.random.choice((0, 1, 2, 9, 70)), self.random.choice((1, 3, 8))
        dtype = self.random.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
        rows, labels = torch.randn(n, d).to(dtype), torch.randint(4, (n,))
        if self.random.random() < 0.5:
            return [rows, None, labels, None]
        m = self.random.choice((0, 1, 6, 40, 300))
        return [rows, torch.randn(m, d).to(dtype), labels, torch.randint(4, (m,))]

    def arguments(self, op: str) -> list[Any]:
        pick, matrix = self.random.choice, self.matrix()
        n, m = len(matrix[0]), len(matrix[0] if matrix[1] is None else matrix[1])
        how = [pick(VIEWS), pick((True, False))]
        policy = pick(tuple(POLICIES))
        computed = torch.float64 if matrix[0].dtype == torch.float64 else torch.float32
        selves = None
        if matrix[1] is not None and m and pick((True, False)):
            selves = torch.randint(-1, m, (n,))
        known = torch.randn(n, pick((0, 1, 5))).to(computed)
        params = [self.random.uniform(0.1, 2) for _ in range(PARAMS[policy])]
        if op == "pair":
            field = [torch.rand(n) if pick((True, False)) else None, torch.rand(m) if pick((True, False)) else None]
            epsilon = pick((None, None, 0.1))
            bounds = None if epsilon is None or pick((True, False)) else torch.rand(n, 2).to(computed)
            side = pick(("both", "positives", "negatives"))
            return [*matrix, *field, policy, params, *how, epsilon, 1, 1.0, selves, bounds, side]
        if op == "dots":
            length = pick((0, 1, 20)) if n and m else 0
            return [*matrix[:2], *(torch.randint(max(k, 1), (length,)) for k in (n, m)), *how]
        if op == "listed_triplets":
            length = pick((0, 1, 20)) if n and m else 0
            triplets = (torch.randint(max(k, 1), (length,)) for k in (n, m, m))
            return [*matrix[:2], *triplets, 0.2, pick((True, False)), *how]
        if op == "listed":
            sizes = [pick((0, 1, 30)) if n else 0 for _ in "pn"]
            u, a = [torch.randn(k) for k in sizes], [torch.randint(max(n, 1), (k,)) for k in sizes]
            return [*u, *a, torch.rand(n) if pick((True, False)) else None, policy, params, n]
        if op == "histogram":
            return [*matrix, pick((2, 5, 100)), -1.0, 1.0, *how, selves]
        if op == "triplet":
            return [*matrix, pick(("all", "semihard")), 0.2, matrix[1] is None and pick((True, False)), True, *how, selves]
        if op == "against":
            return [*matrix, known, 0.2, pick((True, False)), *how]
        if op == "below":
            return [*matrix, known, *how]
        if op == "above":
            return [*matrix, known, how[1]]
        if op == "extremes":
            return [*matrix, *(pick(("easy", "hard", "semihard", "none")) for _ in "pn"), *how, selves]
        if op == "topk":
            ranking = "dro_margin", [0.2, 0.5, 1.0, 1.0]
            return [*matrix, *ranking, pick((1, 7, 5000)), pick(("all", "positives", "negatives")), *how, selves]
        if op == "mined":
            return [*matrix, pick((None, 0.1)), *how]
        if op == "sample":
            anchors = torch.randint(n, (pick((0, 1, 20)),)) if n else torch.empty(0, dtype=torch.int64)
            return [*matrix, anchors, torch.randint(99, (1,)), 0.5, 1.4]
        return [*matrix, how[1]]

    def spoil(self, value: Any) -> Any:
        """Something else of the same type in the schema, mostly."""
        pick = self.random.choice
        if isinstance(value, torch.Tensor):
            return self.spoil_tensor(value)
        if isinstance(value, bool):
            return not value
        if isinstance(value, str):
            return pick(NAMES)
        if isinstance(value, list):
            return pick((value[:-1], [*value, 1.0], [], [0.0] * len(value), [float("nan")] * len(value)))
        if isinstance(value, int):
            return pick((-(2**63), -1, 0, 1, 2, 3, 4097, 2**20 + 1, 2**62))
        if isinstance(value, float):
            return pick((0.0, -1.0, 1e300, float("inf"), float("nan")))
        return pick((0.1, torch.randn(3, 4), torch.arange(5), torch.randn(7), None, torch.tensor(1)))

    def spoil_tensor(self, t: torch.Tensor) -> Any:
        pick = self.random.choice
        spoilt: list[Callable[[], Any]] = [
            lambda: t[: len(t) // 2] if t.ndim else t.reshape(1, 1),
            lambda: torch.cat((t, t)) if t.ndim else t,
            lambda: t[None],
            lambda: t.flatten(),
            lambda: t[..., :0] if t.ndim else t,
            lambda: t[..., ::2] if t.ndim else t,
            lambda: t.new_zeros(0),
            lambda: t.double() if t.dtype != torch.float64 else t.float(),
            lambda: t.to(torch.int32),
            lambda: t.long(),
            lambda: t.to(torch.complex64),
            lambda: t.to("meta"),
            lambda: torch.full_like(t, 2**30) if not t.is_floating_point() else t * float("inf"),
            lambda: torch.full_like(t, pick((-1, -9))) if t.dtype != torch.uint8 else torch.full_like(t, 255),
            lambda: torch.full_like(t, float("nan")) if t.is_floating_point() else t * 0 + 3,
            lambda: torch.randint(0, 256, t.shape, dtype=torch.uint8) if t.dtype == torch.uint8 else t + 3,
            lambda: t.expand(2, *t.shape),
            lambda: t.to_sparse() if t.is_floating_point() else t,
            lambda: None,
        ]
        return pick(spoilt)()


def spoil_some(caller: Caller, arguments: list[Any]) -> list[Any]:
    for at in caller.random.sample(range(len(arguments)), caller.random.choice((0, 1, 1, 1, 2, 3))):
        arguments[at] = caller.spoil(arguments[at])
    return arguments


def ours(op: Any, error: Exception) -> bool:
    """Does the message name an argument first, or is it torch's own about the types of the schema?"""
    names = "|".join(argument.name for argument in op._schema.arguments)
    text = str(error)
    return bool(re.match(rf"({names}): ", text)) or "pydml::" in text or "allocate" in text or "alloc" in text


def call(namespace: str, backend: str, number: int) -> str:
    """Make one call: «result», or what was wrong with it."""
    caller = Caller(number)
    name = caller.random.choice((*CALLS, *DIFFERENTIABLE, *DIFFERENTIABLE))
    backward = name in DIFFERENTIABLE and caller.random.random() < 0.5
    given, rest = list(arguments(name, *caller.arguments(name)).values()), [backend] if namespace == "pydml" else []
    if backward:
        print(f"{number} {namespace}.{name}, for its backward", flush=True)
        try:
            outputs = getattr(torch.ops.pydml, name)(*given, backend if rest else "cpu")
        except ValueError:  # a policy that this backend does not mine with
            return "result"
        grads = [torch.randn_like(output) for output in with_gradients(name, outputs)]
        wants = [True, given[1] is not None, *(True for _ in CALLS[name].sides[2:])]
        given = backward_arguments(name, given, outputs, grads, wants)
        name = f"{name}_backward"
    spoil_some(caller, given)
    op = getattr(getattr(torch.ops, namespace), name).default
    shown = [f"{a.dtype}{list(a.shape)}" if isinstance(a, torch.Tensor) else repr(a) for a in given]
    print(f"{number} {namespace}.{name}({', '.join(shown)})", flush=True)
    try:
        op(*given, *rest)
    except Exception as error:
        if namespace == "pydml" and not ours(op, error):
            return f"{type(error).__name__}: {str(error)[:300]}"
        return "error"
    return "result"


def main(namespace: str, backend: str, first: str, calls: str) -> int:
    torch.set_num_threads(1)
    pydml.backends()  # loads the C++ ops
    warnings.simplefilter("ignore")
    found: dict[str, int] = {}
    for number in range(int(first), int(first) + int(calls)):
        outcome = call(namespace, backend, number)
        if outcome not in ("result", "error"):
            print(f"call {number}: a bare error: {outcome}")
            outcome = "bare"
        found[outcome] = found.get(outcome, 0) + 1
    print(*(f"{kind}={count}" for kind, count in sorted(found.items())))
    return int("bare" in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
