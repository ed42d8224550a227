"""Hostile templates end with TemplateError, soon and without filling the memory."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest

from edgespec.errors import TemplateError
from edgespec.text.chat_template import ChatTemplate, Message

PATIENCE_S = 20.0  # machines may be busy, and memory is traced
MEMORY = 10 * 1024 * 1024  # bytes

GROW = "{% set ns = namespace(s=START) %}{% for i in range(99) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


TOO_LARGE = {
    "repeat": "{{ 'a' * 10**9 }}",
    "repeat_list": "{{ ([1] * 10**9)|length }}",
    "double_plus": grow("'aa'", "ns.s + ns.s"),
    "double_tilde": grow("'aa'", "ns.s ~ ns.s"),
    "double_filter": grow("'aa'", "[ns.s, ns.s]|join"),
    "double_percent": grow("'aa'", "'%s%s' % (ns.s, ns.s)"),
    "double_format": grow("'aa'", "'{0}{0}'.format(ns.s)"),
    "double_json": grow("'aa'", "[ns.s, ns.s]|tojson"),
    "indent_json": "{% set ns = namespace(s=[1] * 400) %}{% for i in range(200) %}{% set ns.s = [ns.s] %}{% endfor %}"
    "{{ ns.s|tojson(indent=16) }}",
    "format_many": "{{ ('{0}' * 1000).format('a' * 100000) }}",
    "percent_many": "{{ ('%(a)s' * 1000) % {'a': 'a' * 100000} }}",
    "shared_lists": grow("[1]", "[ns.s, ns.s]"),
    "shared_tuples": grow("(1,)", "(ns.s, ns.s)"),
    "shared_dicts": grow("{}", "{1: ns.s, 2: ns.s}"),
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace_nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "replace_filter": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(['a'] * 999) }}",
    "join_filter": "{{ (['a'] * 999)|join('b' * 100000) }}",
    "join_lazily": "{{ range(99999)|map('replace', '', 'b' * 100000)|join }}",
    "many_values": "{{ range(99999)|map('string')|list|tojson }}",
}
OTHER = {
    "power": ("{{ 10 ** 10 ** 10 }}", "power"),
    "squares": (grow("99999", "ns.s * ns.s"), "large numbers"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "Range"),
    "width_percent": ("{{ '%999999999d' % 1 }}", "width"),
    "width_percent_star": ("{{ '%*d' % (999999999, 1) }}", "width"),
    "width_filter": ("{{ '%999999999d'|format(1) }}", "width"),
    "width_format": ("{{ '{:999999999}'.format(1) }}", "width"),
    "width_format_nested": ("{{ '{:{}}'.format(1, 999999999) }}", "width"),
    "ljust": ("{{ 'a'.ljust(10**9) }}", "ljust"),
    "center": ("{{ 'a'|center(10**9) }}", "center"),
    "to_bytes": ("{{ (5).to_bytes(10**9, 'big') }}", "to_bytes"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "output": ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", "too much text"),
    "nested_parentheses": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "nested too deeply"),
    "nested_ifs": ("{% if a %}" * 2000 + "{% endif %}" * 2000, "nested too deeply"),
}
ENDLESS = {
    "loop": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "condition": "{% set r = range(99999) %}{% for a in r if " + "'' in r or " * 99 + "false %}{% endfor %}",
    "recursive_loop": "{% for a in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 99 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters": "{% for a in range(99999) %}{{ range(9999)|map('string')|map('length')|max == 0 }}{% endfor %}",
}


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time enough for a busy machine, and half a megabyte."""
    monkeypatch.setattr("edgespec.text.sandbox.MAX_TIME_S", PATIENCE_S)
    monkeypatch.setattr("edgespec.text.sandbox.MAX_SIZE", 512 * 1024)


def attack(source: str, words: str) -> None:
    template = ChatTemplate(source, "", "")
    start_s = time.monotonic()
    with pytest.raises(TemplateError, match=words) as caught:
        template.render([Message("user", "hi")])
    assert time.monotonic() - start_s < PATIENCE_S
    assert caught.value.hint


@pytest.mark.parametrize("name", TOO_LARGE)
def test_values_do_not_grow(name: str) -> None:
    tracemalloc.start()
    try:
        attack(TOO_LARGE[name], "too large")
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", OTHER)
def test_other_bombs(name: str) -> None:
    attack(*OTHER[name])


@pytest.mark.parametrize("name", ENDLESS)
def test_time_is_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.text.sandbox.MAX_TIME_S", 0.1)
    monkeypatch.setattr("edgespec.text.sandbox.MAX_SIZE", 4 * 1024 * 1024)
    attack(ENDLESS[name], r"longer than 0\.1 s")


def test_self_reference_ends() -> None:
    loop = "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a }}"
    assert ChatTemplate(loop, "", "").render([]) == "[<namespace>]"


def test_long_conversations_are_served() -> None:
    """The limits grow with the input: here it is larger than the limit for a short one."""
    messages = [Message("user", "x" * 20_000)] * 1000
    source = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content|trim }}{{ messages|length }}\n{% endfor %}"
    prompt = ChatTemplate(source, "", "").render(messages)
    assert len(prompt) == 1000 * len(f"user: {'x' * 20_000}1000\n")


def test_one_template_serves_threads_at_once() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "", "")
    wrong: list[str] = []

    def work(text: str) -> None:
        for _ in range(20):
            prompt = template.render([Message("user", text)] * 3)
            if prompt != text * 3:
                wrong.append(prompt)

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
