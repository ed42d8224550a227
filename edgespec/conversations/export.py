"""Export of a conversation: Markdown of the current branch, and JSON of all branches, which can be imported."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from edgespec.conversations.database import Conversation, Turn
from edgespec.conversations.store import Store
from edgespec.errors import InvalidRequest, reason_of

_VERSION = 1
_VERSION_KEY = "edgespec_conversation"
_MAX_DEPTH = 16  # of JSON in spans, settings and metrics
_MAX_NUMBER = sys.float_info.max
_FENCE = re.compile(r"([ \t>]*)(`{3,}|~{3,})(.*)")


def to_markdown(store: Store, conversation: Conversation) -> str:
    """The current branch. Text is copied verbatim; an unclosed code block is closed. Raises CacheError."""
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
    """All branches as ASCII. Raises CacheError."""
    turns = [{k: v for k, v in asdict(turn).items() if k != "conversation"} for turn in store.turns(conversation)]
    state = {k: v for k, v in asdict(conversation).items() if k != "id"}
    return json.dumps({_VERSION_KEY: _VERSION, **state, "turns": turns}, indent=1) + "\n"


def from_json(text: str) -> tuple[Conversation, list[Turn]]:
    """Read the output of `to_json` for `Store.insert`; the ids are valid only within it.

    Raises InvalidRequest, which names the fault.
    """
    try:
        state = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"it is not JSON: {reason_of(error)}") from error
    if not isinstance(state, dict) or _VERSION_KEY not in state:
        raise _invalid(f"'{_VERSION_KEY}' is missing")
    if state[_VERSION_KEY] != _VERSION:
        raise _invalid(f"'{_VERSION_KEY}' is not {_VERSION}, the supported version")
    turns: dict[int, Turn] = {}
    for number, entry in enumerate(_get(state, "turns", list), 1):
        where = f"turn {number} of 'turns': "
        if not isinstance(entry, dict):
            raise _invalid(f"{where}it is not an object")
        turn = _parse_turn(entry, where)
        if turn.id in turns:
            raise _invalid(f"{where}the id {turn.id} occurs twice")
        if turn.parent is not None and turn.parent not in turns:
            raise _invalid(f"{where}the parent {turn.parent} is not an earlier turn")
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
        raise _invalid(f"the leaf {conversation.leaf} is not one of its turns")
    return conversation, list(turns.values())


def _parse_turn(entry: Mapping[str, Any], where: str) -> Turn:
    role, spans = _get(entry, "role", str, where=where), _get(entry, "spans", list, where=where)
    if role not in ("user", "assistant"):
        raise _invalid(f"{where}the role is neither user nor assistant")
    if not all(isinstance(span, list) for span in spans):
        raise _invalid(f"{where}'spans' is not a list of lists")
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
    """The value of `key`, which has one of the types `kinds`; numbers fit a finite float."""
    if key not in entry:
        raise _invalid(f"{where}'{key}' is missing")
    value = entry[key]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise _invalid(f"{where}'{key}' is not {' or '.join(_KINDS[kind] for kind in kinds)}")
    if key != "turns" and not _is_within_limits(value, _MAX_DEPTH):  # the values of each turn are checked separately
        raise _invalid(f"{where}'{key}' contains too large a number or is nested too deeply")
    return value


def _is_within_limits(value: Any, max_depth: int) -> bool:
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return max_depth > 0 and all(_is_within_limits(each, max_depth - 1) for each in inner)
    return not isinstance(value, int | float) or abs(value) <= _MAX_NUMBER


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _invalid(fault: str) -> InvalidRequest:
    return InvalidRequest(f"this is not an exported conversation: {fault}.", hint="Choose a file of /export.")


def _close_fence(text: str) -> str:
    """`text` without trailing blank lines, and with a closing fence if one is missing."""
    fence_open: tuple[str, str] | None = None
    for line in text.splitlines():
        if fence := _FENCE.match(line):
            indent, marks, rest = fence.groups()
            if fence_open is None:
                if marks[0] == "~" or "`" not in rest:
                    fence_open = indent, marks
            elif marks.startswith(fence_open[1]) and not rest.strip():
                fence_open = None
    text = text.rstrip()
    return text if fence_open is None else f"{text}\n{''.join(fence_open)}"
