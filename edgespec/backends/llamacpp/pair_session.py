"""Heads on llama.cpp that draft from pairs of a token and the hidden state before it: EAGLE-3, MTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.backends.attached_draft import AttachedHead
from edgespec.backends.features import Features
from edgespec.backends.llamacpp.draft_context import MAX_ROWS
from edgespec.backends.llamacpp.head_context import HeadContext
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.taps import Floats
from edgespec.backends.llamacpp.weights import LlamaWeights
from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import BackendError

_SCORED = 8  # pairs that are read in one call although all are scored

ContextOpener = Callable[[LlamaSession, CheckCancelled], HeadContext]
"""Opens a head's context beside a session of its target, as large as it. Raises BackendError, Unsupported."""


class PairSession:
    """A DraftSession. Its cache has a pair of each position: the target's state there and the token after it.

    The pairs of drafted tokens have the head's own states. They are read again, with the target's, once the target has
    accepted them.
    """

    is_lazy = False

    def __init__(self, head: HeadContext, target: LlamaSession, features: Features[Floats]) -> None:
        """`features` are those of `target`, whose tap ends with this session.

        `head` holds as many pairs as the target tokens, and is freed.
        """
        self._head = head
        self._target = target
        self._features = features
        self._context_size = target.capabilities.context_size
        self._text: list[int] = []  # the `_base` tokens that were emitted, then the drafted ones
        self._base = 0
        self._first = 0  # position of the first pair; those from there to the last token but one are held
        self._state: Floats | None = None  # of the last pair

    @property
    def text(self) -> Sequence[int]:
        return self._text

    def begin(self, text: Sequence[int]) -> None:
        """Keeps the pairs of the prefix that `text` shares with the last one."""
        self._base = shared_prefix(self._text[: self._base], text, len(text) - 1)
        del self._text[self._base :]

    def unread(self, text: Sequence[int]) -> int:
        """Pairs of `text` that are not in the cache."""
        return len(text) - 1 - max(self._settle(text), self._features.start)

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """As core.drafter.DraftSession. None where no pair can be made, such as for a text of one token.

        Where the target has gone back behind states that were released, the pairs before are not read.
        """
        held, last = self._settle(text), len(text) - 1
        if self._features.end < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        window = max(1, min(window, self._context_size // 2))
        first = max(held, self._features.start)
        if first > held or last - first > window or last - self._first > self._context_size:
            self._text, self._base = [], 0
            self._first = first = max(self._features.start, last - window)
            held = 0
        self._head.trim(held)
        logits = None
        while first < last:
            end = min(first + MAX_ROWS, last if last - first <= _SCORED else last - 1)
            states = self._head.encode(self._features.take(first, end), first)
            if end < last:
                self._head.read(text[first + 1 : end + 1], states, first)
            else:
                logits, self._state = self._head.decode(text[first + 1 : end + 1], states, first)
            first = end
        self._text += text[len(self._text) :]
        self._base = len(text)
        self._features.release(last - 1)  # another token may follow the last row
        return logits

    def step(self, token: int) -> Logits | None:
        position = len(self._text) - 1
        if position - self._first >= self._context_size:
            return None
        assert self._state is not None, "read comes first"
        if (found := self._head.step(token, self._state, position)) is None:
            return None
        logits, self._state = found
        self._text.append(token)
        return logits

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        logits = self.read(text, window)
        rows: list[Logits] = []
        while logits is not None and len(rows) < n:
            rows.append(logits)
            logits = self.step(int(logits.argmax())) if len(rows) < n else None
        return (Draft.chain([int(row.argmax()) for row in rows]), HostScores(rows)) if rows else None

    def close(self) -> None:
        self._target.untap()
        self._head.free()

    def _settle(self, text: Sequence[int]) -> int:
        """Forget drafted tokens; returns the position after the last pair whose token is in `text`."""
        self._base = min(self._base, len(text) - 1)
        del self._text[self._base :]
        held = self._base - 1
        if held <= self._first:
            self._first = held = 0
        return held


class PairHead(AttachedHead):
    """A head beside its target."""

    def __init__(
        self,
        name: str,
        target: LlamaWeights,
        layers: Sequence[int],
        opener: ContextOpener,
        *,
        extra_bytes: int,
        weights: LlamaWeights | None,
    ) -> None:
        """The head reads `layers` of the target. `close` frees `weights`, None where they are the target's."""
        self.tokenizer = target.tokenizer
        self.name = name
        self.extra_bytes = extra_bytes
        self._layers = layers
        self._opener = opener
        self._weights = weights

    def open_session(self, target: Session, check: CheckCancelled) -> PairSession:
        """A DraftSession for `target`, which holds no tokens yet. Raises BackendError, Unsupported."""
        assert isinstance(target, LlamaSession)
        features = target.tap(self._layers)
        try:
            context = self._opener(target, check)
        except BaseException:
            target.untap()
            raise
        return PairSession(context, target, features)

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()
