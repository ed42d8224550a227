"""Hidden states of other architectures on llama.cpp: recurrent ones, the last state, and those that give none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.library import find_function
from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import NO_DRAFT, Draft
from tests.backends.test_llamacpp_taps import TEXT, is_close
from tests.contract.runtimes import prefill
from tests.models import MAKERS


@pytest.mark.parametrize("snapshots", [8, 0])
def test_recurrent_models_replay_their_states(snapshots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether llama.cpp keeps a ring of recurrent states, or the session saves them and runs accepted tokens again."""
    monkeypatch.setattr("edgespec.backends.llamacpp.weights._STATE_SNAPSHOTS", snapshots)
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


def test_the_number_of_layers_stands_for_the_last_hidden_state(tmp_path: Path) -> None:
    """The output of the final norm, beside inputs of layers or alone."""
    MAKERS["hybrid"](tmp_path / "model.gguf")
    model = load(tmp_path / "model.gguf", LoadOptions(context_size=256, threads=1))
    found = []
    for layers in ((1, 4), (1,), (4,), ()):
        session = model.open_session()
        features = session.tap(layers)
        prefill(session, TEXT[:20])
        found.append(features.take(0, 20))
        session.close()
    both, first, last, alone = found
    np.testing.assert_array_equal(both, np.concatenate([first, last], axis=1))
    np.testing.assert_array_equal(last, alone)
    np.testing.assert_allclose((last * last).mean(axis=1), 1, rtol=0.01)  # the norm's weights are ones
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
    from edgespec.backends.llamacpp import library

    monkeypatch.setitem(library._FUNCTIONS, "llama_of_tomorrow", ([], None, "_Z17llama_of_tomorrowv", "?x"))
    with pytest.raises(Unsupported, match="has no llama_of_tomorrow"):
        find_function("llama_of_tomorrow")
