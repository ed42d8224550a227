"""A memory as an engine uses it: at once, after a build, after a restart, without a usable folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Thread

import pytest

from edgespec.memory import queries
from edgespec.memory.administration import TextStore
from edgespec.memory.database import Database
from edgespec.memory.memory import Memory
from edgespec.memory.texts import SpaceKey, StoredText
from tests.memory.texts import N_LONG, build, has_text, make_tokens

LIMIT = 2**30
SEGMENTS = "*.segment"


@pytest.fixture
def memory(folder: Path) -> Iterator[Memory]:
    memory = Memory(folder, "tokenizer", LIMIT)
    yield memory
    memory.close()


class Counter:
    """Something that a drafter learns."""

    def __init__(self, saved: bytes | None) -> None:
        self.n = int(saved or b"0")

    def dump(self) -> bytes:
        return str(self.n).encode()


def test_a_text_is_found_at_once_after_a_build_and_after_a_restart(folder: Path) -> None:
    tokens = make_tokens(0)
    memory = Memory(folder, "tokenizer", LIMIT)
    space = memory.space("")
    assert memory.space("") is space
    assert space.find(tokens, 1) is None and space.find([], 1) is None
    space.add(tokens, 50, None)
    live = space.find(tokens[:100], 1)
    assert live is not None and live.places[0].is_live and live.length == 32
    assert live.places[0].read(10**9) == tokens[100:]
    memory.flush()
    assert not list(folder.glob(SEGMENTS)), "the engine is not idle"
    build(memory)
    assert len(list(folder.glob(SEGMENTS))) == 1
    cold = space.find(tokens[:100], 1)
    assert cold is not None and not cold.places[0].is_live and cold.places[0].read(5) == tokens[100:105]
    assert live.places[0].read(5) == tokens[100:105], "a place stays valid"
    space.add(make_tokens(1, 500), 50, None)
    memory.close()

    memory = Memory(folder, "tokenizer", LIMIT)
    space = memory.space("")
    assert has_text(space, tokens) and has_text(space, make_tokens(1, 500))
    assert memory.take_notice() is None
    memory.close()


def test_indexes_are_built_when_an_engine_is_closed_that_was_never_idle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.memory.memory._CLOSING_S", 60.0)
    memory = Memory(folder, "tokenizer", LIMIT)
    memory.space("").add(make_tokens(0), 50, None)
    memory.close()
    assert len(list(folder.glob(SEGMENTS))) == 1


def test_kinds(memory: Memory) -> None:
    space = memory.space("")
    tokens = make_tokens(0, 300)
    space.add(tokens, 128, None)
    for end, kind in ((1, "prompt"), (127, "prompt"), (128, "answer"), (299, "answer")):
        matches = space.find(tokens[:end], 1)
        assert matches is not None and matches.places[0].kind == kind, end


def test_the_next_turn_of_a_conversation_is_stored_without_what_is_known(folder: Path, memory: Memory) -> None:
    space = memory.space("")
    tokens = make_tokens(0, 1000)
    for n in (300, 640, 641, 1000):
        space.add(tokens[:n], n - 30, "1")
        space.add(tokens[:n], n - 30, "2")
    memory.flush()
    store = TextStore.open(folder)
    assert sum(each.n_tokens for each in store.status()) == 300 + (640 - 256) + 1 + (1000 - 640)
    store.close()
    for end in (40, 250, 650, 990):
        matches = space.find(tokens[:end], 9)
        assert matches is not None and matches.length == min(end, 32) and len(matches.places) == 1
        assert matches.places[0].read(3) == tokens[end : end + 3]
    assert len(space.index.live) <= 2, "the indexes of small texts are merged"


def test_the_same_block_after_another_beginning_is_stored_again(memory: Memory) -> None:
    space = memory.space("")
    first, second, common = make_tokens(0, 128), make_tokens(1, 128), make_tokens(2, 128)
    space.add([*first, *common], 0, None)
    space.add([*second, *common], 0, None)
    for beginning in (first, second):
        assert has_text(space, [*beginning, *common], end=126)


def test_namespaces_and_tokenizers_do_not_see_each_other(folder: Path, memory: Memory) -> None:
    tokens = make_tokens(0)
    memory.space("a").add(tokens, 0, None)
    build(memory)
    other = Memory(folder, "other tokenizer", LIMIT)
    assert has_text(memory.space("a"), tokens)
    assert memory.space("b").find(tokens, 1) is None and other.space("a").find(tokens, 1) is None
    other.close()


def test_files_are_private(folder: Path, memory: Memory) -> None:
    memory.space("").add(make_tokens(0), 0, None)
    build(memory)
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert set(modes.values()) == {0o600} and len(modes) == 5, modes


def test_what_a_drafter_has_learned_outlives_the_engine(folder: Path) -> None:
    memory = Memory(folder, "tokenizer", LIMIT)
    learned = memory.space("").table("counter", Counter)
    assert memory.space("").table("counter", Counter) is learned and learned.n == 0
    learned.n = 7
    memory.space("another").table("counter", Counter).n = 8
    memory.close()
    memory = Memory(folder, "tokenizer", LIMIT)
    assert memory.space("").table("counter", Counter).n == 7
    assert memory.space("another").table("counter", Counter).n == 8
    assert memory.space("new").table("counter", Counter).n == 0
    memory.close()


def test_texts_that_were_of_no_use_for_longest_are_removed(folder: Path) -> None:
    memory = Memory(folder, "tokenizer", limit_bytes=12 * 4 * N_LONG)  # four texts with their indexes
    space = memory.space("")
    texts = [make_tokens(seed) for seed in range(4)]
    for text in texts[:3]:
        space.add(text, 0, None)
        build(memory)
    assert has_text(space, texts[0])
    space.add(texts[3], 0, None)
    build(memory)
    assert [has_text(space, text) for text in texts] == [True, False, True, True]
    assert sum(file.stat().st_size for file in folder.glob(SEGMENTS)) < 9 * 3 * N_LONG
    memory.close()


def test_the_limit_holds_under_load_and_what_was_removed_is_stored_again(folder: Path) -> None:
    memory = Memory(folder, "tokenizer", limit_bytes=12 * 4 * N_LONG)  # four texts with their indexes
    space = memory.space("")
    for seed in (0, 1, 2, 3, 4, 0):  # the engine is never idle
        space.refresh()
        space.add(make_tokens(seed), 0, None)
        memory.flush()
    store = TextStore.open(folder)
    assert sum(each.n_tokens for each in store.status()) <= 4 * N_LONG
    assert list(store.export())[-1].tokens == make_tokens(0)
    store.close()
    memory.close()


def test_what_was_learned_does_not_outgrow_the_limit(folder: Path) -> None:
    memory = Memory(folder, "tokenizer", limit_bytes=100)
    memory.space("").table("counter", Counter).n = 10**200
    memory.close()
    for seed in range(2):
        memory = Memory(folder, "tokenizer", limit_bytes=100)
        memory.space("other").add(make_tokens(seed, 100), 0, None)
        memory.flush()
        assert memory.take_notice() is None
        memory.close()
    memory = Memory(folder, "tokenizer", LIMIT)
    assert memory.space("").table("counter", Counter).n == 0
    memory.close()


def test_a_source_may_be_any_string(folder: Path, memory: Memory) -> None:
    memory.space("").add(make_tokens(0, 100), 0, "lone \ud800")
    memory.flush()
    store = TextStore.open(folder)
    assert store.forget("lone \ud800") == 100
    store.close()


def test_the_order_of_texts_needs_no_clock(folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    space = memory.space("")
    common = make_tokens(0, 40)
    for i, now in enumerate((2e9, 1e9, 0.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        space.add([*make_tokens(i + 1), *common, i], 0, None)
        build(memory)
    matches = space.find(common, 3)
    assert matches is not None and [place.read(1) for place in matches.places] == [[2], [1], [0]]


def test_without_a_folder_texts_are_kept_in_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    memory = Memory(blocked / "memory", "tokenizer", LIMIT)
    notice = memory.take_notice()
    assert notice is not None and "Earlier texts are not stored." in notice and memory.take_notice() is None
    memory.space("").add(make_tokens(0), 0, None)
    memory.space("").table("counter", Counter).n = 1
    build(memory)
    assert has_text(memory.space(""), make_tokens(0))
    memory.close()
    assert blocked.read_text() == "not a folder"


def test_an_answer_begins_while_a_text_is_being_stored(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    is_storing, may_end = Event(), Event()

    def add_slowly(database: Database, key: SpaceKey, texts: Sequence[StoredText]) -> None:
        with database.write():
            is_storing.set()
            may_end.wait(20)

    monkeypatch.setattr(queries, "add_texts", add_slowly)
    space = memory.space("")
    space.add(make_tokens(0), 0, None)
    assert is_storing.wait(20)
    begun = Thread(target=space.refresh, daemon=True)
    begun.start()
    begun.join(10)
    assert not begun.is_alive()
    may_end.set()
