"""Sessions of heads on MLX that read pairs: in step with their target after rounds, reuse, windows and cancels."""

from __future__ import annotations

import pytest

from edgespec.backends.mlx import head_session
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import BackendError
from tests.backends.mlx_pairs import (
    WHOLE,
    Pair,
    cancel_a_read,
    check_fresh,
    check_rollout,
    check_rounds,
    check_window,
    follow_another_text,
    make_tokens,
    read_spec,
)
from tests.backends.pair_heads import QWEN, Look, make_pair_folder
from tests.mlx_models import load_target
from tests.models import REPOSITORY

LOOKS = {"eagle": Look(n_layers=2), "mtp": QWEN}


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module", params=["eagle3", *LOOKS])
def head(target: MlxModel, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MlxHead:
    folder = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
    if look := LOOKS.get(request.param):
        folder = tmp_path_factory.mktemp("head") / request.param
        make_pair_folder(folder, request.param, size=256, vocab_size=4096, look=look)
    spec = read_spec(folder)
    assert spec.kind == request.param
    return target.load_head(spec, folder)


def test_after_rounds_it_drafts_as_a_fresh_session(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(30))
    check_rounds(pair, (0, 1, 2, 3, 3, 0), lambda: pair.propose(3), behind=1)


def test_rollouts(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(30))
    for accepted in (3, 1):
        pair.verify(check_rollout(pair, 4, length=4), range(accepted), 8)
        check_fresh(pair)


@pytest.mark.parametrize("shared", [0, 1, 12, 29])
def test_a_new_text_keeps_the_prefix_that_it_shares(target: MlxModel, head: MlxHead, shared: int) -> None:
    pair = follow_another_text(target, head, shared)
    assert pair.draft.pending_tokens(pair.text) == len(pair.text) - 1 - max(0, shared - 1)
    check_fresh(pair)


def test_a_window_reads_the_end_alone(target: MlxModel, head: MlxHead) -> None:
    check_window(target, head)


def test_ends_of_texts_and_contexts(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, [5, 6])
    assert pair.draft.read([5], WHOLE) is None
    assert pair.draft.rollout([5], WHOLE, 3) is None
    check_fresh(pair)
    pair.restart(make_tokens(254))
    assert pair.draft.rollout(pair.text, WHOLE, 8) is not None
    pair.read()
    assert [pair.draft.step(7) is None for _ in range(3)] == [False, False, True]
    with pytest.raises(BackendError, match="no hidden states"):
        pair.draft.read([*pair.text, 4], WHOLE)


def test_a_cancelled_read_is_done_again(target: MlxModel, head: MlxHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_session, "_CHUNK", 8)
    check_fresh(cancel_a_read(target, head, behind=1))
