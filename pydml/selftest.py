"""``pydml selftest``: is what this machine computes right, repeatable and fast? For whoever has a GPU that we have not.

Every loss, miner and ranking in every number format on every backend that is there, against the textbook formula on the
whole matrix in fp64; then two runs bit for bit, and on a GPU without host synchronisation, inside a CUDA graph, on a
side stream and on a second GPU; then time and memory beside plain PyTorch, and beside the time on paper of GPUs that
pydml.roofline knows. Prints tables and a line to paste into a report; the exit status says whether all is well.
"""

from __future__ import annotations

import argparse
import functools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

import pydml
from pydml import ops, roofline
from pydml.backends import fp32_products, resolve
from pydml.cuda.matrix import DEPTH
from pydml.declared import Above, Against, Below, Positives
from pydml.losses import LOSSES, MetricLoss, ProxyLoss

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """A number format: dtype of the embeddings, matmul precision, and how far results may be off.

    ``limit`` is for |got - wanted| / |wanted|, Euclidean norms over all entries of a result.
    """

    dtype: torch.dtype
    limit: float
    precision: str = "ieee"


FORMATS = {
    "fp64": Format(torch.float64, 1e-9),
    "fp32": Format(torch.float32, 1e-4),
    "tf32": Format(torch.float32, 5e-2, "tf32"),
    "bf16": Format(torch.bfloat16, 5e-2),
    "fp16": Format(torch.float16, 1e-2),
}
#: Backends whose fp32 products follow ``torch.backends.cuda.matmul.fp32_precision``.
TENSOR_CORES = ("triton", "cuda", "cuda-emulated")


@dataclass(frozen=True)
class Case:
    """Something to run: a loss of the registry with arguments, a miner or a ranking."""

    name: str
    run: Callable[[Tensor, Tensor, str], Results]
    #: Takes no decision on the host, so that it can be captured in a CUDA graph.
    on_device: bool = True
    #: Relative error that is allowed in every format: where draws are compared by their mean, or where rounding may
    #: turn a choice between two negatives.
    least: float = 0.0


CLASSES = 8


def _module(name: str, z: Tensor, arguments: Mapping[str, Any]) -> MetricLoss:
    """A loss with its parameters drawn from a fixed seed, in the dtype of ``z``."""
    cls: Any = LOSSES[name]
    sizes = {"num_classes": CLASSES, "embedding_size": z.shape[1]} if issubclass(cls, ProxyLoss) else {}
    loss_fn: MetricLoss = cls(**sizes, **arguments).to(z.device, z.dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loss_fn.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise if sizes else parameter.double().cpu() + 0.1 * noise.abs())
    return loss_fn


def _loss(name: str, arguments: Mapping[str, Any] | None = None, columns: str = "") -> Callable[..., Results]:
    """Loss and gradients; ``columns``: a reference set, or a list of pairs, in place of the batch itself."""

    modules: dict[Any, MetricLoss] = {}  # made once: a copy to the GPU has no place in a CUDA graph

    def run(z: Tensor, labels: Tensor, backend: str) -> Results:
        kind = z.device, z.dtype, z.shape[1]
        loss_fn = modules[kind] = modules.get(kind) or _module(name, z, arguments or {})
        rows = z.detach().clone().requires_grad_()
        leaves: dict[str, Tensor] = {"embeddings": rows, **dict(loss_fn.named_parameters())}
        more: dict[str, Any] = {}
        if columns == "reference":
            leaves["reference"] = z.flip(0).detach().clone().requires_grad_()
            more = {"ref_emb": leaves["reference"], "ref_labels": labels.flip(0)}
        elif columns == "pairs":
            a = torch.arange(len(z), device=z.device)
            p = torch.where(labels == labels.roll(-CLASSES), a.roll(-CLASSES), a.roll(CLASSES))
            more = {"indices_tuple": (a, p, a.roll(1))}
        loss = loss_fn(rows, labels, **more, backend=backend)
        used = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
        grads = torch.autograd.grad(loss, list(used.values()), allow_unused=True)
        found = {f"gradient of {key}": grad for key, grad in zip(used, grads, strict=True) if grad is not None}
        return {"loss": loss.detach(), **found}

    return run


def _mined(z: Tensor, labels: Tensor, backend: str) -> Results:
    """How often each row is an anchor among the mined pairs."""
    with pydml.use_backend(backend):
        a1, _, a2, _ = pydml.miners.MultiSimilarityMiner(epsilon=0.1)(z, labels)
    return {name: torch.bincount(a, minlength=len(z)).double() for name, a in (("positives", a1), ("negatives", a2))}


def _drawn(z: Tensor, labels: Tensor, backend: str) -> Results:
    """Mean distance of negatives drawn by distance, over many draws."""
    torch.manual_seed(0)
    x = torch.nn.functional.normalize(z.double())
    distances = []
    with pydml.use_backend(backend):
        for _ in range(8):
            a, p, n = pydml.miners.DistanceWeightedMiner()(z, labels)
            if not bool(((labels[a] == labels[p]) & (labels[a] != labels[n])).all()):
                raise AssertionError("a drawn positive has another label, or a negative the same one")
            distances.append((x[a] - x[n]).norm(dim=1))
    return {"mean distance": torch.cat(distances).mean()}


def _ranked(z: Tensor, labels: Tensor, backend: str) -> Results:
    found = pydml.metrics.retrieval_metrics(z, labels, (1, 4), backend=backend)
    return {"metrics": torch.tensor(list(found.values()), dtype=torch.float64)}


def _piece(z: Tensor, labels: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Rows and other columns, and three similarities of each row: what an op is asked that sees some of the columns."""
    rows, cols = z.detach().clone(), z.flip(0).detach().clone()
    similarities = torch.linspace(-0.1, 0.3, 3, dtype=ops.compute_dtype(z), device=z.device).repeat(len(z), 1)
    return {"rows": rows, "cols": cols, "row_labels": labels, "col_labels": labels.flip(0)}, similarities


def _whole(rows: Tensor, cols: Tensor, row_labels: Tensor, col_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and which of them are those of negatives."""
    x, y = (torch.nn.functional.normalize(side) for side in (rows, cols))
    return x @ y.T, row_labels[:, None] != col_labels


def _against(z: Tensor, labels: Tensor, backend: str) -> Results:
    """Triplets of negatives in a piece of the columns and of positives that are known by their similarity."""
    matrix, positives = _piece(z, labels)
    leaves = {"rows": matrix["rows"], "cols": matrix["cols"], "positives": positives}
    for leaf in leaves.values():
        leaf.requires_grad_()
    if backend == "dense":
        u, diff = _whole(**matrix)
        total = (torch.relu(u[:, :, None] - positives[:, None] + 0.2) * diff[:, :, None]).sum((1, 2))
    else:
        how: dict[str, Any] = {"margin": 0.2, "smooth": False, "view": "dot", "normalize": True}
        total, _ = ops.call(Against(**matrix, positives=positives, **how), backend)
    grads = torch.autograd.grad(total.sum(), list(leaves.values()))
    found = {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"total": total.detach(), **found}


def _bounded(z: Tensor, labels: Tensor, backend: str) -> Results:
    """The most similar negative below each bound, how many are above it, and the similarities of positives."""
    matrix, bounds = _piece(z, labels)
    if backend == "dense":
        u, diff = (t[:, None] for t in _whole(**matrix))
        best = u.masked_fill(~diff | (u >= bounds[..., None]), -torch.inf).amax(2)
        number = (diff & (u > bounds[..., None])).sum(2)
        listed = u[:, 0].masked_fill(diff[:, 0], torch.inf).sort(1).values
    else:
        _, best = ops.call(Below(**matrix, bounds=bounds, view="dot", normalize=True), backend)
        number = ops.call(Above(**matrix, bounds=bounds, normalize=True), backend)[0]
        listed = ops.call(Positives(**matrix, most=len(z), normalize=True), backend)
    return {"below": best.clamp_min(-1), "above": number.double(), "positives": listed.clamp_max(2)}


#: Arguments that losses need beside their defaults.
NEEDED: dict[str, dict[str, Any]] = {
    "dro_topk": {"k": 64},
    "soft_triple": {"centers_per_class": 3},
    "arcface": {"scale": 16},
    "proxy_repulsion": {"alpha": 4},
}
#: Losses whose Python part looks at the data: which items a class has, which pairs a tuple holds.
ON_HOST = ("n_pairs",)


def cases() -> list[Case]:
    """All that is run: every loss once, then the options that take another path through an engine."""
    return [
        *(Case(name, _loss(name, NEEDED.get(name)), name not in ON_HOST) for name in LOSSES),
        Case("ms, mined", _loss("ms", {"epsilon": 0.1})),
        Case("ms, euclidean", _loss("ms", {"distance": "euclidean", "base": 1.0, "beta": 10})),
        Case("ms, reference set", _loss("ms", {"epsilon": 0.1}, "reference")),
        Case("contrastive, pairs", _loss("contrastive", {}, "pairs"), on_device=False),
        Case("triplet, listed", _loss("triplet", {}, "pairs"), on_device=False),
        Case("triplet, semihard", _loss("triplet", {"triplets": "semihard", "margin": 0.2}), least=5e-2),
        Case("triplet, hard", _loss("triplet", {"triplets": "hard", "margin": 0.2})),
        Case("dro_kl, binomial", _loss("dro_kl", {"base_loss": "binomial"})),
        Case("triplets, known positives", _against),
        Case("negatives, bounded", _bounded, least=5e-2),
        Case("mined pairs", _mined, on_device=False),
        Case("drawn negatives", _drawn, on_device=False, least=2e-2),
        Case("ranking", _ranked, on_device=False),
    ]


def batch(n: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Embeddings of classes that overlap, with uneven norms, and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % CLASSES
    z = torch.randn(CLASSES, dim, generator=generator)[labels] + 1.5 * torch.randn(n, dim, generator=generator)
    z *= 0.5 + torch.rand(n, 1, generator=generator)
    return z.double().to(device), labels.to(device)


def _error(got: Results, want: Results) -> float:
    """The largest relative error of any result; infinite where one is missing, or not finite."""
    if got.keys() != want.keys():
        return float("inf")
    errors = [
        float((got[key].double().cpu() - w.double().cpu()).norm() / w.double().norm().cpu().clamp_min(1e-6))
        for key, w in want.items()
    ]
    return max(error if error == error else float("inf") for error in errors)


def _same(a: Results, b: Results) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key].cpu(), b[key].cpu()) for key in a)


@dataclass
class Row:
    """What one case did on one backend: a cell a check, and what went wrong."""

    backend: str
    case: str
    cells: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def check(self, name: str, passed: Callable[[], bool | tuple[bool, str]]) -> None:
        """Run one check; an exception is a failure that is shown, not the end of the run."""
        try:
            outcome = passed()
        except Exception as error:
            self.cells[name] = "error"
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            return
        good, text = outcome if isinstance(outcome, tuple) else (outcome, "ok" if outcome else "no")
        self.cells[name] = text if good else f"{text} !"
        if not good:
            self.failures.append(f"{name}: {text}")


#: The GPU beside the one that is examined, and the edge of the matrices that keep a stream busy.
SECOND_GPU, BUSY = torch.device("cuda", 1), 2048


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _without_sync(case: Case, z: Tensor, labels: Tensor, backend: str) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(z, labels, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def _captured(case: Case, z: Tensor, labels: Tensor, backend: str) -> bool:
    """Captured on one batch and replayed on another, does it compute the other's results?"""
    fixed, other = z.clone(), z.flip(1).contiguous()
    stream = torch.cuda.Stream(z.device)
    stream.wait_stream(torch.cuda.current_stream(z.device))
    with torch.cuda.stream(stream):
        case.run(fixed, labels, backend)
    torch.cuda.current_stream(z.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run(fixed, labels, backend)
    fixed.copy_(other)
    graph.replay()
    return _same(captured, case.run(other, labels, backend))


def _on_side_stream(case: Case, z: Tensor, labels: Tensor, backend: str, want: Results) -> bool:
    """On a stream of its own, while the default stream is busy with other work on the same memory pool."""
    busy = torch.randn(BUSY, BUSY, device=z.device)
    stream = torch.cuda.Stream(z.device)
    stream.wait_stream(torch.cuda.current_stream(z.device))
    with torch.cuda.stream(stream):
        got = case.run(z, labels, backend)
    for _ in range(8):
        busy = busy @ busy * 1e-3
    stream.synchronize()
    return _same(got, want)


def _on_second_gpu(case: Case, z: Tensor, labels: Tensor, backend: str, want: Results) -> bool:
    """On the other GPU while the first is the current one."""
    return _same(case.run(z.to(SECOND_GPU), labels.to(SECOND_GPU), backend), want)


def examine(case: Case, backend: str, formats: Sequence[str], z: Tensor, labels: Tensor) -> Row:
    """All checks of one case on one backend."""
    row = Row(backend, case.name)
    results: dict[str, Results] = {}
    for name in formats:
        wanted = FORMATS[name]
        given = z.to(wanted.dtype)

        def accurate(name: str = name, wanted: Format = wanted, given: Tensor = given) -> tuple[bool, str]:
            reference = case.run(given.double(), labels, "dense")
            with fp32_products(wanted.precision):
                results[name] = case.run(given, labels, backend)
            error = _error(results[name], reference)
            return error <= max(wanted.limit, case.least), f"{error:.0e}"

        row.check(name, accurate)
    if not results:
        return row

    def repeats() -> bool:
        again = {}
        for name in results:
            with fp32_products(FORMATS[name].precision):
                again[name] = case.run(z.to(FORMATS[name].dtype), labels, backend)
        return all(_same(again[name], results[name]) for name in results)

    row.check("repeats", repeats)
    name = "fp32" if "fp32" in results else next(iter(results))
    given, want = z.to(FORMATS[name].dtype), results[name]
    with fp32_products(FORMATS[name].precision):
        if _is_gpu(z.device):
            if case.on_device:
                row.check("no sync", lambda: _without_sync(case, given, labels, backend))
                row.check("graph", lambda: _captured(case, given, labels, backend))
            row.check("stream", lambda: _on_side_stream(case, given, labels, backend, want))
            if torch.cuda.device_count() > 1:
                row.check("2nd GPU", lambda: _on_second_gpu(case, given, labels, backend, want))
    return row


def usable(device: torch.device, wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Backends to examine on a device, and why others are not."""
    found, reasons = [], []
    for name in wanted:
        try:
            found.append(resolve(name, device))
        except (RuntimeError, ValueError) as error:
            reasons.append(str(error).removeprefix("backend: "))
    return found, reasons


# Time and memory


def _mined_loss(backend: str) -> Callable[..., Tensor]:
    loss_fn: Callable[..., Tensor] = pydml.preset("ms/paper")
    return functools.partial(loss_fn, backend=backend)


def _step(loss_fn: Callable[..., Tensor], z: Tensor, labels: Tensor) -> Callable[[], None]:
    leaf = z.detach().clone().requires_grad_()

    def step() -> None:
        leaf.grad = None
        loss_fn(leaf, labels).backward()

    return step


def _measure(step: Callable[[], None], device: torch.device, seconds: float) -> tuple[float, float | None]:
    """Median time of a step in ms, and on a GPU the memory it needs beside its inputs in MiB."""

    def timed() -> float:
        began = time.perf_counter()
        step()
        if _is_gpu(device):
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    timed()
    memory = None
    if _is_gpu(device):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        timed()
        memory = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    times = [timed()]
    while sum(times) < seconds and len(times) < 200:
        times.append(timed())
    return 1000 * median(times), memory


#: What pydml.roofline calls the way of a backend.
ON_PAPER = {
    "dense": "chunked cuBLAS and PyTorch, both",
    "triton": "pair, both",
    "cuda": "pair, both",
}


def predicted(device_name: str, backend: str, n: int, dim: int, number_format: str) -> float | None:
    """ms on paper of forward and backward, from the vendor's peaks; None for GPUs and backends that are not known.

    >>> round(predicted("NVIDIA H100 80GB HBM3", "triton", 4096, 512, "bf16"), 3)
    0.069
    """
    gpu = next((gpu for gpu in roofline.GPUS if gpu.name in device_name), None)
    if gpu is None or backend not in ON_PAPER:
        return None
    ordinary = number_format == "fp32"
    # Columns of the gradient that a block owns: the fewer, the more often a tile is made again.
    gpu = replace(gpu, chunk=DEPTH if backend == "cuda" else 128 if ordinary else gpu.chunk)
    cost = next(cost for cost in roofline.costs(dim, gpu) if cost.name == ON_PAPER[backend])
    if ordinary:  # products are made by ordinary cores
        cost = replace(cost, products=0.0, instructions=cost.instructions + cost.products * dim)
    return 1000 * cost.seconds(n, dim, gpu)


def speed(device: torch.device, backends: Sequence[str], sizes: Sequence[tuple[int, int]], compiled: bool) -> list[str]:
    """Lines of a table: Multi-Similarity with mining, forward and backward, beside plain PyTorch and time on paper."""
    name_of_gpu = torch.cuda.get_device_name(device) if _is_gpu(device) else ""
    lines = [f"{'ms, mined':<16}{'n':>7}{'d':>6}{'dtype':>7}{'ms':>10}{'on paper':>10}{'MiB':>9}{'x dense':>9}"]
    for n, dim in sizes:
        z, labels = batch(n, dim, device)
        for name in ("fp32", "bf16") if _is_gpu(device) else ("fp32",):
            given = z.to(FORMATS[name].dtype)
            peers = {"dense": _mined_loss("dense")} | {backend: _mined_loss(backend) for backend in backends}
            if compiled:
                peers["torch.compile"] = torch.compile(_mined_loss("dense"))
            dense = None
            for peer, call in peers.items():
                try:
                    ms, mib = _measure(_step(call, given, labels), device, seconds=1.0)
                except Exception as error:
                    lines.append(f"{peer:<16}{n:>7}{dim:>6}{name:>7}  {type(error).__name__}: {error}"[:120])
                    continue
                dense = ms if peer == "dense" else dense
                times = f"{dense / ms:>9.2f}" if dense else f"{'–':>9}"
                memory = f"{'–':>9}" if mib is None else f"{mib:>9.1f}"
                bound = predicted(name_of_gpu, peer, n, dim, name)
                paper = f"{'–':>10}" if bound is None else f"{bound:>10.3f}"
                lines.append(f"{peer:<16}{n:>7}{dim:>6}{name:>7}{ms:>10.3f}{paper}{memory}{times}")
    return lines


def _machine(device: torch.device) -> str:
    if not _is_gpu(device):
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}), {torch.cuda.device_count()} GPU(s)"


def _table(rows: Sequence[Row], columns: Sequence[str]) -> Iterator[str]:
    used = [column for column in columns if any(column in row.cells for row in rows)]
    width = max(len(row.case) for row in rows) + 2
    yield f"{'backend':<15}{'case':<{width}}" + "".join(f"{column:>10}" for column in used)
    for row in rows:
        yield f"{row.backend:<15}{row.case:<{width}}" + "".join(f"{row.cells.get(c, '–'):>10}" for c in used)


def main(argv: Sequence[str]) -> int:
    """Run the self-test; 0 if everything passed."""
    parser = argparse.ArgumentParser(prog="pydml selftest", description="Check every backend that is there.")
    parser.add_argument("--quick", action="store_true", help="small batches, no torch.compile")
    parser.add_argument("--no-speed", action="store_true", help="only what is right and repeatable")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", action="append", help="only these backends (may be given several times)")
    parser.add_argument("--format", action="append", choices=FORMATS, help="only these number formats")
    parser.add_argument("--case", action="append", help="only these cases (may be given several times)")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    listed = cases()
    chosen = [case for case in listed if options.case is None or case.name in options.case]
    if unknown := set(options.case or ()) - {case.name for case in listed}:
        parser.error(f"--case: got {sorted(unknown)[0]!r}, wanted one of {', '.join(case.name for case in listed)}")
    everything = [name for name in pydml.backends() if name not in ("dense", "cuda-emulated")]
    backends, reasons = usable(device, options.backend or everything)
    for reason in reasons:
        print(f"not examined: {reason}")
    if not backends:
        print("nothing to examine")
        return 1
    z, labels = batch(*((72, 24) if options.quick else (200, 64)), device)
    rows: list[Row] = []
    for backend in backends:
        formats = [name for name in options.format or FORMATS if name != "tf32" or backend in TENSOR_CORES]
        rows += [examine(case, backend, formats, z, labels) for case in chosen]
    print("\n".join(_table(rows, (*FORMATS, "repeats", "no sync", "graph", "stream", "2nd GPU"))))
    failed = [row for row in rows if row.failures]
    for row in failed:
        for failure in row.failures:
            print(f"FAILED {row.backend}, {row.case}: {failure}")
    if not options.no_speed:
        sizes = ((256, 64),) if options.quick else ((1024, 128), (4096, 512))
        print()
        print("\n".join(speed(device, backends, sizes, compiled=not options.quick)))
    checks = sum(len(row.cells) for row in rows)
    versions = f"pydml {pydml.__version__}, torch {torch.__version__}"
    failures = sum(len(row.failures) for row in rows)
    print(f"\nselftest: {versions}; {_machine(device)}; {', '.join(backends)}; {checks} checks, {failures} failed")
    return 1 if failed else 0
