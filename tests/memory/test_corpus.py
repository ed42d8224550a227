"""Documents that are added again, changed, gone, or too many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.memory.administration import TextStore
from edgespec.memory.corpus import NoRoom
from edgespec.memory.memory import Memory
from tests.memory.texts import find_bytes, has_text, make_tokens

LIMIT = 2**30


def test_a_changed_document_replaces_its_earlier_version(folder: Path, store: TextStore) -> None:
    secret, path = make_tokens(1), Path("/a")
    corpus = store.open_corpus("tokenizer")
    corpus.add(path, secret)
    memory = Memory(folder, "tokenizer", LIMIT)
    memory.space("")
    memory.set_idle(True)
    memory.flush()
    changed = secret[:640] + make_tokens(2, 1000)
    corpus = store.open_corpus("tokenizer")
    assert corpus.add(path, changed) == 1640 and corpus.add(path, changed) == 0
    corpus.finish()
    assert not find_bytes(folder, secret[1000:])
    assert [each.tokens for each in store.export()] == [changed]
    memory.space("").refresh()
    assert not has_text(memory.space(""), secret[1000:])
    memory.close()


def test_documents_whose_files_are_gone(store: TextStore, tmp_path: Path) -> None:
    """One of them has a name that is no text."""
    names = [b"gone", b"\xff", b"kept"]
    paths = [tmp_path / "corpus" / os.fsdecode(name) for name in names]
    corpus = store.open_corpus("tokenizer")
    for seed, path in enumerate(paths):
        assert corpus.add(path, make_tokens(seed, 100)) == 100
    paths[0].parent.mkdir()
    paths[2].touch()
    assert corpus.remove_missing(tmp_path / "corp") == 0 and corpus.remove_missing(tmp_path) == 2
    assert [record.source for record in store.export()] == [str(paths[2])]
    assert corpus.add(tmp_path / "renamed", make_tokens(0, 100)) == 100


def test_documents_have_half_of_the_memory(folder: Path, store: TextStore) -> None:
    memory = Memory(folder, "tokenizer", LIMIT)
    for seed in range(10):
        memory.space("").add(make_tokens(seed, 2000), 0, "1")
    memory.close()
    paths = [Path(f"/{i}") for i in range(20)]
    limit = 240_000
    corpus = store.open_corpus("tokenizer", "", limit)  # of 10,000 tokens of documents
    with pytest.raises(NoRoom):
        for i, path in enumerate(paths):
            corpus.add(path, make_tokens(100 + i, 2000))
    assert i == 5
    assert corpus.add(paths[0], make_tokens(100, 2000)) == 0
    corpus.add(paths[0], make_tokens(200, 500))
    with pytest.raises(NoRoom):
        store.open_corpus("tokenizer", "", limit).add(paths[5], make_tokens(105, 2000))
    assert corpus.add(paths[5], make_tokens(105, 1500)) == 1500
    corpus.finish()
    (status,) = store.status()
    assert status.n_corpus_tokens == 10_000 and 0 < 12 * status.n_tokens < limit
