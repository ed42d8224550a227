"""The comparisons with llama.cpp's own programs: how runs become figures, and the message without a program."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks import plain_speed
from benchmarks.head_to_head import Cell, draw_plot, format_row, read_record, summarize
from benchmarks.peers import NO_PEER
from benchmarks.peers_prompts import extend_prompt
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from tests.benchmarks.conftest import Program, Run
from tests.models import DRAFT, TARGET

CELL = Cell("/x/1b.gguf", "/x/draft.gguf", 2, 0.8, 3000)


def run(arm: str, prompt: str, speed: float | None) -> dict[str, Any]:
    return {"arm": arm, "prompt": prompt, "tokens_per_second": speed}


RUNS = [
    run("edgespec plain", "a", 10.0),
    run("edgespec autopilot", "a", 20.0),
    run("llama-server plain", "a", 5.0),
    run("llama-server draft", "a", 10.0),
    run("llama-server ngram-mod", "a", 8.0),
    run("edgespec plain", "b", 10.0),
    run("edgespec autopilot", "b", 10.0),
    run("llama-server plain", "b", 20.0),
    run("llama-server draft", "b", 20.0),
    run("llama-server ngram-mod", "b", 40.0),
    run("edgespec autopilot", "c", None),
]


def test_the_bar_is_the_best_mode_of_the_cell() -> None:
    found = summarize(CELL, RUNS)
    assert (found.label, found.best) == ("1b, 2t, T 0.8, 3,000", "ngram-mod")
    assert (found.low, found.high, found.ratio) == (0.25, 2.5, 0.791)
    assert (found.plain, found.x_plain, found.tokens_per_second) == (1.0, 1.414, 14.14)
    assert format_row(found) == "| 1b, 2t, T 0.8, 3,000 | 14.1 | 1.41 | 1.00 | ngram-mod | 0.79 (0.25 to 2.50) |"


def test_the_plot_has_a_row_for_each_cell(tmp_path: Path) -> None:
    draw_plot([summarize(CELL, RUNS)], tmp_path / "plot.svg")
    assert "1b, 2t, T 0.8, 3,000: ngram-mod" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


def test_a_prompt_is_extended_to_a_length() -> None:
    engine = Engine(open_model("llamacpp", TARGET, LoadOptions(context_size=2048, threads=1), progress=print,
                               check=lambda: None), [], Speculation())  # fmt: skip
    try:
        assert extend_prompt(engine, "def f():", 2) == "def f():"
        text = extend_prompt(engine, "def f():", 700)
        assert text.endswith("\n\n\ndef f():") and 500 < len(engine.encode(text)) < 800
    finally:
        engine.close()


def test_cells_that_are_recorded_are_not_run_again(tmp_path: Path, run_module: Run) -> None:
    pair = (TARGET, DRAFT)
    command = ["--pair", *pair, "--tokens", 8, "--per-category", 1, "--category",
               "code_completion", "--prompt-tokens", 64, "--record", tmp_path / "record.jsonl"]  # fmt: skip
    first = run_module("benchmarks.head_to_head", *command)
    if shutil.which("llama-server") is None:
        assert first.returncode == 1 and NO_PEER in first.stderr and "Traceback" not in first.stderr
        assert read_record(tmp_path / "record.jsonl") == {}
        return
    assert first.returncode == 0, first.stderr
    again = run_module("benchmarks.head_to_head", *command, "--llama-server", tmp_path / "nowhere")
    assert again.stdout == first.stdout


def test_plain_speed(program: Program, run_module: Run) -> None:
    if shutil.which("llama-bench"):
        result = program("benchmarks.plain_speed", TARGET, "--context", 16, "--tokens", 8, "--repeats", 1)
        assert result["contexts"][0]["ratio"] > 0
    else:
        done = run_module("benchmarks.plain_speed", TARGET)
        assert done.returncode == 1 and done.stderr == f"Error: {plain_speed.NO_PEER}\n"
