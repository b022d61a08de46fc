"""Identities between losses, and between a loss and its paper's pair weights: exact, whatever the implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import BACKENDS, Case, Result, assert_close, assert_same, generator, make_batch, over, run
from torch import Tensor

from pydml import losses

ON = pytest.mark.parametrize("backend", BACKENDS)
ROWS, DIM, CLASSES = 24, 10, 6
EXACT = 1e-11


def batch(regime: str = "random", seed: int = 0) -> tuple[Tensor, Tensor]:
    return make_batch(regime, ROWS, DIM, CLASSES, seed)


def value(loss_fn: Any, backend: str, z: Tensor, labels: Tensor, **forward: Any) -> Result:
    return run(loss_fn, z, labels, backend=backend, **forward)


# Pair weights w_ij = B·∂L/∂S_ij. Against the unit vectors as reference set, not normalised, S is the batch itself, and
# the gradient of the embeddings is the matrix of weights.


def weights(loss_fn: Any, backend: str, s: Tensor, labels: Tensor, ref_labels: Tensor) -> Tensor:
    unit = torch.eye(s.shape[1], dtype=s.dtype)
    got = run(loss_fn, s, labels, ref_emb=unit, ref_labels=ref_labels, backend=backend)
    return got.grads["embeddings"] * len(s)


def similarities() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S [B, N], labels of rows and of columns, and which pairs are positive."""
    s = torch.rand(9, 14, generator=generator(1), dtype=torch.float64) * 1.8 - 0.9
    labels, ref_labels = torch.arange(9) % 4, torch.arange(14) % 4
    return s, labels, ref_labels, labels[:, None] == ref_labels


@ON
def test_multi_similarity_weights_are_those_of_the_paper(backend: str) -> None:
    s, labels, ref_labels, same = similarities()
    alpha, beta, base = 2.0, 50.0, 0.5
    pos, neg = torch.exp(-alpha * (s - base)) * same, torch.exp(beta * (s - base)) * ~same
    want = neg / (1 + neg.sum(1, keepdim=True)) - pos / (1 + pos.sum(1, keepdim=True))
    got = weights(losses.MultiSimilarityLoss(normalize_embeddings=False), backend, s, labels, ref_labels)
    assert_close(got, want, EXACT)


@ON
def test_binomial_weights_are_those_of_the_paper(backend: str) -> None:
    s, labels, ref_labels, same = similarities()
    alpha, beta, base = 2.0, 50.0, 0.5
    pos = alpha * torch.sigmoid(alpha * (base - s)) * same / same.sum(1, keepdim=True)
    neg = beta * torch.sigmoid(beta * (s - base)) * ~same / (~same).sum(1, keepdim=True)
    got = weights(losses.BinomialDevianceLoss(normalize_embeddings=False), backend, s, labels, ref_labels)
    assert_close(got, neg - pos, EXACT)


@ON
def test_lifted_star_weights_are_softmaxes(backend: str) -> None:
    s, labels, ref_labels, same = similarities()
    pos = torch.softmax((-2 * s).masked_fill(~same, -torch.inf), 1)
    neg = torch.softmax((50 * s).masked_fill(same, -torch.inf), 1)
    got = weights(losses.LiftedStarLoss(normalize_embeddings=False), backend, s, labels, ref_labels)
    assert_close(got, neg - pos, EXACT)


@ON
def test_bin_lifted_weights_are_the_mean_of_binomial_and_lifted(backend: str) -> None:
    s, labels, ref_labels, same = similarities()
    alpha, beta, base = 2.0, 50.0, 0.5
    pos = torch.sigmoid(alpha * (base - s)) * same + torch.softmax((-alpha * s).masked_fill(~same, -torch.inf), 1)
    neg = torch.sigmoid(beta * (s - base)) * ~same + torch.softmax((beta * s).masked_fill(same, -torch.inf), 1)
    got = weights(losses.BinLiftedLoss(normalize_embeddings=False), backend, s, labels, ref_labels)
    assert_close(got, (neg - pos) / 2, EXACT)


@ON
@pytest.mark.parametrize(("order", "temperature"), [(1, 0.1), (2, 1.0), (2, 0.1)])
def test_extreme_triplet_weights_are_those_of_the_paper(order: int, temperature: float, backend: str) -> None:
    s, labels, ref_labels, same = similarities()
    p, n = s.masked_fill(~same, -torch.inf).argmax(1), s.masked_fill(same, -torch.inf).argmax(1)
    rows = torch.arange(len(s))
    s_ap, s_an = s[rows, p], s[rows, n]
    exponent = s_an - s_ap if order == 1 else s_an**2 / 2 - s_ap + s_ap**2 / 2
    sigma = torch.sigmoid(exponent / temperature) / temperature
    want = torch.zeros_like(s)
    want[rows, n] = sigma * (1 if order == 1 else s_an)
    want[rows, p] = -sigma * (1 if order == 1 else 1 - s_ap)
    loss_fn = losses.ExtremeTripletLoss(order=order, temperature=temperature, normalize_embeddings=False)
    assert_close(weights(loss_fn, backend, s, labels, ref_labels), want, EXACT)


# Mining


@ON
@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "BinomialDevianceLoss", "LiftedStarLoss"])
def test_mining_with_a_huge_epsilon_keeps_every_pair(name: str, backend: str) -> None:
    z, labels = batch()
    plain, mined = getattr(losses, name)(), getattr(losses, name)(epsilon=10.0)
    assert_same(value(mined, backend, z, labels), value(plain, backend, z, labels), EXACT)


@ON
@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "MSMiningLoss", "BinomialDevianceLoss", "LiftedStarLoss"])
def test_mining_with_a_hopeless_epsilon_keeps_nothing(name: str, backend: str) -> None:
    z, labels = batch()
    got = value(getattr(losses, name)(epsilon=-10.0), backend, z, labels)
    assert got.loss == 0
    assert not got.grads["embeddings"].any()


@ON
@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "BinomialDevianceLoss", "LiftedStarLoss"])
def test_nothing_is_mined_for_an_anchor_without_positives(name: str, backend: str) -> None:
    z, labels = batch()
    labels = torch.where(torch.arange(ROWS) == 5, 100, labels)
    got = getattr(losses, name)(epsilon=10.0, reduction="none")(z, labels, backend=backend)
    assert got[5] == 0
    assert (got[torch.arange(ROWS) != 5] > 0).any()


@ON
def test_mining_only_is_the_mean_of_the_mined_pairs(backend: str) -> None:
    z, labels = batch()
    x = torch.nn.functional.normalize(z)
    s, same = x @ x.T, labels[:, None] == labels
    want = torch.zeros(ROWS, dtype=z.dtype)
    for i in range(ROWS):
        others = torch.arange(ROWS) != i
        pos, neg = s[i, same[i] & others], s[i, ~same[i]]
        kept_pos, kept_neg = pos[pos < neg.max() + 0.1], neg[neg > pos.min() - 0.1]
        want[i] += (1 - kept_pos).mean() if len(kept_pos) else 0
        want[i] += kept_neg.mean() if len(kept_neg) else 0
    assert_close(losses.MSMiningLoss(reduction="none")(z, labels, backend=backend), want, EXACT)


# Distributionally robust losses


@ON
def test_grouped_kl_with_a_large_margin_has_the_gradient_of_lifted_star(backend: str) -> None:
    z, labels = batch()
    grouped = losses.DROKLGroupedLoss(gamma_pos=1 / 2, gamma_neg=1 / 50, margin=5.0)
    want = value(losses.LiftedStarLoss(alpha=2, beta=50), backend, z, labels)
    assert_close(value(grouped, backend, z, labels).grads["embeddings"], want.grads["embeddings"], EXACT)


def pair_losses(z: Tensor, labels: Tensor, base_loss: str) -> Tensor:
    """l of every unordered pair."""
    x = torch.nn.functional.normalize(z)
    i, j = torch.triu_indices(len(z), len(z), 1)
    s, same = (x[i] * x[j]).sum(1), labels[i] == labels[j]
    if base_loss == "margin":
        return torch.relu(0.2 + torch.where(same, 0.5 - s, s - 0.5))
    return torch.where(same, torch.log1p(torch.exp(2 * (0.5 - s))) / 2, torch.log1p(torch.exp(50 * (s - 0.5))) / 50)


PAIRS = ROWS * (ROWS - 1) // 2


@ON
@pytest.mark.parametrize("base_loss", ["margin", "binomial"])
def test_kl_lies_between_mean_and_maximum_and_reaches_both(base_loss: str, backend: str) -> None:
    z, labels = batch()
    every = pair_losses(z, labels, base_loss)

    def kl(gamma: float) -> float:
        return float(losses.DROKLLoss(gamma, base_loss)(z, labels, backend=backend))

    assert kl(1e6) == pytest.approx(float(every.mean()), abs=1e-6)
    for gamma in (1e-2, 1e-3, 1e-4):
        assert float(every.max()) - gamma * math.log(PAIRS) - 1e-12 <= kl(gamma) <= float(every.max()) + 1e-12
    assert kl(0.1) == pytest.approx(float(0.1 * torch.log(torch.exp(every / 0.1).mean())), rel=1e-12)


@ON
@pytest.mark.parametrize("base_loss", ["margin", "binomial"])
def test_top_k_runs_from_maximum_to_mean(base_loss: str, backend: str) -> None:
    z, labels = batch()
    every = pair_losses(z, labels, base_loss).sort(descending=True).values

    def top(k: int) -> Tensor:
        return losses.DROTopKLoss(k, base_loss)(z, labels, backend=backend)

    assert_close(top(1), every[0], EXACT)
    assert_close(top(40), every[:40].mean(), EXACT)
    assert_close(top(PAIRS), every.mean(), EXACT)
    assert_close(top(10 * PAIRS), every.mean(), EXACT)


@ON
def test_balanced_top_k_takes_half_from_each_side(backend: str) -> None:
    z, labels = batch()
    every = pair_losses(z, labels, "margin")
    i, j = torch.triu_indices(ROWS, ROWS, 1)
    same = labels[i] == labels[j]
    pos, neg = every[same].sort(descending=True).values, every[~same].sort(descending=True).values
    balanced = losses.DROTopKLoss(20, balanced=True)
    assert_close(balanced(z, labels, backend=backend), (pos[:10].sum() + neg[:10].sum()) / 20, EXACT)
    short = losses.DROTopKLoss(2 * len(pos) + 10, balanced=True)  # fewer positives than asked for: all of them
    chosen = torch.cat((pos, neg[: len(pos) + 5]))
    assert_close(short(z, labels, backend=backend), chosen.mean(), EXACT)


# Softmaxes


@ON
@pytest.mark.parametrize(
    ("loss_fn", "arguments"),
    [
        (losses.ProxyNCALoss, {"softmax_scale": 4}),  # D² = 2-2S: s·D² = 2s·S up to a constant
        (losses.ArcFaceLoss, {"margin": 0, "scale": 8}),
        (losses.SoftTripleLoss, {"centers_per_class": 1, "margin": 0, "la": 8}),
        (losses.SoftTripleLoss, {"centers_per_class": 1, "margin": 0, "la": 8, "tau": 0.2}),
    ],
    ids=["proxy_nca", "arcface", "soft_triple", "soft_triple_of_one_centre_has_nothing_to_merge"],
)
def test_softmax_losses_meet_in_the_normalised_softmax(loss_fn: Any, arguments: dict[str, Any], backend: str) -> None:
    z, labels = batch()
    other = loss_fn(CLASSES, DIM, **arguments).double()
    plain = losses.NormalizedSoftmaxLoss(CLASSES, DIM, temperature=1 / 8).double()
    parameter = getattr(other, other.parameter)
    plain.W.data = parameter.detach().clone() if other.transposed else parameter.detach().T.clone()
    got, want = value(other, backend, z, labels), value(plain, backend, z, labels)
    assert_close(got.loss, want.loss, EXACT)
    assert_close(got.grads["embeddings"], want.grads["embeddings"], EXACT)
    grad = got.grads[other.parameter]
    assert_close(grad if other.transposed else grad.T, want.grads["W"], EXACT)


@ON
def test_soft_triple_with_equal_centres_is_the_normalised_softmax(backend: str) -> None:
    z, labels = batch()
    plain = losses.NormalizedSoftmaxLoss(CLASSES, DIM, temperature=1 / 8).double()
    pooled = losses.SoftTripleLoss(CLASSES, DIM, centers_per_class=4, margin=0, la=8).double()
    pooled.fc.data = plain.W.detach().repeat_interleave(4, dim=1)
    got, want = value(pooled, backend, z, labels), value(plain, backend, z, labels)
    assert_close(got.loss, want.loss, EXACT)
    assert_close(got.grads["embeddings"], want.grads["embeddings"], EXACT)
    assert_close(got.grads["fc"].unflatten(1, (CLASSES, 4)).sum(2), want.grads["W"], EXACT)


@ON
def test_nca_on_squared_distances_is_nca_on_cosines_at_twice_the_scale(backend: str) -> None:
    z, labels = batch()
    squared, cosine = losses.NCALoss(3.0), losses.NCALoss(6.0, distance="cosine")
    assert_same(value(squared, backend, z, labels), value(cosine, backend, z, labels), EXACT)


@ON
def test_n_pairs_is_the_cross_entropy_of_a_gram_block(backend: str) -> None:
    z, labels = batch("ragged")
    x = torch.nn.functional.normalize(z)
    firsts = [(labels == c).nonzero()[:2, 0] for c in labels.unique()]
    a, p = torch.stack([pair for pair in firsts if len(pair) == 2]).T
    want = torch.nn.functional.cross_entropy(x[a] @ x[p].T, torch.arange(len(a)))
    assert_close(losses.NPairsLoss()(z, labels, backend=backend), want, EXACT)


# Proxies


@ON
def test_proxy_anchor_is_multi_similarity_with_proxies_as_anchors(backend: str) -> None:
    """α = β, and the margin with either sign on the two sides."""
    z, labels = batch()
    labels = torch.where(labels == 3, 2, labels)  # class 3 is not in the batch
    alpha, margin = 16.0, 0.2
    loss_fn = losses.ProxyAnchorLoss(CLASSES, DIM, margin=margin, alpha=alpha).double()
    got = value(loss_fn, backend, z, labels)
    rows, proxies = z.clone().requires_grad_(), loss_fn.proxies.detach().clone().requires_grad_()
    classes, none = torch.arange(CLASSES), torch.empty(0, dtype=torch.long)
    w, x = (classes[:, None] == labels).nonzero(as_tuple=True)
    w_neg, x_neg = (classes[:, None] != labels).nonzero(as_tuple=True)

    def side(base: float, *pairs: Tensor) -> Tensor:
        ms = losses.MultiSimilarityLoss(alpha, alpha, base, reduction="sum")
        return alpha * ms(proxies, classes, pairs, rows, labels, backend=backend)

    want = side(margin, w, x, none, none) / len(labels.unique()) + side(-margin, none, none, w_neg, x_neg) / CLASSES
    want.backward()
    assert_close(got.loss, want, EXACT)
    assert_close(got.grads["embeddings"], rows.grad, EXACT)
    assert_close(got.grads["proxies"], proxies.grad, EXACT)


@ON
@pytest.mark.parametrize("variant", ["batch", "proxy"])
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_proxy_repulsion_pushes_proxies_apart_by_its_gram_matrix(variant: str, aggregate: str, backend: str) -> None:
    z, labels = batch()
    alpha, margin = 4.0, 0.1
    repulsion = losses.ProxyRepulsionLoss(CLASSES, DIM, margin, alpha, variant, aggregate).double()
    anchor = losses.ProxyAnchorLoss(CLASSES, DIM, margin, alpha).double()
    anchor.load_state_dict(repulsion.state_dict())
    x, w = (torch.nn.functional.normalize(t) for t in (z, repulsion.proxies.detach()))
    c = x @ w.T
    gram = w @ w.T if variant == "proxy" else c.T @ c / (1 if aggregate == "sum" else ROWS)
    others = ~torch.eye(CLASSES, dtype=torch.bool)
    push = torch.log1p((torch.exp(alpha * (gram + margin)) * others).sum(1)).mean()
    negatives = labels[:, None] != torch.arange(CLASSES)
    anchors_push = torch.log1p((torch.exp(alpha * (c + margin)) * negatives).sum(0)).mean()
    got = repulsion(z, labels, backend=backend) - anchor(z, labels, backend=backend)
    assert_close(got, push - anchors_push, EXACT)


# Triplets and hinges


@ON
def test_squared_distances_are_cosines_with_half_the_margin(backend: str) -> None:
    z, labels = batch()
    squared = value(losses.TripletMarginLoss(0.2, distance="squared"), backend, z, labels)
    cosine = value(losses.TripletMarginLoss(0.1, distance="cosine"), backend, z, labels)
    assert_close(squared.loss, 2 * cosine.loss, EXACT)
    assert_close(squared.grads["embeddings"], 2 * cosine.grads["embeddings"], EXACT)


@ON
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_all_triplets_are_the_loop_over_them(smooth: bool, swap: bool, backend: str) -> None:
    z, labels = batch("ragged")
    x = torch.nn.functional.normalize(z)
    d = (x[:, None] - x).norm(dim=2)
    terms = []
    for a in range(ROWS):
        for p in range(ROWS):
            for n in range(ROWS):
                if a != p and labels[a] == labels[p] and labels[a] != labels[n]:
                    d_an = torch.minimum(d[a, n], d[p, n]) if swap else d[a, n]
                    terms.append(d[a, p] - d_an + 0.3)
    stacked = torch.stack(terms)
    term = torch.log1p(torch.exp(stacked)) if smooth else torch.relu(stacked)
    loss_fn = losses.TripletMarginLoss(0.3, swap=swap, smooth_loss=smooth)
    assert_close(loss_fn(z, labels, backend=backend), term.sum() / (term > 0).sum(), EXACT)


@ON
def test_hard_smooth_cosine_triplets_are_first_order_extreme_triplets(backend: str) -> None:
    z, labels = batch()
    smooth = losses.TripletMarginLoss(0, smooth_loss=True, triplets="hard", distance="cosine")
    extreme = losses.ExtremeTripletLoss("hard", "hard", temperature=1.0)
    assert_same(value(smooth, backend, z, labels), value(extreme, backend, z, labels), EXACT)


@ON
def test_first_order_extreme_triplets_are_a_two_way_cross_entropy(backend: str) -> None:
    z, labels = batch()
    x = torch.nn.functional.normalize(z)
    s, same = x @ x.T, labels[:, None] == labels
    others = ~torch.eye(ROWS, dtype=torch.bool)
    easy = s.masked_fill(~(same & others), -torch.inf).amax(1)
    hard = s.masked_fill(same, -torch.inf).amax(1)
    want = torch.nn.functional.cross_entropy(torch.stack((easy, hard), 1) / 0.1, torch.zeros(ROWS, dtype=torch.long))
    assert_close(losses.ExtremeTripletLoss()(z, labels, backend=backend), want, EXACT)


@ON
def test_contrastive_denominators_differ_by_their_counts(backend: str) -> None:
    z, labels = batch()
    x = torch.nn.functional.normalize(z)
    d, same = (x[:, None] - x).norm(dim=2), (labels[:, None] == labels) & ~torch.eye(ROWS, dtype=torch.bool)
    pos = d[same]
    neg = torch.relu(1.2 - d[labels[:, None] != labels])
    for denominator, n_pos, n_neg in (
        ("nonzero", len(pos), (neg > 0).sum()),
        ("pairs", len(pos), len(neg)),
        ("batch", ROWS, ROWS),
    ):
        got = losses.ContrastiveLoss(neg_margin=1.2, denominator=denominator)(z, labels, backend=backend)
        assert_close(got, pos.sum() / n_pos + neg.sum() / n_neg, EXACT)


@ON
def test_generalised_lifted_without_its_hinge_is_lifted_star_at_scale_one(backend: str) -> None:
    z, labels = batch()
    hinged = losses.GeneralizedLiftedStructureLoss(0, 0, distance="cosine")
    assert (losses.LiftedStarLoss(1, 1, reduction="none")(z, labels, backend=backend) > 0).all()
    assert_same(value(hinged, backend, z, labels), value(losses.LiftedStarLoss(1, 1), backend, z, labels), EXACT)


# Histograms: piecewise smooth, so a small central difference inside the pieces is the gradient


@ON
@over([Case("histogram", "histogram"), Case("coarse", "histogram", {"n_bins": 5}), Case("fast_ap", "fast_ap")])
def test_histogram_gradients_are_difference_quotients(case: Case, backend: str) -> None:
    z, labels = make_batch("random", 10, 5, 3, seed=2)
    loss_fn = case.build(3, 5)
    grad = value(loss_fn, backend, z, labels).grads["embeddings"]
    for k in range(3):
        step = torch.randn(z.shape, generator=generator(k), dtype=z.dtype) * 1e-6
        rise = loss_fn(z + step, labels, backend=backend) - loss_fn(z - step, labels, backend=backend)
        assert_close((grad * step).sum() * 2e6, rise * 1e6, 1e-5)


@ON
def test_fast_ap_of_a_perfect_ranking_is_zero(backend: str) -> None:
    z = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 1, 2, 2]] + 1e-9
    got = losses.FastAPLoss()(z, torch.tensor([0, 0, 1, 1, 2, 2]), backend=backend)
    assert_close(got, 0.0, 1e-4)


# Reductions


@ON
@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "LiftedStarLoss", "GeneralizedLiftedStructureLoss"])
def test_reductions_are_mean_and_sum_of_the_values(name: str, backend: str) -> None:
    z, labels = batch("ragged")

    def reduced(reduction: str) -> Tensor:
        return getattr(losses, name)(reduction=reduction)(z, labels, backend=backend)

    none = reduced("none")
    assert none.shape == (ROWS,)
    assert_close(reduced("sum"), none.sum(), EXACT)
    assert_close(reduced("mean"), none.mean(), EXACT)


@ON
@pytest.mark.parametrize("name", ["NCALoss", "FastAPLoss", "ExtremeTripletLoss"])
def test_anchors_that_the_mean_leaves_out_are_zeros_of_the_vector(name: str, backend: str) -> None:
    z, labels = batch("ragged")
    none = getattr(losses, name)(reduction="none")(z, labels, backend=backend)
    counted = (labels[:, None] == labels).sum(1) > 1
    assert not counted.all()
    assert not none[~counted].any()
    assert_close(getattr(losses, name)()(z, labels, backend=backend), none.sum() / counted.sum(), EXACT)
