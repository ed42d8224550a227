"""The text of an export: a shell script with its remarks as comments, and a file for Docker Compose."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterable

from edgespec.export.plan import Container, Exported

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
    words = list(words)
    if len(line := shlex.join(words)) <= _WIDTH:
        return line
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("-"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(map(shlex.join, lines))


def format_compose(container: Container) -> str:
    """compose.yaml. Its values are JSON, which YAML reads; a `$` of theirs is doubled, as Compose has it."""
    lines = [_comment(container.remark).rstrip()] if container.remark else []
    lines += ["services:", "  model:", f"    image: {json.dumps(container.image)}"]
    if container.entrypoint:
        lines.append(f"    entrypoint: {_quote(container.entrypoint)}")
    lines.append(f"    command: {_quote(container.command)}")
    lines.append(f"    ports: {_quote([f'127.0.0.1:{container.port}:{container.port}'])}")
    lines.append('    environment: ["HF_TOKEN"]  # of your shell; some repositories ask for it')
    lines.append("    volumes:")
    lines += [f"      - {_format_volume(*volume)}" for volume in container.volumes]
    if container.has_gpu:
        lines.append("    ipc: host")
        devices = "[{driver: nvidia, count: all, capabilities: [gpu]}]"
        lines.append(f"    deploy: {{resources: {{reservations: {{devices: {devices}}}}}}}")
    named = ", ".join(f"{source}: {{}}" for source, _ in container.volumes if not _is_path(source))
    return "\n".join([*lines, f"volumes: {{{named}}}"]) + "\n"


def _format_volume(source: str, target: str) -> str:
    kind, ending = ("bind", ", read_only: true") if _is_path(source) else ("volume", "")
    return f"{{type: {kind}, source: {_quote(source)}, target: {_quote(target)}{ending}}}"


def _is_path(source: str) -> bool:
    return source.startswith(("/", "."))


def _quote(words: str | Iterable[str]) -> str:
    """A text or a list of texts."""
    escaped = words if isinstance(words, str) else list(words)
    return json.dumps(escaped, ensure_ascii=False).replace("$", "$$")


def _comment(text: str) -> str:
    return "".join(
        f"# {line}\n"
        for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    )
