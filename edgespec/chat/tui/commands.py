"""The commands of the full-screen chat, which the command palette lists too, and how a line can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.chat import commands as shared
from edgespec.chat.commands import ALIASES, SlashCommand, index_commands, parse_number
from edgespec.chat.presets import list_presets
from edgespec.chat.state import SETTINGS
from edgespec.chat.tui.markdown import list_code_blocks
from edgespec.chat.tui.prompt import MAX_COMPLETIONS, Completion
from edgespec.chat.tui.race import Race
from edgespec.client.client import require_model
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.models.draft_words import complete_draft
from edgespec.models.registry import load_registry
from edgespec.text.chat_template import Message

if TYPE_CHECKING:
    from edgespec.chat.tui.app import ChatApp


async def branch(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    fork = app.recorder.select_fork({"up": -1, "down": 1}.get(argument, 0))
    if fork is None:
        raise InvalidRequest("this conversation has no branches.", hint="/retry and /edit create one.")
    count = len(fork.branches)
    if argument in ("up", "down"):
        to = fork.at
    elif argument in ("", "back"):
        to = (max(fork.at, 0) - 1 if argument else fork.at + 1) % count
    else:
        to = parse_number(argument, count, "branch", "branches", "For example: /branch 1") - 1
    if to != fork.at:
        await app.switch_branch(fork, to)
    app.mark_branches()
    await app.show_notice(f"branch {to + 1 or '-'} of {count} {app.recorder.describe_place(fork)}")


async def copy(app: ChatApp, argument: str) -> None:
    texts = [turn.text for turn in app.recorder.turns if turn.role == "assistant" and turn.text]
    if app.activity.answer is not None and app.activity.answer.text:
        texts.append(app.activity.answer.text)
    if not texts:
        raise InvalidRequest("there is no answer to copy.", hint="Ask something first.")
    text = texts[-1]
    if argument:
        blocks = list_code_blocks(text)
        hint = "/copy copies the whole answer."
        text = blocks[parse_number(argument, len(blocks), "code block", "code blocks", hint) - 1]
    app.copy_to_clipboard(text)
    await app.show_notice(f"copied {len(text):,} characters")


async def history(app: ChatApp, argument: str) -> None:
    from edgespec.chat.tui.picker import History  # not before it is needed: the planner behind that module takes 50 ms

    app.activity.require_idle()
    current = app.recorder.conversation

    async def resume(id: int | None) -> None:
        if id is not None:
            await app.resume(id)

    current_id = current.id if current is not None and not app.is_incognito else None
    app.push_screen(History(app.recorder.saved, current_id, argument), resume)


async def race(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    model_info, prompt = require_model(app.client), app.chat.messages[app.chat.left_out :]
    if model_info.speculation.is_plain:
        raise InvalidRequest("there is no draft to race.", hint="/draft ngram or /draft auto chooses one.")
    if argument:
        prompt.append(Message("user", argument))
    while prompt and prompt[-1].role != "user":
        prompt.pop()
    if not prompt:
        raise InvalidRequest("there is no question to race.", hint="For example: /race def fibonacci(n):")
    request = replace(app.chat.request(model_info.sampling), prompt=(*app.chat.system_messages, *prompt))

    async def go_on(_: None) -> None:
        await app.send_next()

    app.push_screen(Race(app.client, request, model_info.speculation, model_info.plain_speed), go_on)


_FULL_SCREEN = (
    SlashCommand("race", "[TEXT]", "decode the last question, or TEXT, plainly and speculatively", race),
    SlashCommand("branch", "[N|back|up|down]", "show the next branch, N or the one before; up, down: a fork", branch),
    SlashCommand("copy", "[N]", "copy the last answer, or its Nth code block", copy),
    SlashCommand("history", "[TEXT]", "list all conversations, or search them for TEXT", history),
)
COMMANDS = (*shared.COMMANDS[:-1], *_FULL_SCREEN, *shared.COMMANDS[-1:])
_BY_NAME = index_commands(COMMANDS)


async def run(app: ChatApp, line: str) -> None:
    """Run `line`, given without its slash. Raises EdgespecError."""
    await shared.run_command(app, line, _BY_NAME, help_key="F1")


_SPEC = {"on": "as chosen before", "off": "plain decoding", "auto": "as much as pays", "4": "tokens per step"}

Values = Iterable[tuple[str, str]]
"""(argument, summary) for each value. One that ends in a slash or a space is not whole yet."""


def complete(line: str) -> list[Completion]:
    """The lines that `line` can become. It begins with a slash, and may end in the middle of a word."""
    name, space, argument = line.removeprefix("/").partition(" ")
    if name.startswith("/"):
        return []  # a message
    if not space:
        return _complete_name(name)
    command = ALIASES.get(name, name)
    values = _ARGUMENTS[command](argument) if command in _ARGUMENTS else ()
    found = [
        Completion(f"/{name} {value}", value, summary, is_whole=not value.endswith(("/", " ")))
        for value, summary in values
        if value.startswith(argument) and value != argument
    ]
    return found[:MAX_COMPLETIONS]


def _complete_name(start: str) -> list[Completion]:
    """Names before aliases; an alias is listed only if no name matches."""
    names = [name for name in _BY_NAME if name.startswith(start)]
    names = names or sorted({name for alias, name in ALIASES.items() if alias.startswith(start)})
    commands = [_BY_NAME[name] for name in names]
    if names == [start] and not commands[0].arguments:
        return []
    return [
        Completion(
            f"/{each.name} " if each.arguments else f"/{each.name}",
            each.usage,
            each.summary,
            not each.requires_argument,
        )
        for each in commands
    ]


@cache
def _list_aliases() -> Values:
    """The aliases with their descriptions; they are asked for at every key."""
    with suppress(EdgespecError):
        return [(entry.alias, entry.description) for entry in load_registry().entries.values()]
    return ()


def _list_paths(argument: str) -> Values:
    """Entries of the folder in `argument`; hidden ones if the name so far begins with a dot."""
    folder, slash, start = argument.rpartition("/")
    try:
        paths = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
        for path in paths:
            if not path.name.startswith(".") or start.startswith("."):
                yield f"{folder}{slash}{path.name}{'/' if path.is_dir() else ''}", ""
    except (OSError, RuntimeError, ValueError):
        return


_ARGUMENTS: Mapping[str, Callable[[str], Values]] = {
    "draft": complete_draft,
    "set": lambda _: [(f"{name} ", "") for name in SETTINGS],
    "spec": lambda _: _SPEC.items(),
    "model": lambda _: _list_aliases(),
    "preset": lambda _: [(name, "") for name in list_presets()],
    **dict.fromkeys(("attach", "export", "import"), _list_paths),
}
