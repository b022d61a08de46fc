"""Sharded losses on real processes: value and gradients are those of one process on the concatenated batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import CASES, DEFAULTS, OFFICIAL, Case, Result, assert_close, assert_same, make_batch, over, run
from ranks import ranks
from torch import Tensor

from pydml import miners
from pydml.distributed import ShardedLoss, ShardedMiner
from pydml.distributed import batch as sharded_batch
from pydml.distributed.functions import gather_columns
from pydml.losses import LOSSES, ContrastiveLoss, MultiSimilarityLoss, NCALoss, ProxyAnchorLoss

DIM, CLASSES = 7, 5
#: Rows of each rank, by world size: uneven, and one rank with none.
SHARDS = {1: [29], 2: [11, 18], 3: [11, 0, 18], 4: [9, 3, 0, 17]}
MODES = ("ring", "gather")
RTOL = {torch.float64: 1e-11, torch.float32: 3e-5}
everywhere = pytest.mark.parametrize("size", [2, 3, 4])
in_both_modes = pytest.mark.parametrize("mode", MODES)


def part(x: Tensor, rank: int, sizes: list[int]) -> Tensor:
    return x.split(sizes)[rank]


def sharded(rank: int, size: int, case: Case, z: Tensor, labels: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """One rank's loss and gradients. ``options``: of ShardedLoss, of the loss (``more``), of the call."""
    sizes = options.get("sizes", SHARDS[size])
    loss_fn = case.build(CLASSES, DIM, z.dtype, **options.get("more", {}))
    module = ShardedLoss(loss_fn, mode=options["mode"], ddp=options.get("ddp", False))
    forward: dict[str, Any] = {"backend": options.get("backend", "auto")}
    leaves = {"embeddings": part(z, rank, sizes).clone().requires_grad_()}
    if "ref" in options:
        ref, ref_labels, ref_sizes = options["ref"]
        leaves["ref_emb"] = forward["ref_emb"] = part(ref, rank, ref_sizes).clone().requires_grad_()
        forward["ref_labels"] = part(ref_labels, rank, ref_sizes)
    if "indices" in options:
        forward["indices_tuple"] = options["indices"][rank]
    loss = module(leaves["embeddings"], part(labels, rank, sizes), **forward)
    loss.backward(torch.linspace(0.5, 1.5, len(loss), dtype=loss.dtype) if loss.ndim else None)
    leaves.update(loss_fn.named_parameters())
    return {
        "loss": loss.detach().numpy(),
        **{name: np.zeros(x.shape) if x.grad is None else x.grad.double().numpy() for name, x in leaves.items()},
    }


def check(size: int, case: Case, z: Tensor, labels: Tensor, rtol: float, floor: float = 1e-3, **options: Any) -> None:
    """Hold all ranks against one process: every rank's value and parameter gradients, and its rows' gradients."""
    loss_fn = case.build(CLASSES, DIM, z.dtype, **options.get("more", {}))
    forward: dict[str, Any] = {"backend": options.get("backend", "auto")}
    if "ref" in options:
        forward["ref_emb"], forward["ref_labels"] = options["ref"][:2]
    if "indices" in options:
        forward["indices_tuple"] = tuple(torch.cat(index) for index in zip(*options["indices"], strict=True))
    want = run(loss_fn, z, labels, **forward)
    if options.get("ddp"):  # what DDP's averaging will undo
        want.grads["embeddings"] *= size
    answers = ranks(size)(sharded, case, z, labels, options)
    rows = [name for name in ("embeddings", "ref_emb") if name in want.grads]
    joined = {name: np.concatenate([answer[name] for answer in answers]) for name in rows}
    for answer in answers:
        grads = {name: torch.as_tensor(joined.get(name, answer[name])) for name in want.grads}
        assert_same(Result(torch.as_tensor(answer["loss"]), grads), want, rtol, floor)


@everywhere
@in_both_modes
@over(CASES)
def test_every_loss_equals_one_process(case: Case, mode: str, size: int) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    check(size, case, z, labels, RTOL[torch.float64], mode=mode)


@in_both_modes
@over(OFFICIAL)
def test_what_the_authors_code_does_equals_one_process(case: Case, mode: str) -> None:
    check(3, case, *make_batch("trained", 29, DIM, CLASSES), RTOL[torch.float64], mode=mode)


@in_both_modes
@over(CASES)
def test_every_loss_in_single_precision(case: Case, mode: str) -> None:
    z, labels = make_batch("ragged", 29, DIM, CLASSES, dtype=torch.float32)
    check(3, case, z, labels, RTOL[torch.float32], mode=mode)


def test_all_losses_have_a_case() -> None:
    assert {case.loss for case in CASES} == {*LOSSES}


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.id == name)


def split_tuple(indices: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """A tuple dealt out to ranks in uneven parts, the last of them empty."""
    cuts = [len(indices[0]) // size] * (size - 2)
    return list(zip(*([*index.split([*cuts, len(index) - sum(cuts)]), index[:0]] for index in indices), strict=True))


@in_both_modes
@over(CASES, lambda case: case.takes_tuple)
def test_a_tuple_in_the_numbers_of_the_whole_batch(case: Case, mode: str) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    triplets = [(a, p, n) for a in range(29) for p in range(29) for n in (3, 8, 21, 27)
                if a != p and labels[a] == labels[p] and labels[a] != labels[n]]  # fmt: skip
    indices = tuple(torch.tensor(column) for column in zip(*triplets[::7], strict=True))
    check(3, case, z, labels, RTOL[torch.float64], mode=mode, indices=split_tuple(indices, 3))


@in_both_modes
@over(CASES, lambda case: case.takes_ref)
def test_a_reference_set_spread_over_the_ranks(case: Case, mode: str) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    ref, ref_labels = make_batch("trained", 23, DIM, CLASSES, seed=1)
    check(3, case, z, labels, RTOL[torch.float64], mode=mode, ref=(ref, ref_labels, [4, 19, 0]))


@in_both_modes
@pytest.mark.parametrize("reduction", ["none", "sum"])
@over(DEFAULTS, lambda case: case.cls.over_anchors)
def test_other_reductions(case: Case, reduction: str, mode: str) -> None:
    z, labels = make_batch("ragged", 29, DIM, CLASSES)
    check(2, case, z, labels, RTOL[torch.float64], mode=mode, more={"reduction": reduction})


@in_both_modes
@over(DEFAULTS)
@pytest.mark.parametrize("sizes", [[0, 0, 0], [1, 0, 0], [0, 1, 1], [2, 27, 0]], ids=str)
def test_shards_with_little_or_nothing_in_them(sizes: list[int], case: Case, mode: str) -> None:
    z, labels = make_batch("trained", sum(sizes), DIM, CLASSES) if sum(sizes) > 1 else (torch.ones(1, DIM), None)
    labels = torch.zeros(1, dtype=torch.int64) if labels is None else labels
    z, labels = z[: sum(sizes)].double(), labels[: sum(sizes)]
    check(3, case, z, labels, RTOL[torch.float64], mode=mode, sizes=sizes)


@over(DEFAULTS)
@pytest.mark.parametrize("labels", ["one class", "all different", "a class a rank"])
def test_labels_split_in_any_way(labels: str, case: Case) -> None:
    z, _ = make_batch("random", 12, DIM, CLASSES)
    sizes = [4, 3, 5]
    y = {"one class": torch.zeros(12), "all different": torch.arange(12),
         "a class a rank": torch.repeat_interleave(torch.tensor(sizes))}[labels].long()  # fmt: skip
    if case.per_class:
        y = y % CLASSES
    check(3, case, z, y, RTOL[torch.float64], mode="ring", sizes=sizes)


@in_both_modes
@over([*DEFAULTS, *OFFICIAL])
def test_nan_on_any_rank_is_nan_on_all(case: Case, mode: str) -> None:
    for row in (3, 20):  # of the first rank, and of the last
        z, labels = make_batch("trained", 29, DIM, CLASSES)
        z[row, 2] = torch.nan
        answers = ranks(3)(sharded, case, z, labels, {"mode": mode})
        for answer in answers:
            assert np.isnan(answer["loss"]), row
            if not case.proxy and len(answer["embeddings"]):  # with proxies the rows of other ranks do not count
                assert np.isnan(answer["embeddings"]).any(), row


@over([*DEFAULTS, *OFFICIAL], lambda case: case.takes_ref)
def test_nan_in_a_part_of_the_reference_set_is_nan_on_all(case: Case) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    ref, ref_labels = make_batch("trained", 23, DIM, CLASSES, seed=1)
    ref[20, 0] = torch.nan
    options = {"mode": "ring", "ref": (ref, ref_labels, [4, 19, 0])}
    assert all(np.isnan(answer["loss"]) for answer in ranks(3)(sharded, case, z, labels, options))


@in_both_modes
@over(DEFAULTS)
def test_half_precision_is_computed_as_in_one_process(case: Case, mode: str) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES, dtype=torch.bfloat16)
    case = Case(case.id, case.loss, case.arguments)
    check(2, case, z, labels, 1e-2, mode=mode)  # bf16 holds gradients to 4e-3


@over(CASES)
def test_the_tiled_backend(case: Case) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    check(2, case, z, labels, RTOL[torch.float64], mode="ring", backend="tiled")


@over(DEFAULTS)
def test_the_dense_backend_computes_everything_everywhere(case: Case) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    check(2, case, z, labels, RTOL[torch.float64], mode="ring", backend="dense")


@over(DEFAULTS)
def test_ddp_scales_the_gradient_of_embeddings_and_nothing_else(case: Case) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    check(3, case, z, labels, RTOL[torch.float64], mode="ring", ddp=True)


def squares(x: Tensor) -> Tensor:
    """A regulariser that sees all embeddings, or all proxies, at once."""
    return (x.sum(0) ** 2).mean()


@pytest.mark.parametrize("name", ["ms", "proxy_anchor"])
def test_regularisers_see_the_whole_batch(name: str) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    more: dict[str, Any] = {"embedding_regularizer": squares, "embedding_reg_weight": 0.3}
    if name == "proxy_anchor":
        more |= {"weight_regularizer": squares, "weight_reg_weight": 0.7}
    check(3, case_of(name), z, labels, RTOL[torch.float64], mode="gather", more=more)


def test_a_larger_batch_with_several_tiles_a_block() -> None:
    z, labels = make_batch("trained", 700, DIM, CLASSES)
    for name in ("ms-mined", "contrastive", "margin", "fast_ap", "dro_topk", "triplet-semihard"):
        check(2, case_of(name), z, labels, 1e-9, mode="ring", sizes=[500, 200])


def gathers_columns(rank: int, size: int, case: Case, z: Tensor, labels: Tensor, sizes: list[int]) -> bool:
    """Does a ring hold the columns of all ranks at once?"""
    calls = []

    def noted(*arguments: Any) -> Any:
        calls.append(arguments[-1])
        return gather_columns(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_batch, "gather_columns", noted)
        sharded(rank, size, case, z, labels, {"mode": "ring", "sizes": sizes})
    return bool(calls)


@pytest.mark.parametrize("name", ["triplet", "triplet-semihard"])
def test_a_ring_streams_triplets_unless_classes_are_large(name: str) -> None:
    for rows, classes in ((29, CLASSES), (150, 2)):
        z, labels = make_batch("trained", rows, DIM, classes)
        sizes = [rows - 11, 11]
        assert ranks(2)(gathers_columns, case_of(name), z, labels, sizes) == [rows == 150] * 2
        check(2, case_of(name), z, labels, 1e-9, mode="ring", sizes=sizes)


def mined(rank: int, size: int, z: Tensor, labels: Tensor, miner: Any) -> list[Tensor]:
    z, labels = (part(x, rank, SHARDS[size]) for x in (z, labels))
    indices = ShardedMiner(miner)(z, labels)
    leaf = z.clone().requires_grad_()
    loss = ShardedLoss(ContrastiveLoss())(leaf, labels, indices)
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad, *indices]


@everywhere
@pytest.mark.parametrize("miner", [miners.MultiSimilarityMiner(), miners.BatchHardMiner()], ids=["pairs", "triplets"])
def test_a_miner_looks_at_the_batches_of_all_ranks(miner: Any, size: int) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    indices = miner(z, labels)
    want = run(ContrastiveLoss(), z, labels, indices_tuple=indices)
    answers = ranks(size)(mined, z, labels, miner)
    assert all(abs(answer[0] - want.loss) < 1e-11 for answer in answers)
    assert_close(torch.cat([answer[1] for answer in answers]), want.grads["embeddings"], 1e-11)
    together = [torch.cat(index) for index in zip(*(answer[2:] for answer in answers), strict=True)]
    assert all(len(got) == len(index) for got, index in zip(together, indices, strict=True))


# Sharded proxies


def with_sharded_proxies(rank: int, size: int, case: Case, z: Tensor, labels: Tensor, ddp: bool) -> dict[str, Any]:
    loss_fn = case.build(CLASSES, DIM, z.dtype)
    module = ShardedLoss(loss_fn, shard_proxies=True, ddp=ddp)
    own = part(z, rank, SHARDS[size]).clone().requires_grad_()
    loss = module(own, part(labels, rank, SHARDS[size]))
    loss.backward()
    w = getattr(loss_fn, loss_fn.parameter)
    dim = int(loss_fn.transposed)
    kept = {name: x.shape for name, x in module.state_dict().items()}
    return {"loss": loss.detach(), "embeddings": own.grad, "proxies": w.grad.movedim(dim, 0), "kept": kept}


@everywhere
@over(CASES, lambda case: case.proxy and case.loss != "proxy_repulsion")
def test_proxies_split_over_the_ranks(case: Case, size: int) -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    loss_fn = case.build(CLASSES, DIM, z.dtype)
    want = run(loss_fn, z, labels)
    answers = ranks(size)(with_sharded_proxies, case, z, labels, False)
    for answer in answers:
        assert_close(answer["loss"], want.loss, 1e-11)
        (shape,) = answer["kept"].values()
        assert shape.numel() < getattr(loss_fn, loss_fn.parameter).numel()
    assert_close(torch.cat([a["embeddings"] for a in answers]), want.grads["embeddings"], 1e-11)
    whole = want.grads[loss_fn.parameter].movedim(int(loss_fn.transposed), 0)
    assert_close(torch.cat([a["proxies"] for a in answers]), whole, 1e-11)


def refuses_to_shard(rank: int, size: int) -> list[str]:
    said = []
    for loss in (
        MultiSimilarityLoss(),
        ProxyAnchorLoss(1, DIM),
        ProxyAnchorLoss(4, DIM, weight_regularizer=squares),
        LOSSES["proxy_repulsion"](4, DIM),
    ):
        with pytest.raises((TypeError, ValueError), match="shard_proxies: ") as error:
            ShardedLoss(loss, shard_proxies=True)
        said.append(str(error.value))
    return said


def test_what_cannot_be_sharded_is_refused() -> None:
    said = ranks(2)(refuses_to_shard)[0]
    assert "MultiSimilarityLoss" in said[0]
    assert "got 1 classes, wanted one for each of 2 ranks" in said[1]
    assert "weight_regularizer" in said[2]
    assert "ProxyRepulsionLoss" in said[3]


# One process


def test_without_a_process_group_it_is_the_loss_itself() -> None:
    z, labels = make_batch("trained", 29, DIM, CLASSES)
    for mode in MODES:
        for case in CASES:
            want = run(case.build(CLASSES, DIM), z, labels)
            module = ShardedLoss(case.build(CLASSES, DIM), mode=mode, ddp=True)
            leaf = z.clone().requires_grad_()
            loss = module(leaf, labels)
            loss.backward()
            assert_close(loss, want.loss, 1e-11, f"{case.id} in {mode}")
            assert_close(leaf.grad, want.grads["embeddings"], 1e-11, f"gradient of {case.id} in {mode}")


def test_arguments_are_checked_when_a_loss_is_wrapped() -> None:
    with pytest.raises(ValueError, match="mode: got 'star', wanted one of 'ring', 'gather'"):
        ShardedLoss(NCALoss(), mode="star")
    with pytest.raises(TypeError, match=r"loss: got Linear, wanted a loss of pydml\.losses"):
        ShardedLoss(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ddp: got 1"):
        ShardedLoss(ContrastiveLoss(), ddp=1)  # type: ignore[arg-type]
