"""Tuples of pairs: long and short lists, repeats, what is known of a miner's tuple, and what is not done for it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pydml
from pydml import ops
from pydml.backends import kernel
from pydml.declared import Backward, Dots, DotsOut, Listed, ListedTriplets, Mined
from pydml.policy import POLICIES, LogSumExp
from pydml.tuples import distinct, is_distinct

BACKENDS = [name for name in ("tiled", "cpu") if pydml.backends()[name] is None]
ON_BOTH = pytest.mark.parametrize("backend", BACKENDS)


def batch(rows: int = 40, dim: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, dim, dtype=torch.float64, generator=random)
    z[3], z[7] = z[2], z[2] + 1e-7 * z[1]  # the same row twice, and one that is hardly another
    return z, torch.arange(rows) % 5


def pairs(rows: int, cols: int, number: int, in_order: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    key = torch.randint(rows * cols, (number,), generator=random)
    key[: number // 10] = key[number // 2]  # a pair that occurs often
    key = key.sort().values if in_order else key
    return key // cols, key % cols


# Engines


@pytest.mark.parametrize("number", [1, 100, 3000])  # of 1600 or 1200 pairs: the last two are long lists
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("view", ["dot", "cosine", "euclidean", "squared"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("ref", [False, True])
def test_long_and_short_lists_have_the_similarities_and_gradients_of_their_pairs(
    number: int, in_order: bool, view: str, normalize: bool, ref: bool
) -> None:
    if "cpu" not in BACKENDS:
        pytest.skip("the extension is not built")
    z, _ = batch()
    cols = batch(30, seed=1)[0] if ref else None
    i, j = pairs(40, 30 if ref else 40, number, in_order)
    call = Dots(z, cols, i, j, view, normalize)
    u, want = (kernel(name, "dots")(call) for name in ("cpu", "tiled"))
    assert torch.allclose(u, want, rtol=1e-9, atol=1e-9)
    grad = torch.randn(number, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    back = Backward(call, DotsOut(grad), DotsOut(None), (True, ref))
    got, wanted = (kernel(name, "dots_backward")(back) for name in ("cpu", "tiled"))
    for mine, other in zip(got, wanted, strict=True):
        assert torch.allclose(mine, other, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_of_a_long_list_do_not_hang_on_threads(threads: int) -> None:
    z, _ = batch(200, 8)
    i, j = pairs(200, 200, 30_000, in_order=False)
    call = Dots(z.float(), None, i, j, "euclidean", True)
    back = Backward(call, DotsOut(torch.rand(30_000)), DotsOut(None), (True, False))
    before = torch.get_num_threads()
    found = []
    for number in (1, threads):
        torch.set_num_threads(number)
        try:
            found.append((kernel(BACKENDS[-1], "dots")(call), kernel(BACKENDS[-1], "dots_backward")(back)[0]))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@ON_BOTH
@pytest.mark.parametrize("number", [3, 3000])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize(("view", "normalize"), [("euclidean", True), ("squared", False), ("dot", True)])
@pytest.mark.parametrize("ref", [False, True])
def test_listed_triplets_are_made_of_their_pairs(
    number: int, in_order: bool, smooth: bool, view: str, normalize: bool, ref: bool, backend: str
) -> None:
    z, _ = batch()
    cols = batch(30, seed=1)[0].requires_grad_() if ref else None
    a, p = pairs(40, 30 if ref else 40, number, in_order)
    n = pairs(40, 30 if ref else 40, number, False, seed=1)[1]
    how, found = {"view": view, "normalize": normalize}, []
    for fused in (True, False):
        rows = z.clone().requires_grad_()
        if fused:
            call = ListedTriplets(rows, cols, a, p, n, margin=0.2, smooth=smooth, **how)
            total, above, _ = ops.call(call, backend)
        else:
            u_an, u_ap = (ops.call(Dots(rows, cols, a, other, **how), backend) for other in (n, p))
            violation = u_an - u_ap + 0.2
            term = torch.nn.functional.softplus(violation) if smooth else torch.relu(violation)
            total, above = (torch.zeros(40, dtype=z.dtype).index_add(0, a, x.to(z.dtype)) for x in (term, term > 0))
        weights = torch.arange(40, dtype=z.dtype)
        grads = torch.autograd.grad((total * weights).sum(), [rows, *([] if cols is None else [cols])])
        found.append((total.detach(), above, *grads))
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, rtol=1e-7, atol=1e-5)


PARAMS = {"exponential": [-2.0, 0.5, 50.0, 0.5], "binomial": [2.0, 50.0, 0.5], "bin_lifted": [2.0, 50.0, 0.5],
          "hinge": [0.9, 0.1], "mean": [], "lifted": [0.1], "arcface": [0.3, 8.0],
          "dro_margin": [0.2, 0.5, 0.1, 0.2], "dro_binomial": [2.0, 50.0, 0.5, 0.1, 0.2]}  # fmt: skip


@ON_BOTH
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("in_order", [True, False])
def test_statistics_of_listed_pairs_are_those_of_their_rows(policy: str, in_order: bool, backend: str) -> None:
    """Every row by itself, by the policy's own terms; the gradient by autograd."""
    random = torch.Generator().manual_seed(4)
    rows = 7
    sides = [torch.rand(n, dtype=torch.float64, generator=random) * 0.9 for n in (30, 60)]
    anchors = [torch.randint(rows - 1, (len(u),), generator=random) for u in sides]  # the last row has none
    if in_order:
        anchors = [a.sort().values for a in anchors]
    field = torch.rand(rows, dtype=torch.float64, generator=random) * 0.1 if policy in ("hinge", "lifted") else None
    loss = POLICIES[policy](*PARAMS[policy])
    u = [side.clone().requires_grad_() for side in sides]
    stats = ops.call(Listed(*u, *anchors, field, policy, PARAMS[policy], rows), backend)
    v = [side.clone().requires_grad_() for side in sides]
    want = []
    for k, slot in enumerate(loss.slots):
        side = int(slot.side == "negatives")
        zero = torch.zeros((), dtype=torch.float64)
        term = loss.term(k, v[side], zero if field is None else field[anchors[side]], zero)
        of_rows = [term[anchors[side] == r] for r in range(rows)]
        want.append(torch.stack([t.logsumexp(0) if isinstance(slot, LogSumExp) else t.sum() for t in of_rows]))
    wanted = torch.stack(want, 1)
    assert torch.allclose(stats, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.rand(stats.shape, dtype=torch.float64, generator=random)
    weights = torch.where(wanted.isfinite(), weights, 0)
    moving = [k for k, slot in enumerate(loss.slots) if not getattr(slot, "constant", False)]
    got = torch.autograd.grad((stats * weights)[:-1, moving].sum(), u, allow_unused=True)
    grads = torch.autograd.grad((wanted * weights)[:-1, moving].sum(), v, allow_unused=True)
    for mine, other in zip(got, grads, strict=True):
        assert torch.allclose(mine, torch.zeros_like(mine) if other is None else other, rtol=1e-9, atol=1e-12)


@ON_BOTH
@pytest.mark.parametrize(("rows", "epsilon"), [(64, 0.1), (300, 0.1), (300, None), (600, 10.0)])
@pytest.mark.parametrize("ref", [False, True])
def test_mined_pairs_are_all_there_and_in_order(rows: int, epsilon: float | None, ref: bool, backend: str) -> None:
    random = torch.Generator().manual_seed(rows)
    z, cols = (torch.randn(n, 8, dtype=torch.float64, generator=random) for n in (rows, 90))
    y, ref_y = (torch.randint(9, (n,), generator=random) for n in (rows, 90))
    matrix = (z, cols, y, ref_y) if ref else (z, None, y, None)
    got = kernel(backend, "mined")(Mined(*matrix, epsilon, "dot", True))
    want = pydml.miners.MultiSimilarityMiner(1e9 if epsilon is None else epsilon)(
        z, y, *((cols, ref_y) if ref else ()), backend="dense"
    )
    assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))


# Which pairs are distinct


@pytest.mark.parametrize("number", [0, 1, 5, 50, 2000])
def test_distinct_pairs_are_those_of_torch_unique(number: int) -> None:
    i, j = pairs(40, 30, number, in_order=False, seed=number) if number else (torch.arange(0),) * 2
    want = torch.unique(torch.stack((i, j)), dim=1)
    assert torch.equal(torch.stack(distinct(i, j, (40, 30))), want)
    assert torch.equal(torch.stack(distinct(*want, (40, 30))), want)


MINERS: dict[str, Any] = {
    "ms": pydml.miners.MultiSimilarityMiner,
    "hard": pydml.miners.BatchHardMiner,
    "easy hard": lambda: pydml.miners.BatchEasyHardMiner("easy", "hard"),
    "all": lambda: pydml.miners.BatchEasyHardMiner("all", "all"),
    "hard, all": lambda: pydml.miners.BatchEasyHardMiner("hard", "all"),
}


@pytest.mark.parametrize("backend", [*BACKENDS, "dense"])
@pytest.mark.parametrize("name", MINERS)
def test_a_miner_that_says_its_pairs_are_distinct_gives_none_twice(name: str, backend: str) -> None:
    z, labels = batch()
    found = MINERS[name]()(z, labels, backend=backend)
    assert isinstance(found, tuple)
    assert is_distinct(found, (40, 40))
    sides = (found[:2], found[2:] if len(found) == 4 else found[::2])
    for side in sides:
        listed = torch.stack(side)
        assert torch.unique(listed, dim=1).shape == listed.shape


def test_what_is_made_of_a_distinct_tuple_is_not_taken_for_one() -> None:
    z, labels = batch()
    found = pydml.miners.MultiSimilarityMiner()(z, labels)
    size = (40, 40)
    made = [
        found + found,
        tuple(torch.cat((index, index)) for index in found),
        type(found)(torch.cat((index, index)) for index in found),
        tuple(found),
        found[:4],
        copy.copy(found),
        copy.deepcopy(found),
        pickle.loads(pickle.dumps(found)),
    ]
    assert not any(is_distinct(one, size) for one in made)
    assert is_distinct(found, size)
    assert is_distinct(found, (50, 50))
    assert not is_distinct(found, (40, 30))  # it may point outside
    found[3][0] = found[3][1]
    assert not is_distinct(found, size)
    with torch.inference_mode():
        assert not is_distinct(pydml.miners.MultiSimilarityMiner()(z, labels), size)


@pytest.mark.parametrize("backend", [*BACKENDS, "dense"])
@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "GeneralizedLiftedStructureLoss", "HistogramLoss"])
def test_joined_tuples_count_a_pair_once_and_an_untouched_one_the_same(name: str, backend: str) -> None:
    z, labels = batch()
    found = pydml.miners.MultiSimilarityMiner()(z, labels)
    twice = tuple(torch.cat((index, index.flip(0))) for index in found)
    loss_fn = getattr(pydml.losses, name)()
    values = []
    for given in (found, tuple(found), twice):
        rows = z.clone().requires_grad_()
        loss = loss_fn(rows, labels, given, backend=backend)
        values.append(torch.cat((loss.detach()[None], torch.autograd.grad(loss, rows)[0].flatten())))
    assert torch.allclose(values[0], values[1], rtol=1e-10, atol=1e-14)
    assert torch.allclose(values[0], values[2], rtol=1e-10, atol=1e-14)


def test_entries_changed_after_mining_are_checked_again() -> None:
    z, labels = batch()
    found = pydml.miners.MultiSimilarityMiner()(z, labels)
    found[3][0] = 40
    with pytest.raises(ValueError, match="indices_tuple: n"):
        pydml.losses.MultiSimilarityLoss()(z, labels, found)


@pytest.mark.parametrize("name", ["contrastive", "ms"])
def test_a_compiled_loss_takes_a_miners_tuple(name: str) -> None:
    torch._dynamo.reset()
    z, labels = batch()
    found = pydml.miners.MultiSimilarityMiner()(z, labels)
    loss_fn = pydml.losses.LOSSES[name]()
    got = torch.compile(loss_fn, backend="aot_eager")(z, labels, found)
    assert torch.allclose(got, loss_fn(z, labels, found))


# What it costs


class Seen(TorchDispatchMode):
    """Names of the torch ops that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


SORTING = ("unique", "sort", "nonzero")


@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "GeneralizedLiftedStructureLoss", "ContrastiveLoss"])
def test_a_miners_tuple_is_neither_sorted_nor_searched(name: str) -> None:
    z, labels = batch()
    loss_fn = getattr(pydml.losses, name)()
    found = pydml.miners.MultiSimilarityMiner()(z, labels)
    with Seen() as seen:
        loss_fn(z, labels, found)
    assert not [op for op in seen.names if any(word in op for word in (*SORTING, "aminmax"))]


def test_a_tuple_in_order_is_not_sorted_and_no_tuple_is_sorted_by_columns() -> None:
    z, labels = batch()
    plain = tuple(pydml.miners.MultiSimilarityMiner()(z, labels))
    with Seen() as seen:
        pydml.losses.MultiSimilarityLoss()(z, labels, plain)
    assert not [op for op in seen.names if any(word in op for word in SORTING)]
    with Seen() as seen:
        pydml.losses.MultiSimilarityLoss()(z, labels, tuple(index.flip(0) for index in plain))
    assert not [op for op in seen.names if "unique_dim" in op]
