"""What every test starts from: a fixed seed and a fixed number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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
