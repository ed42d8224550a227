"""The autopilot in the loop on the toy backend: its decisions do not change the text of plain decoding."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.cancel import iterate
from edgespec.core.drafter import Drafter
from edgespec.core.loop import speculate
from edgespec.core.protocols import Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import BlockVerification, SampleMatching
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.candidates import RequestDraw
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.pard import PardSession
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
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

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None: ...


def cheap() -> DraftStats:
    drafts = {"model": DraftCost({1: 0.01}, 0.001), "pard": DraftCost({1: 0.01, 4: 0.02, 16: 0.05}, 0.001)}
    draft_stats = DraftStats(Profile({1: 1.0, 16: 1.1}, drafts))
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
    draft_seeds: tuple[int | None, int | None]  # of a draft model and a PARD model; the target's seed: always right
    draft_context: int

    def __post_init__(self) -> None:
        self.model = ToyModel(self.seed, V, 2, 1.5)
        self.sampler = Sampler(self.params, V)
        self.expected = decode(
            self.model, self.sampler, self.seed, self.prompt, self.max_tokens, self.stop, self.context_size
        )

    def drafters(self) -> list[Drafter]:
        """As a slot has them: lookups, then those of `draft_seeds`."""
        model, pard = (
            None if seed is None else open_session("tree", ToyModel(seed, V, 2, 1.5), self.draft_context)
            for seed in self.draft_seeds
        )
        found: list[Drafter] = [NgramDrafter()]
        if model is not None:
            found.append(SequentialDrafter("model", ModelDraftSession(model, V)))
        if pard is not None:
            found.append(BlockDrafter("pard", PardSession(pard, V, mask_token=1)))
        return found

    def controller(self, session: ToySession, drafters: list[Drafter], draft_stats: DraftStats) -> Adaptive:
        return Adaptive(drafters, draft_stats, "toy", V, takes_trees=lambda: session.capabilities.tree)

    def run(self, session: ToySession, controller: Adaptive, alarm: Alarm | None = None) -> list[Step]:
        verifier = SampleMatching(self.sampler, CounterRng(self.seed))
        events = speculate(
            session,
            controller,
            verifier,
            self.prompt,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )
        return [event for event in iterate(events, alarm or (lambda: None)) if isinstance(event, Step)]


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    params=st.sampled_from(SAMPLING),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=40),
    max_tokens=st.integers(1, 40),
    stop=st.frozensets(st.integers(0, V - 1), max_size=1),
    context_size=st.sampled_from([48, 256]),
    draft_seeds=st.tuples(st.none() | st.integers(0, 1000), st.none() | st.integers(0, 1000)),
    draft_context=st.sampled_from([16, 256]),
)


@given(cases, st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_text_is_plain_decodings(case: Case, agrees: bool) -> None:
    if agrees:
        case.draft_seeds = (case.seed if case.draft_seeds[0] is not None else None, case.draft_seeds[1])
    session, drafters, draft_stats = open_session(case.kind, case.model, case.context_size), case.drafters(), cheap()
    for _ in range(2):  # the second time with what was learned, and the drafters as they were left
        controller = case.controller(session, drafters, draft_stats)
        steps = case.run(session, controller)
        assert [token for step in steps for token in step.tokens] == case.expected
        assert session.position <= case.context_size
        assert not controller.failures
        for step in steps[1:]:
            assert step.decision is not None
            assert step.decision.drafted.keys() <= {"model", "pard"}
            if not session.capabilities.tree:
                assert step.n_tested <= step.n_accepted + 1 <= step.n_drafted + 1


def test_all_three_kinds_of_drafters_take_part() -> None:
    """The PARD model is of another target, but pays where drafts cost next to nothing; the draft model is asked too."""
    case = Case(3, "tree", SAMPLING[0], [1, 2, 3], 200, frozenset(), 256, (3, 4), 256)
    session, draft_stats = open_session("tree", case.model), cheap()
    controller = case.controller(session, case.drafters(), draft_stats)
    steps = case.run(session, controller)
    controller.end()
    assert [token for step in steps for token in step.tokens] == case.expected
    drafted = Counter[str]()
    for step in steps[1:]:
        assert step.decision is not None
        drafted.update(step.decision.drafted)
    assert drafted["model"] > 0 and drafted["pard"] > 0 and drafted.keys() == {"model", "pard"}
    assert draft_stats.drafters.keys() == {"ngram; toy, answer", "model; toy, answer", "pard; toy, answer"}


def test_a_draft_model_with_a_small_context_is_given_the_texts_end() -> None:
    case = Case(3, "tree", SAMPLING[0], [1, 2, 3] * 10, 60, frozenset(), 256, (None, None), 16)
    session, draft = open_session("tree", case.model), open_session("tree", case.model, 16)
    model = SequentialDrafter("model", ModelDraftSession(draft, V))
    steps = case.run(session, case.controller(session, [NgramDrafter(), model], cheap()))
    assert [token for step in steps for token in step.tokens] == case.expected
    assert any(step.decision and step.decision.drafted.get("model") for step in steps)
    assert 0 < draft.position <= 16


@given(cases, st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_after_a_cancellation_everything_goes_on(case: Case, calls: int) -> None:
    alarm = Alarm(calls)
    session = open_session(case.kind, case.model, case.context_size)
    drafters, draft_stats = case.drafters(), cheap()
    with contextlib.suppress(Cancelled):
        case.run(session, case.controller(session, drafters, draft_stats), alarm)
    alarm.silence()
    steps = case.run(session, case.controller(session, drafters, draft_stats))
    assert [token for step in steps for token in step.tokens] == case.expected


def test_sampled_chains_keep_the_distribution() -> None:
    """The joint distribution of three tokens, with drafts sampled from a model and lookups between them."""
    params = SamplingParams(temperature=1.0)
    model, sampler = ToyModel(7, 4, 2, 1.5), Sampler(params, 4)
    session = open_session("tree", model)
    draft = SequentialDrafter("model", ModelDraftSession(open_session("tree", ToyModel(8, 4, 2, 1.5)), 4))
    drafters: list[Drafter] = [NgramDrafter(), draft]
    draft_stats, prompt, runs = cheap(), [1, 2, 1, 2, 1], 1500
    for _ in range(3):  # measured plain rounds, which the first generation would have to spend
        draft_stats.costs.observe(1, 5, 1.0)
    counts = np.zeros((4, 4, 4))
    drawn = 0
    for seed in range(runs):
        draw = RequestDraw(sampler, np.random.default_rng([seed, 2]))
        random_source = CounterRng(seed)
        verifier = BlockVerification(sampler, random_source)
        text: list[int] = []
        controller = Adaptive(drafters, draft_stats, "toy", 4, takes_trees=lambda: True, draw=draw)
        for event in speculate(session, controller, verifier, prompt, max_tokens=3, stop=frozenset()):
            if isinstance(event, Step):
                text += event.tokens
                drawn += event.decision is not None and event.decision.drafter == "model"
        counts[tuple(text)] += 1
    assert drawn > runs / 4
    distribution = np.zeros((4, 4, 4))
    for a, b in np.ndindex(4, 4):
        p = [sampler.distribution(model.logits([*prompt, *more]), prompt).dense(4) for more in ([], [a], [a, b])]
        distribution[a, b] = p[0][a] * p[1][b] * p[2]
    assert_follows(counts.ravel(), distribution.ravel())
