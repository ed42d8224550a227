"""The contract of an AsyncSession: a chain that the host has not read is greedy decoding. MLX has such sessions."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.core.protocols import AsyncSession, Draft
from tests.contract.runtimes import MLX, RANKS, SELF_DRAFTS
from tests.contract.test_session import PROMPT
from tests.contract.toys import Runtime

LAZY = [
    *(f"draft {method} on mlx" for method in SELF_DRAFTS["mlx"]),
    *(f"mlx-{name}" for name in MLX),
    *(f"ranks-{name}" for name in RANKS),
]
on_mlx = pytest.mark.parametrize("runtime", LAZY, indirect=True)


def open_lazy(runtime: Runtime) -> Any:
    session = runtime.prefilled(PROMPT)
    assert isinstance(session, AsyncSession)
    return session


@on_mlx
def test_a_rollout_is_greedy_decoding(runtime: Runtime) -> None:
    session = open_lazy(runtime)
    vocab_size = session.capabilities.vocab_size - 3
    drafted, scores = session.rollout([7, 8, 9], 4, vocab_size)
    assert session.position == len(PROMPT) + 6
    found = drafted.tokens.tolist()
    tokens = [*PROMPT, 7, 8, 9]
    for row, token in enumerate(found):
        z = runtime.logits_after(tokens)
        assert runtime.same(scores.logits(row), z)
        assert token < vocab_size
        assert z[token] >= z[:vocab_size].max() - 2 * runtime.tolerance
        tokens.append(token)
    assert session.position == len(tokens) - 1
    assert session.rewind(len(PROMPT) + 3) == len(PROMPT) + 3  # a rollout makes its start a checkpoint
    again, _ = session.rollout(found[:1], 3, vocab_size)
    assert (len(again), again.tokens.tolist()) == (3, found[1:])
    held = session.rewind(len(PROMPT) + 3)
    after = [*tokens[:held], 1, 2]
    scores = session.forward(1, Draft.chain([2]))
    assert runtime.same(scores.logits(1), runtime.logits_after(after))
    session.commit((0,))
    session.close()


@on_mlx
def test_a_rollout_after_a_rejected_draft(runtime: Runtime) -> None:
    """What recurrent sessions still owe from the rejection is settled first."""
    session = open_lazy(runtime)
    session.forward(7, Draft.chain([8, 9, 10]))
    session.commit((0,))
    found, scores = session.rollout([5], 2, session.capabilities.vocab_size)
    tokens = [*PROMPT, 7, 8, 5]
    assert runtime.same(scores.logits(0), runtime.logits_after(tokens))
    assert runtime.same(scores.logits(1), runtime.logits_after([*tokens, int(found.tokens[0])]))
    assert session.position == len(tokens) + 1
    session.close()


@on_mlx
def test_a_session_takes_the_draft_of_another(runtime: Runtime) -> None:
    """As a draft model's tokens go to the target, whether or not anybody has read them."""
    drafter, target = open_lazy(runtime), open_lazy(runtime)
    held = list(PROMPT)
    for kept in (3, 1, 2):
        missing = [*held, 7][drafter.position :]
        draft, _ = drafter.rollout(missing, 3, 60)
        scores = target.forward(7, draft)
        best = scores.argmax()
        drafted = draft.tokens.tolist()
        assert runtime.same(scores.logits(3), runtime.logits_after([*held, 7, *drafted]))
        assert int(best[3]) == int(scores.logits(3).argmax())
        target.commit(range(kept))
        held += [7, *drafted[:kept]]
        assert target.position == len(held)
        drafter.rewind(len(held))
    drafter.close()
    target.close()
