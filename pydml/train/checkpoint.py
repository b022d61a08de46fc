"""Files that are whole or not there: checkpoints and logs are written aside, synced, and renamed into place.

Checkpoints hold tensors and plain values only, and are read by an unpickler that knows nothing else: a file from a
stranger runs no code. torch's archive is a zip file; its comment, the last bytes of the file, is a checksum of all
that is before it, so that a damaged file is not read as other weights.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

#: Goes up when a checkpoint's layout changes.
VERSION = 1


#: A zip archive ends in this record: a signature, 16 bytes, the length of a comment, the comment. Ours begins so.
END, COMMENT = struct.Struct("<4s16sH"), b"pydml blake2b "
DIGEST = 16  # bytes, written as twice as many digits
CHUNK = 1 << 20
TAIL = END.size + len(COMMENT) + 2 * DIGEST


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


def sweep(directory: Path) -> None:
    """Remove what a kill left in the middle of :func:`write_atomically`; nobody else may be writing there."""
    for stale in directory.glob(".*.tmp"):
        stale.unlink(missing_ok=True)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically, with its checksum."""
    buffer = io.BytesIO()  # in memory first: torch's own writer reports a full disk as a crash of its archive
    torch.save({"pydml_checkpoint": VERSION, **state}, buffer)
    buffer.seek(-2, os.SEEK_END)
    buffer.write(struct.pack("<H", TAIL - END.size))  # there is a comment now
    with buffer.getbuffer() as whole:
        digest = hashlib.blake2b(whole, digest_size=DIGEST).hexdigest()
    buffer.write(COMMENT + digest.encode())
    write_atomically(path, buffer.getbuffer())


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of :func:`save` to the CPU, running no code from it.

    One from before checkpoints had a checksum is held against the CRC-32 of each of its records.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint: got {str(path)!r}, which is not a file")
    try:
        damage = _damage(path)
        state = None if damage else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler, the zip reader and the file system each have their own
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        if "weights_only" in str(error).lower() or "unsupported" in str(error).lower():
            raise CheckpointError(
                f"{path}: refused: it holds more than tensors and plain values, and could run code ({reason})"
            ) from None
        raise CheckpointError(f"{path}: not a whole checkpoint ({reason})") from None
    if damage:
        raise CheckpointError(f"{path}: not a whole checkpoint ({damage}); it was damaged after it was written")
    if not isinstance(state, dict) or state.get("pydml_checkpoint") != VERSION:
        got = state.get("pydml_checkpoint") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path}: got a file with version {got!r}, wanted a pydml checkpoint of {VERSION}")
    wanted = {"config": dict, "channels": int, "model": dict}
    missing = [key for key in wanted if key not in state]
    if missing:
        raise CheckpointError(f"{path}: lacks {' and '.join(missing)}")
    for key, kind in wanted.items():
        if not isinstance(state[key], kind):
            raise CheckpointError(f"{path}: {key}: got {type(state[key]).__name__}, wanted {kind.__name__}")
    return state


def _damage(path: Path) -> str:
    """What is wrong with the bytes of an archive, or nothing; files that are no archive are left to torch."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(2)
        file.seek(max(0, size - TAIL))
        tail = file.read()
        if len(tail) == TAIL:
            signature, _, length = END.unpack_from(tail)
            if signature == b"PK\5\6" and length == TAIL - END.size and tail[END.size :].startswith(COMMENT):
                file.seek(0)
                digest = hashlib.blake2b(digest_size=DIGEST)
                for start in range(0, size - length, CHUNK):
                    digest.update(file.read(min(CHUNK, size - length - start)))
                right = digest.hexdigest().encode() == tail[END.size + len(COMMENT) :]
                return "" if right else "its checksum is another"
    if begin != b"PK":
        return ""
    if tail[-END.size :][:4] != b"PK\5\6":
        return "its end is not that of a checkpoint"
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        return str(error)
    return f"the CRC-32 of {wrong} is another" if wrong else ""


def not_finite(*modules: nn.Module) -> list[str]:
    """Names of parameters that are not finite, and of buffers that hold NaN (a mask may well hold infinities)."""
    wrong: dict[str, None] = {}
    for module in modules:
        wrong |= {name: None for name, p in module.named_parameters() if not p.isfinite().all()}
        wrong |= {name: None for name, b in module.named_buffers() if b.is_floating_point() and b.isnan().any()}
    return list(wrong)


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
