"""GPT-OSS' messages, read from texts cut anywhere."""

from __future__ import annotations

import pytest

from edgespec.text.harmony import HarmonyReader, Thought
from edgespec.text.tool_calls import CallEnd, ToolCall

CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
CASES = {
    "thought and answer": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes < no.",
        [Thought("Hm."), "Yes < no."],
    ),
    "a call": (f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL}",
               [Thought("Hm."), ToolCall("f", '{"a": 1}')]),
    "a call among the thoughts": (CALL.replace("commentary", "analysis"), [ToolCall("f", '{"a": 1}')]),
    "a call that is cut": (CALL[:-2], [ToolCall("f", '{"a": ')]),
    "a call and its end": (f"{CALL}<|call|>", [ToolCall("f", '{"a": 1}')]),
    "the recipient before the channel": (
        " to=functions.g<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
        [ToolCall("g", "{}")],
    ),
    "a preamble": ("<|channel|>commentary<|message|>I will look.<|end|>", ["I will look."]),
    "no arguments": (CALL.replace('{"a": 1}', "[1"), ["[1"]),
    "a header alone": ("<|channel|>anal", []),
    "no header's marker": ("<|message|>text", ["text"]),
    "a marker that never comes": ("<|channel|>final<|message|>a <|en", ["a <|en"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_messages_are_split_however_the_text_is_cut(name: str) -> None:
    text, expected = CASES[name]
    for step in (1, 2, 5, 1000):
        reader = HarmonyReader()
        pieces = [text[i : i + step] for i in range(0, len(text), step)]
        found = [each for piece in pieces for each in reader.push(piece)] + reader.finish()
        joined: list[object] = []
        for each in found:
            last = joined[-1] if joined else None
            if isinstance(last, str) and isinstance(each, str):
                joined[-1] = last + each
            elif isinstance(last, Thought) and isinstance(each, Thought):
                joined[-1] = Thought(last.text + each.text)
            elif isinstance(each, CallEnd):
                assert each.is_cut == (name == "a call that is cut")
                joined.append(each.call)
            elif isinstance(each, str | Thought):
                joined.append(each)
        assert joined == expected, step
