"""What commands do with the stored texts; what is left of those that were forgotten, in files and in engines."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from edgespec.errors import CacheError
from edgespec.memory import queries
from edgespec.memory.administration import TextStore
from edgespec.memory.database import Database
from edgespec.memory.index import plan_build
from edgespec.memory.memory import Memory
from edgespec.memory.segments import build_segment
from edgespec.memory.texts import SpaceKey
from tests.memory.texts import build, find_bytes, has_text, make_tokens

LIMIT = 2**30
LEARNED = bytes(range(100, 200))


class Learned:
    def __init__(self, saved: bytes | None) -> None:
        self.saved = saved

    def dump(self) -> bytes:
        return LEARNED


def fill(folder: Path) -> Memory:
    """An engine's memory with texts 0 to 3, the first two of conversation "1"; 2 and 3 are of another namespace."""
    memory = Memory(folder, "tokenizer", LIMIT)
    for seed, (namespace, source) in enumerate((("", "1"), ("", "1"), ("key", "2"), ("key", None))):
        memory.space(namespace).add(make_tokens(seed), 5000, source)
        memory.space(namespace).table("learned", Learned)
    build(memory)
    return memory


def add(store: TextStore, documents: list[tuple[str, list[int]]], limit_bytes: int = LIMIT) -> int:
    """Store documents; returns the number of tokens that are new."""
    corpus = store.open_corpus("tokenizer", limit_bytes=limit_bytes)
    n_new = sum(corpus.add(Path(source), tokens) for source, tokens in documents)
    corpus.finish()
    return n_new


def left(folder: Path) -> list[bool]:
    """Whether anything of the texts 0 to 3 is in the files."""
    return [bool(find_bytes(folder, make_tokens(seed))) for seed in range(4)]


def test_nothing_is_left_of_a_forgotten_conversation(folder: Path, store: TextStore) -> None:
    memory = fill(folder)
    assert left(folder) == [True] * 4
    space = memory.space("")
    small = make_tokens(4, 500)
    space.add(small, 0, "1")
    memory.flush()
    assert space.index.live and has_text(space, small)
    assert store.forget("1") == 40_500 and store.forget("1") == 0
    assert left(folder) == [False, False, True, True] and not find_bytes(folder, small)
    learned = space.table("learned", Learned)
    space.refresh()
    assert space.find(make_tokens(0), 1) is None and space.find(small[:100], 1) is None
    assert has_text(memory.space("key"), make_tokens(2))
    assert space.table("learned", Learned) is not learned
    memory.close()
    assert left(folder) == [False, False, True, True]


def test_nothing_is_left_of_a_namespace_and_of_all(folder: Path, store: TextStore) -> None:
    fill(folder).close()
    assert any(LEARNED in file.read_bytes() for file in folder.iterdir())
    assert store.clear("key") == 40_000
    assert left(folder) == [True, True, False, False]
    assert [status.namespace for status in store.status()] == [""]
    assert store.clear() == 40_000
    assert left(folder) == [False] * 4 and store.status() == []
    assert not any(LEARNED in file.read_bytes() for file in folder.iterdir())
    assert not list(folder.glob("*.segment")) and store.size() < 100_000


def test_files_of_killed_processes_and_damaged_ones_are_removed_too(folder: Path, store: TextStore) -> None:
    fill(folder).close()
    text = bytes(make_tokens(0, 100)[0].to_bytes(4, "little")) * 100
    for name in (".1-2-ab.segment.cd", "1-2-ab.segment", "memory.db.damaged-1", "memory.db.damaged-1-wal"):
        (folder / name).write_bytes(text)
    memory = Memory(folder, "tokenizer", LIMIT)
    memory.space("")
    memory.flush()
    memory.close()
    kept = {file.name for file in folder.iterdir() if text in file.read_bytes()}
    assert kept == {"memory.db.damaged-1", "memory.db.damaged-1-wal"}
    store.forget("1")
    assert not any(text in file.read_bytes() for file in folder.iterdir())


def test_what_was_learned_from_texts_that_are_forgotten_meanwhile_is_not_saved(folder: Path, store: TextStore) -> None:
    memory = Memory(folder, "tokenizer", LIMIT)
    space = memory.space("")
    asked: list[bytes] = []

    class Forgetting(Learned):
        def dump(self) -> bytes:
            if not asked:  # another process forgets, and a generation begins
                store.clear()
                space.refresh()
            asked.append(LEARNED)
            return LEARNED

    space.add(make_tokens(0, 500), 0, None)
    space.table("learned", Forgetting)
    memory.close()
    assert asked == [LEARNED]
    assert not any(LEARNED in file.read_bytes() for file in folder.iterdir())


def test_a_text_that_is_forgotten_before_it_is_stored_is_not_stored(folder: Path, store: TextStore) -> None:
    """Conversations are deleted while an engine answers: the answer may be of one of them."""
    memory = fill(folder)
    space = memory.space("")
    space.refresh()
    store.forget("1")
    epoch = space.epoch
    space.add(make_tokens(7), 0, "1")
    memory.flush()
    assert not find_bytes(folder, make_tokens(7)) and not has_text(space, make_tokens(7))
    space.refresh()
    space.add(make_tokens(8), 0, "1", epoch)
    memory.flush()
    assert not find_bytes(folder, make_tokens(8)) and not has_text(space, make_tokens(8))
    space.add(make_tokens(9), 0, "1")
    memory.flush()
    assert find_bytes(folder, make_tokens(9))
    memory.close()


def test_a_segment_that_is_built_while_its_text_is_forgotten_is_not_written(folder: Path, store: TextStore) -> None:
    key = SpaceKey("tokenizer", "")
    database = Database.open(folder)
    add(store, [("a", make_tokens(0)), ("b", make_tokens(1))])
    plan = plan_build(queries.list_unindexed(database, key), [])
    assert plan is not None and plan.n_tokens == 40_000
    epoch = queries.read_epoch(database)
    data = build_segment(queries.read_texts(database, key, plan.first, plan.last))
    store.forget("a")
    queries.add_segment(database, key, plan, data, epoch)
    assert not queries.list_segments(database, key) and not list(folder.glob("*.segment"))
    database.close()


def test_removing_says_so_where_another_process_still_reads(folder: Path, store: TextStore) -> None:
    fill(folder).close()
    reader = sqlite3.connect(folder / "memory.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM texts").fetchone()
    impatient = TextStore.open(folder, wait_s=0.01)
    with pytest.raises(CacheError, match="another process reads it"):
        impatient.clear()
    reader.close()
    impatient.clear()
    impatient.close()
    assert left(folder) == [False] * 4


def test_documents(folder: Path, store: TextStore) -> None:
    first, second = make_tokens(0), make_tokens(1, 100)
    corpus = store.open_corpus("tokenizer")
    added = [(Path("/a/a.py"), first), (Path("/a/b.py"), second), (Path("/empty"), [])]
    assert [corpus.add(*each) for each in added] == [20_000, 100, 0]
    assert [corpus.add(Path("/a/a.py"), first), corpus.add(Path("/ab"), second)] == [0, 0]
    memory = Memory(folder, "tokenizer", LIMIT)
    matches = memory.space("").find(first[:40], 1)
    assert matches is not None and matches.places[0].kind == "corpus"
    memory.space("").add(make_tokens(2, 300), 0, "1")
    memory.close()
    (status,) = store.status()
    assert (status.n_tokens, status.n_corpus_tokens, status.n_documents) == (20_400, 20_100, 2)
    assert store.forget_path(Path("/a/a")) == 0 and store.forget_path(Path("/a/a.py")) == 20_000
    assert store.forget_path(Path("/a")) == 100 and store.forget_path(Path("/")) == 0
    assert store.open_corpus("tokenizer").add(Path("/a/a.py"), first) == 20_000
    assert store.clear(only_documents=True) == 20_000 and not find_bytes(folder, first)
    assert [record.source for record in store.export()] == ["1"]


def test_new_tokens_of_answers_are_counted_once(folder: Path, store: TextStore) -> None:
    first, second = make_tokens(1, 300), make_tokens(2, 100)
    with closing(Memory(folder, "t", LIMIT)) as memory:
        memory.space("").add(first, 100, "chat:1")
        memory.space("").add([*first, *second], 350, "chat:1")  # the next turn, of which 50 tokens are the answer
        memory.space("key:a").add(make_tokens(3, 80), 40, None)
        memory.flush()
    corpus = store.open_corpus("t", limit_bytes=LIMIT)
    corpus.add(Path("/notes.txt"), make_tokens(4, 500))
    corpus.finish()
    newest = max(space.newest for space in store.status())
    assert store.count_answers("t", 0.0) == 200 + 50 and store.count_answers("other", 0.0) == 0
    assert store.count_answers("t", newest) == 0 and store.count_answers("t", 0.0, "key:a") == 40


def test_an_export_has_all_tokens_by_kind(folder: Path, store: TextStore) -> None:
    memory = Memory(folder, "tokenizer", LIMIT)
    tokens = make_tokens(0, 500)
    memory.space("key").add(tokens[:300], 200, "1")
    memory.space("key").add(tokens, 350, "1")
    memory.close()
    records = [(each.kind, each.tokens) for each in store.export()]
    assert records == [
        ("prompt", tokens[:200]),
        ("answer", tokens[200:300]),
        ("prompt", tokens[256:350]),
        ("answer", tokens[350:]),
    ]
    assert {(each.tokenizer, each.namespace, each.source) for each in store.export()} == {("tokenizer", "key", "1")}


def test_two_engines_at_once(folder: Path) -> None:
    """Both store and build; each finds what the other one's segments have, and after it all texts are found."""

    def write(first: int) -> None:
        writer = Memory(folder, "tokenizer", LIMIT)
        writer.set_idle(True)
        for seed in range(first, first + 6):
            writer.space("").add(make_tokens(seed), 0, None)
            writer.flush()
        writer.close()
        assert writer.take_notice() is None

    memory = Memory(folder, "tokenizer", LIMIT)
    space = memory.space("")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (0, 100)))
    space.refresh()
    seeds = [*range(6), *range(100, 106)]
    assert sum(has_text(space, make_tokens(seed)) for seed in seeds) >= 10  # the last ones may have no segment yet
    build(memory)
    assert all(has_text(space, make_tokens(seed)) for seed in seeds)
    named = {file.name for file in folder.glob("*.segment")}
    assert len(named) == len(space.index.files) <= 3
    memory.close()
