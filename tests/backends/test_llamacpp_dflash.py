"""DFlash and DSpark heads on llama.cpp: random weights against numpy, and blocks that are always a fresh session's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.dflash import LlamaBlockHead, open_dflash
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.errors import BackendError, Cancelled
from tests.backends import head_sessions
from tests.backends.dflash_heads import BLOCK, HIDDEN, LAYERS, Dialect, NumpyDflash, make_dflash
from tests.backends.head_sessions import WHOLE, Cancellation
from tests.backends.llamacpp_pairs import CONTEXT, TEXT, run_rounds, skip_rounds
from tests.contract.runtimes import prefill
from tests.models import TARGET

DIALECTS = {
    "dflash": Dialect(),
    "causal": Dialect(is_causal=True),
    "reduced": Dialect(is_reduced=True),
    "window": Dialect(window=20),
    "sections": Dialect(has_sections=True),
    "dspark": Dialect(markov=True),
    "dspark after the root": Dialect(markov=False),
    "dspark reduced": Dialect(markov=True, is_reduced=True),
}


@dataclass(frozen=True)
class Made:
    path: Path
    dialect: Dialect


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, LoadOptions(context_size=CONTEXT, threads=1))
    yield model
    model.close()


@pytest.fixture(scope="module", params=DIALECTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    dialect = DIALECTS[request.param]
    return Made(make_dflash(tmp_path_factory.mktemp("head") / "head.gguf", dialect), dialect)


@pytest.fixture
def head(target: LlamaModel, made: Made) -> Iterator[LlamaBlockHead]:
    found = open_dflash(target, made.path, made.dialect.spec)
    yield found
    found.close()


@pytest.fixture
def plain_head(target: LlamaModel, tmp_path: Path) -> Iterator[LlamaBlockHead]:
    found = open_dflash(target, make_dflash(tmp_path / "head.gguf"), Dialect().spec)
    yield found
    found.close()


class Pair(head_sessions.Pair):
    tolerance = 0.1  # of logits with a standard deviation of 0.8 to 4


def is_close(a: np.ndarray, b: np.ndarray) -> bool:
    return head_sessions.is_close(a, b, Pair.tolerance)


def check_fresh(pair: Pair) -> None:
    """It drafts the block that a new pair does, as far as both take the same best tokens."""
    fresh = pair.fresh()
    ours, theirs = pair.block(), fresh.block()
    fresh.close()
    same = ours.argmax(1) == theirs.argmax(1)
    n = len(same) if pair.head.name == "dflash" or same.all() else int(same.argmin()) + 1
    assert is_close(ours[:n], theirs[:n])


def test_the_forward_pass_is_that_of_numpy(target: LlamaModel, head: LlamaBlockHead, made: Made) -> None:
    other = target.open_session()
    features = other.tap(LAYERS)
    text = TEXT[:140]  # three decodes of states
    prefill(other, text[:-1])
    states, reference = features.take(0, 139), NumpyDflash(made.path, made.dialect)
    pair = Pair(target, head, text)
    rows = pair.block()
    assert rows.shape == (BLOCK - made.dialect.first, 4096) and rows.dtype == np.float32
    best = rows.argmax(1).tolist()
    assert is_close(rows, reference.logits(states, text[-1], best))
    assert not is_close(rows, reference.logits(states[:-1], text[-1], best)), "it reads every state"
    assert not is_close(rows, reference.logits(states, text[-2], best)), "it reads the root"
    other.close()
    pair.close()


def test_fewer_rows_are_the_first_of_all(target: LlamaModel, head: LlamaBlockHead) -> None:
    pair = Pair(target, head, TEXT[:50])
    block = pair.block()
    for n in (1, 2, len(block)):
        assert is_close(pair.block(n=n), block[:n])
    pair.close()


def test_after_rounds_it_drafts_as_a_fresh_session(target: LlamaModel, head: LlamaBlockHead) -> None:
    pair = Pair(target, head, TEXT[:50])
    run_rounds(pair, behind=2)
    check_fresh(pair)
    pair.close()


def test_rounds_without_its_drafts_are_read_later(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    pair = Pair(target, plain_head, TEXT[:30])
    skip_rounds(pair, behind=2)
    check_fresh(pair)
    assert pair.draft.pending_tokens(pair.text) == 1, "the root"
    check_fresh(pair)
    pair.close()


@pytest.mark.parametrize("kept", [0, 1, 2, 25, 48, 49])
@pytest.mark.parametrize("dialect", ["dflash", "window"])
def test_a_new_text_keeps_the_prefix_that_it_shares(
    target: LlamaModel, tmp_path: Path, dialect: str, kept: int
) -> None:
    head = open_dflash(target, make_dflash(tmp_path / "head.gguf", DIALECTS[dialect]), DIALECTS[dialect].spec)
    pair = Pair(target, head, TEXT[:50])
    pair.block()
    pair.restart([*TEXT[:kept], *TEXT[100:130]])
    assert pair.draft.pending_tokens(pair.text) == 30
    check_fresh(pair)
    pair.close()
    head.close()


def test_another_root_after_the_same_text(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    pair = Pair(target, plain_head, TEXT[:50])
    pair.block()
    for text in ([*TEXT[:49], 77], [*TEXT[:20], 78], [*TEXT[:20], 79], TEXT[:21]):
        pair.restart(text)
        assert pair.draft.pending_tokens(pair.text) == 1
        check_fresh(pair)
    pair.restart(TEXT[:50])
    assert pair.draft.pending_tokens(pair.text) == 30
    check_fresh(pair)
    pair.close()


def test_a_prompt_that_it_has_not_read_is_no_loss(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    """A generation without its drafts, after which the text goes back behind what it has read."""
    pair = Pair(target, plain_head, TEXT[:50])
    pair.block()
    pair.restart([*TEXT[:20], 78])
    pair.restart(TEXT[60:80])
    check_fresh(pair)
    pair.close()


def test_a_window_reads_the_end_of_the_text_alone(
    target: LlamaModel, plain_head: LlamaBlockHead, tmp_path: Path
) -> None:
    pair, other = Pair(target, plain_head, TEXT[:200]), target.open_session()
    features = other.tap(LAYERS)
    prefill(other, TEXT[:199])
    reference = NumpyDflash(tmp_path / "head.gguf", Dialect())  # positions are relative
    states = features.take(0, 199)
    assert is_close(pair.block(90), reference.logits(states[110:], TEXT[199]))
    pair.verify_chain([5, 6], 1, 7)
    assert pair.draft.pending_tokens(pair.text) == 3
    pair.block(90)
    pair.restart(TEXT[:60])  # its states are held neither by the head nor by the target
    n = pair.draft.pending_tokens(pair.text) - 1  # which the target has read again
    assert n < 5
    assert is_close(pair.block(), reference.logits(states[59 - n : 59], TEXT[59]))
    pair.restart(TEXT[250:290])
    check_fresh(pair)
    pair.restart(TEXT[:200])
    assert is_close(pair.block(1), reference.logits(states[:0], TEXT[199])), "the root alone"
    other.close()
    pair.close()


def test_the_ends_of_the_context(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    text = (TEXT * 2)[:CONTEXT]
    pair = Pair(target, plain_head, [*text, 9])  # the target's cache is full
    check_fresh(pair)
    one = Pair(target, plain_head, TEXT[:2])
    one.text = TEXT[:1]
    assert one.draft.pending_tokens(one.text) == 1
    assert np.isfinite(one.block()).all(), "a root without a text"
    one.text = TEXT[:2]
    check_fresh(one)
    one.close()
    pair.close()


def test_states_that_are_missing_are_an_error(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    pair = Pair(target, plain_head, TEXT[:20])
    with pytest.raises(BackendError, match="no hidden states of the text"):
        pair.draft.block(TEXT[:30], WHOLE, 3)
    check_fresh(pair)
    pair.close()


def test_a_cancelled_block_is_drafted_again(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    check = Cancellation()
    pair = Pair(target, plain_head, TEXT[:2], check)
    for cancelled in (1, 2, 3, 4):  # of the three decodes of states and the block
        pair.restart([cancelled + 9, *TEXT[:150]])
        check.left = cancelled
        with pytest.raises(Cancelled):
            pair.block()
        check_fresh(pair)
    pair.close()


def test_a_closed_head_leaves_the_target_without_states(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    session = target.open_session()
    draft = plain_head.open_session(session, lambda: None)
    prefill(session, TEXT[:30])
    draft.close()
    session.rewind(0)
    features = session.tap((1,))  # as another head does
    prefill(session, TEXT[:20])
    assert features.take(0, 20).shape == (20, HIDDEN)
    session.close()
