"""Commands on the conversation: its questions, answers and branches, and its copies."""

from __future__ import annotations

from pathlib import Path

from edgespec.conversations import from_json, to_json, to_markdown
from edgespec.conversations.chat import path_of, write
from edgespec.errors import InvalidRequest
from edgespec.service.client import require_model
from edgespec.tui.app import ChatApp
from edgespec.tui.history import History
from edgespec.tui.log import Log
from edgespec.tui.prompt import Prompt

_MOST_ATTACHED = 2**20  # bytes of a file
_MOST_IMPORTED = 2**28


async def retry(app: ChatApp, argument: str) -> None:
    app.require_idle()
    require_model(app.client)
    number = _question(app, argument)
    app.recorder.rewind_answers(number)
    await app.query_one(Log).cut(number, keep_question=True)
    await app.generate()


async def edit(app: ChatApp, argument: str) -> None:
    app.require_idle()
    number = _question(app, argument)
    question = app.recorder.rewind(number)
    await app.query_one(Log).cut(number)
    app.query_one(Prompt).put(question)


async def undo(app: ChatApp, _argument: str) -> None:
    app.require_idle()
    number = _question(app, "")
    app.recorder.rewind(number)
    await app.query_one(Log).cut(number)


async def branch(app: ChatApp, argument: str) -> None:
    app.require_idle()
    branches, at = app.recorder.branches()
    if not branches:
        raise InvalidRequest("this conversation has no branches.", hint="/retry and /edit begin one.")
    told = f"there are branches 1 to {len(branches)}."
    to = _number(argument, len(branches), told, "For example: /branch 1") - 1 if argument else (at + 1) % len(branches)
    app.recorder.switch(branches[to])
    await app.show_turns()
    await app.say(f"branch {to + 1} of {len(branches)}")


async def attach(app: ChatApp, argument: str) -> None:
    path = path_of(argument)
    text = _read(path, _MOST_ATTACHED, "Attach a part of it.")
    prompt = app.query_one(Prompt)
    fence = "`" * max(3, _longest_fence(text) + 1)
    prompt.put(f"{prompt.text}{path.name}:\n{fence}{path.suffix.removeprefix('.')}\n{text.rstrip()}\n{fence}\n")


async def find(app: ChatApp, argument: str) -> None:
    if not app.query_one(Log).find(argument):
        raise InvalidRequest(f"'{argument}' is not on this screen.", hint="/history TEXT looks into everything.")


async def copy(app: ChatApp, argument: str) -> None:
    texts = [turn.text for turn in app.recorder.turns if turn.role == "assistant" and turn.text]
    if app.answer is not None and app.answer.text:
        texts.append(app.answer.text)
    if not texts:
        raise InvalidRequest("there is no answer to copy.", hint="Ask something first.")
    text = texts[-1]
    if argument:
        blocks = _code_blocks(text)
        told = f"the answer has {len(blocks)} code blocks."
        text = blocks[_number(argument, len(blocks), told, "/copy copies all of it.") - 1]
    app.copy_to_clipboard(text)
    await app.say(f"copied {len(text):,} characters")


async def new(app: ChatApp, _argument: str) -> None:
    app.require_idle()
    app.recorder.begin_anew()
    await app.show_turns()
    await app.say("a new conversation")


async def history(app: ChatApp, argument: str) -> None:
    app.require_idle()
    present = app.recorder.conversation

    async def chosen(id: int | None) -> None:
        if id is not None:
            await app.resume(id)

    app.push_screen(History(app.recorder.store, present.id if present else None, argument), chosen)


async def rename(app: ChatApp, argument: str) -> None:
    if app.recorder.conversation is None:
        raise InvalidRequest("there is no conversation to rename.", hint="Ask something first.")
    await app.say(f"renamed to {app.recorder.rename(argument)}")


async def export(app: ChatApp, argument: str) -> None:
    path, recorder = path_of(argument), app.recorder
    if recorder.conversation is None:
        raise InvalidRequest("there is no conversation to export.", hint="Ask something first.")
    forms = {".md": to_markdown, ".json": to_json}
    form = forms.get(path.suffix.lower())
    if form is None:
        raise InvalidRequest(f"'{path.name}' says no form.", hint="End it in .md or .json.")
    write(path, form(recorder.store, recorder.store.resume(recorder.conversation.id)))
    await app.say(f"wrote {path}")


async def take_in(app: ChatApp, argument: str) -> None:
    app.require_idle()
    path = path_of(argument)
    conversation = app.recorder.store.insert(*from_json(_read(path, _MOST_IMPORTED, "Import a smaller one.")))
    await app.resume(conversation.id)


async def save(app: ChatApp, argument: str) -> None:
    app.chat.save(path_of(argument))
    await app.say(f"saved {len(app.chat.messages)} messages")


async def load(app: ChatApp, argument: str) -> None:
    app.require_idle()
    app.chat.load(path_of(argument))
    app.recorder.take_over()
    await app.show_turns()
    await app.say(f"loaded {len(app.chat.messages)} messages")


def _question(app: ChatApp, argument: str) -> int:
    """The number of a question, from 1; the last one's if none is given."""
    count = len(app.recorder.questions)
    if not count:
        raise InvalidRequest("there is no question yet.", hint="Ask something first.")
    if not argument:
        return count
    return _number(argument, count, f"there are questions 1 to {count}.", "Their numbers are above them.")


def _number(argument: str, most: int, told: str, hint: str) -> int:
    """A number from 1 to `most` that the user has typed. Raises InvalidRequest with `told` and `hint`."""
    number = int(argument) if argument.isdecimal() and len(argument) < 10 else 0
    if not 1 <= number <= most:
        raise InvalidRequest(told, hint=hint)
    return number


def _read(path: Path, most: int, too_large: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise InvalidRequest(f"{path} is larger than {most // 2**20} MiB.", hint=too_large)
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from error
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise InvalidRequest(f"{path} is not a text file.", hint="Choose a text file.") from error


def _longest_fence(text: str) -> int:
    """The longest run of backticks that begins a line."""
    return max((len(line) - len(line.lstrip("`")) for line in map(str.strip, text.splitlines())), default=0)


def _code_blocks(text: str) -> list[str]:
    """The fenced blocks of a Markdown text, as Markdown reads them."""
    from markdown_it import MarkdownIt

    return [token.content for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"]
