"""The programs that measure decoding run on the embedded pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.promise import KINDS
from tests.benchmarks.conftest import Program
from tests.gguf_models import DRAFT, TARGET


def test_distribution(program: Program) -> None:
    result = program("benchmarks.distribution", "--samples", 5)
    assert len(result["arms"]) == 5 and len(result["files"]) == 2
    for arm in result["arms"].values():
        assert arm["samples"] == 5 and arm["bins"] == 27 and arm["chi_square"] > 0 and 0 < arm["tv"] <= 1


def test_overhead(program: Program) -> None:
    result = program("benchmarks.overhead", TARGET, "--tokens", 16, "--repeats", 2)
    assert result["tokens"] == 15 and result["model"] == "target.gguf"
    assert result["ratio_min"] <= result["ratio_median"] <= result["ratio_max"]
    assert result["loop_ms_per_token"] > 0 and result["bare_ms_per_token"] > 0
    assert all(result[f"{part}_us_per_token"] > 0 for part in ("draft", "verify", "sample", "commit"))


def test_parity(program: Program) -> None:
    result = program("benchmarks.parity", "--prompts", 1, "--tokens", 8, "--exact")
    assert len(result["arms"]) == 5 and result["exact"]
    for arm in result["arms"].values():
        assert arm["equal"] == arm["of"] == 1 and arm["forks"] == [] and arm["tau"] >= 1


def test_lookups(program: Program) -> None:
    names = ("ngram", "recycling:2/4", "lookahead:9/55", "model", "model:2/6")
    arms = [word for name in names for word in ("--arm", name)]
    sizes = ("--prompts", 1, "--tokens", 8, "--repeats", 1)
    prices = ("--draft", DRAFT, "--curve", "9:1=1,64=1", "--unit", 0.1)
    result = program("benchmarks.lookups", *arms, *sizes, "--exact", *prices)
    assert [arm["arm"] for arm in result["arms"]] == ["plain", *names]
    assert all(arm["tau"] >= 1 and arm["x plain"] > 0 and arm["same"] == 1 for arm in result["arms"])


def test_sessions(program: Program) -> None:
    result = program("benchmarks.sessions", "--sessions", 1, "--tokens", 8, "--exact", "--curve", "9:1=1,64=1")
    arms = {arm["arm"]: arm for arm in result["arms"]}
    assert [*arms] == ["plain", "ngram", "off", "suffix", "ngram+suffix"]
    assert all(arm["tau"] >= 1 and arm["cold x plain"] > 0 and arm["warm x plain"] > 0 for arm in arms.values())
    assert all(arm["same"] == 5 for arm in arms.values()), "one for each turn"


def test_parallel(program: Program, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    arguments = ("--max-concurrency", "1,2", "--tokens", 48, "--repeats", 1, "--plot", plot)
    rows = program("benchmarks.parallel", TARGET, "--draft", DRAFT, *arguments)["rows"]
    assert [row["at_once"] for row in rows] == [1, 2]
    for row in rows:
        assert min(row["plain"], row["ngram 3"], row["autopilot"]) > 0 and 0 <= row["rounds with drafts"] <= 1
    assert "<svg" in plot.read_text()


def test_traces_and_their_replays(program: Program, tmp_path: Path) -> None:
    traces = tmp_path / "traces.json.gz"
    texts = program("benchmarks.traces", traces, "--tokens", 8, "--per-category", 1)["texts"]
    assert len(texts) >= 10 and all(1 <= text["tokens"] <= 8 for text in texts)
    result = program("tests.autopilot.replays", traces, "--seeds", 1, "--curve", "1B, Q4_0")
    (row,) = result["results"]
    assert result["texts"] == len(texts) and row["autopilot"] > 0 and row["over_oracle"] <= 1.01


def test_structured(program: Program) -> None:
    result = program("benchmarks.structured", "--tokens", 8, "--repeats", 1)
    assert set(result["ratios"]) == {"plain, schema / plain", "drafted / plain", "drafted, schema / plain, schema"}
    assert all(ratio > 0 for ratio in result["ratios"].values())


def test_cost_curve(program: Program, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    result = program("benchmarks.plots.cost_curve", plot, "--repeats", 1)
    assert result["best"] in [size["nodes"] for size in result["sizes"]] and result["price"] > 0
    assert "<svg" in plot.read_text()


def test_settings(program: Program) -> None:
    amounts = ("--contexts", "16,250", "--rows", "1,4", "--repeats", 1, "--seconds", 0.1, "--kv-type", "q8_0")
    result = program("benchmarks.settings", TARGET, "--threads", 1, *amounts)
    assert [(each["context"], each["rows"]) for each in result["forwards"]] == [(16, 1), (16, 4), (250, 1), (250, 4)]
    for each in result["forwards"]:
        assert list(each["ms"]) == ["default", "chosen", "q8_0"] and min(each["ms"].values()) > 0
        middle, least, most = each["speed"]["chosen"]
        assert 0 < least <= middle <= most
    assert set(result["settings"]["without_flash"]) == {"250", "100"}


def test_exactness(program: Program) -> None:
    result = program("benchmarks.exactness", "--quantize", "F16", "--prompts", 1, "--tokens", 8, "--context", 40)
    assert set(result["equal_texts"]) == set(result["logit_difference"]) == {"ordinary", "4 rows"}
    assert set(result["equal_texts"]["4 rows"].values()) == {"1 of 1"}
    assert result["logit_difference"]["4 rows"] == 0 < result["logit_difference"]["ordinary"]
    assert list(result["price"]) == [f"ordinary, {n} row{'s' * (n > 1)}" for n in (1, 2, 4, 8)]


def test_the_kernels_of_quantized_weights_are_compared_too(program: Program) -> None:
    result = program("benchmarks.exactness", "--price-only", "--context", 40, "--width", 2)
    assert set(result["logit_difference"]) == {"ordinary", "2 rows", "invariant kernels"}
    assert result["logit_difference"]["invariant kernels"] == 0 and result["equal_texts"] == {}


def test_promise(program: Program) -> None:
    result = program("benchmarks.promise", "--prompts", 2, "--tokens", 12, "--repeats", 1, "--temperature", 0,
                     "--drafts", "right", "--drafts", "wrong", "--drafts", "none")  # fmt: skip
    assert [row["draft"] for row in result["rows"]] == ["right", "wrong", "none"]
    for row in result["rows"]:
        assert row["prompts"] == 2 and 0 < row["slowest"] <= row["worst_decile"] <= row["fastest"]
        assert row["slowest"] <= row["mean"] <= row["fastest"] and 0 <= row["below"] <= 1
        assert row["host_us"]["plain arm, plain"] > 0
        assert row["said"]["prompts"] <= 2 and sorted(row["said"]["error"]) == row["said"]["error"]
        assert set(row["host_us"]) <= {"plain arm, plain", *(f"autopilot, {kind}" for kind in KINDS)}


@pytest.mark.parametrize("by", ["chat", "run"])
def test_what_is_said_of_an_answer_is_compared_with_what_is_measured(program: Program, by: str) -> None:
    result = program("benchmarks.said_speedup", "--by", by, "--answers", 2, "--tokens", 16, "--busy", 1)
    assert result["answers"] == 2 and result["beyond_the_bound"] == 0
    assert all(row["stated"] > 0 and row["measured"] > 0 for row in result["rows"])


def test_host_time(program: Program) -> None:
    results = program("benchmarks.host_time", "--vocabulary", "3000,4096", "--rows", "1,3", "--repeats", 1)["results"]
    assert len({(each["vocabulary"], each["logits"], each["chain"], each["rows"]) for each in results}) == len(results)
    assert len(results) == 2 * 2 * 2 * 13
    assert all(0 < each["us"][0] <= each["us"][1] <= each["us"][2] for each in results)
