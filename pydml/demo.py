"""A small training on the CPU: ``python -m pydml.demo``, or ``make demo``.

scikit-learn's bundled digits under random lighting: a network trained on the digits 0-4 has to retrieve the digits 5-9,
which it never saw. Then the time of the loss alone, beside the same loss in plain PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

import pydml
from pydml import metrics
from pydml.backends import resolve
from pydml.losses.multi_similarity import MultiSimilarityLoss


def load_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in [0, 1] and labels [1797]."""
    from sklearn import datasets  # type: ignore[import-untyped]

    images, labels = datasets.load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def relight(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image under light of its own: a constant and two gradients of brightness, drawn at random."""
    ramp = torch.linspace(-1, 1, 8)
    lights = torch.stack((torch.ones(8, 8), ramp.expand(8, 8), ramp.expand(8, 8).T)).flatten(1)  # [3, 64]
    return images + torch.randn(len(images), 3, generator=generator) @ lights


def train(steps: int, batch: int = 512) -> None:
    """Train on the digits 0-4 and print Recall@1 on 5-9 before and after."""
    images, labels = load_digits()
    seen, unseen = labels < 5, labels >= 5
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    queries = relight(images[unseen], generator)
    network = nn.Linear(64, 32)

    def recall(embeddings: Tensor) -> str:
        found = metrics.recall_at_k(embeddings.detach(), labels[unseen], (1,))
        return f"{100 * found[1]:.1f} %"

    print(f"train: digits 0-4 ({int(seen.sum())} images), batches of {batch}, one linear layer 64 -> 32")
    print(f"test:  digits 5-9 ({int(unseen.sum())} images), never seen in training")
    print("loss:  MultiSimilarityLoss(epsilon=0.1)\n")
    print(f"Recall@1 of the pixels             {recall(queries):>7}")
    print(f"Recall@1 before training           {recall(network(queries)):>7}")
    loss_fn = MultiSimilarityLoss(epsilon=0.1)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    began = time.perf_counter()
    for _ in range(steps):
        chosen = seen.nonzero()[:, 0][torch.randperm(int(seen.sum()), generator=generator)[:batch]]
        loss = loss_fn(network(relight(images[chosen], generator)), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    print(f"Recall@1 after {steps:>3} steps ({seconds:4.1f} s)  {recall(network(queries)):>7}\n")


def plain_multi_similarity(z: Tensor, labels: Tensor) -> Tensor:
    """The loss of :func:`train` (Wang et al. 2019, eq. 11-15) as one would write it: on the whole B×B matrix."""
    x = nn.functional.normalize(z)
    s = x @ x.T
    same = labels[:, None] == labels[None, :]
    positive, negative = same & ~torch.eye(len(z), dtype=torch.bool), ~same
    hardest_positive = s.masked_fill(~positive, torch.inf).amin(1, keepdim=True)
    hardest_negative = s.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    positive = positive & (s < hardest_negative + 0.1)
    negative = negative & (s > hardest_positive - 0.1)
    pull = (-2 * (s - 0.5)).masked_fill(~positive, -torch.inf).logsumexp(1)
    push = (50 * (s - 0.5)).masked_fill(~negative, -torch.inf).logsumexp(1)
    return (nn.functional.softplus(pull) / 2 + nn.functional.softplus(push) / 50).mean()


def race(batch: int = 1024, dim: int = 128, repeats: int = 15) -> None:
    """Time forward and backward of the loss, ours and the plain one in turn, and print the medians."""
    torch.manual_seed(0)
    labels = torch.arange(batch) // 8
    centers = torch.randn(batch // 8, dim)
    embeddings = (centers[labels] + 1.5 * torch.randn(batch, dim)).requires_grad_()
    fused = MultiSimilarityLoss(epsilon=0.1)
    runners: list[Callable[[Tensor, Tensor], Tensor]] = [fused, plain_multi_similarity]
    times: list[list[float]] = [[], []]
    values = [0.0, 0.0]
    for repeat in range(repeats + 2):  # the first two warm up
        for i, loss_fn in enumerate(runners):
            embeddings.grad = None
            began = time.perf_counter()
            loss = loss_fn(embeddings, labels)
            loss.backward()
            if repeat >= 2:
                times[i].append(1e3 * (time.perf_counter() - began))
            values[i] = loss.item()
    ours, plain = map(median, times)
    backend = resolve("auto", embeddings.device)
    threads = torch.get_num_threads()
    print(f"The loss alone, forward and backward, {batch} x {dim}, {threads} threads, medians of {repeats} in turn:")
    print(f"  pydml, backend {backend:<8} {ours:8.2f} ms   loss {values[0]:.6f}")
    print(f"  plain PyTorch, B x B    {plain:8.2f} ms   loss {values[1]:.6f}")
    print(f"  ratio here and now      {plain / ours:8.2f}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m pydml.demo", description="Train a small retrieval model on the CPU."
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps; default 100")
    options = parser.parse_args(argv)
    try:
        import sklearn  # noqa: F401
    except ImportError:
        print("pydml.demo: needs scikit-learn for its digits; pip install scikit-learn", file=sys.stderr)
        return 1
    print(f"pydml {pydml.__version__}: digits under random lighting\n")
    train(options.steps)
    race()
    print("Next: pydml info (backends), README.md (your own training), docs/losses.md, make bench (real measurements)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
