"""The slash commands that every chat interface has: names, aliases, help lines and argument checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from edgespec.conversations.chat import NONE, SETTINGS, Chat
from edgespec.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command: `arguments` follow the name, optional ones are in brackets; `run` belongs to one interface."""

    name: str
    arguments: str
    summary: str
    run: Callable[..., Any] | None = None


_COMMANDS = (
    SlashCommand("help", "", "show keys and commands"),
    SlashCommand("spec", "[on|off|auto|N]", "speculation: on, off, adaptive, or N drafted tokens"),
    SlashCommand("draft", "[NAMES|REF]", "draft by auto, none, drafters joined by '+', or a model; without, list them"),
    SlashCommand("set", "[NAME [VALUE]]", f"show or change {', '.join(SETTINGS)}; 'none' unsets"),
    SlashCommand("stats", "", "show statistics of the last answer"),
    SlashCommand("retry", "", "answer the last question again"),
    SlashCommand("continue", "", "go on with an answer that was cut"),
    SlashCommand("undo", "", "remove the last question and its answer"),
    SlashCommand("incognito", "", "start a conversation of which nothing is saved, or end it for one that is"),
    SlashCommand("save", "FILE", "write messages and settings for /load; /save! replaces a file"),
    SlashCommand("load", "FILE", "read a file of /save"),
    SlashCommand("exit", "", "quit"),
)
SHARED = {command.name: command for command in _COMMANDS}
ALIASES = {"?": "help", "bye": "exit", "quit": "exit"}


def format_help(commands: Iterable[SlashCommand]) -> str:
    """A line for each command: its usage and what it does."""
    return "\n".join(f"{f'/{each.name} {each.arguments}'.rstrip():24} {each.summary}" for each in commands)


def requires_argument(command: SlashCommand) -> bool:
    """Whether the command cannot run by its name alone."""
    return bool(command.arguments) and not command.arguments.startswith("[")


def parse_command(
    line: str, commands: Mapping[str, SlashCommand], aliases: Mapping[str, str], help_key: str = "/help"
) -> tuple[SlashCommand, str]:
    """The command and its argument in a line without the slash; `help_key` opens the list of commands.

    Raises InvalidRequest for an unknown command and a missing argument.
    """
    name, _, argument = line.strip().partition(" ")
    command = commands.get(aliases.get(name, name))
    if command is None:
        near = get_close_matches(name, [*commands, *aliases], n=1)
        hint = f"Did you mean /{near[0]}? " if near else ""
        raise InvalidRequest(f"there is no command /{name}.", hint=f"{hint}{help_key} lists all commands.")
    if not argument.strip() and requires_argument(command):
        raise InvalidRequest(f"/{command.name} needs {command.arguments}.", hint=f"{help_key} lists all commands.")
    return command, argument.strip()


def apply_setting(chat: Chat, argument: str) -> list[tuple[str, str]]:
    """Run /set: change the setting in `NAME VALUE`, if there is a value; returns names and values to show.

    Raises InvalidRequest.
    """
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if value.strip():
        chat.set(name, value.strip())
    values = ((setting, chat.setting(setting)) for setting in ([name] if name else SETTINGS))
    return [(setting, _format_setting(value)) for setting, value in values]


def _format_setting(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return NONE if value is None else str(value)
