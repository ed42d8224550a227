"""MTP layers on llama.cpp: random weights against numpy, and a state that is always that of a fresh session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.heads import open_head
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.core.protocols import Draft
from edgespec.core.sampling import Logits
from tests.backends.head_sessions import WHOLE
from tests.backends.llamacpp_pairs import (
    MTP_OPTIONS,
    TEXT,
    MtpSubject,
    Pair,
    check_answers,
    check_steps,
    is_close,
    open_mtp_subject,
)
from tests.backends.mtp_heads import (
    LAYERS,
    WIDTH,
    NumpyLayer,
    make_mixture,
    spec_of,
)
from tests.contract.runtimes import prefill


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mtp") / "model.gguf")


def states_of(target: LlamaModel, text: list[int]) -> np.ndarray:
    """[n, H] the last hidden states of a fresh session that reads `text`."""
    session = target.open_session()
    features = session.tap(())
    prefill(session, text)
    rows = features.take(0, len(text)).copy()
    session.close()
    return rows


@pytest.mark.parametrize("kind", ["mixture", "alone", "dense"])
def test_the_forward_pass_is_that_of_numpy(kind: str, tmp_path: Path) -> None:
    subject = open_mtp_subject(kind, tmp_path)
    text = TEXT[:140]  # four decodes of the head
    rows, reference = states_of(subject.target, text[:-1]), NumpyLayer(subject.file)
    pair = Pair(subject.target, subject.head, text)
    logits = check_steps(pair, lambda drafted: reference.logits(rows, text[1:], drafted))
    for other in (
        reference.logits(rows, [*text[2:], 9], []),
        reference.logits(np.roll(rows, 1, axis=0), text[1:], []),
        reference.logits(rows[-1:], text[-1:], []),
    ):
        assert not is_close(logits, other)
    pair.close()
    subject.head.close()
    subject.target.close()


def test_each_layer_of_a_chain_drafts_one_token(tmp_path: Path) -> None:
    subject = open_mtp_subject("chain", tmp_path)
    layers = [NumpyLayer(subject.file, number) for number in range(3)]
    text = TEXT[:90]
    h, tokens = states_of(subject.target, text[:-1]).astype(np.float64), text[1:]
    pair = Pair(subject.target, subject.head, text)
    logits: Logits | None = pair.read()
    for layer, drafted in zip(layers, (40, 41, 42), strict=True):
        assert logits is not None
        states = layer.run(h, tokens)
        assert is_close(logits, layer.output(states[-1]))
        h, tokens = np.concatenate([h, states[-1:]]), [*tokens, drafted]
        logits = pair.draft.step(drafted)
    assert logits is None and list(pair.draft.text) == [*text, 40, 41]
    chain = pair.draft.rollout(text, WHOLE, 5)
    assert chain is not None and len(chain[0]) == 3
    pair.close()
    subject.head.close()
    subject.target.close()


def test_the_last_hidden_state_gives_the_targets_logits(mixture: Path) -> None:
    target = load(mixture, MTP_OPTIONS)
    session = target.open_session()
    features = session.tap((LAYERS,))
    logits = prefill(session, TEXT[:50])
    rows = features.take(0, 50)
    assert rows.shape == (50, WIDTH)
    assert is_close(logits, NumpyLayer(mixture).output(rows[-1]))
    assert not is_close(logits, NumpyLayer(mixture).output(rows[-2]))
    np.testing.assert_allclose(rows, states_of(target, TEXT[:50]), atol=0.02)
    session.close()
    target.close()


def test_the_last_hidden_states_are_those_of_the_text(mixture: Path) -> None:
    """After chains and trees, going back, and beside another session of the same context."""
    target = load(mixture, replace(MTP_OPTIONS, caches=2))
    session, beside = target.open_session(shared=True), target.open_session(shared=True)
    features, text = session.tap(()), TEXT[:30]
    prefill(beside, TEXT[60:90])
    prefill(session, text)
    tree = Draft(np.array([7, 8, 9, 10, 11], np.int32), np.array([-1, -1, 1, 0, 2], np.int32))
    for draft, path in ((tree, (1, 2, 4)), (Draft.chain([1, 2, 3]), (0, 1)), (tree, (0,)), (tree, ())):
        beside.forward(6, Draft.chain([4, 5]))
        session.forward(5, draft)
        for each, kept in ((beside, ()), (session, path)):
            each.commit(kept)
        text = [*text, 5, *draft.tokens[list(path)].tolist()]
        np.testing.assert_allclose(features.take(0, len(text)), states_of(target, text), atol=0.05)
    session.rewind(33)
    prefill(session, text := [*text[:25], *TEXT[90:110]])
    assert not session.adopt(beside, 10), "hidden states are not copied"
    prefill(session, text)
    np.testing.assert_allclose(features.take(0, len(text)), states_of(target, text), atol=0.05)
    session.close()
    beside.close()
    target.close()


def test_a_window_reads_the_end_of_the_text_alone(mixture: Path) -> None:
    target = load(mixture, MTP_OPTIONS)
    head = open_head(target, mixture, spec_of(mixture))
    pair = Pair(target, head, TEXT[:200])
    logits = pair.draft.read(pair.text, 90)
    assert logits is not None
    expected = NumpyLayer(mixture).logits(states_of(target, TEXT[:199])[109:], TEXT[110:200], [])
    assert is_close(logits, expected)
    pair.close()
    head.close()
    target.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nodes", [3, 9], ids=["chain", "tree"])
def test_answers_are_those_of_plain_decoding(nodes: int, temperature: float, tmp_path: Path) -> None:
    """With kernels whose results do not depend on the number of rows."""
    file = make_mixture(tmp_path / "model.gguf", is_quantized=True)
    target = load(file, replace(MTP_OPTIONS, exact=True))
    assert target.is_row_invariant, "the router of the MTP layer, in F32, only drafts"
    compare_answers(MtpSubject(target, open_head(target, file, spec_of(file)), file), nodes, temperature)


@pytest.mark.parametrize("kind", ["hybrid", "chain"])
def test_greedy_answers_are_those_of_plain_decoding(kind: str, tmp_path: Path) -> None:
    compare_answers(open_mtp_subject(kind, tmp_path), 3, 0.0)


def compare_answers(subject: MtpSubject, nodes: int, temperature: float) -> None:
    """Closes the subject."""
    prompts = (TEXT[:30], [*TEXT[:20], *TEXT[50:60]], TEXT[200:210])
    check_answers(subject.target, subject.head, "mtp", prompts, nodes, temperature)
    subject.head.close()
    subject.target.close()


def test_a_closed_layer_ends_the_tap_and_leaves_the_target(mixture: Path) -> None:
    target = load(mixture, MTP_OPTIONS)
    head = open_head(target, mixture, spec_of(mixture))
    assert head.extra_bytes == 0
    pair = Pair(target, head, TEXT[:30])
    pair.read()
    pair.draft.close()
    head.close()
    pair.verify_chain([5, 6], 1, 7)
    pair.session.rewind(0)
    expected = prefill(target.open_session(), TEXT[:30])
    assert is_close(prefill(pair.session, TEXT[:30]), expected)
    pair.session.close()
    target.close()
