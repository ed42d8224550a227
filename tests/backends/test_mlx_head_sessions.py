"""Sessions of trained heads on MLX: in step with their target after rounds, reuse, windows and cancels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.mlx import head_session
from edgespec.backends.mlx.heads import MlxHead
from edgespec.backends.mlx.model import MlxModel
from edgespec.core.drafter import BlockSession
from edgespec.core.protocols import Draft
from edgespec.errors import BackendError
from tests.backends import mlx_dflash_heads
from tests.backends.medusa_heads import make_hydra, make_medusa
from tests.backends.mlx_pairs import (
    WHOLE,
    Pair,
    cancel_a_read,
    check_fresh,
    check_rollout,
    check_window,
    count_pending,
    follow_another_text,
    make_tokens,
    read_spec,
)
from tests.backends.pair_heads import QWEN, Look, make_pair_folder
from tests.mlx_models import load_target
from tests.models import REPOSITORY

SIZES = {"size": 256, "vocab_size": 4096}


def make_head(folder: Path, kind: str) -> Path:
    match kind:
        case "eagle3":
            return REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
        case "eagle" | "mtp":
            return make_pair_folder(folder, kind, look=QWEN if kind == "mtp" else Look(n_layers=2), **SIZES)
        case "dflash" | "dspark":
            return mlx_dflash_heads.make_folder(folder, kind, layers=(1, 3, 6), **SIZES)
        case "medusa":
            return make_medusa(folder, **SIZES)
    return make_hydra(folder, has_prefix=kind == "hydra++", **SIZES)


@pytest.fixture(scope="module")
def target() -> MlxModel:
    return load_target()


@pytest.fixture(scope="module", params=["eagle3", "eagle", "mtp", "dflash", "dspark", "medusa", "hydra", "hydra++"])
def head(target: MlxModel, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MlxHead:
    folder = make_head(tmp_path_factory.mktemp("head") / request.param, request.param)
    spec = read_spec(folder)
    assert spec.kind == request.param.removesuffix("++")
    return target.load_head(spec, folder)


def draft(pair: Pair, text: list[int]) -> object:
    """What the head says after a text; None where it says nothing."""
    return pair.draft.block(text, WHOLE, 3) if isinstance(pair.draft, BlockSession) else pair.draft.read(text, WHOLE)


def test_after_rounds_it_drafts_as_a_fresh_session(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(30))
    for n_accepted in (0, 1, 2, 3, 3, 0):
        best = pair.block().argmax(axis=1) if isinstance(pair.draft, BlockSession) else pair.rollout(3)[0].tokens
        pair.verify_chain(best[:3].tolist(), n_accepted, 11 + n_accepted)
        assert pair.draft.pending_tokens(pair.text) == count_pending(pair, n_accepted + 1)
        check_fresh(pair)
    tree = Draft(np.array([5, 9, 7, 3], np.int32), np.array([-1, -1, 0, 1], np.int32))
    for path in ((1, 3), (0,), ()):  # rounds of another drafter, read together
        pair.verify(tree, path, 20)
    assert pair.draft.pending_tokens(pair.text) == count_pending(pair, 6)
    check_fresh(pair)
    assert pair.draft.pending_tokens(pair.text) == 1, "the last one runs again"
    check_fresh(pair)  # the same text again


def test_rollouts_are_as_long_as_the_head_drafts(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, make_tokens(30))
    if isinstance(pair.draft, BlockSession):
        return
    most = head.network.n_drafts or 20
    for n, accepted in ((4, 3), (2, 1), (most, 0)):
        pair.verify(check_rollout(pair, n, length=min(n, most)), range(accepted), 8)
        check_fresh(pair)


@pytest.mark.parametrize("shared", [0, 1, 12, 29])
def test_a_new_text_keeps_the_prefix_that_it_shares(target: MlxModel, head: MlxHead, shared: int) -> None:
    pair = follow_another_text(target, head, shared)
    missing = len(pair.text) - 1 - max(0, shared - head.network.reads_pairs)
    assert pair.draft.pending_tokens(pair.text) == count_pending(pair, missing)
    check_fresh(pair)


def test_a_window_reads_the_end_alone(target: MlxModel, head: MlxHead) -> None:
    if head.network.depth:
        check_window(target, head)


def test_ends_of_texts_and_contexts(target: MlxModel, head: MlxHead) -> None:
    pair = Pair(target, head, [5, 6])
    assert draft(pair, [5]) is None
    check_fresh(pair)
    if not isinstance(pair.draft, BlockSession):
        assert pair.draft.rollout([5], WHOLE, 3) is None
        pair.restart(make_tokens(254))
        assert pair.draft.rollout(pair.text, WHOLE, 8) is not None
        pair.read()
        assert [pair.draft.step(7) is None for _ in range(3)] == [False, False, True]
    pair.restart(make_tokens(256))
    assert draft(pair, pair.text) is not None
    assert draft(pair, [*pair.text, 4]) is None
    pair.session.rewind(100)
    with pytest.raises(BackendError, match="no hidden states"):
        draft(pair, pair.text)


def test_a_cancelled_read_is_done_again(target: MlxModel, head: MlxHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_session, "_CHUNK", 8)
    if not head.network.depth:  # which reads one state
        return
    pair = cancel_a_read(target, head)
    check_fresh(pair)
    if head.network.reads_pairs:  # states of the pairs before are kept
        pair.session.rewind(25)
        pair.text = [*pair.text[:25], 8]
        pair.draft.begin(pair.text)
        check_fresh(pair)
