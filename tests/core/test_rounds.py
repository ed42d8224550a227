"""What a controller hears of each round, and the origin of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.loop import speculate
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, PrefillProgress, Round, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.scores import HostScores, Scores
from edgespec.core.verify import SampleMatching
from tests.core.toys import Maker, decode

V = 6
MODEL, GREEDY, PROMPT = ToyModel(4, V, 2, 1.5), Sampler(SamplingParams(temperature=0), V), [1, 2]


@dataclass
class Case:
    """A request, and the answer of plain decoding."""

    max_tokens: int
    stop: frozenset[int] = frozenset()
    expected: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = decode(MODEL, GREEDY, 4, PROMPT, self.max_tokens, self.stop, 256)


def true_drafts(case: Case, *, drafters: tuple[str, ...] = ()) -> Maker:
    """A controller that drafts the next eight tokens of the text, beyond the limit too."""
    text = [*PROMPT, *case.expected, 1, 1, 1]

    def make(tokens: Sequence[int], limit: Budget) -> Draft:
        chain = Draft.chain(text[len(tokens) :][:8])
        return Draft(chain.tokens, chain.parents, drafters=drafters[: len(chain)])

    return Maker(make)


def observe_all(case: Case, controller: Maker, stops_at: int | None = None) -> tuple[list[Round], list[str]]:
    """The rounds, and the origin of each token; the consumer ends the text after `stops_at` tokens."""
    origins: list[str] = []

    def emit(token: int, origin: str) -> bool:
        origins.append(origin)
        return len(origins) == stops_at

    session, verifier = ToySession(MODEL), SampleMatching(GREEDY, CounterRng(4))
    for _ in speculate(session, controller, verifier, PROMPT, max_tokens=case.max_tokens, stop=case.stop, emit=emit):
        pass
    return controller.rounds, origins


@pytest.mark.parametrize("cut", ["stop token", "length", "consumer"])
def test_a_round_that_ends_the_text_is_cut_for_its_observers_too(cut: str) -> None:
    """All drafted tokens would be accepted; the text ends at the sixth, which is the fifth of the draft."""
    case = Case(40)
    stop = case.expected[5]
    if cut == "stop token":
        case.stop = frozenset({stop})
    if cut == "length":
        case.max_tokens = 6
    n = case.expected.index(stop) + 1 if cut == "stop token" else 6
    rounds, origins = observe_all(case, true_drafts(case), 6 if cut == "consumer" else None)
    assert len(rounds) == 1 and n > 2
    done = rounds[0]
    assert done.text == (*PROMPT, *case.expected[:n])
    assert done.emitted == tuple(case.expected[1:n])
    assert done.path == tuple(range(n - 1)), "the last emitted token was drafted and accepted too"
    assert done.n_tested == n - 1, "nothing is known of the drafted tokens behind"
    assert origins == ["", *["made"] * (n - 1)]


def test_the_origin_of_a_token_is_its_nodes() -> None:
    """Without sources in the draft, the round's."""
    case = Case(10)
    _, origins = observe_all(case, true_drafts(case, drafters=("a", "b", "a+b", "b", "b", "a", "b", "a")))
    assert origins == ["", "a", "b", "a+b", "b", "b", "a", "b", "a", ""]
    _, origins = observe_all(case, true_drafts(case))
    assert origins == ["", *["made"] * 8, ""]
    rounds, origins = observe_all(case, Maker(lambda tokens, limit: NO_DRAFT))
    assert origins == [""] * 10
    assert [(done.emitted, done.path, done.n_tested, len(done.draft)) for done in rounds] == [
        ((token,), (), 0, 0) for token in case.expected[1:]
    ]


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_generation_begins_when_its_prompt_is_read(n: int) -> None:
    controller, verifier = true_drafts(Case(n)), SampleMatching(GREEDY, CounterRng(4))
    events = speculate(ToySession(MODEL), controller, verifier, PROMPT, max_tokens=n, stop=frozenset())
    assert isinstance(next(events), PrefillProgress)
    assert controller.begun == []
    list(events)
    assert controller.begun == [PROMPT] * (n > 1)


def test_a_drafter_that_reads_the_scores_takes_no_time_from_sampling() -> None:
    class Slow(HostScores):
        """Says that each read of a row has waited for the device for 100 s."""

        def logits(self, row: int) -> Logits:
            self.waited_s += 100.0
            return super().logits(row)

    class SlowSession(ToySession):
        def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
            scores = super().forward(root, draft, run_ahead=run_ahead)
            return Slow([scores.logits(row) for row in range(len(draft) + 1)])

    class Reading(Maker):
        """A drafter that learns from the scores."""

        n_read = 0

        def observe(self, done: Round) -> None:
            done.scores.logits(0)
            self.n_read += 1

    case = Case(12)
    controller, verifier = Reading(true_drafts(case)._make), SampleMatching(GREEDY, CounterRng(4))
    events = speculate(SlowSession(MODEL), controller, verifier, PROMPT, max_tokens=12, stop=frozenset())
    steps = [event for event in events if isinstance(event, Step)][1:]
    assert controller.n_read == len(steps) > 0
    assert all(step.sample_s >= 0 and step.verify_s < 100 for step in steps)
