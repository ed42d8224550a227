"""Sessions of heads on MLX that read pairs: in step with their target after rounds, reuse, windows and cancels."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.backends.mlx import pair_session
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel, load
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Draft
from edgespec.errors import BackendError, Cancelled
from tests.backends.mlx_pairs import WHOLE, Pair, check_fresh, is_close, make_tokens, read_spec
from tests.backends.pair_heads import QWEN, Look, make_pair_folder
from tests.models import REPOSITORY, TARGET

LOOKS = {"eagle": Look(n_layers=2), "mtp": QWEN}


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load(TARGET, LoadOptions(context_size=256))


@pytest.fixture(scope="module", params=["eagle3", *LOOKS])
def head(target: MlxModel, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MlxHead:
    folder = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
    if look := LOOKS.get(request.param):
        folder = tmp_path_factory.mktemp("head") / request.param
        make_pair_folder(folder, request.param, size=256, vocab_size=4096, look=look)
    spec = read_spec(folder)
    assert spec.kind == request.param
    return target.attach_head(spec, folder)


def test_after_rounds_it_drafts_as_a_fresh_session(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(30))
    for accepted in (0, 1, 2, 3, 3, 0):
        drafted = [int(pair.read().argmax())]
        while len(drafted) < 3:
            logits = pair.draft.step(drafted[-1])
            assert logits is not None
            drafted.append(int(logits.argmax()))
        pair.verify(Draft.chain(drafted), range(accepted), 11 + accepted)
        assert pair.draft.unread(pair.text) == accepted + 1
        check_fresh(target, head, pair)
    tree = Draft(np.array([5, 9, 7, 3], np.int32), np.array([-1, -1, 0, 1], np.int32))
    for path in ((1, 3), (0,), ()):  # rounds of another drafter, read together
        pair.verify(tree, path, 20)
    assert pair.draft.unread(pair.text) == 6
    check_fresh(target, head, pair)
    assert pair.draft.unread(pair.text) == 1, "the last pair runs again"
    check_fresh(target, head, pair)  # the same text again


def test_rollouts(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(30))
    for accepted in (3, 1):
        steps = [pair.read()]
        while len(steps) < 4:
            logits = pair.draft.step(int(steps[-1].argmax()))
            assert logits is not None
            steps.append(logits)
        found = pair.draft.rollout(pair.text, WHOLE, 4)
        assert found is not None
        chain, scores = found
        assert chain.tokens.tolist() == [int(row.argmax()) for row in steps]
        assert all(is_close(scores.logits(i), row) for i, row in enumerate(steps))
        pair.verify(chain, range(accepted), 8)
        check_fresh(target, head, pair)


@pytest.mark.parametrize("shared", [0, 1, 12, 29])
def test_a_new_text_keeps_the_prefix_that_it_shares(target: MlxModel, head: MlxHead, shared: int) -> None:
    text = make_tokens(30)
    pair = Pair(target, head, text)
    pair.read()
    pair.draft.step(5)
    pair.restart([*text[:shared], *make_tokens(25, seed=shared + 1)])
    assert pair.draft.unread(pair.text) == len(pair.text) - 1 - max(0, shared - 1)
    check_fresh(target, head, pair)


def test_a_window_reads_the_end_alone(target: MlxModel, head: MlxHead) -> None:
    text = make_tokens(60)
    pair = Pair(target, head, text)
    whole, short = pair.read(), Pair(target, head, text)
    assert not is_close(short.read(window=10), whole)
    assert short.draft.unread(text) == 1
    assert is_close(short.read(), Pair(target, head, text).read(window=10))
    short.restart([*text[:20], *make_tokens(9, seed=5)])  # behind what was read: only what the target ran anew is read
    assert np.isfinite(short.read()).any()
    pair.verify(Draft.chain([4]), (0,), 9)
    check_fresh(target, head, pair)


def test_ends_of_texts_and_contexts(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, [5, 6])
    assert pair.draft.read([5], WHOLE) is None
    assert pair.draft.rollout([5], WHOLE, 3) is None
    check_fresh(target, head, pair)
    pair.restart(make_tokens(254))
    assert pair.draft.rollout(pair.text, WHOLE, 8) is not None
    pair.read()
    assert [pair.draft.step(7) is None for _ in range(3)] == [False, False, True]
    with pytest.raises(BackendError, match="no hidden states"):
        pair.draft.read([*pair.text, 4], WHOLE)


def test_a_cancelled_read_is_done_again(target: MlxModel, head: MlxHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_session, "_CHUNK", 8)
    left = [3]

    def check() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Cancelled

    pair = Pair(target, head, make_tokens(40))
    pair.draft._check = check
    with pytest.raises(Cancelled):
        pair.read()
    assert 0 < pair.draft.unread(pair.text) < 39
    check_fresh(target, head, pair)
