"""Which files of a folder are documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from edgespec.errors import InvalidRequest
from edgespec.memory.documents import MAX_BYTES, find_documents, read_document

FILES = {
    ".git/config": "no document",
    ".gitignore": "*.log\n/build/\n!keep.log\ncache/*\n!cache/kept.txt\n",
    "a.py": "a = 1\n",
    "a.log": "ignored",
    "keep.log": "not ignored",
    "build/out.py": "ignored",
    "cache/kept.txt": "not ignored",
    "cache/lost.txt": "ignored",
    "src/build/out.py": "not ignored: the pattern is for the top",
    "src/.gitignore": "!debug.log\n*.tmp\nsecret.*\n",
    "src/debug.log": "not ignored in this folder",
    "src/deep/other.log": "ignored",
    "src/deep/x.tmp": "ignored",
    "src/deep/.gitignore": "!secret.py\n",
    "src/deep/secret.py": "not ignored in this folder",
    "src/secret.py": "ignored",
    "empty.txt": "",
    "large.txt": "x" * (MAX_BYTES + 1),
    "latin.txt": "caf\u00e9",
}
WANTED = [
    ".gitignore", "a.py", "keep.log", "latin.txt", "cache/kept.txt", "src/.gitignore", "src/debug.log",
    "src/build/out.py", "src/deep/.gitignore", "src/deep/secret.py",
]  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A work tree, also with a file of zero bytes and links to a file and to itself."""
    root = (tmp_path / "tree").resolve()
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1")
    (root / "image.bin").write_bytes(b"\x89PNG\0\0")
    (root / "loop").symlink_to(root)
    (root / "link.py").symlink_to(root / "a.py")
    return root


def find(*paths: Path) -> tuple[list[Path], Counter[str]]:
    skipped: Counter[str] = Counter()
    return [each.path for each in find_documents(paths, skipped)], skipped


def test_ignored_files_and_what_is_no_text_are_left_out(tree: Path) -> None:
    found, skipped = find(tree)
    assert [str(path.relative_to(tree)) for path in found] == WANTED
    counts = {"links": 2, "not text": 1, "empty": 1, "larger than 1 MiB": 1}
    assert {reason: n for reason, n in skipped.items() if reason != "ignored"} == counts
    assert read_document(tree / "latin.txt") == "caf\ufffd"


def test_rules_of_the_folders_above_hold_but_not_for_what_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tree / "src" / "deep"
    assert find(deep)[0] == [deep / ".gitignore", deep / "secret.py"]
    named = [tree / "a.log", tree / "build"]
    assert find(*named, tree / "build" / "out.py")[0] == [tree / "a.log", tree / "build" / "out.py"]
    assert find(tree / "link.py")[0] == [tree / "a.py"]
    monkeypatch.chdir(tree)
    assert find(Path("a.py"), Path("src/../a.py"))[0] == [tree / "a.py"]


def test_a_path_that_does_not_exist(tree: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no file or folder"):
        find(tree / "a.py", tree / "missing")
