"""Trees of turns, autosave, and several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.chat import Conversation, Store, Turn
from edgespec.errors import CacheError, InvalidRequest
from tests.chat.children import outcome, start
from tests.models.test_versions import keep_trainings


def asked(store: Store, text: str, answer: str = "Yes.") -> tuple[Conversation, Turn, Turn]:
    """A conversation of one question and its answer."""
    conversation = store.new("toy")
    question = store.add(conversation, None, "user", text)
    reply = store.finish(store.add(conversation, question, "assistant", ""), answer)
    return store.resume(conversation.id), question, reply


def test_a_conversation_is_read_as_it_was_written(path: Path) -> None:
    store = Store.open(path)
    conversation = store.new("toy", "Be brief.")
    question = store.add(conversation, None, "user", "Why?")
    answer = store.add(conversation, question, "assistant", "", {"seed": 3, "draft": None})
    assert question.finished and not answer.finished
    made = {"seed": 3, "draft": None}
    assert (answer.parent, answer.conversation, answer.settings) == (question.id, conversation.id, made)
    grown = store.grow(answer, "Be", "Hm", [["Be", 0]])
    assert (grown.text, grown.reasoning, grown.spans, grown.finished) == ("Be", "Hm", [["Be", 0]], False)
    done = store.finish(answer, "Because.", "Hmm.", [["Be", 0], ["cause.", 3]], {"tokens": 4})
    assert (done.text, done.reasoning, done.finished, done.metrics) == ("Because.", "Hmm.", True, {"tokens": 4})
    assert (done.spans, done.settings, done.created) == ([["Be", 0], ["cause.", 3]], answer.settings, answer.created)
    store.close()

    store = Store.open(path)
    again = store.resume(conversation.id)
    assert (again.model, again.system, again.title, again.leaf) == ("toy", "Be brief.", "Why?", answer.id)
    assert again.created == conversation.created <= question.created < again.changed
    assert store.path(again.leaf) == store.path(done) == [question, done]
    assert store.notice is None
    store.close()


def test_retry_and_edit_keep_what_was_there(store: Store) -> None:
    conversation, question, first = asked(store, "Why?")
    second = store.finish(store.add(conversation, question, "assistant", ""), "No.")
    edited = store.add(conversation, None, "user", "Why not?")
    third = store.add(conversation, edited, "assistant", "")
    of_edited = store.finish(store.add(conversation, edited, "assistant", ""), "Why.")
    assert store.branches(conversation) == {
        None: [question.id, edited.id], question.id: [first.id, second.id], edited.id: [of_edited.id]
    }, "the third answer is empty"  # fmt: skip
    assert store.resume(conversation.id).leaf == of_edited.id
    assert store.newest_leaf(question.id) == second
    assert store.newest_leaf(first.id) == first
    assert store.newest_leaf(edited.id) == of_edited
    follow_up = store.add(conversation, first, "user", "Sure?")
    assert store.newest_leaf(question.id) == follow_up
    assert store.path(follow_up) == [question, first, follow_up]
    assert store.path(third) == [edited, third]
    assert store.turns(conversation) == [question, first, second, edited, third, of_edited, follow_up]


def test_a_finished_answer_grows_again_once_it_is_reopened(store: Store) -> None:
    conversation, question, answer = asked(store, "Why?", "Since")
    reopened = store.reopen(answer)
    assert not reopened.finished and reopened.text == "Since"
    assert store.grow(reopened, "Since it").text == "Since it" and not store.path(answer)[-1].finished
    done = store.finish(reopened, "Since it is.", metrics={"tokens": 3})
    assert done.finished and store.path(store.resume(conversation.id).leaf) == [question, done]
    assert [hit.turn for hit in store.search("it is")] == [answer.id]
    assert store.reopen(question).finished, "only an answer grows"


def test_select_says_where_a_conversation_goes_on(store: Store) -> None:
    conversation, question, answer = asked(store, "Why?")
    assert store.select(conversation, question).leaf == question.id
    assert store.select(conversation, answer) == store.resume(conversation.id)
    assert store.select(conversation, None).leaf is None
    assert store.path(None) == store.path(99) == []


def test_a_finished_turn_is_not_rewritten(store: Store) -> None:
    _, question, answer = asked(store, "Why?")
    for rewrite in (store.grow, store.finish):
        for turn in (question, answer):
            with pytest.raises(CacheError, match=f"turn {turn.id} is finished already"):
                rewrite(turn, "Other")
    assert store.path(answer) == [question, answer]


def test_what_is_not_json_is_refused_and_changes_nothing(store: Store) -> None:
    conversation, question, _ = asked(store, "Why?")
    turn = store.add(conversation, question, "assistant", "")
    with pytest.raises(TypeError):
        store.add(conversation, question, "assistant", "", {"a": object()})
    with pytest.raises(ValueError):
        store.grow(turn, "a", spans=[[float("nan")]])
    with pytest.raises(TypeError):
        store.finish(turn, "a", metrics={"a": b""})
    assert store.turns(conversation)[2:] == [turn]


def test_titles(store: Store) -> None:
    conversation = store.new("toy")
    assert conversation.title == "Untitled"
    store.add(conversation, None, "user", "\n \n\tHow  do\x1b I\nsort?")
    store.add(conversation, None, "user", "Later")
    assert store.resume(conversation.id).title == "How do I"
    named = store.rename(conversation, " Sorting\nlists ")
    assert (named.title, named.renamed) == ("Sorting", True)
    assert store.rename(conversation, " ").title == "How do I"
    long = store.rename(conversation, "word " * 40).title
    assert long == "word " * 11 + "word…"
    assert store.rename(conversation, "x" * 70).title == "x" * 59 + "…"


def test_recent_lists_what_has_turns_by_its_last_change(store: Store) -> None:
    store.new("toy")
    first, question, _ = asked(store, "One")
    second, _, _ = asked(store, "Two")
    assert [c.title for c in store.recent()] == ["Two", "One"]
    growing = store.add(first, question, "assistant", "")
    assert [c.id for c in store.recent()] == [first.id, second.id]
    store.add(second, None, "user", "Three")
    assert [c.id for c in store.recent()] == [second.id, first.id]
    store.grow(growing, "a")
    assert [c.id for c in store.recent(1)] == [first.id]


def test_what_is_removed_is_gone(store: Store, path: Path) -> None:
    conversation, question, _ = asked(store, "a secret question")
    kept, _, _ = asked(store, "Kept")
    growing = store.add(conversation, question, "assistant", "")
    store.remove(conversation)
    store.remove(conversation)
    assert store.recent() == [kept]
    assert store.turns(conversation) == []
    with pytest.raises(InvalidRequest, match=f"there is no conversation {conversation.id}"):
        store.resume(conversation.id)
    gone: list[Callable[[], object]] = [
        lambda: store.grow(growing, "a"),
        lambda: store.finish(growing, "a"),
    ]
    for call in gone:
        with pytest.raises(CacheError, match=f"turn {growing.id} has been removed"):
            call()
    gone = [
        lambda: store.add(conversation, question, "assistant", ""),
        lambda: store.rename(conversation, "a"),
        lambda: store.select(conversation, None),
    ]
    for call in gone:
        with pytest.raises(CacheError, match=f"conversation {conversation.id} has been removed"):
            call()
    assert store.new("toy").id > kept.id  # no id is given out twice
    store.close()
    assert b"secret" not in path.read_bytes()


def test_a_training_that_has_not_ended_has_no_text_of_what_is_removed(store: Store, path: Path) -> None:
    conversation = store.new("toy")
    adapted, head, own = keep_trainings(path.parent)
    store.remove(conversation)
    assert not adapted.exists() and head.exists() and own.exists()


@pytest.mark.parametrize("id", [0, -1, 7, 2**63, 10**30])
def test_a_conversation_that_is_not_there_is_not_resumed(store: Store, id: int) -> None:
    asked(store, "Why?")
    with pytest.raises(InvalidRequest, match=f"there is no conversation {id}"):
        store.resume(id)


def test_lone_surrogates_and_nul(store: Store) -> None:
    conversation = store.new("m\udfff", "s\ud800")
    turn = store.add(conversation, None, "user", "a\0b \ud83d\ude00 \ud800c")
    assert turn.text == "a\0b \U0001f600 \ufffdc"
    assert store.resume(conversation.id).title == "a b \U0001f600 \ufffdc"
    answer = store.finish(store.add(conversation, turn, "assistant", ""), "\0", "\ud800", [["\ud800\0", 1]])
    assert (answer.text, answer.reasoning, answer.spans) == ("\0", "\ufffd", [["\ud800\0", 1]])
    assert (conversation.model, conversation.system) == ("m\ufffd", "s\ufffd")
    assert store.rename(conversation, "x\udc00y").title == "x\ufffdy"
    assert store.set_system(conversation, "\ud800").system == store.set_model(conversation, "\ud800").model == "\ufffd"


GROW = """
store = Store.open(path)
conversation = store.new("toy")
turn = store.add(conversation, store.add(conversation, None, "user", "Count."), "assistant", "")
number = 0
while True:
    number += 1
    store.grow(turn, f"{number} " * 200, f"thought {number}")
    print(number, flush=True)
"""


def test_a_killed_process_loses_nothing_that_was_grown(path: Path) -> None:
    lines = 20
    child = start(GROW, path)
    assert child.stdout
    for _ in range(lines):
        child.stdout.readline()
    child.kill()
    said = [lines, *map(int, child.stdout.read().split("\n")[:-1])]
    child.communicate()
    store = Store.open(path)
    [conversation] = store.recent()
    question, answer = store.path(conversation.leaf)
    written = int(answer.text.split()[0])
    assert said[-1] <= written <= said[-1] + 1  # the last may have been written and not yet said
    assert (answer.text, answer.reasoning) == (f"{written} " * 200, f"thought {written}")
    assert (question.finished, answer.finished, store.notice) == (True, False, None)
    assert store.finish(answer, "Stopped.").finished
    store.close()


WRITE = """
store = Store.open(path, wait_s=30)
print(store.notice, flush=True)
sys.stdin.readline()
for number in range(20):
    conversation = store.new("toy")
    question = store.add(conversation, None, "user", f"{sys.argv[1]} {number}")
    answer = store.add(conversation, question, "assistant", "")
    store.grow(answer, "half")
    store.finish(answer, f"whole {number}")
"""


def test_processes_that_write_at_once_lose_nothing(path: Path) -> None:
    children = [start(WRITE, path) for _ in range(2)]
    for child in children:
        assert child.stdout and child.stdout.readline() == "None\n"
    for child in children:
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        outcome(child)
    store = Store.open(path)
    listed = store.recent(1000)
    texts = [tuple(turn.text for turn in store.path(conversation.leaf)) for conversation in listed]
    assert sorted(texts) == sorted(2 * [(f"{path} {n}", f"whole {n}") for n in range(20)])
    assert all(turn.finished for conversation in listed for turn in store.turns(conversation))
    store.close()


def test_what_another_writes_is_seen_at_once(store: Store, path: Path) -> None:
    conversation, _, answer = asked(store, "Why?")
    other = Store.open(path)
    more = other.add(conversation, answer, "user", "And then?")
    assert store.path(store.resume(conversation.id).leaf)[-1] == more
    store.remove(conversation)
    assert other.recent() == []
    other.close()
