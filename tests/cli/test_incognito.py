"""What the commands leave in the data folder: with a memory, incognito, and without one."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Cli
from tests.memory.texts import find_bytes

TOY = ("--backend", "toy", "--draft", "none", "--max-tokens", "20", "--temperature", "0")
OPEN, SECRET = "xqzv of the sea", "kwjx of the land"


def find(folder: Path, text: str) -> set[str]:
    """The files that have `text`, as such or as tokens of the toy model, which are bytes."""
    files = {file.name for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()}
    return files | find_bytes(folder, list(text.encode()))


def test_an_incognito_chat_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    alone = cli("chat", "--plain", "tree", *TOY, "--incognito", stdin=SECRET)
    assert alone.stdout.strip() and "Texts are kept" not in alone.stderr
    assert not (tmp_path / "data" / "memory").exists()
    lines = [OPEN, "/incognito", SECRET, "/retry", "/incognito", "/export left.md"]
    both = cli("chat", "--plain", "tree", *TOY, stdin="\n".join(lines))
    assert "incognito conversation: nothing of it is kept" in both.stdout and "no conversation to export" in both.stderr
    assert find(tmp_path / "data", OPEN) == {"memory.db"} and not find(tmp_path, SECRET)
    refused = cli("chat", "--incognito", "--continue")
    assert refused.returncode == 2 and "saved conversation is not incognito" in refused.stderr


def test_run_keeps_its_text_unless_told_not_to(cli: Cli, tmp_path: Path) -> None:
    assert "note: " not in cli("run", SECRET, "-m", "tree", *TOY, "--no-memory").stderr
    assert not (tmp_path / "data").exists()
    told = [cli("run", OPEN, "-m", "tree", *TOY).stderr.count("Texts are kept in ") for _ in range(2)]
    assert "Texts are kept" not in cli("run", OPEN, "-m", "tree", *TOY, EDGESPEC_DATA_DIR="/proc/nosuch").stderr
    assert told == [1, 0] and find(tmp_path, OPEN) == {"memory.db"}
