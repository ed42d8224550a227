"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
import pathlib

import pytest

from edgespec.files import replace_file, save_traceback, stat_files, write_atomically


def test_a_file_is_written_and_replaced(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes.json"
    write_atomically(path, "ä")
    assert path.read_bytes() == "ä".encode()
    write_atomically(path, b"\0new")
    assert path.read_bytes() == b"\0new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), replace_file(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_went_meanwhile_have_no_status(tmp_path: pathlib.Path) -> None:
    kept, renamed = tmp_path / "kept", tmp_path / "renamed"
    kept.write_bytes(b"four")
    found = stat_files([kept, renamed])
    assert {path: each.st_size for path, each in found.items()} == {kept: 4}


def test_two_writers_do_not_share_a_temporary_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes.json"
    with replace_file(path) as first, replace_file(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # the outer block ends last
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_has_left_is_removed(tmp_path: pathlib.Path) -> None:
    left, new, other = (
        tmp_path / f".{name}" for name in ("n[1].json.0123abcd", "n[1].json.0123abce", "n.json.0123abcd")
    )
    for each in (left, new, other):
        each.write_text("half")
    for each in (left, other):
        os.utime(each, (1, 1))
    write_atomically(tmp_path / "n[1].json", "whole")
    assert sorted(tmp_path.iterdir()) == sorted([new, other, tmp_path / "n[1].json"])


def test_a_folder_that_cannot_be_written_raises(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "notes.json", "")


def test_a_traceback_is_saved(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        raise ValueError("the reason")
    except ValueError as error:
        path = save_traceback(error)
    assert path.parent == tmp_path
    assert "ValueError: the reason" in path.read_text(encoding="utf-8")
