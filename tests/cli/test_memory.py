"""`edgespec memory`: documents that answers are drafted from, and what is shown, exported and removed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from edgespec.memory.administration import TextStore
from edgespec.models.versions import AdaptedDrafts, allow_training, may_train
from tests.cli.conftest import Cli
from tests.models.test_versions import keep_trainings

PROMPT = "def fibonacci(n):\n    "
GREEDY = ("--max-tokens", "60", "--temperature", "0", "--threads", "1", "--json")
SUFFIX = ("--draft", "suffix", "--draft-max", "8")


def test_answers_are_drafted_from_documents(cli: Cli, environment: dict[str, str], tmp_path: Path) -> None:
    """The whole life of a project in the memory, with the engine of the embedded model."""
    plain = json.loads(cli("run", PROMPT, *GREEDY, "--no-memory", "--draft", "none").stdout)
    code, notes = tmp_path / "project" / "code.py", tmp_path / "project" / "notes.md"
    code.parent.mkdir()
    code.write_text(f"# what the model will say\n{PROMPT}{plain['text']}")
    notes.write_text("a note\n" * 100)
    (code.parent / "image.png").write_bytes(b"\0")
    listed = cli("memory", "add", "project", "--dry-run")
    assert listed.stdout.split() == [str(code), str(notes)] and "2 files, " in listed.stderr
    assert "1 not text" in listed.stderr and not (tmp_path / "data" / "memory").exists()

    added = cli("memory", "add", "project")
    assert added.stdout.startswith("added 2 files, ") and "tokenizer of python-6m" in added.stderr
    drafted = json.loads(cli("run", PROMPT, *GREEDY, *SUFFIX).stdout)
    assert drafted["text"] == plain["text"] and drafted["metrics"]["accepted_tokens"] > 30
    notes.unlink()
    assert cli("memory", "add", "project/code.py", "project").stdout.splitlines() == [
        "removed 1 document of files that are gone",
        "added 0 files, 0 tokens; skipped: 1 not text, 1 known already",
    ]

    (row,) = json.loads(cli("memory", "status", "--json").stdout)["texts"]
    assert (row["model"], row["key"], row["documents"]) == ("python-6m", None, 1)
    assert row["tokens"] > 60 < row["document_tokens"]
    shown = cli("memory", "status").stdout.splitlines()
    assert shown[1].split()[:5] == ["python-6m", "-", str(row["tokens"]), str(row["document_tokens"]), "1"]

    file = tmp_path / "texts.jsonl"
    assert cli("memory", "export", str(file)).stdout == f"wrote 3 texts to {file}\n"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(each["kind"], each["source"]) for each in records] == [
        ("corpus", str(code)),
        ("prompt", None),
        ("answer", None),
    ]
    assert records[0]["text"] == code.read_text() and file.stat().st_mode & 0o777 == 0o600
    assert cli("memory", "export", "-").stdout == file.read_text()
    assert cli("memory", "export", str(file)).returncode == 2
    assert cli("memory", "export", str(file), "--force").returncode == 0

    assert f"of {code.parent}\n" in cli("memory", "forget", "project").stdout
    assert cli("memory", "clear", "--corpus").stdout == "there is nothing to remove\n"
    refused = cli("memory", "clear", stdin="n\n").stderr
    assert refused.startswith(f"Remove {row['tokens']} tokens of ") and "--yes" in refused
    cleared = cli("memory", "clear", stdin="y\n").stdout
    assert cleared == f"removed {row['tokens']} tokens of answers, prompts and documents\n"
    assert "Nothing is kept yet." in cli("memory", "status").stdout


def test_conversations_and_keys_are_removed(cli: Cli, environment: dict[str, str]) -> None:
    folder = Path(environment["EDGESPEC_DATA_DIR"]) / "memory"
    with closing(TextStore.open(folder)) as store:
        for namespace in ("", "key:laptop", "key:phone"):
            corpus = store.open_corpus("a tokenizer", namespace)
            assert corpus.add(Path("chat:7"), list(range(100))) == 100
        corpus = store.open_corpus("another tokenizer")
        assert corpus.add(Path("a program"), list(range(50))) == 50
    shown = cli("memory", "status").stdout
    assert "unknown (a tokeni)  laptop " in shown and "unknown (a tokeni)  phone " in shown
    cleared = cli("memory", "clear", "--key", "laptop", "-y").stdout
    assert cleared == "removed 100 tokens of answers, prompts and documents of the key laptop\n"
    exported = cli("memory", "export", "texts.jsonl")
    assert "token ids" in exported.stderr and "wrote 3 texts" in exported.stdout
    assert cli("memory", "forget", "7").stdout == "removed 200 tokens of conversation 7\n"
    assert cli("memory", "forget", "a program").stdout == "removed 50 tokens of a program\n"


def test_trainings_that_have_not_ended_keep_no_removed_text(cli: Cli, environment: dict[str, str]) -> None:
    data = Path(environment["EDGESPEC_DATA_DIR"])
    drafts, adapted, head, own = AdaptedDrafts(data / "adapted"), *keep_trainings(data)
    version = drafts.folder / "draft" / "1" / "draft.gguf"
    version.parent.mkdir()
    version.touch()
    with closing(TextStore.open(data / "memory")) as store:
        for namespace in ("", "key:laptop"):
            for name in ("one", "two", "three"):
                store.open_corpus("a tokenizer", namespace).add(Path(name), list(range(100)))
    allow_training(drafts.folder)
    assert cli("memory", "clear", "--key", "laptop", "-y").returncode == 0
    assert adapted.exists(), "texts of keys are not trained on"
    assert cli("memory", "clear", stdin="n\n").returncode != 0 and adapted.exists()
    assert cli("memory", "forget", "one").returncode == 0 and not adapted.exists()
    keep_trainings(data)
    assert cli("memory", "clear", "--corpus", "-y").returncode == 0 and not adapted.exists()
    assert head.exists() and own.exists() and may_train(drafts.folder), "a model has written what it reads"
    keep_trainings(data)
    assert cli("memory", "clear", "-y").stdout == "removed what trainings have written and kept\n"
    assert not adapted.exists() and not head.exists() and not own.exists() and not may_train(drafts.folder)
    assert version.exists()


@pytest.mark.parametrize(
    ("code", "message", "arguments"),
    [
        (2, "There is no file or folder missing.", ("add", "missing")),
        (2, "There is no file to add; skipped: 1 empty.", ("add", "empty")),
        (3, "llama-8b-q4 is not downloaded.", ("add", "model.gguf", "-m", "llama-8b-q4")),
        (5, "model.gguf", ("add", "model.gguf", "-m", "./model.gguf")),
        (2, "The memory has no texts of conversation 12.", ("forget", "12")),
        (4, "cannot be written", ("export", "missing/texts.jsonl")),
    ],
)
def test_bad_input(cli: Cli, tmp_path: Path, code: int, message: str, arguments: tuple[str, ...]) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "model.gguf").write_text("no model")
    done = cli("memory", *arguments)
    assert done.returncode == code and message in done.stderr and "hint: " in done.stderr


def test_another_process_holds_the_database(
    cli: Cli, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextStore, "open", partial(TextStore.open, wait_s=0.1))
    folder = Path(environment["EDGESPEC_DATA_DIR"]) / "memory"
    TextStore.open(folder).close()
    with closing(sqlite3.connect(folder / "memory.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        done = cli("memory", "clear", "-y")
        assert done.returncode == 0  # there is nothing to remove
        added = cli("key", "add", "laptop", "--file", "keys.toml")
        done = cli("memory", "forget", "1")
    assert added.returncode == 4 and added.stdout.startswith("sk-"), "a key is shown once, so always"
    assert done.returncode == 4 and "is locked by another process." in done.stderr
