"""EAGLE-3 heads on llama.cpp: random weights against numpy, and a state that is always that of a fresh session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.eagle3 import open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.pair_session import PairHead, PairSession
from edgespec.backends.options import LoadOptions
from edgespec.controller.fixed import FixedLength
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Budget, Draft
from edgespec.drafters.sequential import SequentialDrafter
from edgespec.errors import BackendError, Cancelled, InvalidModelFile
from edgespec.formats.gguf_validate import read_file
from tests.backends.eagle3_heads import HIDDEN, Head, NumpyHead, make_head
from tests.backends.llamacpp_pairs import ALL, Pair, generate, is_close, is_fresh
from tests.contract.runtimes import prefill
from tests.models import DRAFT, TARGET

CONTEXT = 512
TEXT: list[int] = np.random.default_rng(8).integers(1, 4000, 300).tolist()
KINDS = {"shared": {"size": HIDDEN}, "own": {"size": 64}, "normed": {"size": HIDDEN, "is_normed": True}}


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, LoadOptions(context_size=CONTEXT, threads=1))
    yield model
    model.close()


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return make_head(tmp_path_factory.mktemp("head") / "head.gguf", **KINDS[request.param])


@pytest.fixture
def head(target: LlamaModel, made: Head) -> Iterator[PairHead]:
    found = open_head(target, made.path, made.spec)
    yield found
    found.close()


def test_the_forward_pass_is_that_of_numpy(target: LlamaModel, head: PairHead, made: Head) -> None:
    other = target.open_session()
    features = other.tap(made.spec.layers or ())
    text = TEXT[:140]  # three decodes of the head
    prefill(other, text[:-1])
    rows, reference = features.take(0, 139), NumpyHead(made)
    pair = Pair(target, head, text)
    logits = pair.read()
    assert logits.shape == (4096,) and logits.dtype == np.float32 and logits[np.isfinite(logits)].std() > 1
    assert is_close(logits, reference.logits(rows, text[1:], []))
    drafted: list[int] = []
    for token in (40, 41, 42):
        drafted.append(token)
        stepped = pair.draft.step(token)
        assert stepped is not None
        assert is_close(stepped, reference.logits(rows, text[1:], drafted))
    shifted = reference.logits(rows, [*text[2:], 9], [])
    assert not is_close(logits, shifted)
    other.close()
    pair.close()


def test_after_rounds_it_drafts_as_a_fresh_session(target: LlamaModel, head: PairHead) -> None:
    pair = Pair(target, head, TEXT[:50])
    rng = np.random.default_rng(3)
    for n_accepted in (2, 0, 3, 1, 3, 0, 2):
        drafted = rng.integers(1, 4000, 3).tolist()
        assert pair.draft.unread(pair.text) > 0
        pair.read()
        assert list(pair.draft.text) == pair.text
        for token in drafted[:-1]:
            pair.draft.step(token)
        pair.verify(drafted, n_accepted, int(rng.integers(1, 4000)))
        assert pair.draft.unread(pair.text) == n_accepted + 1
    assert is_fresh(target, head, pair)
    pair.close()


def test_rounds_without_its_drafts_are_read_later(target: LlamaModel, head: PairHead) -> None:
    pair = Pair(target, head, TEXT[:30])
    pair.read()
    for i in range(5):
        pair.verify([5, 6], i % 3, 9 + i)
    assert pair.draft.unread(pair.text) == 5 + 0 + 1 + 2 + 0 + 1
    assert is_fresh(target, head, pair)
    assert pair.draft.unread(pair.text) == 1  # the last one, which may be read again
    assert is_fresh(target, head, pair)
    pair.close()


@pytest.mark.parametrize("kept", [0, 1, 2, 25, 48, 49])
def test_a_new_text_keeps_the_prefix_that_it_shares(target: LlamaModel, head: PairHead, kept: int) -> None:
    pair = Pair(target, head, TEXT[:50])
    pair.read()
    pair.draft.step(5)
    pair.restart([*TEXT[:kept], *TEXT[100:130]])
    assert pair.draft.unread(pair.text) == kept + 29 - max(kept - 1, 0)
    assert is_fresh(target, head, pair)
    pair.close()


def test_another_root_after_the_same_text(target: LlamaModel, head: PairHead) -> None:
    pair = Pair(target, head, TEXT[:50])
    pair.read()
    pair.restart([*TEXT[:49], 77])
    assert pair.draft.unread(pair.text) == 1
    assert is_fresh(target, head, pair)
    pair.restart([*TEXT[:20], 78])
    assert is_fresh(target, head, pair)
    pair.close()


def test_where_the_target_goes_back_without_a_prefill_it_starts_anew(target: LlamaModel, head: PairHead) -> None:
    """It has released the states before."""
    pair = Pair(target, head, TEXT[:50])
    pair.read()
    with pytest.raises(BackendError, match="no hidden states"):
        pair.draft.read([*TEXT[:50], 5], ALL)
    pair.target.rewind(20)
    pair.text = [*TEXT[:20], 78]
    pair.draft.begin(pair.text)
    assert pair.draft.read(pair.text, ALL) is None
    for n_accepted in (0, 2):
        pair.verify([5, 6], n_accepted, 9)
        assert np.isfinite(pair.read()).any()
    pair.restart([*TEXT[:20], 78])  # reads them again
    pair.restart(TEXT[60:80])
    assert is_fresh(target, head, pair)
    pair.close()


def test_a_window_reads_the_end_of_the_text_alone(target: LlamaModel, head: PairHead, made: Head) -> None:
    pair, other = Pair(target, head, TEXT[:200]), target.open_session()
    features = other.tap(made.spec.layers or ())
    prefill(other, TEXT[:199])
    logits = pair.draft.read(pair.text, 90)
    assert logits is not None
    expected = NumpyHead(made).logits(features.take(109, 199), TEXT[110:200], [])  # positions are relative
    assert is_close(logits, expected)
    pair.verify([5, 6], 1, 7)
    assert pair.draft.unread(pair.text) == 2
    assert pair.draft.read(pair.text, 90) is not None
    other.close()
    pair.close()


def test_the_end_of_the_context(target: LlamaModel, head: PairHead) -> None:
    text = (TEXT * 2)[:CONTEXT]
    pair = Pair(target, head, text)
    assert pair.draft.read(text, ALL) is not None  # half of the context
    one = Pair(target, head, TEXT[:2])
    assert one.draft.read(TEXT[:1], ALL) is None
    one.read()
    steps = 0
    while one.draft.step(5) is not None:
        steps += 1
    assert steps == CONTEXT - 1
    one.close()
    pair.close()


def test_a_cancelled_read_is_done_again(target: LlamaModel, head: PairHead) -> None:
    is_cancelled = False

    def check() -> None:
        if is_cancelled:
            raise Cancelled

    pair = Pair(target, head, TEXT[:50])
    pair.draft.close()
    session = target.open_session()
    pair.target.close()
    pair.target, pair.draft = session, head.open_session(session, check)
    pair.restart(TEXT[:50])
    pair.read()
    pair.verify([5, 6, 7], 2, 8)
    is_cancelled = True
    with pytest.raises(Cancelled):
        pair.read()
    is_cancelled = False
    assert pair.draft.unread(pair.text) == 3
    assert is_fresh(target, head, pair)
    pair.close()


def test_a_closed_head_leaves_the_target_without_states(target: LlamaModel, head: PairHead) -> None:
    session = target.open_session()
    draft = head.open_session(session, lambda: None)
    prefill(session, TEXT[:30])
    draft.close()
    for _ in range(3):
        session.forward(5, Draft.chain([6]))
        session.commit((0,))
    session.rewind(0)
    features = session.tap((1,))  # as another head does
    prefill(session, TEXT[:20])
    assert features.take(0, 20).shape == (20, HIDDEN)
    session.close()


def test_a_rollout_is_the_greedy_chain(target: LlamaModel, head: PairHead) -> None:
    pair, other = Pair(target, head, TEXT[:40]), Pair(target, head, TEXT[:40])
    found = pair.draft.rollout(pair.text, ALL, 4)
    assert found is not None
    chain, scores = found
    logits: Logits | None = other.read()
    for i, token in enumerate(chain.tokens.tolist()):
        assert logits is not None
        np.testing.assert_array_equal(scores.logits(i), logits)
        assert token == int(logits.argmax())
        logits = other.draft.step(token)
    assert len(chain) == 4
    assert pair.draft.rollout(TEXT[:1], ALL, 4) is None
    pair.close()
    other.close()


@pytest.mark.parametrize("nodes", [3, 9], ids=["chain", "tree"])
def test_greedy_answers_are_those_of_plain_decoding(made: Head, nodes: int) -> None:
    target = load(TARGET, LoadOptions(context_size=CONTEXT, threads=1, exact=True))
    head = open_head(target, made.path, made.spec)
    session, plain = target.open_session(), target.open_session()
    draft: PairSession = head.open_session(session, lambda: None)
    drafter = SequentialDrafter("eagle3", draft)
    for prompt in (
        TEXT[:30],
        [*TEXT[:20], *TEXT[50:60]],
        target.tokenizer.encode("def add(a, b):", parse_special=False),
    ):
        controller = FixedLength([drafter], Budget(3, nodes), 4096)
        tokens, n_tested = generate(session, controller, prompt)
        expected, _ = generate(plain, FixedLength([], Budget(0, 0), 4096), prompt)
        assert tokens == expected
        assert n_tested >= 20
    draft.close()
    session.close()
    plain.close()
    head.close()
    target.close()


def test_a_head_for_another_model_is_refused(target: LlamaModel, made: Head) -> None:
    small = load(DRAFT, LoadOptions(context_size=CONTEXT, threads=1))
    with pytest.raises(Unsupported, match="is a head for a hidden size of 256"):
        open_head(small, made.path, made.spec)
    small.close()
    spec = made.spec
    for other in (replace(spec, layers=(1, 2)), replace(spec, norm_before_fc="each"), replace(spec, feeds_normed=True)):
        with pytest.raises(Unsupported, match="runs EAGLE-3 heads over 3 layers"):
            open_head(target, made.path, other)
    with pytest.raises(InvalidModelFile):
        open_head(target, TARGET, made.spec)


@pytest.mark.parametrize("max_id", [4096, -1])
def test_ids_beyond_the_vocabulary_are_refused(target: LlamaModel, max_id: int, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head.gguf", max_id=max_id)
    with pytest.raises(InvalidModelFile, match="d2t names tokens that the model does not have"):
        open_head(target, head.path, head.spec)


def test_a_head_cut_short_is_refused(target: LlamaModel, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head.gguf")
    data = head.path.read_bytes()
    for size in (100, read_file(head.path).data_offset + 1000, len(data) - 5000):
        head.path.write_bytes(data[:size])
        with pytest.raises(InvalidModelFile):
            open_head(target, head.path, head.spec)
