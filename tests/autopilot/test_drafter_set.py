"""DrafterSet: what a drafter raises or gets wrong costs its proposals, never the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from edgespec.autopilot.acceptance import AcceptanceModel
from edgespec.autopilot.drafter_set import DrafterSet
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Round
from edgespec.errors import BackendError, Cancelled
from tests.autopilot.replay import NO_SCORES

V = 8
TEXT = [1, 2, 3]
DONE = Round([*TEXT, 4], (4,), NO_DRAFT, (), 0, NO_SCORES)
LIMIT = Budget(4, 4)


class Panic(BaseException):
    """As pyo3's PanicException is one."""


class Counting(Drafter):
    """Drafts a chain of 5, 6, 7 ...; raises `error` in the method `fails_in`, at the unit `at` of an expand."""

    def __init__(self, name: str, fails_in: str = "", error: BaseException | None = None, at: int = 0) -> None:
        self.name = name
        self._fails_in = fails_in
        self._error = error
        self._at = at
        self.calls: list[str] = []

    def _note(self, method: str) -> None:
        self.calls.append(method)
        if method == self._fails_in and self._error is not None:
            raise self._error

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self._note("begin")

    def pending_tokens(self, text: Sequence[int]) -> int:
        self._note("unread")
        return 2

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        node = -1
        for i in range(limit.depth):
            node = tree.add(node, (5 + i) % V, self.name, 0.5)
            if i == self._at:
                self._note("expand")
            yield

    def draft_async(self, text: Sequence[int], limit: Budget) -> Draft | None:
        self._note("draft_async")
        return Draft.chain([5, 6])

    def observe(self, done: Round) -> Sequence[Outcome]:
        self._note("observe")
        return (Outcome(0.5, True),)


def drive(drafters: DrafterSet) -> DraftTree:
    """Everything that a controller may call in a round."""
    tree = DraftTree()
    drafters.begin(TEXT)
    for drafter in drafters:
        drafters.pending_tokens(drafter, TEXT)
        drafters.draft_async(drafter, TEXT, LIMIT)
    for drafter in drafters:
        for _ in drafters.expand(drafter, tree, TEXT, LIMIT):
            pass
    hear(drafters)
    return tree


def hear(drafters: DrafterSet) -> list[tuple[Drafter, Outcome]]:
    """What the drafters would have said about a round, learned as the autopilot does."""
    acceptance, found = AcceptanceModel("probability"), []

    def learn(drafter: Drafter, outcomes: Sequence[Outcome]) -> None:
        for each in outcomes:
            acceptance.observe(each.confidence, each.is_right)
            found.append((drafter, each))

    drafters.observe(DONE, learn)
    return found


@pytest.mark.parametrize("method", ["begin", "unread", "draft_async", "expand", "observe"])
@pytest.mark.parametrize(
    "error",
    [ValueError("it is broken."), KeyError("x"), BackendError("no device.", hint=""), SystemExit(3), Panic("of Rust")],
)
def test_a_drafter_that_raises_is_dropped_and_the_others_go_on(method: str, error: BaseException) -> None:
    bad, good = Counting("bad", method, error), Counting("good")
    drafters = DrafterSet([bad, good], V)
    tree = drive(drafters)
    assert list(drafters.failures) == ["bad"]
    assert drafters.failures["bad"].count(".") == drafters.failures["bad"].endswith(".") == 1
    assert [each.name for each in drafters] == ["good"] and len(tuple(drafters)) == 1
    assert {name for votes in tree.votes for name in votes} == ({"good", "bad"} if method == "observe" else {"good"})
    heard = len(bad.calls)
    assert drive(drafters).votes == [{"good": 0.5}] * 4
    assert len(bad.calls) == heard, "it is not called again"
    assert good.calls == ["begin", "unread", "draft_async", "expand", "observe"] * 2


@pytest.mark.parametrize("method", ["begin", "unread", "draft_async", "expand", "observe"])
@pytest.mark.parametrize("error", [Cancelled(), KeyboardInterrupt()])
def test_a_cancellation_is_no_failure(method: str, error: BaseException) -> None:
    drafters = DrafterSet([Counting("bad", method, error), Counting("good")], V)
    with pytest.raises(type(error)):
        drive(drafters)
    assert not drafters.failures and len(tuple(drafters)) == 2


@pytest.mark.parametrize("at", [0, 1, 3])
def test_only_the_nodes_of_the_faulty_unit_are_taken_back(at: int) -> None:
    bad = Counting("bad", "expand", ValueError("it is broken"), at)
    drafters, tree = DrafterSet([bad, Counting("good")], V), DraftTree()
    tree.add(-1, 1, "good", 0.9)
    n_units = sum(1 for _ in drafters.expand(bad, tree, TEXT, LIMIT))
    assert n_units == at
    assert tree.tokens == [1, *range(5, 5 + at)] and "bad" in drafters.failures
    assert 5 + at not in [tree.tokens[node] for node in tree.children(at if at else -1)]


class Proposing(Drafter):
    """One unit that `propose` fills."""

    name = "plugin"

    def __init__(self, propose: Callable[[DraftTree], Any], *, is_drawn: bool = False) -> None:
        self._propose = propose
        self.is_drawn = is_drawn

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._propose(tree)
        yield


class Eager(Proposing):
    """Proposes when it is called, and has no units."""

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        self._propose(tree)
        return iter(())


class Late(Proposing):
    """Proposes after its last unit."""

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        yield
        self._propose(tree)


Q = np.full(V, 1 / V)
ZERO_AT_3 = np.array([0.2, 0.2, 0.2, 0.0, 0.2, 0.2, 0.0, 0.0])
REFUSED: dict[str, tuple[bool, Callable[[DraftTree], Any]]] = {
    "a token beyond the vocabulary": (False, lambda tree: tree.add(-1, V, "plugin", 0.5)),
    "a negative token": (False, lambda tree: tree.add(-1, -1, "plugin", 0.5)),
    "a good token, then a bad one": (False, lambda tree: tree.add_chain([2, V], "plugin", [0.5, 0.5])),
    "draws beside each other": (True, lambda tree: [tree.add(-1, token, "plugin", 0.5, Q) for token in (2, 3)]),
    "more draws than it was asked for": (True, lambda tree: [tree.add(i, 2, "plugin", 0.5, Q) for i in range(4)]),
    "a parent that does not exist": (False, lambda tree: tree.add(7, 1, "plugin", 0.5)),
    "a parent below the root": (False, lambda tree: tree.add(-2, 1, "plugin", 0.5)),
    "a distribution without draws": (False, lambda tree: tree.add(-1, 2, "plugin", 0.5, Q)),
    "a draw without its distribution": (True, lambda tree: tree.add(-1, 2, "plugin", 0.5)),
    "a distribution over another vocabulary": (True, lambda tree: tree.add(-1, 2, "plugin", 0.5, Q[:-1])),
    "a distribution of two dimensions": (True, lambda tree: tree.add(-1, 2, "plugin", 0.5, Q[None])),
    "a draw of probability zero": (True, lambda tree: tree.add(-1, 3, "plugin", 0.5, ZERO_AT_3)),
    "a draw of no probability": (True, lambda tree: tree.add(-1, 3, "plugin", 0.5, np.full(V, np.nan))),
    "weights that are no distribution": (True, lambda tree: tree.add(-1, 2, "plugin", 0.5, 20_480 * Q)),
    "probabilities below zero": (
        True,
        lambda tree: tree.add(-1, 2, "plugin", 0.5, Q + np.array([2, 0, 0, -2, 0, 0, 0, 0])),
    ),
    "another name": (False, lambda tree: tree.add(-1, 2, "other", 0.5)),
    "a vote under another name": (False, lambda tree: tree.add(-1, 1, "other", 0.5)),
    "a confidence of nothing": (False, lambda tree: tree.add(-1, 2, "plugin", None)),  # type: ignore[arg-type]
    "a confidence that is no number": (False, lambda tree: tree.add(-1, 2, "plugin", float("nan"))),
    "a vote of no number": (False, lambda tree: tree.add(-1, 1, "plugin", float("nan"))),
}


@pytest.mark.parametrize("kind", [Proposing, Eager, Late])
@pytest.mark.parametrize("name", REFUSED)
def test_proposals_that_cannot_be_scored_are_refused(name: str, kind: type[Proposing]) -> None:
    is_drawn, propose = REFUSED[name]
    plugin, tree = kind(propose, is_drawn=is_drawn), DraftTree()
    tree.add(-1, 1, "good", 0.9, Q if is_drawn else None)
    drafters = DrafterSet([Counting("good"), plugin], V)
    for _ in drafters.expand(plugin, tree, TEXT, LIMIT):
        pass
    assert list(drafters.failures) == ["plugin"], name
    assert tree.tokens == [1] and tree.votes == [{"good": 0.9}], "nothing of it is left"


def test_a_spoilt_vote_for_an_earlier_token_does_not_count() -> None:
    class Spoiling(Counting):
        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            tree.add(-1, 5, self.name, 0.5)
            yield
            tree.add(-1, 5, self.name, float("nan"))
            yield

    spoiling, tree = Spoiling("bad"), DraftTree()
    drafters = DrafterSet([spoiling], V)
    assert sum(1 for _ in drafters.expand(spoiling, tree, TEXT, LIMIT)) == 1
    assert (tree.tokens, tree.votes, list(drafters.failures)) == ([5], [{"bad": 0.5}], ["bad"])


@pytest.mark.parametrize("is_drawn", [False, True])
def test_sound_proposals_are_kept(is_drawn: bool) -> None:
    def propose(tree: DraftTree) -> None:
        node = tree.add(-1, 0, "plugin", 0.5, Q if is_drawn else None)
        tree.add(node, V - 1, "plugin", 0.5, Q if is_drawn else None)

    plugin, tree = Proposing(propose, is_drawn=is_drawn), DraftTree()
    drafters = DrafterSet([plugin], V)
    assert sum(1 for _ in drafters.expand(plugin, tree, TEXT, LIMIT)) == 1
    assert tree.tokens == [0, V - 1] and not drafters.failures


UNREAD: dict[str, Any] = {
    "too many": Draft.chain([5] * 5),
    "a token beyond the vocabulary": Draft.chain([5, V]),
    "a negative token": Draft.chain([-1]),
    "drawn tokens": Draft.chain([5], Q[None]),
    "a tree": Draft(np.array([5, 6], np.int32), np.array([-1, -1], np.int32)),
    "no draft": 3,
}


@pytest.mark.parametrize("name", UNREAD)
def test_unread_chains_that_cannot_be_scored_are_refused(name: str) -> None:
    class Strange(Counting):
        def draft_async(self, text: Sequence[int], limit: Budget) -> Draft | None:
            return UNREAD[name]  # type: ignore[no-any-return]

    strange = Strange("strange")
    drafters = DrafterSet([strange], V)
    assert drafters.draft_async(strange, TEXT, LIMIT) is None
    assert list(drafters.failures) == ["strange"]
    good = Counting("good")
    assert len(DrafterSet([good], V).draft_async(good, TEXT, LIMIT) or ()) == 2


@pytest.mark.parametrize("outcomes", [None, 3, [None], [("0.5", True)], [Outcome(None, True)]])  # type: ignore[arg-type]
def test_outcomes_that_are_none_are_refused(outcomes: Any) -> None:
    class Vague(Counting):
        def observe(self, done: Round) -> Sequence[Outcome]:
            return outcomes  # type: ignore[no-any-return]

    good = Counting("good")
    drafters = DrafterSet([Vague("vague"), good], V)
    assert hear(drafters) == [(good, Outcome(0.5, True))]
    assert list(drafters.failures) == ["vague"]


@pytest.mark.parametrize("unread", [None, "3", -1])
def test_unread_that_is_no_number_is_refused(unread: Any) -> None:
    class Vague(Counting):
        def pending_tokens(self, text: Sequence[int]) -> int:
            return unread  # type: ignore[no-any-return]

    vague = Vague("vague")
    drafters = DrafterSet([vague], V)
    assert drafters.pending_tokens(vague, TEXT) == 3
    assert list(drafters.failures) == ["vague"]
