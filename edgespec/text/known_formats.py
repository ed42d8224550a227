"""Formats of calls that templates do not show, or that only a reader of their own can read."""

from __future__ import annotations

from dataclasses import replace

from edgespec.text.call_format import CallFormat, LiteralArguments
from edgespec.text.writing import DESCRIBED

HARMONY = CallFormat(address="<|channel|>commentary to=functions.", middle=" <|constrain|>json<|message|>")
"""GPT-OSS: a call is a message whose header names the tool. https://github.com/openai/harmony"""

FUNCTIONARY = CallFormat(middle="\n", between=">>>")
"""Functionary 3.2: the first line of each part of an answer is the tool that gets it, or "all" for the user."""

_LFM2 = CallFormat("<|tool_call_start|>[", "", "(", LiteralArguments("=", '"', ", "), ")", ", ", "]<|tool_call_end|>")
_GRANITE = CallFormat("<|tool_call|>[", '{"name": "', '", "arguments": ', after="}", between=", ", last="]")

_BY_PROMPT = (
    ("<|tool_list_start|>", _LFM2),
    ("List of tools: [", _LFM2),
    ("<|tool_call|>", _GRANITE),
    ("<tool_call>", DESCRIBED),
)


def find_known_format(derived: CallFormat | None, prompt: str) -> CallFormat | None:
    """The known format that replaces one derived from a template, or that a prompt with tools asks for."""
    if derived is None:
        return next((found for words, found in _BY_PROMPT if words in prompt), None)
    if derived.before.endswith("to=functions."):
        return HARMONY
    if not (derived.first + derived.before).strip() and derived.between == ">>>":
        return FUNCTIONARY
    if '<|open|>call tool="' in derived.before:  # Kimi K3 writes an empty answer in front of calls
        return replace(derived, address="<|open|>response<|sep|><|close|>response<|sep|>")
    return derived
