"""What can be typed after a slash, and chosen from the palette."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.conversations.chat import SETTINGS
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.tui import steering, talk

if TYPE_CHECKING:
    from edgespec.tui.app import ChatApp

Run = Callable[["ChatApp", str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Command:
    """`given` is what follows the name, in brackets where it may be left out."""

    name: str
    given: str
    told: str
    run: Run


async def _help(app: ChatApp, _argument: str) -> None:
    app.action_help()


async def _details(app: ChatApp, _argument: str) -> None:
    await app.action_details()


async def _exit(app: ChatApp, _argument: str) -> None:
    app.action_leave()


COMMANDS = (
    Command("help", "", "keys and commands", _help),
    Command("spec", "[on|off|auto|N]", "speculation on, off, as much as pays, or N at a time", steering.spec),
    Command("draft", "[KIND|REF]", "auto, model, ngram, none, layerskip, qspec, sparse, a model", steering.draft),
    Command("model", "[REF]", "choose a model, or open REF; the conversation stays", steering.model),
    Command("set", "[NAME VALUE]", f"show or change {', '.join(SETTINGS)}", steering.settings),
    Command("system", "[TEXT]", "the system message; without TEXT, none", steering.system),
    Command("race", "[TEXT]", "the last question, or TEXT, plain against speculative", steering.race),
    Command("stats", "", "rounds, costs, acceptance (F2)", _details),
    Command("theme", "[NAME]", "colours; without NAME, which there are", steering.theme),
    Command("retry", "[N]", "answer the last question, or question N, anew", talk.retry),
    Command("edit", "[N]", "take the last question, or question N, back into the prompt", talk.edit),
    Command("undo", "", "take the last question and its answer back", talk.undo),
    Command("branch", "[N]", "show the next branch, or branch N, of where the chat last parts", talk.branch),
    Command("attach", "FILE", "put a text file into the message", talk.attach),
    Command("find", "TEXT", "scroll to the last place that has TEXT", talk.find),
    Command("copy", "[N]", "copy the last answer, or its N-th code block", talk.copy),
    Command("new", "", "begin another conversation; this one is kept", talk.new),
    Command("history", "[TEXT]", "earlier conversations, or those that have TEXT", talk.history),
    Command("rename", "TITLE", "how the conversation is listed", talk.rename),
    Command("export", "FILE", "write it to FILE.md, or with all branches to FILE.json", talk.export),
    Command("import", "FILE", "read a FILE.json that /export wrote, as a new conversation", talk.take_in),
    Command("save", "FILE", "messages and settings, for /load here and in --plain", talk.save),
    Command("load", "FILE", "read them back, as a new conversation", talk.load),
    Command("exit", "", "leave", _exit),
)
_ALSO = {"?": "help", "bye": "exit", "quit": "exit", "clear": "new", "show": "set", "resume": "history"}
_BY_NAME = {command.name: command for command in COMMANDS}

HELP = "\n".join(f"{f'/{each.name} {each.given}'.rstrip():24} {each.told}" for each in COMMANDS)


async def run(app: ChatApp, line: str) -> None:
    """Do what `line`, without its slash, says; or say what is wrong with it."""
    name, _, argument = line.strip().partition(" ")
    command = _BY_NAME.get(_ALSO.get(name, name))
    try:
        if command is None:
            raise InvalidRequest(f"there is no command /{name}.", hint="F1 lists them.")
        if not argument.strip() and command.given and not command.given.startswith("["):
            raise InvalidRequest(f"/{command.name} needs {command.given}.", hint="F1 lists all commands.")
        await command.run(app, argument.strip())
    except EdgespecError as error:
        await app.say(f"{error.message} {error.hint}", "error")


def palette(app: ChatApp) -> Iterator[tuple[str, str, Callable[[], Awaitable[None]]]]:
    """(name, help, callable) of the commands that need no argument."""
    for command in COMMANDS:
        if not command.given or command.given.startswith("["):
            yield f"/{command.name}", command.told, _bound(app, command.name)


def _bound(app: ChatApp, name: str) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        await run(app, name)

    return call
