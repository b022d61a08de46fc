"""What the Python side of the CUDA engines does on a device: it never waits for it, and mixes no devices.

The device is pretended: fake tensors have no data, so that whatever looks at them raises, and a tensor that was made on
the CPU by mistake is found where it meets the others. The kernels are left out.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import emulation
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pydml import cuda

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulator switches its fibers by hand, on x86-64 only"
)
#: A device that this build of torch has, without data, and that is not the CPU.
DEVICE = "meta"
MARGIN = ("dro_margin", [0.2, 0.5, 1.0, 1.0])
#: Engine -> its arguments after those of the matrix, and gradients before them for those that go back.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "pair": [(None, None, "mean", [], "dot", True, epsilon, 1, 1.0) for epsilon in (None, 0.1)],
    "histogram": [(5, -1.0, 1.0, "dot", True)],
    "extremes": [("hard", "semihard", "dot", True), ("semihard", "hard", "dot", True)],
    "topk": [(*MARGIN, k, side, "dot", True) for k in (4, 30000) for side in ("all", "positives")],
    "rank": [(True,)],
    "triplet": [(mode, 0.1, False, smooth, "dot", True) for mode in ("all", "semihard") for smooth in (False, True)],
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[dict[str, Any]]:
    """The engines, on kernels that do nothing for tensors without data."""
    with emulation.kernels() as table, torch.library._scoped_library("pydml_cuda_emulated", "FRAGMENT") as library:
        for name in cuda.ENGINES.keys() - {"dots_backward"} | {"prepare", "finish", "gather"}:
            torch.library.register_fake(f"pydml_cuda_emulated::{name}", lambda *_: None, lib=library)
        yield emulation.by_position(table)


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def matrix(rectangular: bool) -> tuple[Tensor | None, ...]:
    """300 rows: more pairs than top-K has room for."""
    labels = on_device(300, dtype=torch.int64)
    other = (on_device(400, 20), on_device(400, dtype=torch.int64)) if rectangular else (None, None)
    return on_device(300, 20), other[0], labels, other[1]


def assert_on_device(found: Any) -> None:
    for t in found if isinstance(found, tuple) else (found,):
        assert t.device.type == DEVICE


@pytest.mark.parametrize("rectangular", (False, True), ids=("symmetric", "rectangular"))
@pytest.mark.parametrize("engine", CALLS)
def test_nothing_waits_for_the_device(engine: str, rectangular: bool, kernels: dict[str, Any]) -> None:
    for arguments in CALLS[engine]:
        with FakeTensorMode():
            given = matrix(rectangular)
            found = kernels[engine](*given, *arguments)
            assert_on_device(found)
            if engine in ("pair", "histogram", "triplet"):
                grads = found[:2] if engine == "histogram" else found[:1]
                kept = found if engine != "triplet" else ()
                back = kernels[f"{engine}_backward"](*grads, *kept, *given, *arguments, True, rectangular)
                assert_on_device(back)
                assert back[0].shape == given[0].shape


def test_rows_among_the_columns_do_not_wait(kernels: dict[str, Any]) -> None:
    for engine in ("pair", "histogram", "extremes", "topk", "triplet"):
        for arguments in CALLS[engine]:
            with FakeTensorMode():
                given, rest = matrix(True), [*arguments, on_device(300, dtype=torch.int64)]
                found = kernels[engine](*given, *rest)
                assert_on_device(found)
                if engine == "pair" and arguments[6] is not None:
                    for side in ("both", "positives", "negatives"):
                        assert_on_device(kernels[engine](*given, *rest, on_device(300, 2), side))


@pytest.mark.parametrize("rectangular", (False, True), ids=("symmetric", "rectangular"))
def test_listed_pairs_and_draws_do_not_wait_either(rectangular: bool, kernels: dict[str, Any]) -> None:
    with FakeTensorMode():
        rows, cols, labels, col_labels = matrix(rectangular)
        i = on_device(50, dtype=torch.int64)
        assert_on_device(kernels["dots"](rows, cols, i, i, "euclidean", True))
        assert_on_device(
            kernels["dots_backward"](on_device(50), rows, cols, i, i, "euclidean", True, True, rectangular)
        )
        seed = on_device(dtype=torch.int64)
        assert_on_device(kernels["sample"](rows, cols, labels, col_labels, i, seed, 0.5, 1.4))


def test_only_the_list_of_mined_pairs_waits(kernels: dict[str, Any]) -> None:
    """Its length is data; and a wait is seen by what these tests are made of."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        kernels["mined"](*matrix(False), 0.1, "dot", True)
