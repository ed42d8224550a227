"""The contract between drafters and whoever drives them: a fixed length, the autopilot, a benchmark.

There are three kinds of drafters:

lookup      no model: n-grams, suffixes of earlier texts                  implements Drafter
sequential  one forward for each depth: a draft model, a self-draft       drafters.sequential over a DraftSession
block       one forward for several tokens: PARD                          drafters.block over a BlockSession

V is the vocabulary size of the target. Token ids are the target's; a session of a model with another vocabulary maps
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from edgespec.core.arrays import Logits, Probs
from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Budget, Draft, Round
from edgespec.core.scores import Scores

Confidence = Literal["probability", "length"]
"""What a drafter's confidence in a token is: a probability, or a number of matching tokens."""

TREE_WIDTH, MAX_TREE = 8, 63  # nodes that a drafter which grows trees continues at most: in a unit, and in all
MATCH_GROWTH = 0.5  # by which each drafted token lengthens the match of the next one; a token of the text counts as 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a drafter would have said about a token that was emitted, whether or not it was asked."""

    confidence: float
    is_right: bool


class TokenDraw(Protocol):
    """Draws draft tokens at random, by the sampler chain of the request.

    takes_trees  whether the rule verifies siblings; else a drafter draws a chain
    """

    takes_trees: bool

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        """(token after `prefix`, the distribution [V] it was drawn from). Raises BackendError for NaN logits."""

    def draw_siblings(self, logits: Logits, prefix: Sequence[int], n: int) -> list[tuple[int, Probs]]:
        """Up to `n` different tokens after `prefix`, drawn without replacement.

        Each comes with the distribution [V] that it was drawn from, in which the tokens before it have probability 0.
        Raises BackendError for NaN logits.
        """


class Drafter(Protocol):
    """Proposes continuations for one slot, that is one sequence of the target. It lives as long as the slot.

    No method may change the target's state. An error in a drafter costs its proposals: it is dropped for the rest of
    the generation, the user is told, and the answer goes on. A class with the base Drafter inherits methods that do
    nothing.

    name         key of everything that is learned of it
    is_free      whether its units take no measurable time; it is then asked wherever it may pay
    confidence   what its confidences mean
    block_size   the most tokens on a path that one unit of work proposes; 1 if each takes a unit of its own
    is_drawn     whether its tokens are drawn from q in this generation, for the rejection rules: a chain, or a tree if
                 it grows trees
    is_async     whether `draft_async` makes chains in this generation
    grows_trees  whether its units continue siblings too if the budget asks for a tree
    pads_batch   whether it drafts beside others only if further rows of a forward take little time
    whole_size   the size of its drafts where it drafts alone and all their rows take next to no time; None if the
                 controller chooses among its tokens even then
    """

    name: str
    is_free: bool = False
    confidence: Confidence = "probability"
    block_size: int = 1
    is_drawn: bool = False
    is_async: bool = False
    grows_trees: bool = False
    pads_batch: bool = False
    whole_size: Budget | None = None

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        """A generation starts from `text`, which may continue the last one or be another; nothing expensive here.

        A drafter that can draw its tokens at random does so by `draw`, if that is given, and sets `is_drawn`.
        """

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Tokens that it would have to read before it could draft; 0 for lookups and attached drafts."""
        return 0

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        """Add nodes that continue `text`, whose last token is the root.

        Each next() is one unit of work with a price of its own: a forward, a block, a lookup. The caller may stop after
        any unit. `limit.nodes` counts the drafter's own nodes: those that others have added do not use it up.
        `limit.read` limits the tokens of the text that are read first.
        """
        ...

    def draft_async(self, text: Sequence[int], limit: Budget) -> Draft | None:
        """A chain of `limit.depth` best tokens that the device may still compute, as a Draft of the target's backend.

        The host waits for nothing. None if the drafter cannot make one, or not now; the caller then uses `expand`.
        """
        return None

    def observe(self, done: Round) -> Sequence[Outcome]:
        """Learn from a round.

        A free drafter returns what it would have said about each emitted token, so that its acceptance is known before
        its proposals are used. Others return nothing: their acceptance is learned from what they have proposed.

        Rounds in which the controller decided nothing are reported to free drafters with the next one in which it did:
        as a single round without a draft that emitted the tokens of all. The last ones of an answer may go unreported.
        """
        return ()

    def close(self) -> None:
        """Free what it holds. Called once."""
        return


class DraftSession(Protocol):
    """A sequential draft: a small model, the target with fewer layers or bits, a trained head.

    An attached one is fed by the target's own forwards inside the backend and has nothing to read.
    """

    @property
    def is_async(self) -> bool:
        """Whether `rollout` may be called."""

    @property
    def takes_trees(self) -> bool:
        """Whether `branch` may be called."""

    @property
    def text(self) -> Sequence[int]:
        """The text that was read, and the provisional tokens after it."""

    def begin(self, text: Sequence[int]) -> None:
        """Start a generation from `text`; keeps the cached part of it."""

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Tokens of `text` that are not in the cache. Drops the drafted tokens that are not in `text`."""

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """The logits [V] after `text`. If more than `window` tokens are unread, only the last ones are read.

        Drops drafted tokens as `pending_tokens` does. None if a token is not in the draft's vocabulary. Raises
        Cancelled, BackendError.
        """

    def step(self, token: int) -> Logits | None:
        """The logits [V] after one more provisional token, below the last one; None at the end of the context."""

    def branch(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Logits] | None:
        """The logits [V] after each of `tokens`, which are added to the tree of provisional tokens.

        `parents` are numbers of tokens that `step` and `branch` have added since `read`, in that order from 0; -1 is
        the last token of the text. None if the tree has no room.
        """

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        """A chain of `n` best tokens after `text`, and the scores [n, V] that they were chosen from.

        It returns before the device has computed them. `window` and a result of None mean what they do in `read`.
        """

    def close(self) -> None: ...


@runtime_checkable
class BlockSession(Protocol):
    """Drafts several positions in one forward: PARD, trained heads that propose blocks."""

    @property
    def block_size(self) -> int:
        """The most positions of one block."""

    def begin(self, text: Sequence[int]) -> None:
        """Start a generation from `text`; keeps the cached part of it."""

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Tokens of `text` that are not in the cache. Drops the drafted tokens that are not in `text`."""

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        """Up to `n` rows of logits [V], one for each position after `text`.

        `window` and a result of None mean what they do in `DraftSession.read`.
        """

    def close(self) -> None: ...
