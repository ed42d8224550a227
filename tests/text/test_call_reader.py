"""Calls as families of models write them, read from texts cut anywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.text.call_format import CallFormat
from edgespec.text.call_writer import write_calls
from edgespec.text.chat_template import profile_template
from edgespec.text.harmony import HarmonyReader
from edgespec.text.readers import make_reader
from edgespec.text.tool_calls import CallDelta, CallEnd, CallStart, ToolCall
from edgespec.text.writing import describe_tools
from tests.text.templates import FAMILIES

DEEPSEEK = "<|calls▁begin|>{}<|calls▁end|>"
OLD = "<|call▁begin|>function<|sep|>{}\n```json\n{}\n```<|call▁end|>"
NEW = "<|call▁begin|>{}<|sep|>{}<|call▁end|>"
F, G = ToolCall("f", '{"a": 1, "b": ["x"]}'), ToolCall("g", "{}")

JSON_F = '{"name": "f", "arguments": {"a": 1, "b": ["x"]}}'
JSON_G = '{"name": "g", "arguments": "{}"}'
LLAMA_F = JSON_F.replace("arguments", "parameters")
XML = "<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>"
XML_F = XML.format('<parameter=a>\n1\n</parameter>\n<parameter=b>\n["x"]\n</parameter>')
ARGS = '[TOOL_CALLS]f[ARGS]{"a": 1, "b": ["x"]}[TOOL_CALLS]g[CALL_ID]9[ARGS]{}'
OLD_TWO = DEEPSEEK.format(OLD.format("f", F.arguments) + "\n" + OLD.format("g", "{}"))
NEW_TWO = "Well." + DEEPSEEK.format(NEW.format("f", F.arguments) + NEW.format("g", "{}"))

TAGGED: dict[str, Any] = {"name": "f", "arguments": {"a": "<function=g></function></tool_call>"}}

# (family, what the model writes, what is read)
CASES: dict[str, tuple[str, str, list[str | ToolCall]]] = {
    "hermes": ("hermes", f"<tool_call>\n{JSON_F}\n</tool_call>", [F]),
    "hermes twice": ("hermes", f"Now.\n<tool_call>{JSON_F}</tool_call>\n<tool_call>\n{JSON_G}</tool_call>",
                     ["Now.\n", F, G]),
    "hermes and text": ("hermes", f"<tool_call>{JSON_G}</tool_call> Done", [G, " Done"]),
    "hermes, cut off": ("hermes", '<tool_call>{"name":"g"', ['<tool_call>{"name":"g"']),
    "hermes, nonsense": ("hermes", "<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
    "hermes, opened twice": ("hermes", f"<tool_call>\n<tool_call>\n{JSON_F}\n</tool_call>", [F]),
    "hermes, in a fence": ("hermes", f"<tool_call>\n```json\n{JSON_F}\n```\n</tool_call>", [F]),
    "hermes, in qwen3-coder's tags": ("hermes", XML_F, [F]),
    "hermes, never closed": ("hermes", f"So:\n<tool_call>\n{JSON_F}\n", ["So:\n", F]),
    "hermes, a brace too few": ("hermes", f"<tool_call>\n{JSON_F[:-1]}\n</tool_call>", [F]),
    "hermes, a brace too many": ("hermes", f"<tool_call>\n{JSON_F}}}\n</tool_call>", [F]),
    "hermes, tags in an argument": ("hermes", f"<tool_call>{json.dumps(TAGGED)}</tool_call>",
                                    [ToolCall("f", json.dumps(TAGGED["arguments"]))]),
    "hermes, half a tag": ("hermes", "I use <tool_ca", ["I use <tool_ca"]),
    "hermes, a blank line first": ("hermes", "\n\nWell.", ["\n\nWell."]),
    "no call": ("hermes", "a < b, <tool and </tool_call>", ["a < b, <tool and </tool_call>"]),
    "qwen3-coder": ("qwen3-coder", XML_F, [F]),
    "qwen3-coder, text": ("qwen3-coder", XML.format("<parameter=a>\nx\n y\n</parameter>"),
                          [ToolCall("f", '{"a": "x\\n y"}')]),
    "llama": ("llama", f"Now: <|python_tag|>{LLAMA_F}", ["Now: ", F]),
    "llama, bare": ("llama", f"\n{LLAMA_F}; {JSON_G}", [F, G]),
    "llama, JSON that names no tool": ("llama", '{"name": "Bob", "parameters": {}}',
                                       ['{"name": "Bob", "parameters": {}}']),
    "llama, JSON without arguments": ("llama", '{"name": "f"}', ['{"name": "f"}']),
    "llama, JSON that is no call": ("llama", '{"a": 1}', ['{"a": 1}']),
    "llama, text": ("llama", f"Well: {JSON_F}", [f"Well: {JSON_F}"]),
    "mistral": ("mistral", f"[TOOL_CALLS] [{JSON_F}, {JSON_G}]", [F, G]),
    "mistral since 2025": ("mistral since 2025", ARGS, [F, G]),
    "deepseek": ("deepseek", OLD_TWO, [F, G]),
    "deepseek since v3.1": ("deepseek since v3.1", NEW_TWO, ["Well.", F, G]),
    "python, brackets in strings": ("python", """<|call_start|>[f(a=")]", b=['(y']), g()]<|call_end|>""",
                                    [ToolCall("f", '{"a": ")]", "b": ["(y"]}'), G]),
    "python, escaped characters": ("python", r"<|call_start|>[f(a='\x41b\u00e9\U0001f600\n\'\\\d\0')]<|call_end|>",
                                   [ToolCall("f", json.dumps({"a": "Abé😀\n'\\\\d\0"}, ensure_ascii=False))]),
}  # fmt: skip


def read(family: str, pieces: list[str]) -> list[str | ToolCall]:
    """What is read, with texts joined. The deltas of a call must be its arguments."""
    return [each.call if isinstance(each, CallEnd) else each for each in read_parts(family, pieces)]


def read_parts(family: str, pieces: list[str]) -> list[str | CallEnd]:
    reader = make_reader(profile_template(FAMILIES[family]).calls, {"f": {}, "g": {}})
    joined: list[str | CallEnd] = []
    name, arguments, n_calls = "", "", 0
    for each in [*(each for piece in pieces for each in reader.push(piece)), *reader.finish()]:
        if isinstance(each, str) and joined and isinstance(joined[-1], str):
            joined[-1] += each
        elif isinstance(each, CallStart):
            assert each.index == n_calls
            name, arguments, n_calls = each.name, "", n_calls + 1
        elif isinstance(each, CallDelta):
            assert each.index == n_calls - 1
            arguments += each.arguments
        elif isinstance(each, CallEnd):
            assert (each.index, each.call) == (n_calls - 1, ToolCall(name, arguments))
            joined.append(each)
        else:
            assert isinstance(each, str)
            joined.append(each)
    return joined


@pytest.mark.parametrize("name", CASES)
def test_calls_are_read_however_the_text_is_cut(name: str) -> None:
    family, text, expected = CASES[name]
    for step in (1, 2, 3, 7, 1000):
        assert read(family, [text[i : i + step] for i in range(0, len(text), step)]) == expected, step


NEWLINE = '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>'
OPEN = "<|calls▁begin|><|call▁begin|>f<|sep|>"
# (family, what the model writes, the arguments, whether they are cut)
WRITTEN = {
    "hermes": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>{\\"',
               '{"a": "</tool_call>{\\"', True),
    "hermes, other members": ("hermes", '<tool_call>{"type": "function", "name": "f", "id": "1", "arguments": {}',
                              "{}", False),
    "hermes, not closed": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2</tool_call>',
                           '{"a": [1, 2', True),
    "hermes, with line breaks": ("hermes", NEWLINE, '{"a": "x\\u000ay"}', False),
    "mistral": ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]', '{"a": "]', True),
    "mistral, with an id": ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "9"}]', '{"a": 1}',
                            False),
    "mistral since 2025": ("mistral since 2025", '[TOOL_CALLS]f[ARGS]{"a": {"b": ', '{"a": {"b": ', True),
    "deepseek": ("deepseek since v3.1", OPEN + '{"a": 1, "b', '{"a": 1, "b', True),
    "llama, bare": ("llama", '{"name": "f", "parameters": {"a": 1, "b": "', '{"a": 1, "b": "', True),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_are_passed_on_while_they_are_written(name: str) -> None:
    family, text, arguments, is_cut = WRITTEN[name]
    for step in (1, 3, 1000):
        pieces = [text[i : i + step] for i in range(0, len(text), step)]
        assert read_parts(family, pieces) == [CallEnd(0, ToolCall("f", arguments), is_cut)], step
    reader = make_reader(profile_template(FAMILIES[family]).calls, {"f": {}})
    parts = [each for character in text for each in reader.push(character)]
    deltas = [each.arguments for each in parts if isinstance(each, CallDelta)]
    assert parts[0] == CallStart(0, "f") and "".join(deltas) == arguments and len(deltas) >= len(arguments) - 5


@pytest.mark.parametrize("family", sorted({case[0] for case in CASES.values()}))
@settings(max_examples=50)
@given(data=st.data())
def test_text_is_never_lost(family: str, data: st.DataObject) -> None:
    """Whatever is written, all of it comes out as text or as a call."""
    words = [word for case in CASES.values() for word in (case[1][:9], case[1][-9:])]
    pieces = data.draw(st.lists(st.sampled_from([*words, "{", "}", "\n", "x", '"name"']), max_size=12))
    found = read(family, pieces)
    if not any(isinstance(each, ToolCall) for each in found):
        assert "".join(map(str, found)).replace("\n", "").replace(" ", "") in (
            "".join(pieces).replace("\n", "").replace(" ", "")
        )
        assert len("".join(map(str, found)).strip()) >= len("".join(pieces).strip()) - len(pieces)


@given(
    arguments=st.dictionaries(
        st.text(max_size=5), st.integers() | st.text(max_size=9) | st.sampled_from(["</tool_call>", "<"]), max_size=4
    )
)
def test_arguments_come_back(arguments: dict[str, Any]) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    (call,) = read("hermes", [f"<tool_call>{body}</tool_call>"])
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == arguments


WRITE = {"properties": {
    "text": {"type": "string"}, "mode": {"enum": ["a", "7"]}, "n": {"type": "integer"}, "free": {}, "odd": 7,
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "list": {"type": ["array", "null"]},
}}  # fmt: skip


@pytest.mark.parametrize(
    ("parameter", "written", "expected"),
    [
        ("text", '{"name": "x"}', '{"name": "x"}'), ("text", "12", "12"), ("text", "null", "null"),
        ("text", "[1", "[1"), ("mode", "7", "7"), ("maybe", "true", "true"), ("maybe", "null", None),
        ("list", "[1, 2]", [1, 2]), ("list", "null", None), ("n", "12", 12), ("free", "12", 12), ("odd", "true", True),
        ("unknown", '{"a": 1}', {"a": 1}), ("free", "so be it", "so be it"),
    ],
)  # fmt: skip
def test_what_the_schema_calls_a_string_stays_one(parameter: str, written: str, expected: Any) -> None:
    """Qwen3-Coder writes values without quotes."""
    reader = make_reader(profile_template(FAMILIES["qwen3-coder"]).calls, {"write": WRITE})
    text = f"<tool_call>\n<function=write>\n<parameter={parameter}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    _, _, end = [*reader.push(text), *reader.finish()]
    assert isinstance(end, CallEnd) and json.loads(end.call.arguments) == {parameter: expected}


@pytest.mark.parametrize("name", ["fs/read", "srv:read", "a.b-c_d"])
def test_names_of_all_kinds_are_read_back(name: str) -> None:
    text = f'[TOOL_CALLS]{name}[ARGS]{{"a": 1}}'
    assert read("mistral since 2025", [text]) == [ToolCall(name, '{"a": 1}')]
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    reader = HarmonyReader()
    *_, end = [*reader.push(header + '{"a": 1}<|call|>'), *reader.finish()]
    assert end == CallEnd(0, ToolCall(name, '{"a": 1}'))


def test_instructions_name_the_tools() -> None:
    text = describe_tools([{"type": "function", "function": {"name": "weather", "parameters": {}}}], None)
    assert "weather" in text and "<tool_call>" in text


def test_the_address_stands_once_in_front_of_a_block() -> None:
    """As the template of Kimi K3 has it; without a block it leads to each call."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    block = CallFormat(first="<calls>", before="<", middle=">", after=";", between="", last="</calls>", address="@")
    assert write_calls(block, calls) == "@<calls><a>{};<b>{};</calls>"
    assert write_calls(replace(block, first="", last=""), calls) == "@<a>{};@<b>{};"


@pytest.mark.parametrize("family", ["solar", "mistral since 2025"])
def test_the_id_that_a_model_writes_in_front_of_arguments(family: str) -> None:
    text = {
        "solar": '<|calls|><|begin|>abc123def<|name|>f<|args|>{"a": 1}<|close|>',
        "mistral since 2025": '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}',
    }[family]
    reader = make_reader(profile_template(FAMILIES[family]).calls, {"f": {}})
    start, *_ = [*reader.push(text), *reader.finish()]
    assert start == CallStart(0, "f", "abc123def")
