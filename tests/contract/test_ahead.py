"""The Session contract: running ahead of the host changes nothing of what is scored."""

from __future__ import annotations

import pytest

from edgespec.core.protocols import NO_DRAFT, Draft
from tests.contract.test_session import PROMPT
from tests.contract.toys import Runtime, prefill


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


def test_a_hint_to_run_ahead_beside_a_draft_is_only_a_hint(runtime: Runtime) -> None:
    session = runtime.prefilled(PROMPT)
    scores = session.forward(9, Draft.chain([1, 2, 3]), run_ahead=True)
    token = int(scores.argmax()[0])
    session.commit(())
    assert runtime.same(session.forward(token, NO_DRAFT).logits(0), runtime.logits_after([*PROMPT, 9, token]))
    session.close()
    session.close()  # closing twice is closing once
