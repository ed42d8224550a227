"""The slash commands that every chat interface has: names, synonyms, help lines and argument checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from edgespec.conversations.chat import SETTINGS, Chat
from edgespec.errors import InvalidRequest


class Command(Protocol):
    """A command's name and the argument after it, in brackets where it is optional."""

    @property
    def name(self) -> str: ...

    @property
    def argument(self) -> str: ...

    @property
    def help(self) -> str: ...


C = TypeVar("C", bound=Command)


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A Command without its implementation."""

    name: str
    argument: str
    help: str


_SHARED = (
    SlashCommand("help", "", "list the commands"),
    SlashCommand("stats", "", "show statistics of the last answer"),
    SlashCommand("spec", "[on|off|auto|N]", "speculative decoding: on, off, automatic, or N draft tokens"),
    SlashCommand("draft", "[KIND|REF]", "drafter: auto, model, ngram, none, layerskip, qspec, sparse, or a model"),
    SlashCommand("set", "[NAME VALUE]", f"show or change {', '.join(SETTINGS)}"),
    SlashCommand("retry", "", "generate the last answer again"),
    SlashCommand("undo", "", "remove the last question and its answer"),
    SlashCommand("save", "FILE", "write messages and settings to a file"),
    SlashCommand("load", "FILE", "read them back"),
    SlashCommand("exit", "", "quit"),
)
SHARED = {command.name: command for command in _SHARED}
SYNONYMS = {"?": "help", "bye": "exit", "quit": "exit"}


def format_help(commands: Iterable[Command]) -> str:
    """A line for each command: its usage and what it does."""
    return "\n".join(f"{f'/{each.name} {each.argument}'.rstrip():24} {each.help}" for each in commands)


def is_argument_required(command: Command) -> bool:
    """Whether the command does nothing without an argument."""
    return bool(command.argument) and not command.argument.startswith("[")


def parse_command(
    line: str, commands: Mapping[str, C], synonyms: Mapping[str, str] = SYNONYMS, help_key: str = "/help"
) -> tuple[C, str]:
    """The command and its argument in a line without the slash; `help_key` opens the list of commands.

    Raises InvalidRequest for an unknown command and a missing argument.
    """
    name, _, argument = line.strip().partition(" ")
    command = commands.get(synonyms.get(name, name))
    if command is None:
        raise InvalidRequest(f"there is no command /{name}.", hint=f"{help_key} lists the commands.")
    if not argument.strip() and is_argument_required(command):
        raise InvalidRequest(f"/{command.name} needs {command.argument}.", hint=f"{help_key} lists the commands.")
    return command, argument.strip()


def apply_setting(chat: Chat, argument: str) -> list[tuple[str, str]]:
    """Run /set: change the setting named in `NAME VALUE`, if any; returns names and values to show.

    Raises InvalidRequest.
    """
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if name:
        chat.set(name, value.strip())
    values = ((setting, chat.setting(setting)) for setting in ([name] if name else SETTINGS))
    return [(setting, "-" if value is None else str(value)) for setting, value in values]
