"""The folder of a training run that is not complete: the same command goes on with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import time

from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.files import lock_file, write_private

_STATE, _LOCK = "run.json", "lock"


@contextmanager
def open_run(folder: Path, options: str) -> Iterator[float]:
    """Yield when the run began, in seconds since the epoch: earlier than now for one with these options that goes on.

    The checkpoints of a run with other options are removed. The folder is removed when the block ends without an error,
    or with one before anything was kept in it: the next run then takes later texts too.

    Raises InvalidRequest where another process runs it, CacheError.
    """
    with ExitStack() as opened:
        try:
            for each in (folder.parent.parent, folder.parent, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.enter_context(lock_file(folder / _LOCK, wait=False))
            began_s = _read_start(folder / _STATE, options) or _start_anew(folder, options)
        except BlockingIOError:
            raise InvalidRequest("this draft is being trained already.", hint="Wait until that has ended.") from None
        except OSError as error:
            raise CacheError(
                f"{folder} cannot be written: {reason_of(error)}.", hint="Check its permissions, or free some space."
            ) from error
        try:
            yield began_s
        except BaseException:
            if not {path.name for path in folder.glob("*")} - {_STATE, _LOCK}:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _start_anew(folder: Path, options: str) -> float:
    """Remove what another run has left, and remember when this one begins; returns that. Raises OSError."""
    for path in folder.iterdir():
        if path.name != _LOCK:
            path.unlink()
    began_s = time()
    write_private(folder / _STATE, json.dumps({"began_s": began_s, "options": options}))
    return began_s


def _read_start(state: Path, options: str) -> float | None:
    """When the run in a folder began; None where there is none with these options."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(state.read_text(encoding="utf-8"))
        if found["options"] == options:
            return float(found["began_s"])
    return None
