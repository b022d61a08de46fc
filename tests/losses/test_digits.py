"""Digits that must not get lost: shares of huge exponents, rows too short to normalise, batches nearly collapsed."""

from __future__ import annotations

import pytest
import torch
from helpers import BACKENDS, FUSED, assert_as_good_as_dense, assert_close, generator, run
from torch import Tensor

from pydml.losses import LOSSES

ON = pytest.mark.parametrize("backend", BACKENDS)
ON_FUSED = pytest.mark.parametrize("backend", FUSED)
ROWS, DIM = 150, 33


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Random unit rows, and labels of 24 classes."""
    g = generator(7)
    z = torch.nn.functional.normalize(torch.randn(ROWS, DIM, generator=g, dtype=torch.float64))
    return z.to(dtype), torch.randint(0, 24, (ROWS,), generator=g)


# e^(term - statistic) is a share only if both have the same bits


RAW = {
    "bin_lifted": {},
    "ms": {},
    "lifted_star": {},
    "dro_kl": {},
    "dro_kl_grouped": {"base_loss": "binomial"},
}


@ON_FUSED
@pytest.mark.parametrize("norm", [30, 100, 1000, 10_000])
@pytest.mark.parametrize("name", RAW)
def test_shares_of_huge_exponents_add_up(name: str, norm: float, backend: str) -> None:
    z, labels = batch(torch.float32)
    assert_as_good_as_dense(LOSSES[name](normalize_embeddings=False, **RAW[name]), norm * z, labels, backend)


# Rows of 0 < ‖z‖ < 1e-12: the norm is clamped, so they are no unit rows, and nothing of their gradient is radial


SHORT = {"contrastive": {}, "nca": {}, "triplet": {}, "generalized_lifted": {}, "ms": {}, "extreme_triplet": {}}


@ON_FUSED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", SHORT)
def test_rows_too_short_to_be_normalised(name: str, dtype: torch.dtype, backend: str) -> None:
    z, labels = batch()
    z[::3] *= 1e-12 * torch.rand(len(z[::3]), 1, generator=generator(1), dtype=torch.float64)
    z = z.to(dtype)
    short = z.norm(dim=1) < 1e-12
    got, want = (run(LOSSES[name](), t, labels, backend=b) for t, b in ((z, backend), (z.double(), "dense")))
    rtol = 1e-9 if dtype == torch.float64 else 1e-5
    assert_close(got.loss, want.loss, rtol, "loss")
    for rows in (short, ~short):  # the gradient of a short row is 1e12 times as large
        assert_close(got.grads["embeddings"][rows], want.grads["embeddings"][rows], rtol, "gradient")


@ON
@pytest.mark.parametrize("name", ["contrastive", "ms"])
def test_a_short_row_is_not_wholly_alike_to_itself(name: str, backend: str) -> None:
    """S of a listed (i, i) is ‖x‖², which is 1 for unit rows only."""
    z = torch.tensor([[0.6e-12, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    listed = (torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([2]))
    options = {"distance": "cosine", "pos_margin": 1.0, "neg_margin": 0.5} if name == "contrastive" else {}
    loss = LOSSES[name](**options)(z, torch.tensor([0, 0, 1]), indices_tuple=listed, backend=backend)
    s = torch.tensor([0.36, 1.0], dtype=torch.float64)
    if name == "contrastive":  # one hinge above 0
        wanted = 1 - s[0]
    else:
        far = torch.exp(50 * (0.6 * torch.tensor(0.5, dtype=torch.float64).sqrt() - 0.5))
        near = torch.log1p(torch.exp(-2 * (s - 0.5))).sum() / 2
        wanted = (near + torch.log1p(far) / 50) / 3
    assert_close(loss, wanted, 1e-9)


# Batches that have all but collapsed


@ON_FUSED
@pytest.mark.parametrize("apart", [0.05, 0.01, 0.005])
@pytest.mark.parametrize("name", ["contrastive", "nca", "triplet", "lifted", "generalized_lifted"])
def test_nearly_collapsed_rows_keep_their_digits(name: str, apart: float, backend: str) -> None:
    """D² = 2-2S has three digits left at D = 0.01; of rows less their centre it has them all."""
    z, labels = batch()
    assert_as_good_as_dense(LOSSES[name](), (z[:1] + apart * z).float(), labels, backend)


@ON_FUSED
@pytest.mark.parametrize("normalize", [True, False])
def test_a_collapsed_batch_against_a_reference_set_elsewhere(normalize: bool, backend: str) -> None:
    z, labels = batch()
    rows = (3 * z[:1] + 0.03 * z).float()
    loss_fn = LOSSES["contrastive"](normalize_embeddings=normalize, neg_margin=6.0)
    for ref_emb in (rows.flip(0)[:90], z[1:].float(), z[1:].float().repeat(6, 1)):
        ref_labels = torch.arange(len(ref_emb)) % 24
        truth = run(loss_fn, rows.double(), labels, ref_emb=ref_emb.double(), ref_labels=ref_labels, backend="dense")
        got = run(loss_fn, rows, labels, ref_emb=ref_emb, ref_labels=ref_labels, backend=backend)
        assert_close(got.loss, truth.loss, 1e-6, "loss")
        for key, grad in truth.grads.items():
            assert_close(got.grads[key], grad, 3e-5, f"gradient of {key}")
