"""Commands that change, show or copy the conversation."""

from __future__ import annotations

from pathlib import Path

from edgespec.conversations import from_json, to_json, to_markdown
from edgespec.conversations.chat import parse_path, write_file
from edgespec.errors import InvalidRequest
from edgespec.service.client import require_model
from edgespec.tui.app import ChatApp
from edgespec.tui.history import History
from edgespec.tui.markdown import list_code_blocks
from edgespec.tui.prompt import Prompt
from edgespec.tui.transcript import Transcript
from edgespec.units import count

_MAX_ATTACHED_BYTES = 2**20
_MAX_IMPORTED_BYTES = 2**28


async def retry(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    require_model(app.client)
    number = _parse_question(app, argument)
    app.recorder.rewind_answers(number)
    app.query_one(Transcript).cut(number, keep_question=True)
    await app.answer()


async def continue_(app: ChatApp, _argument: str) -> None:
    app.activity.require_idle()
    await app.continue_answer()


async def edit(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    number = _parse_question(app, argument)
    question = app.recorder.rewind(number)
    app.query_one(Transcript).cut(number)
    app.query_one(Prompt).put(question)


async def undo(app: ChatApp, _argument: str) -> None:
    app.activity.require_idle()
    number = _parse_question(app, "")
    app.recorder.rewind(number)
    app.query_one(Transcript).cut(number)


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
        to = _parse_number(argument, count, f"there are branches 1 to {count}.", "For example: /branch 1") - 1
    if to != fork.at:
        await app.switch_branch(fork, to)
    app.mark_branches()
    await app.say(f"branch {to + 1 or '-'} of {count} {app.recorder.describe_place(fork)}")


async def attach(app: ChatApp, argument: str) -> None:
    path = parse_path(argument)
    text = _read(path, _MAX_ATTACHED_BYTES, "Attach only a part of it.")
    prompt = app.query_one(Prompt)
    fence = "`" * max(3, _measure_longest_fence(text) + 1)
    prompt.put(f"{prompt.text}{path.name}:\n{fence}{path.suffix.removeprefix('.')}\n{text.rstrip()}\n{fence}\n")


async def find(app: ChatApp, argument: str) -> None:
    if not app.query_one(Transcript).find(argument):
        raise InvalidRequest(f"'{argument}' is not on the screen.", hint="/history TEXT searches all conversations.")


async def copy(app: ChatApp, argument: str) -> None:
    texts = [turn.text for turn in app.recorder.turns if turn.role == "assistant" and turn.text]
    if app.activity.answer is not None and app.activity.answer.text:
        texts.append(app.activity.answer.text)
    if not texts:
        raise InvalidRequest("there is no answer to copy.", hint="Ask something first.")
    text = texts[-1]
    if argument:
        blocks = list_code_blocks(text)
        message = f"the answer has {len(blocks)} code blocks."
        text = blocks[_parse_number(argument, len(blocks), message, "/copy copies the whole answer.") - 1]
    app.copy_to_clipboard(text)
    await app.say(f"copied {len(text):,} characters")


async def new(app: ChatApp, _argument: str) -> None:
    app.activity.require_idle()
    app.recorder.start_new()
    await app.show_turns()
    await app.say("new conversation")


async def incognito(app: ChatApp, _argument: str) -> None:
    app.activity.require_idle()
    app.recorder.start_incognito(is_on=not app.is_incognito)
    await app.show_turns()
    told = (
        "new incognito conversation: nothing of it is saved" if app.is_incognito else "new conversation, which is saved"
    )
    await app.say(told)


async def history(app: ChatApp, argument: str) -> None:
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
    await app.say(f"renamed to {app.recorder.rename(argument)}")


async def export(app: ChatApp, argument: str, *, overwrite: bool = False) -> None:
    path, recorder = parse_path(argument), app.recorder
    if recorder.conversation is None:
        raise InvalidRequest("there is no conversation to export.", hint="Ask something first.")
    serialize = {".md": to_markdown, ".json": to_json}.get(path.suffix.lower())
    if serialize is None:
        raise InvalidRequest(f"'{path.name}' has no known format.", hint="Use a name that ends in .md or .json.")
    text = serialize(recorder.store, recorder.store.resume(recorder.conversation.id))
    write_file(path, text, overwrite=overwrite)
    await app.say(f"wrote {path}")


async def import_(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    path = parse_path(argument)
    read = from_json(_read(path, _MAX_IMPORTED_BYTES, "Import a smaller file."))
    app.recorder.show(app.recorder.store.insert(*read))
    await app.show_conversation()


async def save(app: ChatApp, argument: str, *, overwrite: bool = False) -> None:
    app.chat.save(parse_path(argument), overwrite=overwrite)
    await app.say(f"saved {count(len(app.chat.messages), 'message')}")


async def load(app: ChatApp, argument: str) -> None:
    app.activity.require_idle()
    app.chat.load(parse_path(argument))
    app.recorder.import_messages()
    await app.show_turns()
    await app.say(f"loaded {count(len(app.chat.messages), 'message')}")


def _parse_question(app: ChatApp, argument: str) -> int:
    """The number of a question, counted from 1; of the last one if `argument` is empty."""
    count = len(app.recorder.questions)
    if not count:
        raise InvalidRequest("there is no question yet.", hint="Ask something first.")
    if not argument:
        return count
    return _parse_number(argument, count, f"there are questions 1 to {count}.", "Each question starts with its number.")


def _parse_number(argument: str, limit: int, message: str, hint: str) -> int:
    """A number from 1 to `limit`. Raises InvalidRequest with `message` and `hint`."""
    number = int(argument) if argument.isdecimal() and len(argument) < 10 else 0
    if not 1 <= number <= limit:
        raise InvalidRequest(message, hint=hint)
    return number


def _read(path: Path, max_bytes: int, hint: str) -> str:
    """The text of a file. Raises InvalidRequest, with `hint` where it is larger than `max_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise InvalidRequest(f"{path} is larger than {max_bytes // 2**20} MiB.", hint=hint)
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}.", hint="Check the path.") from error
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise InvalidRequest(f"{path} is not a text file.", hint="Choose a text file.") from error


def _measure_longest_fence(text: str) -> int:
    """Length of the longest run of backticks at the start of a line."""
    return max((len(line) - len(line.lstrip("`")) for line in map(str.strip, text.splitlines())), default=0)
