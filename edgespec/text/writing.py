"""Rewrites a conversation into a form of which a chat template shows all parts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgespec.text.call_format import CallFormat, JsonArguments
from edgespec.text.call_writer import write_calls
from edgespec.text.tool_calls import load_json

Messages = Sequence[Mapping[str, Any]]

DESCRIBED = CallFormat("", '<tool_call>\n{"name": "', '", "arguments": ', JsonArguments(), "}\n</tool_call>", "\n")
"""The format in which models are asked to write calls whose template has no tools: that of Hermes and Qwen."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How the messages of a conversation are given to a template.

    system     system messages; own: as they are, first: later ones within user messages, folded: all of them so
    tools      the variable that holds the tools; 'message': the system message has them; 'described': its text does
    calls      calls of earlier answers; own: as they are, one each: a message for each, apart: in a message of
               their own behind the text, text: written into the text
    arguments  arguments of calls: parsed, or as JSON text
    results    what tools said: in messages of tools, or in those of users
    content    texts: as they are, or as lists of parts
    blank      the text of an answer that has calls alone
    reasoning  the key that holds the reasoning of earlier answers
    short_ids  whether ids of calls have nine letters and digits, as Mistral's templates demand
    is_merged  whether messages of one role in a row are one message
    """

    system: Literal["own", "first", "folded"] = "own"
    tools: Literal["tools", "xml_tools", "functions", "message", "described"] = "tools"
    calls: Literal["own", "one each", "apart", "text"] = "own"
    arguments: Literal["parsed", "text"] = "parsed"
    results: Literal["tool", "user"] = "tool"
    content: Literal["text", "parts"] = "text"
    blank: str | None = ""
    reasoning: str = "reasoning_content"
    short_ids: bool = False
    is_merged: bool = False

    def variations(self) -> Iterator[Writing]:
        """Other ways to write a conversation of which this one loses a part, the nearest first."""
        yield replace(self, system="first")
        yield replace(self, system="folded")
        for calls in ("one each", "apart", "text"):
            yield replace(self, calls=calls)
            yield replace(self, calls=calls, results="user")
        for calls in (self.calls, "text"):
            yield replace(self, calls=calls, results="user", system="folded", is_merged=True)


def write_messages(messages: Messages, writing: Writing, call_format: CallFormat | None) -> list[dict[str, Any]]:
    """`messages`, which have parsed arguments and their reasoning as `reasoning_content`, in this writing."""
    written = [_write_turn(dict(message), writing, call_format) for message in messages]
    out = [message for turn in written for message in turn]
    if writing.system != "own":
        first = 1 if writing.system == "first" else 0
        out = [*out[:first], *_fold_system(out[first:])]
    if writing.is_merged:
        out = _merge(out)
    if writing.content == "parts":
        out = [
            {**each, "content": [{"type": "text", "text": each["content"]}]} if each["content"] is not None else each
            for each in out
        ]
    return out


def _write_turn(message: dict[str, Any], writing: Writing, call_format: CallFormat | None) -> list[dict[str, Any]]:
    """The messages that stand for `message` in this writing."""
    if writing.short_ids and "tool_call_id" in message:
        message["tool_call_id"] = shorten_id(message["tool_call_id"])
    if message["role"] == "tool" and writing.results == "user":
        return [{"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}]
    if "reasoning_content" in message:
        message[writing.reasoning] = message.pop("reasoning_content")
    if not (calls := message.get("tool_calls")) or not all(map(_is_call, calls)):
        return [message]
    calls = [_write_call(call, writing) for call in calls]
    if writing.calls == "text":
        del message["tool_calls"]
        text = write_calls(call_format or DESCRIBED, calls)
        return [message | {"content": f"{message['content']}\n{text}" if message["content"] else text}]
    if writing.arguments == "text":
        calls = [_with_arguments(call, json.dumps(_arguments(call), ensure_ascii=False)) for call in calls]
    blank = message | {"content": writing.blank}
    if writing.calls == "apart" and message["content"]:
        said = {key: value for key, value in message.items() if key not in ("tool_calls", writing.reasoning)}
        return [said, blank | {"tool_calls": calls}]
    if writing.calls == "one each":
        first = message | {"tool_calls": calls[:1]}
        rest = [{"role": message["role"], "content": writing.blank, "tool_calls": [call]} for call in calls[1:]]
        return [first if message["content"] else blank | {"tool_calls": calls[:1]}, *rest]
    return [(message if message["content"] else blank) | {"tool_calls": calls}]


def _arguments(call: Mapping[str, Any]) -> Any:
    return call["function"]["arguments"]


def _with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _write_call(call: Mapping[str, Any], writing: Writing) -> dict[str, Any]:
    """A call whose arguments are an object, whatever the client sent, and whose id the template accepts."""
    arguments = _arguments(call)
    if isinstance(arguments, str):
        arguments = load_json(arguments, arguments)
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments in ("", None) else {"input": arguments}
    call = _with_arguments(call, arguments)
    return call | {"id": shorten_id(call["id"])} if writing.short_ids and call.get("id") else call


_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def shorten_id(call_id: str) -> str:
    """Nine letters and digits, the same ones each time; the id itself if it has that form."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _is_call(call: Any) -> bool:
    """Whether a call has the form of OpenAI's chat interface. Those of another form stay as they are."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and "arguments" in function


def complete_calls(messages: Messages) -> list[dict[str, Any]]:
    """`messages` with an id for each call that has none, and the id and the name of the call in each result."""
    completed: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        made = dict(message)
        if (calls := made.get("tool_calls")) and all(map(_is_call, calls)):
            ids = [str(call.get("id") or f"call{number:04d}{i % 10}") for i, call in enumerate(calls)]
            made["tool_calls"] = [{**call, "id": call_id} for call, call_id in zip(calls, ids, strict=True)]
            names |= {call_id: call["function"]["name"] for call, call_id in zip(calls, ids, strict=True)}
            unanswered = ids
        elif made["role"] == "tool":
            if not made.get("tool_call_id"):
                by_name = [call_id for call_id in unanswered if names[call_id] == made.get("name")]
                made["tool_call_id"] = next(iter(by_name or unanswered), "call00000")
            unanswered = [call_id for call_id in unanswered if call_id != made["tool_call_id"]]
            if not made.get("name") and made["tool_call_id"] in names:
                made["name"] = names[made["tool_call_id"]]
        completed.append(made)
    return completed


def find_lost(messages: Messages, prompt: str) -> list[str]:
    """The texts of messages that are not in a prompt. Blanks may have changed, and templates write some as JSON."""
    lost: list[str] = []
    at = 0
    bare: str | None = None
    for number, message in enumerate(messages, 1):
        text = (message["content"] or "").strip()
        if message["role"] == "assistant":
            text = _REASONED.sub("", text).strip()
        found = prompt.find(text, at)
        if found < 0 and (found := prompt.find(text)) < 0 and json.dumps(text, ensure_ascii=False)[1:-1] not in prompt:
            bare = _strip_blanks(prompt) if bare is None else bare
            if _strip_blanks(text) not in bare:
                lost.append(f"the text of message {number}")
        at = max(at, found + len(text))
    return lost


_REASONED = re.compile(r"^.*</\w*think\w*>", re.DOTALL)  # reasoning within an earlier answer, which templates drop


def _strip_blanks(text: str) -> str:
    return "".join(text.split())


def _fold_system(messages: Messages) -> list[dict[str, Any]]:
    """`messages` with each system message at the end of the user message before it, else in front of the one after it,
    else as a user message.
    """
    folded: list[dict[str, Any]] = []
    is_open = False  # whether the last one is of system messages alone
    for message in messages:
        is_system, last = message["role"] == "system", folded[-1] if folded else None
        if last is not None and last["role"] == "user" and (is_system or (is_open and message["role"] == "user")):
            base = last if is_system else message
            folded[-1] = {**base, "content": f"{last['content']}\n\n{message['content']}"}
            is_open = is_open and is_system
        else:
            folded.append({**message, "role": "user"} if is_system else dict(message))
            is_open = is_system
    return folded


def _merge(messages: Messages) -> list[dict[str, Any]]:
    """`messages` with those of one role in a row as one; those with calls stay apart."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last["role"] == message["role"]
            and not {"tool_calls", "tool_call_id"} & {*last, *message}
        ):
            texts = [each["content"] for each in (last, message) if each["content"]]
            merged[-1] = {**last, "content": "\n\n".join(texts)}
        else:
            merged.append(dict(message))
    return merged


_FORM = (
    "write a JSON object with its name and arguments between tags:\n"
    '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
)
_EXAMPLE = {"function": {"name": "NAME", "arguments": {"KEY": "VALUE"}}}


def describe_tools(tools: Sequence[Mapping[str, Any]], call_format: CallFormat | None) -> str:
    """A system text that describes tools to a model whose template does not. It asks for calls in `call_format`, which
    is the one that the template shows of earlier calls, or in DESCRIBED if it shows none.
    """
    if call_format is None or call_format == DESCRIBED:
        form = _FORM
    else:
        form = f"write it like this one:\n{write_calls(call_format, [_EXAMPLE])}"
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. Their signatures, one JSON object a line:\n<tools>\n"
        f"{listed}\n</tools>\n"
        f"To call one, {form}"
    )


def give_tools(
    messages: Messages, tools: Sequence[Mapping[str, Any]], writing: Writing, call_format: CallFormat | None
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """The messages and the variables by which a template gets to know of `tools`, whose calls are in `call_format`."""
    if writing.tools in ("tools", "xml_tools"):
        return [*messages], {writing.tools: tools}
    if writing.tools in ("functions", "message"):
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        if writing.tools == "functions":
            return [*messages], {"functions": functions}
        return _extend_system(messages, {"tools": functions}), {}
    return _extend_system(messages, {}, describe_tools(tools, call_format)), {}


def _extend_system(messages: Messages, extra: Mapping[str, Any], text: str = "") -> list[Mapping[str, Any]]:
    """The messages with keys and a text more in the system message, which is added if there is none."""
    if messages and messages[0]["role"] == "system":
        content = messages[0]["content"]
        return [{**messages[0], **extra, "content": f"{content}\n\n{text}" if text else content}, *messages[1:]]
    return [{"role": "system", "content": text, **extra}, *messages]


def list_turns(messages: Messages) -> frozenset[tuple[object, ...]]:
    """The pairs of kinds of messages that follow one another: what a template shows depends on them."""
    kinds = [
        (
            message["role"],
            bool(message["content"]),
            min(2, len(message.get("tool_calls") or ())),
            any(not _is_call(call) or not _arguments(call) for call in message.get("tool_calls") or ()),
            bool(message.get("reasoning_content")),
        )
        for message in messages
    ]
    return frozenset(zip(("start", *kinds), (*kinds, "end"), strict=True))


def make_skeleton(messages: Messages) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The conversation with a word of its own in place of each text, name and argument, by which one can see what of it
    a template shows; and what each word stands for.

    Empty texts, roles and ids stay, since templates look at them.
    """
    words: dict[str, str] = {}

    def word(meaning: str) -> str:
        made = f"probe{len(words):04d}x"
        words[made] = meaning
        return made

    names: dict[str, str] = {}
    skeleton: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        made = dict(message)
        if message["content"]:
            kind = {"tool": "result", "system": "system message"}.get(message["role"], "text")
            made["content"] = word(f"the {kind} of message {number}")
        if message.get("reasoning_content"):
            made["reasoning_content"] = "probereasoning"
        if (calls := message.get("tool_calls")) and all(map(_is_call, calls)):
            made["tool_calls"] = []
            for call in calls:
                name = word(f"the name of a call in message {number}")
                names[str(call.get("id"))] = name
                arguments = (
                    {"probekey": word(f"the arguments of a call in message {number}")} if _arguments(call) else {}
                )
                function = {**call["function"], "name": name, "arguments": arguments}
                made["tool_calls"].append({**call, "function": function})
        if "name" in message and message["role"] == "tool":
            made["name"] = names.get(str(message.get("tool_call_id")), message["name"])
        skeleton.append(made)
    return skeleton, words
