"""The GPU part of ``pydml selftest`` under a pretended torch.cuda: every line of it runs before a GPU is there, passes
what is right and fails what is not.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pydml import cli, selftest

backends = importlib.import_module("pydml.backends")
CPU = torch.device("cpu")


class Stream:
    """Work is done at once, so there is nothing to wait for; who waits for whom is noted."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.waited_for: list[Stream] = []
        self.synchronized = False

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None:
        self.synchronized = True


class Graph(TorchDispatchMode):
    """Notes every op inside the block; ``replay`` runs them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


class Cuda:
    """What the self-test asks of torch.cuda, on the CPU."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.graphs: list[Graph] = []
        self.sync_modes: list[str] = []
        self.synchronized = 0

    def install(self, patch: pytest.MonkeyPatch, gpu: str) -> None:
        def new_stream(device: torch.device) -> Stream:
            self.streams.append(Stream(device))
            return self.streams[-1]

        def new_graph() -> Graph:
            self.graphs.append(Graph())
            return self.graphs[-1]

        def synchronize(device: torch.device) -> None:
            self.synchronized += 1

        current = Stream()
        for name, value in {
            "Stream": new_stream,
            "current_stream": lambda device: current,
            "stream": contextlib.nullcontext,
            "CUDAGraph": new_graph,
            "graph": lambda graph: graph,
            "set_sync_debug_mode": self.sync_modes.append,
            "synchronize": synchronize,
            "memory_allocated": lambda device: 2**20,
            "max_memory_allocated": lambda device: 3 * 2**20,
            "reset_peak_memory_stats": lambda device: None,
            "get_device_capability": lambda device: (9, 0),
            "get_device_name": lambda device: gpu,
            "device_count": lambda: 2,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(selftest, "_is_gpu", lambda device: True)
        patch.setattr(selftest, "SECOND_GPU", CPU)
        patch.setattr(selftest, "BUSY", 8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake = Cuda()
    fake.install(monkeypatch, "NVIDIA H100 80GB HBM3")
    yield fake


def examine(*names: str) -> dict[str, selftest.Row]:
    z, labels = selftest.batch(48, 8, CPU)
    chosen = [case for case in selftest.cases() if case.name in names]
    assert len(chosen) == len(names)
    return {case.name: selftest.examine(case, "tiled", ["fp32"], z, labels) for case in chosen}


def test_every_check_of_a_gpu_runs_and_passes(cuda: Cuda) -> None:
    rows = examine("ms, mined", "proxy_anchor", "ms, reference set", "mined pairs")
    for name, row in rows.items():
        assert row.failures == []
        wanted = {"fp32", "repeats", "stream", "2nd GPU"} | ({"no sync", "graph"} if name != "mined pairs" else set())
        assert set(row.cells) == wanted
    assert cuda.sync_modes == ["error", "default"] * 3
    assert len(cuda.graphs) == 3
    assert all(graph.calls for graph in cuda.graphs)
    assert all(stream.waited_for for stream in cuda.streams)


def test_a_graph_copies_nothing_from_the_host(cuda: Cuda) -> None:
    """Parameters of a loss are made before: new ones would be copied to the GPU in every replay, which is refused."""
    examine("proxy_anchor", "soft_triple")
    for graph in cuda.graphs:
        assert not [call[0] for call in graph.calls if "normal" in str(call[0]) or "rand" in str(call[0])]


def test_results_that_a_replay_does_not_renew_fail(cuda: Cuda) -> None:
    z, labels = selftest.batch(48, 8, CPU)
    case = next(case for case in selftest.cases() if case.name == "ms")
    assert selftest._captured(case, z, labels, "tiled")

    def through_the_host(*arguments: Any) -> selftest.Results:
        return {name: torch.tensor(t.tolist()) for name, t in case.run(*arguments).items()}

    assert not selftest._captured(replace(case, run=through_the_host), z, labels, "tiled")


def test_a_wait_that_torch_refuses_fails_and_is_allowed_again_afterwards(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = backends.kernel

    def waits(backend: str, engine: str) -> Any:
        if cuda.sync_modes[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return real(backend, engine)

    monkeypatch.setattr(backends, "kernel", waits)
    row = examine("ms")["ms"]
    assert row.cells["no sync"] == "error"
    assert "synchronizing CUDA operation" in row.failures[0]
    assert row.cells["graph"] == "ok"
    assert cuda.sync_modes == ["error", "default"]


def test_other_bits_on_another_stream_or_gpu_fail(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in selftest.cases() if case.name == "ms")
    z, labels = selftest.batch(48, 8, CPU)
    want = {name: t + 1e-6 for name, t in case.run(z, labels, "tiled").items()}
    assert not selftest._on_side_stream(case, z, labels, "tiled", want)
    assert not selftest._on_second_gpu(case, z, labels, "tiled", want)


def test_the_whole_report_of_a_gpu(cuda: Cuda, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--device", "cpu", "--backend", "tiled", "--case", "ms", "--format", "fp32"]
    assert cli.main(["selftest", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[2:] == ["fp32", "repeats", "no", "sync", "graph", "stream", "2nd", "GPU"]
    assert "NVIDIA H100 80GB HBM3 (sm_90), 2 GPU(s)" in lines[-1]
    (header,) = (i for i, line in enumerate(lines) if line.startswith("ms, mined"))
    assert "on paper" in lines[header]
    dense = lines[header + 1].split()
    assert dense[:4] == ["dense", "256", "64", "fp32"]
    assert float(dense[5]) == pytest.approx(
        selftest.predicted("NVIDIA H100", "dense", 256, 64, "fp32") or 0.0, abs=1e-3
    )
    assert dense[6] == "2.0", "memory beside the inputs"
    assert lines[header + 2].split()[5] == "–", "nothing is known on paper of tiled"
    assert cuda.synchronized > 0


@pytest.mark.parametrize("gpu", ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA B200"))
@pytest.mark.parametrize("backend", ("dense", "triton", "cuda"))
def test_time_on_paper(gpu: str, backend: str) -> None:
    bf16 = selftest.predicted(gpu, backend, 4096, 512, "bf16")
    fp32 = selftest.predicted(gpu, backend, 4096, 512, "fp32")
    assert bf16 is not None and fp32 is not None
    assert 0.01 < bf16 < 2
    assert 2 * bf16 < fp32 < 200, "ordinary cores multiply far slower"


def test_narrower_blocks_cost_more_on_paper() -> None:
    """Of ordinary cores' products, 1 + 1 + ⌈512/128⌉ = 6 in Triton against 1 + 1 + ⌈512/256⌉ = 4."""
    cuda, triton = (selftest.predicted("A100", name, 32768, 512, "fp32") for name in ("cuda", "triton"))
    assert cuda is not None and triton is not None
    assert triton / cuda == pytest.approx(6 / 4, rel=0.05)


def test_nothing_is_known_of_other_gpus_and_backends() -> None:
    assert selftest.predicted("NVIDIA GeForce RTX 4090", "cuda", 4096, 512, "bf16") is None
    assert selftest.predicted("NVIDIA H100 PCIe", "tiled", 4096, 512, "bf16") is None


# Losses on a device without data: what looks at it raises


class Crossings(TorchDispatchMode):
    """Notes ops in which something of the CPU meets the device: on a GPU, a copy that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kinds = {t.device.type for t in tree_flatten((args, kwargs, result))[0] if isinstance(t, Tensor)}
        if len(kinds) > 1:
            self.seen.append(str(func))
        return result


def crossings(case: selftest.Case) -> list[str]:
    """What the second run of a case copies; the first may make parameters."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        z, labels = torch.empty(72, 24, device="meta"), torch.empty(72, dtype=torch.int64, device="meta")
        for _ in range(2):  # a module without data refuses its first conversion
            with contextlib.suppress(RuntimeError):
                case.run(z, labels, "tiled")
        with Crossings() as mode:
            case.run(z, labels, "tiled")
    return mode.seen


@pytest.mark.parametrize("case", [case for case in selftest.cases() if case.on_device], ids=lambda case: case.name)
def test_losses_that_are_captured_neither_look_at_the_device_nor_copy_to_it(case: selftest.Case) -> None:
    assert crossings(case) == []


def test_what_looks_or_copies_is_found() -> None:
    ranking = next(case for case in selftest.cases() if case.name == "ranking")
    with pytest.raises(DataDependentOutputException):
        crossings(ranking)
    copying = selftest.Case("copying", lambda z, labels, backend: {"loss": torch.ones(3).to(z.device)})
    assert crossings(copying) == ["aten._to_copy.default"]
