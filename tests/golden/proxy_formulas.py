"""Every proxy loss of the registry, straight from its paper: loops over rows, classes and proxies; see oracle.py."""

import math

import torch
from geometry import cross_entropy, log1p_sum_exp, lse, num, reduce, safe_sqrt, unit


def NormalizedSoftmaxLoss(g, W, num_classes, embedding_size, temperature=0.05, reduction="mean"):
    w = unit(W.t())
    out = []
    for i in range(g.B):
        logits = (w * g.x[i]).sum(1) / temperature
        out.append(cross_entropy(logits, g.y[i]) * g.weight[i])
    return reduce(out, g.zero, reduction)


def ProxyNCALoss(g, W, num_classes, embedding_size, softmax_scale=1, include_positive=True, reduction="mean"):
    w = unit(W)
    out = []
    for i in range(g.B):
        logits = -softmax_scale * ((w - g.x[i]) ** 2).sum(1)
        others = [c for c in range(num_classes) if c != g.y[i]]
        v = cross_entropy(logits, g.y[i]) if include_positive else lse(logits[others]) - logits[g.y[i]]
        out.append(v * g.anchor_weight[i])
    return reduce(out, g.zero, reduction)


def ArcFaceLoss(g, W, num_classes, embedding_size, margin=28.6, scale=64, reduction="mean"):
    w = unit(W.t())
    m = math.radians(margin)
    out = []
    for i in range(g.B):
        cos = (w * g.x[i]).sum(1)
        c = cos[g.y[i]]
        g.info.decide(num(c) - math.cos(math.pi - m), "guard")
        if math.acos(max(-1.0, min(1.0, num(c)))) <= math.pi - m:
            target = c * math.cos(m) - safe_sqrt(1 - c * c) * math.sin(m)
        else:
            target = c - m * math.sin(m)
        logits = torch.stack([target if k == g.y[i] else cos[k] for k in range(num_classes)]) * scale
        out.append(cross_entropy(logits, g.y[i]) * g.weight[i])
    return reduce(out, g.zero, reduction)


def SoftTripleLoss(
    g, W, num_classes, embedding_size, centers_per_class=10, la=20, gamma=0.1, margin=0.01, tau=0, reduction="mean"
):
    K = centers_per_class
    w = unit(W.t())  # [C*K, d], class c owns rows c*K .. c*K+K-1
    out = []
    for i in range(g.B):
        logits = []
        for c in range(num_classes):
            s = (w[c * K : (c + 1) * K] * g.x[i]).sum(1)
            q = torch.softmax(s / gamma, dim=0)
            sim = (q * s).sum()
            logits.append(la * (sim - (margin if c == g.y[i] else 0.0)))
        logits = torch.stack(logits)
        out.append(cross_entropy(logits, g.y[i]) * g.weight[i])
    loss = reduce(out, g.zero, reduction)
    if tau > 0 and K > 1:
        reg = g.zero
        for c in range(num_classes):
            for k in range(K):
                for k2 in range(k + 1, K):
                    reg = reg + torch.sqrt(2 + 1e-5 - 2 * (w[c * K + k] * w[c * K + k2]).sum())
        loss = loss + tau * reg / (num_classes * K * (K - 1))
    return loss


def _proxy_anchor_positive(g, w, margin, alpha):
    present = sorted(set(g.y))
    total = g.zero
    for c in present:
        t = [-alpha * ((w[c] * g.x[i]).sum() - margin) + (g.weight[i] - 1) for i in range(g.B) if g.y[i] == c]
        total = total + log1p_sum_exp(torch.stack(t))
    return total / len(present)


def ProxyAnchorLoss(g, W, num_classes, embedding_size, margin=0.1, alpha=32):
    w = unit(W)
    total = _proxy_anchor_positive(g, w, margin, alpha)
    for c in range(num_classes):
        t = [alpha * ((w[c] * g.x[i]).sum() + margin) + (g.weight[i] - 1) for i in range(g.B) if g.y[i] != c]
        if t:
            total = total + log1p_sum_exp(torch.stack(t)) / num_classes
    return total


def ProxyRepulsionLoss(g, W, num_classes, embedding_size, margin=0.1, alpha=32, variant="batch", aggregate="sum"):
    w = unit(W)
    total = _proxy_anchor_positive(g, w, margin, alpha)
    for c in range(num_classes):
        t = []
        for c2 in range(num_classes):
            if c2 == c:
                continue
            if variant == "proxy":
                G = (w[c] * w[c2]).sum()
            else:
                G = g.zero
                for i in range(g.B):
                    G = G + (w[c] * g.x[i]).sum() * (g.x[i] * w[c2]).sum()
                if aggregate == "mean":
                    G = G / g.B
            t.append(alpha * (G + margin))
        if t:
            total = total + log1p_sum_exp(torch.stack(t)) / num_classes
    return total


FORMULAS = {
    f.__name__: f
    for f in (
        NormalizedSoftmaxLoss,
        ProxyNCALoss,
        ArcFaceLoss,
        SoftTripleLoss,
        ProxyAnchorLoss,
        ProxyRepulsionLoss,
    )
}
