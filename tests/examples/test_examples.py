"""Every program in examples/ runs, offline and in seconds, and prints what its docstring promises."""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gguf_models import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
DOCUMENT = REPOSITORY / "docs" / "write-a-drafter.md"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """A function that runs a program in this process and returns what it prints."""
    for name in os.environ:
        if name.startswith(("HF_", "EDGESPEC_", "XDG_")):
            monkeypatch.delenv(name)
    folders = {f"EDGESPEC_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")}
    others = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "EDGESPEC_MODEL": "python-6m"}
    for name, value in (folders | others).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def start(source: Path) -> str:
        runpy.run_path(str(source), run_name="__main__")
        printed, told = capfd.readouterr()
        assert "Traceback" not in told
        return printed

    return start


def test_plain(run: Callable[[Path], str]) -> None:
    printed = run(EXAMPLES / "plain.py")
    second = r" \d\.\d\d tokens per forward of the target\]\n(\d+\.\d\dx plain decoding\n)?"
    assert re.search(r"\[length: 64 tokens, \d+ tokens/s,\n" + second + "$", printed)
    assert len(printed) > 150


def test_streaming(run: Callable[[Path], str]) -> None:
    printed = run(EXAMPLES / "streaming.py")
    match = re.search(r"^(\d+) of 96 tokens were drafted\.$", printed, re.MULTILINE)
    assert match is not None and int(match[1]) > 10
    assert len(re.findall(r"«[^«»]+»", printed)) > 10


def test_structured_output(run: Callable[[Path], str]) -> None:
    answer = json.loads(run(EXAMPLES / "structured_output.py"))
    assert answer.keys() == {"language", "lines", "is_tested"}
    assert answer["language"] in ("Python", "C", "Rust")
    assert 1 <= answer["lines"] <= 999


def test_chat_with_tools(run: Callable[[Path], str]) -> None:
    called, answered = run(EXAMPLES / "chat_with_tools.py").splitlines()
    assert called == "count_lines({'name': 'setup.py'}) -> 2"
    assert re.fullmatch(r"The answer has \d+ tokens\.", answered)


def test_own_drafter(run: Callable[[Path], str]) -> None:
    check_own_drafter(run(EXAMPLES / "own_drafter.py"))


def check_own_drafter(printed: str) -> None:
    match = re.search(r"\n(\d+) tokens came from the drafter, in (\d+) rounds\n$", printed)
    assert match is not None
    n_drafted, n_rounds = int(match[1]), int(match[2])
    assert n_drafted > 10
    assert n_drafted + n_rounds == 95  # each round emits one token of the target; the first token comes before them
    assert printed.count("|") == n_rounds


def test_the_example_of_the_document_runs(run: Callable[[Path], str], tmp_path: Path) -> None:
    """The last code block of write-a-drafter.md is a whole program, and the one that examples/ has."""
    text = DOCUMENT.read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
    assert text.endswith(block + "```\n")
    program = (EXAMPLES / "own_drafter.py").read_text(encoding="utf-8")
    assert program.partition('"""\n\n')[2] == block
    source = tmp_path / "drafter.py"
    source.write_text(block, encoding="utf-8")
    check_own_drafter(run(source))


def test_every_example_is_tested() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tests


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 64
