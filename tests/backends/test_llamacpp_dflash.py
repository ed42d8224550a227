"""DFlash and DSpark heads on llama.cpp: random weights against numpy, and blocks that are always a fresh session's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.dflash import LlamaBlockHead, open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Draft
from edgespec.errors import BackendError, Cancelled
from tests.backends.dflash_heads import BLOCK, HIDDEN, LAYERS, Dialect, NumpyDflash, make_dflash
from tests.contract.runtimes import prefill
from tests.models import TARGET

CONTEXT = 512
TOLERANCE = 0.1  # of logits with a standard deviation of 0.8 to 4; the target's states have the noise of other widths
ALL = 2**20  # tokens of a window that holds every text
TEXT: list[int] = np.random.default_rng(8).integers(1, 4000, 300).tolist()
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
    found = open_head(target, made.path, made.dialect.spec)
    yield found
    found.close()


@pytest.fixture
def plain_head(target: LlamaModel, tmp_path: Path) -> Iterator[LlamaBlockHead]:
    found = open_head(target, make_dflash(tmp_path / "head.gguf"), Dialect().spec)
    yield found
    found.close()


class Pair:
    """A session of the target and the head's for it; `text` ends with the root."""

    def __init__(self, target: LlamaModel, head: LlamaBlockHead, text: list[int]) -> None:
        self.target = target.open_session()
        self.draft = head.open_session(self.target, lambda: None)
        self.restart(text)

    def restart(self, text: list[int]) -> None:
        """A generation starts: the target reads the prompt and emits the last token of `text`."""
        self.text = list(text)
        prefill(self.target, text[:-1])
        self.draft.begin(text)

    def block(self, window: int = ALL) -> np.ndarray:
        """[block_size, V]"""
        rows = self.draft.block(self.text, window, 99)
        assert rows is not None and len(rows) == self.draft.block_size
        return np.stack(rows)

    def verify(self, drafted: list[int], n_accepted: int, root: int) -> None:
        """A round in which the target accepts some drafted tokens and emits `root` after them."""
        self.target.forward(self.text[-1], Draft.chain(drafted))
        self.target.commit(range(n_accepted))
        self.text += [*drafted[:n_accepted], root]

    def close(self) -> None:
        self.draft.close()
        self.target.close()


def is_close(a: np.ndarray, b: np.ndarray) -> bool:
    np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
    finite = np.isfinite(a)
    return bool(np.abs(a[finite] - b[finite]).max() < TOLERANCE)


def is_fresh(target: LlamaModel, head: LlamaBlockHead, pair: Pair) -> bool:
    """Whether the pair drafts the block that a new one does, as far as both take the same best tokens."""
    fresh = Pair(target, head, pair.text)
    ours, theirs = pair.block(), fresh.block()
    fresh.close()
    same = ours.argmax(1) == theirs.argmax(1)
    n = len(same) if head.name == "dflash" or same.all() else int(same.argmin()) + 1
    return is_close(ours[:n], theirs[:n])


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
        rows = pair.draft.block(pair.text, ALL, n)
        assert rows is not None and len(rows) == n
        assert is_close(np.stack(rows), block[:n])
    pair.close()


def test_after_rounds_it_drafts_as_a_fresh_session(target: LlamaModel, head: LlamaBlockHead) -> None:
    pair = Pair(target, head, TEXT[:50])
    rng = np.random.default_rng(3)
    for n_accepted in (2, 0, 3, 1, 3, 0, 2):
        drafted = rng.integers(1, 4000, 3).tolist()
        assert pair.draft.unread(pair.text) > 0
        pair.block()
        pair.verify(drafted, n_accepted, int(rng.integers(1, 4000)))
        assert pair.draft.unread(pair.text) == n_accepted + 2
    assert is_fresh(target, head, pair)
    pair.close()


def test_rounds_without_its_drafts_are_read_later(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    pair = Pair(target, plain_head, TEXT[:30])
    pair.block()
    for i in range(5):
        pair.verify([5, 6], i % 3, 9 + i)
    assert pair.draft.unread(pair.text) == 5 + 0 + 1 + 2 + 0 + 1 + 1
    assert is_fresh(target, plain_head, pair)
    assert pair.draft.unread(pair.text) == 1, "the root"
    assert is_fresh(target, plain_head, pair)
    pair.close()


@pytest.mark.parametrize("kept", [0, 1, 2, 25, 48, 49])
@pytest.mark.parametrize("dialect", ["dflash", "window"])
def test_a_new_text_keeps_the_prefix_that_it_shares(
    target: LlamaModel, tmp_path: Path, dialect: str, kept: int
) -> None:
    head = open_head(target, make_dflash(tmp_path / "head.gguf", DIALECTS[dialect]), DIALECTS[dialect].spec)
    pair = Pair(target, head, TEXT[:50])
    pair.block()
    pair.restart([*TEXT[:kept], *TEXT[100:130]])
    assert pair.draft.unread(pair.text) == 30
    assert is_fresh(target, head, pair)
    pair.close()
    head.close()


def test_another_root_after_the_same_text(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    pair = Pair(target, plain_head, TEXT[:50])
    pair.block()
    for text in ([*TEXT[:49], 77], [*TEXT[:20], 78], [*TEXT[:20], 79], TEXT[:21]):
        pair.restart(text)
        assert pair.draft.unread(pair.text) == 1
        assert is_fresh(target, plain_head, pair)
    pair.restart(TEXT[:50])
    assert pair.draft.unread(pair.text) == 30
    assert is_fresh(target, plain_head, pair)
    pair.close()


def test_a_prompt_that_it_has_not_read_is_no_loss(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    """A generation without its drafts, after which the text goes back behind what it has read."""
    pair = Pair(target, plain_head, TEXT[:50])
    pair.block()
    pair.restart([*TEXT[:20], 78])
    pair.restart(TEXT[60:80])
    assert is_fresh(target, plain_head, pair)
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
    pair.verify([5, 6], 1, 7)
    assert pair.draft.unread(pair.text) == 3
    pair.block(90)
    pair.restart(TEXT[:60])  # its states are held neither by the head nor by the target
    n = pair.draft.unread(pair.text) - 1  # which the target has read again
    assert n < 5
    assert is_close(pair.block(), reference.logits(states[59 - n : 59], TEXT[59]))
    pair.restart(TEXT[250:290])
    assert is_fresh(target, plain_head, pair)
    pair.restart(TEXT[:200])
    assert is_close(pair.block(1), reference.logits(states[:0], TEXT[199])), "the root alone"
    other.close()
    pair.close()


def test_the_ends_of_the_context(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    text = (TEXT * 2)[:CONTEXT]
    pair = Pair(target, plain_head, [*text, 9])  # the target's cache is full
    assert is_fresh(target, plain_head, pair)
    one = Pair(target, plain_head, TEXT[:2])
    one.text = TEXT[:1]
    assert one.draft.unread(one.text) == 1
    assert np.isfinite(one.block()).all(), "a root without a text"
    one.text = TEXT[:2]
    assert is_fresh(target, plain_head, one)
    one.close()
    pair.close()


def test_states_that_are_missing_are_an_error(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    pair = Pair(target, plain_head, TEXT[:20])
    with pytest.raises(BackendError, match="no hidden states of the text"):
        pair.draft.block(TEXT[:30], ALL, 3)
    assert is_fresh(target, plain_head, pair)
    pair.close()


def test_a_cancelled_block_is_drafted_again(target: LlamaModel, plain_head: LlamaBlockHead) -> None:
    calls = 0
    cancel_at = -1

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == cancel_at:
            raise Cancelled

    pair = Pair(target, plain_head, TEXT[:2])
    pair.draft.close()
    pair.target.close()
    pair.target = target.open_session()
    pair.draft = plain_head.open_session(pair.target, check)
    for cancelled in (1, 2, 3, 4):  # of the three decodes of states and the block
        pair.restart([cancelled + 9, *TEXT[:150]])
        calls, cancel_at = 0, cancelled
        with pytest.raises(Cancelled):
            pair.block()
        assert is_fresh(target, plain_head, pair)
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
