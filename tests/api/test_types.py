"""Callers are type-checked against the package: py.typed is there, and wrong calls are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gguf_models import REPOSITORY

RIGHT = """
import edgespec

def f(model: edgespec.Model) -> str:
    reply: edgespec.Reply = model.chat([{"role": "user", "content": "x"}], temperature=0.5, stop=["a"], schema={})
    for piece in model.stream("x", max_tokens=3):
        print(piece.text, piece.drafter)
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


def test_right_calls_pass_and_wrong_ones_are_found(tmp_path: Path) -> None:
    assert (REPOSITORY / "edgespec" / "py.typed").is_file()
    path, right = tmp_path / "calls.py", len(RIGHT.splitlines())
    path.write_text(RIGHT + "\n".join(WRONG) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(REPOSITORY / "pyproject.toml"), str(path)]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    found = [line for line in told.splitlines() if "calls.py:" in line]
    for line, (call, code) in enumerate(WRONG.items(), start=right + 1):
        assert any(f"calls.py:{line}:" in each and code in each for each in found), (call, found)
    assert not any(f"calls.py:{line}:" in each for line in range(1, right + 1) for each in found), found
