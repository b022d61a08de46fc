"""Wall-clock times of several peers, taken in turns so that a busy moment of the machine hits all of them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import quantiles

from bench.registry import Prepared

SLOW = 1.0  # seconds: beyond it a call is repeated only as often as a median needs
FEWEST = 5
SHORTEST = 0.01  # seconds: quicker calls are repeated inside one sample


@contextmanager
def _without_gc() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def one_call(prepared: Prepared, mode: str) -> float:
    """Seconds of one forward, backward or full step."""
    if mode == "backward" and prepared.leaves:
        loss = prepared.forward()
        start = time.perf_counter()
        prepared.gradients(loss)
    else:
        start = time.perf_counter()
        loss = prepared.forward()
        if mode == "full":
            prepared.gradients(loss)
    return (time.perf_counter() - start) * prepared.scale


def round_robin(
    peers: dict[str, Prepared], mode: str, repeats: int, failed: Callable[[str, Exception], None]
) -> dict[str, list[float]]:
    """Samples of every peer in seconds: one of each in turn, after a warm-up call of each.

    A peer that raises is reported to ``failed`` and left out from then on.
    """
    calls: dict[str, int] = {}
    rounds: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    alive = dict(peers)

    def sample(name: str, number: int) -> float | None:
        try:
            return sum(one_call(alive[name], mode) for _ in range(number)) / number
        except Exception as error:
            failed(name, error)
            del alive[name]
            samples.pop(name, None)
            return None

    with _without_gc():
        for name in list(alive):
            seconds = sample(name, 1)
            if seconds is not None:
                calls[name] = max(1, min(1000, round(SHORTEST / max(seconds, 1e-7))))
                rounds[name] = FEWEST if seconds > SLOW else max(FEWEST, repeats)
                samples[name] = []
        for turn in range(max(rounds.values(), default=0)):
            for name in list(alive):
                if turn < rounds[name]:
                    seconds = sample(name, calls[name])
                    if seconds is not None:
                        samples[name].append(seconds)
    return samples


def p20_p50_p80(samples: list[float]) -> tuple[float, float, float]:
    """Percentiles of some samples."""
    cuts = quantiles(samples, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]
