"""The programs that copy a text where the terminal cannot."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

_TIMEOUT_S = 2.0


def find_copier(environment: Mapping[str, str]) -> list[str] | None:
    """The command that copies its standard input to the clipboard of this desktop.

    None without a desktop, and over SSH, where the clipboard is on another machine: there the terminal copies (OSC 52).
    """
    if "SSH_CONNECTION" in environment or "SSH_TTY" in environment:
        return None
    candidates = [
        ("pbcopy", sys.platform == "darwin", ()),
        ("wl-copy", "WAYLAND_DISPLAY" in environment, ()),
        ("xclip", "DISPLAY" in environment, ("-selection", "clipboard")),
    ]
    for name, is_usable, arguments in candidates:
        if is_usable and (path := shutil.which(name, path=environment.get("PATH"))):
            return [path, *arguments]
    return None


def copy_with(command: list[str], text: str) -> None:
    """Run a command of `find_copier`. A failure has no effect: the terminal has been asked too."""
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            input=text.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
