"""Tool calls in answers: which format a model writes, and the reader that splits its answers into text and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from edgespec.text.stream import HARMONY_MESSAGES, ReasoningSplitter, Segment
from edgespec.text.tool_calls import (
    JSON_HEAD,
    JSON_REST,
    NAME_CHARACTER,
    AnswerPart,
    CallEnd,
    CallSyntax,
    Frame,
    OpenCall,
    Schemas,
    ToolCall,
    ToolCallReader,
    ToolFormat,
    load_json,
    read_json_calls,
)

# DeepSeek: since V3.1 name and JSON around a separator; before, "function", the name and a fenced block of JSON.


# ruff: noqa: RUF001 - DeepSeek writes its markers with wide bars


_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_VISIBLE = (_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _END)
_DEEPSEEK_NAME = rf"\s*({NAME_CHARACTER}+)\s*"
_DEEPSEEK_SYNTAX = CallSyntax(
    rf"\s*{_CALL_BEGIN}(?:function{_SEPARATOR}{_DEEPSEEK_NAME}\n(?:```json)?|{_DEEPSEEK_NAME}{_SEPARATOR})\s*(?=\{{)",
    rf"\s*(?:```)?\s*(?:{_CALL_END})?\s*",
)


DEEPSEEK_V3 = ToolFormat(
    "deepseek",
    _BEGIN,
    _END,
    syntax=_DEEPSEEK_SYNTAX,
    frame=Frame(
        (_CALL_BEGIN, "function", _SEPARATOR, "{name}", "\n```json\n"),
        ("\n```", _CALL_END),
        (_BEGIN,),
        (_END,),
        ("\n",),
    ),
    visible=_VISIBLE,
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek-v3.1",
    _BEGIN,
    _END,
    syntax=_DEEPSEEK_SYNTAX,
    frame=Frame((_CALL_BEGIN, "{name}", _SEPARATOR), (_CALL_END,), (_BEGIN,), (_END,), ()),
    visible=_VISIBLE,
)


# GPT-OSS: messages with headers, whose channel and recipient tell reasoning, answer and calls apart.
#
# https://github.com/openai/harmony: <|start|>role<|channel|>name to=recipient <|constrain|>form<|message|>text<|end|>


_HARMONY_FUNCTION = re.compile(rf"\bto=functions\.({NAME_CHARACTER}+)")
MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


class HarmonyReader:
    """Splits what a model writes after `<|start|>assistant`. A call whose text is not a JSON object stays text."""

    def __init__(self) -> None:
        self._splitter = ReasoningSplitter(HARMONY_MESSAGES, "header")
        self._header = ""
        self._function: str | None = None  # recipient of the present message, until its text begins
        self._call: OpenCall | None = None
        self._n_calls = 0

    def push(self, text: str) -> list[AnswerPart | Thought]:
        """Add `text`; returns the parts that are certain."""
        return self._read(self._splitter.push(text))

    def finish(self) -> list[AnswerPart | Thought]:
        """End the stream; returns the remaining parts."""
        return [*self._read(self._splitter.finish()), *self._end_call()]

    def _read(self, segments: Iterable[Segment]) -> list[AnswerPart | Thought]:
        parts: list[AnswerPart | Thought] = []
        for segment in segments:
            if segment.channel is None:
                parts += self._end_call()
                self._header += segment.text
                if segment.text == "<|message|>":
                    found = _HARMONY_FUNCTION.search(self._header)
                    self._header, self._function = "", found[1] if found else None
            elif self._function is not None or self._call is not None:
                parts += self._read_arguments(segment.text)
            else:
                parts.append(Thought(segment.text) if segment.channel == "reasoning" else segment.text)
        return parts

    def _read_arguments(self, text: str) -> list[AnswerPart | Thought]:
        """The parts that the text of a message with a recipient adds."""
        parts: list[AnswerPart | Thought] = []
        if self._function is not None:
            if not (text := text.lstrip()):
                return []
            if text.startswith("{"):
                self._call = OpenCall(self._n_calls, self._function)
                self._n_calls += 1
                parts.append(self._call.start)
            self._function = None
        if self._call is not None:
            added, text = self._call.push(text)
            parts += added
            if any(isinstance(part, CallEnd) for part in added):
                self._call = None
                text = text.strip()
        return [*parts, text] if text else parts

    def _end_call(self) -> list[AnswerPart | Thought]:
        call, self._call, self._function = self._call, None, None
        return [call.finish()] if call is not None else []


HARMONY = ToolFormat(
    HARMONY_MESSAGES.name,
    "<|channel|>",
    "",
    frame=Frame(("<|channel|>", "commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>")),
    visible=MARKERS,
    answer_header=("<|channel|>", "final", "<|message|>"),
)


# Hermes and Qwen: calls between tags, each one JSON object with name and arguments, or in Qwen3-Coder's tags.


_QWEN_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_WRAPPED = re.compile(r"(?:<tool_call>\s*)*(?:```(?:json)?\n(.*)```|(.*))", re.DOTALL)


def _read_hermes(body: str, tools: Schemas) -> list[ToolCall] | None:
    """The calls of a block. Models that know both ways mix them up, open a block twice, or put a fence around JSON."""
    wrapped = _WRAPPED.fullmatch(body.strip())
    inner = next((each for each in wrapped.groups() if each is not None), body) if wrapped is not None else body
    return read_json_calls(inner, tools) or _read_tags(inner, tools)


def _read_tags(body: str, tools: Schemas) -> list[ToolCall] | None:
    """Calls with a tag for the function and one for each parameter; the values have no quotes, and the tool's schema
    gives their types.
    """
    calls = []
    for name, parameters in _QWEN_FUNCTION.findall(body):
        declared = tools.get(name.strip(), {}).get("properties")
        schemas = declared if isinstance(declared, Mapping) else {}
        values = {
            key.strip(): _read_value(text, schemas.get(key.strip())) for key, text in _PARAMETER.findall(parameters)
        }
        calls.append(ToolCall(name.strip(), json.dumps(values)))
    return calls or None


def _read_value(text: str, schema: object) -> Any:
    """The text itself where the schema allows a string, even if it looks like JSON; otherwise the JSON value."""
    types = _allowed_types(schema)
    if "string" in types:
        return None if "null" in types and text.strip() == "null" else text
    return load_json(text, text)


def _allowed_types(schema: object) -> frozenset[str]:
    """The types that a schema allows; references are not followed."""
    if not isinstance(schema, Mapping):
        return frozenset()
    stated = schema.get("type")
    names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    types = {each for each in names if isinstance(each, str)}
    if isinstance(schema.get("enum"), list) and any(isinstance(each, str) for each in schema["enum"]):
        types.add("string")
    for key in ("anyOf", "oneOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            types |= _allowed_types(each)
    return frozenset(types)


HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    read=_read_hermes,
    frame=Frame(("<tool_call>", "\n"), ("\n", "</tool_call>"), between=("\n",)),
    visible=("<tool_call>", "</tool_call>"),
)


def tool_instructions(tools: list[dict[str, Any]]) -> str:
    """A system text that describes `tools` to a model whose chat template does not; calls are in Hermes' format."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. Their signatures, one JSON object a line:\n<tools>\n"
        f"{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments between tags:\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )


# Llama 3: JSON after a control token, or as the whole answer; the arguments are called parameters.


LLAMA3 = ToolFormat("llama", "<|python_tag|>", "", argument="parameters", bare=True, visible=("<|python_tag|>",))


# Mistral: a JSON list of calls, or since 2025 NAME[ARGS]{...} for each call.


_MARKER = r"\s*(?:\[TOOL_CALLS\])?"
_MISTRAL_NAME = rf"\s*({NAME_CHARACTER}+)(?:\[CALL_ID\]\w*)?\[ARGS\]"
_MISTRAL_SYNTAX = CallSyntax(rf"{_MARKER}(?:{_MISTRAL_NAME}\s*(?=\{{)|{JSON_HEAD})", JSON_REST)


MISTRAL_LIST = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    "",
    syntax=_MISTRAL_SYNTAX,
    frame=Frame(first=("[TOOL_CALLS]", "["), last=("]",), between=(", ",)),
    visible=("[TOOL_CALLS]",),
)
MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    "[TOOL_CALLS]",
    "",
    syntax=_MISTRAL_SYNTAX,
    frame=Frame(("[TOOL_CALLS]", "{name}", "[ARGS]"), between=()),
    visible=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)


# The markers in a chat template -> the format its model writes; the first row that applies counts.
_FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>", "analysis"), HARMONY),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), LLAMA3),
    (('"parameters"', "ipython"), LLAMA3),
)


Reader = HarmonyReader | ToolCallReader
"""Splits the text of an answer."""


@lru_cache(maxsize=16)
def detect_tool_format(template: str | None) -> ToolFormat:
    """The format a model writes, judged by its chat template; Hermes' where the template has no known marker."""
    source = template or ""
    return next((found for markers, found in _FORMATS if all(marker in source for marker in markers)), HERMES)


def make_reader(tool_format: ToolFormat, tools: Schemas) -> Reader:
    return HarmonyReader() if tool_format is HARMONY else ToolCallReader(tool_format, tools)
