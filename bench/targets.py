"""What pydml promises on two CPU cores, case by case, and whether the measurements keep it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench import tuples
from bench.cases import Case, case
from bench.harness import Options, Row, Table, Task, modes_of
from bench.plots import LOOKS
from bench.report import milliseconds

MIB = 2**20
PEERS = ("pydml", "dense", "compile", "pml", "half_gemm")


@dataclass(frozen=True)
class Verdict:
    """A line of the table."""

    case: str
    wanted: str
    measured: str
    met: bool | None  # None: not measured, or the peer cannot run it


def _row(table: Table, at: Case, peer: str = "pydml") -> Row | None:
    return table.find(at, peer, modes_of(at, Options())[0])


def _time(table: Table, at: Case, peer: str = "pydml") -> float | None:
    row = _row(table, at, peer)
    return float(row["p50"]) if row and row["p50"] else None


def _why_not(table: Table, at: Case, peer: str) -> tuple[str, bool | None]:
    """What to say of a time that is not there; an error counts as not met."""
    row = _row(table, at, peer)
    if row is None:
        return "not measured", None
    return f"{LOOKS[peer][0]}: {row['note']}", False if row["status"] == "error" else None


@dataclass(frozen=True)
class Faster:
    """At least so many times faster than a peer."""

    at: Case
    peer: str
    factor: float

    def verdict(self, table: Table) -> Verdict:
        wanted = f"≥ {self.factor:g}× {LOOKS[self.peer][0]}"
        for peer in ("pydml", self.peer):
            if _time(table, self.at, peer) is None:
                return Verdict(self.at.name, wanted, *_why_not(table, self.at, peer))
        own, other = _time(table, self.at), _time(table, self.at, self.peer)
        assert own is not None and other is not None
        gain = other / own
        measured = f"{gain:.2f}× ({milliseconds(str(own))} against {milliseconds(str(other))})"
        return Verdict(self.at.name, wanted, measured, gain >= self.factor)


@dataclass(frozen=True)
class WithinGemm:
    """At most so many times half a product X·Xᵀ."""

    at: Case
    factor: float

    def verdict(self, table: Table) -> Verdict:
        wanted = f"≤ {self.factor:g} × {LOOKS['half_gemm'][0]}"
        own, gemm = _time(table, self.at), _time(table, self.at, "half_gemm")
        if own is None or gemm is None:
            return Verdict(self.at.name, wanted, *_why_not(table, self.at, "pydml" if own is None else "half_gemm"))
        return Verdict(
            self.at.name, wanted, f"{own / gemm:.2f} × ({milliseconds(str(own))})", own / gemm <= self.factor
        )


@dataclass(frozen=True)
class Within:
    """At most so many MiB above the inputs."""

    at: Case
    mib: float
    wanted: str = ""

    def verdict(self, table: Table) -> Verdict:
        wanted = self.wanted or f"≤ {self.mib:g} MiB above the inputs"
        row = _row(table, self.at)
        if row is None or not row["peak_mib"]:
            return Verdict(self.at.name, wanted, *_why_not(table, self.at, "pydml"))
        return Verdict(self.at.name, wanted, f"{row['peak_mib']} MiB", float(row["peak_mib"]) <= self.mib)


@dataclass(frozen=True)
class Same:
    """Exactly the values of a peer: the harness reports a difference as an error."""

    at: Case
    peer: str

    def verdict(self, table: Table) -> Verdict:
        wanted = f"the same values as {LOOKS[self.peer][0]}"
        row = _row(table, self.at)
        if row is None or row["status"] != "ok" or _time(table, self.at, self.peer) is None:
            return Verdict(self.at.name, wanted, *_why_not(table, self.at, "pydml"))
        return Verdict(self.at.name, wanted, f"largest difference {row['value_error']}", float(row["value_error"]) == 0)


@dataclass(frozen=True)
class InEach:
    """Over several cases, so many times as fast as a peer in each that it can run; the line names the worst."""

    name: str
    over: tuple[Case, ...]
    peer: str
    factor: float = 1

    def verdict(self, table: Table) -> Verdict:
        peer = LOOKS[self.peer][0]
        wanted = f"never slower than {peer}" if self.factor == 1 else f"≥ {self.factor:g}× {peer} in each"
        gains: list[tuple[float, Case]] = []
        for at in self.over:
            own, other = _time(table, at), _time(table, at, self.peer)
            row = _row(table, at)
            if row and row["status"] == "error":
                return Verdict(self.name, wanted, f"{at.name}: {row['note']}", False)
            if own and other:
                gains.append((other / own, at))
        rows = [_row(table, at, self.peer) for at in self.over]
        skipped = sum(row is not None and row["status"] == "skipped" for row in rows)
        if not gains or len(gains) < len(self.over) - skipped:
            return Verdict(self.name, wanted, f"{len(gains)} of {len(self.over)} cases measured", None)
        slower = sum(gain < self.factor for gain, _ in gains)
        gain, worst = min(gains, key=lambda pair: pair[0])
        short = "slower" if self.factor == 1 else "less"
        measured = f"{short} in {slower} of {len(gains)}; worst {gain:.2f}× ({worst.variant.name} {worst.regime})"
        return Verdict(self.name, wanted, measured, slower == 0)


@dataclass(frozen=True)
class Growth:
    """How time or memory grows with B: the slope of a straight line through the logarithms."""

    name: str
    over: tuple[Case, ...]
    column: str
    exponent: float

    def verdict(self, table: Table) -> Verdict:
        what = "time" if self.column == "p50" else "memory"
        wanted = f"{what} grows at most like B^{self.exponent:g}"
        rows = {at.shape.size: _row(table, at) for at in self.over}
        points = [(math.log(b), math.log(float(r[self.column]))) for b, r in rows.items() if r and r[self.column]]
        if len(points) < len(self.over):
            return Verdict(self.name, wanted, f"{len(points)} of {len(self.over)} sizes measured", None)
        slope = _slope(points)
        return Verdict(self.name, wanted, f"B^{slope:.2f}", slope <= self.exponent)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / math.fsum((x - mean_x) ** 2 for x, _ in points)


Want = Faster | WithinGemm | Within | Same | InEach | Growth


@dataclass(frozen=True)
class Target:
    """Cases to run together under one name for ``--only``, and what is wanted of them."""

    name: str
    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    wants: tuple[Want, ...]
    memory: tuple[str, ...] = field(default=())

    def tasks(self, options: Options) -> list[Task]:
        own = Options(
            peers=self.peers, modes=("full",), repeats=options.repeats, threads=options.threads,
            backend=options.backend, memory=self.memory, resume=options.resume,
        )  # fmt: skip
        return [Task(at, own) for at in self.cases]


def _faster(at: Case, **factors: float) -> tuple[Faster, ...]:
    """Keyword = peer."""
    return tuple(Faster(at, peer, factor) for peer, factor in factors.items())


def _headline() -> list[Target]:
    """Multi-Similarity with its mining, the loss that this package began with."""
    trained, early = (case("ms/mined", "4096x512", regime) for regime in ("trained", "early"))
    small_trained, small_early = (case("ms/mined", "1024x128", regime) for regime in ("trained", "early"))
    return [
        Target(
            "ms-mined-4096-trained", (trained,), PEERS,
            (*_faster(trained, compile=4, dense=12, pml=12), WithinGemm(trained, 1.5), Within(trained, 64)),
            memory=("pydml", "dense", "compile", "pml"),
        ),
        Target("ms-mined-4096-early", (early,), PEERS, _faster(early, compile=1.6, dense=3, pml=6)),
        Target(
            "ms-mined-1024", (small_trained, small_early), PEERS,
            (*_faster(small_trained, compile=4, dense=8, pml=20), *_faster(small_early, compile=2, dense=3, pml=20)),
        ),
    ]  # fmt: skip


def _large() -> list[Target]:
    """Every other loss at 4096×512."""
    made = []
    dense_weights = (
        "ms", "binomial", "contrastive", "lifted", "generalized_lifted", "lifted_star", "nca", "dro_kl",
        "dro_kl_grouped",
    )  # fmt: skip
    for name in dense_weights:
        trained, early, collapsed = (case(name, "4096x512", regime) for regime in ("trained", "early", "collapsed"))
        wants = (*_faster(trained, compile=1.6), *_faster(early, compile=1), *_faster(collapsed, compile=1))
        made.append(Target(f"{name}-4096", (trained, early, collapsed), ("pydml", "compile"), wants))
    for name, over_compile, over_pml in (
        ("fast_ap", 5, 10), ("histogram", 5, 10), ("dro_topk/2B", 4, None), ("dro_topk/balanced", 4, None),
        ("extreme_triplet", 4, 12), ("triplet/all", 4, 12), ("triplet/hard", 4, 12), ("triplet/semihard", 4, None),
    ):  # fmt: skip
        at = case(name, "4096x512")
        with_pml = {"pml": over_pml} if over_pml else {}
        peers = ("pydml", "compile", *with_pml)
        made.append(
            Target(f"{name.replace('/', '-')}-4096", (at,), peers, _faster(at, compile=over_compile, **with_pml))
        )
    return made


def _proxies() -> list[Target]:
    made = []
    for name in ("proxy_anchor", "arcface", "normalized_softmax"):
        at = case(name, "512x128x100000")
        gradients = 4 * (512 * 128 + 100_000 * 128) / MIB
        limit = Within(at, gradients + 64, f"≤ gradients ({gradients:.0f} MiB) + 64 MiB above the inputs")
        target = Target(f"{name}-100k", (at,), ("pydml", "compile"), (*_faster(at, compile=1.3), limit), ("pydml",))
        made.append(target)
    return made


def _small() -> list[Target]:
    losses = (
        "ms/mined", "ms", "ms_mining", "binomial", "contrastive", "lifted", "generalized_lifted", "lifted_star", "nca",
        "margin", "triplet/all", "triplet/hard", "triplet/semihard", "extreme_triplet", "histogram", "fast_ap",
        "dro_topk/2B", "dro_topk/balanced", "dro_kl", "dro_kl_grouped",
    )  # fmt: skip
    made = []
    for size in (64, 128, 256):
        cases = tuple(
            case(name, f"{size}x128", regime)
            for name in losses
            for regime in (("trained", "early") if name == "ms/mined" else ("trained",))
        )
        want = InEach(f"{len(losses)} losses at {size}×128", cases, "dense")
        made.append(Target(f"small-{size}", cases, ("pydml", "dense"), (want,)))
    return made


def tuple_targets() -> list[Target]:
    """Losses with a miner's tuple: never slower than PML, and much faster where batches are large."""
    made = []
    for size in tuples.SIZES:
        cases = tuples.cases(size)
        want = InEach(f"losses with a tuple at {size}×128", cases, "pml", 3 if size >= 512 else 1)
        made.append(Target(f"tuples-{size}", cases, ("pydml", "pml"), (want,)))
    return made


def targets() -> dict[str, Target]:
    """Every target by name."""
    search = case("recall", "20000x128", "early")
    largest = case("ms/mined", "65536x128")
    growing = tuple(case("ms/mined", f"{1024 * 2**i}x128") for i in range(6))
    growth = "ms/mined, d = 128, B = 1k to 32k"
    made = [
        *_headline(),
        *_large(),
        *_proxies(),
        Target("recall-20000", (search,), ("pydml", "faiss"), (*_faster(search, faiss=8), Same(search, "faiss"))),
        Target("ms-mined-65536", (largest,), ("pydml",), (Within(largest, 1024, "runs, < 1 GiB above the inputs"),),
               memory=("pydml",)),
        Target("growth", growing, ("pydml",),
               (Growth(growth, growing, "p50", 2.05), Growth(growth, growing, "peak_mib", 1.05)), memory=("pydml",)),
        *_small(),
        *tuple_targets(),
    ]  # fmt: skip
    return {target.name: target for target in made}


def verdicts(chosen: Sequence[Target], table: Table) -> list[Verdict]:
    return [want.verdict(table) for target in chosen for want in target.wants]


def markdown(lines: Sequence[Verdict]) -> str:
    """The table «case | wanted | measured | met?»."""
    words = {True: "yes", False: "**no**", None: "–"}
    body = [f"| {v.case} | {v.wanted} | {v.measured} | {words[v.met]} |" for v in lines]
    met, known = sum(v.met is True for v in lines), sum(v.met is not None for v in lines)
    head = ["| case | wanted | measured | met? |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *body]) + f"\n\n{met} of {known} measured targets met, {len(lines) - known} not measured."
