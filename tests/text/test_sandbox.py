"""Hostile templates end with TemplateError, soon and without filling the memory of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from edgespec.errors import TemplateError
from edgespec.isolated import Helper
from edgespec.text import chat_template
from edgespec.text.chat_template import ChatTemplate, Message

PATIENCE_S = 20.0  # machines may be busy
MEMORY = 200 * 2**20  # bytes, most of which Python and Jinja take

GROW = "{% set ns = namespace(s=START) %}{% for i in range(99) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


TOO_LARGE = {
    "repeat": "{{ 'a' * 10**9 }}",
    "double": grow("'aa'", "ns.s ~ ns.s"),
    "json": grow("'aa'", "[ns.s, ns.s]|tojson"),
    "width": "{{ '%999999999d' % 1 }}",
    "output": "{% for i in range(99999) %}{% for j in range(99) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
}
ENDLESS = {
    "loop": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 99 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "native": "{{ (9 ** 99999) ** 9999 }}",
    "shared lists": grow("[1]", "[ns.s, ns.s]").replace("|length", ""),
}
OTHER = {
    "range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "nested parentheses": ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "RecursionError"),
    "internals": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "words": ("{{ raise_exception('no' * 9999) }}", "refuses"),
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Helper]:
    """Time enough for a busy machine, and little memory."""
    with closing(Helper("edgespec.text.sandbox", None, PATIENCE_S, MEMORY)) as made:
        yield made


@pytest.fixture(scope="module")
def impatient() -> Iterator[Helper]:
    with closing(Helper("edgespec.text.sandbox", None, 0.3, 2**30)) as made:
        yield made


def attack(source: str, words: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(Exception, match=words) as caught:
        ChatTemplate(source, "", "").render([Message("user", "hi")])
    assert time.monotonic() - start_s < 2 * PATIENCE_S
    assert getattr(caught.value, "hint", "") and len(str(caught.value)) < 2000


@pytest.mark.parametrize("name", TOO_LARGE)
def test_values_do_not_grow(name: str, renderer: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDERER", renderer)
    attack(TOO_LARGE[name], "too much memory|MemoryError|too much text")


@pytest.mark.parametrize("name", ENDLESS)
def test_time_is_limited(name: str, impatient: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDERER", impatient)
    attack(ENDLESS[name], r"takes more than 0\.3 seconds")


@pytest.mark.parametrize("name", OTHER)
def test_other_bombs(name: str, renderer: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDERER", renderer)
    attack(*OTHER[name])


def test_formats_see_no_internals() -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        ChatTemplate("[{{ '{0.__class__}'.format('') }}]", "", "").render([])


def test_long_conversations_are_served() -> None:
    messages = [Message("user", "x" * 20_000)] * 1000
    source = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content|trim }}{{ messages|length }}\n{% endfor %}"
    prompt = ChatTemplate(source, "", "").render(messages)
    assert len(prompt) == 1000 * len(f"user: {'x' * 20_000}1000\n")


def test_one_template_serves_threads_at_once_also_after_a_hostile_one() -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{{ 'a' * 10**10 }}", "", "").render([])
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
