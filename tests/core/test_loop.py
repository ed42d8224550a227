"""The loop on toy sessions: the text is that of plain decoding for any draft, and every token is counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.autopilot.fixed import FixedLength
from edgespec.backends.toy_session import Kind, ToyModel, ToySession
from edgespec.cancel import iterate
from edgespec.core.loop import speculate
from edgespec.core.peers import Yield
from edgespec.core.protocols import Budget, PrefillProgress, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.errors import Cancelled, ContextOverflow
from tests.core.toys import KINDS, Alarm, GuessingDrafter, RandomBudgets, decode, open_session

V = 6
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.5, penalty_window=5),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=4, top_p=0.9),
    SamplingParams(temperature=1.3, presence_penalty=0.5, frequency_penalty=0.3, penalty_window=4),
]


@dataclass
class Case:
    """A request on a session, with the answer of plain decoding."""

    seed: int
    kind: Kind
    params: SamplingParams
    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    context_size: int
    aim: float
    eager: bool

    def __post_init__(self) -> None:
        self.model = ToyModel(self.seed, V, 2, 1.5)
        self.sampler = Sampler(self.params, V)
        self.expected = self.plain(self.prompt, self.max_tokens)

    def plain(self, prompt: list[int], max_tokens: int) -> list[int]:
        return decode(self.model, self.sampler, self.seed, prompt, max_tokens, self.stop, self.context_size)

    def budgets(self, seed: int) -> RandomBudgets:
        names = ("guess", "other") if self.kind == "tree" else ("guess",)
        return RandomBudgets([self.drafter(name) for name in names], np.random.default_rng(seed))

    def drafter(self, name: str = "guess") -> GuessingDrafter:
        rng = np.random.default_rng([self.seed, len(name)])
        truth = [*self.prompt, *self.expected]
        return GuessingDrafter(rng, V, truth, tree=self.kind == "tree", aim=self.aim, eager=self.eager, name=name)


cases = st.builds(
    Case,
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(KINDS),
    params=st.sampled_from(SAMPLING),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=9),
    max_tokens=st.integers(1, 30),
    stop=st.frozensets(st.integers(0, V - 1), max_size=2),
    context_size=st.sampled_from([9, 10, 12, 20, 256]),
    aim=st.sampled_from([0.0, 0.6, 0.95]),
    eager=st.booleans(),
)


def run(case: Case, session: ToySession, budgets: RandomBudgets, alarm: Alarm, origins: list[str]) -> list[Step]:
    """Steps of one generation, and the origin of each token; the position is checked after each step."""
    steps = []

    def emit(token: int, origin: str) -> bool:
        origins.append(origin)
        return False

    generating = speculate(
        session,
        budgets,
        SampleMatching(case.sampler, CounterRng(case.seed)),
        case.prompt,
        max_tokens=case.max_tokens,
        stop=case.stop,
        emit=emit,
    )
    events = iterate(generating, alarm)
    n = len(case.prompt)
    for event in events:
        if isinstance(event, PrefillProgress):
            assert session.position == event.done <= event.total == n
            continue
        if isinstance(event, Yield):
            continue
        steps.append(event)
        n += len(event.tokens)
        assert session.position == n - 1
    return steps


@given(cases)
@settings(max_examples=120, deadline=None)
def test_speculation_changes_nothing_but_speed(case: Case) -> None:
    session = open_session(case.kind, case.model, case.context_size)
    budgets, origins = case.budgets(case.seed), list[str]()
    steps = run(case, session, budgets, Alarm(0), origins)
    tokens = [token for step in steps for token in step.tokens]
    assert tokens == case.expected
    assert len(tokens) <= case.max_tokens
    assert not case.stop & set(tokens[:-1])
    ended = tokens[-1] in case.stop or len(tokens) == case.max_tokens
    assert ended or len(case.prompt) + len(tokens) == case.context_size + 1

    assert [step.index for step in steps] == list(range(len(steps)))
    assert budgets.recorded == steps[1:]
    assert (len(steps[0].tokens), steps[0].n_drafted, steps[0].n_accepted, steps[0].n_tested) == (1, 0, 0, 0)
    assert budgets.begun == [case.prompt] * (len(steps) > 1), "not for a text that ends with its first token"
    for drafter in budgets.drafters:
        assert drafter.begun == budgets.begun
        assert drafter.observed == budgets.rounds, "every drafter hears of every round, whoever drafted it"
    check_accounts(case, budgets, steps, origins)


def check_accounts(case: Case, budgets: RandomBudgets, steps: list[Step], origins: list[str]) -> None:
    """Compare steps, rounds and origins with the drafts, walked by the emitted tokens."""
    history, at = [*case.prompt, *steps[0].tokens], 1
    assert origins[0] == "" and len(origins) == sum(len(step.tokens) for step in steps)
    assert len(budgets.rounds) == len(steps) - 1
    for step, done in zip(steps[1:], budgets.rounds, strict=True):
        tokens, limit, draft = budgets.proposed[len(history)]
        room = min(len(case.prompt) + case.max_tokens, case.context_size + 1) - len(history)
        assert tokens == history
        assert limit.depth == room - 1
        assert limit.nodes == case.context_size - len(history)
        path, node, rejected = list[int](), -1, 0
        for token in step.tokens:
            child = next((c for c in draft.children(node) if draft.tokens[c] == token), None)
            if child is None:
                rejected = int(len(draft.children(node)) > 0)
                break
            node = child
            path.append(child)
        history += step.tokens
        assert (step.n_drafted, step.n_accepted, step.n_tested) == (len(draft), len(path), len(path) + rejected)
        assert len(step.tokens) - len(path) in (0, 1)
        assert done.draft is draft
        assert done.text == tuple(history)
        assert (done.emitted, done.path, done.n_tested) == (step.tokens, tuple(path), step.n_tested)
        expected = [draft.drafters[node] for node in path] + [""] * (len(step.tokens) - len(path))
        assert origins[at : at + len(step.tokens)] == expected
        at += len(step.tokens)


@given(cases, st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_a_cancelled_session_can_go_on(case: Case, calls: int) -> None:
    alarm = Alarm(calls)
    session = open_session(case.kind, case.model, case.context_size)
    budgets = case.budgets(case.seed)
    try:
        run(case, session, budgets, alarm, [])
    except Cancelled:
        done = [*case.prompt, *(token for step in budgets.recorded for token in step.tokens)]
        assert session.position <= max(len(done), len(case.prompt))
    alarm.silence()
    again = run(case, session, case.budgets(1), alarm, [])
    assert [token for step in again for token in step.tokens] == case.expected


@given(cases, st.integers(0, 8), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_next_turn_reuses_the_session(case: Case, keep: int, steps: int) -> None:
    session = open_session(case.kind, case.model, case.context_size)
    events = speculate(
        session,
        FixedLength([case.drafter()], Budget(3, 5), V),
        SampleMatching(case.sampler, CounterRng(case.seed)),
        case.prompt,
        max_tokens=case.max_tokens,
        stop=case.stop,
    )
    for event in events:
        steps -= isinstance(event, Step)
        if not steps:
            break
    events.close()  # the listener walked away
    case.prompt = [*case.prompt[:keep], 0]
    case.expected = case.plain(case.prompt, case.max_tokens)
    again = run(case, session, case.budgets(2), Alarm(0), [])
    assert [token for step in again for token in step.tokens] == case.expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_is_not_prefilled_again(kind: Kind) -> None:
    session = open_session(kind, ToyModel(0, V))
    prompt = [1, 2, 3, 4, 5, 0, 1, 2]
    for _ in session.prefill(prompt):
        pass
    session.checkpoint()
    progress = [event.done for event in session.prefill([*prompt, 3])]
    assert progress == [9]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_starts_where_this_prompt_ended(kind: Kind) -> None:
    """Also on a recurrent model, whose cache can only return to a checkpoint."""
    prompt = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    case = Case(3, kind, SAMPLING[0], prompt, 10, frozenset(), 64, 0.5, False)
    session = open_session(kind, case.model, 64)
    run(case, session, case.budgets(0), Alarm(0), [])
    other = (case.expected[0] + 1) % V
    assert [event.done for event in session.prefill([*prompt, other])] == [11]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_fills_the_context_gets_one_token(kind: Kind) -> None:
    case = Case(3, kind, SAMPLING[0], [1, 2, 3, 4, 5], 10, frozenset(), 5, 0.5, False)
    session, budgets = open_session(kind, case.model, 5), case.budgets(0)
    steps = run(case, session, budgets, Alarm(0), [])
    assert [len(step.tokens) for step in steps] == [1]
    case.prompt.append(0)
    with pytest.raises(ContextOverflow):
        run(case, session, budgets, Alarm(0), [])


def test_a_turn_ends_with_the_first_token_so_that_it_is_shown_before_the_next_forward() -> None:
    def turns(max_tokens: int) -> list[type]:
        session = open_session("chain", ToyModel(1, V, 2, 1.5), 64)
        verifier = SampleMatching(Sampler(SamplingParams(temperature=0), V), CounterRng(1))
        events = list(speculate(session, FixedLength((), Budget(0, 0), V), verifier, [1, 2], max_tokens=max_tokens,
                                stop=frozenset()))  # fmt: skip
        return [type(event) for event in events[[type(each) for each in events].index(Step) :]]

    assert turns(2) == [Step, Yield, Yield, Step]
    assert turns(1) == [Step]
