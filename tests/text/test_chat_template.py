"""Chat templates as model families write them, where they are found, and the one BOS."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import InvalidModelFile, InvalidRequest, TemplateError
from edgespec.text.chat_template import PLAIN, ChatTemplate, Message, encode_prompt, read_template
from edgespec.text.tokenizer import Tokenizer

SYSTEM, USER, REPLY = Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Yes?")

CHATML = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""

THINKING = """{% for m in messages %}
{%- set text = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}
{{- '<' ~ m.role ~ '>' ~ text }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant><think>\\n' }}{% endif %}"""


def render(source: str, *messages: Message, **variables: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, variables=variables)


def test_chatml() -> None:
    prompt = render(CHATML, SYSTEM, USER, REPLY)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, USER, enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert render(CHATML, USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_system_message_is_folded_where_the_template_refuses_it() -> None:
    assert render(GEMMA, SYSTEM, USER) == (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    assert render(MISTRAL, SYSTEM, USER, REPLY, USER) == "<s>[INST] Be brief.\n\nHi [/INST]Yes?</s>[INST] Hi [/INST]"


def test_system_messages_amid_a_conversation_reach_the_model() -> None:
    """Agents send them. Templates render them, refuse them, or leave them out without a word."""
    later = Message("system", "The file has changed.")
    assert "<|im_start|>system\nThe file has changed.<|im_end|>" in render(CHATML, SYSTEM, USER, REPLY, later, USER)
    merged = "Hi\n\nThe file has changed."
    assert f"<start_of_turn>user\n{merged}<end_of_turn>" in render(GEMMA, SYSTEM, USER, REPLY, USER, later)
    assert "[INST] The file has changed.\n\nHi [/INST]" in render(MISTRAL, USER, REPLY, later, USER)
    heard = "{% if m.role != 'system' or loop.first %}[{{ m.role }}: {{ m.content }}]{% endif %}"
    written = render(f"{{% for m in messages %}}{heard}{{% endfor %}}", SYSTEM, USER, REPLY, later)
    assert written == "[system: Be brief.][user: Hi][assistant: Yes?][user: The file has changed.]"


def test_messages_of_one_role_in_a_row_are_one_where_the_template_refuses_several() -> None:
    assert "<start_of_turn>user\nBe brief.\n\nHi\n\nHi<end_of_turn>" in render(GEMMA, SYSTEM, USER, USER)
    assert render(GEMMA, SYSTEM) == "<s><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{{ messages|length }}", "{% for c in messages[0].content %}{% endfor %}"]
)
def test_what_a_template_leaves_out_is_told(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"leaves out the text of message [12]\.") as caught:
        render(source, USER, REPLY)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        (MISTRAL, [REPLY], "roles must alternate"),
        (GEMMA, [REPLY, USER], "roles must alternate"),
        ("{{ raise_exception('never') }}", [SYSTEM, USER], "never"),
    ],
)
def test_refusal_carries_the_templates_words(source: str, messages: list[Message], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        render(source, *messages)
    assert caught.value.hint


def test_reasoning_of_earlier_turns() -> None:
    earlier = Message("assistant", "<think>\nhm\n</think>\n\nYes?")
    assert render(THINKING, USER, earlier, USER) == "<user>Hi<assistant>Yes?<user>Hi<assistant><think>\n"


@pytest.mark.parametrize("switch", ["preserve_thinking", "not clear_thinking"])
def test_reasoning_of_earlier_turns_is_kept_where_the_template_can(switch: str) -> None:
    source = "{% for m in messages %}{% if SWITCH %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endfor %}"
    earlier = Message("assistant", "Yes?", {"reasoning_content": "hm "})
    assert render(source.replace("SWITCH", switch), earlier) == "hm Yes?"
    off = {switch.removeprefix("not "): switch.startswith("not")}
    assert render(source.replace("SWITCH", switch), earlier, **off) == "Yes?"


def test_plain_continues_text() -> None:
    assert render(PLAIN, Message("user", "def f("), Message("assistant", "x)")) == "def f(x)"


def test_extra_keys_and_variables() -> None:
    call = Message("assistant", "", {"tool_calls": [{"name": "f", "arguments": {"b": "<é>", "a": 1}}]})
    source = (
        "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}{{ messages[0].tool_calls|map(attribute='name')|join }}"
    )
    assert render(source, call) == "f"
    assert render(source, call, tools=[{"b": "<é&'>", "a": 1}]) == '{"b": "<é&\'>", "a": 1}f'
    assert render("{{ m is defined }}{{ messages[0].arguments is defined }}", call) == "FalseFalse"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ [1, {'a': '<b>'}]|tojson(indent=2) }}", '[\n  1,\n  {\n    "a": "<b>"\n  }\n]'),
        ("{{ {'b': 1, 'a': 2}|tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        (
            "{% for i in 'abcd' %}{% if i == 'b' %}{% continue %}{% endif %}{{ i }}"
            "{% if i == 'c' %}{% break %}{% endif %}{% endfor %}",
            "ac",
        ),
        ("{{ ('-' * 1000000)|length }}", "1000000"),
        ("a{% generation %}{{ 'b' }}{% endgeneration %}c", "abc"),
        ("{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}", "user\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
        ("{% macro f(a, b=[]) %}({{ a }}{{ b|length }}){% endmacro %}{{ f(1) ~ f(2, 'xy') }}", "(10)(22)"),
        (
            "{{ 'a-b'.split('-')[::-1]|join('+') }}{{ 'aXa'.replace('a', 'b', 1) }}{{ ', '.join(['x', 'y']) }}",
            "b+abXax, y",
        ),
        (
            "{{ '%s:%d' % ('a', 5) }}{{ '<{}{x}>'.format(1, x=2) }}{{ '%s'|format(3) }}{{ '**%s**' % 'b' }}",
            "a:5<12>3**b**",
        ),
        ("{{ 'a\n\nb'|indent(2) }}|{{ 'a\nb'|indent('>', first=true) }}", "a\n\n  b|>a\n>b"),
        ("{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ 2 * 'c' }}{{ [1] * 2 }}{{ 7 % 4 }}{{ 'x' ~ 1 }}", "1024ababcc[1, 1]3x1"),
        ("{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% endfor %}{{ {'k': 1}.get('z', 2) }}", "k12"),
        ("{% for i in range(6) if i is odd %}{{ i }}{{ ',' if not loop.last }}{% endfor %}", "1,3,5"),
        (
            "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ nothing }}{{ nothing|default('d') }}",
            "1d",
        ),
        ("{% set x = [] %}{{ x.append(1) or x|length }}", "1"),
        ("{{ messages|selectattr('role')|length }}{{ [1, 1]|unique|length }}", "11"),
        ("[{{ nothing.at.all }}{{ 'a' + nothing + 'b' }}]", "[ab]"),
        ("{% set x %}a{{ 'b' }}{% endset %}{{ x|upper }}{{ 'a' in x }}{{ '<&>'|safe }}", "ABTrue<&>"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source, Message("user", "")) == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% if %}", "line 2"),
        ("a\nb\n{{ x", "line 3"),
        ("{% endfor %}", "line 1"),
        ("{% unknown %}", "line 1"),
        ("a\n{{ 1|no_such_filter }}", "line 2"),
        ("a\nb\n{{ messages[0].content + 1 }}", "line 3"),
        ("{% include 'x' %}", "loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ nothing|tojson }}", "Undefined"),
    ],
)
def test_broken_templates(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words) as caught:
        render(source, USER)
    assert caught.value.hint


def _write(folder: Path, **files: object) -> Path:
    for stem, content in files.items():
        name = "chat_template.jinja" if stem == "jinja" else f"{stem}.json"
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert read_template(tmp_path / "absent") is None
    assert read_template(tmp_path) is None
    assert read_template(_write(tmp_path, tokenizer_config={"bos_token": "<s>"})) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "é"}]
    assert read_template(_write(tmp_path, tokenizer_config={"chat_template": named})) == "é"
    assert read_template(_write(tmp_path, tokenizer_config={"chat_template": "c"})) == "c"
    assert read_template(_write(tmp_path, chat_template={"chat_template": "b"})) == "b"
    assert read_template(_write(tmp_path, jinja="a")) == "a"


@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 100_000, {"chat_template": 1}, {"chat_template": [{"name": "rag", "template": "x"}]}]
)
def test_damaged_files(tmp_path: Path, content: object) -> None:
    with pytest.raises(InvalidModelFile, match=r"tokenizer_config\.json"):
        read_template(_write(tmp_path, tokenizer_config=content))


def test_template_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidModelFile, match="decode"):
        read_template(tmp_path)


@given(leading=st.integers(0, 3), add_bos=st.booleans(), has_bos=st.booleans())
def test_never_two_bos(table: Callable[..., Tokenizer], leading: int, add_bos: bool, has_bos: bool) -> None:
    tokenizer = table([b"a", b"<", b"s", b">"], add_bos=add_bos)
    if not has_bos:
        tokenizer.bos = None  # type: ignore[misc]  # an attribute here
    tokens = encode_prompt(tokenizer, "<s>" * leading + "a<s>a", parse_special=True)
    bos = has_bos and (add_bos or leading > 0)
    body = [4, 0, 4]
    assert tokens == ([0] * bos if has_bos else [0] * leading) + body


def test_bos_spelled_in_plain_text_is_text(table: Callable[..., Tokenizer]) -> None:
    tokenizer = table([b"<", b"s", b">"])
    assert encode_prompt(tokenizer, "<s>", parse_special=False) == [0, 4, 5, 6]
    assert encode_prompt(tokenizer, "", parse_special=False) == [0]
