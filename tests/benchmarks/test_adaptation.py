"""The benchmarks of trained drafts count what they say, and run on a small memory with a small draft."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.adaptation import DEPTH, find_fresh, measure_alpha, take_newest
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.memory.memory import Memory
from edgespec.models.tokenizer_compat import identify_tokenizer
from edgespec.train.texts import TrainingText
from tests.benchmarks.conftest import Program
from tests.cli.test_adapt import keep_texts
from tests.gguf_models import TARGET, llama

N_CONVERSATIONS = 24


def make_text(tokens: list[int], n_lead: int = 0, source: str = "chat:1") -> TrainingText:
    return TrainingText(np.array(tokens, np.int32), n_lead, n_lead, source)


def test_acceptance_by_depth() -> None:
    alpha = measure_alpha([np.array([1, 1, 0, 1], bool), np.array([1], bool)])
    assert alpha[:3] == [0.8, round(1 / 2, 4), 0.0]  # of 5 tokens 4; behind the hits with a next one: 1 of 2; 0 of 1
    assert alpha[3:] == [None] * (DEPTH - 3)


def test_fresh_positions_follow_tokens_that_are_new_in_their_conversation() -> None:
    phrase = [*range(10, 18)]
    first, second = make_text([*phrase, 1, 2, *phrase, 3]), make_text([*phrase, 4], n_lead=8)
    other = make_text([*phrase, 5], n_lead=8, source="chat:2")
    found = find_fresh([first, second, other])
    assert found[0].tolist() == [True] * 17 + [False]  # the token after the phrase's second time
    assert [fresh.tolist() for fresh in found[1:]] == [[], []]  # a round begins behind an answer's first token


def test_the_newest_texts_have_at_least_the_tokens() -> None:
    texts = [make_text([0] * 10) for _ in range(5)]
    assert [len(take_newest(texts, n)) for n in (1, 10, 11, 1000)] == [1, 1, 2, 5]


def test_adaptation(program: Program, tmp_path: Path) -> None:
    draft, folder = tmp_path / "draft.gguf", tmp_path / "memory"
    llama(draft, layers=1)
    with closing(load(TARGET, LoadOptions(threads=1))) as target:
        identity = identify_tokenizer(target.tokenizer)
    with closing(Memory(folder, identity, 2**30)) as memory:
        for i in range(N_CONVERSATIONS):
            tokens = np.random.default_rng(i).integers(4, 4096, 700).tolist()
            memory.space("").add(tokens, 100, f"chat:{i + 1}")
    sizes = ("--size", 600, "--size", 1200, "--held-out", 600, "--epochs", 1)
    options = ("--draft", draft, "--save", tmp_path / "trained", "--learning-rate", 0.001)
    result = program("benchmarks.adaptation", folder, *sizes, *options)
    runs = result["runs"]
    assert [run["tokens_trained"] for run in runs] == [700, 1400] and [run["steps"] for run in runs] == [1, 2]
    for run in runs:
        assert run["cpu_s"] > 0 and run["peak_mib"] > 0 and run["positions"] == 599
        assert len(run["tokens"]["before"]) == len(run["tokens"]["gain_95"]) == DEPTH
        assert run["fresh"]["share"] == 1.0 and run["fresh"]["before"] == run["alpha"]["before"][0]
    assert {path.name for path in (tmp_path / "trained").iterdir()} == {f"{run['run']}.gguf" for run in runs}


def test_learning(program: Program, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    llama(draft, layers=1, width=32)
    keep_texts(tmp_path)
    options = ("--memory", tmp_path / "memory", "--draft", draft, "--epochs", 1, "--learning-rate", 0.01)
    result = program("benchmarks.learning", *options, "--block", 30)
    first, second = result["blocks"]
    assert (first["first"], first["version"], first["low"], first["high"]) == (0, 0, 0, 0)
    assert "more are needed" in first["then"] and second["then"] in ("", "version 1")
    assert result["cpu_s"] > 0 and result["reading_cpu_s"] > 0
