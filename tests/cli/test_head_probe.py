"""`edgespec draft probe`, and what a user hears of a head whose file is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.models import DRAFT, llama
from tests.trained_heads import EAGLE3, convert, state_layers

SHORT = ("--max-tokens", "24", "--temperature", "0", "--threads", "1", "--ctx", "512")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def wrong(folder: Path) -> str:
    """A head whose file names layers one too low."""
    return str(convert(state_layers(folder / "wrong", (0, 2, 4))))


def test_the_table_and_the_load_after_it(cli: Cli, wrong: str) -> None:
    done = cli("draft", "probe", "--draft", wrong, "--threads", "1")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    title, *rows, chosen, amount = done.stdout.splitlines()
    assert title.split() == ["READING", "DEPTH", "1", "DEPTH", "2"]
    assert [row.split("  ")[0] for row in rows] == ["layers 0, 2, 4", "layers 1, 3, 5"]
    assert chosen == "the head is read with layers 1, 3, 5, where its file says layers 0, 2, 4"
    assert amount.startswith("254 positions, ")
    plain = cli("run", "def add(a, b):", "--draft", "none", *SHORT)
    drafted = cli("run", "def add(a, b):", "--draft", wrong, "--draft-max", "2", *SHORT)
    assert drafted.returncode == 0 and drafted.stdout == plain.stdout
    notes = [line for line in drafted.stderr.splitlines() if line.startswith("note: ")]
    (told,) = notes
    assert told.startswith(f"note: T{chosen[1:]}: agreement ")

    given = ("draft", "probe", "--draft", wrong, "--threads", "1", "--json", "--tokens", "128")
    found = json.loads(cli(*given).stdout)
    assert [each["reading"] for each in found["readings"]] == ["layers 0, 2, 4", "layers 1, 3, 5"]
    assert found["chosen"]["reading"] == "layers 1, 3, 5" and found["stated"]["reading"] == "layers 0, 2, 4"
    assert found["chosen"]["agreement"][0] > found["stated"]["agreement"][0] > 0.2
    assert found["chosen"]["positions"] == 126 and found["seconds"] > 0


def test_what_cannot_be_probed(cli: Cli, wrong: str, folder: Path, tmp_path: Path) -> None:
    other, cut = tmp_path / "other.gguf", tmp_path / "cut.gguf"
    llama(other)
    cut.write_bytes(Path(wrong).read_bytes()[:-40])
    cases = [
        (2, "--draft auto names no trained head", ()),
        (2, "--draft ngram names no trained head", ("--draft", "ngram")),
        (2, "names no trained head", ("--draft", str(DRAFT))),
        (2, "a probe needs a text of 32 tokens, and has 14", ("--draft", wrong, "--ctx", "16")),
        (2, "'--tokens'", ("--draft", wrong, "--tokens", "31")),
        (5, "head for a hidden size of 256; the target has 64", (str(other), "--draft", wrong)),
        (5, "cut.gguf is cut short", ("--draft", str(cut))),
        (5, "drafts for a model and writes no text by itself", (wrong, "--draft", wrong)),
        (3, "there is no model called 'planes'", ("planes", "--draft", wrong)),
    ]
    for code, told, arguments in cases:
        done = cli("draft", "probe", *arguments, "--threads", "1")
        assert (done.returncode, done.stdout) == (code, ""), (arguments, done.stderr)
        assert told.lower() in done.stderr.lower() and "hint: " in done.stderr, done.stderr
    done = cli("draft", "probe", "--draft", str(EAGLE3))
    assert done.returncode in (2, 5) and "hint: " in done.stderr
