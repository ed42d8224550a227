"""Cancellation: it may strike before or inside any native call, and the session goes on with the right answer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgespec.cancel import cancellable
from edgespec.core.protocols import Draft
from edgespec.errors import Cancelled
from tests.contract.test_session import PROMPT, random_draft
from tests.contract.toys import CONTEXT, Runtime, prefill


class Countdown:
    """A check that raises at the n-th call after `arm(n)`, once."""

    def __init__(self) -> None:
        self._left: int | None = None

    def arm(self, calls: int) -> None:
        self._left = calls

    @property
    def fired(self) -> bool:
        return self._left is None

    def __call__(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self._left = None
                raise Cancelled


@pytest.fixture
def check() -> Iterator[Countdown]:
    """It is polled by whatever the test does."""
    countdown = Countdown()
    with cancellable(countdown):
        yield countdown


@pytest.mark.parametrize("calls", [1, 2, 5, 20])
def test_during_prefill(runtime: Runtime, check: Countdown, calls: int) -> None:
    session = runtime.session()
    tokens = (PROMPT * 9)[:CONTEXT]
    check.arm(calls)
    try:
        prefill(session, tokens)
    except Cancelled:
        assert check.fired
        assert session.position < len(tokens)
    else:
        assert not check.fired  # so few calls are made that none was the last
        check.arm(10**9)
    assert runtime.same(prefill(session, tokens), runtime.logits_after(tokens))
    session.close()


@pytest.mark.parametrize("calls", [1, 2, 4, 9])
def test_during_forward(runtime: Runtime, check: Countdown, calls: int) -> None:
    session = runtime.session()
    prefill(session, PROMPT)
    session.checkpoint()
    draft = random_draft(np.random.default_rng(calls), session, 6)
    check.arm(calls)
    try:
        session.forward(15, draft).argmax()
    except Cancelled:
        assert session.position <= len(PROMPT)
        prefill(session, PROMPT)
        session.forward(15, draft)
    check.arm(10**9)
    session.commit((0,))
    tokens = [*PROMPT, 15, int(draft.tokens[0]), 3]
    assert runtime.same(prefill(session, tokens), runtime.logits_after(tokens))
    session.close()


def test_a_first_check_cancels_everything(runtime: Runtime, check: Countdown) -> None:
    session = runtime.session()
    prefill(session, PROMPT)
    check.arm(1)
    with pytest.raises(Cancelled):
        session.forward(1, Draft.chain([2, 3])).argmax()
    check.arm(1)
    with pytest.raises(Cancelled):
        prefill(session, [*PROMPT, 1, 2])
    assert runtime.same(prefill(session, [*PROMPT, 1, 2]), runtime.logits_after([*PROMPT, 1, 2]))
    session.close()
