"""The programs that measure the command, the server and the chat run on the embedded pair; no program is untested."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import Program
from tests.gguf_models import REPOSITORY


@pytest.mark.parametrize("package", ["benchmarks", "laboratory"])
def test_every_program_is_run_by_a_test(package: str) -> None:
    """But by the one that builds llama.cpp for a device in software, for minutes. Of a program of the laboratory, which
    may take the models of a machine, tests may call parts.
    """
    tests = "".join(file.read_text() for file in (REPOSITORY / "tests").rglob("test_*.py"))
    files = [file for file in (REPOSITORY / package).rglob("*.py") if '__name__ == "__main__"' in file.read_text()]
    modules = [file.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".") for file in files]
    run = [f'"{module}"' for module in modules]
    if package == "laboratory":
        run += [f"from {module} import" for module in modules]
    tested = [each for each in run if each in tests]
    untested = [module for module in modules if not any(module in each for each in tested)]
    assert modules and set(untested) <= {"laboratory.software_gpu"}


def test_startup(program: Program) -> None:
    result = program("benchmarks.startup", "--repeats", 1)
    assert result["help_s"] > result["bare_python_s"] > 0
    assert result["versions"]["edgespec"] and result["files"] == {}


def test_memory(program: Program) -> None:
    result = program("benchmarks.memory", "--tokens", "20000,30000", "--lookups", 20)
    assert [row["tokens"] for row in result["rows"]] == [20000, 30000] and result["rows"][1]["segments"] == 1
    assert all(row["lookup_us"] > 0 and row["bytes_per_token"] > 12 for row in result["rows"])


def test_server_load(program: Program) -> None:
    options = ("--streams", "1,2", "--calls", 1, "--tokens", 8, "--repeats", 1)
    rows = program("benchmarks.server_load", *options, "--front")["rows"]
    assert [(row["streams"], row["server"]) for row in rows] == [
        (streams, name) for streams in (1, 2) for name in ("edgespec, edgespec", "edgespec")
    ]
    assert all(0 < row["first_ms"] <= row["first_p95_ms"] for row in rows)
    assert all(row["ratios"] == [1.0] for row in rows[1::2]) and all(row["ratios"][0] > 0 for row in rows)


def test_soak(program: Program) -> None:
    """Half a minute with one kill: every answer is whole or told, and nothing that was answered is forgotten."""
    options = ("--minutes", 0.4, "--streams", 3, "--kill-every", 8, "--parts", 2, "--draft", "ngram")
    result = program("benchmarks.soak", *options)
    assert len(result["rows"]) == 2 and result["totals"]["whole"] > 0
    assert result["kills"] >= 1 and result["answered_after"] == result["kills"]
    assert result["totals"].get("lost", 0) == result["forgotten"] == 0


def test_tui(program: Program) -> None:
    result = program("benchmarks.tui", "--tokens", 8, "--repeats", 1)
    assert result["chat_over_run"] > 0 and len(result["pairs"]) == 1


def test_tui_latency(program: Program) -> None:
    result = program("benchmarks.tui", "--latency", "--tokens", 200)
    assert result["tokens_per_second"] > 0 and 0 < result["cpu"] < 2
    assert 0 < result["latency_ms"][0] <= result["latency_ms"][1]


def test_long_session(program: Program) -> None:
    options = ("--answers", 2, "--tokens", 50, "--streamed", 100, "--seconds", 1, "--repeats", 1)
    result = program("benchmarks.long_session", *options)
    assert 0 < result["core"] < 2 and result["first_screen_s"] > 0 and result["rss_mib"] > 10
    assert 0 < result["key_median_ms"] <= result["key_p99_ms"]
