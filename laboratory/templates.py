"""Render conversations with each chat template of a folder, and read calls as it writes them.

    uv run python -m laboratory.templates FOLDER [--table]

A line for each template names the conversations that are refused or lose a part, and the calls that are not read back.
--table prints the table of docs/models.md instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from edgespec.errors import InvalidRequest, TemplateError
from edgespec.text.chat_template import ChatTemplate, Message
from edgespec.text.harmony import Thought
from edgespec.text.known_formats import HARMONY
from edgespec.text.readers import make_reader
from edgespec.text.reasoning import ReasoningSplitter
from edgespec.text.template_probe import TemplateProfile
from edgespec.text.tool_calls import AnswerPart, CallEnd

BOS, EOS = "<|lab_bos|>", "<|lab_eos|>"
_CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool", "parameters": _CITY}}
    for name in ("get_weather", "add")
]


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _answer(text: str, *calls: dict[str, Any], **extra: Any) -> Message:
    return Message("assistant", text, {**({"tool_calls": list(calls)} if calls else {}), **extra})


def _result(call_id: str, text: str) -> Message:
    return Message("tool", text, {"tool_call_id": call_id})


SYSTEM, QUESTION, MORE = (
    Message("system", "SYSTEMGIRAFFE."),
    Message("user", "QUESTIONZEBRA?"),
    Message("user", "LION?"),
)
_FIRST = _call("call_abc123", "get_weather", {"city": "CITYPANDA", "days": 3})
_SECOND = _call("call_def456", "add", {"city": "CITYSWAN"})
ROUND = (QUESTION, _answer("", _FIRST), _result("call_abc123", "RESULTOTTER"))

# Conversations, whether there are tools, and the words that a prompt must have.
CONVERSATIONS: Mapping[str, tuple[tuple[Message, ...], bool, tuple[str, ...]]] = {
    "user": ((QUESTION,), False, ("QUESTIONZEBRA",)),
    "system": ((SYSTEM, QUESTION), False, ("SYSTEMGIRAFFE", "QUESTIONZEBRA")),
    "turns": ((QUESTION, _answer("ANSWERTIGER."), MORE), False, ("QUESTIONZEBRA", "ANSWERTIGER", "LION")),
    "later system": (
        (SYSTEM, QUESTION, _answer("ANSWERTIGER."), Message("system", "LATERMOOSE."), MORE),
        False,
        ("SYSTEMGIRAFFE", "LATERMOOSE", "LION"),
    ),
    "tools": ((SYSTEM, QUESTION), True, ("SYSTEMGIRAFFE", "QUESTIONZEBRA", "get_weather", "add")),
    "call": (ROUND, True, ("QUESTIONZEBRA", "CITYPANDA", "RESULTOTTER")),
    "several": (
        (QUESTION, _answer("", _FIRST, _SECOND), _result("call_abc123", "RESULTOTTER"), _result("call_def456", "SEAL")),
        True,
        ("CITYPANDA", "CITYSWAN", "RESULTOTTER", "SEAL"),
    ),
    "text and call": (
        (QUESTION, _answer("ANSWERTIGER.", _FIRST), _result("call_abc123", "RESULTOTTER"), _answer("DONE."), MORE),
        True,
        ("ANSWERTIGER", "CITYPANDA", "RESULTOTTER", "DONE", "LION"),
    ),
    "call without arguments": (
        (QUESTION, _answer("", _call("call_abc123", "add", {})), _result("call_abc123", "RESULTOTTER")),
        True,
        ("RESULTOTTER",),
    ),
    "cut call": (
        (QUESTION, _answer("", _call("call_abc123", "add", '{"city": "CITYP')), _result("call_abc123", "RESULTOTTER")),
        True,
        ("CITYP", "RESULTOTTER"),
    ),
    "reasoning": (
        (QUESTION, _answer("ANSWERTIGER.", reasoning_content="THOUGHTWOLF"), MORE),
        False,
        ("ANSWERTIGER", "LION"),
    ),
    "reasoning before a call": (
        (QUESTION, _answer("", _FIRST, reasoning_content="THOUGHTWOLF"), _result("call_abc123", "RESULTOTTER")),
        True,
        ("CITYPANDA", "RESULTOTTER"),
    ),
}


def find_fault(template: ChatTemplate, name: str) -> str:
    """Why a conversation is refused, or what of it the prompt has lost; "" for nothing."""
    messages, has_tools, words = CONVERSATIONS[name]
    try:
        prompt = template.render(messages, variables={"tools": TOOLS} if has_tools else {})
    except (InvalidRequest, TemplateError) as error:
        return f"refused: {error}"
    missing = [word for word in words if word not in prompt]
    return f"lost: {', '.join(missing)}" if missing else ""


ARGUMENTS: Mapping[str, dict[str, Any]] = {
    "text and number": {"city": "Paris", "days": 3},
    "none": {},
    "nested": {"place": {"at": {"list": [1, 2, {"deep": "x"}]}}, "names": ["x", "y"]},
    "numbers": {"a": 1, "b": -2.5, "c": 1e6},
    "booleans and null": {"yes": True, "no": False, "none": None},
    "quotes": {"s": "a \"double\" 'single' \\ back"},
    "braces": {"s": "{x} [y] (z) }]"},
    "line breaks": {"s": "one\ntwo\n\n  three\n"},
    "other scripts": {"s": "Grüße 日本 🎉"},
    "markup": {"s": "<b>bold</b> & <i>"},
}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def make_schema(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of these arguments."""
    properties = {key: {"type": _TYPES.get(type(value), "null")} for key, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(arguments)}


def write_answer(
    template: ChatTemplate, arguments: Sequence[Mapping[str, Any]], text: str = "", reasoning: str = ""
) -> str | None:
    """An answer that calls tool_0, tool_1 and so on, as the template writes it; None where it does not."""
    return write_turn(template, [(f"tool_{i}", each) for i, each in enumerate(arguments)], text, reasoning)


def write_turn(
    template: ChatTemplate, called: Sequence[tuple[str, Mapping[str, Any]]], text: str = "", reasoning: str = ""
) -> str | None:
    """An answer with calls, of which there are names and arguments, as the template writes it, up to the end of the
    turn; None where it does not.
    """
    calls = [_call(f"abcdefg{i:02}", name, dict(arguments)) for i, (name, arguments) in enumerate(called)]
    extra = {"reasoning_content": reasoning} if reasoning else {}
    closed = {"tools": TOOLS, "add_generation_prompt": False}
    try:
        opened = template.render([QUESTION], variables={"tools": TOOLS})
        whole = template.render([QUESTION, _answer(text, *calls, **extra)], variables=closed)
        plain = template.render([QUESTION, _answer("ANSWERTIGER."), MORE], variables=closed)
    except (InvalidRequest, TemplateError):
        return None
    at = whole.index(QUESTION.content) + len(QUESTION.content)
    behind_question = opened[opened.index(QUESTION.content) + len(QUESTION.content) :]
    shared = 0
    while shared < len(behind_question) and whole[at + shared : at + shared + 1] == behind_question[shared]:
        shared += 1
    start = at + shared
    if whole.rfind("<", at, start) > whole.rfind(">", at, start):
        start = whole.rindex("<", at, start)
    opening = template.profile.calls.opening
    if opening and not text and not reasoning and opening in whole[at:]:
        start = whole.index(opening, at)
    answer = whole[start:]
    last = called[-1][0] if called else ""
    return _end_turn(template.profile, answer, plain.partition("ANSWERTIGER.")[2], last)


def _end_turn(profile: TemplateProfile, answer: str, behind: str, last: str) -> str:
    """`answer`, whose last call is one of the tool `last`, without what ends the turn."""
    own = "".join(profile.calls.visible)
    tags = [tag for tag in re.findall(r"<[^<>]*>|\[[^\[\]\s]*[\[\]]", behind) if tag not in own]
    last_call = answer.find(profile.calls.closing or "}", answer.rfind(last))
    ends = [answer.find(tag, max(0, last_call)) for tag in (*tags, EOS, "<|eom_id|>", "<|tool_response>")]
    return answer[: min((end for end in ends if end >= 0), default=len(answer))]


def read_answer(
    template: ChatTemplate, text: str, schemas: Mapping[str, Mapping[str, Any]], cuts: Sequence[int]
) -> tuple[list[tuple[str, str]], str, str]:
    """(calls with their arguments, text, reasoning) of an answer that arrives in pieces cut at these places."""
    profile, form = template.profile, template.profile.reasoning
    begin = form.begin if form is not None and not text.startswith(profile.calls.opening or " ") else "answer"
    if form is not None and any(text.lstrip().startswith(mark) for mark in form.states["reasoning"].markers):
        begin = "reasoning"  # templates end an empty reasoning that the prompt has begun
    splitter = ReasoningSplitter(form, begin)
    shows_markers = profile.calls == HARMONY
    reader = make_reader(profile.calls, schemas)
    found: list[AnswerPart | Thought] = []
    said: list[str] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        if shows_markers:
            found += reader.push(text[start:end])
            continue
        for segment in splitter.push(text[start:end]):
            said += [segment.text] if segment.channel == "reasoning" else []
            found += reader.push(segment.text) if segment.channel == "answer" else []
    if not shows_markers:
        for segment in splitter.finish():
            found += reader.push(segment.text) if segment.channel == "answer" else []
    found += reader.finish()
    calls = [(each.call.name, each.call.arguments) for each in found if isinstance(each, CallEnd) and not each.is_cut]
    thoughts = said + [each.text for each in found if isinstance(each, Thought)]
    return calls, "".join(each for each in found if isinstance(each, str)), "".join(thoughts)


def find_misread(template: ChatTemplate, name: str, *, n: int = 1, text: str = "", reasoning: str = "") -> str:
    """How an answer with `n` calls with ARGUMENTS[name] is read wrongly; "" where it is read as it was written."""
    arguments = [ARGUMENTS[name]] * n
    if (answer := write_answer(template, arguments, text, reasoning)) is None:
        return "not written"
    schemas = {f"tool_{i}": make_schema(each) for i, each in enumerate(arguments)}
    wanted = [(f"tool_{i}", each) for i, each in enumerate(arguments)]
    for cuts in ([], [*range(1, len(answer))], *([at] for at in range(1, len(answer), 7))):
        calls, said, _ = read_answer(template, answer, schemas, cuts)
        try:
            read = [(tool, json.loads(found)) for tool, found in calls]
        except ValueError:
            read = []
        if read != wanted or said.strip() != text:
            return f"{answer!r} is read as {calls} and {said!r}"
    return ""


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--table", is_flag=True, help="Print the table of what each template shows.")
def main(folder: Path, table: bool) -> None:
    if table:
        heads = ["template", *TemplateProfile().describe()]
        click.echo(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for path in sorted(folder.glob("*.jinja")):
        template = ChatTemplate(path.read_text(encoding="utf-8"), BOS, EOS)
        cells = _quote_cells(template.profile) if table else _list_faults(template) or ["sound"]
        click.echo(f"| {' | '.join([path.stem, *cells])} |")


def _quote_cells(profile: TemplateProfile) -> list[str]:
    *cells, written = profile.describe().values()
    return [*cells, f"`{written}`".replace("|", "\\|").replace("\n", " ")]


def _list_faults(template: ChatTemplate) -> list[str]:
    faults = [f"{name}: {fault}" for name in CONVERSATIONS if (fault := find_fault(template, name))]
    faults += [f"read {name}: {fault}" for name in ARGUMENTS if (fault := find_misread(template, name))]
    if template.profile.shows_several:
        faults += [f"two {name}: {fault}" for name in ARGUMENTS if (fault := find_misread(template, name, n=2))]
    return faults


if __name__ == "__main__":
    main()
