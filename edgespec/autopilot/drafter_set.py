"""The drafters of one generation. What one of them raises or gets wrong costs its proposals, never the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Round
from edgespec.errors import STOPS, reason_of

_MAX_EXCESS = 1e-3  # of the sum of single-precision probabilities over 1

Learn = Callable[[Drafter, Sequence[Outcome]], None]


class DrafterSet:
    """Calls drafters; drops for the rest of the generation those that fail.

    failures  why each of these was dropped, by name
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int, draw: TokenDraw | None = None) -> None:
        """`vocab_size` is the target's; `draw` is given to drafters that can draw their tokens."""
        self.failures: dict[str, str] = {}
        self._drafters = tuple(drafters)
        self._vocab_size = vocab_size
        self._draw = draw
        self._passed: tuple[int, ...] = ()  # tokens of which the free ones have not heard yet

    def __iter__(self) -> Iterator[Drafter]:
        return iter(self._drafters)

    @property
    def free(self) -> list[Drafter]:
        """The drafters that take no time."""
        return [each for each in self._drafters if each.is_free]

    @property
    def timed(self) -> list[Drafter]:
        return [each for each in self._drafters if not each.is_free]

    def begin(self, text: Sequence[int], *, has_cheap_rows: bool = True) -> None:
        """A generation begins. If rows are not cheap, drafters that only fill rows are left out beside others."""
        self._passed = ()
        if not has_cheap_rows:
            self._drafters = tuple(each for each in self if not each.pads_batch) or self._drafters
        for drafter in self:
            with _Guard(drafter, self._drop):
                drafter.begin(text, self._draw)

    def observe(self, done: Round, learn: Learn) -> None:
        """Report the round to all drafters; `learn` gets what they would have said about its tokens.

        If rounds before it were reported by `observe_passed`, the free drafters get these and the round as a single one
        without a draft.
        """
        passed, self._passed = self._passed, ()
        together = Round(done.text, passed + done.emitted, NO_DRAFT, (), 0, None) if passed else done
        for drafter in self:
            with _Guard(drafter, self._drop):
                learn(drafter, tuple(drafter.observe(together if drafter.is_free else done)))

    def observe_passed(self, done: Round) -> None:
        """Report the round to the drafters that take time; the free ones get it together with a later one."""
        self._passed += done.emitted
        for drafter in self.timed:
            if type(drafter).observe is not Drafter.observe:
                with _Guard(drafter, self._drop):
                    drafter.observe(done)

    def pending_tokens(self, drafter: Drafter, text: Sequence[int]) -> int:
        """Tokens that it has yet to read; all of the text for a drafter that fails."""
        with _Guard(drafter, self._drop):
            if (n := drafter.pending_tokens(text)) < 0:
                raise ValueError(f"it has {n} unread tokens")
            return n
        return len(text)

    def expand(self, drafter: Drafter, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        """Drive `drafter.expand`; each next() is a unit. Nodes of a faulty unit are taken back."""
        before, tree.voter = len(tree), drafter.name
        try:
            with _Guard(drafter, self._drop):
                for _ in drafter.expand(tree, text, limit):
                    self._check(drafter, tree, before, limit)
                    before, tree.voter = len(tree), None
                    yield
                    tree.voter = drafter.name
                self._check(drafter, tree, before, limit)
                before = len(tree)
            tree.truncate(before)
        finally:
            tree.voter = None

    def draft_async(self, drafter: Drafter, text: Sequence[int], limit: Budget) -> Draft | None:
        """A chain that the device may still compute; None without one, and for a drafter that fails.

        Tokens on a device are not waited for.
        """
        with _Guard(drafter, self._drop):
            if (draft := drafter.draft_async(text, limit)) is None:
                return None
            if len(draft) > limit.depth or not draft.is_chain or draft.q is not None:
                raise ValueError(f"what it drafted unread is no chain of {limit.depth} best tokens at most")
            is_read = type(draft) is Draft and len(draft)
            if is_read and not 0 <= draft.tokens.min() <= draft.tokens.max() < self._vocab_size:
                raise ValueError("it proposed a token that the target does not have")
            return draft
        return None

    def _drop(self, drafter: Drafter, error: BaseException) -> None:
        self.failures[drafter.name] = f"{reason_of(error)}."
        self._drafters = tuple(each for each in self if each is not drafter)

    def _check(self, drafter: Drafter, tree: DraftTree, start: int, limit: Budget) -> None:
        """Raise ValueError for nodes from `start` on that the target cannot score or the rules cannot verify."""
        if start == len(tree):
            return
        tokens = tree.tokens[start:]
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            unknown = next(token for token in tokens if not 0 <= token < self._vocab_size)
            raise ValueError(f"it proposed token {unknown}, which the target does not have")
        if not drafter.is_drawn:
            if any(q is not None for q in tree.q[start:]):
                raise ValueError("it gave the distribution of a token without drawing tokens")
            return
        is_chain = tree.parents == list(range(-1, len(tree) - 1))
        if not (is_chain or drafter.grows_trees) or len(tree) > (limit.nodes if drafter.grows_trees else limit.depth):
            raise ValueError(f"drawn tokens have to form a chain of the {limit.depth} that it was asked for at most")
        for token, q in zip(tokens, tree.q[start:], strict=True):
            if q is None or q.shape != (self._vocab_size,) or not q[token] > 0:
                raise ValueError(f"token {token} is not drawn from the distribution that it gave")
            if not (abs(float(q.sum()) - 1.0) <= _MAX_EXCESS and q.min() >= 0):
                raise ValueError(f"the probabilities that it gave are no distribution: they add up to {q.sum():.4g}")
        for node, earlier in _list_siblings(tree, start):
            q = tree.q[node]
            if q is not None and q[tree.tokens[earlier]] > 0:
                raise ValueError(f"token {tree.tokens[node]} is drawn from a distribution that has a token before it")


def _list_siblings(tree: DraftTree, start: int) -> Iterator[tuple[int, int]]:
    """(node, a sibling before it) of the nodes from `start` on."""
    for node in range(start, len(tree)):
        yield from ((node, each) for each in tree.children(tree.parents[node]) if each < node)


class _Guard:
    """A block that runs a drafter's code. Any error but STOPS ends the block and drops the drafter.

    A class, since a generator of contextlib takes some microseconds, and a round has several such blocks.
    """

    __slots__ = ("_drafter", "_drop")

    def __init__(self, drafter: Drafter, drop: Callable[[Drafter, BaseException], None]) -> None:
        self._drafter = drafter
        self._drop = drop

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is None or isinstance(error, STOPS):
            return False
        self._drop(self._drafter, error)
        return True
