"""What can be typed after a slash, and chosen from the palette."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from edgespec.conversations.chat import SETTINGS
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.tui.app import ChatApp
from edgespec.tui.commands import chat, model

Run = Callable[[ChatApp, str], Awaitable[None]]


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
    Command("spec", "[on|off|auto|N]", "speculation on, off, as much as pays, or N at a time", model.spec),
    Command("draft", "[KIND|REF]", "auto, model, ngram, none, layerskip, qspec, sparse, a model", model.draft),
    Command("model", "[REF]", "choose a model, or open REF; the conversation stays", model.model),
    Command("set", "[NAME VALUE]", f"show or change {', '.join(SETTINGS)}", model.settings),
    Command("system", "[TEXT]", "the system message; without TEXT, none", model.system),
    Command("race", "[TEXT]", "the last question, or TEXT, plain against speculative", model.race),
    Command("stats", "", "rounds, costs, acceptance (F2)", _details),
    Command("theme", "[NAME]", "colours; without NAME, which there are", model.theme),
    Command("retry", "[N]", "answer the last question, or question N, anew", chat.retry),
    Command("edit", "[N]", "take the last question, or question N, back into the prompt", chat.edit),
    Command("undo", "", "take the last question and its answer back", chat.undo),
    Command("branch", "[N]", "show the next branch, or branch N, of where the chat last parts", chat.branch),
    Command("attach", "FILE", "put a text file into the message", chat.attach),
    Command("find", "TEXT", "scroll to the last place that has TEXT", chat.find),
    Command("copy", "[N]", "copy the last answer, or its N-th code block", chat.copy),
    Command("new", "", "begin another conversation; this one is kept", chat.new),
    Command("history", "[TEXT]", "earlier conversations, or those that have TEXT", chat.history),
    Command("rename", "TITLE", "how the conversation is listed", chat.rename),
    Command("export", "FILE", "write it to FILE.md, or with all branches to FILE.json", chat.export),
    Command("import", "FILE", "read a FILE.json that /export wrote, as a new conversation", chat.take_in),
    Command("save", "FILE", "messages and settings, for /load here and in --plain", chat.save),
    Command("load", "FILE", "read them back, as a new conversation", chat.load),
    Command("exit", "", "leave", _exit),
)
_ALSO = {"?": "help", "bye": "exit", "quit": "exit", "clear": "new", "show": "set", "resume": "history"}
_BY_NAME = {command.name: command for command in COMMANDS}


class SlashCommands:
    """A tui.app.CommandSet of COMMANDS."""

    help = "\n".join(f"{f'/{each.name} {each.given}'.rstrip():24} {each.told}" for each in COMMANDS)

    async def run(self, app: ChatApp, line: str) -> None:
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

    def without_arguments(self) -> Iterator[tuple[str, str]]:
        for command in COMMANDS:
            if not command.given or command.given.startswith("["):
                yield command.name, command.told
