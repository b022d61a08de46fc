"""Random direct calls of the ops, most of them wrong: what test_op_arguments.py runs in a process of its own.

``python tests/fuzz_ops.py <namespace> <backend> <first> <calls>`` names every call before it makes it, so that the last
line says which one ended the process. Call number n is the same in every run. Ops of ``pydml_cuda_emulated`` are called
as the engines of pydml/cuda call them, up to one call, which is spoilt.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import arguments, backward_arguments, with_gradients

import pydml
from pydml import cuda
from pydml.declared import CALLS, op
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
            swap = matrix[1] is None and pick((True, False))
            return [*matrix, pick(("all", "semihard")), 0.2, swap, True, *how, selves]
        if op == "against":
            return [*matrix, known, 0.2, pick((True, False)), *how]
        if op == "below":
            return [*matrix, known, *how]
        if op == "above":
            return [*matrix, known, how[1]]
        if op == "positives":
            return [*matrix, pick((0, 1, 40)), how[1], selves]
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
        if isinstance(value, list) and value and not isinstance(value[0], float):  # tensors, or whole numbers
            at = self.random.randrange(len(value))
            spoilt = [*value[:at], self.spoil(value[at]), *value[at + 1 :]]
            return pick((spoilt, spoilt, spoilt, value[:-1], [*value, value[0]], []))
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
            lambda: t * float("inf") if t.is_floating_point() else torch.full_like(t, torch.iinfo(t.dtype).max),
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
    named = re.match(rf"({names})(\[\d\])?: ", text)
    return bool(named) or f"{op.namespace}::" in text or "allocate" in text or "alloc" in text


def described(arguments: Sequence[Any]) -> str:
    return ", ".join(
        f"[{described(a)}]" if isinstance(a, list)
        else f"{a.dtype}{list(a.shape)}" if isinstance(a, torch.Tensor)
        else repr(a)
        for a in arguments
    )  # fmt: skip


class Spoiler:
    """The ops of the CUDA kernels, of which call number ``at`` is spoilt; its outcome ends the engine that made it."""

    def __init__(self, caller: Caller, ops: Any, at: int) -> None:
        self.caller, self.ops, self.left = caller, ops, at

    def __getattr__(self, name: str) -> Callable[..., None]:
        op = getattr(self.ops, name).default

        def run(*arguments: Any) -> None:
            self.left -= 1
            if self.left >= 0:
                return op(*arguments)
            given = spoil_some(self.caller, list(arguments))
            print(f"    {name}({described(given)})", flush=True)
            try:
                op(*given)
            except Exception as error:
                raise Spoilt("error" if ours(op, error) else f"{type(error).__name__}: {str(error)[:300]}") from error
            raise Spoilt("result")

        return run


class Spoilt(BaseException):
    """What came of a spoilt call; no engine catches it."""


def call_kernels(backend: str, number: int) -> str:
    """Let an engine of pydml/cuda run until one of its calls of the kernels, and spoil that one."""
    assert backend == "cuda-emulated"
    caller = Caller(number)
    name = caller.random.choice(sorted(cuda.ENGINES))
    forward = name.removesuffix("_backward")
    given = caller.arguments(forward)
    if forward == "triplet":
        given[6] = False  # swapped triplets are tiled's
    given = [a.float() if isinstance(a, torch.Tensor) and a.dtype == torch.float64 else a for a in given]
    given = list(arguments(forward, *given).values())
    spoiler = Spoiler(caller, torch.ops.pydml_cuda_emulated, caller.random.choice((0, 1, 1, 2, 2, 3, 4)))
    print(f"{number} {name}({described(given)}), call {spoiler.left}", flush=True)
    if cuda.yields(op(forward).read(given)):
        return "unspoilt"  # it is tiled's
    if name != forward:
        outputs = cuda.ENGINES[forward](torch.ops.pydml_cuda_emulated, op(forward).read(given))
        grads = [torch.randn_like(output) for output in with_gradients(forward, outputs)]
        given = backward_arguments(forward, given, outputs, grads, [True, given[1] is not None])
    try:
        cuda.ENGINES[name](spoiler, op(name).read(given))
    except Spoilt as outcome:
        return str(outcome)
    return "unspoilt"  # it makes fewer calls


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
    direct = getattr(getattr(torch.ops, namespace), name).default
    print(f"{number} {namespace}.{name}({described(given)})", flush=True)
    try:
        direct(*given, *rest)
    except Exception as error:
        if namespace == "pydml" and not ours(direct, error):
            return f"{type(error).__name__}: {str(error)[:300]}"
        return "error"
    return "result"


def main(namespace: str, backend: str, first: str, calls: str) -> int:
    torch.set_num_threads(1)
    pydml.backends()  # loads the C++ ops
    warnings.simplefilter("ignore")
    found: dict[str, int] = {}
    for number in range(int(first), int(first) + int(calls)):
        kernels = namespace == "pydml_cuda_emulated"
        outcome = call_kernels(backend, number) if kernels else call(namespace, backend, number)
        if outcome not in ("result", "error", "unspoilt"):
            print(f"call {number}: a bare error: {outcome}")
            outcome = "bare"
        found[outcome] = found.get(outcome, 0) + 1
    print(*(f"{kind}={count}" for kind, count in sorted(found.items())))
    return int("bare" in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
