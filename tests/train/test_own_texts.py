"""Texts that a model writes by itself: their file, loops, questions, and what stops them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.cancel import Check, iterate
from edgespec.engine.engine import Engine
from edgespec.errors import CacheError, Cancelled, DraftRefused
from edgespec.train import own_texts
from edgespec.train.own_texts import Conversation, ConversationFile, cut_loop, write_conversations
from tests.gguf_models import TARGET
from tests.train.chatty import make_chatty

STREAMS = 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = make_chatty(tmp_path_factory.mktemp("chatty") / "target.gguf")
    engine = Engine(load(path, LoadOptions(context_size=512, threads=1, caches=STREAMS)), (), Speculation(), STREAMS)
    yield engine
    engine.close()


def write(engine: Engine, n: int, *questions: str, first: int = 0, check: Check = lambda: None):
    written = iterate(write_conversations(engine, questions, first, STREAMS), check)
    return list(islice((each for each in written if each is not None), n))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions and answers of fewer tokens."""
    monkeypatch.setattr(own_texts, "_MAX_QUESTION", 30)
    monkeypatch.setattr(own_texts, "_MAX_ANSWER", 60)


def test_conversations_are_what_the_model_says(engine: Engine) -> None:
    """Each has a number, by which it is the same again, and whose question is one of those given or the model's."""
    asked = "Return the largest of three numbers."
    found = {each.seed: each for each in write(engine, 6, asked)}
    tokenizer = engine.target.tokenizer
    texts = {
        seed: b"".join(map(tokenizer.render, each.tokens[: each.n_prompt])).decode("utf-8", "replace")
        for seed, each in found.items()
    }
    assert len(found) == 6
    assert {seed for seed, text in texts.items() if asked in text} <= {0}
    assert all("# " in text for text in texts.values())
    assert all(16 < len(each.tokens) - each.n_prompt <= 60 for each in found.values())
    (again,) = [each for each in write(engine, 6, asked) if each.seed == min(found)]
    assert again.n_prompt == found[min(found)].n_prompt
    later = write(engine, 2, asked, first=50)
    assert min(each.seed for each in later) >= 50


def test_writing_is_cancelled(engine: Engine) -> None:
    checks = count()

    def cancel() -> None:
        if next(checks) >= 40:
            raise Cancelled

    with pytest.raises(Cancelled):
        write(engine, 6, check=cancel)
    assert len(write(engine, 1)) == 1, "the engine stays usable"


def test_a_model_without_a_template_writes_nothing() -> None:
    engine = Engine(load(TARGET, LoadOptions(context_size=128, threads=1)), (), Speculation())
    with pytest.raises(DraftRefused, match="no chat template"):
        write(engine, 1)
    engine.close()


def test_a_loop_is_cut() -> None:
    once = list(range(40))
    assert cut_loop(once) == once and cut_loop([]) == []
    assert cut_loop([*once, *once[:18]]) == [*once, *once[:18]], "15 n-grams of 4 tokens again are no loop"
    assert cut_loop([*once, *once[:19], 7]) == [*once, *once[:3]]
    assert cut_loop([5] * 100) == [5] * 4


def test_the_file_of_a_killed_process(tmp_path: Path) -> None:
    """A line that was cut is left out, and the next number is behind the last."""
    path = tmp_path / "texts.jsonl"
    file = ConversationFile(path, 100)
    assert (file.n_tokens, file.next_seed) == (0, 0)
    for seed in (1, 0, 4):
        file.add(Conversation(seed, 2, [1, 2, 3, 4, 5], "Why?" * (seed == 0)))
    assert path.stat().st_mode & 0o077 == 0
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:9])
    again = ConversationFile(path, 100)
    assert again.conversations == file.conversations and path.read_bytes() == whole
    assert (again.n_tokens, again.next_seed) == (9, 5)
    (text, *_) = again.texts()
    assert (text.answer, text.source, text.tokens.tolist()) == (2, "own:1", [1, 2, 3, 4, 5])
    assert again.list_unanswered(["Why?", "How?", "How?"]) == ["How?"]
    with pytest.raises(CacheError, match="cannot be written"):
        ConversationFile(tmp_path / "missing" / "texts.jsonl", 100).add(Conversation(0, 1, [1]))


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"\xff",
        b"[1]",
        b'{"seed": 1, "n_prompt": 2, "tokens": [1, 2, 100]}',
        b'{"seed": 1, "n_prompt": 2, "tokens": [1, 2, "3"]}',
        b'{"seed": 1, "n_prompt": 3, "tokens": [1, 2, 3]}',
        b'{"seed": "1", "n_prompt": 1, "tokens": [1, 2, 3]}',
        b'{"seed": 1, "n_prompt": 1, "tokens": 5}',
        b"[" * 100_000,
    ],
    ids=range(9),
)
def test_damaged_lines_are_left_out(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    sound = b'{"seed": 7, "n_prompt": 1, "tokens": [1, 2, 99]}\n'
    path.write_bytes(line + b"\n" + sound)
    assert [each.seed for each in ConversationFile(path, 100).conversations] == [7]
