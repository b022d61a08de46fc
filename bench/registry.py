"""The peers by name: how each of them makes a case ready to run, or says why it cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bench import keops_peers, pml_peers, tuples
from bench.cases import GIB, KS, MEMORY_LIMIT, Case
from bench.data import Inputs
from bench.pml_peers import Skip
from pydml.backends import use_backend
from pydml.losses import LOSSES, ProxyLoss
from pydml.metrics import recall_at_k


@dataclass
class Prepared:
    """A peer ready to run one case."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor] = field(default_factory=list)  # what the gradient is taken of
    checked: bool = True  # must it agree with the others?
    scale: float = 1.0  # how much of its time counts
    note: str = ""

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.leaves) if self.leaves else ()


def ours(case: Case, inputs: Inputs) -> Any:
    """pydml's module of a case, with the proxies of the inputs: the one place where arguments are given."""
    keywords = case.variant.keywords(case.shape.size)
    if case.variant.kind != "proxy":
        return LOSSES[case.variant.op](**keywords)
    assert inputs.proxies is not None
    if case.centers > 1:
        keywords["centers_per_class"] = case.centers
    made: Any = LOSSES[case.variant.op]
    module = made(case.shape.classes, case.shape.dim, **keywords)
    assert isinstance(module, ProxyLoss)
    proxies = inputs.proxies.T.contiguous() if module.transposed else inputs.proxies
    setattr(module, module.parameter, nn.Parameter(proxies))
    return module


def _leaf(case: Case, inputs: Inputs) -> Tensor:
    """The embeddings, not copied; a metric has no gradient."""
    return inputs.z.detach().requires_grad_(case.variant.kind != "metric")


def _parameters(module: Any) -> list[Tensor]:
    return [getattr(module, module.parameter)] if hasattr(module, "parameter") else []


def prepare_pydml(case: Case, inputs: Inputs, backend: str) -> Prepared:
    if case.variant.kind == "metric":

        def recalls() -> Tensor:
            found = recall_at_k(inputs.z, inputs.labels, KS, backend=backend)
            return torch.tensor([found[k] for k in KS], dtype=torch.float64)

        return Prepared(recalls)
    if case.variant.kind == "tuple":
        return _prepare_tuple(case, inputs, ours=True, backend=backend)
    module, z = ours(case, inputs), _leaf(case, inputs)
    return Prepared(lambda: module(z, inputs.labels, backend=backend), [z, *_parameters(module)])


def _prepare_tuple(case: Case, inputs: Inputs, ours: bool, backend: str = "auto") -> Prepared:
    z, step = _leaf(case, inputs), tuples.step(case, inputs, ours)

    def forward() -> Tensor:
        with use_backend(backend):  # miner and loss
            return step(z)

    return Prepared(forward, [z])


def dense_function(case: Case, inputs: Inputs) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The dense code as a function of embeddings, labels and perhaps proxies; and those proxies."""
    dense = case.variant.dense
    wanted = [n for n, p in inspect.signature(dense).parameters.items() if p.kind == p.KEYWORD_ONLY]
    if case.variant.kind == "metric":
        return lambda z, labels: dense(z, labels, ks=KS), []
    module = ours(case, inputs)
    given: dict[str, Any] = {n: inputs.positives if n == "positives" else getattr(module, n) for n in wanted}
    return lambda *tensors: dense(*tensors, **given), _parameters(module)


def _refuse_too_large(case: Case) -> None:
    if case.dense_bytes > MEMORY_LIMIT:
        raise Skip(f"dense code would need about {case.dense_bytes / GIB:.0f} GiB")


def prepare_dense(case: Case, inputs: Inputs, backend: str) -> Prepared:
    _refuse_too_large(case)
    function, proxies = dense_function(case, inputs)
    z = _leaf(case, inputs)
    leaves = [z, *proxies] if z.requires_grad else []
    return Prepared(lambda: function(z, inputs.labels, *proxies), leaves, note=case.variant.note)


#: The last compiled function and what it is for: the regimes of a shape share it.
_compiled: dict[tuple[str, str, torch.dtype], Callable[..., Tensor]] = {}


def prepare_compile(case: Case, inputs: Inputs, backend: str) -> Prepared:
    _refuse_too_large(case)
    function, proxies = dense_function(case, inputs)
    key = (case.variant.name, str(case.shape), inputs.z.dtype)
    if key not in _compiled:
        _compiled.clear()
        torch._dynamo.reset()
        _compiled[key] = torch.compile(function, dynamic=False)
    compiled, z = _compiled[key], _leaf(case, inputs)
    return Prepared(lambda: compiled(z, inputs.labels, *proxies), [z, *proxies])


def prepare_pml(case: Case, inputs: Inputs, backend: str) -> Prepared:
    if case.variant.kind == "tuple":
        pml_peers.imported()
        return _prepare_tuple(case, inputs, ours=False)
    function, proxies = pml_peers.build(case, ours(case, inputs))
    z = _leaf(case, inputs)
    return Prepared(lambda: function(z, inputs.labels), [z, *proxies])


def prepare_keops(case: Case, inputs: Inputs, backend: str) -> Prepared:
    if case.variant.name not in keops_peers.FUNCTIONS:
        raise Skip("not written for KeOps")
    if case.shape.size**2 * case.shape.dim > keops_peers.LARGEST:
        raise Skip("KeOps has no matrix product on the CPU: a step would take minutes")
    try:
        keops_peers.load()
    except Exception as error:  # whatever its compiler and its probing of the machine raise
        raise Skip(f"pykeops cannot be used: {type(error).__name__}: {error}") from error
    function = keops_peers.FUNCTIONS[case.variant.name]
    module = ours(case, inputs)
    given = {n: getattr(module, n) for n, p in inspect.signature(function).parameters.items() if p.kind == 3}
    z = _leaf(case, inputs)
    return Prepared(lambda: function(z, inputs.labels, **given), [z])


def prepare_faiss(case: Case, inputs: Inputs, backend: str) -> Prepared:
    try:
        import faiss
    except ImportError as error:
        raise Skip(f"faiss cannot be imported: {error}") from error
    faiss.omp_set_num_threads(torch.get_num_threads())

    def recalls() -> Tensor:
        x = torch.nn.functional.normalize(inputs.z).numpy()
        index = faiss.IndexFlatIP(x.shape[1])
        index.add(x)
        found = torch.from_numpy(index.search(x, min(max(KS) + 1, len(x)))[1])
        itself = found == torch.arange(len(found))[:, None]
        hit = (inputs.labels[found] == inputs.labels[:, None]) & ~itself
        # places after the query itself, which is not always first, move up by one
        place = torch.arange(found.shape[1]) - itself.cumsum(1)
        first = torch.where(hit, place, max(KS)).amin(1)
        return torch.stack([(first < k).double().mean() for k in KS])

    return Prepared(recalls)


def prepare_half_gemm(case: Case, inputs: Inputs, backend: str) -> Prepared:
    if case.matrix_bytes > 4 * GIB:
        raise Skip(f"the matrix would need {case.matrix_bytes / GIB:.0f} GiB")
    x = torch.nn.functional.normalize(inputs.z)
    return Prepared(lambda: torch.mm(x, x.T), checked=False, scale=0.5, note="half the time of X @ X.T")


#: Name -> how it is made ready.
PEERS: dict[str, Callable[[Case, Inputs, str], Prepared]] = {
    "pydml": prepare_pydml,
    "dense": prepare_dense,
    "compile": prepare_compile,
    "pml": prepare_pml,
    "keops": prepare_keops,
    "faiss": prepare_faiss,
    "half_gemm": prepare_half_gemm,
}
#: Kinds of case that a peer has anything to say about; of the others it is not asked, and no row is written.
KINDS = {
    "compile": ("pair", "proxy"),
    "pydml": ("pair", "proxy", "metric", "tuple"),
    "pml": ("pair", "proxy", "tuple"),  # its accuracy calculator searches with faiss, which is a peer itself
    "keops": ("pair",),
    "faiss": ("metric",),
    "half_gemm": ("pair",),
}


def concerned(peers: Sequence[str], case: Case) -> list[str]:
    """The peers that a case is for."""
    return [peer for peer in peers if case.variant.kind in KINDS.get(peer, ("pair", "proxy", "metric"))]
