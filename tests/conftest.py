"""What every test starts from: a fixed seed and two threads, and ops that importing torchvision needs."""

from __future__ import annotations

import importlib.util

import pytest
import torch

torch.set_num_threads(2)


def _declare_torchvision_ops() -> torch.library.Library | None:
    """Declare the ops of torchvision's extension: its Python code registers fakes for them as it is imported.

    Without that extension (a torchvision built for another torch) the import would fail for want of the schemas.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, boxes in (("nms", "Tensor dets, Tensor scores"), ("qnms", "Tensor dets, Tensor scores")):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}({boxes}, float iou_threshold) -> Tensor")
    return library


_torchvision = _declare_torchvision_ops()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
