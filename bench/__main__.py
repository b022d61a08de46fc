"""The command: ``python -m bench`` from the project's root, or ``pydml bench`` from a source tree."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Time pydml's losses against dense PyTorch, torch.compile of it, PML, KeOps and faiss, and measure their memory.

With no arguments: every loss at 1024x128 and 4096x512 (proxy losses at 512x128x10000), and some of them against B; that
takes an hour or two. Ctrl-C keeps what is done and still writes tables and figures; --resume goes on from there.
Files go to bench/results/: the measurements as CSV, a Markdown table, and figures."""

EXAMPLES = """\
examples:
  python -m bench --quick
  python -m bench --loss ms,nca --shapes 1024x128,2048x128 --regimes trained,early --modes forward,full
  python -m bench --targets --only ms-mined-4096-trained
  python -m bench --tuples --publish
"""


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parser(prog: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--loss", type=_names, metavar="A,B", help="losses, by op (ms) or by variant (ms/mined); default all")
    add("--shapes", type=_names, metavar="BxD,…", help="batch shapes; BxDxC for proxy losses")
    add("--regimes", type=_names, default=["trained", "early"], metavar="R,…", help="default trained,early")
    add("--modes", type=_names, default=["full"], metavar="M,…", help="forward, backward, full; default full")
    add("--peers", type=_names, metavar="P,…", help="default all of them; --quick: without compile and keops")
    add("--backend", default="auto", help="pydml's backend; default auto")
    add("--repeats", type=int, default=9, help="samples of each time, at least 5; default 9, slow calls 5")
    add("--threads", type=int, default=2, help="default 2")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--quick", action="store_true", help="a subset that takes a minute or two")
    add("--targets", action="store_true", help="measure what the project promises, and say whether it is kept")
    add("--tuples", action="store_true", help="measure only losses with a miner's tuple, against PML")
    add("--only", type=_names, metavar="T,…", help="with --targets: these targets only; the others keep their rows")
    add("--resume", action="store_true", help="keep the rows of the last run and measure only what is missing")
    add("--publish", action="store_true", help="write the tables and figures to docs/")
    add("--list", action="store_true", help="list losses, regimes, peers and targets, and stop")
    add("--output", type=Path, help="folder for the results; default bench/results")
    return made


def main(argv: Sequence[str] | None = None, prog: str = "pydml bench") -> int:
    """Run the benchmarks; 1 if peers disagree or a target is missed, 130 if interrupted."""
    made = parser(prog)
    args = made.parse_args(argv)
    # Before torch and the others start their threads, if it is not too late
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    from bench import session

    try:
        return session.start(args)
    except ValueError as error:
        made.error(str(error))


if __name__ == "__main__":
    sys.exit(main(prog="python -m bench"))
