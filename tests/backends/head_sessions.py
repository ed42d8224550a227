"""A session of a target and that of a head, driven round by round beside a pair that is opened anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from edgespec.core.arrays import Logits
from edgespec.core.drafter import BlockSession
from edgespec.core.protocols import Draft
from edgespec.core.scores import Scores
from edgespec.errors import Cancelled
from tests.contract.runtimes import prefill

WHOLE = 2**20  # tokens of a window that holds every text
TEXT: list[int] = np.random.default_rng(8).integers(4, 600, 300).tolist()


class Target(Protocol):
    def open_session(self) -> Any: ...


class Head(Protocol):
    name: str

    def open_session(self, target: Any) -> Any: ...


class Pair:
    """A session of the target and the head's for it; `text` ends with the root, which the target does not hold."""

    def __init__(
        self,
        target: Target,
        head: Head,
        text: Sequence[int],
        *,
        tolerance: float = 5e-3,
    ) -> None:
        """`tolerance` is of logits that the runtime's kernels may change between equal texts."""
        self._target, self.head, self.tolerance = target, head, tolerance
        self.session = target.open_session()
        self.draft = head.open_session(self.session)
        self.restart(text)

    def restart(self, text: Sequence[int]) -> None:
        """A generation starts: the target reads the prompt and emits the last token of `text`."""
        self.text = list(text)
        prefill(self.session, self.text[:-1])
        self.draft.begin(self.text)

    def verify(self, draft: Draft, path: Sequence[int], root: int) -> None:
        """The target accepts `path`, and emits `root` after it."""
        self.session.forward(self.text[-1], draft)
        self.session.commit(path)
        self.text += [*draft.tokens[list(path)].tolist(), root]

    def verify_chain(self, drafted: Sequence[int], n_accepted: int, root: int) -> None:
        """Likewise of the first `n_accepted` tokens of a chain."""
        self.verify(Draft.chain(drafted), range(n_accepted), root)

    def read(self, window: int = WHOLE) -> Logits:
        logits: Logits | None = self.draft.read(self.text, window)
        assert logits is not None
        return logits

    def step(self, token: int) -> Logits:
        logits: Logits | None = self.draft.step(token)
        assert logits is not None
        return logits

    def block(self, window: int = WHOLE, n: int = 99) -> np.ndarray:
        """[n, V], or the rows of a whole block where these are fewer."""
        rows = self.draft.block(self.text, window, n)
        assert rows is not None
        assert len(rows) == min(n, self.draft.block_size)
        return np.stack(rows)

    def rollout(self, n: int) -> tuple[Draft, Scores]:
        found: tuple[Draft, Scores] | None = self.draft.rollout(self.text, WHOLE, n)
        assert found is not None
        return found

    def say(self, tokens: Sequence[int] = (50, 7, 90)) -> np.ndarray:
        """[n, V] a whole block, or what follows the text and each of `tokens`, as far as the head drafts."""
        if isinstance(self.draft, BlockSession):
            return self.block()
        found = [self.read()]
        assert list(self.draft.text) == self.text
        for token in tokens:
            logits = self.draft.step(token)
            if logits is None:
                break
            found.append(logits)
        assert list(self.draft.text) == [*self.text, *tokens[: len(found) - 1]]
        return np.stack(found)

    def follow(self, n: int) -> np.ndarray:
        """[n, V] after the text and after each best token but the last."""
        found = [self.read()]
        while len(found) < n:
            found.append(self.step(int(found[-1].argmax())))
        return np.stack(found)

    def propose(self, n: int) -> list[int]:
        """Best tokens one after another."""
        tokens: list[int] = self.follow(n).argmax(axis=1).tolist()
        return tokens

    def fresh(self) -> Pair:
        """A new pair with the same text."""
        return Pair(self._target, self.head, self.text, tolerance=self.tolerance)

    def close(self) -> None:
        self.draft.close()
        self.session.close()


class Cancellation:
    """A check that raises Cancelled once: at the call that `left` counts down to."""

    left = 0

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Cancelled


def is_close(a: Any, b: Any, tolerance: float) -> bool:
    """Whether logits of one shape differ by less than `tolerance`, and the same tokens have none."""
    a, b = np.asarray(a), np.asarray(b)
    known = ~np.isneginf(b)
    return np.array_equal(known, ~np.isneginf(a)) and bool(np.abs(a[known] - b[known]).max() < tolerance)


def check_fresh(pair: Pair) -> None:
    """The head says what it would beside a fresh session, after the text and after two drafted tokens.

    On llama.cpp rounding may change the best token of a row of DSpark or DFlash2, on which the next rows depend, and
    the last of DFlash2's candidates. Rows are compared up to there.
    """
    other = pair.fresh()
    found, expected = pair.say(), other.say()
    assert len(found) > 2
    n = len(found)
    if pair.head.name in ("dspark", "dflash"):
        changed = found.argmax(1) != expected.argmax(1)
        swapped = (np.isneginf(found) != np.isneginf(expected)).any(1)
        n = min([n, *(np.flatnonzero(changed) + 1).tolist(), *np.flatnonzero(swapped).tolist()])
        assert n > 1
    assert is_close(found[:n], expected[:n], pair.tolerance)
    other.close()
