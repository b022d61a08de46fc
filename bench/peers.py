"""Every loss as a good engineer writes it by hand: dense PyTorch on the whole matrix, one short function a loss.

They share nothing with pydml's own reference. Their keyword arguments are named as the fields of pydml's classes, and
take their values from there. ``torch.compile`` gets exactly these functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot, relu, softplus

INF = torch.inf


def cosines(z: Tensor) -> Tensor:
    x = normalize(z)
    return x @ x.T


def distances(z: Tensor) -> Tensor:
    return (2 - 2 * cosines(z)).clamp_min(1e-12).sqrt()


def sides(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of the positives and of the negatives."""
    same = labels[:, None] == labels
    return same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device), ~same


def lse(terms: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    return terms.masked_fill(~mask, -INF).logsumexp(dim)


def mine(s: Tensor, pos: Tensor, neg: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    s = s.detach()
    least = s.masked_fill(~pos, INF).amin(1, keepdim=True)
    most = s.masked_fill(~neg, -INF).amax(1, keepdim=True)
    return pos & (s < most + epsilon), neg & (s > least - epsilon)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Row means of the values under a mask; 0 where there are none."""
    return values.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp_min(1)


def multi_similarity(
    z: Tensor, labels: Tensor, *, alpha: float, beta: float, base: float, epsilon: float | None
) -> Tensor:
    s = cosines(z)
    pos, neg = sides(labels)
    if epsilon is not None:
        pos, neg = mine(s, pos, neg, epsilon)
    positive = softplus(lse(-alpha * (s - base), pos)) / alpha
    return (positive + softplus(lse(beta * (s - base), neg)) / beta).mean()


def ms_mining(z: Tensor, labels: Tensor, *, epsilon: float) -> Tensor:
    s = cosines(z)
    pos, neg = mine(s, *sides(labels), epsilon)
    return (mean(1 - s, pos) + mean(s, neg)).mean()


def contrastive(z: Tensor, labels: Tensor, *, pos_margin: float, neg_margin: float) -> Tensor:
    d = distances(z)
    pos, neg = sides(labels)
    positive, negative = relu(d - pos_margin) * pos, relu(neg_margin - d) * neg
    return positive.sum() / (positive > 0).sum().clamp_min(1) + negative.sum() / (negative > 0).sum().clamp_min(1)


def binomial(z: Tensor, labels: Tensor, *, alpha: float, beta: float, base: float) -> Tensor:
    s = cosines(z)
    pos, neg = sides(labels)
    return (mean(softplus(alpha * (base - s)), pos) + mean(softplus(beta * (s - base)), neg)).mean()


def lifted(z: Tensor, labels: Tensor, *, neg_margin: float, pos_margin: float) -> Tensor:
    d = distances(z)
    pos, neg = sides(labels)
    e = lse(neg_margin - d, neg)
    j = relu(torch.logaddexp(e[:, None], e) + d - pos_margin) * pos
    return 0.5 * j.square().sum() / pos.sum().clamp_min(1)


def generalized_lifted(z: Tensor, labels: Tensor, *, neg_margin: float, pos_margin: float) -> Tensor:
    d = distances(z)
    pos, neg = sides(labels)
    return relu(lse(d - pos_margin, pos) + lse(neg_margin - d, neg)).mean()


def lifted_star(z: Tensor, labels: Tensor, *, alpha: float, beta: float) -> Tensor:
    s = cosines(z)
    pos, neg = sides(labels)
    return (lse(-alpha * s, pos) / alpha + lse(beta * s, neg) / beta).mean()


def bin_lifted(z: Tensor, labels: Tensor, *, alpha: float, beta: float, base: float) -> Tensor:
    s = cosines(z)
    pos, neg = sides(labels)
    positive = (softplus(alpha * (base - s)) * pos).sum(1) + lse(-alpha * s, pos)
    negative = (softplus(beta * (s - base)) * neg).sum(1) + lse(beta * s, neg)
    return 0.5 * (positive / alpha + negative / beta).mean()


def nca(z: Tensor, labels: Tensor, *, softmax_scale: float) -> Tensor:
    logits = softmax_scale * (2 * cosines(z) - 2)
    pos, neg = sides(labels)
    return (lse(logits, pos | neg) - lse(logits, pos)).mean()


def n_pairs(z: Tensor, labels: Tensor) -> Tensor:
    order = labels.argsort(stable=True)
    classes = labels[order]
    new = torch.cat((classes.new_ones(1, dtype=torch.bool), classes[1:] != classes[:-1]))
    first = (new[:-1] & ~new[1:]).nonzero()[:, 0]
    x = normalize(z)
    logits = x[order[first]] @ x[order[first + 1]].T
    return cross_entropy(logits, torch.arange(len(first), device=z.device))


def margin(z: Tensor, labels: Tensor, *, margin: float, beta: float) -> Tensor:
    d = distances(z)
    pos, neg = sides(labels)
    # in PML's triplets a positive occurs once for each negative of its anchor, and the other way round
    positive = relu(margin + d - beta) * pos * neg.sum(1, keepdim=True)
    negative = relu(margin + beta - d) * neg * pos.sum(1, keepdim=True)
    number = ((positive > 0) * neg.sum(1, keepdim=True)).sum() + ((negative > 0) * pos.sum(1, keepdim=True)).sum()
    return (positive.sum() + negative.sum()) / number.clamp_min(1)


def _positives(d: Tensor, pos: Tensor, positives: int) -> tuple[Tensor, Tensor]:
    """Distances to the positives [B, M, 1] and which of them are real: no anchor has more than ``positives``."""
    real, index = pos.to(torch.uint8).topk(positives, 1)
    return d.gather(1, index)[:, :, None], real.bool()[:, :, None]


def triplet_all(z: Tensor, labels: Tensor, *, margin: float, positives: int) -> Tensor:
    d = distances(z)
    pos, neg = sides(labels)
    d_ap, real = _positives(d, pos, positives)
    hinge = relu(d_ap - d[:, None, :] + margin) * (real & neg[:, None, :])
    return hinge.sum() / (hinge > 0).sum().clamp_min(1)


def triplet_hard(z: Tensor, labels: Tensor, *, margin: float) -> Tensor:
    d = distances(z)
    pos, neg = sides(labels)
    d_ap, d_an = d.masked_fill(~pos, -INF).max(1).values, d.masked_fill(~neg, INF).min(1).values
    hinge = relu(d_ap - d_an + margin)
    return hinge.sum() / (hinge > 0).sum().clamp_min(1)


def triplet_semihard(z: Tensor, labels: Tensor, *, margin: float, positives: int) -> Tensor:
    d = distances(z)
    pos, neg = sides(labels)
    d_ap, real = _positives(d, pos, positives)
    beyond = real & neg[:, None, :] & (d[:, None, :] > d_ap)
    d_an = d[:, None, :].expand(-1, positives, -1).masked_fill(~beyond, INF).min(2).values
    hinge = relu(d_ap[:, :, 0] - d_an + margin)
    return hinge.sum() / (hinge > 0).sum().clamp_min(1)


def extreme_triplet(z: Tensor, labels: Tensor, *, negative: str, temperature: float) -> Tensor:
    s = cosines(z)
    pos, neg = sides(labels)
    s_ap = s.masked_fill(~pos, -INF).max(1).values
    if negative == "semihard":
        neg = neg & (s < s_ap[:, None])
    s_an = s.masked_fill(~neg, -INF).max(1).values
    counted = pos.any(1) & neg.any(1)
    gap = ((s_an - s_ap) / temperature).masked_fill(~counted, -INF)
    return softplus(gap).sum() / counted.sum().clamp_min(1)


def histogram(z: Tensor, labels: Tensor, *, n_bins: int) -> Tensor:
    s = cosines(z)
    pos, neg = (side.triu(1) for side in sides(labels))
    at = (s.clamp(-1, 1) + 1) * (n_bins / 2)
    left = at.detach().long().clamp_max(n_bins - 1)
    right = at - left
    h_pos, h_neg = (  # row by row: one long fp32 sum a bin would lose digits, and could not be shared between threads
        s.new_zeros(len(s), n_bins + 1)
        .scatter_add(1, left, (1 - right) * side)
        .scatter_add(1, left + 1, right * side)
        .sum(0)
        / side.sum().clamp_min(1)
        for side in (pos, neg)
    )
    return (h_neg * h_pos.cumsum(0)).sum()


def fast_ap(z: Tensor, labels: Tensor, *, num_bins: int) -> Tensor:
    squared = 2 - 2 * cosines(z)
    pos, neg = sides(labels)
    either = pos | neg
    h_pos, h_all = [], []
    for node in (4 * i / num_bins for i in range(num_bins + 1)):
        pulse = relu(1 - (squared - node).abs() * (num_bins / 4))
        h_pos.append((pulse * pos).sum(1))
        h_all.append((pulse * either).sum(1))
    positives, total = torch.stack(h_pos, 1), torch.stack(h_all, 1).cumsum(1)
    precision = positives * positives.cumsum(1) / total.masked_fill(total == 0, 1)
    return 1 - (precision.sum(1) / pos.sum(1).clamp_min(1)).mean()


def _pair_losses(s: Tensor, pos: Tensor, margin: float, threshold: float) -> Tensor:
    return relu(margin + torch.where(pos, threshold - s, s - threshold))


def dro_topk(z: Tensor, labels: Tensor, *, k: int, balanced: bool, margin: float, threshold: float) -> Tensor:
    pos, neg = (side.triu(1) for side in sides(labels))
    losses = _pair_losses(cosines(z), pos, margin, threshold)
    if not balanced:
        return losses.masked_fill(~(pos | neg), -1).flatten().topk(k).values.mean()
    top = [losses.masked_fill(~side, -1).flatten().topk(k // 2).values for side in (pos, neg)]
    return torch.cat(top).mean()


def dro_kl(z: Tensor, labels: Tensor, *, gamma: float, margin: float, threshold: float) -> Tensor:
    pos, neg = sides(labels)
    losses = _pair_losses(cosines(z), pos, margin, threshold)
    return gamma * (lse(losses / gamma, pos | neg).logsumexp(0) - math.log(len(z) * (len(z) - 1)))


def dro_kl_grouped(
    z: Tensor, labels: Tensor, *, gamma_pos: float, gamma_neg: float, margin: float, threshold: float
) -> Tensor:
    pos, neg = sides(labels)
    losses = _pair_losses(cosines(z), pos, margin, threshold)
    positive = gamma_pos * (lse(losses / gamma_pos, pos) - pos.sum(1).to(losses.dtype).log())
    return (positive + gamma_neg * (lse(losses / gamma_neg, neg) - neg.sum(1).to(losses.dtype).log())).mean()


def normalized_softmax(z: Tensor, labels: Tensor, w: Tensor, *, temperature: float) -> Tensor:
    return cross_entropy(normalize(z) @ normalize(w, dim=0) / temperature, labels)


def proxy_nca(z: Tensor, labels: Tensor, w: Tensor, *, softmax_scale: float) -> Tensor:
    return cross_entropy(softmax_scale * (2 * normalize(z) @ normalize(w).T - 2), labels)


def arcface(z: Tensor, labels: Tensor, w: Tensor, *, margin: float, scale: float) -> Tensor:
    m = math.radians(margin)
    cosine = normalize(z) @ normalize(w, dim=0)
    c = cosine.gather(1, labels[:, None])
    sine = (1 - c * c).clamp_min(1e-12).sqrt()
    target = torch.where(c >= math.cos(math.pi - m), c * math.cos(m) - sine * math.sin(m), c - m * math.sin(m))
    return cross_entropy(scale * cosine.scatter(1, labels[:, None], target), labels)


def soft_triple(
    z: Tensor, labels: Tensor, w: Tensor, *, centers_per_class: int, la: float, gamma: float, margin: float
) -> Tensor:
    s = (normalize(z) @ normalize(w, dim=0)).unflatten(1, (-1, centers_per_class))
    pooled = ((s / gamma).softmax(2) * s).sum(2)
    return cross_entropy(la * (pooled - margin * one_hot(labels, pooled.shape[1]).to(s.dtype)), labels)


def proxy_anchor(z: Tensor, labels: Tensor, w: Tensor, *, margin: float, alpha: float) -> Tensor:
    s = normalize(z) @ normalize(w).T
    pos = one_hot(labels, len(w)).bool()
    positive = torch.exp(-alpha * (s - margin)).masked_fill(~pos, 0).sum(0).log1p()
    negative = torch.exp(alpha * (s + margin)).masked_fill(pos, 0).sum(0).log1p()
    return positive.sum() / pos.any(0).sum() + negative.mean()


def proxy_repulsion(
    z: Tensor, labels: Tensor, w: Tensor, *, margin: float, alpha: float, variant: str, aggregate: str
) -> Tensor:
    w = normalize(w)
    s = normalize(z) @ w.T
    pos = one_hot(labels, len(w)).bool()
    positive = torch.exp(-alpha * (s - margin)).masked_fill(~pos, 0).sum(0).log1p()
    g = w @ w.T if variant == "proxy" else s.T @ s / (len(s) if aggregate == "mean" else 1)
    others = ~torch.eye(len(w), dtype=torch.bool, device=w.device)
    return positive.sum() / pos.any(0).sum() + softplus(lse(alpha * (g + margin), others)).mean()


def recall(z: Tensor, labels: Tensor, *, ks: tuple[int, ...]) -> Tensor:
    """Recall@K for every K from the neighbour lists, a thousand queries at a time."""
    x = normalize(z)
    first = []
    for rows in torch.arange(len(x)).split(1000):
        s = x[rows] @ x.T
        s[torch.arange(len(rows)), rows] = -INF
        hit = labels[s.topk(min(max(ks), len(x) - 1), 1).indices] == labels[rows, None]
        first.append(torch.where(hit.any(1), hit.to(torch.uint8).argmax(1), max(ks)))
    return torch.stack([(torch.cat(first) < k).double().mean() for k in ks])
