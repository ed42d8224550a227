"""The drafters of one generation. What one of them raises or gets wrong costs its proposals, never the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Round
from edgespec.core.tree import DraftTree
from edgespec.errors import Cancelled, reason_of

T = TypeVar("T")
Learn = Callable[[Drafter, Sequence[Outcome]], None]


class DrafterSet:
    """Calls drafters; drops for the rest of the generation those that fail.

    free   those that take no time
    timed  the others
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int, draw: TokenDraw | None = None) -> None:
        """`vocab_size` is the target's; `draw` is given to drafters that can draw their tokens."""
        self._drafters = list(drafters)
        self._split()
        self._vocab_size = vocab_size
        self._draw = draw
        self._passed: tuple[int, ...] = ()  # tokens of which the free ones have not heard yet
        self.failures: dict[str, str] = {}  # drafter -> reason

    def __iter__(self) -> Iterator[Drafter]:
        return iter(tuple(self._drafters))

    def _split(self) -> None:
        self.free = tuple(each for each in self._drafters if each.is_free)
        self.timed = tuple(each for each in self._drafters if not each.is_free)

    def begin(self, text: Sequence[int], *, has_cheap_rows: bool = True) -> None:
        """A generation begins. Where rows are not cheap, drafters that only fill rows are left out beside others."""
        self._passed = ()
        if not has_cheap_rows and (others := [each for each in self._drafters if not each.pads_batch]):
            self._drafters = others
            self._split()
        for drafter in self:
            self._call(drafter, partial(drafter.begin, text, self._draw), None)

    def observe(self, done: Round, learn: Learn) -> None:
        """All drafters hear of the round; `learn` gets what they would have said about its tokens.

        The free ones hear of it together with those before it that only `observe_passed` was told of, as of one round
        without a draft.
        """
        passed, self._passed = self._passed, ()
        if not passed:
            self._observe_each(self, done, learn)
            return
        together = Round(done.text, passed + done.emitted, NO_DRAFT, (), 0, None)
        self._observe_each(self.free, together, learn)
        self._observe_each(self.timed, done, learn)

    def observe_passed(self, done: Round) -> None:
        """The drafters that take time hear of the round; the others hear of it together with a later one."""
        self._passed += done.emitted
        self._observe_each(self.timed, done, lambda drafter, outcomes: None)

    def _observe_each(self, drafters: Iterable[Drafter], done: Round, learn: Learn) -> None:
        for drafter in drafters:
            try:
                learn(drafter, tuple(drafter.observe(done)))
            except Cancelled:
                raise
            except Exception as error:  # noqa: BLE001 - see _call
                self._drop(drafter, error)

    def pending_tokens(self, drafter: Drafter, text: Sequence[int]) -> int:
        """Tokens that it has yet to read; all of the text for a drafter that fails."""
        return self._call(drafter, partial(_count_unread, drafter, text), len(text))

    def expand(self, drafter: Drafter, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        """Drive `drafter.expand`; each next() is a unit. Nodes of a faulty unit are taken back."""
        before, tree.voter = len(tree), drafter.name
        try:
            for _ in drafter.expand(tree, text, limit):
                self._check(drafter, tree, before, limit)
                before, tree.voter = len(tree), None
                yield
                tree.voter = drafter.name
            self._check(drafter, tree, before, limit)
        except Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 - see _call
            self._drop(drafter, error)
            tree.truncate(before)
        finally:
            tree.voter = None

    def draft_async(self, drafter: Drafter, text: Sequence[int], limit: Budget) -> Draft | None:
        """A chain that the device may still compute; None without one, and for a drafter that fails."""
        return self._call(drafter, partial(self._draft_async, drafter, text, limit), None)

    def _draft_async(self, drafter: Drafter, text: Sequence[int], limit: Budget) -> Draft | None:
        """Raises ValueError for a chain that the target cannot score. Tokens on a device are not waited for."""
        draft = drafter.draft_async(text, limit)
        if draft is None:
            return None
        if len(draft) > limit.depth or not draft.is_chain or draft.q is not None:
            raise ValueError(f"what it drafted unread is no chain of {limit.depth} best tokens at most")
        if type(draft) is Draft and len(draft) and not 0 <= draft.tokens.min() <= draft.tokens.max() < self._vocab_size:
            raise ValueError("it proposed a token that the target does not have")
        return draft

    def _call(self, drafter: Drafter, function: Callable[[], T], otherwise: T) -> T:
        """The result of `function`, or `otherwise` after an error, which drops `drafter`."""
        try:
            return function()
        except Cancelled:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a drafter, which may be somebody else's code
            self._drop(drafter, error)
            return otherwise

    def _drop(self, drafter: Drafter, error: Exception) -> None:
        self.failures[drafter.name] = f"{reason_of(error)}."
        self._drafters = [each for each in self._drafters if each is not drafter]
        self._split()

    def _check(self, drafter: Drafter, tree: DraftTree, start: int, limit: Budget) -> None:
        """Raise ValueError for nodes from `start` on that the target cannot score or the rules cannot verify."""
        tokens = tree.tokens[start:]
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            unknown = next(token for token in tokens if not 0 <= token < self._vocab_size)
            raise ValueError(f"it proposed token {unknown}, which the target does not have")
        if not drafter.is_drawn:
            if any(q is not None for q in tree.q[start:]):
                raise ValueError("it gave the distribution of a token without drawing tokens")
            return
        if len(tree) > limit.depth or tree.parents != list(range(-1, len(tree) - 1)):
            raise ValueError(f"drawn tokens have to form a chain of the {limit.depth} that it was asked for at most")
        for token, q in zip(tokens, tree.q[start:], strict=True):
            if q is None or q.shape != (self._vocab_size,) or not q[token] > 0:
                raise ValueError(f"token {token} is not drawn from the distribution that it gave")


def _count_unread(drafter: Drafter, text: Sequence[int]) -> int:
    n = drafter.pending_tokens(text)
    if n < 0:
        raise ValueError(f"it has {n} unread tokens")
    return n
