"""The autopilot in the loop on the toy backend: its decisions do not change the text of plain decoding."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.toy.session import ToyModel, ToySession
from edgespec.controller.adaptive import Autopilot
from edgespec.controller.cost_model import CostModel, Profile
from edgespec.controller.stats import DraftStats
from edgespec.core.loop import speculate
from edgespec.core.protocols import Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import AutoVerifier, BlockVerification, SampleMatching
from edgespec.drafters.draft_model import DraftModelStepper, GreedyTopK, Sampled
from edgespec.errors import Cancelled
from tests.core.stats import assert_follows
from tests.core.toys import KINDS, Alarm, decode, open_session

V = 6
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.5, penalty_window=5),
    SamplingParams(temperature=0.8, top_k=4, top_p=0.9),
]


class Cheap(CostModel):
    """A fixed cost model: more rows and drafted tokens cost next to nothing, so that much is drafted."""

    def observe(self, rows: int, position: int, seconds: float) -> None:
        super().observe(rows, position, 1.0 + 0.01 * rows)

    def observe_drafted(self, seconds: float) -> None: ...


def cheap() -> DraftStats:
    draft_stats = DraftStats(Profile({1: 1.0, 16: 1.1}, 0.01, 0.001))
    draft_stats.costs = Cheap(draft_stats.costs.profile)
    return draft_stats


@dataclass
class Case:
    seed: int
    kind: str
    params: SamplingParams
    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    context_size: int
    draft_seed: int | None  # None: lookups alone; the target's own seed: a draft that is always right
    draft_context: int

    def __post_init__(self) -> None:
        self.model = ToyModel(self.seed, V, 2, 1.5)
        self.sampler = Sampler(self.params, V)
        self.expected = decode(
            self.model, self.sampler, self.seed, self.prompt, self.max_tokens, self.stop, self.context_size
        )

    def draft_session(self) -> ToySession | None:
        if self.draft_seed is None:
            return None
        return open_session("tree", ToyModel(self.draft_seed, V, 2, 1.5), self.draft_context)

    def controller(self, session: ToySession, draft: ToySession | None, draft_stats: DraftStats) -> Autopilot:
        stepper = DraftModelStepper(draft, V, GreedyTopK()) if draft is not None else None
        return Autopilot(draft_stats, "toy", stepper, trees=session.capabilities.tree)

    def run(self, session: ToySession, controller: Autopilot, alarm: Alarm | None = None) -> list[Step]:
        verifier = SampleMatching(self.sampler, CounterRng(self.seed))
        events = speculate(
            session,
            controller,
            verifier,
            self.prompt,
            max_tokens=self.max_tokens,
            stop=self.stop,
            check=alarm or (lambda: None),
        )
        return [event for event in events if isinstance(event, Step)]


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    params=st.sampled_from(SAMPLING),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=40),
    max_tokens=st.integers(1, 40),
    stop=st.frozensets(st.integers(0, V - 1), max_size=1),
    context_size=st.sampled_from([48, 256]),
    draft_seed=st.none() | st.integers(0, 1000),
    draft_context=st.sampled_from([16, 256]),
)


@given(cases, st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_text_is_plain_decodings(case: Case, agrees: bool) -> None:
    if agrees and case.draft_seed is not None:
        case.draft_seed = case.seed
    session, draft, draft_stats = open_session(case.kind, case.model, case.context_size), case.draft_session(), cheap()
    for _ in range(2):  # the second time with what was learned, and the sessions as they were left
        steps = case.run(session, case.controller(session, draft, draft_stats))
        assert [token for step in steps for token in step.tokens] == case.expected
        assert session.position <= case.context_size
        for step in steps[1:]:
            assert step.decision is not None
            if not session.capabilities.tree:
                assert step.n_tested <= step.n_accepted + 1 <= step.n_drafted + 1


def test_a_draft_that_is_always_right_is_used_in_full() -> None:
    case = Case(3, "tree", SAMPLING[0], [1, 2, 3], 120, frozenset(), 256, 3, 256)
    session = open_session("tree", case.model)
    steps = case.run(session, case.controller(session, case.draft_session(), cheap()))
    assert [token for step in steps for token in step.tokens] == case.expected
    assert len(steps) < 30, "four tokens a round and more"
    assert {step.decision.source for step in steps[1:] if step.decision and step.n_drafted} <= {
        "model",
        "ngram",
        "model+ngram",
    }


def test_a_draft_model_with_a_small_context_is_given_the_texts_end() -> None:
    case = Case(3, "tree", SAMPLING[0], [1, 2, 3] * 10, 60, frozenset(), 256, 3, 16)
    session, draft = open_session("tree", case.model), case.draft_session()
    steps = case.run(session, case.controller(session, draft, cheap()))
    assert [token for step in steps for token in step.tokens] == case.expected
    assert any(step.decision and step.decision.walked for step in steps)
    assert draft is not None and draft.position <= 16


@given(cases, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_after_a_cancellation_everything_goes_on(case: Case, calls: int) -> None:
    alarm = Alarm(calls)
    session = open_session(case.kind, case.model, case.context_size, alarm)
    draft, draft_stats = case.draft_session(), cheap()
    with contextlib.suppress(Cancelled):
        case.run(session, case.controller(session, draft, draft_stats), alarm)
    alarm.silence()
    steps = case.run(session, case.controller(session, draft, draft_stats))
    assert [token for step in steps for token in step.tokens] == case.expected


@pytest.mark.parametrize("draft_seed", [7, 8])
def test_sampled_chains_keep_the_distribution(draft_seed: int) -> None:
    """The joint distribution of three tokens, with drafts sampled from a model and lookups between them."""
    params = SamplingParams(temperature=1.0)
    model, sampler = ToyModel(7, 4, 2, 1.5), Sampler(params, 4)
    session, draft = open_session("tree", model), open_session("tree", ToyModel(draft_seed, 4, 2, 1.5))
    draft_stats, prompt, runs = cheap(), [1, 2, 1, 2, 1], 3000
    for _ in range(3):  # measured plain rounds, which the first generation would have to spend
        draft_stats.costs.observe(1, 5, 1.0)
    counts = np.zeros((4, 4, 4))
    drawn = 0
    for seed in range(runs):
        stepper = DraftModelStepper(draft, 4, Sampled(sampler, np.random.default_rng([seed, 2])))
        random_source = CounterRng(seed)
        verifier = AutoVerifier(SampleMatching(sampler, random_source), BlockVerification(sampler, random_source))
        text: list[int] = []
        controller = Autopilot(draft_stats, "toy", stepper, trees=True)
        for event in speculate(session, controller, verifier, prompt, max_tokens=3, stop=frozenset()):
            if isinstance(event, Step):
                text += event.tokens
                drawn += event.decision is not None and event.decision.source == "model"
        counts[tuple(text)] += 1
    assert drawn > runs / 4
    distribution = np.zeros((4, 4, 4))
    for a, b in np.ndindex(4, 4):
        p = [sampler.distribution(model.logits([*prompt, *more]), prompt).dense(4) for more in ([], [a], [a, b])]
        distribution[a, b] = p[0][a] * p[1][b] * p[2]
    assert_follows(counts.ravel(), distribution.ravel())
