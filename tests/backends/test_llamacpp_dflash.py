"""DFlash and DSpark heads on llama.cpp: random weights against numpy, and blocks that are always a fresh session's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.heads import LlamaHead, open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.errors import BackendError, Cancelled
from tests.backends import head_sessions
from tests.backends.dflash_heads import BLOCK, DIALECTS, LAYERS, Dialect, NumpyDflash, make_dflash
from tests.backends.head_sessions import WHOLE, Cancellation
from tests.backends.llamacpp_pairs import CONTEXT, TEXT, BlockPair, check_fresh_block
from tests.contract.runtimes import prefill
from tests.models import TARGET


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
def head(target: LlamaModel, made: Made) -> Iterator[LlamaHead]:
    found = open_head(target, made.path, made.dialect.spec)
    yield found
    found.close()


@pytest.fixture
def plain_head(target: LlamaModel, tmp_path: Path) -> Iterator[LlamaHead]:
    found = open_head(target, make_dflash(tmp_path / "head.gguf"), Dialect().spec)
    yield found
    found.close()


def is_close(a: np.ndarray, b: np.ndarray) -> bool:
    return head_sessions.is_close(a, b, BlockPair.tolerance)


def test_the_forward_pass_is_that_of_numpy(target: LlamaModel, head: LlamaHead, made: Made) -> None:
    other = target.open_session()
    features = other.tap(LAYERS)
    text = TEXT[:140]  # three decodes of states
    prefill(other, text[:-1])
    states, reference = features.take(0, 139), NumpyDflash(made.path, made.dialect)
    pair = BlockPair(target, head, text)
    rows = pair.block()
    assert rows.shape == (BLOCK - made.dialect.first, 4096) and rows.dtype == np.float32
    best = rows.argmax(1).tolist()
    assert is_close(rows, reference.logits(states, text[-1], best))
    assert not is_close(rows, reference.logits(states[:-1], text[-1], best)), "it reads every state"
    assert not is_close(rows, reference.logits(states, text[-2], best)), "it reads the root"
    other.close()
    pair.close()


def test_fewer_rows_are_the_first_of_all(target: LlamaModel, head: LlamaHead) -> None:
    pair = BlockPair(target, head, TEXT[:50])
    block = pair.block()
    for n in (1, 2, len(block)):
        assert is_close(pair.block(n=n), block[:n])
    pair.close()


def test_a_window_reads_the_end_of_the_text_alone(target: LlamaModel, plain_head: LlamaHead, tmp_path: Path) -> None:
    pair, other = BlockPair(target, plain_head, TEXT[:200]), target.open_session()
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
    check_fresh_block(pair)
    pair.restart(TEXT[:200])
    assert is_close(pair.block(1), reference.logits(states[:0], TEXT[199])), "the root alone"
    other.close()
    pair.close()


def test_the_ends_of_the_context(target: LlamaModel, plain_head: LlamaHead) -> None:
    text = (TEXT * 2)[:CONTEXT]
    pair = BlockPair(target, plain_head, [*text, 9])  # the target's cache is full
    check_fresh_block(pair)
    one = BlockPair(target, plain_head, TEXT[:2])
    one.text = TEXT[:1]
    assert one.draft.pending_tokens(one.text) == 1
    assert np.isfinite(one.block()).all(), "a root without a text"
    one.text = TEXT[:2]
    check_fresh_block(one)
    one.close()
    pair.close()


def test_states_that_are_missing_are_an_error(target: LlamaModel, plain_head: LlamaHead) -> None:
    pair = BlockPair(target, plain_head, TEXT[:20])
    with pytest.raises(BackendError, match="no hidden states of the text"):
        pair.draft.block(TEXT[:30], WHOLE, 3)
    check_fresh_block(pair)
    pair.close()


def test_a_cancelled_block_is_drafted_again(target: LlamaModel, plain_head: LlamaHead) -> None:
    check = Cancellation()
    pair = BlockPair(target, plain_head, TEXT[:2], check)
    for cancelled in (1, 2, 3, 4):  # of the three decodes of states and the block
        pair.restart([cancelled + 9, *TEXT[:150]])
        check.left = cancelled
        with pytest.raises(Cancelled):
            pair.block()
        check_fresh_block(pair)
    pair.close()
