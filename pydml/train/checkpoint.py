"""Files that are whole or not there: checkpoints and logs are written aside, synced, and renamed into place.

Checkpoints hold tensors and plain values only, and are read by an unpickler that knows nothing else: a file from a
stranger runs no code.
"""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Goes up when a checkpoint's layout changes.
VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file."""


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Replace the file by these bytes, or leave it as it was."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name, too, must survive a power cut
        finally:
            os.close(directory)
    except OSError as error:
        aside.unlink(missing_ok=True)
        kept = ", the previous file is untouched" if path.exists() else ""
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}{kept}") from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    buffer = io.BytesIO()  # in memory first: torch's own writer reports a full disk as a crash of its archive
    torch.save({"pydml_checkpoint": VERSION, **state}, buffer)
    write_atomically(path, buffer.getbuffer())


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of :func:`save` to the CPU, running no code from it."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint: got {str(path)!r}, which is not a file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler, the zip reader and the file system each have their own
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        if "weights_only" in str(error).lower() or "unsupported" in str(error).lower():
            raise CheckpointError(
                f"{path}: refused: it holds more than tensors and plain values, and could run code ({reason})"
            ) from None
        raise CheckpointError(f"{path}: not a whole checkpoint ({reason})") from None
    if not isinstance(state, dict) or state.get("pydml_checkpoint") != VERSION:
        got = state.get("pydml_checkpoint") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path}: got a file with version {got!r}, wanted a pydml checkpoint of {VERSION}")
    missing = [key for key in ("config", "channels", "model") if key not in state]
    if missing:
        raise CheckpointError(f"{path}: lacks {' and '.join(missing)}")
    return state


def random_state() -> dict[str, Any]:
    """The state of every generator of this process, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, list(words), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
