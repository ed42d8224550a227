"""A conversation as text: Markdown of its current branch, and JSON of all of it that can be read back."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from edgespec.conversations.model import Conversation, Turn
from edgespec.conversations.store import Store
from edgespec.errors import InvalidRequest, reason_of

_FORM = 1
_FORM_KEY = "edgespec_conversation"
_DEEPEST = 16  # JSON inside spans, settings and metrics
_LARGEST = sys.float_info.max
_FENCE = re.compile(r"([ \t>]*)(`{3,}|~{3,})(.*)")


def to_markdown(store: Store, conversation: Conversation) -> str:
    """The current branch, each text as it is; a code block that an answer left open is closed. Raises CacheError."""
    parts = [f"# {conversation.title}", f"Model: {conversation.model}"]
    if conversation.system:
        parts += ["## System", _closed(conversation.system)]
    for turn in store.path(conversation.leaf):
        parts.append(f"## {turn.role.capitalize()}")
        if turn.reasoning.strip():
            parts += ["<details><summary>Reasoning</summary>", _closed(turn.reasoning), "</details>"]
        parts.append(_closed(turn.text))
    return "\n\n".join(part for part in parts if part) + "\n"


def to_json(store: Store, conversation: Conversation) -> str:
    """All branches, in ASCII. Raises CacheError."""
    turns = [{k: v for k, v in asdict(turn).items() if k != "conversation"} for turn in store.turns(conversation)]
    state = {k: v for k, v in asdict(conversation).items() if k != "id"}
    return json.dumps({_FORM_KEY: _FORM, **state, "turns": turns}, indent=1) + "\n"


def from_json(text: str) -> tuple[Conversation, list[Turn]]:
    """What `to_json` wrote, for `Store.insert`, with ids that hold inside it alone.

    Raises InvalidRequest, which names what is wrong.
    """
    try:
        state = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON: {reason_of(error)}") from error
    if not isinstance(state, dict) or _FORM_KEY not in state:
        raise _wrong(f"'{_FORM_KEY}' is missing")
    if state[_FORM_KEY] != _FORM:
        raise _wrong(f"'{_FORM_KEY}' is not {_FORM}, the form that can be read")
    turns: dict[int, Turn] = {}
    for number, entry in enumerate(_get(state, "turns", list), 1):
        where = f"turn {number} of 'turns': "
        if not isinstance(entry, dict):
            raise _wrong(f"{where}it is not an object")
        turn = _turn(entry, where)
        if turn.id in turns:
            raise _wrong(f"{where}the id {turn.id} is there twice")
        if turn.parent is not None and turn.parent not in turns:
            raise _wrong(f"{where}the parent {turn.parent} is no turn before it")
        turns[turn.id] = turn
    conversation = Conversation(
        0,
        _get(state, "title", str),
        _get(state, "renamed", bool),
        _get(state, "model", str),
        _get(state, "system", str, type(None)),
        _get(state, "leaf", int, type(None)),
        float(_get(state, "created", int, float)),
        float(_get(state, "changed", int, float)),
    )
    if conversation.leaf is not None and conversation.leaf not in turns:
        raise _wrong(f"the leaf {conversation.leaf} is none of its turns")
    return conversation, list(turns.values())


def _turn(entry: Mapping[str, Any], where: str) -> Turn:
    role, spans = _get(entry, "role", str, where=where), _get(entry, "spans", list, where=where)
    if role not in ("user", "assistant"):
        raise _wrong(f"{where}the role is neither user nor assistant")
    if not all(isinstance(span, list) for span in spans):
        raise _wrong(f"{where}'spans' is not a list of lists")
    return Turn(
        _get(entry, "id", int, where=where),
        0,
        _get(entry, "parent", int, type(None), where=where),
        role,
        _get(entry, "text", str, where=where),
        _get(entry, "reasoning", str, where=where),
        spans,
        _get(entry, "settings", dict, where=where),
        _get(entry, "metrics", dict, where=where),
        _get(entry, "finished", bool, where=where),
        float(_get(entry, "created", int, float, where=where)),
    )


_KINDS = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object",
    type(None): "null",
}  # fmt: skip


def _get(entry: Mapping[str, Any], key: str, *kinds: type, where: str = "") -> Any:
    """The value of `key`, of one of `kinds`; numbers are finite, also as floats."""
    if key not in entry:
        raise _wrong(f"{where}'{key}' is missing")
    value = entry[key]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise _wrong(f"{where}'{key}' is not {' or '.join(_KINDS[kind] for kind in kinds)}")
    if key != "turns" and not _is_moderate(value, _DEEPEST):  # each turn's values are looked at by themselves
        raise _wrong(f"{where}'{key}' has a number too large, or is nested too deep")
    return value


def _is_moderate(value: Any, deepest: int) -> bool:
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return deepest > 0 and all(_is_moderate(each, deepest - 1) for each in inner)
    return not isinstance(value, int | float) or abs(value) <= _LARGEST


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"this is not an exported conversation: {what}.", hint="Choose a file that export wrote.")


def _closed(text: str) -> str:
    """`text` without blank lines at its end, and with a fence where one is missing."""
    opened: tuple[str, str] | None = None
    for line in text.splitlines():
        if fence := _FENCE.match(line):
            indent, marks, rest = fence.groups()
            if opened is None:
                if marks[0] == "~" or "`" not in rest:
                    opened = indent, marks
            elif marks.startswith(opened[1]) and not rest.strip():
                opened = None
    text = text.rstrip()
    return text if opened is None else f"{text}\n{''.join(opened)}"
