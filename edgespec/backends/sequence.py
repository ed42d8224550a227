"""Checks that every session makes before it computes, the length of a reusable prefix, and states to go back to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Generic, TypeVar

from edgespec.core.protocols import Capabilities, Draft, Session
from edgespec.core.tree import check_draft, is_path
from edgespec.errors import ContextOverflow, RollbackError


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for an id outside the vocabulary."""
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(f"token ids must be in 0..{vocab_size - 1}")


def check_forward(session: Session, root: int, draft: Draft, *, is_on_device: bool = False) -> None:
    """Raises ValueError for ids outside the vocabulary and invalid drafts, ContextOverflow for drafts that do not fit.

    Does not read the tokens of a draft that `is_on_device`.
    """
    limits, position = session.capabilities, session.position
    check_ids((root,), limits.vocab_size)
    if len(draft) > session.draft_limit or position >= limits.context_size:
        raise ContextOverflow(f"{len(draft)} drafted tokens do not fit after {position}.", hint="Report this as a bug.")
    if not (limits.tree or draft.is_chain):
        raise ValueError("this session takes chains only")
    if not is_on_device:
        check_draft(draft, limits.vocab_size)


def kept_tokens(pending: tuple[int, Draft] | None, path: Sequence[int]) -> list[int]:
    """What a commit of `path` keeps of a forward. Raises RollbackError where there is none, ValueError for no path."""
    if pending is None:
        raise RollbackError("nothing was forwarded to commit.", hint="Report this as a bug.")
    root, draft = pending
    if not is_path(draft, tuple(path)):
        raise ValueError(f"{tuple(path)} is not a path of the draft")
    return [root, *draft.tokens[list(path)].tolist()]


def check_committed(pending: object, purpose: str = "the next") -> None:
    """Raises RollbackError where a forward is pending."""
    if pending is not None:
        raise RollbackError(f"a forward was not committed before {purpose}.", hint="Report this as a bug.")


def check_prompt(tokens: Sequence[int], capabilities: Capabilities) -> None:
    """Raises ContextOverflow for a prompt that is empty or too long, ValueError for ids outside the vocabulary."""
    size = capabilities.context_size
    if not 0 < len(tokens) <= size:
        raise ContextOverflow(
            f"the prompt has {len(tokens)} tokens, the context holds {size}.",
            hint="Shorten the prompt, or set a larger --ctx.",
        )
    check_ids(tokens, capabilities.vocab_size)


def shared_prefix(cached: Sequence[int], tokens: Sequence[int], limit: int) -> int:
    """How many leading tokens agree, at most `limit`. A prompt's limit is its length - 1: its last token is scored."""
    n = min(len(cached), limit)
    for i in range(n):
        if cached[i] != tokens[i]:
            return i
    return n


def cheap_prefill(context_size: int) -> int:
    """Tokens that are read again rather than copying a cache of `context_size` tokens."""
    return max(64, context_size // 64)


_MAX_CHECKPOINTS = 8  # of a text
_CHECKPOINT_BYTES = 2**28  # that they may take, but for the last one
_SPACING = 2048  # tokens between two, while a prompt is read

S = TypeVar("S")


class Checkpoints(Generic[S]):
    """States of a cache by their positions in its text, for caches that cannot drop just any tail.

    The last one is always kept. Of many, those near the end of the text are kept closer together than earlier ones.
    """

    def __init__(self) -> None:
        self._states: list[tuple[int, S]] = []
        self._passing: tuple[int, S] | None = None

    def keep_for_now(self, position: int, state: S) -> None:
        """Keep the state after `position` tokens until the next call of this method."""
        self._passing = position, state

    def add(self, position: int, state: S, n_bytes: int) -> None:
        """Keep the state of `n_bytes` after `position` tokens, and those before it."""
        self.cut(position - 1)
        self._states.append((position, state))
        while len(self._states) > max(1, min(_MAX_CHECKPOINTS, _CHECKPOINT_BYTES // max(n_bytes, 1))):
            at = [0, *(each for each, _ in self._states)]
            gaps = [(at[i + 1] - at[i - 1]) / (position - at[i]) for i in range(1, len(at) - 1)]
            del self._states[gaps.index(min(gaps))]

    def is_due(self, position: int) -> bool:
        """Whether a prompt that has been read up to `position` should get another one."""
        return position >= _SPACING + (self._states[-1][0] if self._states else 0)

    def cut(self, position: int) -> tuple[int, S] | None:
        """Drop what lies behind `position`; returns the last state that is left, with its position."""
        while self._states and self._states[-1][0] > position:
            self._states.pop()
        if self._passing is not None and self._passing[0] > position:
            self._passing = None
        kept = [*self._states[-1:], *([self._passing] if self._passing is not None else [])]
        return max(kept, key=lambda each: each[0], default=None)

    def clear(self) -> None:
        self._states.clear()
        self._passing = None


# The part of a tokenizer that all runtimes share: a range of ids, and the bytes of each, rendered once.


class IdRange(ABC):
    """Ids 0..vocab_size - 1 with the bytes of each."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text. Raises ValueError for an id outside the range."""
        piece = self._pieces.get(token)
        if piece is None:
            self.check(token)
            piece = self._pieces[token] = self.render(token)
        return piece

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        return frozenset(token for token in range(self.vocab_size) if not self.piece(token))

    @abstractmethod
    def render(self, token: int) -> bytes:
        """The bytes of an id of the range."""

    def check(self, token: int) -> None:
        """Raises ValueError for an id outside the range."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is not in 0..{self.vocab_size - 1}")

    def id_or_none(self, token: int | None) -> int | None:
        return token if token is not None and 0 <= token < self.vocab_size else None
