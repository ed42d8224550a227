"""The folder of a training run that is not complete: the same command goes on with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.files import lock_file


@contextmanager
def open_run(folder: Path) -> Iterator[None]:
    """Create the folder of a run, and hold it. It is removed at the end, unless an error has left files in it.

    Raises InvalidRequest if another process holds it, CacheError.
    """
    with ExitStack() as opened:
        try:
            for each in (folder.parent.parent, folder.parent, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened.enter_context(lock_file(folder / "lock", wait=False))
        except BlockingIOError:
            raise InvalidRequest("this draft is being trained already.", hint="Wait until that has ended.") from None
        except OSError as error:
            raise CacheError(
                f"{folder} cannot be written: {reason_of(error)}.", hint="Check its permissions, or free some space."
            ) from error
        try:
            yield
        except BaseException:
            if [each.name for each in folder.glob("*")] == ["lock"]:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
