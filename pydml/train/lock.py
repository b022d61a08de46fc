"""One process at a time in a run's folder. The kernel frees the lock when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from pydml.train import checkpoint
from pydml.train.checkpoint import CheckpointError

_held: set[int] = set()


def _forget() -> None:
    """A forked child (a data worker) must not keep the lock of a parent that was killed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)


def identity(path: Path) -> tuple[int, ...] | None:
    """Which file has this name now, or None: another one, or the same rewritten, has another identity."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def alone(directory: Path, found: tuple[int, ...] | None, rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """The folder of a run for this process, or these ranks, alone; what killed ones left behind is swept.

    Parameters
    ----------
    directory
        Of the run; it is made if it is not there.
    found
        Identity of its last.pt when the run was made or read: it must be the same still.
    rank, world_size
        The first rank holds the lock; if it is refused, all are.

    Raises
    ------
    CheckpointError
        That says who is training there.
    """
    with contextlib.ExitStack() as stack:
        refused = ""
        if rank == 0:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(directory))
                if identity(directory / "last.pt") != found:
                    raise CheckpointError(
                        f"out: got {str(directory)!r}, where another process has trained since this run was made or "
                        f"read; resume it (--resume {directory}) or name another folder"
                    )
                for folder in (directory, directory / "snapshots"):
                    checkpoint.sweep(folder)
            except (CheckpointError, OSError) as error:
                refused = str(error)
        if world_size > 1:
            said = [refused]
            dist.broadcast_object_list(said)
            refused = said[0]
        if refused:
            raise CheckpointError(refused)
        yield


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the folder's lock; a second holder, in this process or another, is refused and told of the first."""
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(file)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
            raise CheckpointError(
                f"out: got {str(directory)!r}, in which {holder} is training; wait for it, or name another folder"
            ) from None
        except OSError:  # a file system without locks: nothing to hold, and no reason not to train
            pass
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        if file in _held:  # else this is a child, in which it was closed
            _held.remove(file)
            os.close(file)
