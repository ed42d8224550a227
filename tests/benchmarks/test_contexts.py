"""The program that measures long contexts runs on the embedded pair."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import Program

pytestmark = pytest.mark.slow


def test_contexts(program: Program) -> None:
    amounts = ("--context", 128, "--tokens", 6, "--texts", 1, "--repeats", 1, "--seconds", 1)
    result = program("benchmarks.contexts", *amounts)
    assert list(result["seconds"]) == ["0", "128"] and all(s["1"] > 0 for s in result["seconds"].values())
    arms = ["ngram", "ngram+model", "ngram+self", "ngram+model+self"]
    assert [row["arm"] for row in result["arms"]] == arms
    for row in result["arms"]:
        assert row["context"] == 128 and row["ratio_min"] <= row["ratio"] <= row["ratio_max"] and row["tau"] >= 1
    bare = program("benchmarks.contexts", *amounts, "--costs-only")
    assert bare["arms"] == [] and list(bare["seconds"]) == ["0", "128"]
