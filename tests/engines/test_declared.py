"""The declarations: what follows from an argument that is added to one, and that what is registered follows them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from helpers import FUSED
from torch import Tensor

from pydml.arguments import INT64, Array, Number
from pydml.backends import kernel
from pydml.declared import CALLS, Backward, Matrix, Op, op

BOTH = [*CALLS, *(f"{name}_backward" for name, call in CALLS.items() if call.grads)]
Z, Y = torch.randn(5, 3), torch.arange(5) % 2


class CountsOut(NamedTuple):
    counts: Annotated[Tensor, Array(("R",))]


@dataclass(slots=True)
class Counts(Matrix):
    op, Out, grads, kept = "counts", CountsOut, ("counts",), ("counts",)


class MarkedOut(NamedTuple):
    counts: Annotated[Tensor, Array(("R", "E"))]


@dataclass(slots=True)
class Marked(Matrix):
    """The same with two more arguments, of which the first decides a size of the result."""

    op, Out, grads, kept = "marked", MarkedOut, ("counts",), ("counts",)

    marks: Annotated[Tensor, Array(("E",), INT64, below="R")]
    gain: Annotated[float, Number()] = 1.0


MATRIX = "Tensor rows, Tensor? cols, Tensor row_labels, Tensor? col_labels"


def test_an_argument_that_is_added_is_in_the_schema_and_in_that_of_the_backward() -> None:
    assert Op(Counts).schema == f"({MATRIX}, str backend) -> Tensor"
    assert Op(Marked).schema == f"({MATRIX}, Tensor marks, float gain, str backend) -> Tensor"
    assert Op(Marked).kernel_schema == f"({MATRIX}, Tensor marks, float gain) -> Tensor"
    own, wants = "Tensor grad_counts, Tensor counts", "bool want_rows, bool want_cols, str backend"
    assert Op(Counts, backward=True).schema == f"({own}, {MATRIX}, {wants}) -> (Tensor, Tensor)"
    want = f"({own}, {MATRIX}, Tensor marks, float gain, {wants}) -> (Tensor, Tensor)"
    assert Op(Marked, backward=True).schema == want


def test_an_argument_that_is_added_decides_the_size_of_the_fake() -> None:
    z, y = Z.to("meta"), Y.to("meta")
    assert Op(Counts).fake((z, None, y, None, "tiled")).shape == (5,)
    for marks in (1, 4):
        given = z, None, y, None, torch.empty(marks, dtype=torch.int64, device="meta"), 1.0
        assert Op(Marked).fake((*given, "tiled")).shape == (5, marks)
    d_rows, d_cols = Op(Marked, backward=True).fake(
        (z.new_empty(5, 4), z.new_empty(5, 4), *given, True, False, "tiled")
    )  # fmt: skip
    assert d_rows.shape == (5, 3) and d_cols.shape == (0,)


def test_an_argument_that_is_added_is_checked() -> None:
    declared = Op(Marked)
    fitting: dict[str, Any] = dict(zip(declared.names, (Z, None, Y, None, torch.tensor([0, 4]), 2.0), strict=True))
    declared.check((*fitting.values(), "tiled"))
    for name, value in (
        ("marks", torch.tensor([0, 5])),
        ("marks", torch.tensor([0.0])),
        ("marks", None),
        ("gain", float("nan")),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"^{name}: got .*wanted"):
            declared.check((*(fitting | {name: value}).values(), "tiled"))
    with pytest.raises(ValueError, match=r"^gain: "):
        declared.fake((*(fitting | {"gain": float("inf")}).values(), "tiled"))
    backward, right, wrong = Op(Marked, backward=True), torch.zeros(5, 2), torch.zeros(5, 3)
    backward.check((right, right, *fitting.values(), True, False, "tiled"))
    for grad, kept, name in ((wrong, right, "grad_counts"), (right, wrong, "counts")):
        with pytest.raises(ValueError, match=rf"^{name}: got shape \[5, 3\], wanted \[R, E\] = \[5, 2\]"):
            backward.check((grad, kept, *fitting.values(), True, False, "tiled"))


def test_an_argument_that_is_added_reaches_the_kernels_by_its_name() -> None:
    marks, grad, kept = torch.tensor([0, 4]), torch.zeros(5, 2), torch.ones(5, 2)
    short = Op(Marked).read((Z, None, Y, None, marks))
    assert short.gain == 1.0 and short.marks is marks
    assert Op(Marked).read((Z, None, Y, None, marks, 3.0)).gain == 3.0
    for more, gain in (((), 1.0), ((3.0,), 3.0)):  # an argument with a default may be left out here too
        back = Op(Marked, backward=True).read((grad, kept, Z, None, Y, None, marks, *more, True, False))
        assert isinstance(back, Backward)
        assert back.call.marks is marks and back.call.gain == gain
        assert back.grad.counts is grad and back.out.counts is kept
        assert back.wants == (True, False) and back.want_rows and not back.want_cols


@pytest.mark.parametrize("name", BOTH)
def test_what_is_registered_is_what_is_declared(name: str) -> None:
    declared = torch._C.parse_schema(f"pydml::{name}{op(name).schema}")
    assert getattr(torch.ops.pydml, name).default._schema == declared
    assert [argument.name for argument in declared.arguments] == [*op(name).names, "backend"]
    assert len(declared.returns) == len(op(name).outputs)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("name", BOTH)
def test_every_backend_has_a_kernel_for_what_is_declared(name: str, backend: str) -> None:
    assert callable(kernel(backend, name))


@pytest.mark.skipif("cpu" not in FUSED, reason="the C++ extension was not built")
@pytest.mark.parametrize("name", BOTH)
def test_the_cpp_ops_have_the_declared_arguments_without_the_backend(name: str) -> None:
    found = getattr(torch.ops.pydml_cpu, name).default._schema
    assert found == torch._C.parse_schema(f"pydml_cpu::{name}{op(name).kernel_schema}")
    assert [argument.name for argument in found.arguments] == list(op(name).names)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pydml_cpu::{name}", "CPU")


@pytest.mark.skipif("cpu" not in FUSED, reason="the C++ extension was not built")
def test_an_extension_that_lacks_an_op_is_refused_in_words() -> None:
    """A declaration that is newer than the extension: the backend is missing, with the reason, and nothing else is."""
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, pydml\n"
        "from pydml import declared\n"
        "declared.CALLS['newer'] = declared.Rank\n"
        "print(pydml.backends()['cpu'])\n"
        "try: import pydml.native\n"
        "except ImportError as error: print(error)\n"
        "loss = pydml.losses.MultiSimilarityLoss()(torch.randn(8, 4), torch.arange(8) // 2)\n"
        "print(float(loss) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = "pydml._C was built from other sources: it has no newer; build it again"
    assert done.stdout.splitlines() == [said, said, "True"]
