"""What the contract suite runs over: runtimes that open fresh sessions on one model, here those of the toy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edgespec.backends.fixed_width import FixedWidthSession
from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import Session

CONTEXT = 256
WIDTH = 8  # of the sessions of fixed width
FIXED = CONTEXT + WIDTH - 1  # tokens of a context of which CONTEXT can be used


@dataclass(frozen=True)
class Runtime:
    """`open` gives a fresh session; logits of equal prefixes differ by less than `tolerance` (absolute)."""

    name: str
    open: Callable[[], Session]
    tolerance: float
    _said: dict[tuple[int, ...], Logits] = field(default_factory=dict)

    def session(self) -> Session:
        return self.open()

    def prefilled(self, tokens: list[int]) -> Session:
        session = self.session()
        prefill(session, tokens)
        return session

    def logits_after(self, tokens: list[int]) -> Logits:
        """[V] what a fresh session says after `tokens`; it is asked once for each text."""
        key = tuple(tokens)
        if key not in self._said:
            session = self.session()
            self._said[key] = prefill(session, tokens).copy()
            session.close()
        return self._said[key]

    def same(self, a: Logits, b: Logits) -> bool:
        return bool(np.abs(a - b).max() <= self.tolerance)


def prefill(session: Session, tokens: list[int]) -> Logits:
    """[V] scores of the last token."""
    return read_prompt(session, tokens).logits(0)


def toys() -> list[Runtime]:
    rule = ToyModel(seed=3, vocab_size=64)
    return [
        Runtime("toy-linear", lambda: ToySession(rule, kind="linear", context_size=CONTEXT), 0.0),
        Runtime("toy-tree", lambda: ToySession(rule, context_size=CONTEXT), 0.0),
        Runtime("toy-recurrent", lambda: ToySession(rule, kind="recurrent", context_size=CONTEXT), 0.0),
        Runtime("fixed-toy", lambda: FixedWidthSession(ToySession(rule, context_size=FIXED), WIDTH), 0.0),
    ]
