"""Hidden states on MLX: those of a tapped session are the model's own, whatever the session went through."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from edgespec.backends.attached_draft import Unsupported, parse
from edgespec.backends.mlx import session as session_module
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.session import MlxSession
from edgespec.cancel import cancellable
from edgespec.core.protocols import NO_DRAFT, Draft
from edgespec.errors import Cancelled
from tests.backends.test_mlx_selfdraft import make_tokens, wrap
from tests.contract.runtimes import prefill
from tests.mlx_models import CONFIGS, DENSE, make_model

LAYERS = (1, 3, 4)
FOUR = {**DENSE, "num_hidden_layers": 4, "vocab_size": 512}
# A tree in one batch row, with a batch row for each node or for each branch; and caches that cannot be trimmed.
KINDS = {
    "dense": FOUR,
    "sliding-window": {**CONFIGS["sliding-window"], "vocab_size": 512},
    "hybrid": {**CONFIGS["hybrid"], "vocab_size": 512},
    "recurrent": {**CONFIGS["recurrent"], "num_hidden_layers": 4, "vocab_size": 512},
}
TREE = Draft(np.array([5, 9, 7, 3, 4], np.int32), np.array([-1, -1, 0, 1, 3], np.int32))


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> MlxModel:
    return wrap(make_model(KINDS[request.param]), 512)


@pytest.fixture(scope="module")
def dense() -> MlxModel:
    return wrap(make_model(FOUR), 512)


def features_of(model: MlxModel, tokens: list[int], layers: tuple[int, ...] = LAYERS) -> Any:
    """[n, width] those of a fresh session that was prefilled with the text."""
    session = model.open_session()
    kept = session.tap(layers)
    prefill(session, tokens)
    return np.array(kept.take(0, len(tokens)))


def check_features(model: MlxModel, session: MlxSession, kept: Any, tokens: list[int]) -> None:
    """What is kept belongs to `tokens`, and differs from what another text would leave."""
    assert session.position == len(session.tokens) == kept.end == len(tokens)
    found, expected = np.array(kept.take(0, len(tokens))), features_of(model, tokens)
    spread = expected.std()
    assert np.abs(found - expected).max() < 2e-3 * spread
    assert np.abs(found[1:] - expected[:-1]).max() > 0.5 * spread, "one token is like the next: nothing is tested"


def test_states_are_those_of_a_plain_walk_through_the_layers() -> None:
    network = make_model(FOUR)
    tokens = make_tokens(20)
    inner, walked = network.model, []
    h = inner.embed_tokens(mx.array([tokens]))
    for layer in inner.layers:
        walked.append(h)
        h = layer(h, "causal")
    walked += [h, inner.norm(h)]
    expected = [np.array(each[0]) for each in walked]
    tapped = wrap(network, 512)
    for layers in ((0,), (1, 2, 3), (3, 1), (4, 0)):
        assert (
            np.abs(features_of(tapped, tokens, layers) - np.concatenate([expected[i] for i in layers], 1)).max() < 1e-5
        )
    assert np.abs(features_of(tapped, tokens, ()) - expected[-1]).max() < 1e-5


def test_they_follow_the_text(model: MlxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in chunks, chains and trees accepted in part, rewinds, a reused prefix."""
    monkeypatch.setattr(session_module, "PREFILL_CHUNK", 16)
    session, tokens = model.open_session(), make_tokens(40)
    kept = session.tap(LAYERS)
    prefill(session, tokens)
    session.checkpoint()
    chain = Draft.chain([1, 2, 3])
    for draft, path in [(chain, (0, 1, 2)), (chain, (0,)), (chain, ()), (TREE, (1, 3)), (TREE, (0,)), (NO_DRAFT, ())]:
        if not (draft.is_chain or session.capabilities.tree):
            continue
        session.forward(6, draft)
        session.commit(path)
        tokens += [6, *draft.tokens[list(path)].tolist()]
        check_features(model, session, kept, tokens)
    session.forward(6, chain)
    reached = session.rewind(44)  # also drops the forward
    tokens = tokens[:reached]
    if tokens:
        check_features(model, session, kept, tokens)
    tokens = [*make_tokens(40)[:30], *make_tokens(9, seed=3)]
    prefill(session, tokens)
    check_features(model, session, kept, tokens)


def test_forwards_that_ran_ahead(dense: MlxModel) -> None:
    session, tokens = dense.open_session(), make_tokens(12)
    kept = session.tap(LAYERS)
    prefill(session, tokens)

    def forward(root: int) -> int:
        """A plain forward; returns the best token after it, with which the next one has started."""
        best = int(session.forward(root, NO_DRAFT, run_ahead=True).argmax()[0])
        session.commit(())
        tokens.append(root)
        return best

    root = 7
    for _ in range(4):
        root = forward(root)
    check_features(dense, session, kept, tokens)
    assert session._ahead is not None
    forward(root + 1)  # not the token that it ran ahead with
    check_features(dense, session, kept, tokens)
    assert session._ahead is not None
    session.rewind(len(tokens))
    check_features(dense, session, kept, tokens)


def test_rollouts(dense: MlxModel) -> None:
    session, tokens = dense.open_session(), make_tokens(12)
    kept = session.tap(LAYERS)
    prefill(session, tokens)
    chain, _ = session.rollout([3, 8], 4, 512)
    assert kept.end == session.position == 17
    tokens += [3, 8, *chain.tokens[:3].tolist()]
    session.rewind(17)
    check_features(dense, session, kept, tokens)
    session.rewind(15)
    check_features(dense, session, kept, tokens[:15])


def test_a_cancelled_prefill(dense: MlxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PREFILL_CHUNK", 40)
    for polls in range(1, 12, 2):
        left = [polls]

        def check(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Cancelled

        session, tokens = dense.open_session(), make_tokens(100)
        kept = session.tap(LAYERS)
        with contextlib.suppress(Cancelled), cancellable(check):
            prefill(session, tokens)
            assert left[0] > 0
        prefill(session, tokens[:90])
        check_features(dense, session, kept, tokens[:90])


def test_a_self_draft_beside_a_tap(dense: MlxModel) -> None:
    """The target runs all layers of all rows, although the draft has run the first of them."""
    spec = parse("layerskip:2")
    assert spec is not None
    draft = dense.make_self_draft(spec)
    target, tokens = dense.open_session(), make_tokens(20)
    kept = target.tap(LAYERS)
    prefill(target, tokens)
    session = draft.open_session(target)
    chain, _ = session.rollout([7], 3, 512)
    target.forward(7, chain)
    target.commit((0, 1))
    check_features(dense, target, kept, [*tokens, 7, *chain.tokens[:2].tolist()])
    draft.close()


def test_bad_taps(dense: MlxModel) -> None:
    session = dense.open_session()
    with pytest.raises(Unsupported, match="reads layer 5, and the model has layers 0 to 3"):
        session.tap((1, 5))
    replaced, kept = session.tap((1,)), session.tap((2,))
    prefill(session, [1, 2, 3])
    assert (replaced.end, kept.end) == (0, 3)
    session.untap()
    prefill(session, [1, 2, 3, 4, 5])
    assert kept.end == 3
    used = dense.open_session()
    prefill(used, [1, 2])
    with pytest.raises(ValueError, match="before it holds tokens"):
        used.tap(())


def test_closing_the_model_frees_its_layers_at_once() -> None:
    model = wrap(make_model(FOUR), 512)
    session = model.open_session()
    session.tap(())
    session.close()
    del session
    layer = weakref.ref(model.network.layers[0])
    gc.disable()
    try:
        model.close()
        assert layer() is None
    finally:
        gc.enable()
