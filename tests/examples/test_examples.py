"""Every program in examples/ runs, offline and in seconds, and prints what its docstring promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
DOCUMENT = REPOSITORY / "docs" / "write-a-drafter.md"


def run(source: Path, folder: Path) -> str:
    """What the program prints. It must write nothing to stderr but notices."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "EDGESPEC_", "XDG_"))}
    folders = {f"EDGESPEC_{name}_DIR": str(folder / name) for name in ("CACHE", "CONFIG", "DATA")}
    child = subprocess.run(
        [sys.executable, str(source)],
        env={**kept, **folders, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "EDGESPEC_MODEL": "python-6m"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert "Traceback" not in child.stderr
    return child.stdout


def test_plain(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "plain.py", tmp_path)
    second = r" \d\.\d\d tokens per forward of the target\]\n(\d+\.\d\dx plain decoding\n)?"
    assert re.search(r"\[length: 64 tokens, \d+ tokens/s,\n" + second + "$", printed)
    assert len(printed) > 150


def test_streaming(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "streaming.py", tmp_path)
    match = re.search(r"^(\d+) of 96 tokens were drafted\.$", printed, re.MULTILINE)
    assert match is not None and int(match[1]) > 10
    assert len(re.findall(r"«[^«»]+»", printed)) > 10


def test_structured_output(tmp_path: Path) -> None:
    answer = json.loads(run(EXAMPLES / "structured_output.py", tmp_path))
    assert answer.keys() == {"language", "lines", "is_tested"}
    assert answer["language"] in ("Python", "C", "Rust")
    assert 1 <= answer["lines"] <= 999


def test_chat_with_tools(tmp_path: Path) -> None:
    called, answered = run(EXAMPLES / "chat_with_tools.py", tmp_path).splitlines()
    assert called == "count_lines({'name': 'setup.py'}) -> 2"
    assert re.fullmatch(r"The answer has \d+ tokens\.", answered)


def test_own_drafter(tmp_path: Path) -> None:
    check_own_drafter(run(EXAMPLES / "own_drafter.py", tmp_path))


def check_own_drafter(printed: str) -> None:
    match = re.search(r"\n(\d+) tokens came from the drafter, in (\d+) rounds\n$", printed)
    assert match is not None
    n_drafted, n_rounds = int(match[1]), int(match[2])
    assert n_drafted > 10
    assert n_drafted + n_rounds == 95  # each round emits one token of the target; the first token comes before them
    assert printed.count("|") == n_rounds


def test_the_example_of_the_document_runs(tmp_path: Path) -> None:
    """The last code block of write-a-drafter.md is a whole program, and the one that examples/ has."""
    text = DOCUMENT.read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
    assert text.endswith(block + "```\n")
    program = (EXAMPLES / "own_drafter.py").read_text(encoding="utf-8")
    assert program.partition('"""\n\n')[2] == block
    source = tmp_path / "drafter.py"
    source.write_text(block, encoding="utf-8")
    check_own_drafter(run(source, tmp_path))


def test_every_example_is_tested() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tests


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 64
