"""Export of a conversation: Markdown of the current branch, and JSON of all branches, which can be imported."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass

from edgespec.chat.conversation import Conversation, Turn
from edgespec.chat.store import Store
from edgespec.errors import InvalidRequest, reason_of

_VERSION = 1
_VERSION_KEY = "edgespec_conversation"


def to_markdown(store: Store, conversation: Conversation) -> str:
    """The current branch as Markdown. Text is copied verbatim; an unclosed code block is closed. Raises CacheError."""
    parts = [f"# {conversation.title}", f"Model: {conversation.model}"]
    if conversation.system:
        parts += ["## System", _close_fence(conversation.system)]
    for turn in store.path(conversation.leaf):
        parts.append(f"## {turn.role.capitalize()}")
        if turn.reasoning.strip():
            parts += ["<details><summary>Reasoning</summary>", _close_fence(turn.reasoning), "</details>"]
        parts.append(_close_fence(turn.text))
    return "\n\n".join(part for part in parts if part) + "\n"


def to_json(store: Store, conversation: Conversation) -> str:
    """All branches as JSON, in ASCII. Raises CacheError."""
    turns = [{k: v for k, v in asdict(turn).items() if k != "conversation"} for turn in store.turns(conversation)]
    state = {k: v for k, v in asdict(conversation).items() if k != "id"}
    return json.dumps({_VERSION_KEY: _VERSION, **state, "turns": turns}, indent=1) + "\n"


@dataclass
class _Exported:
    conversation: Conversation
    turns: list[Turn]


def from_json(text: str) -> tuple[Conversation, list[Turn]]:
    """Read the output of `to_json` for `Store.insert`; the ids are valid only within it.

    Raises InvalidRequest, which names the fault.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        state = json.loads(text, parse_constant=_read_number, parse_float=_read_number, parse_int=_read_integer)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith(("{", "[")):
            raise _invalid("it is another kind of file") from error
        raise _invalid(f"it is not JSON: {reason_of(error)}") from error
    if not isinstance(state, dict) or state.get(_VERSION_KEY) != _VERSION:
        raise _invalid(f"'{_VERSION_KEY}' is not {_VERSION}, the supported version")
    turns = state.get("turns")
    if isinstance(turns, list):
        turns = [{**turn, "conversation": 0} if isinstance(turn, dict) else turn for turn in turns]
    try:
        read = TypeAdapter(_Exported).validate_python({"conversation": {**state, "id": 0}, "turns": turns})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])).removeprefix("conversation.")  # whose fields are the file's own
        if first["type"] == "missing":
            raise _invalid(f"'{place}' is missing") from error
        raise _invalid(f"{place}: {first['msg']}") from error
    known: set[int | None] = {None}
    for turn in read.turns:
        if turn.id in known:
            raise _invalid(f"the id {turn.id} occurs twice")
        if turn.parent not in known:
            raise _invalid(f"the parent {turn.parent} is not an earlier turn")
        if not all(isinstance(span, list) for span in turn.spans):
            raise _invalid(f"the spans of turn {turn.id} are not lists")
        known.add(turn.id)
    if read.conversation.leaf not in known:
        raise _invalid(f"the leaf {read.conversation.leaf} is not one of its turns")
    return read.conversation, read.turns


def _read_number(text: str) -> float:
    """A number that metrics can be computed with. Raises ValueError."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a number")
    return value


def _read_integer(text: str) -> int:
    _read_number(text)
    return int(text)


def _invalid(fault: str) -> InvalidRequest:
    return InvalidRequest(f"this is not an exported conversation: {fault}.", hint="/export FILE.json writes one.")


_FENCE = re.compile(r"([ \t>]*)(`{3,}|~{3,})(.*)")


def _close_fence(text: str) -> str:
    """`text` without trailing blank lines, and with a closing fence if it ends in a block of code."""
    is_open: tuple[str, str] | None = None  # the fence: what stands before its marks, and the marks
    for line in text.splitlines():
        if fence := _FENCE.match(line):
            indent, marks, rest = fence.groups()
            if is_open is None:
                if marks[0] == "~" or "`" not in rest:
                    is_open = indent, marks
            elif marks.startswith(is_open[1]) and not rest.strip():
                is_open = None
    text = text.rstrip()
    return text if is_open is None else f"{text}\n{''.join(is_open)}"
