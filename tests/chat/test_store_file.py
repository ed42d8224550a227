"""The file: its making, damage, and files of other versions and programs."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from edgespec.chat import Store
from edgespec.chat.recorder import ConversationRecorder
from edgespec.chat.state import Chat
from edgespec.core.sampling import SamplingParams
from edgespec.errors import CacheError
from edgespec.folders import data_folder
from tests.chat.children import outcome, start
from tests.chat.files import filled, works


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        store = Store.open(path)
        assert works(store)
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.glob("conversations.db*")}
        store.close()
    finally:
        os.umask(before)
    assert modes.pop("conversations.db.lock", None) is not None  # empty for ever
    assert modes == dict.fromkeys(("conversations.db", "conversations.db-wal", "conversations.db-shm"), 0o600)


def test_readers_do_not_wait_for_a_writer(path: Path) -> None:
    filled(path, 1)
    store = Store.open(path, wait_s=0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        writer.execute("BEGIN IMMEDIATE")
        assert len(store.recent()) == 1
    store.close()


def test_the_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGESPEC_DATA_DIR", raising=False)
    assert data_folder().name == "edgespec"
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "mine"))
    Store.open().close()
    assert (tmp_path / "mine" / "conversations.db").is_file()


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(5000))


def _truncated(path: Path) -> None:
    filled(path)
    os.truncate(path, path.stat().st_size // 2)


def _overwritten(path: Path) -> None:
    filled(path)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 8192)


def _zeroed_index(path: Path) -> None:
    filled(path)
    with closing(sqlite3.connect(path)) as db:
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'turns_by_parent'").fetchone()[0]
        size = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\x0a" + bytes(2) + bytes(2) + b"\x10\x00" + bytes(1))  # a leaf without entries


def _foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE recipes (name TEXT)")


def _name_that_is_no_text(path: Path) -> None:
    filled(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = path.read_bytes()
    path.write_bytes(
        data.replace(b"turns_by_parent", b"turns_by_par\xffnt").replace(b"ON turns (parent)", b"ON turns (\xffarent)")
    )


def _emptied_beside_its_log(path: Path) -> None:
    filled(path, 1)
    path.write_bytes(b"")
    Path(f"{path}-wal").write_bytes(b"all that was written last")


DAMAGES = (_noise, _truncated, _overwritten, _zeroed_index, _name_that_is_no_text, _foreign, _emptied_beside_its_log)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.lstrip("_"))
def test_a_damaged_file_is_set_aside_and_told(path: Path, damage: object) -> None:
    assert callable(damage)
    path.parent.mkdir()
    damage(path)
    before = path.read_bytes()
    store = Store.open(path)
    assert store.notice
    assert store.notice.startswith(f"{path} is damaged (")
    assert store.notice.endswith("). It is renamed to conversations.db.damaged-1, and a new file is used.")
    assert "\n" not in store.notice
    assert store.recent() == []
    assert works(store)
    store.close()
    aside = path.with_name("conversations.db.damaged-1")
    assert len(aside.read_bytes()) == len(before)
    store = Store.open(path)
    assert (store.notice, len(store.recent())) == (None, 1)
    store.close()


def test_a_bit_that_changes_inside_a_text_is_told(path: Path) -> None:
    store = Store.open(path)
    conversation = store.new("toy")
    question = store.add(conversation, None, "user", "the question, told once")
    answer = store.grow(store.add(conversation, question, "assistant", ""), "the answer, as far as it goes")
    answer = store.finish(answer, "the whole answer \ud83d", "and the reasons")
    store.finish(store.reopen(answer), "the whole answer, and more")
    assert store.count_changed(conversation) == 0
    store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    data[data.index(b"told once")] ^= 0x10
    path.write_bytes(data)
    reports: list[str] = []
    store = Store.open(path)
    assert store.notice is None, "SQLite does not see it"
    recorder = ConversationRecorder(Chat(None, SamplingParams(), None, None, ()), store, reports.append)
    recorder.resume(conversation.id)
    assert len(reports) == 1 and "has changed 1 message of this conversation." in reports[0], reports
    recorder.close()


def test_the_last_three_files_that_were_set_aside_are_kept(path: Path) -> None:
    path.parent.mkdir()
    for number, place in ((1, 1), (2, 2), (3, 3), (4, 1)):
        path.write_bytes(b"damage %d" % number * 100)
        os.utime(path, (number, number))
        Path(f"{path}-wal").write_bytes(b"log %d" % number)
        store = Store.open(path)
        assert store.notice and f"damaged-{place}," in store.notice
        store.close()
    for number, place in ((4, 1), (2, 2), (3, 3)):
        assert path.with_name(f"conversations.db.damaged-{place}").read_bytes() == b"damage %d" % number * 100


def test_processes_set_a_damaged_file_aside_once(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"damage" * 1000)
    code = """
sys.stdin.readline()
store = Store.open(path, wait_s=30)
store.add(store.new("toy"), None, "user", "Hello")
print(store.notice)
"""
    children = [start(code, path) for _ in range(2)]
    for child in children:
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    said = sorted(outcome(child) for child in children)
    assert [line == "None\n" for line in said].count(False) == 1
    assert len(list(path.parent.glob("*.damaged-*"))) == 1
    store = Store.open(path)
    assert len(store.recent()) == 2
    store.close()


def test_a_newer_file_is_left_alone(path: Path) -> None:
    filled(path, 1)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 5")
    before = path.read_bytes()
    with pytest.raises(CacheError, match="was written by a newer version of edgespec") as caught:
        Store.open(path)
    assert "Update edgespec" in caught.value.hint
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.damaged-*"))


def test_the_index_of_an_earlier_version_is_dropped(path: Path) -> None:
    filled(path, 2)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE folded (turn INTEGER PRIMARY KEY REFERENCES turns, conversation INTEGER, text TEXT)")
        db.execute("CREATE INDEX turns_unfinished ON turns (conversation) WHERE NOT finished")
        db.execute(
            "CREATE TRIGGER reopened AFTER UPDATE OF finished ON turns WHEN NOT new.finished"
            " BEGIN DELETE FROM folded WHERE turn = new.id; END"
        )
        db.execute("PRAGMA user_version = 2")
    store = Store.open(path)
    assert not store.notice and len(store.search("1 1")) == 1
    assert not store.query("SELECT name FROM sqlite_master WHERE name IN ('folded', 'reopened', 'turns_unfinished')")
    assert store.query("PRAGMA user_version") == [(4,)]
    store.close()


def test_columns_that_a_disk_has_damaged_do_not_hide_the_text(store: Store, path: Path) -> None:
    turn = store.add(store.new("toy"), None, "user", "Hello", {"seed": 1})
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("""UPDATE turns SET spans = '[[', settings = '{"seed', metrics = '', text = CAST(x'48ff' AS TEXT)""")
    [read] = store.path(turn)
    assert (read.text, read.spans, read.settings, read.metrics) == ("H\ufffd", [], {}, {})


def test_damage_met_while_it_is_open_is_explained(path: Path) -> None:
    conversation = filled(path)
    store = Store.open(path)
    os.truncate(path, 4 * 4096)
    with pytest.raises(CacheError, match=r"is damaged: .*\.") as caught:
        store.turns(conversation)
    assert "set aside" in caught.value.hint
    store.close()
    store = Store.open(path)
    assert store.notice
    store.close()
