"""Every loss and gradient against vectors that were computed outside this code base, and the vectors themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import oracle
import pytest
import torch
from helpers import BACKENDS, GOLDEN, check_golden, golden, golden_file, golden_names

from pydml.losses import LOSSES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", golden_names())
def test_float64_is_the_golden_value_and_gradient(name: str, backend: str) -> None:
    case = golden(name)
    check_golden(case, backend, torch.float64, max(case.meta["rtol"], 1e-9 if backend == "dense" else 1e-8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", golden_names())
def test_float32_is_the_golden_value_and_gradient(name: str, backend: str) -> None:
    case = golden(name)
    check_golden(case, backend, torch.float32, case.meta["rtol_float32"])


def test_every_loss_has_golden_vectors() -> None:
    assert {cls.__name__ for cls in LOSSES.values()} == {golden(name).meta["class"] for name in golden_names()}


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.npz")), ids=lambda path: path.stem)
def test_the_oracle_computes_the_same(file: Path) -> None:
    off = {name: oracle.difference(arrays) for name, arrays in oracle.read(file).items()}
    assert max(off.values()) <= oracle.NEAR, off


def test_a_vector_that_was_added_is_one_like_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(GOLDEN / "lifted.npz", tmp_path)
    monkeypatch.setattr(oracle, "HERE", tmp_path)
    before = oracle.read(tmp_path / "lifted.npz")
    given = {key: before["LiftedStarLoss__default__ragged"][key] for key in ("embeddings", "labels")}
    meta = {"class": "LiftedStarLoss", "variant": "made", "regime": "ragged"}
    meta |= {"kwargs": {"alpha": 3}, "forward": {}, "parameters": {}}
    assert oracle.add("lifted", meta, given) == "LiftedStarLoss__made__ragged"
    assert oracle.read(tmp_path / "lifted.npz").keys() - before.keys() == {"LiftedStarLoss__made__ragged"}
    added = golden_file(tmp_path / "lifted.npz")["LiftedStarLoss__made__ragged"]
    check_golden(added, "dense", torch.float64, added.meta["rtol"])


def test_the_oracle_refuses_a_batch_with_a_decision_near_its_tie() -> None:
    given = {"embeddings": torch.eye(4).numpy(), "labels": torch.arange(4).numpy() // 2}
    meta = {"class": "MSMiningLoss", "variant": "tie", "regime": "ragged"}
    meta |= {"kwargs": {"epsilon": 0.0}, "forward": {}, "parameters": {}}
    with pytest.raises(ValueError, match=r"arrays: got a decision \(mine\) 0 from its tie, wanted at least 2e-06"):
        oracle.add("multi_similarity", meta, given)
