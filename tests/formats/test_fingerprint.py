"""Weights are identified by their content, wherever they lie."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgespec.autopilot.store import ProfileStore
from edgespec.errors import CacheError
from edgespec.formats.fingerprint import fingerprint_weights
from tests.autopilot.test_store import written

MIB = 2**20


def test_files_are_identified_by_their_content(tmp_path: Path) -> None:
    target, draft = written(tmp_path / "t.gguf", b"target"), written(tmp_path / "d.gguf", b"draft")
    paths = [
        ProfileStore(target, [draft]).path,
        ProfileStore(target).path,
        ProfileStore(draft, [target]).path,
        ProfileStore(draft).path,
    ]
    paths += [
        ProfileStore(target, [draft, target]).path,
        ProfileStore(target, [target, draft]).path,
        ProfileStore(target, [draft], "layerskip:2").path,
    ]
    assert len(set(paths)) == 7
    moved = written(tmp_path / "elsewhere" / "other-name.gguf", b"target")
    assert ProfileStore(moved, [draft]).path == ProfileStore(target, [draft]).path
    written(target, b"target, changed")
    assert ProfileStore(target, [draft]).path not in paths


def test_fingerprints_look_at_both_ends_and_the_size(tmp_path: Path) -> None:
    file = tmp_path / "large.gguf"
    content = bytearray(random.Random(0).randbytes(2 * MIB + 100))
    seen = {fingerprint_weights(written(file, bytes(content)))}
    assert fingerprint_weights(file) in seen
    for at in (0, MIB - 1, MIB + 100, len(content) - 1):
        content[at] ^= 1
        seen.add(fingerprint_weights(written(file, bytes(content))))
    assert len(seen) == 5
    seen.add(fingerprint_weights(written(file, bytes(content[:MIB] + content[MIB + 1 :]))))
    assert len(seen) == 6
    empty = [fingerprint_weights(written(tmp_path / name, b"")) for name in ("empty", "other")]
    assert empty[0] == empty[1]
    assert all(len(each) == 16 for each in seen)


def test_weights_that_cannot_be_read_are_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"gone\.gguf cannot be read: No such file or directory\."):
        _ = ProfileStore(tmp_path / "gone.gguf").path
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CacheError, match="cannot be read"):
        fingerprint_weights(tmp_path / "model")
