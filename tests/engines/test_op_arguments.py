"""Direct calls of the ops with arguments that do not fit: an error that names the argument, never a dead process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FUSED, arguments, backward_arguments, make_batch, with_gradients
from torch import Tensor

import pydml
from pydml import declared
from pydml.policy import POLICIES

Z, Y = make_batch("random", 9, 6, 4, dtype=torch.float32)
W, V = make_batch("random", 5, 6, 4, seed=1, dtype=torch.float32)
SQUARE, RECT = (Z, None, Y, None), (Z, W, Y, V)
NUMBERS = {"exponential": 4, "binomial": 3, "bin_lifted": 3, "hinge": 2, "mean": 0, "lifted": 1, "arcface": 2}
NUMBERS |= {"dro_margin": 4, "dro_binomial": 5}
HOW = ("dot", True)
ON_FUSED = pytest.mark.parametrize("backend", FUSED)
#: Calls of the fuzz for each backend; a longer run asks for more.
CALLS = int(os.environ.get("PYDML_FUZZ_CALLS", "400"))


def pair(matrix: tuple[Any, ...] = SQUARE, policy: str = "mean", epsilon: float | None = None) -> dict[str, Any]:
    """Arguments of ``pair`` by name."""
    return arguments("pair", *matrix, None, None, policy, [1.0] * NUMBERS[policy], *HOW, epsilon, 1, 1.0)


def call(op: str, given: dict[str, Any], backend: str) -> Any:
    return getattr(torch.ops.pydml, op)(*given.values(), backend)


def backward_of(op: str, given: dict[str, Any], backend: str) -> tuple[str, dict[str, Any]]:
    """A backward call that fits, by the names of its schema."""
    outputs = call(op, given, backend)
    grads = [torch.ones_like(o) for o in with_gradients(op, outputs)]
    wants = [given[side] is not None for side in declared.CALLS[op].sides]
    values = backward_arguments(op, given.values(), outputs, grads, wants)
    return f"{op}_backward", dict(zip(declared.op(f"{op}_backward").names, values, strict=True))


def right(op: str) -> dict[str, Any]:
    """Arguments that fit, with columns."""
    if op == "pair":
        return pair(RECT)
    rest: dict[str, tuple[Any, ...]] = {
        "dots": (Z, W, torch.tensor([0, 8]), torch.tensor([4, 0]), *HOW),
        "listed": (torch.rand(2), torch.rand(3), torch.tensor([0, 8]), torch.tensor([8, 0, 0]), None, "mean", [], 9),
        "listed_triplets": (Z, W, torch.tensor([0, 8]), torch.tensor([4, 0]), torch.tensor([4, 0]), 0.2, False, *HOW),
        "histogram": (*RECT, 5, -1.0, 1.0, *HOW),
        "triplet": (*RECT, "all", 0.2, False, False, *HOW),
        "against": (*RECT, torch.rand(9, 2), 0.2, False, *HOW),
        "below": (*RECT, torch.rand(9, 2), *HOW),
        "above": (*RECT, torch.rand(9, 2), True),
        "positives": (*RECT, 3, True),
        "extremes": (*RECT, "easy", "hard", *HOW),
        "topk": (*RECT, "dro_margin", [0.2, 0.5, 1.0, 1.0], 4, "all", *HOW),
        "mined": (*RECT, 0.1, *HOW),
        "sample": (*RECT, torch.tensor([0, 8]), torch.tensor(7), 0.5, 1.4),
        "rank": (*RECT, True),
    }
    return arguments(op, *rest[op])


WRONG: dict[str, Any] = {
    "rows": [Z[0], Z[:, :0], Z.long(), Z.double(), None],
    "cols": [W[:, :3], W.double(), W[0], W.to("meta"), None],
    "row_labels": [Y[:-1], Y.int(), Y[None], Y.to("meta"), None],
    "col_labels": [V[:-1], V.int(), V.float(), None],
    "row_field": [torch.ones(5), torch.ones(9, 1), torch.ones(9, dtype=torch.int64)],
    "col_field": [torch.ones(9), torch.ones(5, 1)],
    "policy": ["nonsense", ""],
    "params": [[1.0], [1.0] * 9],
    "view": ["nonsense"],
    "epsilon": [float("nan"), float("inf")],
    "pool_size": [0, -1, 2, 2**40],
    "sharpness": [float("nan")],
    "i": [torch.tensor([0, 9]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0]), torch.tensor(3)],
    "pos": [torch.rand(2, 1), torch.rand(2).half(), None],
    "neg": [torch.rand(3).double(), torch.rand(3, 1), None],
    "a1": [torch.tensor([0, 9]), torch.tensor([-1, 0]), torch.tensor([0])],
    "a2": [torch.tensor([0, 9, 0]), torch.tensor([0, 0])],
    "a": [torch.tensor([0, 9]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0])],
    "p": [torch.tensor([0, 5]), torch.tensor([0])],
    "n": [torch.tensor([0, 5]), torch.tensor([0, -1])],
    "j": [torch.tensor([0, 5]), torch.tensor([0, -2]), torch.tensor([0])],
    "nodes": [0, 1, -3, 2**62],
    "low": [float("-inf"), float("nan")],
    "high": [-1.0, -2.0, float("nan")],
    "mode": ["hard", "nonsense"],
    "margin": [float("nan")],
    "swap": [True],
    "positive": ["all", "nonsense"],
    "negative": ["all"],
    "k": [0, -1, -(2**63), 2**62],
    "most": [-1, 2**62],
    "selves": [torch.zeros(5, dtype=torch.int64), torch.zeros(9), torch.full((9,), 5), torch.full((9,), -2)],
    "bounds": [torch.zeros(5, 2), torch.zeros(9), torch.zeros(9, 2).double(), torch.zeros(9, 2).to("meta")],
    "positives": [torch.zeros(5, 2), torch.zeros(9), torch.zeros(9, 2).double(), None],
    "side": ["nonsense", ""],
    "anchors": [torch.tensor([9]), torch.tensor([-1]), torch.tensor([[0]]), torch.tensor([0.0])],
    "seed": [torch.tensor([1, 2]), torch.tensor(1.0), None],
    "cutoff": [float("nan")],
    "nonzero_loss_cutoff": [float("nan")],
}


@ON_FUSED
@pytest.mark.parametrize("op", declared.CALLS)
def test_every_argument_that_does_not_fit_is_named(op: str, backend: str) -> None:
    """Of arguments that fit one is exchanged; «rows» in fp64 is told of the columns, which then differ."""
    given = right(op)
    call(op, given, backend)
    for name in given:
        for value in [-1, 2**62] if op == "listed" and name == "rows" else WRONG.get(name, []):
            said = "cols" if name == "rows" and isinstance(value, Tensor) and value.dtype == torch.float64 else name
            if name == "cols" and value is None:
                said = {"dots": "j", "listed_triplets": "p"}.get(op, "col_labels")
            wrong = given | {name: value}
            if said in ("j", "p") and name == "cols":
                wrong[said] = torch.tensor([9, 0])
            with pytest.raises((ValueError, TypeError, RuntimeError, IndexError), match=rf"^{said}: .*got .*wanted"):
                call(op, wrong, backend)
    assert set(given) - set(WRONG) <= {"normalize", "smooth"}


@ON_FUSED
@pytest.mark.parametrize(
    ("op", "other", "name"),
    [
        ("pair", {"side": "all"}, "side"),
        ("topk", {"side": "both"}, "side"),
        ("pair", {"bounds": torch.zeros(9, 2)}, "bounds"),
        ("pair", {"cols": None, "col_labels": None, "selves": torch.arange(9)}, "selves"),
        ("histogram", {"cols": None, "col_labels": None, "selves": torch.arange(9)}, "selves"),
        ("below", {"bounds": None}, "bounds"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_arguments_that_do_not_fit_together_are_named(op: str, other: dict[str, Any], name: str, backend: str) -> None:
    """Bounds without mining; columns that the rows are, where there are none; sides of another op."""
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: got .*wanted"):
        call(op, right(op) | other, backend)


@ON_FUSED
@pytest.mark.parametrize("op", [name for name, made in declared.CALLS.items() if made.grads])
def test_backward_ops_name_gradients_and_kept_tensors_that_do_not_fit(op: str, backend: str) -> None:
    given = pair(RECT, "hinge") if op == "pair" else right(op)  # hinges keep lists of live pairs
    name, fitting = backward_of(op, given, backend)
    call(name, fitting, backend)
    own = [key for key in fitting if key not in given and not key.startswith("want")]
    assert own
    for key in own:
        value = fitting[key]
        for wrong in (value[:-1], torch.cat((value, value)), value[None], value.to(torch.float16), value.to("meta")):
            if wrong.shape == value.shape and wrong.dtype == value.dtype and wrong.device == value.device:
                continue  # nothing is kept, of which a part is nothing again
            with pytest.raises((ValueError, TypeError), match=rf"^{key}: got .*wanted"):
                call(name, fitting | {key: wrong}, backend)
    if "cols" not in given:
        return
    square = given | {"cols": None} | ({"col_labels": None} if "col_labels" in given else {})
    name, fitting = backward_of(op, square, backend)
    with pytest.raises(ValueError, match=r"^want_cols: "):
        call(name, fitting | {"want_cols": True}, backend)


@pytest.mark.skipif("cpu" not in FUSED, reason="the C++ extension was not built")
@pytest.mark.parametrize("policy", POLICIES)
def test_mining_is_refused_where_there_are_no_kernels_for_it(policy: str) -> None:
    """The declaration in Python and the C++ kernels say the same of every policy."""
    mined = pair(policy=policy, epsilon=0.1)
    direct = mined.values()
    if POLICIES[policy].mines:
        assert len(call("pair", mined, "cpu")) == len(torch.ops.pydml_cpu.pair(*direct)) == 3
        return
    with pytest.raises(ValueError, match=rf"^epsilon: .*mine with exponential, binomial, mean, not with '{policy}'"):
        call("pair", mined, "cpu")
    with pytest.raises(RuntimeError, match=rf"^epsilon: .*{policy}"):
        torch.ops.pydml_cpu.pair(*direct)
    assert call("pair", mined, "tiled")[0].shape == (9, len(POLICIES[policy].slots))


@ON_FUSED
@pytest.mark.parametrize("policy", ["lifted", "hinge", "mean", "binomial", "bin_lifted"])
def test_topk_refuses_policies_that_do_not_rank_pairs(policy: str, backend: str) -> None:
    given = right("topk") | {"policy": policy, "params": [1.0] * NUMBERS[policy]}
    with pytest.raises(ValueError, match=rf"^policy: got '{policy}', wanted .*'dro_margin'"):
        call("topk", given, backend)


def test_unknown_backends_are_named() -> None:
    for name, wanted in (("nonsense", "wanted one of 'tiled'"), ("dense", "wanted one of"), ("auto", "wanted one of")):
        with pytest.raises(ValueError, match=rf"^backend: got '{name}', {wanted}"):
            call("rank", right("rank"), name)


def test_fakes_name_wrong_names_too() -> None:
    rows, labels = Z.to("meta"), Y.to("meta")
    for other in ({"policy": "nonsense"}, {"view": "nonsense"}, {"params": [1.0]}):
        (name,) = other
        with pytest.raises(ValueError, match=f"^{name}: "):
            call("pair", pair((rows, None, labels, None)) | other, "tiled")


# The C++ ops themselves


def spoil_saved(fill: Callable[[Tensor], Tensor]) -> None:
    _, fitting = backward_of("pair", pair(policy="hinge"), "cpu")
    assert len(fitting["saved"])
    with pytest.raises(RuntimeError, match=r"^saved: .*wanted"):
        torch.ops.pydml_cpu.pair_backward(*(fitting | {"saved": fill(fitting["saved"])}).values())


@pytest.mark.sanitize
@pytest.mark.skipif("cpu" not in FUSED, reason="the C++ extension was not built")
def test_kept_lists_of_pairs_are_not_believed() -> None:
    def huge_count(saved: Tensor) -> Tensor:
        directory = saved.clone()
        directory[8:16] = torch.tensor([2**40]).view(torch.uint8)
        return directory

    def pair_outside(saved: Tensor) -> Tensor:
        listed = torch.full_like(saved, 255)
        listed[:16] = torch.tensor([0, 1]).view(torch.uint8)
        return listed

    spoil_saved(huge_count)
    spoil_saved(pair_outside)
    spoil_saved(lambda saved: saved[:-1])
    spoil_saved(lambda saved: torch.cat((saved, saved))[::2])
    spoil_saved(lambda saved: torch.cat((saved[:1], saved))[1:])


@pytest.mark.sanitize
@pytest.mark.skipif("cpu" not in FUSED, reason="the C++ extension was not built")
def test_histograms_of_nan_have_gradients_of_nan() -> None:
    """The range of u in a tile of NaN is no node of the histogram."""
    z = Z.clone().fill_(torch.nan)
    name, fitting = backward_of("histogram", arguments("histogram", z, None, Y, None, 5, -1.0, 1.0, *HOW), "cpu")
    fitting["grad_positives"], fitting["grad_negatives"] = torch.rand(9, 5), torch.rand(9, 5)
    assert call(name, fitting, "cpu")[0].isnan().all()


# Random calls


@pytest.mark.parametrize(
    ("namespace", "backend"),
    [("pydml", "tiled"), ("pydml", "cpu"), ("pydml_cpu", "cpu")],
)
def test_random_calls_give_a_result_or_an_error_that_names_an_argument(namespace: str, backend: str) -> None:
    if backend not in FUSED:
        pytest.skip(f"{backend}: {pydml.backends()[backend]}")
    script = Path(__file__).parents[1] / "fuzz_ops.py"
    command = [sys.executable, script, namespace, backend, "0", str(CALLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = "\n".join(line for line in done.stdout.splitlines()[-3:])
    bare = "\n".join(line for line in done.stdout.splitlines() if "a bare error" in line)
    assert done.returncode == 0, f"exit code {done.returncode} after\n{last}\n{bare}\n{done.stderr[-2000:]}"
    assert "result=" in last
    assert "error=" in last
