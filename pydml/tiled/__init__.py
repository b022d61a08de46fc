"""The ``tiled`` backend: every engine in plain PyTorch, in row chunks, with our own backward."""

from pydml.tiled.dots import dots, dots_backward
from pydml.tiled.histogram import histogram, histogram_backward, histogram_saved
from pydml.tiled.listed import listed, listed_backward, triplets_by
from pydml.tiled.pair import pair, pair_backward, pair_saved
from pydml.tiled.rank import rank
from pydml.tiled.select import extremes, mined, sample, topk
from pydml.tiled.triplet import above, against, against_backward, below, positives, triplet, triplet_backward

KERNELS = {
    f.__name__: f
    for f in (
        pair,
        pair_backward,
        pair_saved,
        dots,
        dots_backward,
        listed,
        listed_backward,
        histogram,
        histogram_backward,
        histogram_saved,
        triplet,
        triplet_backward,
        against,
        against_backward,
        below,
        positives,
        above,
        extremes,
        topk,
        mined,
        sample,
        rank,
    )
} | triplets_by(dots, dots_backward)
