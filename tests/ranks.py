"""Real processes for the tests of pydml.distributed: started once a world size, sent one function after another.

Importing torch takes seconds, so a test does not start ranks of its own unless it means to kill one.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import helpers  # noqa: F401  (the ranks import everything before they meet)
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: Seconds that a test waits for its ranks; only a hang takes so long.
PATIENCE = 240


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Connection) -> None:
    """One rank: run what is sent, answer with its result or its error."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, size)
    meeting.add("here", 1)
    while meeting.add("here", 0) < size:  # the timeout is for what is tested, not for imports on a loaded machine
        time.sleep(0.05)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=limit)
    while True:
        function, arguments = pipe.recv()
        if function is None:
            break
        torch.manual_seed(0)
        try:
            pipe.send((True, pickle.dumps(function(rank, size, *arguments))))
        except Exception as error:
            pipe.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
    dist.destroy_process_group()


class Died(Exception):
    """A rank that went away without an answer."""


class Ranks:
    """Processes with a gloo group between them."""

    def __init__(self, size: int, timeout: float = 120) -> None:
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def answers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(rank, size, *arguments)`` gives on every rank, or the exception that it ended with."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        return [self._answer(pipe) for pipe in self.pipes]

    def _answer(self, pipe: Connection) -> Any:
        try:
            assert pipe.poll(PATIENCE), f"a rank did not answer within {PATIENCE} s"
            good, answer = pipe.recv()
        except EOFError:
            return Died()
        return pickle.loads(answer) if good else RuntimeError(*answer)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same where no rank may fail."""
        answers = self.answers(function, *arguments)
        wrong = [f"rank {rank}:\n{a.args[-1] if a.args else a!r}" for rank, a in enumerate(answers) if _failed(a)]
        assert not wrong, "\n".join(wrong)
        return answers

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send((None, ()))
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


def _failed(answer: Any) -> bool:
    return isinstance(answer, Exception)


@functools.cache
def ranks(size: int) -> Ranks:
    """The ranks that all tests share."""
    made = Ranks(size)
    atexit.register(made.close)
    return made
