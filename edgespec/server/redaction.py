"""What an engine or the hub says of this machine's folders is for the log, not for callers."""

from __future__ import annotations

import re

from edgespec.errors import EdgespecError

_FOLDERS = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?(?:[/\\][^/\\\s'\"`]+)*[/\\](?=[^/\\\s'\"`])")  # of a file


def hide_folders(error: BaseException | None) -> None:
    """Leave the folders out of the names of files in an error's text."""
    if isinstance(error, EdgespecError):
        error.message, error.hint = (_FOLDERS.sub("", text) for text in (error.message, error.hint))
