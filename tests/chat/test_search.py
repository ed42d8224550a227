"""Which conversations a query finds, in which order, and the line shown."""

from __future__ import annotations

import unicodedata
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.chat import Conversation, Store, Turn


def said(store: Store, *texts: str) -> Conversation:
    """A conversation of these user turns, one after the other."""
    conversation = store.new("toy")
    parent = None
    for text in texts:
        parent = store.add(conversation, parent, "user", text)
    return store.resume(conversation.id)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("hello", "Hello world"),
        ("STRASSE", "Straße"),
        ("ß\u0301", "ß\u0301"),  # folding it twice is not folding it once
        ("ΟΔΟΣ", "οδος"),
        ("caf\u00e9", "cafe\u0301"),
        ("world hello", "Hello, world"),
        ("ell orl", "hello world"),
        ("中文", "我说中文。"),
        ('"hello"', 'say "hello" to'),
        ("AND OR NOT NEAR", "near, not and, nor"),
        ("a_b*", "pow(a_b*2)"),
        ("-x ^y col:z (", "(col:z - -x ^y"),
        (";--", "DROP TABLE turns;--"),
        ("end", "nul\0then the end"),
        ("\ud800", "a lone \ud800"),
        ("\U0001f600", "a smile \U0001f600"),
    ],
)
def test_a_text_is_found(store: Store, query: str, text: str) -> None:
    conversation = said(store, text)
    said(store, "...")
    [found] = store.search(query)
    assert found.conversation == conversation
    assert found.turn == conversation.leaf


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("hello world", "hello word"),
        ("cafe", "caf\u00e9"),
        ("a_c", "abc"),
        ("a*", "abc"),
        ("NOT x", "abc"),
        ("", "abc"),
    ],
)
def test_a_text_is_not_found(store: Store, query: str, text: str) -> None:
    said(store, text)
    assert store.search(query) == []


def test_neither_reasoning_nor_a_conversation_without_turns_is_searched(store: Store) -> None:
    conversation = said(store, "red")
    store.finish(store.add(conversation, None, "assistant", ""), "answer", "green")
    store.rename(store.new("toy"), "green")
    assert store.search("green") == []


def test_an_unfinished_turn_is_searched_as_it_is_now(store: Store) -> None:
    conversation = said(store, "red")
    turn = store.add(conversation, None, "assistant", "")
    store.grow(turn, "green")
    assert [found.turn for found in store.search("green")] == [turn.id]
    store.finish(turn, "blue")
    assert store.search("green") == []
    assert [found.turn for found in store.search("blue")] == [turn.id]


def test_titles_are_searched(store: Store) -> None:
    conversation = store.rename(said(store, "red"), "Green\u00c9")
    [found] = store.search("green\u00e9")
    assert (found.conversation, found.turn, found.snippet) == (conversation, None, "Green\u00c9")
    [found] = store.search("red")
    assert found.turn == conversation.leaf
    store.rename(conversation, "Red")
    [found] = store.search("red")
    assert found.turn == conversation.leaf  # rather than the title


def test_the_newest_turn_of_each_conversation_last_changed_first(store: Store) -> None:
    first = said(store, "match one", "match two", "other")
    second = said(store, "match three")
    third = said(store, "other")
    third = store.rename(third, "match by title")
    assert [found.conversation for found in store.search("match")] == [third, second, first]
    assert [found.snippet for found in store.search("match")] == ["match by title", "match three", "match two"]
    assert [found.conversation for found in store.search("match", 2)] == [third, second]
    changed = store.add(first, None, "user", "other")
    assert [found.conversation.id for found in store.search("match")] == [first.id, third.id, second.id]
    assert changed.conversation == first.id


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short needle", "short needle"),
        ("a\n\tneedle\x1b[0m\0 b", "a needle [0m b"),
        ("x" * 100 + "needle" + "y" * 100, "…" + "x" * 30 + "needle" + "y" * 54 + "…"),
        ("ß" * 100 + "NEEDLE" + "y" * 100, "…" + "ß" * 30 + "NEEDLE" + "y" * 54 + "…"),
        ("e\u0301" * 100 + "needle", "…" + "\u00e9" * 30 + "needle"),
        ("needle " + "z " * 100, "needle " + "z " * 26 + "z…"),
    ],
)
def test_the_line_shown_is_around_what_was_found(store: Store, text: str, shown: str) -> None:
    said(store, text)
    [found] = store.search("needle")
    assert found.snippet == shown


LETTERS = st.text(st.sampled_from('abAßéE\u0301"*% \n\0'), max_size=12) | st.text(max_size=6)


def holds(text: str, query: str) -> bool:
    """Whether all words of `query` are in `text`, letter by letter."""
    fold = [unicodedata.normalize("NFC", t.encode("utf-8", "replace").decode()).casefold() for t in (text, query)]
    places = range(len(fold[0]) + 1)
    return all(any(fold[0].startswith(word, at) for at in places) for word in fold[1].split())


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.lists(LETTERS, min_size=1, max_size=4), max_size=5), query=LETTERS)
def test_search_is_what_looking_at_every_text_finds(texts: list[list[str]], query: str) -> None:
    with closing(Store.in_memory()) as store:
        turns = {}
        for number, each in enumerate(texts):
            conversation = store.rename(store.new("toy"), "-")  # a title of its own, that matches little
            inserted = store.insert(
                conversation,
                [Turn(n, 0, None, "user", text, "", [], {}, {}, True, 1.0) for n, text in enumerate(each)],
            )
            turns[number] = store.turns(inserted)
        expected = []
        for number in reversed(range(len(texts))):
            hits = [turn.id for turn in turns[number] if query.split() and holds(turn.text, query)]
            if hits or (query.split() and holds("-", query)):
                expected.append((turns[number][0].conversation, max(hits, default=None)))
        found = store.search(query)
        assert sorted((f.conversation.id, f.turn) for f in found) == sorted(expected)
        changes = [(f.conversation.changed, f.conversation.id) for f in found]
        assert changes == sorted(changes, reverse=True)
