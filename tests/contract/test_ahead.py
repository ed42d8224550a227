"""The Session contract: running ahead of the host, and rolling out drafts, change nothing of what is scored."""

from __future__ import annotations

import pytest

from edgespec.core.protocols import NO_DRAFT, Draft
from tests.contract.runtimes import Runtime, prefill
from tests.contract.test_session import PROMPT


@pytest.mark.parametrize("ahead", [True, False])
def test_running_ahead_changes_nothing(runtime: Runtime, ahead: bool) -> None:
    """Plain steps with a hint that the next one will be plain too, kept, broken by another token, or by a draft."""
    session = runtime.prefilled(PROMPT)
    tokens, z = list(PROMPT), runtime.logits_after(PROMPT)
    for step in range(6):
        token = int(z.argmax()) if step != 3 else 11  # once the host decides otherwise
        scores = session.forward(token, NO_DRAFT, run_ahead=ahead)
        assert int(scores.argmax()[0]) == int(scores.logits(0).argmax())
        session.commit(())
        tokens.append(token)
        assert session.position == len(tokens)
        z = runtime.logits_after(tokens)
        assert runtime.same(scores.logits(0), z)
    scores = session.forward(9, Draft.chain([8, 7]))
    assert runtime.same(scores.logits(2), runtime.logits_after([*tokens, 9, 8, 7]))
    session.commit((0,))
    session.forward(3, NO_DRAFT, run_ahead=ahead).argmax()
    session.rewind(len(tokens))
    assert runtime.same(prefill(session, [*tokens, 5]), runtime.logits_after([*tokens, 5]))
    session.close()


def test_a_rollout_is_greedy_decoding(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
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


def test_a_rollout_after_a_rejected_draft(runtime: Runtime) -> None:
    """What recurrent sessions still owe from the rejection is settled first."""
    session = runtime.prefilled(PROMPT)
    session.forward(7, Draft.chain([8, 9, 10]))
    session.commit((0,))
    found, scores = session.rollout([5], 2, session.capabilities.vocab_size)
    tokens = [*PROMPT, 7, 8, 5]
    assert runtime.same(scores.logits(0), runtime.logits_after(tokens))
    assert runtime.same(scores.logits(1), runtime.logits_after([*tokens, int(found.tokens[0])]))
    assert session.position == len(tokens) + 1
    session.close()


def test_a_session_takes_the_draft_of_another(runtime: Runtime) -> None:
    """As a draft model's tokens go to the target, whether or not anybody has read them."""
    drafter, target = runtime.prefilled(PROMPT), runtime.prefilled(PROMPT)
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


def test_a_hint_to_run_ahead_beside_a_draft_is_only_a_hint(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    scores = session.forward(9, Draft.chain([1, 2, 3]), run_ahead=True)
    token = int(scores.argmax()[0])
    session.commit(())
    assert runtime.same(session.forward(token, NO_DRAFT).logits(0), runtime.logits_after([*PROMPT, 9, token]))
    session.close()
    session.close()  # closing twice is closing once
