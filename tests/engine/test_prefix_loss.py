"""Why the beginning of a prompt is read again: each reason on an engine that runs into it, and none where none is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.cancel import iterate
from edgespec.core.peers import Yield
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Finished, PrefixLoss, Prompt, Request
from edgespec.engine.prefix_loss import LEAST_LOSS, EarlierText, explain_loss
from edgespec.errors import Cancelled
from edgespec.text.chat_template import Message
from tests.engine.conftest import PLAIN

GREEDY = SamplingParams(temperature=0, logit_bias=((256, -1000.0),))
SYSTEM = "You are a tester of caches. Today is 2026-11-25. " + " ".join(
    f"Rule {i} is to do {i * i}." for i in range(60)
)
CHAT = (Message("system", SYSTEM), Message("user", "What does rule 7 say?"))
FILES = " ".join(f"line {i} of another file" for i in range(80))


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = Engine(load("tree", LoadOptions(context_size=8192)), [], PLAIN, 1)
    yield opened
    opened.close()


def ask(engine: Engine, prompt: Prompt, n: int = 8) -> Finished:
    (finished,) = [e for e in engine.stream(Request(prompt, GREEDY, n, seed=1)) if isinstance(e, Finished)]
    return finished


def lose(engine: Engine, prompt: Prompt) -> PrefixLoss:
    loss = ask(engine, prompt).loss
    assert loss is not None
    return loss


def test_a_conversation_that_goes_on_loses_nothing(engine: Engine) -> None:
    assert ask(engine, SYSTEM).loss is None, "there is no earlier text"
    assert ask(engine, SYSTEM + " And what else?").loss is None
    assert ask(engine, FILES).loss is None, "it has nothing in common with the text before it"


def test_the_message_that_has_changed_is_named_with_the_text_there(engine: Engine) -> None:
    ask(engine, CHAT)
    changed = Message("system", SYSTEM.replace("2026-11-25", "2026-11-26"))
    loss = lose(engine, (changed, *CHAT[1:], Message("assistant", "49."), Message("user", "And rule 8?")))
    at = SYSTEM.index("5. Rule 0")
    assert (loss.cause, loss.at, loss.where) == ("changed", at, "message 1 (system)")
    assert loss.text.startswith("'ches. Today is 2026-11-2' comes before '6. Rule 0")
    assert len(SYSTEM) - at - 20 < loss.tokens <= len(SYSTEM) - at + 40
    assert "in message 1 (system)" in loss.reason and "6. Rule" not in loss.reason and "6. Rule" in str(loss)


def test_a_message_that_was_left_out_is_found_behind_the_one_before(engine: Engine) -> None:
    ask(engine, (*CHAT, Message("assistant", "It says 49."), Message("user", FILES)))
    loss = lose(engine, (*CHAT, Message("user", FILES)))
    assert (
        loss.cause == "changed" and loss.where == "message 3 (user)" and loss.at == len(SYSTEM) + len(CHAT[1].content)
    )


def test_a_cache_that_was_given_to_another_conversation(engine: Engine) -> None:
    ask(engine, SYSTEM)
    ask(engine, FILES)
    loss = lose(engine, SYSTEM + " And what else?")
    assert loss.cause == "evicted" and loss.tokens == len(SYSTEM) and "--parallel" in loss.reason


def test_a_cache_that_can_only_go_back_to_certain_places() -> None:
    engine = Engine(load("recurrent", LoadOptions(context_size=8192)), [], PLAIN, 1)
    ask(engine, SYSTEM)
    ask(engine, SYSTEM + FILES)
    loss = lose(engine, SYSTEM + FILES[:1000] + "other")
    assert loss.cause == "rollback" and loss.tokens > LEAST_LOSS and "go back" in loss.reason
    engine.close()


def test_a_cache_of_another_conversation_that_cannot_be_copied() -> None:
    engine = Engine(load("recurrent", LoadOptions(context_size=8192)), [], PLAIN, 2)
    first: Iterator[Event | Yield] = engine.generate(Request(SYSTEM, GREEDY, 8, seed=1))
    next(event for event in first if isinstance(event, Step))
    loss = lose(engine, SYSTEM + " And what else?")
    assert loss.cause == "busy" and loss.tokens == len(SYSTEM)
    list(first)
    engine.close()


def test_what_a_cancelled_request_had_not_read_was_not_lost(engine: Engine) -> None:
    is_begun = False

    def check() -> None:
        if is_begun:
            raise Cancelled

    for event in iterate(engine.stream(Request(SYSTEM, GREEDY, 8, seed=1)), check):
        is_begun = True
        if isinstance(event, PrefillProgress):
            read = event.done
        else:
            assert isinstance(event, Finished) and event.reason == "cancelled" and read < len(SYSTEM) // 2
    finished = ask(engine, SYSTEM)
    assert finished.loss is None and finished.metrics.cached_tokens == read


def test_what_another_request_has_not_read_yet_is_not_lost() -> None:
    engine = Engine(load("recurrent", LoadOptions(context_size=8192)), [], PLAIN, 2)
    first: Iterator[Event | Yield] = engine.generate(Request(SYSTEM, GREEDY, 8, seed=1))
    next(event for event in first if isinstance(event, PrefillProgress))
    assert ask(engine, SYSTEM + " And what else?").loss is None
    list(first)
    engine.close()


def test_what_was_taken_from_the_cache_was_not_lost() -> None:
    """Another slot has the same text behind another beginning."""
    engine = Engine(load("tree", LoadOptions(context_size=16384)), [], PLAIN, 2)
    ask(engine, "a first beginning: " + SYSTEM * 2)
    ask(engine, "of the other text, this is it: " + SYSTEM * 2)
    finished = ask(engine, "a first beginning: " + SYSTEM * 2 + FILES)
    assert finished.metrics.cached_tokens >= 2 * len(SYSTEM) and finished.loss is None
    engine.close()


def test_the_texts_of_others_are_not_compared(engine: Engine) -> None:
    """Else a caller could guess sentences of another one."""

    def ask_as(owner: str, prompt: str) -> PrefixLoss | None:
        request = Request(prompt, GREEDY, 8, seed=1, owner=owner)
        (finished,) = [event for event in engine.stream(request) if isinstance(event, Finished)]
        return finished.loss

    secret = "the password of the safe in the cellar is 'three grey herons on a wet roof', and nobody knows it"
    ask_as("key:alice", SYSTEM + secret)
    assert ask_as("key:bob", f"guess: {secret} {FILES}") is None
    assert ask_as("key:bob", SYSTEM + "and so on") is None, "not even that its cache was given away"
    loss = ask_as("key:alice", SYSTEM + secret + " more")
    assert loss is not None and loss.cause == "evicted"


def test_another_conversation_with_a_common_beginning_has_lost_nothing(engine: Engine) -> None:
    """Both begin with the same system text, which is reused; nothing behind it is in both."""
    ask(engine, SYSTEM + FILES)
    assert ask(engine, SYSTEM + "Something else, " * 20).loss is None


def test_short_texts_and_short_losses_are_not_worth_a_sentence(engine: Engine) -> None:
    tokenizer = engine.target.tokenizer
    text = list(range(1, 40))
    assert explain_loss(text, 0, [EarlierText(text, "given")], "", tokenizer, 512) is None
    text = [i % 200 for i in range(LEAST_LOSS + 10)]
    assert explain_loss(text, 0, [EarlierText(text[: LEAST_LOSS - 1], "given")], "", tokenizer, 512) is None
    assert explain_loss(text, 0, [EarlierText(text[:LEAST_LOSS], "given")], "", tokenizer, 512) is not None
    text = text[: LEAST_LOSS + 1]
    loss = explain_loss(text, 0, [EarlierText(text, "given")], "", tokenizer, 512)
    assert loss is not None and loss.tokens == LEAST_LOSS, "the last token is read in any case"


def test_a_beginning_in_another_cache_that_is_no_longer_than_a_copy_is_worth(engine: Engine) -> None:
    """A stream of 64 times as many tokens would be copied."""
    tokenizer, text = engine.target.tokenizer, [i % 200 for i in range(400)]
    for context_size, cause in ((16_384, "busy"), (32_768, None)):
        loss = explain_loss(text, 0, [EarlierText(text[:300], "other")], "", tokenizer, context_size)
        assert (loss.cause if loss is not None else None) == cause


def test_no_module_is_imported_while_an_answer_is_made() -> None:
    """An import takes as long as some tokens: numpy.ma, which some of numpy's functions load, as three."""
    code = (
        "import sys\n"
        "from tests.engine.test_prefix_loss import CHAT, PLAIN, SYSTEM, Engine, LoadOptions, Message, ask, load\n"
        "engine = Engine(load('tree', LoadOptions(context_size=8192)), [], PLAIN, 1)\n"
        "before = set(sys.modules)\n"
        "ask(engine, CHAT)\n"
        "assert ask(engine, (Message('system', SYSTEM.replace('Today', 'Now')), *CHAT[1:])).loss\n"
        "sys.exit(str(set(sys.modules) - before or ''))\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.stderr.strip() == ""
