"""DeepSeek: since V3.1 name and JSON around a separator; before, "function", the name and a fenced block of JSON."""

# ruff: noqa: RUF001 - DeepSeek writes its markers with wide bars

from __future__ import annotations

import re

from edgespec.text.tool_formats.base import NAME_CHARACTER, CallSyntax, Frame, Schemas, ToolCall, ToolFormat, make_call

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_VISIBLE = (_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _END)
_CALL = re.compile(rf"{_CALL_BEGIN}(.*?){_SEPARATOR}(.*?)(?:{_CALL_END}|\Z)", re.DOTALL)
_NAME = rf"\s*({NAME_CHARACTER}+)\s*"
_SYNTAX = CallSyntax(
    rf"\s*{_CALL_BEGIN}(?:function{_SEPARATOR}{_NAME}\n(?:```json)?|{_NAME}{_SEPARATOR})\s*(?=\{{)",
    rf"\s*(?:```)?\s*(?:{_CALL_END})?\s*",
)


def _read(body: str, _: Schemas) -> list[ToolCall] | None:
    calls = []
    for before, after in _CALL.findall(body):
        name = before.strip()
        if name == "function" and "\n" in after:
            name, after = after.split("\n", 1)
        call = make_call(name.strip(), after.strip().removeprefix("```json").removesuffix("```").strip())
        if call is None:
            return None
        calls.append(call)
    return calls or None


DEEPSEEK_V3 = ToolFormat(
    "deepseek",
    _BEGIN,
    _END,
    _read,
    _SYNTAX,
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
    _read,
    _SYNTAX,
    frame=Frame((_CALL_BEGIN, "{name}", _SEPARATOR), (_CALL_END,), (_BEGIN,), (_END,), ()),
    visible=_VISIBLE,
)
