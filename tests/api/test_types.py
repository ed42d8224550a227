"""Callers are type-checked against the package: py.typed is there, and wrong calls are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.models import REPOSITORY

RIGHT = """
import edgespec

def f(model: edgespec.Model) -> str:
    reply: edgespec.Reply = model.chat([{"role": "user", "content": "x"}], temperature=0.5, stop=["a"], schema={})
    for piece in model.stream("x", max_tokens=3):
        print(piece.text, piece.origin)
    return reply.text

async def g() -> edgespec.Metrics:
    async with await edgespec.load_async("llama-8b-q4", draft_max=3, acceptance="block") as model:
        async for piece in model.stream("x"):
            print(piece)
        return model.stats
"""
WRONG = {
    'edgespec.load(acceptance="always")': "arg-type",
    "edgespec.load(gamma=3)": "call-arg",
    'edgespec.load().generate("x", temperature="hot")': "arg-type",
    "edgespec.load().generate(3)": "arg-type",
    "edgespec.open_model()": "attr-defined",
}


def check(path: Path, source: str) -> str:
    path.write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(REPOSITORY / "pyproject.toml"), str(path)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout


def test_the_package_is_typed(tmp_path: Path) -> None:
    assert (REPOSITORY / "edgespec" / "py.typed").is_file()
    assert "Success" in check(tmp_path / "right.py", RIGHT)


def test_wrong_calls_are_found(tmp_path: Path) -> None:
    found = check(tmp_path / "wrong.py", "import edgespec\n" + "\n".join(WRONG) + "\n")
    for line, (call, code) in enumerate(WRONG.items(), start=2):
        assert any(f"wrong.py:{line}:" in each and code in each for each in found.splitlines()), (call, found)
