"""Caches in files: what is found, what is removed, and that nothing damaged or half written is ever read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from edgespec.memory import prefix_files
from edgespec.memory.administration import TextStore
from edgespec.memory.prefix_files import LEAST_TOKENS, PrefixFiles, measure_prefixes, remove_prefixes

TEXT = [i * 7 % 1000 for i in range(2 * LEAST_TOKENS)]
OTHER = [i * 3 % 997 for i in range(2 * LEAST_TOKENS)]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.prefix"))


def test_the_longest_common_beginning_is_found(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, "model")
    assert files.find("", TEXT) is None
    files.write("", OTHER, b"other")
    files.write("", [*TEXT[:300], *OTHER], b"short")
    files.write("", [*TEXT[:400], *OTHER], b"long")
    found = files.find("", TEXT)
    assert found is not None and found.common == 400 and not found.is_whole
    assert files.read(found.path) == ([*TEXT[:400], *OTHER], b"long")
    assert files.find("", TEXT[:200]) is None and files.find("", TEXT[: LEAST_TOKENS - 1]) is None, "it is short"


def test_texts_of_files_that_are_gone_are_not_held(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, "model")
    for at in range(3):
        files.write("", [at, *TEXT], b"x")
        files.write("key:a", [at, *TEXT], b"x")
        assert files.find("", [at, *TEXT]) is not None and files.find("key:a", [at, *TEXT]) is not None
    assert len(files._texts) == 6
    remove_prefixes(tmp_path)
    assert files.find("", TEXT) is None and files.find("key:a", TEXT) is None
    assert not files._texts


def test_a_longer_text_replaces_its_beginnings(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, "model")
    for text in (TEXT[:300], OTHER, TEXT[:400], TEXT):
        files.write("", text, bytes(len(text)))
    kept = [files.read(path) for path in files_of(tmp_path)]
    assert sorted(len(read[0]) for read in kept if read) == [len(OTHER), len(TEXT)]


def test_models_and_namespaces_are_apart(tmp_path: Path) -> None:
    PrefixFiles(tmp_path, "model").write("", TEXT, b"x")
    assert PrefixFiles(tmp_path, "model").find("", TEXT) is not None
    assert PrefixFiles(tmp_path, "model").find("key:a", TEXT) is None
    assert PrefixFiles(tmp_path, "another").find("", TEXT) is None


def test_only_the_user_can_read_them(tmp_path: Path) -> None:
    PrefixFiles(tmp_path, "model").write("", TEXT, b"x")
    (path,) = files_of(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("at", [0, 9, 20, 60, 500, -1])
def test_a_flipped_bit_is_noticed(at: int, tmp_path: Path) -> None:
    """In the head, the tokens and the cache."""
    files = PrefixFiles(tmp_path, "model")
    files.write("", TEXT, os.urandom(1000))
    (path,) = files_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    files.find("", TEXT)
    assert files.read(path) is None and not path.exists()


@pytest.mark.parametrize("length", [0, 10, 56, 57, 700, 3000])
def test_a_file_that_was_cut_is_noticed(length: int, tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, "model")
    files.write("", TEXT, bytes(2000))
    (path,) = files_of(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    assert files.find("", TEXT) is None and files.read(path) is None


def test_the_oldest_make_room(tmp_path: Path) -> None:
    size = 5 * 10_000
    files = PrefixFiles(tmp_path, "model", size)
    texts = [[i, *TEXT] for i in range(6)]
    for i, text in enumerate(texts):
        files.write("", text, bytes(10_000))
        for path in files_of(tmp_path):
            if path.stat().st_mtime > time.time() - 100:
                os.utime(path, (1000 + i, 1000 + i))
    kept = [i for i, text in enumerate(texts) if files.find("", text)]
    assert kept == [2, 3, 4, 5] and sum(path.stat().st_size for path in files_of(tmp_path)) <= size
    files.write("", OTHER, bytes(size))
    assert files.find("", OTHER) is None, "it is larger than all of them may be"
    assert len(files_of(tmp_path)) == 4


def test_a_full_disk_gets_no_files_and_keeps_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    files = PrefixFiles(tmp_path, "model")
    files.write("", OTHER, b"x")
    monkeypatch.setattr(prefix_files.shutil, "disk_usage", lambda _: usage(10**8, 0, 10**5))
    assert files.write("", TEXT, b"x") is None and len(files_of(tmp_path)) == 1, "its removal would not suffice"
    monkeypatch.setattr(prefix_files.shutil, "disk_usage", lambda _: usage(10**6, 0, 10**5))
    assert files.write("", TEXT, b"x") is not None and len(files_of(tmp_path)) == 1, "it makes room"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "prefixes").write_text("a file in its place")
    files = PrefixFiles(tmp_path, "model")
    files.write("", TEXT, b"x")
    assert files.find("", TEXT) is None


def test_a_writer_that_is_killed_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    """At any moment: what is found is whole."""
    program = (
        "import os, sys; from pathlib import Path; from edgespec.memory.prefix_files import PrefixFiles\n"
        "files, n = PrefixFiles(Path(sys.argv[1]), 'model'), 0\n"
        "while True:\n"
        "    n += 1; files.write('', [n, *range(400)], bytes([n % 256]) * 400_000)\n"
        "    print(n, flush=True)\n"
    )
    files = PrefixFiles(tmp_path, "model")
    for attempt in range(4):
        with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.003 * attempt)
            process.send_signal(signal.SIGKILL)
        found = [files.read(path) for path in files_of(tmp_path)]
        assert found and all(each is not None for each in found)
        assert all(each[1] == bytes([each[0][0] % 256]) * 400_000 for each in found if each)
    begun = list(tmp_path.rglob(".*.prefix.*"))
    for path in begun:
        os.utime(path, (1000, 1000))
    files.write("", TEXT, b"x")
    assert not list(tmp_path.rglob(".*.prefix.*"))


def test_forgetting_a_text_removes_the_caches(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, "model")
    files.write("", TEXT, b"x")
    store = TextStore.open(tmp_path)
    assert measure_prefixes(tmp_path) > 4 * len(TEXT)
    store.forget("chat:1")
    store.close()
    assert files.find("", TEXT) is None and not files_of(tmp_path)
    remove_prefixes(tmp_path)
