"""What is found of chat templates by probing, and that nothing of a conversation is lost in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.errors import InvalidRequest
from edgespec.text.call_format import INDEX
from edgespec.text.call_writer import write_calls
from edgespec.text.chat_template import ChatTemplate, Message, profile_template
from edgespec.text.readers import make_reader
from edgespec.text.template_probe import TemplateProfile
from edgespec.text.tool_calls import CallEnd
from tests.text.templates import FAMILIES, HARMONY, HERMES, SHOWN_TOOLS, WITHOUT_TOOLS

TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}},
]
TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
EACH = "{% for m in messages %}BODY{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
NO_SYSTEM = EACH.replace("BODY", "{% if m.role != 'system' %}" + TURN + "{% endif %}")
LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}"
    "{{ ns.s }}" + NO_SYSTEM
)
PARTS = EACH.replace("BODY", "<|{{ m.role }}|>{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}")
PHI = EACH.replace("BODY", TURN.replace("<|end|>", "{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>"))
NO_RESULTS = EACH.replace("BODY", "{% if m.role != 'tool' %}" + TURN + "{% endif %}")
ALTERNATING = EACH.replace(
    "BODY", "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}" + TURN
)
NINE = HERMES.replace(
    "{% for c in m.tool_calls %}",
    "{% for c in m.tool_calls %}{% if c.id|length != 9 %}{{ raise_exception('nine letters') }}{% endif %}{{ c.id }}",
)
DROPS_CALLS = HERMES.replace("{% if m.tool_calls %}", "{% if m.tool_calls and not m.content %}")
DROPS_TEXT = HERMES.replace("{{ m.content or '' }}", "{{ m.content if m.content and not m.tool_calls else '' }}")
ONE_CALL = HERMES.replace(
    "{% if m.tool_calls %}",
    "{% if m.tool_calls|length > 1 %}{{ raise_exception('one call') }}{% endif %}{% if m.tool_calls %}",
)
FIRST_CALL = HERMES.replace("in m.tool_calls %}", "in m.tool_calls[:1] %}")
AS_TEXT = HERMES.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}")
NULL_TEXT = HERMES.replace(
    "{%- else %}", "{%- else %}{% if m.content == '' %}{{ raise_exception('empty') }}{% endif %}"
)
XML_TOOLS = HERMES.replace("tools", "xml_tools")
FUNCTIONS = HERMES.replace("{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}", "{{ functions }}")
TEMPLATES = {
    "no system": NO_SYSTEM, "last system": LAST_SYSTEM, "parts": PARTS, "tools in a message": PHI,
    "no results": NO_RESULTS, "alternating": ALTERNATING, "ids of nine": NINE, "drops calls": DROPS_CALLS,
    "drops text": DROPS_TEXT, "one call": ONE_CALL, "first call": FIRST_CALL, "arguments as text": AS_TEXT,
    "no empty text": NULL_TEXT, "xml_tools": XML_TOOLS, "functions": FUNCTIONS, **FAMILIES,
}  # fmt: skip


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TWO = [call("call_0123456789", "look_up", {"city": "Lima"}), call("call_9876543210", "measure", {"n": 41421})]
CONVERSATION = (
    Message("system", "Be brief."),
    Message("user", "How warm?"),
    Message("assistant", "I will look.", {"tool_calls": TWO}),
    Message("tool", "sunny", {"tool_call_id": "call_0123456789"}),
    Message("tool", "12 degrees", {"tool_call_id": "call_9876543210"}),
    Message("assistant", "Twelve."),
    Message("system", "The file has changed."),
    Message("user", "And now?"),
)
SAID = ("Be brief.", "How warm?", "I will look.", "Lima", "41421", "sunny", "12 degrees", "Twelve.", "has changed",
        "And now?", "look_up", "measure")  # fmt: skip


def profile(name: str) -> TemplateProfile:
    return profile_template(TEMPLATES[name])


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_of_a_conversation_is_missing(name: str) -> None:
    prompt = ChatTemplate(TEMPLATES[name], "<s>", "</s>").render(CONVERSATION, variables={"tools": TOOLS})
    assert [words for words in SAID if words not in prompt] == []


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("no system", "system", "folded"), ("last system", "system", "first"), ("hermes", "system", "own"),
        ("parts", "content", "parts"), ("tools in a message", "tools", "message"), ("xml_tools", "tools", "xml_tools"),
        ("functions", "tools", "functions"), ("described", "tools", "described"), ("no results", "results", "user"),
        ("ids of nine", "short_ids", True), ("arguments as text", "arguments", "text"),
        ("no empty text", "blank", None), ("described", "calls", "text"), ("harmony", "reasoning", "thinking"),
    ],
)  # fmt: skip
def test_how_conversations_are_written(name: str, field: str, value: object) -> None:
    assert getattr(profile(name).writing, field) == value


def test_several_calls_of_one_answer() -> None:
    assert profile("hermes").shows_several and not profile("first call").shows_several
    prompt = ChatTemplate(FIRST_CALL, "", "").render(CONVERSATION, variables={"tools": TOOLS})
    assert prompt.count("<tool_call>") == 2


@pytest.mark.parametrize(
    ("name", "text", "n_turns"), [("hermes", "I look.", 1), ("drops calls", "I look.", 2), ("drops calls", "", 1)]
)
def test_text_and_calls_are_one_turn_where_a_template_shows_both(name: str, text: str, n_turns: int) -> None:
    messages = [Message("user", "x"), Message("assistant", text, {"tool_calls": TWO[:1]})]
    prompt = ChatTemplate(TEMPLATES[name], "", "").render([*messages, Message("user", "y")])
    assert prompt.count("<|assistant|>") == n_turns + 1, "the last one is for the answer"
    assert text in prompt and "Lima" in prompt


def test_a_call_that_a_template_without_tools_does_not_show_is_written_as_it_was_asked_for() -> None:
    prompt = ChatTemplate(WITHOUT_TOOLS, "", "").render(CONVERSATION, variables={"tools": TOOLS})
    assert (
        '<|assistant|>I will look.\n<tool_call>\n{"name": "look_up", "arguments": {"city": "Lima"}}\n</tool_call>'
        in (prompt)
    )
    assert prompt.startswith("<|system|>Be brief.\n\nYou may call functions.")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"described", "hermes"}))
def test_calls_are_asked_for_in_the_form_in_which_they_are_read(family: str) -> None:
    """Also of a template that shows calls and no tools, as those of DeepSeek R1's distillations."""
    source = FAMILIES[family].replace(SHOWN_TOOLS, "")
    template = ChatTemplate(source, "", "")
    assert template.profile.tools == "described" and template.profile.call_format is not None
    prompt = template.render([Message("user", "x")], variables={"tools": TOOLS})
    asked = prompt.partition("like this one:\n")[2].partition("<|end|>")[0]
    reader = make_reader(template.profile.calls, {"NAME": {}})
    parts = [*reader.push(asked), *reader.finish()]
    assert [json.loads(each.call.arguments) for each in parts if isinstance(each, CallEnd)] == [{"KEY": "VALUE"}]


def test_reasoning_in_front_of_calls_alone_is_no_part_of_them() -> None:
    """As templates write it that open and close a phase without reasoning."""
    thinking = HERMES.replace("{{ m.content or '' }}", "{{ m.content or '<think></think>' }}")
    assert profile_template(thinking).call_format == profile("hermes").call_format


@pytest.mark.parametrize("first", [0, 1])
def test_calls_may_be_numbered_in_front_of_their_names(first: int) -> None:
    source = FAMILIES["deepseek since v3.1"].replace("<|call▁begin|>", "<|call {{ loop.index0 + FIRST }}|>")
    found = profile_template(source.replace("FIRST", str(first))).call_format
    calls = [call("", name, {}) for name in ("f", "g")]
    assert found is not None and found.before == f"<|call {INDEX}|>"
    parts = make_reader(found, {"f": {}, "g": {}}).push(write_calls(found, calls))
    assert [each.call.name for each in parts if isinstance(each, CallEnd)] == ["f", "g"]


def test_ids_fit_and_agree() -> None:
    shows_id = NINE.replace("<|tool|>", "<|tool|>{{ m.tool_call_id }}: ")
    prompt = ChatTemplate(shows_id, "", "").render(CONVERSATION, variables={"tools": TOOLS})
    ids = [part[:9] for part in prompt.split("<|tool|>")[1:]]
    assert all(each.isalnum() and prompt.count(each) == 2 for each in ids) and len(set(ids)) == 2
    own = Message("assistant", "", {"tool_calls": [call("abc123def", "look_up", {})]})
    assert "abc123def" in ChatTemplate(shows_id, "", "").render([Message("user", "x"), own])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"), (None, "{}"), ("null", "{}"), ("{}", "{}"), ('{"city": "Lima"}', '{"city": "Lima"}'),
        ('"Lima"', '{"input": "Lima"}'), ('["Lima"]', '{"input": ["Lima"]}'),
        ('{"city": "Li', json.dumps({"input": '{"city": "Li'})),
    ],
)  # fmt: skip
def test_arguments_are_objects_whatever_a_client_sends(arguments: Any, shown: str) -> None:
    """A call that a limit has cut comes back in the history; templates walk through the arguments."""
    messages = [
        Message("user", "x"),
        Message("assistant", "", {"tool_calls": [call("abc123def", "look_up", arguments)]}),
        Message("tool", "invalid JSON", {"tool_call_id": "abc123def"}),
    ]
    assert f'"arguments": {shown}' in ChatTemplate(HERMES, "", "").render(messages, variables={"tools": TOOLS})
    walked = ChatTemplate(FAMILIES["qwen3-coder"], "", "").render(messages, variables={"tools": TOOLS})
    assert "invalid JSON" in walked and "<function=look_up>" in walked


def test_reasoning_before_a_call_is_given_under_the_templates_key() -> None:
    calls = {"tool_calls": TWO[:1], "reasoning_content": "because"}
    messages = [Message("user", "x"), Message("assistant", "", calls), Message("tool", "12", {"tool_call_id": "a"})]
    prompt = ChatTemplate(HARMONY, "", "").render(messages, variables={"tools": TOOLS})
    assert "<|channel|>analysis<|message|>because<|end|>" in prompt


def test_calls_and_results_without_ids_belong_together() -> None:
    """Ollama's interface has none."""
    two = [{"function": each["function"]} for each in TWO]
    messages = [
        Message("user", "x"),
        Message("assistant", "", {"tool_calls": two}),
        Message("tool", "12", {"name": "measure"}),
        Message("tool", "sunny"),
    ]
    named = HERMES.replace("<|tool|>", "<|tool|>{{ m.name }} {{ m.tool_call_id }}: ").replace(
        "{% for c in m.tool_calls %}", "{% for c in m.tool_calls %}{{ c.id }}"
    )
    prompt = ChatTemplate(named, "", "").render(messages, variables={"tools": TOOLS})
    assert [part.split()[0] for part in prompt.split("<|tool|>")[1:]] == ["measure", "look_up"]


def test_what_cannot_be_shown_is_named() -> None:
    blind = EACH.replace("BODY", "{% if m.role == 'user' %}" + TURN + "{% endif %}")
    with pytest.raises(InvalidRequest, match="leaves out the text of message 2"):
        ChatTemplate(blind, "", "").render([Message("user", "x"), Message("assistant", "lost words")])


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('never') }}", "{% for a in b %}", "{{ 1 / 0 }}", "", "{{ strftime_now('%H:%M:%S.%f') }}",
     "{% for i in range(10**6) %}x{% endfor %}", "{{ messages[5].content }}"],
)  # fmt: skip
def test_a_template_that_fails_at_probes_has_a_profile_with_less_in_it(source: str) -> None:
    found = profile_template(source)
    assert found.call_format is None and found.tools == "described" and found.reasoning is None


def test_templates_that_show_tools_but_no_calls_are_told() -> None:
    silent = "{% if tools %}{{ tools|tojson }}{% endif %}" + EACH.replace("BODY", TURN)
    assert "does not tell how calls are written" in profile_template(silent).tools_notice
    assert "has no tools" in profile("described").tools_notice and profile("hermes").tools_notice == ""


@pytest.mark.parametrize(
    ("prompt", "switches", "has_levels", "can_level_off"),
    [
        ("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
         ("enable_thinking",), False, False),
        ("{% if thinking %}<think>{% endif %}", ("thinking",), False, False),
        ("Reasoning: {{ reasoning_effort }}", (), True, False),
        ("{% if reasoning_effort == 'none' %}off{% elif reasoning_effort == 'high' %}much{% endif %}", (), True, True),
        ("the words enable_thinking and 'none'", (), False, False),
    ],
)  # fmt: skip
def test_switches_of_reasoning(prompt: str, switches: tuple[str, ...], has_levels: bool, can_level_off: bool) -> None:
    found = profile_template(EACH.replace("BODY", TURN) + prompt)
    assert (found.switches, found.has_levels, found.can_level_off) == (switches, has_levels, can_level_off)
