"""Every pair loss of the registry, straight from its paper: loops over anchors, pairs and triplets; see oracle.py."""

import math

import torch
from geometry import cross_entropy, hinge_gap_S, log1p_sum_exp, lse, mine, num, reduce, relu, sets, softplus


def MultiSimilarityLoss(g, alpha=2, beta=50, base=0.5, epsilon=None, reduction="mean"):
    out = []
    for i in range(g.B):
        P, N = sets(g, i, epsilon)
        P, N = sorted(set(P)), sorted(set(N))  # a pair given twice counts once
        v = g.zero
        v = v + log1p_sum_exp(-alpha * (g.S[i, P] - base)) / alpha
        v = v + log1p_sum_exp(beta * (g.S[i, N] - base)) / beta
        out.append(v)
    return reduce(out, g.zero, reduction)


def MSMiningLoss(g, epsilon=0.1, reduction="mean"):
    out = []
    for i in range(g.B):
        P, N = mine(g, i, epsilon)
        v = g.zero
        if P:
            v = v + (1 - g.S[i, P]).mean()
        if N:
            v = v + g.S[i, N].mean()
        out.append(v)
    return reduce(out, g.zero, reduction)


def ContrastiveLoss(g, pos_margin=0, neg_margin=1, distance="euclidean", denominator="nonzero"):
    pos, neg = [], []
    for i in range(g.B):
        for j in g.P[i]:
            if distance == "euclidean":
                t = g.D[i, j] - pos_margin
                if num(g.D2[i, j]) == 0.0:
                    g.info.d0 = True
                # (identical rows and no margin: the term is 0 with gradient 0, and only "nonzero" counts it)
                if not (num(g.D2[i, j]) == 0.0 and pos_margin == 0 and denominator != "nonzero"):
                    hinge_gap_S(g, t, max(num(g.D[i, j]), pos_margin))
            else:
                t = pos_margin - g.S[i, j]
                g.info.decide(t, "hinge")
            pos.append(relu(t))
        for j in g.N[i]:
            if distance == "euclidean":
                t = neg_margin - g.D[i, j]
                if num(g.D2[i, j]) == 0.0:
                    g.info.d0 = True
                hinge_gap_S(g, t, max(num(g.D[i, j]), neg_margin))
            else:
                t = g.S[i, j] - neg_margin
                g.info.decide(t, "hinge")
            neg.append(relu(t))
    total = g.zero
    for terms in (pos, neg):
        n = {"nonzero": sum(1 for t in terms if num(t) > 0), "pairs": len(terms), "batch": g.B}[denominator]
        if terms and n:
            total = total + torch.stack(terms).sum() / n
    return total


def BinomialDevianceLoss(g, alpha=2, beta=50, base=0.5, epsilon=None, reduction="mean"):
    out = []
    for i in range(g.B):
        P, N = sets(g, i, epsilon)
        v = g.zero
        if P:
            v = v + softplus(alpha * (base - g.S[i, P])).mean()
        if N:
            v = v + softplus(beta * (g.S[i, N] - base)).mean()
        out.append(v)
    return reduce(out, g.zero, reduction)


def LiftedStructureLoss(g, neg_margin=1, pos_margin=0):
    if not g.self_pairs:
        raise NotImplementedError("reference set")
    e = [lse(neg_margin - g.D[i, g.N[i]]) if g.N[i] else None for i in range(g.B)]
    out = []
    for i in range(g.B):
        for j in g.P[i]:
            if num(g.D2[i, j]) == 0.0:
                g.info.d0 = True
            both = [t for t in (e[i], e[j]) if t is not None]
            if not any(g.N):  # no negative in the whole batch
                out.append(g.zero)
                continue
            # (a pair without negatives in a batch with negatives: only with pairs given from outside)
            t = (lse(torch.stack(both)) if both else 0.0) + g.D[i, j] - pos_margin
            g.info.decide(t, "hinge")
            out.append(0.5 * relu(t) ** 2)
        if any(num(g.D2[i, j]) == 0.0 for j in g.N[i]):
            g.info.d0 = True
    return reduce(out, g.zero, "mean")


def GeneralizedLiftedStructureLoss(g, neg_margin=1, pos_margin=0, distance="euclidean", reduction="mean"):
    out = []
    for i in range(g.B):
        t = g.zero
        P, N = sorted(set(g.P[i])), sorted(set(g.N[i]))  # a pair given twice counts once
        if P:
            t = t + lse(g.D[i, P] - pos_margin if distance == "euclidean" else pos_margin - g.S[i, P])
        if N:
            t = t + lse(neg_margin - g.D[i, N] if distance == "euclidean" else g.S[i, N] - neg_margin)
        if distance == "euclidean" and any(num(g.D2[i, j]) == 0.0 for j in P + N):
            g.info.d0 = True
        if P or N:
            g.info.decide(t, "hinge")
        out.append(relu(t))
    return reduce(out, g.zero, reduction)


def LiftedStarLoss(g, alpha=2, beta=50, epsilon=None, reduction="mean"):
    out = []
    for i in range(g.B):
        P, N = sets(g, i, epsilon)
        v = g.zero
        if P:
            v = v + lse(-alpha * g.S[i, P]) / alpha
        if N:
            v = v + lse(beta * g.S[i, N]) / beta
        out.append(v)
    return reduce(out, g.zero, reduction)


def BinLiftedLoss(g, alpha=2, beta=50, base=0.5, reduction="mean"):
    out = []
    for i in range(g.B):
        P, N = g.P[i], g.N[i]
        v = g.zero
        if P:
            v = v + (softplus(alpha * (base - g.S[i, P])).sum() + lse(-alpha * g.S[i, P])) / alpha / 2
        if N:
            v = v + (softplus(beta * (g.S[i, N] - base)).sum() + lse(beta * g.S[i, N])) / beta / 2
        out.append(v)
    return reduce(out, g.zero, reduction)


def NCALoss(g, softmax_scale=1, reduction="mean"):
    out = []
    for i in range(g.B):
        same = [k for k in range(g.R) if g.ry[k] == g.y[i] and not (g.self_pairs and k == i)]
        other = [k for k in range(g.R) if g.ry[k] != g.y[i]]
        if not same:
            continue
        # LSE over all - LSE over the positives = log(1 + e^(LSE negatives - LSE positives))
        v = g.zero + (g.D2[i, same] * 0).sum()
        if other:
            v = softplus(lse(-softmax_scale * g.D2[i, other]) - lse(-softmax_scale * g.D2[i, same]))
        out.append(v * g.weight[i])
    return reduce(out, g.zero, reduction)


def NPairsLoss(g, reduction="mean"):
    if not g.self_pairs:
        raise NotImplementedError("reference set")
    anchors, positives = [], []
    for c in sorted(set(g.y)):
        members = [i for i in range(g.B) if g.y[i] == c]
        if len(members) >= 2:
            anchors.append(members[0])
            positives.append(members[1])
    out = []
    for a, p in zip(anchors, positives, strict=True):
        out.append(cross_entropy(g.S[a, positives], positives.index(p)))
    return reduce(out, g.zero, reduction)


def all_triplets(g):
    if g.triplets is not None:
        return g.triplets
    return [(a, p, n) for a in range(g.B) for p in g.P[a] for n in g.N[a]]


def MarginLoss(g, margin=0.2, nu=0, beta=1.2, learn_beta=False, num_classes=None, beta_value=None):
    b = torch.full((num_classes or 1,), float(beta), dtype=g.x.dtype) if beta_value is None else beta_value
    zero = g.zero + (b * 0).sum()
    triplets = all_triplets(g)
    if not triplets:
        return zero
    a, p, n = (torch.tensor(v) for v in zip(*triplets, strict=True))
    ba = b[torch.zeros_like(a)] if len(b) == 1 else b[torch.tensor(g.y)[a]]
    pos, neg = margin + g.D[a, p] - ba, margin + ba - g.D[a, n]
    if bool((g.D2[a, p] == 0).any()) or bool((g.D2[a, n] == 0).any()):
        g.info.d0 = True
    g.info.decide((pos.abs() * g.D[a, p].clamp_min(1e-3)).min(), "hinge")
    g.info.decide((neg.abs() * g.D[a, n].clamp_min(1e-3)).min(), "hinge")
    pos, neg = relu(pos), relu(neg)
    count = int((pos > 0).sum()) + int((neg > 0).sum())
    loss = zero
    if count:
        loss = loss + (pos.sum() + neg.sum()) / count
    if learn_beta and len(b) == 1:
        loss = loss + nu * b[0]
    elif learn_beta and count:
        loss = loss + nu * ba.sum() / count
    return loss


def TripletMarginLoss(g, margin=0.05, swap=False, smooth_loss=False, distance="euclidean", triplets="all"):
    chosen = all_triplets(g) if triplets == "all" else []
    S = g.S if distance == "cosine" else 1 - g.D2 / 2  # the order of the distances; the same for unit rows
    for a in range(g.B):
        P, N = g.P[a], g.N[a]
        if not P or not N or triplets == "all":
            continue
        if triplets == "hard":
            chosen.append((a, g.best(a, P, largest=False, S=S), g.best(a, N, largest=True, S=S)))
        else:
            for p in P:
                cand = []
                for n in N:
                    t = num(S[a, p] - S[a, n])
                    g.info.decide(t, "semihard")
                    if t > 0:
                        cand.append(n)
                if cand:
                    chosen.append((a, p, g.best(a, cand, largest=True, S=S)))
    if not chosen:
        return g.zero
    a, p, n = (torch.tensor(v) for v in zip(*chosen, strict=True))
    if distance == "euclidean":
        ap, an = g.D[a, p], g.D[a, n]
        if bool((g.D2[a, p] == 0).any()) or bool((g.D2[a, n] == 0).any()):
            g.info.d0 = True
        if swap:
            pn = g.D[p, n]
            if bool((g.D2[p, n] == 0).any()):
                g.info.d0 = True
            g.info.decide((S[a, n] - S[p, n]).abs().min(), "swap")
            an = torch.where(pn < an, pn, an)
        t = ap - an + margin
        scale = torch.minimum(ap, an).clamp_min(1e-3) / 2
    else:
        ap, an = g.S[a, p], g.S[a, n]
        if swap:
            pn = g.S[p, n]
            g.info.decide((an - pn).abs().min(), "swap")
            an = torch.where(pn > an, pn, an)
        t = an - ap + margin
        scale = torch.full_like(t, 0.5)
    if smooth_loss:
        v = softplus(t)
    else:
        g.info.decide((t.abs() * scale).min(), "hinge")
        v = relu(t)
    v = v[v > 0]
    return v.mean() + g.zero if len(v) else g.zero


def ExtremeTripletLoss(g, positive="easy", negative="hard", order=1, temperature=0.1, reduction="mean"):
    out = []
    for a in range(g.B):
        P, N = g.P[a], g.N[a]
        if not P or not N:
            continue
        p = g.best(a, P, largest=(positive == "easy"))
        if negative == "semihard":
            cand = []
            for n in N:
                t = num(g.S[a, p] - g.S[a, n])
                g.info.decide(t, "semihard")
                if t > 0:
                    cand.append(n)
            N = cand
            if not N:
                continue
        n = g.best(a, N, largest=(negative in ("hard", "semihard")))
        ap, an = g.S[a, p], g.S[a, n]
        if order == 1:
            out.append(softplus((an - ap) / temperature))
        else:
            out.append(softplus((0.5 * an**2 - ap + 0.5 * ap**2) / temperature))
    return reduce(out, g.zero, reduction)


def HistogramLoss(g, n_bins=100):
    if not g.self_pairs:
        raise NotImplementedError("reference set")
    pos, neg = [], []
    for i, j, same in g.pairs():
        if same:
            pos.append((i, j))
        elif g.P[i] or g.P[j]:  # a negative pair counts if one of its two items has a positive
            neg.append((i, j))
    if not pos or not neg:
        return g.zero
    delta = 2.0 / n_bins
    nodes = torch.tensor([-1.0 + r * delta for r in range(n_bins + 1)], dtype=g.x.dtype)

    def density(pairs):
        h = g.zero + torch.zeros(n_bins + 1, dtype=g.x.dtype)
        for i, j in pairs:
            if num(g.D2[i, j]) == 0.0:
                g.info.d0 = True
            else:
                g.info.decide((g.S[i, j] - nodes).abs().min(), "bin")
            h = h + relu(1 - (g.S[i, j] - nodes).abs() / delta)
        return h / len(pairs)

    hp, hn = density(pos), density(neg)
    total = g.zero
    for r in range(n_bins + 1):
        total = total + hn[r] * hp[: r + 1].sum()
    return total


def FastAPLoss(g, num_bins=10, reduction="mean"):
    delta = 4.0 / num_bins
    nodes = torch.tensor([r * delta for r in range(num_bins + 1)], dtype=g.x.dtype)
    out = []
    for i in range(g.B):
        same = [j for j in range(g.R) if g.ry[j] == g.y[i] and not (g.self_pairs and j == i)]
        other = [j for j in range(g.R) if g.ry[j] != g.y[i]]
        if not same:
            continue
        hp, hn = g.x.new_zeros(num_bins + 1), g.x.new_zeros(num_bins + 1)
        for js, positive in ((same, True), (other, False)):
            for j in js:
                if num(g.D2[i, j]) == 0.0:
                    g.info.d0 = True
                else:
                    g.info.decide((g.D2[i, j] - nodes).abs().min() / 2, "bin")
                w = relu(1 - (g.D2[i, j] - nodes).abs() / delta)
                if positive:
                    hp = hp + w
                else:
                    hn = hn + w
        ap = g.zero
        for k in range(num_bins + 1):
            Hp, H = hp[: k + 1].sum(), (hp + hn)[: k + 1].sum()
            if num(hp[k] * Hp) > 0:
                ap = ap + hp[k] * Hp / H
        out.append((1 - ap / len(same)) * g.weight[i])
    return reduce(out, g.zero, reduction)


# The DRO family


def pair_loss(g, i, j, same, base_loss, margin, threshold, alpha, beta):
    s = g.S[i, j]
    if base_loss == "margin":
        t = margin + threshold - s if same else margin + s - threshold
        g.info.decide(t, "hinge")
        return relu(t)
    if same:
        return softplus(alpha * (threshold - s)) / alpha
    return softplus(beta * (s - threshold)) / beta


def top(g, items, k):
    """The k largest of [(value, i, j)], ties to the smaller (i, j)."""
    items = sorted(items, key=lambda t: (-num(t[0]), t[1], t[2]))
    if 0 < k < len(items) and num(items[k - 1][0]) > 0:
        # (equal zero losses are interchangeable: no value, no gradient)
        g.info.decide(items[k - 1][0] - items[k][0], "topk")
    return [t[0] for t in items[:k]]


def DROTopKLoss(g, k, base_loss="margin", margin=0.2, threshold=0.5, alpha=2, beta=50, balanced=False):
    args = (base_loss, margin, threshold, alpha, beta)
    items = [(pair_loss(g, i, j, s, *args), i, j, s) for i, j, s in g.pairs()]
    if balanced:
        chosen = top(g, [t[:3] for t in items if t[3]], k // 2) + top(g, [t[:3] for t in items if not t[3]], k // 2)
    else:
        chosen = top(g, [t[:3] for t in items], k)
    return reduce(chosen, g.zero, "mean")


def DROKLLoss(g, gamma=0.1, base_loss="margin", margin=0.2, threshold=0.5, alpha=2, beta=50):
    ls = [pair_loss(g, i, j, s, base_loss, margin, threshold, alpha, beta) for i, j, s in g.pairs()]
    if not ls:
        return g.zero
    return gamma * (lse(torch.stack(ls) / gamma) - math.log(len(ls)))


def DROKLGroupedLoss(
    g, gamma_pos=0.1, gamma_neg=0.1, base_loss="margin", margin=0.2, threshold=0.5, alpha=2, beta=50, reduction="mean"
):
    args = (base_loss, margin, threshold, alpha, beta)
    out = []
    for i in range(g.B):
        v = g.zero
        for js, same, gamma in ((g.P[i], True, gamma_pos), (g.N[i], False, gamma_neg)):
            if js:
                ls = torch.stack([pair_loss(g, i, j, same, *args) for j in js])
                v = v + gamma * (lse(ls / gamma) - math.log(len(js)))
        out.append(v)
    return reduce(out, g.zero, reduction)


FORMULAS = {
    f.__name__: f
    for f in (
        MultiSimilarityLoss,
        MSMiningLoss,
        ContrastiveLoss,
        BinomialDevianceLoss,
        LiftedStructureLoss,
        GeneralizedLiftedStructureLoss,
        LiftedStarLoss,
        BinLiftedLoss,
        NCALoss,
        NPairsLoss,
        MarginLoss,
        TripletMarginLoss,
        ExtremeTripletLoss,
        HistogramLoss,
        FastAPLoss,
        DROTopKLoss,
        DROKLLoss,
        DROKLGroupedLoss,
    )
}
