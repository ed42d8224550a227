"""EAGLE-3 heads on llama.cpp: random weights against numpy, and a state that is always that of a fresh session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.heads import LlamaHead, open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import Logits
from edgespec.errors import BackendError, InvalidModelFile
from edgespec.formats.gguf_validate import read_file
from tests.backends.eagle3_heads import HIDDEN, Head, NumpyHead, make_head
from tests.backends.head_sessions import WHOLE, check_fresh
from tests.backends.llamacpp_pairs import (
    CONTEXT,
    TEXT,
    Pair,
    check_answers,
    check_steps,
    is_close,
)
from tests.contract.runtimes import prefill
from tests.models import DRAFT, TARGET

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
def head(target: LlamaModel, made: Head) -> Iterator[LlamaHead]:
    found = open_head(target, made.path, made.spec)
    yield found
    found.close()


def test_the_forward_pass_is_that_of_numpy(target: LlamaModel, head: LlamaHead, made: Head) -> None:
    other = target.open_session()
    features = other.tap(made.spec.layers or ())
    text = TEXT[:140]  # three decodes of the head
    prefill(other, text[:-1])
    rows, reference = features.take(0, 139), NumpyHead(made)
    pair = Pair(target, head, text)
    logits = check_steps(pair, lambda drafted: reference.logits(rows, text[1:], drafted))
    shifted = reference.logits(rows, [*text[2:], 9], [])
    assert not is_close(logits, shifted)
    other.close()
    pair.close()


def test_where_the_target_goes_back_without_a_prefill_it_starts_anew(target: LlamaModel, head: LlamaHead) -> None:
    """It has released the states before."""
    pair = Pair(target, head, TEXT[:50])
    pair.read()
    with pytest.raises(BackendError, match="no hidden states"):
        pair.draft.read([*TEXT[:50], 5], WHOLE)
    pair.session.rewind(20)
    pair.text = [*TEXT[:20], 78]
    pair.draft.begin(pair.text)
    assert pair.draft.read(pair.text, WHOLE) is None
    for n_accepted in (0, 2):
        pair.verify_chain([5, 6], n_accepted, 9)
        assert np.isfinite(pair.read()).any()
    pair.restart([*TEXT[:20], 78])  # reads them again
    pair.restart(TEXT[60:80])
    check_fresh(pair)
    pair.close()


def test_a_window_reads_the_end_of_the_text_alone(target: LlamaModel, head: LlamaHead, made: Head) -> None:
    pair, other = Pair(target, head, TEXT[:200]), target.open_session()
    features = other.tap(made.spec.layers or ())
    prefill(other, TEXT[:199])
    logits = pair.draft.read(pair.text, 90)
    assert logits is not None
    expected = NumpyHead(made).logits(features.take(109, 199), TEXT[110:200], [])  # positions are relative
    assert is_close(logits, expected)
    pair.verify_chain([5, 6], 1, 7)
    assert pair.draft.pending_tokens(pair.text) == 2
    assert pair.draft.read(pair.text, 90) is not None
    other.close()
    pair.close()


def test_the_end_of_the_context(target: LlamaModel, head: LlamaHead) -> None:
    text = (TEXT * 2)[:CONTEXT]
    pair = Pair(target, head, text)
    assert pair.draft.read(text, WHOLE) is not None  # half of the context
    one = Pair(target, head, TEXT[:2])
    assert one.draft.read(TEXT[:1], WHOLE) is None
    one.read()
    steps = 0
    while one.draft.step(5) is not None:
        steps += 1
    assert steps == CONTEXT - 1
    one.close()
    pair.close()


def test_a_rollout_is_the_greedy_chain(target: LlamaModel, head: LlamaHead) -> None:
    pair, other = Pair(target, head, TEXT[:40]), Pair(target, head, TEXT[:40])
    chain, scores = pair.rollout(4)
    logits: Logits | None = other.read()
    for i, token in enumerate(chain.tokens.tolist()):
        assert logits is not None
        np.testing.assert_array_equal(scores.logits(i), logits)
        assert token == int(logits.argmax())
        logits = other.draft.step(token)
    assert len(chain) == 4
    assert pair.draft.rollout(TEXT[:1], WHOLE, 4) is None
    pair.close()
    other.close()


@pytest.mark.parametrize("nodes", [3, 9], ids=["chain", "tree"])
def test_greedy_answers_are_those_of_plain_decoding(made: Head, nodes: int) -> None:
    target = load(TARGET, LoadOptions(context_size=CONTEXT, threads=1, exact=True))
    head = open_head(target, made.path, made.spec)
    code = target.tokenizer.encode("def add(a, b):", parse_special=False)
    check_answers(target, head, "eagle3", (TEXT[:30], [*TEXT[:20], *TEXT[50:60]], code), nodes)
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
