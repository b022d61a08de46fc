"""Sizes around the borders of tiles: nothing at an edge may be dropped, padded in or counted twice."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers import CASES, FUSED, Case, assert_same, make_batch, over, run
from torch import Tensor

from pydml.tiled import sides

DIM = 7
COMPILED = [backend for backend in FUSED if backend != "tiled"]
#: Around the edges of blocks, which have 64 rows, 128 from 512 rows on and 256 from 1024 on.
SMALL, LARGE = (1, 2, 63, 64, 65), (257, 3 * 256 + 7, 1023, 1024, 1025, 5 * 256 + 7)


def classes(rows: int) -> int:
    return max(5, rows // 6)


def batch_of(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Some classes large, several with one item; a few rows coincide."""
    z, labels = make_batch("ragged" if rows % 2 and rows < 100 else "random", rows, DIM, classes(rows), seed, dtype)
    if rows > 10:
        z[rows // 2] = z[rows // 3]
        labels[rows // 2] = labels[rows // 3]
    return z, labels


def assert_agrees(case: Case, z: Tensor, labels: Tensor, backend: str, truth: str, **forward: Any) -> None:
    loss_fn = case.build(max(classes(len(z)), int(labels.max()) + 1), z.shape[1])
    want = run(loss_fn, z, labels, backend=truth, **forward)
    assert_same(run(loss_fn, z, labels, backend=backend, **forward), want, 1e-8)


# The tiled backend with tiles of 16 rows


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "TILE_ELEMENTS", 64)
    monkeypatch.setattr(importlib.import_module("pydml.tiled.dots"), "TILE_ELEMENTS", 64)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 55])
@over(CASES)
def test_small_tiles_give_the_dense_result(case: Case, rows: int) -> None:
    assert_agrees(case, *batch_of(rows), "tiled", "dense")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("rows", "columns"), [(1, 33), (2, 1), (15, 55), (16, 17), (17, 16), (33, 2), (55, 32)])
@over(CASES, lambda case: case.takes_ref)
def test_small_tiles_against_a_reference_set_give_the_dense_result(case: Case, rows: int, columns: int) -> None:
    ref_emb, ref_labels = batch_of(columns, seed=1)
    assert_agrees(case, *batch_of(rows), "tiled", "dense", ref_emb=ref_emb, ref_labels=ref_labels)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [17, 55])
@over(CASES, lambda case: case.takes_tuple)
def test_small_slices_of_listed_pairs_give_the_dense_result(case: Case, rows: int) -> None:
    z, labels = batch_of(rows)
    a, p = ((labels[:, None] == labels) & ~torch.eye(rows, dtype=torch.bool)).nonzero(as_tuple=True)
    a2, n = (labels[:, None] != labels).nonzero(as_tuple=True)
    keep, keep_neg = torch.rand(len(a)) < 0.3, torch.rand(len(a2)) < 0.2
    pairs = (a[keep], p[keep], a2[keep_neg], n[keep_neg])
    assert_agrees(case, z, labels, "tiled", "dense", indices_tuple=pairs)


def test_tiles_cover_every_row_once(small_tiles: None) -> None:
    for rows, columns in ((1, 1), (15, 15), (16, 16), (17, 17), (55, 55), (33, 9)):
        z, labels = batch_of(rows)
        ref, ref_labels = (None, None) if rows == columns else batch_of(columns)
        tiles = list(sides.Matrix(z, ref, labels, ref_labels, "dot", True).tiles())
        assert len(tiles) == -(-rows // 16)
        assert torch.equal(torch.cat([tile.rows for tile in tiles]), torch.arange(rows))
        assert all(tile.u.shape == (len(tile.rows), columns) for tile in tiles)
        same = torch.cat([tile.same for tile in tiles])
        assert ref is not None or not same.diagonal().any()


# Compiled backends at their own block sizes


@pytest.mark.skipif(not COMPILED, reason="no compiled backend is available here")
@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("rows", SMALL)
@over(CASES)
def test_blocks_give_the_dense_result(case: Case, rows: int, backend: str) -> None:
    assert_agrees(case, *batch_of(rows), backend, "dense")


@pytest.mark.skipif(not COMPILED, reason="no compiled backend is available here")
@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("rows", LARGE)
@over(CASES)
def test_many_blocks_give_the_result_of_the_tiled_model(case: Case, rows: int, backend: str) -> None:
    """Which the tests above hold against the dense result, too slow here."""
    assert_agrees(case, *batch_of(rows), backend, "tiled")


@pytest.mark.skipif(not COMPILED, reason="no compiled backend is available here")
@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize(("rows", "columns"), [(1, 257), (2, 64), (64, 1), (63, 129), (65, 256), (257, 63), (256, 65)])
@over(CASES, lambda case: case.takes_ref)
def test_blocks_against_a_reference_set_give_the_result_of_the_tiled_model(
    case: Case, rows: int, columns: int, backend: str
) -> None:
    ref_emb, ref_labels = batch_of(columns, seed=1)
    assert_agrees(case, *batch_of(rows), backend, "tiled", ref_emb=ref_emb, ref_labels=ref_labels)


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="no compiled backend is available here")
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("rows", [511, 512, 513, 2047, 2048, 2049])
@over(CASES, lambda case: case.id in ("ms", "ms-mined", "contrastive", "nca", "fast_ap", "margin", "extreme_triplet"))
def test_large_blocks_give_the_result_of_the_tiled_model(case: Case, rows: int, backend: str, threads: int) -> None:
    assert_agrees(case, *batch_of(rows), backend, "tiled")


@pytest.mark.skipif(not COMPILED, reason="no compiled backend is available here")
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("backend", COMPILED)
@over(CASES, lambda case: case.id in ("ms", "ms-mined", "contrastive", "nca", "proxy_anchor", "soft_triple"))
def test_threads_do_not_change_a_bit(case: Case, backend: str, threads: int) -> None:
    z, labels = batch_of(600, dtype=torch.float32)
    loss_fn = case.build(classes(600), DIM, torch.float32)
    parallel = [run(loss_fn, z, labels, backend=backend) for _ in range(3)]
    torch.set_num_threads(1)
    alone = run(loss_fn, z, labels, backend=backend)
    for got in parallel:
        assert torch.equal(got.loss, alone.loss)
        assert all(torch.equal(got.grads[name], grad) for name, grad in alone.grads.items())
