"""Hidden states that llama.cpp sessions keep for a trained head: always those of the text that the cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.features import Features
from edgespec.backends.llamacpp import abi as functions
from edgespec.backends.llamacpp.abi import find_function
from edgespec.backends.llamacpp.hidden_states import Floats
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.cancel import cancellable
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.core.tree import path_to
from edgespec.errors import Cancelled
from tests.contract.runtimes import prefill
from tests.contract.test_session import random_draft
from tests.gguf_models import MAKERS, TARGET

SLOTS = 3
LAYERS = (3, 1, 5)
TOLERANCE = 0.03  # of a row's norm, for forwards of different widths; the rows of two neighbours differ by 0.5 or more
RNG = np.random.default_rng(5)
TEXT: list[int] = RNG.integers(1, 4000, 700).tolist()


@pytest.fixture(scope="module")
def target() -> Iterator[LlamaModel]:
    model = load(TARGET, LoadOptions(context_size=1024, threads=1, caches=SLOTS))
    model.lends_cells = True  # so that all are over the same ones
    yield model
    model.close()


@pytest.fixture(scope="module")
def streams() -> Iterator[LlamaModel]:
    """The same; each slot has cells of its own."""
    model = load(TARGET, LoadOptions(context_size=1024, threads=1, caches=SLOTS))
    assert model.has_streams
    yield model
    model.close()


def tapped(target: LlamaModel, *, shared: bool = False) -> tuple[LlamaSession, Features[Floats]]:
    session = target.open_session(shared=shared)
    return session, session.tap(LAYERS)


def states_of(target: LlamaModel, text: list[int]) -> Floats:
    """[n, width] what a fresh session has after reading `text`."""
    session, features = tapped(target)
    prefill(session, text)
    rows = features.take(0, len(text))
    session.close()
    return rows


def is_close(rows: Floats, expected: Floats) -> bool:
    errors = np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return bool(errors.max() < TOLERANCE)


def is_in_step(target: LlamaModel, session: LlamaSession, features: Features[Floats], text: list[int]) -> bool:
    assert list(session.tokens) == text
    assert (features.start, features.end) == (0, len(text))
    return is_close(features.take(0, len(text)), states_of(target, text))


def test_the_input_of_the_first_layer_is_the_embedding(target: LlamaModel) -> None:
    session = target.open_session()
    features = session.tap((0, 4))
    prefill(session, TEXT[:20])
    (tensor,) = (each for each in gguf.GGUFReader(TARGET).tensors if each.name == "token_embd.weight")
    embeddings = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    rows = features.take(0, 20)
    width = rows.shape[1] // 2
    assert width == embeddings.shape[1] == 256
    np.testing.assert_allclose(rows[:, :width], embeddings[TEXT[:20]], atol=1e-6)
    assert np.abs(rows[:, width:] - embeddings[TEXT[:20]]).mean() > 0.1
    session.close()


def test_chains_and_trees_leave_the_accepted_path(target: LlamaModel) -> None:
    session, features = tapped(target)
    text = TEXT[:30]
    prefill(session, text)
    tree = Draft(np.array([7, 8, 9, 10, 11], np.int32), np.array([-1, -1, 1, 0, 2], np.int32))
    for root, draft, path in [
        (5, NO_DRAFT, ()),
        (6, Draft.chain([1, 2, 3]), ()),
        (7, Draft.chain([1, 2, 3]), (0, 1)),
        (8, Draft.chain([1, 2, 3]), (0, 1, 2)),
        (9, tree, (1, 2, 4)),
        (10, tree, (0,)),
        (11, tree, ()),
    ]:
        session.forward(root, draft)
        assert features.end == len(text)
        session.commit(path)
        text = [*text, root, *draft.tokens[list(path)].tolist()]
        assert is_in_step(target, session, features, text)
    session.close()


def test_rewinding_and_reused_prefixes_keep_what_is_still_true(target: LlamaModel) -> None:
    session, features = tapped(target)
    prefill(session, TEXT[:50])
    session.forward(5, Draft.chain([1, 2, 3]))
    session.rewind(50)  # drops the forward
    assert is_in_step(target, session, features, TEXT[:50])
    session.rewind(33)
    assert is_in_step(target, session, features, TEXT[:33])
    other = [*TEXT[:21], *TEXT[100:140]]
    prefill(session, other)
    assert is_in_step(target, session, features, other)
    session.close()


def test_a_prompt_that_is_asked_again_keeps_its_scores_and_the_state_that_a_head_needs(target: LlamaModel) -> None:
    """Another number of rows would round them otherwise, and a greedy answer might change between two requests."""
    session, features = tapped(target)
    first = prefill(session, TEXT[:50]).copy()
    session.checkpoint()
    for token in TEXT[300:380]:
        session.forward(token, NO_DRAFT)
        session.commit(())
    features.release(129)
    np.testing.assert_array_equal(prefill(session, TEXT[:50]), first)
    assert (features.start, features.end) == (49, 50)
    assert is_close(features.take(49, 50), states_of(target, TEXT[:50])[49:])
    features.release(50)
    again = prefill(session, TEXT[:50])  # the state is gone, so the last tokens are computed again
    assert features.start < features.end == 50 and np.abs(again - first).max() < 0.5
    session.close()


def test_released_states_before_a_reused_prefix_do_not_come_back_but_for_the_last(target: LlamaModel) -> None:
    session, features = tapped(target)
    prefill(session, TEXT[:50])
    features.release(49)
    prefill(session, [*TEXT[:20], *TEXT[60:70]])
    assert (features.start, features.end) == (19, 30)
    expected = states_of(target, [*TEXT[:20], *TEXT[60:70]])
    assert is_close(features.take(19, 30), expected[19:])
    prefill(session, TEXT[60:70])
    assert is_in_step(target, session, features, TEXT[60:70])
    session.close()


def test_a_checkpoint_has_the_state_before_it_as_long_as_the_text_is_the_same(target: LlamaModel) -> None:
    session, features = tapped(target)
    prefill(session, TEXT[:30])
    session.checkpoint()
    expected = features.take(29, 30).copy()
    prefill(session, TEXT[:50])
    features.release(49)
    session.rewind(30)
    np.testing.assert_array_equal(features.take(29, 30), expected)
    session.rewind(20)
    prefill(session, [*TEXT[:20], *TEXT[60:90]])
    features.release(49)
    session.rewind(30)
    assert (features.start, features.end) == (30, 30)
    session.close()


def test_a_cancelled_forward_leaves_the_states_of_the_text(target: LlamaModel) -> None:
    def check() -> None:
        raise Cancelled

    session = target.open_session()
    features = session.tap(LAYERS)
    prefill(session, TEXT[:25])
    with pytest.raises(Cancelled), cancellable(check):
        session.forward(5, Draft.chain([1, 2]))
    with pytest.raises(Cancelled), cancellable(check):
        prefill(session, [*TEXT[:10], *TEXT[300:400]])
    assert is_in_step(target, session, features, TEXT[:10])
    session.forward(5, NO_DRAFT)
    session.commit(())
    assert is_in_step(target, session, features, [*TEXT[:10], 5])
    session.close()


def test_a_tapped_session_computes_what_others_would_adopt(target: LlamaModel) -> None:
    source = target.open_session(shared=True)
    prefill(source, TEXT[:20])
    session, features = tapped(target, shared=True)
    assert not session.adopt(source, 20)
    assert session.position == features.end == 0
    prefill(session, TEXT[:30])
    assert source.adopt(session, 25)
    assert is_in_step(target, session, features, TEXT[:30])
    source.close()
    session.close()


@pytest.mark.parametrize("kind", ["target", "streams"])
def test_sessions_of_one_batch_have_their_own_states(kind: str, request: pytest.FixtureRequest) -> None:
    """One of them has no tap, one taps other layers."""
    target: LlamaModel = request.getfixturevalue(kind)
    (one, features), plain = tapped(target, shared=True), target.open_session(shared=True)
    other = target.open_session(shared=True)
    theirs = other.tap((2, 3))
    texts = {one: TEXT[:20], plain: TEXT[40:75], other: TEXT[80:107]}
    for session, text in texts.items():
        prefill(session, text)
    rng = np.random.default_rng(2)
    for _ in range(6):
        drafts = {session: random_draft(rng, session, int(rng.integers(0, 6))) for session in texts}
        for session in rng.permutation(np.array(list(texts), object)):
            session.forward(9, drafts[session])
        for session, draft in drafts.items():
            path = path_to(draft, int(rng.integers(-1, len(draft))))
            session.commit(path)
            texts[session] = [*texts[session], 9, *draft.tokens[list(path)].tolist()]
    assert is_in_step(target, one, features, texts[one])
    alone = target.open_session()
    expected = alone.tap((2, 3))
    prefill(alone, texts[other])
    n = len(texts[other])
    assert is_close(theirs.take(0, n), expected.take(0, n))
    for session in (one, plain, other, alone):
        session.close()


@pytest.mark.parametrize("layers", [(2, 6), (-1,), ()])
def test_layers_that_llama_cpp_would_abort_on_are_refused(target: LlamaModel, layers: tuple[int, ...]) -> None:
    session = target.open_session()
    with pytest.raises(Unsupported):
        session.tap(layers)
    prefill(session, TEXT[:5])
    with pytest.raises(ValueError, match="before it holds tokens"):
        session.tap((1,))
    session.close()


@pytest.mark.parametrize("snapshots", [8, 0])
def test_recurrent_models_replay_their_states(snapshots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether llama.cpp keeps a ring of recurrent states, or the session saves them and runs accepted tokens again."""
    monkeypatch.setattr("edgespec.backends.llamacpp.model.STATE_SNAPSHOTS", snapshots)
    MAKERS["hybrid"](tmp_path / "model.gguf")
    model = load(tmp_path / "model.gguf", LoadOptions(context_size=256, threads=1))
    session, fresh = model.open_session(), model.open_session()
    features, expected = session.tap((1, 3)), fresh.tap((1, 3))
    text = TEXT[:40]
    prefill(session, text)
    session.checkpoint()
    for path in ((), (0,), (0, 1, 2)):
        session.forward(9, Draft.chain([1, 2, 3]))
        session.commit(path)
        text = [*text, 9, *range(1, 1 + len(path))]
    prefill(fresh, text)
    assert (features.start, features.end) == (0, len(text))
    assert is_close(features.take(0, len(text)), expected.take(0, len(text)))
    left = session.rewind(len(text) - 7)
    assert features.end == left == session.position
    text = [*text[:left], 5, 6]
    for root in (5, 6):
        session.forward(root, NO_DRAFT)
        session.commit(())
    prefill(fresh, text)
    assert is_close(features.take(0, len(text)), expected.take(0, len(text)))
    prefill(session, TEXT[:40])
    session.checkpoint()
    session.forward(9, NO_DRAFT)
    session.commit(())
    features.release(41)
    text = [*TEXT[:40], *TEXT[60:70]]
    assert next(session.prefill(text)).reused == 40  # with the hidden state before, which was released
    prefill(fresh, text)
    assert (features.start, features.end) == (39, 50)
    assert is_close(features.take(39, 50), expected.take(39, 50))
    session.close()
    fresh.close()
    model.close()


@pytest.mark.parametrize("kind", ["mamba", "sliding-window"])
def test_architectures_without_named_layers_are_refused(kind: str, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path / "model.gguf")
    model = load(tmp_path / "model.gguf", LoadOptions(context_size=256, threads=1))
    session = model.open_session()
    with pytest.raises(Unsupported, match="does not give the hidden states of"):
        session.tap((0, 1))
    session.close()
    model.close()


def test_a_library_without_a_function_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functions._FUNCTIONS, "llama_of_tomorrow", ("", False))
    with pytest.raises(Unsupported, match="has no llama_of_tomorrow"):
        find_function("llama_of_tomorrow")
