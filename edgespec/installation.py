"""How edgespec is installed, and the commands that install packages beside it."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

Installer = Literal["pipx", "uv tool", "uv", "pip"]


def find_installer() -> tuple[Installer, str]:
    """The program that manages this environment, and the name that it has there."""
    prefix = Path(sys.prefix)
    if prefix.parent.name == "venvs" and prefix.parent.parent.name == "pipx":
        return "pipx", prefix.name
    if (prefix / "uv-receipt.toml").exists():
        return "uv tool", prefix.name
    with suppress(OSError):
        if "\nuv = " in "\n" + (prefix / "pyvenv.cfg").read_text(encoding="utf-8"):
            return "uv", prefix.name
    return "pip", prefix.name


def install_command(package: str, *options: str) -> str:
    """The shell command that installs `package`, which may have extras, into this environment.

    `options`: of pip, such as --upgrade, which uv has too.
    """
    installer, name = find_installer()
    words = " ".join((*options, shlex.quote(package)))
    if installer == "pipx":
        return f"pipx runpip {name} install {words}"
    if installer == "uv tool":
        return f"uv tool install {' '.join((*options, '--with'))} {shlex.quote(package)} {name}"
    return f"{'uv ' if installer == 'uv' else ''}pip install {words}"
