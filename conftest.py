"""What holds before pydml is imported, and names that every docstring example may use."""

import os
from typing import Any

# Triton reads it as its kernels are defined: without a GPU they run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

import pydml


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, pydml=pydml)
