"""The slash commands, which the command palette lists too, and how a line that is being typed can go on."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.conversations import from_json
from edgespec.conversations.chat import (
    ALIASES,
    NONE,
    REPLACING,
    SETTINGS,
    SHARED,
    SlashCommand,
    apply_setting,
    describe_speculation,
    parse_command,
    parse_path,
    requires_argument,
)
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.planner.draft_finder import complete_draft, describe_words
from edgespec.registry.schema import load_registry
from edgespec.service.client import require_model
from edgespec.text.chat_template import Message
from edgespec.tui.markdown import list_code_blocks
from edgespec.tui.progress import Downloads
from edgespec.tui.prompt import MAX_COMPLETIONS, Completion, Prompt
from edgespec.tui.race import Race
from edgespec.tui.transcript import Transcript

if TYPE_CHECKING:
    from edgespec.tui.app import ChatApp

Run = Callable[["ChatApp", str], Awaitable[object]]

_MAX_SHOWN = 20  # characters of a mistake
_MAX_ATTACHED_BYTES = 2**20
_MAX_IMPORTED_BYTES = 2**28


async def retry(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    require_model(app.client)
    _rewind(app, argument, keep_question=True)
    await app.make_room_for(app.chat.messages)
    await app.answer()


async def continue_(app: ChatApp, _argument: str) -> None:
    app.activity.require_idle()
    await app.continue_answer()


async def edit(app: ChatApp, argument: str) -> None:
    app.query_one(Prompt).put_back(_rewind(app, argument))


async def undo(app: ChatApp, _argument: str) -> None:
    _rewind(app, "")


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
        to = _parse_number(argument, count, "branch", "branches", "For example: /branch 1") - 1
    if to != fork.at:
        await app.switch_branch(fork, to)
    app.mark_branches()
    await app.show_notice(f"branch {to + 1 or '-'} of {count} {app.recorder.describe_place(fork)}")


async def attach(app: ChatApp, argument: str) -> None:
    path = parse_path(argument)
    text = _read(path, _MAX_ATTACHED_BYTES, "Attach only a part of it.")
    prompt = app.query_one(Prompt)
    fence = max(re.findall("`+", text), key=len, default="") + "`"
    fence = max(fence, "```", key=len)
    prompt.put(f"{prompt.text}{path.name}:\n{fence}{path.suffix.removeprefix('.')}\n{text.rstrip()}\n{fence}\n")


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
        text = blocks[_parse_number(argument, len(blocks), "code block", "code blocks", hint) - 1]
    app.copy_to_clipboard(text)
    await app.show_notice(f"copied {len(text):,} characters")


async def new(app: ChatApp, _argument: str) -> None:
    app.activity.require_idle()
    app.recorder.start_new()
    await app.show_turns()
    await app.show_notice("new conversation")


async def incognito(app: ChatApp, _argument: str) -> None:
    app.activity.require_idle()
    app.recorder.start_incognito(is_on=not app.is_incognito)
    await app.show_turns()
    told = (
        "new incognito conversation: nothing of it is saved" if app.is_incognito else "new conversation, which is saved"
    )
    await app.show_notice(told)


async def history(app: ChatApp, argument: str) -> None:
    from edgespec.tui.picker import History  # not before it is needed: the planner behind that module takes 50 ms

    app.activity.require_idle()
    current = app.recorder.conversation

    async def resume(id: int | None) -> None:
        if id is not None:
            await app.resume(id)

    current_id = current.id if current is not None and not app.is_incognito else None
    app.push_screen(History(app.recorder.saved, current_id, argument), resume)


async def rename(app: ChatApp, argument: str) -> None:
    if app.recorder.conversation is None:
        raise InvalidRequest("there is no conversation to rename.", hint="Ask something first.")
    title = app.recorder.rename(argument)
    app.refresh_opening()
    await app.show_notice(f"renamed to {title}")


async def export(app: ChatApp, argument: str, *, overwrite: bool = False) -> None:
    path = parse_path(argument)
    app.recorder.export(path, overwrite=overwrite)
    await app.show_notice(f"wrote {path}")


async def import_(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    path = parse_path(argument)
    read = from_json(_read(path, _MAX_IMPORTED_BYTES, "Import a smaller file."))
    app.recorder.show(app.recorder.store.insert(*read))
    await app.show_conversation()


def _rewind(app: ChatApp, argument: str, *, keep_question: bool = False) -> str:
    """Go back to before a question or its answer, and return the question; it is the last one without an argument."""
    app.activity.require_idle()
    n = len(app.recorder.questions)
    if not n:
        raise InvalidRequest("there is no question yet.", hint="Ask something first.")
    number = _parse_number(argument or str(n), n, "question", "questions", "Each question starts with its number.")
    app.query_one(Transcript).cut(number, keep_question=keep_question)
    question = app.recorder.rewind(number, keep_question=keep_question)
    app.clear_instruments()
    return question


def _parse_number(argument: str, limit: int, noun: str, nouns: str, hint: str) -> int:
    """A number from 1 to `limit`, of one of `nouns`. Raises InvalidRequest with `hint`."""
    number = int(argument) if argument.isdecimal() and len(argument) < 10 else 0
    if not 1 <= number <= limit:
        there_are = {0: "there is none", 1: f"there is one {noun}, number 1"}
        shown = argument if len(argument) <= _MAX_SHOWN else f"{argument[:_MAX_SHOWN]}…"
        message = f"'{shown}' is not the number of a {noun}: {there_are.get(limit, f'there are {nouns} 1 to {limit}')}."
        raise InvalidRequest(message, hint=hint)
    return number


def _read(path: Path, max_bytes: int, hint: str) -> str:
    """The text of a file. Raises InvalidRequest, with `hint` where it is larger than `max_bytes`."""
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


async def spec(app: ChatApp, argument: str) -> None:
    """`on` and `off` take effect during an answer too."""
    model_info = require_model(app.client)
    if argument:
        model_info = await app.client.speculate(argument).wait()
        app.request = model_info.keep_speculation(app.request)
    await app.show_notice(
        describe_speculation(model_info.speculation, model_info.draft, is_paused=model_info.is_paused)
    )
    app.refresh_instruments()


async def draft(app: ChatApp, argument: str) -> None:
    if not argument:
        await app.show_notice(f"draft: {require_model(app.client).draft} (choose from {describe_words()})")
        return
    app.activity.require_idle()
    require_model(app.client)
    app.change_draft(replace(app.request, draft=argument))


async def model(app: ChatApp, argument: str) -> None:
    if argument:
        app.activity.require_idle()
        app.open(replace(app.request, model=argument, draft="auto"))
        return

    from edgespec.tui.picker import Pick, Picker  # as in history()

    async def load(pick: Pick | None) -> None:
        if pick is not None and pick.download:
            app.query_one(Downloads).start(replace(app.request, model=pick.model, draft="auto"))
        elif pick is not None:
            await app.run_command(f"model {pick.model}")

    is_idle = app.activity.job is None
    app.push_screen(Picker(app.client, is_idle=is_idle, is_first=app.is_choosing), load)


async def settings(app: ChatApp, argument: str) -> None:
    shown = apply_setting(app.chat, argument)
    if argument:
        app.recorder.use_system()
    await app.show_notice(", ".join(f"{name} {value}" for name, value in shown))


async def system(app: ChatApp, argument: str) -> None:
    if argument:
        app.chat.set("system", argument)
        app.recorder.use_system()
    await app.show_notice(f"system message: {app.chat.system or NONE}")


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


def _act(action: str) -> Run:
    """A command that a key has too."""
    return lambda app, _argument: app.run_action(action)


def _share(name: str, run: Run) -> SlashCommand:
    """A command that the plain chat has too."""
    return replace(SHARED[name], run=run)


COMMANDS = (
    _share("help", _act("help")),
    _share("spec", spec),
    _share("draft", draft),
    SlashCommand("model", "[REF]", "choose a model, or load REF; the conversation stays", model),
    _share("set", settings),
    SlashCommand("system", "[TEXT]", "show the system message, or set it; 'none' removes it", system),
    SlashCommand("race", "[TEXT]", "decode the last question, or TEXT, plainly and speculatively", race),
    SlashCommand("stats", "", "show steps, costs, acceptance (F2)", _act("details")),
    SlashCommand("retry", "[N]", "answer the last question, or question N, again", retry),
    _share("continue", continue_),
    SlashCommand("edit", "[N]", "move the last question, or question N, back to the prompt", edit),
    _share("undo", undo),
    SlashCommand("branch", "[N|back|up|down]", "show the next branch, N or the one before; up, down: a fork", branch),
    SlashCommand("attach", "FILE", "insert a text file into the prompt", attach),
    SlashCommand("copy", "[N]", "copy the last answer, or its Nth code block", copy),
    _share("new", new),
    _share("incognito", incognito),
    SlashCommand("history", "[TEXT]", "list all conversations, or search them for TEXT", history),
    SlashCommand("rename", "TITLE", "change the title of the conversation", rename),
    _share("export", export),
    SlashCommand("import", "FILE", "read a FILE.json of /export as a new conversation", import_),
    _share("exit", _act("leave")),
)
_BY_NAME = {command.name: command for command in COMMANDS} | {
    REPLACING.name: replace(REPLACING, run=partial(export, overwrite=True))
}


async def run(app: ChatApp, line: str) -> None:
    """Run `line`, given without its slash. Raises EdgespecError."""
    command, argument = parse_command(line, _BY_NAME, ALIASES, help_key="F1")
    assert command.run is not None
    await command.run(app, argument)


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
    """Names before aliases; an alias is listed only where no name matches."""
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
            not requires_argument(each),
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
    """Entries of the folder in `argument`; hidden ones where the name so far begins with a dot."""
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
    **dict.fromkeys(("attach", "export", "import"), _list_paths),
}
