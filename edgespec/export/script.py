"""The text of an export: a shell script with its remarks as comments."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable

from edgespec.export.plan import Exported

_WIDTH = 98
_END = "EDGESPEC_END"


def format_script(exported: Exported, remarks: Iterable[str], *, with_files: bool) -> str:
    """The commands for a POSIX shell; the last one gets the script's own arguments.

    `with_files`: the script writes the files that they need; else they lie beside it.
    """
    parts = ["#!/bin/sh\n", "".join(map(_comment, remarks))]
    if exported.files:
        parts.append("set -e\n")
        if with_files:
            parts += [f"cat > {name} <<'{_END}'\n{text}{_END}\n" for name, text in exported.files.items()]
        else:
            parts.append('cd "$(dirname "$0")"\n')
    *before, last = map(format_command, exported.commands)
    parts += [f"{command}\n" for command in before]
    return "".join([*parts, f'{last} "$@"\n'])


def format_command(words: Iterable[str]) -> str:
    """A command for a shell; in a long one each option has a line of its own."""
    words = [shlex.quote(word) for word in words]
    line = " ".join(words)
    if len(line) <= _WIDTH:
        return line
    return "".join(f" \\\n  {word}" if word.startswith("-") else f" {word}" for word in words).strip()


def _comment(text: str) -> str:
    return "".join(
        f"# {line}\n"
        for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    )
