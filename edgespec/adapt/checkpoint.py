"""Checkpoints of a training run: the last two, each with a checksum, which a killed process or a full disk leaves."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.files import replace_file

_KEPT = 2
_SUFFIX = ".checkpoint"
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Arrays by name, and the rest of the state as JSON has it."""

    arrays: dict[str, mx.array]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder, which is created if missing. One process uses it at a time.

    A file is in the format of safetensors, followed by its SHA-256.
    """

    def __init__(self, folder: Path) -> None:
        """Raises CacheError."""
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._refuse("read", error, "Check its permissions, or free some space.") from error

    def save(self, step: int, checkpoint: Checkpoint) -> None:
        """Add the checkpoint after `step` steps, and remove all but the last two.

        Raises InvalidRequest where the folder was removed, which ends the run that is in it; CacheError.
        """
        try:
            with replace_file(self._folder / f"{step:010d}{_SUFFIX}") as partial:
                partial.chmod(0o600)
                with partial.open("r+b") as file:
                    mx.save_safetensors(file, checkpoint.arrays, {"state": json.dumps(checkpoint.state)})
                    file.write(_digest(file, file.tell()))
                    file.flush()
                    os.fsync(file.fileno())
            for path in self._list()[_KEPT:]:
                path.unlink(missing_ok=True)
        except FileNotFoundError as error:
            raise InvalidRequest(
                "the state of the training was removed while it ran.", hint="Start again: it begins anew."
            ) from error
        except OSError as error:
            hint = "Free some space and start again: it goes on from the last checkpoint."
            raise self._refuse("saved", error, hint) from error

    def load(self, key: str) -> Checkpoint | None:
        """The latest one that is whole and whose state has this "key"; None without one. Removes those that are not.

        Raises CacheError.
        """
        try:
            for leftover in self._folder.glob(f".*{_SUFFIX}.*"):
                leftover.unlink(missing_ok=True)
            for path in self._list():
                checkpoint = _read(path)
                if checkpoint is not None and checkpoint.state.get("key") == key:
                    return checkpoint
                path.unlink(missing_ok=True)
        except OSError as error:
            hint = "Check the permissions of the folder, or remove it to start anew."
            raise self._refuse("read", error, hint) from error
        return None

    def _refuse(self, verb: str, error: OSError, hint: str) -> CacheError:
        return CacheError(f"the training in {self._folder} cannot be {verb}: {reason_of(error)}.", hint=hint)

    def _list(self) -> list[Path]:
        """The latest first."""
        return sorted(self._folder.glob(f"[0-9]*{_SUFFIX}"), reverse=True)


def _read(path: Path) -> Checkpoint | None:
    """None for a file that is not whole. Raises OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size - _DIGEST_BYTES
        if size <= 0 or _digest(file, size) != file.read():
            return None
    arrays, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
    mx.eval(arrays)  # the file may be removed
    return Checkpoint(arrays, json.loads(metadata["state"]))


def _digest(file: BinaryIO, size: int) -> bytes:
    """The SHA-256 of the first `size` bytes, after which the file then is."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(min(size - file.tell(), 2**20)):
        digest.update(chunk)
    return digest.digest()
