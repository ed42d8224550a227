"""Finds what a chat template shows of a conversation, by rendering small ones with words that nothing else has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from edgespec.text.call_derivation import ANSWER, CALLS, IDS, NAMES, derive
from edgespec.text.call_format import CallFormat
from edgespec.text.known_formats import find_known_format
from edgespec.text.reasoning import ReasoningFormat, detect_format, make_block
from edgespec.text.writing import DESCRIBED, Messages, Writing, give_tools, write_messages

Render = Callable[[Sequence[tuple[Messages, Mapping[str, Any]]]], list[str | None]]
"""Renders conversations with variables; None for one that the template refuses, or at which it fails."""

_QUESTION, _FOLLOW_UP = "probequestion", "probefollowup"
_RESULTS = ("proberesulta", "proberesultb")
_REASONS = "probereasons"
_SYSTEM, _LATER = "probesystem", "probelater"
_LONG_ID = "call_probe0123456789"
_SCHEMA = {"type": "object", "properties": {"probegivenkey": {"type": "string", "description": "probe"}}}
_TOOL_NAMES = ("probegivena", "probegivenb")
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "probe", "parameters": _SCHEMA}}
    for name in _TOOL_NAMES
]
_USER = {"role": "user", "content": _QUESTION}
_AGAIN = {"role": "user", "content": _FOLLOW_UP}
_SWITCHES = ("enable_thinking", "thinking")
_LEVEL = "probelevel"
_KEYS = ("reasoning_content", "thinking", "reasoning")
_ONE = ({"probekey": "probevalue"},)
_TWO = ({"probekey": "probevalue"}, {"probekey": "probesecond"})


def _answer(
    text: str, arguments: Iterable[Mapping[str, Any]] = (), ids: Sequence[str] = IDS, **extra: Any
) -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": each}}
        for call_id, name, each in zip(ids, NAMES, arguments, strict=False)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **extra}


def _result(i: int, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id or IDS[i], "name": NAMES[i], "content": _RESULTS[i]}


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """What a template shows, and how its model writes.

    writing        how conversations are written for it
    call_format    how its model writes calls; None if the template does not tell
    reasoning      how its model writes reasoning; None without any
    shows_several  whether it shows several calls of one answer
    switches       variables that turn reasoning on and off
    has_levels     whether it follows levels of `reasoning_effort`
    can_level_off  whether the level "none" is one of them
    """

    writing: Writing = field(default_factory=Writing)
    call_format: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    shows_several: bool = False
    switches: tuple[str, ...] = ()
    has_levels: bool = False
    can_level_off: bool = False

    @property
    def calls(self) -> CallFormat:
        """How the model writes calls, or is asked to."""
        return self.call_format or DESCRIBED

    @property
    def header(self) -> str:
        """The text in front of an answer for the user; "" without any."""
        return self.reasoning.header if self.reasoning is not None else ""

    @property
    def tools(self) -> Literal["own", "described"]:
        """Whether the template shows tools, or a text describes them."""
        return "described" if self.writing.tools == "described" else "own"

    def describe(self) -> dict[str, str]:
        """What the template shows, in the words of docs/models.md."""
        writing = self.writing
        system = {"own": "yes", "first": "the first, later ones in user messages", "folded": "in user messages"}
        calls = "in the text of answers" if writing.calls == "text" else "several" if self.shows_several else "one each"
        form = self.call_format
        return {
            "system": system[writing.system],
            "tools": "described" if self.tools == "described" else "yes",
            "calls": calls,
            "results": "yes" if writing.results == "tool" else "in user messages",
            "reasoning": self.reasoning.name if self.reasoning is not None else "no",
            "format": "Hermes, as asked for" if form is None else (form.opening or "JSON").strip(),
        }

    @property
    def tools_notice(self) -> str:
        """A sentence for those who give tools that the model was not trained to use so; "" without one."""
        if self.tools == "described":
            return "the model's chat template has no tools: they are described in the system message."
        if self.call_format is None:
            return "the model's chat template does not tell how calls are written: they are asked for in Hermes' form."
        return ""


NO_TEMPLATE = TemplateProfile(Writing(tools="described", calls="text"))
"""The profile of a model without a chat template, whose messages are joined."""


def probe(source: str, render: Render) -> TemplateProfile:
    """The profile of the template `source`. One that fails at a probe has a profile with less in it."""
    answered, turns = render(
        [
            ([_USER, _answer(ANSWER)], {"add_generation_prompt": False}),
            ([_USER, _answer(ANSWER), _AGAIN], {"add_generation_prompt": False}),
        ]
    )
    writing = _find_tools(render, _find_system(render, _find_content(render)))
    writing, call_format = _find_calls(render, writing, _behind_answer(answered, turns))
    writing, reasoning = _find_reasoning(source, render, writing)
    (shown,) = _render(render, [[_USER]], writing)
    call_format = find_known_format(call_format, shown or "")
    (several,) = _render(render, [[_USER, _answer("", _TWO), _result(0), _result(1)]], writing)
    shows_several = writing.calls != "text" and _shows(several, *NAMES, "probevalue", "probesecond", *_RESULTS)
    return TemplateProfile(writing, call_format, reasoning, shows_several, *_find_switches(render, writing))


def _shows(text: str | None, *words: str) -> bool:
    return text is not None and all(word in text for word in words)


def _behind_answer(answered: str | None, turns: str | None) -> str:
    """The text between an answer and the next question."""
    if _shows(turns, ANSWER):
        return (turns or "").partition(ANSWER)[2].partition(_FOLLOW_UP)[0]
    return (answered or "").partition(ANSWER)[2]


def _render(
    render: Render, conversations: Iterable[Messages], writing: Writing, *, has_tools: bool = True, **variables: Any
) -> list[str | None]:
    """The conversations in this writing."""
    asked: list[tuple[Messages, Mapping[str, Any]]] = []
    for conversation in conversations:
        messages, given = give_tools(conversation, _TOOLS, writing, None) if has_tools else ([*conversation], {})
        asked.append((write_messages(messages, writing, None), {**given, **variables}))
    return render(asked)


def _find_content(render: Render) -> Writing:
    """The writing in which the text of a message is shown."""
    as_parts = Writing(content="parts")
    text, parts = (_render(render, [[_USER]], each, has_tools=False)[0] for each in (Writing(), as_parts))
    return as_parts if _shows(parts, _QUESTION) and not _shows(text, _QUESTION) else Writing()


def _find_system(render: Render, writing: Writing) -> Writing:
    """The writing in which system messages are shown, also later ones."""
    first = [{"role": "system", "content": _SYSTEM}, _USER]
    conversations = [first, [*first, _answer(ANSWER), {"role": "system", "content": _LATER}, _AGAIN]]
    for way in ("own", "first", "folded"):
        tried = replace(writing, system=way)
        one, both = _render(render, conversations, tried, has_tools=False)
        if _shows(one, _SYSTEM, _QUESTION) and _shows(both, _SYSTEM, _LATER, _FOLLOW_UP):
            return tried
    return writing


def _find_tools(render: Render, writing: Writing) -> Writing:
    for way in ("tools", "xml_tools", "functions", "message"):
        (shown,) = _render(render, [[_USER]], replace(writing, tools=way))
        if _shows(shown, *_TOOL_NAMES):
            return replace(writing, tools=way)
    return replace(writing, tools="described")


def _find_calls(render: Render, writing: Writing, behind_answer: str) -> tuple[Writing, CallFormat | None]:
    """The writing in which earlier calls and their results are shown, and the format of the calls."""
    shown: str | None = None
    forms: tuple[Literal["parsed", "text"], ...] = ("parsed", "text")
    for arguments, blank, is_short in product(forms, ("", None), (False, True)):
        tried = replace(writing, arguments=arguments, blank=blank, short_ids=is_short)
        (shown,) = _render(render, [[_USER, _answer("", _ONE, ids=(_LONG_ID,)), _result(0, _LONG_ID)]], tried)
        if _shows(shown, NAMES[0], "probekey", "probevalue"):
            break
    else:
        return _find_results(render, replace(writing, calls="text")), None
    writing = _find_results(render, tried)
    conversations = {name: [_USER, _answer("", arguments)] for name, arguments in CALLS.items()}
    conversations["said"] = [_USER, _answer(ANSWER, CALLS["strings"])]
    texts = _render(render, conversations.values(), writing, add_generation_prompt=False)
    rendered = {name: text for name, text in zip(conversations, texts, strict=True) if text is not None}
    (opened,) = _render(render, [[_USER]], writing)
    return writing, derive(rendered, opened or "", behind_answer)


def _find_results(render: Render, writing: Writing) -> Writing:
    (shown,) = _render(render, [[_USER, _answer("", _ONE), _result(0)]], writing)
    return writing if _shows(shown, _RESULTS[0]) else replace(writing, results="user")


def _find_switches(render: Render, writing: Writing) -> tuple[tuple[str, ...], bool, bool]:
    """The variables that turn reasoning on and off, whether there are levels, and whether one turns it off."""
    switches: list[str] = []
    for name in _SWITCHES:
        on, off = (_render(render, [[_USER]], writing, has_tools=False, **{name: value})[0] for value in (True, False))
        if on != off and None not in (on, off):
            switches.append(name)
    low, high, none, other = (
        (_render(render, [[_USER]], writing, has_tools=False, reasoning_effort=level)[0] or "")
        for level in ("low", "high", "none", _LEVEL)
    )
    # A template that prints whatever level it gets does not turn reasoning off.
    return tuple(switches), low != high, bool(none) and none not in (other, other.replace(_LEVEL, "none"))


_TAG = r"(?:<[^<>\s]+>|\[[A-Z_]+\])"
_OPENING, _CLOSING = re.compile(rf"({_TAG}\s*)$"), re.compile(r"^(\s*</?[^<>\s]+>|\s*\[/[A-Z_]+\])")


def _find_reasoning(source: str, render: Render, writing: Writing) -> tuple[Writing, ReasoningFormat | None]:
    """The writing in which the reasoning before calls or of the last answer is shown, and the format of reasoning."""
    opened = _render(render, [[_USER], [_USER, _answer(ANSWER), _AGAIN]], writing)
    for key in _KEYS:
        tried = replace(writing, reasoning=key)
        conversations = [
            [_USER, _answer(ANSWER, reasoning_content=_REASONS)],
            [_USER, _answer("", _ONE, reasoning_content=_REASONS), _result(0)],
        ]
        for shown in _render(render, conversations, tried, add_generation_prompt=False):
            if shown is not None and _REASONS in shown:
                found = detect_format("".join(filter(None, (shown, *opened))))
                return tried, found or _derive_block(*shown.split(_REASONS)[:2])
    return writing, detect_format("".join(filter(None, opened))) or detect_format(source)


def _derive_block(before: str, after: str) -> ReasoningFormat | None:
    """Reasoning between the tags around it."""
    opening, closing = _OPENING.search(before), _CLOSING.match(after)
    return make_block("derived", opening[1], closing[1].strip()) if opening and closing else None
