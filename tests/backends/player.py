"""Who uses a shared llama.cpp context in tests: one who does anything at random, and one who is alone, to compare."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.sequence import cheap_prefill
from edgespec.cancel import cancellable
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft
from edgespec.core.scores import Scores
from edgespec.core.tree import path_to
from edgespec.errors import Cancelled
from tests.contract.runtimes import prefill
from tests.contract.test_session import random_draft

CONTEXT = 128
TOLERANCE = 0.02  # of logits whose standard deviation is about 3


class Alone:
    """What a session with nobody beside it says after a text."""

    def __init__(self, model: LlamaModel) -> None:
        self._session = model.open_session()

    def after(self, tokens: list[int]) -> Logits:
        with cancellable(lambda: None):  # whoever asks
            return prefill(self._session, tokens).copy()

    def close(self) -> None:
        self._session.close()


class Player:
    """Does something at random with a session, and knows what it must hold."""

    def __init__(self, model: LlamaModel, alone: Alone, rng: np.random.Generator) -> None:
        self._model, self._alone, self._rng = model, alone, rng
        self._session = model.open_session(shared=True)
        self._held: list[int] = []
        self._reading: tuple[list[int], Generator[Any, None, Scores]] | None = None
        self._asked: tuple[int, Draft, Scores] | None = None
        self._is_cancelled = False
        self.compared = 0
        self.others: list[Player] = []

    def act(self) -> None:
        with cancellable(self._check):
            self._act()

    def _act(self) -> None:
        if self._reading is not None:
            self._read_on()
        elif self._asked is not None:
            self._finish()
        else:
            choices = [self._begin, self._cut, self._reopen, self._adopt, *[self._ask] * 8]
            self._rng.choice(np.array(choices if self._held else choices[:1]))()

    def _begin(self) -> None:
        kept = self._held[: int(self._rng.integers(0, len(self._held) + 1))]
        text = [*kept, *self._rng.integers(1, 64, int(self._rng.integers(1, 40))).tolist()][:90]
        self._reading = (text, self._session.prefill(text))

    def _read_on(self) -> None:
        assert self._reading is not None
        text, reading = self._reading
        self._is_cancelled = bool(self._rng.random() < 0.05)
        try:
            for _ in range(int(self._rng.integers(1, 4))):
                next(reading)
            if self._rng.random() < 0.05:  # nobody wants it any more
                self._reading = None
                self._held = []
        except StopIteration as end:
            self._held, self._reading = text, None
            self._compare(end.value.logits(0), [])
        except Cancelled:
            self._held, self._reading = [], None
        self._is_cancelled = False

    def _ask(self) -> None:
        if len(self._held) > CONTEXT - 20:
            return self._begin()
        root = int(self._rng.integers(1, 64))
        draft = random_draft(self._rng, self._session, int(self._rng.integers(0, 8)))
        self._asked = (root, draft, self._session.forward(root, draft))
        return None

    def _finish(self) -> None:
        assert self._asked is not None
        root, draft, scores = self._asked
        self._is_cancelled = bool(self._rng.random() < 0.1)
        self._asked = None
        try:
            if self._rng.random() < 0.8:
                node = int(self._rng.integers(-1, len(draft)))
                path = draft.tokens[list(path_to(draft, node))].tolist()
                self._compare(scores.logits(node + 1), [root, *path])
                self._session.commit(path_to(draft, node))
                self._held += [root, *path]
            elif self._rng.random() < 0.5:
                self._session.commit(())
                self._held.append(root)
            else:  # nobody wants it any more
                self._cut()
        except Cancelled:
            self._held = []  # the next prompt says what it is
        self._is_cancelled = False

    def _cut(self) -> None:
        position = int(self._rng.integers(1, len(self._held) + 1))
        assert self._session.rewind(position) == position
        del self._held[position:]

    def _adopt(self) -> None:
        other = self.others[int(self._rng.integers(len(self.others)))]
        n = int(self._rng.integers(1, 100))
        theirs = list(other._session.tokens[:n])
        is_possible = other is not self and (n > cheap_prefill(CONTEXT) or not self._model.has_streams)
        assert self._session.adopt(other._session, n) == is_possible
        if is_possible:
            self._held = theirs
            assert self._session.position == len(theirs)

    def _reopen(self) -> None:
        self._session.close()
        self._session = self._model.open_session(shared=True)
        self._held = []

    def _compare(self, logits: Logits, more: list[int]) -> None:
        self.compared += 1
        assert np.abs(logits - self._alone.after([*self._held, *more])).max() < TOLERANCE

    def _check(self) -> None:
        if self._is_cancelled:
            raise Cancelled

    def close(self) -> None:
        self._session.close()
