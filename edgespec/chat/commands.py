"""The slash commands of a chat."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.chat import from_json
from edgespec.chat.presets import list_presets, read_preset, remove_preset, save_preset
from edgespec.chat.room import Room
from edgespec.chat.state import NONE, SETTINGS, apply_setting, describe_speculation, parse_path
from edgespec.errors import InvalidRequest, find_near
from edgespec.models.draft_words import describe_words

_MAX_SHOWN = 20  # characters of a mistake
_MAX_ATTACHED_BYTES = 2**20
_MAX_IMPORTED_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command: `arguments` follow the name, optional ones are in brackets. `run` takes the room and the argument."""

    name: str
    arguments: str
    summary: str
    run: Callable[[Any, str], Awaitable[object]]

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".rstrip()

    @property
    def requires_argument(self) -> bool:
        return bool(self.arguments) and not self.arguments.startswith("[")


async def show_help(room: Room, _argument: str) -> None:
    await room.show_help()


async def show_stats(room: Room, _argument: str) -> None:
    await room.show_stats()


async def leave(room: Room, _argument: str) -> None:
    await room.leave()


async def change_speculation(room: Room, argument: str) -> None:
    """`on` and `off` take effect during an answer too."""
    model_info = room.require_model()
    if argument:
        model_info = await room.speculate(argument)
        room.request = model_info.keep_speculation(room.request)
    await room.tell(describe_speculation(model_info.speculation, model_info.draft, is_paused=model_info.is_paused))


async def change_draft(room: Room, argument: str) -> None:
    if not argument:
        await room.tell(f"draft: {room.require_model().draft} (choose from {describe_words()})")
        return
    room.require_idle()
    room.require_model()
    await room.change_draft(replace(room.request, draft=argument))


async def open_model(room: Room, argument: str) -> None:
    if not argument:
        await room.choose_model()
        return
    room.require_idle()
    await room.open_model(replace(room.request, model=argument, draft="auto"))


async def change_setting(room: Room, argument: str) -> None:
    shown = apply_setting(room.chat, argument)
    if argument:
        room.recorder.use_system()
    await room.tell(*(f"{name} {value}" for name, value in shown))


async def change_system(room: Room, argument: str) -> None:
    if argument:
        room.chat.set("system", argument)
        room.recorder.use_system()
    await room.tell(f"system message: {room.chat.system or NONE}")


async def use_preset(room: Room, argument: str) -> None:
    verb, _, name = argument.partition(" ")
    if not argument:
        await room.tell(f"presets: {', '.join(list_presets()) or 'none; /preset save NAME keeps these settings'}")
    elif verb == "save":
        save_preset(name.strip(), room.chat.changed_settings())
        await room.tell(f"saved the preset {name.strip()}; `edgespec chat --preset {name.strip()}` begins with it")
    elif verb == "remove":
        remove_preset(name.strip())
        await room.tell(f"removed the preset {name.strip()}")
    else:
        room.chat.use_settings(read_preset(argument))
        room.recorder.use_system()
        changed = (f"{key} {value}" for key, value in room.chat.changed_settings().items())
        await room.tell(f"preset {argument}: {', '.join(changed) or 'nothing is changed'}")


async def retry(room: Room, argument: str) -> None:
    room.require_idle()
    room.require_model()
    _rewind(room, argument, keep_question=True)
    await room.answer_question()


async def continue_(room: Room, _argument: str) -> None:
    room.require_idle()
    await room.continue_answer()


async def edit(room: Room, argument: str) -> None:
    room.put_back(_rewind(room, argument))


async def undo(room: Room, _argument: str) -> None:
    removed = _rewind(room, "")
    await room.tell(f"removed: {removed.splitlines()[0][:70]}")


async def attach(room: Room, argument: str) -> None:
    path = parse_path(argument)
    text = _read(path, _MAX_ATTACHED_BYTES, "Attach only a part of it.")
    fence = max(re.findall("`+", text), key=len, default="") + "`"
    fence = max(fence, "```", key=len)
    room.attach(path.name, f"{path.name}:\n{fence}{path.suffix.removeprefix('.')}\n{text.rstrip()}\n{fence}\n")


async def start_new(room: Room, _argument: str) -> None:
    room.require_idle()
    room.recorder.start_new()
    await room.show_turns()
    await room.tell("new conversation")


async def switch_incognito(room: Room, _argument: str) -> None:
    room.require_idle()
    is_on = not room.recorder.is_incognito
    room.recorder.start_incognito(is_on=is_on)
    await room.show_turns()
    await room.tell(
        "new incognito conversation: nothing of it is kept" if is_on else "new conversation, no longer incognito"
    )


async def rename(room: Room, argument: str) -> None:
    if room.recorder.conversation is None:
        raise InvalidRequest("there is no conversation to rename.", hint="Ask something first.")
    await room.tell(f"renamed to {room.recorder.rename(argument)}")


async def export(room: Room, argument: str, *, overwrite: bool = False) -> None:
    path = parse_path(argument)
    room.recorder.export(path, overwrite=overwrite)
    await room.tell(f"wrote {path}")


async def import_(room: Room, argument: str) -> None:
    room.require_idle()
    path = parse_path(argument)
    read = from_json(_read(path, _MAX_IMPORTED_BYTES, "Import a smaller file."))
    room.recorder.show(room.recorder.store.insert(*read))
    await room.show_conversation()


def _rewind(room: Room, argument: str, *, keep_question: bool = False) -> str:
    """Go back to before a question or its answer, and return the question; it is the last one without an argument."""
    room.require_idle()
    n = len(room.recorder.questions)
    if not n:
        raise InvalidRequest("there is no question yet.", hint="Ask something first.")
    number = parse_number(argument or str(n), n, "question", "questions", "Each question starts with its number.")
    question = room.recorder.rewind(number, keep_question=keep_question)
    room.show_rewound(number, keep_question=keep_question)
    return question


def parse_number(argument: str, limit: int, noun: str, nouns: str, hint: str) -> int:
    """A number from 1 to `limit`, of one of `nouns`. Raises InvalidRequest with `hint`."""
    number = int(argument) if argument.isdecimal() and len(argument) < 10 else 0
    if not 1 <= number <= limit:
        there_are = {0: "there is none", 1: f"there is one {noun}, number 1"}
        shown = argument if len(argument) <= _MAX_SHOWN else f"{argument[:_MAX_SHOWN]}…"
        message = f"'{shown}' is not the number of a {noun}: {there_are.get(limit, f'there are {nouns} 1 to {limit}')}."
        raise InvalidRequest(message, hint=hint)
    return number


def _read(path: Path, max_bytes: int, hint: str) -> str:
    """The text of a file. Raises InvalidRequest, with `hint` if it is larger than `max_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise InvalidRequest(f"'{path}' is larger than {max_bytes // 2**20} MiB.", hint=hint)
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from error
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise InvalidRequest(f"'{path}' is not a text file.", hint="Choose a text file.") from error


COMMANDS = (
    SlashCommand("help", "", "show keys and commands", show_help),
    SlashCommand("model", "[REF]", "choose a model, or load REF; the conversation stays", open_model),
    SlashCommand("set", "[NAME [VALUE]]", f"show or change {', '.join(SETTINGS)}; 'none' returns to the default",
                 change_setting),
    SlashCommand("system", "[TEXT]", "show the system message, or set it; 'none' removes it", change_system),
    SlashCommand("preset", "[NAME]", "list presets, or use one; save NAME and remove NAME keep and drop the settings",
                 use_preset),
    SlashCommand("draft", "[NAMES|REF]", "draft by auto, none, drafters joined by '+', or a model; without, list them",
                 change_draft),
    SlashCommand("spec", "[on|off|auto|N]", "speculation: on, off, adaptive, or N drafted tokens", change_speculation),
    SlashCommand("stats", "", "show statistics of the last answer", show_stats),
    SlashCommand("retry", "[N]", "answer the last question, or question N, again", retry),
    SlashCommand("continue", "", "go on with an answer that was cut", continue_),
    SlashCommand("edit", "[N]", "move the last question, or question N, back to the prompt", edit),
    SlashCommand("undo", "", "remove the last question and its answer", undo),
    SlashCommand("attach", "FILE", "add a text file to the message", attach),
    SlashCommand("new", "", "start a new conversation", start_new),
    SlashCommand("incognito", "", "start a conversation of which nothing is kept, or leave this mode",
                 switch_incognito),
    SlashCommand("rename", "TITLE", "change the title of the conversation", rename),
    SlashCommand("export", "FILE", "write to FILE.md, or with all branches to FILE.json; /export! replaces a file",
                 export),
    SlashCommand("import", "FILE", "read a FILE.json of /export as a new conversation", import_),
    SlashCommand("exit", "", "quit", leave),
)  # fmt: skip
REPLACING = SlashCommand("export!", "FILE", "as /export; a file that exists is replaced",
                         partial(export, overwrite=True))  # fmt: skip
ALIASES = {"?": "help", "bye": "exit", "clear": "new", "quit": "exit"}  # as other programs have them


def index_commands(commands: Iterable[SlashCommand]) -> dict[str, SlashCommand]:
    """The commands by their names, with the one that replaces a file."""
    return {command.name: command for command in (*commands, REPLACING)}


def is_command(text: str) -> bool:
    """Whether a line is a command. A message whose first character is a slash has it twice."""
    return text.startswith("/") and not text.startswith("//")


async def run_command(room: Room, line: str, commands: Mapping[str, SlashCommand], help_key: str = "/help") -> None:
    """Run a line, given without its slash; `help_key` opens the list of commands.

    Raises any EdgespecError: InvalidRequest for an unknown command and a missing argument.
    """
    name, _, argument = line.strip().partition(" ")
    command = commands.get(ALIASES.get(name, name))
    if command is None:
        near = find_near(name, [*commands, *ALIASES])
        hint = f"Did you mean /{near}? " if near else ""
        raise InvalidRequest(f"there is no command /{name}.", hint=f"{hint}{help_key} lists all commands.")
    if command.requires_argument and not argument.strip():
        raise InvalidRequest(f"/{command.name} needs {command.arguments}.", hint=f"{help_key} lists all commands.")
    await command.run(room, argument.strip())
