"""What the oracle's formulas share: a batch's similarities, distances and pairs, and how near decisions were to a tie.

Float64, loops over anchors and pairs, gradients by autograd: slow, and nothing of it from pydml.
"""

import math

import torch


def num(t):
    return t.detach().item() if torch.is_tensor(t) else float(t)


def lse(v):
    return torch.logsumexp(v, dim=0)


def log1p_sum_exp(v):
    """log(1 + sum_j exp(v_j)); v may be empty."""
    if len(v) == 0 or num(v.max()) <= 0:
        return torch.log1p(torch.exp(v).sum())  # keeps the digits of a small value
    return torch.logsumexp(torch.cat([v.new_zeros(1), v]), dim=0)


def cross_entropy(logits, y):
    """log(sum_k exp(l_k)) - l_y"""
    others = [k for k in range(len(logits)) if k != y]
    return log1p_sum_exp(logits[others] - logits[y])


def softplus(t):
    return torch.logaddexp(t, torch.zeros_like(t))


def relu(t):
    return torch.relu(t)


def safe_sqrt(q):
    """sqrt with value 0 and gradient 0 at 0."""
    ok = q > 0
    return torch.where(ok, torch.sqrt(torch.where(ok, q, torch.ones_like(q))), torch.zeros_like(q))


def unit(z):
    norm = safe_sqrt((z * z).sum(1, keepdim=True))
    return z / norm.clamp_min(1e-12)


class Info:
    def __init__(self):
        self.gap, self.kind, self.decisions, self.d0 = math.inf, None, 0, False

    def decide(self, gap, kind):
        gap = abs(num(gap))
        self.decisions += 1
        if gap < self.gap:
            self.gap, self.kind = gap, kind


def occurrences(lists, B):
    n = [sum(t.count(i) for t in lists) for i in range(B)]
    return [v / max(n) for v in n] if max(n, default=0) else [1.0] * B


class Geometry:
    """S, D2, D and the index lists P_i, N_i, for a batch against itself or against a reference set."""

    def __init__(self, z, y, ref, ref_y, normalize, info, indices=None):
        self.info = info
        self.x = unit(z) if normalize else z
        self.y = [int(v) for v in y]
        self.self_pairs = ref is None
        if ref is None:
            self.r, self.ry = self.x, self.y
        else:
            self.r, self.ry = (unit(ref) if normalize else ref), [int(v) for v in ref_y]
        # element by element, so that bit-identical rows give bit-identical similarities
        self.S = (self.x[:, None, :] * self.r[None, :, :]).sum(-1)
        self.D2 = ((self.x[:, None, :] - self.r[None, :, :]) ** 2).sum(-1)
        self.D = safe_sqrt(self.D2)
        self.B, self.R = self.S.shape
        self.P, self.N = [], []
        for i in range(self.B):
            p = [j for j in range(self.R) if self.ry[j] == self.y[i] and not (self.self_pairs and i == j)]
            n = [j for j in range(self.R) if self.ry[j] != self.y[i]]
            self.P.append(p)
            self.N.append(n)
        self.zero = (z * 0).sum() if ref is None else (z * 0).sum() + (ref * 0).sum()
        # pairs (a1, p, a2, n) or triplets (a, p, n) given from outside replace all pairs
        self.triplets = None
        self.weight = self.anchor_weight = [1.0] * self.B
        if indices is not None:
            indices = [[int(v) for v in t] for t in indices]
            if len(indices) == 3:
                self.triplets = list(zip(*indices, strict=True))
                indices = [indices[0], indices[1], indices[0], indices[2]]
                counted = [indices[0], indices[1], indices[3]]
            else:
                counted = indices
            a1, p, a2, n = indices
            self.P = [[q for a, q in zip(a1, p, strict=True) if a == i] for i in range(self.B)]
            self.N = [[q for a, q in zip(a2, n, strict=True) if a == i] for i in range(self.B)]
            # how often an item occurs, for the losses that take weights instead of pairs
            # (against a reference set or proxies in NCA: as an anchor)
            anchors = counted[:1] if len(counted) == 3 else [a1, a2]
            self.weight = occurrences(counted if self.self_pairs else anchors, self.B)
            self.anchor_weight = occurrences(anchors, self.B)

    def pairs(self):
        """Unordered pairs (i<j) of the batch; every (query, reference) pair when rectangular."""
        out = []
        for i in range(self.B):
            for j in range(self.R):
                if self.self_pairs and j <= i:
                    continue
                out.append((i, j, self.y[i] == self.ry[j]))
        return out

    def best(self, i, idx, largest, S=None):
        """argmax/argmin of S_i over idx, ties to the smallest index."""
        S = self.S if S is None else S
        top = idx[0]
        for j in idx[1:]:
            if S[i, j] > S[i, top] if largest else S[i, j] < S[i, top]:
                top = j
        for j in idx:
            if j != top:
                self.info.decide(S[i, j] - S[i, top], "argmax")
        return top


def mine(g, i, epsilon):
    P, N = g.P[i], g.N[i]
    if not P or not N:
        return [], []
    lowest = min(num(g.S[i, p]) for p in P)
    highest = max(num(g.S[i, n]) for n in N)
    keep_n, keep_p = [], []
    for n in N:
        t = num(g.S[i, n]) - (lowest - epsilon)
        g.info.decide(t, "mine")
        if t > 0:
            keep_n.append(n)
    for p in P:
        t = (highest + epsilon) - num(g.S[i, p])
        g.info.decide(t, "mine")
        if t > 0:
            keep_p.append(p)
    return keep_p, keep_n


def sets(g, i, epsilon):
    return (g.P[i], g.N[i]) if epsilon is None else mine(g, i, epsilon)


def reduce(values, zero, reduction):
    if reduction == "none":
        return torch.stack([v + zero for v in values]) if values else zero.expand(0)
    if not values:
        return zero
    s = torch.stack([v + zero for v in values]).sum()
    return s if reduction == "sum" else s / len(values)


def hinge_gap_S(g, t, D):
    """A hinge argument t of a Euclidean loss, as a change of S (dS = D dD)."""
    g.info.decide(num(t) * num(D), "hinge")
