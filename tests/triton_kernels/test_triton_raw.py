"""Log-sum-exps of rows that are not normalised, backend ``triton``: shares e^{term - stat} of terms up to 5e7.

A term of that size has a last digit of 4, so that the two must come from the same bits.
"""

from __future__ import annotations

import pytest
import torch
from helpers import make_batch, run
from triton_cases import needs_triton

import pydml

pytestmark = needs_triton
LOSSES = {
    "ms": pydml.losses.MultiSimilarityLoss,
    "lifted_star": pydml.losses.LiftedStarLoss,
    "n_pairs": pydml.losses.NPairsLoss,
    "nca": pydml.losses.NCALoss,
    "bin_lifted": pydml.losses.BinLiftedLoss,
    "dro_kl": pydml.losses.LOSSES["dro_kl"],
    "dro_kl_grouped": pydml.losses.LOSSES["dro_kl_grouped"],
}


@pytest.mark.parametrize("low", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_long_rows_lose_no_digits(name: str, low: torch.dtype) -> None:
    """At most twice as far off as dense PyTorch in the same dtype, plus rounding of the result itself."""
    loss_fn = LOSSES[name](normalize_embeddings=False)
    for norm in (30, 100, 300, 1000):
        z, labels = make_batch("random", 40, 24, 10 if name != "n_pairs" else 20, seed=norm)
        z = (torch.nn.functional.normalize(z) * norm).to(low)
        want = run(loss_fn, z.double(), labels, backend="dense").grads["embeddings"]
        errors = [
            float((run(loss_fn, z, labels, backend=backend).grads["embeddings"].double() - want).abs().max())
            for backend in ("triton", "dense")
        ]
        rounding = (1e-5 if low == torch.float32 else 1e-3) * float(want.abs().max())
        assert errors[0] <= 2 * errors[1] + rounding, (norm, errors)
