"""What every test starts from: a fixed seed and a fixed number of threads, and ops that importing torchvision needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch


def _declare_torchvision_ops() -> torch.library.Library | None:
    """Declare the ops of torchvision's extension: its Python code registers fakes for them as it is imported.

    Without that extension (a torchvision built for another torch) the import would fail for want of the schemas.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_torchvision = _declare_torchvision_ops()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread, unless a test is parametrised over ``threads``.

    The batches of most tests are tiny, and a second thread that has to wait for a shared core makes them ten times
    slower; the tests of ragged sizes run with one and with two.
    """
    before, number = torch.get_num_threads(), getattr(request, "param", 1)
    torch.set_num_threads(number)
    yield number
    torch.set_num_threads(before)
