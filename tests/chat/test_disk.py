"""Permissions, locks and full disks in the way of the file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from edgespec import databases
from edgespec.chat import Store
from edgespec.databases import to_cache_error
from edgespec.errors import CacheError
from tests.chat.children import outcome, start
from tests.chat.files import filled, works

READ_ONLY = """
import fcntl, os
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # permissions do not hold root
from edgespec.errors import CacheError
try:
    Store.open(path, wait_s=0.1)
except CacheError as error:
    print(error.message, error.hint, sep="\\n")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder
        folder.chmod(0o777)


@pytest.mark.skipif(os.name == "nt", reason="permissions are others")
def test_a_read_only_folder_is_explained(open_folder: Path) -> None:
    path = open_folder / "conversations.db"
    filled(path, 1)
    path.chmod(0o444)
    open_folder.chmod(0o555)
    message, hint = outcome(start(READ_ONLY, path)).splitlines()
    assert message.startswith(f"{path} cannot be read or written: ")
    assert hint.startswith("Check the permissions of the folder")
    assert "EDGESPEC_DATA_DIR" in hint


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot be read or written: ") as caught:
        Store.open(tmp_path / "file" / "conversations.db")
    assert "EDGESPEC_DATA_DIR" in caught.value.hint


def test_a_locked_file_is_explained(path: Path) -> None:
    filled(path, 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CacheError, match="is locked by another process") as caught:
            Store.open(path, wait_s=0.05)
        assert "Wait for it or stop it" in caught.value.hint
    store = Store.open(path)
    assert (store.notice, len(store.recent())) == (None, 1)
    store.close()


def test_a_lock_at_writing_is_explained_and_writing_goes_on_after_it(path: Path) -> None:
    store = Store.open(path, wait_s=0.05)
    conversation = store.new("toy")
    turn = store.add(conversation, None, "assistant", "")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CacheError, match="is locked by another process"):
            store.grow(turn, "a")
        assert store.path(turn) == [turn]
    assert store.grow(turn, "b").text == "b"
    store.close()


def test_a_full_disk_is_explained_and_nothing_is_half_written(path: Path) -> None:
    conversation = filled(path, 3)
    store = Store.open(path)
    pages = store.query("PRAGMA page_count")[0][0]
    store.query(f"PRAGMA max_page_count = {pages}")
    before = store.resume(conversation.id), store.turns(conversation)
    with pytest.raises(CacheError, match="cannot be written: the disk is full") as caught:
        store.add(conversation, None, "user", "x" * 100_000)
    assert caught.value.hint.startswith("Free some space")
    assert (store.resume(conversation.id), store.turns(conversation)) == before
    store.query(f"PRAGMA max_page_count = {pages + 100}")
    assert works(store)
    store.close()


LIMITED = """
import resource
from edgespec.errors import CacheError
store = Store.open(path)
conversation = store.new("toy")
turn = store.add(conversation, None, "assistant", "")
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
size = 0
try:
    while size < 1000:
        store.grow(turn, "x" * 1000 * (size + 1))
        size += 1
except CacheError as error:
    print(size, len(store.path(turn)[0].text), error.message, error.hint, sep="\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.grow(turn, "after")
"""


@pytest.mark.skipif(os.name == "nt", reason="there is no such limit")
def test_a_log_that_cannot_grow_is_explained(path: Path) -> None:
    size, kept, message, hint = outcome(start(LIMITED, path)).splitlines()
    assert int(size) > 0
    assert int(kept) == 1000 * int(size)  # what the last call that returned has written
    assert message.startswith(f"{path} cannot be ")
    assert "EDGESPEC_DATA_DIR" in hint
    store = Store.open(path)
    [conversation] = store.recent()
    assert store.path(conversation.leaf)[0].text == "after"
    store.close()


def test_an_error_of_a_full_disk_is_told_as_such(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite calls it an I/O error where a disk has no room for the files beside a database."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    path.parent.mkdir()
    assert "cannot be read or written: disk I/O error" in to_cache_error(error, path).message
    monkeypatch.setattr(databases, "_LEAST_FREE", 2**62)
    assert "the disk is full" in to_cache_error(error, path).message
