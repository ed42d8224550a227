"""Conversations as Markdown, as JSON, and read back."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.chat import Conversation, Store, Turn, from_json, to_json, to_markdown
from edgespec.chat.conversation import drop_surrogates
from edgespec.errors import InvalidRequest


def example(store: Store) -> Conversation:
    """Two questions, the first with two answers, of which the first is gone on with."""
    conversation = store.new("toy", "Be brief.")
    question = store.add(conversation, None, "user", "Sort a list?\n")
    answer = store.add(conversation, question, "assistant", "", {"seed": 1})
    answer = store.finish(answer, "```python\nsorted(x)\n```", "A built-in.\n", [["```", 0]], {"seed": 2**64 - 1})
    store.finish(store.add(conversation, question, "assistant", ""), "Other.")
    store.add(conversation, store.add(conversation, answer, "user", "And?"), "assistant", "")
    return store.resume(conversation.id)


def test_markdown_of_the_current_branch(store: Store) -> None:
    conversation = example(store)
    store.grow(store.path(conversation.leaf)[-1], "  So:\n\n```\nunfinished", "thinks\n```\nof code")
    assert to_markdown(store, conversation) == (
        "# Sort a list?\n\nModel: toy\n\n## System\n\nBe brief.\n\n"
        "## User\n\nSort a list?\n\n"
        "## Assistant\n\n<details><summary>Reasoning</summary>\n\nA built-in.\n\n</details>\n\n"
        "```python\nsorted(x)\n```\n\n"
        "## User\n\nAnd?\n\n"
        "## Assistant\n\n<details><summary>Reasoning</summary>\n\nthinks\n```\nof code\n```\n\n</details>\n\n"
        "  So:\n\n```\nunfinished\n```\n"
    )


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("```\ncode", "\n```"),
        ("```\ncode\n```", ""),
        ("```\na\n```\n```\nb", "\n```"),
    ],
)
def test_an_open_code_block_is_closed(store: Store, text: str, added: str) -> None:
    conversation = store.new("toy")
    store.add(conversation, None, "assistant", text)
    assert to_markdown(store, store.resume(conversation.id)).endswith(f"## Assistant\n\n{text}{added}\n")


def shape(turns: list[Turn]) -> list[Any]:
    """Turns with parents by place rather than by id."""
    places = {turn.id: place for place, turn in enumerate(turns)}
    return [
        (
            turn.parent if turn.parent is None else places[turn.parent],
            *(turn.role, turn.text, turn.reasoning, turn.spans, turn.settings, turn.metrics, turn.finished),
            turn.created,
        )
        for turn in turns
    ]


def same(store: Store, first: Conversation, second: Conversation) -> bool:
    """Whether two conversations differ in their ids alone."""
    a, b = store.turns(first), store.turns(second)
    leaves = [[turn.id for turn in turns].index(c.leaf) if c.leaf else None for turns, c in ((a, first), (b, second))]
    heads = [(c.title, c.renamed, c.model, c.system, c.created, c.changed) for c in (first, second)]
    return shape(a) == shape(b) and leaves[0] == leaves[1] and heads[0] == heads[1]


@pytest.mark.parametrize("title", ["", "Sorting"])
def test_json_brings_everything_back(store: Store, title: str) -> None:
    conversation = example(store)
    conversation = store.rename(conversation, title)
    conversation = store.select(conversation, store.turns(conversation)[2])
    text = to_json(store, conversation)
    assert text.isascii()
    copy = store.insert(*from_json(text))
    assert copy.id != conversation.id
    assert same(store, conversation, copy)
    assert {turn.conversation for turn in store.turns(copy)} == {copy.id}
    assert len(store.recent()) == 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
WEIRD = st.text(st.characters(exclude_categories=()) | st.sampled_from("\0\ud800\n`"), max_size=20)
TIMES = st.floats(0, 1e10)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Conversation, list[Turn]]:
    turns: list[Turn] = []
    for id in draw(st.permutations(range(draw(st.integers(0, 6))))):
        parent = draw(st.sampled_from([None, *(turn.id for turn in turns)]))
        role = draw(st.sampled_from(("user", "assistant")))
        spans, texts = draw(st.lists(st.lists(VALUES, max_size=2), max_size=2)), (draw(WEIRD), draw(WEIRD))
        values = (spans, draw(OBJECTS), draw(OBJECTS), draw(st.booleans()), draw(TIMES))
        turns.append(Turn(id, 0, parent, role, *texts, *values))
    leaf = draw(st.sampled_from([None, *(turn.id for turn in turns)]))
    renamed, title, system = draw(st.booleans()), draw(WEIRD), draw(st.none() | WEIRD)
    return Conversation(0, title, renamed, draw(WEIRD), system, leaf, draw(TIMES), draw(TIMES)), turns


@settings(deadline=None, max_examples=40)
@given(trees())
def test_any_conversation_comes_back_from_json(tree: tuple[Conversation, list[Turn]]) -> None:
    with closing(Store.in_memory()) as store:
        inserted = store.insert(*tree)
        turns = store.turns(inserted)
        assert [turn.text for turn in turns] == [drop_surrogates(turn.text) for turn in tree[1]]
        copy = store.insert(*from_json(to_json(store, inserted)))
        assert same(store, inserted, copy)
        with closing(Store.in_memory()) as other:
            again = other.insert(*from_json(to_json(store, copy)))
            assert shape(other.turns(again)) == shape(turns)
        assert to_markdown(store, copy) == to_markdown(store, inserted)


def test_insert_is_all_or_nothing(store: Store) -> None:
    conversation, turns = from_json(to_json(store, example(store)))
    before = store.recent()
    with pytest.raises(KeyError):
        store.insert(conversation, turns[1:])
    with pytest.raises(KeyError):
        store.insert(conversation, turns[:1])
    assert store.recent() == before


def test_a_title_from_elsewhere_is_one_short_line(store: Store) -> None:
    conversation, turns = from_json(to_json(store, store.rename(example(store), "Mine")))
    state = json.loads(to_json(store, store.insert(conversation, turns)))
    state["title"] = "\x1b[31m two\nlines " + "x" * 100
    copy = store.insert(*from_json(json.dumps(state)))
    assert (copy.title, copy.renamed) == ("[31m two", True)


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        ("edgespec_conversation", ..., "'edgespec_conversation' is not 1"),
        ("edgespec_conversation", 2, "'edgespec_conversation' is not 1"),
        ("turns", ..., "turns: "),
        ("turns", [1], "turns.0: "),
        ("title", None, "title: "),
        ("renamed", ..., "'renamed' is missing"),
        ("leaf", 99, "the leaf 99 is not one of its turns"),
        ("changed", 10**400, "it is not JSON: 1000"),
    ],
)
def test_a_malformed_conversation_is_refused(store: Store, key: str, value: Any, wrong: str) -> None:
    state = json.loads(to_json(store, example(store)))
    assert from_json(json.dumps(state))
    refused(changed(state, key, value), wrong)


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        ("id", ..., "'turns.1.id' is missing"),
        ("id", 1, "the id 1 occurs twice"),
        ("parent", 3, "the parent 3 is not an earlier turn"),
        ("role", "system", "turns.1.role: "),
        ("text", 1, "turns.1.text: "),
        ("spans", {}, "turns.1.spans: "),
        ("spans", ["a"], "the spans of turn 2 are not lists"),
        ("settings", [], "turns.1.settings: "),
        ("metrics", {"a": {"b": 10**400}}, "it is not JSON: 1000"),
        ("finished", "x", "turns.1.finished: "),
        ("created", None, "turns.1.created: "),
    ],
)
def test_a_malformed_turn_is_refused(store: Store, key: str, value: Any, wrong: str) -> None:
    state = json.loads(to_json(store, example(store)))
    state["turns"][1] = changed(state["turns"][1], key, value)
    refused(state, wrong)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Dear diary", "it is another kind of file."),
        ("{", "it is not JSON"),
        ('{"a": NaN}', "it is not JSON: NaN is not a number"),
        ('{"a": 1e999}', "it is not JSON: 1e999 is not a number"),
        ('{"a": ' + "9" * 5000 + "}", "it is not JSON: 9999"),
        ("[" * 200_000, "it is not JSON: maximum recursion depth"),
        ("null", "'edgespec_conversation' is not 1"),
    ],
)
def test_what_is_no_conversation_is_refused(text: str, wrong: str) -> None:
    refused(text, wrong)


def changed(entry: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with another value, or without the key for `...`."""
    rest = {k: v for k, v in entry.items() if k != key}
    return rest if value is ... else {**rest, key: value}


def refused(state: dict[str, Any] | str, wrong: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_json(state if isinstance(state, str) else json.dumps(state))
    assert caught.value.message.startswith(f"this is not an exported conversation: {wrong}")
    assert "export" in caught.value.hint
