"""Names that every docstring example may use."""

from typing import Any

import pytest
import torch

import pydml


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, pydml=pydml)
