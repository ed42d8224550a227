"""The costs of drafters, measured on toy sessions: what is run, not how long it takes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import pytest

from edgespec.autopilot.profile import DraftCost
from edgespec.autopilot.profiler import measure_drafter, measure_drafters, measure_rows
from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.cancel import cancellable
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget, Draft, PrefillProgress
from edgespec.core.scores import Scores
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.pard import PardSession
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.errors import Cancelled
from tests.core.toys import Alarm

V = 12
MODEL = ToyModel(1, V)
TEXT = [(7 * i + 1) % V for i in range(24)]


class Recorded(ToySession):
    """Counts the rows of all forwards, and the tokens read by prefill."""

    def __init__(self, context_size: int = 256) -> None:
        super().__init__(MODEL, context_size=context_size)
        self.rows: list[int] = []
        self.read: list[int] = []

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self.rows.append(1 + len(draft))
        return super().forward(root, draft)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress, None, Scores]:
        progress = super().prefill(tokens)
        scores = yield from progress
        self.read.append(len(tokens))
        return scores


def sequential(session: ToySession) -> SequentialDrafter:
    return SequentialDrafter("model", ModelDraftSession(session, V))


def block(session: ToySession, size: int = 16) -> BlockDrafter:
    pard = PardSession(session, V, mask_token=3)
    pard.block_size = size
    return BlockDrafter("pard", pard)


class Busy(ToySession):
    """Beside a program that doubles the time of one row while the first `n_disturbed` forwards of one row run."""

    def __init__(self, n_disturbed: int) -> None:
        super().__init__(MODEL, context_size=256)
        self.n_disturbed, self.now = n_disturbed, 0.0

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        rows = 1 + len(draft)
        is_disturbed = rows == 1 and self.n_disturbed > 0
        self.n_disturbed -= rows == 1
        self.now += (1.0 + 0.1 * rows) * (1 + is_disturbed)
        return super().forward(root, draft)


@pytest.mark.parametrize("n_disturbed", [0, 4, 20])
def test_a_measurement_that_others_disturb_is_repeated(n_disturbed: int) -> None:
    session = Busy(n_disturbed)
    times = measure_rows(session, 10.0, clock=lambda: session.now)
    assert times == pytest.approx({rows: 1.0 + 0.1 * rows for rows in times}) and max(times) == 64


def test_a_measurement_that_stays_disturbed_has_no_cheap_rows() -> None:
    session = Busy(10_000)
    times = measure_rows(session, 0.0, clock=lambda: session.now)
    assert times[1] == pytest.approx(2.2) and min(times.values()) == times[1]


@pytest.mark.parametrize("is_real", [False, True])
def test_rows_that_seem_dearer_than_more_rows_are_measured_again(is_real: bool) -> None:
    """Four rows take twice as long while others run, or always, in a slow kernel."""

    class Bumpy(Busy):
        def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
            rows = 1 + len(draft)
            self.n_disturbed -= rows == 4
            self.now += (1.0 + 0.1 * rows) * (1 + (rows == 4 and (is_real or self.n_disturbed >= 0)))
            return ToySession.forward(self, root, draft)

    session = Bumpy(6)
    times = measure_rows(session, 10.0, clock=lambda: session.now)
    assert times[4] == pytest.approx(2.8 if is_real else 1.4) and times[8] == pytest.approx(1.8)


def test_a_sequential_drafter_has_one_kind_of_unit() -> None:
    session = Recorded()
    cost = measure_drafter(sequential(session), TEXT)
    assert cost is not None
    assert list(cost.units) == [1] and cost.units[1] > 0 and cost.read_s >= 0
    assert session.rows.count(1) >= 6, "one forward for each token"
    assert sum(session.read) >= 2 * (len(TEXT) - 2), "the text was read twice: the first time is a warm-up"


@pytest.mark.parametrize(("size", "lengths"), [(16, [1, 2, 4, 8, 16]), (6, [1, 2, 4]), (2, [1, 2])])
def test_a_block_drafter_has_a_cost_for_each_length(size: int, lengths: list[int]) -> None:
    session = Recorded()
    cost = measure_drafter(block(session, size), TEXT)
    assert cost is not None
    assert list(cost.units) == lengths and all(seconds > 0 for seconds in cost.units.values())
    assert set(lengths) <= set(session.rows), "a block of n is one forward of n rows"


def test_what_is_measured_leaves_no_trace_in_the_text() -> None:
    """A generation after the measurement drafts as one before."""
    fresh, measured = sequential(ToySession(MODEL)), sequential(ToySession(MODEL))
    measure_drafter(measured, TEXT)
    trees = []
    for drafter in (fresh, measured):
        tree = DraftTree()
        drafter.begin([1, 2, 3], None)
        for _ in drafter.expand(tree, [1, 2, 3, 4], Budget(3, 9)):
            pass
        trees.append((tree.tokens, tree.parents, tree.votes))
    assert trees[0] == trees[1]


class Silent(Drafter):
    name = "silent"

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        return iter(())


class Broken(Silent):
    name = "broken"

    def begin(self, text: Sequence[int], draw: object) -> None:
        raise ValueError("it is broken")


class Lazy(Silent):
    """Has chains that the device computes, and no other way."""

    name = "lazy"

    def draft_async(self, text: Sequence[int], limit: Budget) -> Draft | None:
        return Draft.chain([1] * limit.depth)


def test_unread_chains_are_measured_whole() -> None:
    cost = measure_drafter(Lazy(), TEXT)
    assert cost is not None and list(cost.units) == [1] and cost.read_s == 0.0


def test_all_drafters_that_take_time_are_measured() -> None:
    target = ToySession(MODEL)
    drafters = [NgramDrafter(), sequential(ToySession(MODEL)), Silent(), Broken(), block(ToySession(MODEL))]
    costs, failures = measure_drafters(drafters, target)
    assert list(costs) == ["model", "pard"] and all(isinstance(cost, DraftCost) for cost in costs.values())
    assert failures == {"broken": "it is broken."}
    assert target.position == 0


@pytest.mark.parametrize("context_size", [8, 20])
def test_a_small_context_is_enough(context_size: int) -> None:
    target = ToySession(MODEL, context_size=context_size)
    costs, failures = measure_drafters([sequential(ToySession(MODEL, context_size=context_size))], target)
    assert list(costs) == ["model"] and not failures
    assert 1 in measure_rows(target, 0.0)


def test_rows_that_just_fit_are_measured() -> None:
    """Behind the 8 tokens of the start, the warm-up and three forwards, 20 have room for 8 rows."""
    assert list(measure_rows(ToySession(MODEL, context_size=20), 0.0)) == [1, 2, 4, 8]


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_measurement_can_be_cancelled(calls: int) -> None:
    alarm = Alarm(calls)
    with pytest.raises(Cancelled), cancellable(alarm):
        measure_drafters([sequential(ToySession(MODEL)), block(ToySession(MODEL))], ToySession(MODEL))


def test_only_the_first_rows_are_measured_without_time() -> None:
    session = Recorded()
    assert list(measure_rows(session, 0.0)) == [1, 2, 4, 8]
    assert session.rows == [1, 1, 4, 2, 8, 1], "a warm-up, and one row twice"
