"""Sessions of trained heads on any runtime: they read the target's hidden states, and draft tokens or blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.backends.features import Features
from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.drafter import MAX_TREE
from edgespec.core.protocols import NO_DRAFT, Draft, Session
from edgespec.core.scores import Scores
from edgespec.formats.heads import HeadSpec

_KEPT_BEHIND = 64  # rows that a head has read, for rounds that go back: as many as a target scores in one forward
A = TypeVar("A")  # an array with rows: numpy's or MLX's


class TappedSession(Session, Protocol):
    """A session whose hidden states a head reads."""

    def tap(self, layers: Sequence[int]) -> Features[Any]:
        """Keep the hidden states of every token from now on, of `layers` as in formats.heads.HeadSpec.

        Replaces an earlier tap. Raises ValueError for a session that holds tokens, Unsupported if the model or the
        runtime has no such states.
        """

    def untap(self) -> None:
        """Keep no hidden states any more."""


class HeadRunner(ABC):
    """What a runtime computes of one head. Row p has the target's state of token p; a pair has token p + 1 too.

    reads_pairs  whether rows are pairs
    has_cache    whether it has keys and values of its own; without them a draft reads the last row alone
    is_async     whether there is a `rollout`, which returns before the device has computed the chain
    takes_trees  whether there is a `branch`
    max_drafts   the most tokens that it drafts after a text; None for no limit
    """

    reads_pairs = True
    has_cache = True
    is_async = False
    takes_trees = False
    max_drafts: int | None = None

    @abstractmethod
    def restart(self, first: int, last: int) -> None:
        """Hold no rows. The next row is that of position `first`, and the draft that follows begins at `last`."""

    @abstractmethod
    def trim(self, position: int) -> None:
        """Drop the rows from `position` on, which is not before the first row, and all that was drafted."""

    @abstractmethod
    def read(self, text: Sequence[int], first: int, features: Features[Any]) -> int:
        """Add some rows of `text` from `first` on; returns the position after them. Raises Cancelled, BackendError."""

    def start(self, text: Sequence[int]) -> None:  # noqa: B027 - most heads have nothing to start
        """Start a draft after `text`, all of whose rows but the root's are held. Raises Cancelled, BackendError."""

    def score(self) -> Logits:
        """The logits [V] after the text, or after the last drafted token."""
        raise NotImplementedError

    def step(self, token: int) -> Logits:
        """The logits [V] after one more drafted token. Raises Cancelled, BackendError."""
        raise NotImplementedError

    def branch(self, tree: Draft, n: int) -> list[Logits]:
        """The logits [V] after each of the last `n` nodes of `tree`, none of which is a parent of another.

        `step` and earlier calls have added the nodes before these. Raises Cancelled, BackendError.
        """
        raise NotImplementedError

    def rollout(self, n: int) -> tuple[Draft, Scores]:
        """A chain of `n` best tokens after the text, and the scores that they were chosen from, if `is_async`."""
        raise NotImplementedError

    def block(self, n: int) -> list[Logits]:
        """Up to `n` rows [V] of a head that drafts several tokens at once."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Free what it holds."""


class _HeadReader:
    """Adds a row for each token of a text to a head's cache. Drafted tokens are read again once they are accepted."""

    def __init__(self, runner: HeadRunner, target: TappedSession, features: Features[Any]) -> None:
        """`features` are those of `target`, whose tap ends with this session."""
        self._runner, self.is_async = runner, runner.is_async
        self._target = target
        self._features = features
        self._context_size = target.capabilities.context_size
        self.text: list[int] = []  # the `_base` tokens that were read, then the drafted ones
        self._base = self._first = self._held = 0  # rows from `_first` to `_held` are those of the text

    def begin(self, text: Sequence[int]) -> None:
        """Keeps the rows of the prefix that `text` shares with the last one."""
        self._base = shared_prefix(self.text[: self._base], text, len(text))
        self._held = min(self._held, self._base - self._runner.reads_pairs)

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Rows of `text` that a draft computes: those that are not held, and always the last pair or a block's root."""
        unread = len(text) - self._runner.reads_pairs - self._settle(text)
        return unread if self._runner.has_cache else min(1, unread)

    def close(self) -> None:
        self._target.untap()
        self._runner.close()

    def _settle(self, text: Sequence[int]) -> int:
        """Forget drafted tokens; returns the position after the last row that need not, or cannot, be read again."""
        self._base = min(self._base, len(text))
        del self.text[self._base :]
        self._held = min(self._held, len(text) - 1 - self._runner.reads_pairs)
        if self._held <= self._first or not self._runner.has_cache:
            self._first = self._held = 0
        return max(self._held, self._features.start)

    def _start(self, text: Sequence[int], window: int) -> bool:
        """Read the rows of `text` that are not held, those of the last `window` tokens at most, and start a draft.

        Returns False if there are no rows, or no room for a draft. Raises BackendError, Cancelled.
        """
        runner, first, last = self._runner, self._settle(text), len(text) - 1
        if not 0 < last < self._context_size:
            return False
        most = max(1, window - (not runner.reads_pairs)) if runner.has_cache else 1
        if not self._held or first > self._held or last - first > most:
            first = max(self._features.start, last - most)
            self._first = self._held = first
            runner.restart(first, last)
        else:
            runner.trim(first)
        while first < last:
            first = self._held = runner.read(text, first, self._features)
            self._base = first + runner.reads_pairs
            self.text = list(text[: self._base])
        self._features.release(last - _KEPT_BEHIND)
        self.text, self._base = list(text), len(text)
        if self._first == last:
            return False
        runner.start(text)
        return True


class HeadSession(_HeadReader):
    """A DraftSession of a head that drafts token by token. The rows of drafted tokens have the head's own states."""

    _tree = NO_DRAFT  # drafted after the text

    @property
    def takes_trees(self) -> bool:
        return self._runner.takes_trees

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """The logits [V] after `text`. None for a text of one token, and at the end of the context."""
        self._tree = NO_DRAFT
        return self._runner.score() if self._start(text, window) else None

    def step(self, token: int) -> Logits | None:
        """The logits [V] after one more token; None if the head drafts no more, and at the end of the context."""
        if len(self.text) - self._base + 1 >= self._most_drafts:
            return None
        logits = self._runner.step(token)
        self.text.append(token)
        self._tree = self._tree.extend([token], [len(self._tree) - 1])
        return logits

    def branch(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Logits] | None:
        """The logits [V] after each new node. `parents` are nodes of earlier calls, or -1; None if no more fit."""
        tree = self._tree.extend(tokens, parents)
        if len(tree) > min(MAX_TREE, self._context_size - self._base):
            return None
        del self.text[self._base :]
        self._tree = tree
        return self._runner.branch(tree, len(tokens))

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        """A chain of best tokens and their scores."""
        return self._runner.rollout(min(n, self._most_drafts)) if self._start(text, window) else None

    @property
    def _most_drafts(self) -> int:
        """Tokens that can be drafted after the text that was read."""
        room = self._context_size - self._base + 1
        return room if self._runner.max_drafts is None else min(room, self._runner.max_drafts)


class BlockHeadSession(_HeadReader):
    """A BlockSession of a head that drafts several tokens at once.

    All rows of a block run, as in training, even if fewer are asked for: they see each other.
    """

    @property
    def block_size(self) -> int:
        assert self._runner.max_drafts is not None
        return self._runner.max_drafts

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        """Up to `n` rows [V], each a distribution of its own; None as `HeadSession.read`."""
        return self._runner.block(n) if self._start(text, window) else None


def check_hidden_size(name: str, spec: HeadSpec, hidden_size: int) -> None:
    """Raises Unsupported unless the head in the file `name` is for targets of this hidden size."""
    if spec.hidden_size != hidden_size:
        raise Unsupported(
            f"{name} is a head for a hidden size of {spec.hidden_size:,}; the model has {hidden_size:,}.",
            hint=OTHER_HEAD,
        )


def check_tapped_layers(layers: Sequence[int], count: int) -> None:
    """Raises Unsupported for layers that a target with `count` of them does not have."""
    if wrong := [layer for layer in layers if not 0 <= layer <= count]:
        raise Unsupported(
            f"the head reads layer {wrong[0]}, and the model has layers 0 to {count - 1}.", hint=OTHER_HEAD
        )


_MAX_BLOCK = 64  # positions; targets score no more rows in one forward


def read_block(spec: HeadSpec, vocab_size: int) -> tuple[list[int], int]:
    """(mask ids after a block's root, index of the row that predicts the token after the root: 0 or 1).

    Raises Unsupported if the mask or the block size is not usable.
    """
    mask = spec.mask_token
    if mask is None or mask >= vocab_size:
        named = "none" if mask is None else f"{mask:,} of {vocab_size:,}"
        raise Unsupported(
            f"the head fills its blocks with a token of the model, and its file names {named}.", hint=OTHER_HEAD
        )
    if not 2 <= spec.block_size <= _MAX_BLOCK:
        raise Unsupported(
            f"the head has blocks of {spec.block_size:,} positions; those of 2 to {_MAX_BLOCK} are run.",
            hint=OTHER_HEAD,
        )
    return [mask] * (spec.block_size - 1), 0 if spec.predicts_at_root else 1
