"""The slash commands, which the command palette lists too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from edgespec.conversations.commands import ALIASES, SHARED, format_help, parse_command, requires_argument
from edgespec.tui.app import ChatApp
from edgespec.tui.commands import chat, model
from edgespec.tui.commands.completion import complete_line
from edgespec.tui.popup import Completion

Run = Callable[[ChatApp, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Command:
    """`arguments` follow the name; optional ones are in brackets."""

    name: str
    arguments: str
    summary: str
    run: Run


def _share(name: str, run: Run) -> Command:
    """A command that the plain chat has too."""
    shared = SHARED[name]
    return Command(name, shared.arguments, shared.summary, run)


async def _help(app: ChatApp, _argument: str) -> None:
    app.action_help()


async def _details(app: ChatApp, _argument: str) -> None:
    await app.action_details()


async def _exit(app: ChatApp, _argument: str) -> None:
    app.action_leave()


COMMANDS = (
    _share("help", _help),
    _share("spec", model.spec),
    _share("draft", model.draft),
    Command("model", "[REF]", "choose a model, or load REF; the conversation stays", model.model),
    _share("set", model.settings),
    Command("system", "[TEXT]", "show the system message, or set it; 'none' removes it", model.system),
    Command("race", "[TEXT]", "decode the last question, or TEXT, plainly and speculatively", model.race),
    Command("stats", "", "show steps, costs, acceptance (F2)", _details),
    Command("theme", "[NAME]", "change the colors; without NAME, list the themes", model.theme),
    Command("retry", "[N]", "answer the last question, or question N, again", chat.retry),
    _share("continue", chat.continue_),
    Command("edit", "[N]", "move the last question, or question N, back to the prompt", chat.edit),
    _share("undo", chat.undo),
    Command("branch", "[N|back|up|down]", "show the next branch, N or the one before; up, down: a fork", chat.branch),
    Command("attach", "FILE", "insert a text file into the prompt", chat.attach),
    Command("find", "TEXT", "scroll to the last message that contains TEXT", chat.find),
    Command("copy", "[N]", "copy the last answer, or its Nth code block", chat.copy),
    Command("new", "", "start a new conversation; this one is kept", chat.new),
    _share("incognito", chat.incognito),
    Command("history", "[TEXT]", "list all conversations, or search them for TEXT", chat.history),
    Command("rename", "TITLE", "change the title of the conversation", chat.rename),
    Command("export", "FILE", "write this branch to FILE.md, all to FILE.json; /export! replaces a file", chat.export),
    Command("import", "FILE", "read a FILE.json of /export as a new conversation", chat.import_),
    Command("save", "FILE", "write messages and settings for /load; /save! replaces a file", chat.save),
    Command("load", "FILE", "read a file of /save as a new conversation", chat.load),
    _share("exit", _exit),
)
_ALIASES = ALIASES | {"clear": "new", "show": "set", "resume": "history"}
_REPLACING = (
    Command("export!", "FILE", "as /export; a file that exists is replaced", partial(chat.export, overwrite=True)),
    Command("save!", "FILE", "as /save; a file that exists is replaced", partial(chat.save, overwrite=True)),
)
_BY_NAME = {command.name: command for command in (*COMMANDS, *_REPLACING)}


class SlashCommands:
    """A tui.app.CommandSet of COMMANDS."""

    help = format_help(COMMANDS)

    async def run(self, app: ChatApp, line: str) -> None:
        command, argument = parse_command(line, _BY_NAME, _ALIASES, help_key="F1")
        await command.run(app, argument)

    def complete(self, line: str, themes: Iterable[str]) -> list[Completion]:
        return complete_line(line, _BY_NAME, _ALIASES, themes)

    def without_arguments(self) -> Iterator[tuple[str, str]]:
        for command in COMMANDS:
            if not requires_argument(command):
                yield command.name, command.summary
